"""Copies of this clone at a commit, with changes. git calls them worktrees."""

import ast
import contextlib
import hashlib
import os
import shutil

from plaingpt.base.errors import UserError
from plaingpt.base.source import CLONE, diff_since, run_git

# A run depends on no file in these folders of the clone, and on no page.
UNUSED = (
    "docs/",
    "experiments/",
    "lesson/",
    "log/",
    "tests/",
    "plaingpt/lab/",
    "experiment.py",
    ".",
)
PAGES = (".md", "LICENSE")


def find_commit(name):
    """Returns the full hash of the commit that --base names. Raises UserError."""
    if not (CLONE / ".git").exists():
        raise UserError(f"{CLONE}: has no .git, so there are no commits; clone plainGPT with git")
    commit = run_git("rev-parse", "--verify", f"{name}^{{commit}}").decode().strip()
    if not run_git("ls-tree", commit, "plaingpt/base/errors.py"):
        raise UserError(f"--base {name}: is from before plaingpt/base/; give a later commit")
    return commit


def changes_of_clone(commit):
    """Returns what was changed in this clone since a commit: (patch, untracked Python files).

    The patch is bytes. The files are relative paths.
    """
    changes = diff_since(commit)
    found = run_git("ls-files", "-z", "--others", "--exclude-standard", "*.py")
    # The link by which Emacs locks model.py has this end, too, but leads to no file.
    files = [name for name in os.fsdecode(found).split("\0") if (CLONE / name).is_file()]
    return changes, files


def check_committed(patch):
    """Raises UserError if a file that a patch changes has edits that are not in a commit.

    The edits would not be in the copies, because a patch changes a commit. patch: bytes.
    """
    lines = run_git("apply", "--numstat", "-z", "-", data=patch)  # added, deleted, name
    files = [line.rpartition("\t")[2] for line in os.fsdecode(lines).split("\0")[:-1]]
    edited = run_git("diff", "--name-only", "-z", "HEAD", "--", *files)
    if edited:
        name = os.fsdecode(edited).split("\0")[0]
        raise UserError(
            f"{name}: has changes that are not committed, and the patch changes a commit; "
            "commit or undo them first"
        )


def make_copy(place, commit, changes=b"", files=()):
    """Copies a commit, changes the copy, and adds files of this clone. Raises UserError.

    place: path of the copy. changes: a patch, as bytes. files: relative paths. A worktree of git
    has a HEAD of its own, so a run.json in it names its own changes.
    """
    shutil.rmtree(place, ignore_errors=True)
    run_git("worktree", "add", "--force", "--detach", place, commit)
    if changes:
        apply_patch(place, changes)
    for file in files:
        target = place / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CLONE / file, target)
        run_git("add", "--intent-to-add", file, place=place)  # so that changes.patch has it


def hash_of_copy(place):
    """Returns a hash of all files of a copy on which a run can depend, as a text.

    It is the same before and after a commit of the change. Comments and the layout of Python code
    do not count, nor do docs, tests and the lesson.
    """
    hashes = []
    listed = run_git("ls-files", "-z", place=place)
    for name in sorted(set(os.fsdecode(listed).split("\0"))):
        path = place / name
        if name.startswith(UNUSED) or name.endswith(PAGES) or not path.is_file():
            continue
        data = path.read_bytes()
        if path.suffix == ".py":
            with contextlib.suppress(SyntaxError, ValueError):  # the run will say what is wrong
                data = ast.unparse(ast.parse(data)).encode()
        hashes.append(f"{name} {hashlib.sha256(data).hexdigest()}")
    return hashlib.sha256("\n".join(hashes).encode("utf-8", "surrogateescape")).hexdigest()


def apply_patch(place, patch):
    """Applies a patch to a copy. Raises UserError.

    git merges it with later changes of the same file: the patch names the blob, which is the file
    that it was made from, and that is in the history of this clone. patch: bytes.
    """
    with contextlib.suppress(UserError):
        run_git("apply", "--3way", "-", place=place, data=patch)
        return
    conflicts = run_git("diff", "--name-only", "--diff-filter=U", "-z", place=place)
    if conflicts:
        name = os.fsdecode(conflicts).split("\0")[0]
        raise UserError(
            f"{name}: the patch and the commit change the same lines; "
            "run git apply --3way in your clone, edit the file, and make a new patch"
        )
    if run_git("rev-parse", "--is-shallow-repository").strip() == b"true":
        raise UserError(
            "the patch does not apply, and this shallow clone may not have the file that it was "
            "made from; run git fetch --unshallow"
        )
    run_git("apply", "-", place=place, data=patch)  # raises an error that says which line differs


def remove_copies(places):
    """Removes copies, also those that make_copy did not complete."""
    for place in places:
        # Not `git worktree prune`: it would also forget worktrees of the user on other disks.
        with contextlib.suppress(UserError):
            run_git("worktree", "remove", "--force", place)
        shutil.rmtree(place, ignore_errors=True)
