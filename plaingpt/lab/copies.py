"""Copies of this clone at a commit, with changes. The copies are git worktrees."""

import contextlib
import os
import shutil

from plaingpt.errors import UserError
from plaingpt.source_code import CLONE, diff_since, run_git


def changes_of_clone(commit):
    """Returns the changes in this clone since a commit: (patch, names of untracked .py files)."""
    found = run_git("ls-files", "-z", "--others", "--exclude-standard", "*.py")
    # Emacs locks model.py with a link whose name also ends with .py, but whose target is not a
    # file.
    files = [name for name in os.fsdecode(found).split("\0") if (CLONE / name).is_file()]
    return diff_since(commit), files


def make_copy(place, commit, changes=b"", files=()):
    """Copies a commit, then applies a patch and adds files to the copy.

    place: path of the copy. changes: the patch, as bytes. If the history contains the version of a
    file from which the patch was made, git merges the patch with later changes of this file. files:
    paths of the files to add, relative to the clone. The copy is a worktree with its own HEAD, so
    the changes.patch of a run in this copy contains the patch and the files.

    Raises UserError if the patch does not apply.
    """
    shutil.rmtree(place, ignore_errors=True)
    run_git("worktree", "add", "--force", "--detach", place, commit)
    if changes:
        try:
            run_git("apply", "--3way", "-", place=place, data=changes)
        except UserError:
            run_git("reset", "--hard", place=place)
            # The error message of this command names the line.
            run_git("apply", "-", place=place, data=changes)
    for file in files:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CLONE / file, place / file)
        run_git("add", "--intent-to-add", file, place=place)  # so that changes.patch contains it


def remove_copies(places):
    """Removes copies, even those that make_copy did not complete."""
    for place in places:
        # `git worktree prune` would also remove the user's worktrees on disks that are not mounted.
        with contextlib.suppress(UserError):
            run_git("worktree", "remove", "--force", place)
        shutil.rmtree(place, ignore_errors=True)
