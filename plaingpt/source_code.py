"""The source code of the programs: its git commit, its changes, and a hash of the code."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from plaingpt.errors import UserError, explaining, first_line
from plaingpt.terminal import print0

CLONE = Path(__file__).parents[1]
# These options override the user's git settings. With colors, different prefixes, fewer context
# lines or an external diff program, `git apply` could not read the patch.
DIFF = (
    "--binary",
    "--no-color",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--no-ext-diff",
    "--no-textconv",
    "--unified=3",
    "--inter-hunk-context=0",
    "-O/dev/null",
    "--submodule=short",
)
# `git apply` must not change a patch. Without the first setting, git may reject or remove
# whitespace at the end of a line.
SETTINGS = ("-c", "apply.whitespace=nowarn", "-c", "apply.ignoreWhitespace=no")
# git must use the repository in the current directory. Without these options, git may use the
# repository in a parent directory or in GIT_DIR, and refuses a repository that another user owns.
PLACE = ("--git-dir=.git", "--work-tree=.")


def run_git(*command, place=None, data=None):
    """Runs a git command in a directory. Returns its output, as bytes.

    place: the directory; default: this clone. data: the input of the command, as bytes. Raises
    UserError if the command fails.
    """
    # If a git hook of another repository runs this program, GIT_INDEX_FILE names the index of that
    # repository.
    env = {name: value for name, value in os.environ.items() if name != "GIT_INDEX_FILE"}
    with explaining(f"git {command[0]}", "see --help", (OSError, subprocess.CalledProcessError)):
        return subprocess.run(
            ["git", *PLACE, *SETTINGS, *command],
            cwd=place or CLONE,
            env=env,
            input=data,
            capture_output=True,
            check=True,
        ).stdout


def diff_since(commit):
    """Returns the changes in this clone's tracked files since a commit: a patch, as bytes."""
    return run_git("diff", *DIFF, commit)


def read_git():
    """Returns the state of this clone in git: (commit, names of untracked files, changes).

    changes: a patch, as bytes. All three are empty if the directory is not a clone, or if git
    fails. If git fails, this function prints a note.
    """
    commit = b""
    untracked = b""
    changes = b""
    if (CLONE / ".git").exists():
        try:
            commit = run_git("describe", "--always", "--exclude=*", "--abbrev=40", "--dirty")
            # With -z, git does not quote names that are not ASCII.
            untracked = run_git("ls-files", "-z", "--others", "--exclude-standard")
            changes = diff_since("HEAD")
        except UserError as error:
            reason = first_line(error.__cause__)
            if isinstance(error.__cause__, FileNotFoundError):
                reason = "it is not installed"
            print0(f"note: git does not work here ({reason}), so run.json lacks the commit")
    names = [name for name in untracked.decode(errors="replace").split("\0") if name]
    return commit.decode().strip(), names, changes


def hash_of_program():
    """Returns a hash of all Python files that the program has imported from this clone."""
    library = Path(os.__file__).parent
    files = set()
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None) or "/"
        if not name.startswith(str(CLONE)):
            continue  # most modules are torch's; a Path for each would take 0.05 s in total
        file = Path(name)
        # If a virtual environment is in the clone, the clone also contains Python's library and
        # installed packages.
        is_foreign = library in file.parents or "site-packages" in file.parts
        if CLONE in file.parents and file.suffix == ".py" and not is_foreign:
            files.add(file)
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()
