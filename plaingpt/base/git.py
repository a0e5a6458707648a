"""Runs commands of git."""

import subprocess
from pathlib import Path

from plaingpt.base.errors import explaining

CLONE = Path(__file__).parents[2]


def run_git(*command, place=None, data=None):
    """Runs a command of git in a directory -> its output, as bytes. Raises UserError.

    place: the directory; by default this clone. data: the input of the command.
    """
    with explaining(f"git {command[0]}", "see --help", (OSError, subprocess.CalledProcessError)):
        return subprocess.run(
            ["git", *command],
            cwd=place or CLONE,
            input=data,
            capture_output=True,
            check=True,
        ).stdout


def diff_since(commit):
    """Returns the changes of this clone's tracked files since a commit, as a patch, bytes."""
    # The settings of git may want colors, another program, one directory only or other prefixes.
    fixed = ("--no-color", "--no-ext-diff", "--no-relative", "--src-prefix=a/", "--dst-prefix=b/")
    return run_git("diff", "--binary", *fixed, commit)
