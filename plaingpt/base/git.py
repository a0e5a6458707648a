"""Runs commands of git."""

import subprocess
from pathlib import Path

from plaingpt.base.errors import explaining

CLONE = Path(__file__).parents[2]
# The user's settings of git may want colors, other prefixes, another program, fewer lines around a
# change, one directory only, an order of the files, or a description instead of a difference.
# `git apply` cannot read such a patch.
DIFF = (
    "--binary",
    "--no-color",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--no-ext-diff",
    "--no-textconv",
    "--unified=3",
    "--inter-hunk-context=0",
    "--no-relative",
    "-O/dev/null",
    "--submodule=short",
)
# `git apply` must apply a patch as it is. Without the first one, it may stop at white space at the
# end of a line, or remove it.
SETTINGS = ("-c", "apply.whitespace=nowarn", "-c", "apply.ignoreWhitespace=no")


def run_git(*command, place=None, data=None):
    """Runs a command of git in a directory -> its output, as bytes. Raises UserError.

    place: the directory; by default this clone. data: the input of the command.
    """
    with explaining(f"git {command[0]}", "see --help", (OSError, subprocess.CalledProcessError)):
        return subprocess.run(
            ["git", *SETTINGS, *command],
            cwd=place or CLONE,
            input=data,
            capture_output=True,
            check=True,
        ).stdout


def diff_since(commit):
    """Returns the changes of this clone's tracked files since a commit, as a patch, bytes."""
    return run_git("diff", *DIFF, commit)
