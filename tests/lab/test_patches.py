"""Tests that git merges each patch in experiments/ with later edits of nearby lines."""

import re
import subprocess

from plaingpt.errors import UserError
from plaingpt.lab.copies import make_copy

import pytest
from conftest import ROOT
from test_experiments import ENTROPY

PATCHES = sorted(ROOT.glob("experiments/*.patch"))
# An edit of attention: (old line, new line). Only the patch attention-entropy inserts code next to
# this line.
EDIT = (
    "k, v = cache.extend(k, v)  # (B, nh, T so far, hs) each\n",
    "k, v = cache.extend(k, v)  # (B, nh, T so far, hs) each; an edit\n",
)
AUTHOR = ["-c", "user.name=a", "-c", "user.email=a"]


def git(*command, cwd=ROOT):
    done = subprocess.run(["git", *command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_clone(directory):
    """Clones this repository. In the clone, commits this working tree's model.py and patches."""
    git("clone", ROOT, directory)
    for path in [ROOT / "model.py", *PATCHES]:
        (directory / path.relative_to(ROOT)).write_bytes(path.read_bytes())
    commit_all(directory)


def commit_all(directory):
    git(*AUTHOR, "commit", "--all", "--allow-empty", "--message", "edit", cwd=directory)


def edit_attention(directory):
    text = (directory / "model.py").read_text()
    assert text.count(EDIT[0]) == 1
    (directory / "model.py").write_text(text.replace(*EDIT))


def needs_history():
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("this clone is shallow; run git fetch --unshallow")


def test_each_patch_names_files_that_are_in_the_history():
    """git merges a patch only if the history contains the file versions that the patch changes."""
    needs_history()
    history = {line.split()[0] for line in git("rev-list", "--objects", "HEAD").splitlines()}
    for path in PATCHES:
        patch = path.read_text()
        blobs = re.findall(r"^index ([0-9a-f]{40})\.\.[0-9a-f]{40}", patch, re.M)
        assert len(blobs) == patch.count("diff --git "), f"{path.name}: use git diff --full-index"
        assert history.issuperset(blobs), f"{path.name}: commit the file, and make the patch again"


@pytest.mark.slow
def test_patches_are_merged_with_an_edit_of_attention(tmp_path, monkeypatch):
    """make_copy merges a patch with a later edit of the same file.

    The result is the same as if the user had applied the patch first, and then made the edit.
    """
    needs_history()
    make_clone(tmp_path / "clone")
    monkeypatch.setattr("plaingpt.source_code.CLONE", tmp_path / "clone")
    make_copy(tmp_path / "before", "HEAD")
    edit_attention(tmp_path / "clone")
    commit_all(tmp_path / "clone")
    for path in PATCHES:
        if path.stem == ENTROPY:
            with pytest.raises(UserError, match="^git apply .*model.py"):
                make_copy(tmp_path / "copy", "HEAD", path.read_bytes())
            continue
        make_copy(tmp_path / "copy", "HEAD", path.read_bytes())
        git("apply", path, cwd=tmp_path / "before")
        edit_attention(tmp_path / "before")
        for name in git("diff", "--name-only", cwd=tmp_path / "before").splitlines():
            expected = (tmp_path / "before" / name).read_bytes()
            assert (tmp_path / "copy" / name).read_bytes() == expected, (path.name, name)
        git("reset", "--hard", cwd=tmp_path / "before")
