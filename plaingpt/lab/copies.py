"""Copies of this clone at a commit, with changes. git calls them worktrees."""

import contextlib
import os
import shutil

from plaingpt.base.errors import UserError
from plaingpt.base.source import CLONE, diff_since, run_git


def changes_of_clone(commit):
    """Returns what has changed in this clone since a commit: (patch, untracked Python files)."""
    found = run_git("ls-files", "-z", "--others", "--exclude-standard", "*.py")
    # The link by which Emacs locks model.py also ends with .py, but leads to no file.
    files = [name for name in os.fsdecode(found).split("\0") if (CLONE / name).is_file()]
    return diff_since(commit), files


def make_copy(place, commit, changes=b"", files=()):
    """Copies a commit, and changes the copy. Raises UserError.

    place: path of the copy. changes: a patch, which git merges with later changes of the same file
    if the history contains the original file of the patch. files: paths in this clone. A worktree
    has its own HEAD, so the changes.patch of a run in the copy contains the changes.
    """
    shutil.rmtree(place, ignore_errors=True)
    run_git("worktree", "add", "--force", "--detach", place, commit)
    if changes:
        try:
            run_git("apply", "--3way", "-", place=place, data=changes)
        except UserError:
            run_git("reset", "--hard", place=place)
            run_git("apply", "-", place=place, data=changes)  # its error says which line differs
    for file in files:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CLONE / file, place / file)
        run_git("add", "--intent-to-add", file, place=place)  # so that changes.patch contains it


def remove_copies(places):
    """Removes copies, even those that make_copy did not complete."""
    for place in places:
        # `git worktree prune` would also forget the user's worktrees on other disks.
        with contextlib.suppress(UserError):
            run_git("worktree", "remove", "--force", place)
        shutil.rmtree(place, ignore_errors=True)
