"""The source code of the programs: what git says of it, and hashes that tell whether it changed."""

import contextlib
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from plaingpt.base.errors import UserError, explaining

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


def read_git():
    """Returns what git says about this clone: (commit, names of untracked files, changes).

    All are empty in a copy of the files without git.
    """
    commit = b""
    untracked = b""
    changes = b""
    with contextlib.suppress(UserError):
        commit = run_git("describe", "--always", "--abbrev=40", "--dirty")
        # With -z, git does not quote names that are not ASCII.
        listed = ("ls-files", "-z", "--others", "--exclude-standard", "--full-name", ":/")
        untracked = run_git(*listed)
        changes = diff_since("HEAD")
    names = [name for name in untracked.decode(errors="replace").split("\0") if name]
    return commit.decode().strip(), names, changes


def hash_of_files(paths):
    """Returns a hash of the contents of files, in this order."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def hash_of_program():
    """Returns a hash of the files of this clone that the program has imported."""
    library = Path(os.__file__).parent
    files = set()
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None) or "/"
        if not name.startswith(str(CLONE)):
            continue  # most modules are of torch; to make a Path of each would take 0.05 s
        file = Path(name)
        # Python itself and its packages may be in the clone, too.
        is_foreign = library in file.parents or "site-packages" in file.parts
        if CLONE in file.parents and file.suffix == ".py" and not is_foreign:
            files.add(file)
    return hash_of_files(sorted(files))
