"""Copies of this clone at a commit, with changes. git calls them worktrees."""

import os
import shutil

from plaingpt.base.errors import UserError
from plaingpt.base.git import CLONE, diff_since, run_git


def find_commit(name):
    """Returns the full hash of the commit that --base names. Raises UserError."""
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


def make_copy(place, commit, changes=b"", files=()):
    """Copies a commit, changes the copy, and adds files of this clone. Raises UserError.

    place: path of the copy. changes: a patch, as bytes. files: relative paths. A worktree of git
    has a HEAD of its own, so a run.json in it names its own changes.
    """
    shutil.rmtree(place, ignore_errors=True)
    run_git("worktree", "add", "--force", "--detach", place, commit)
    if changes:
        run_git("apply", "-", place=place, data=changes)
    for file in files:
        target = place / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CLONE / file, target)
        run_git("add", "--intent-to-add", file, place=place)  # so that changes.patch has it


def remove_copies(places):
    """Removes copies, also those that make_copy did not complete."""
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    run_git("worktree", "prune")
