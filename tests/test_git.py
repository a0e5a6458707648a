"""plaingpt/base/source.py: its patches do not depend on the user's settings."""

from plaingpt.base.errors import UserError
from plaingpt.base.source import diff_since, run_git
from plaingpt.lab.copies import find_commit, make_copy, remove_copies

import pytest

# The value of diff.external and of the drivers is a program. These settings are the user's own, and
# git has still others that only change how a difference looks.
SETTINGS = dict(
    color="color.ui=always",
    prefix="diff.noprefix=true",
    mnemonic="diff.mnemonicPrefix=true",
    context="diff.context=0",
    external="diff.external=true",
    driver="diff.python.command=true",
    textconv="diff.python.textconv=wc",
    relative="diff.relative=true",
    order="diff.orderFile=no-such-file",
    submodule="diff.submodule=log",
    blanks="diff.suppressBlankEmpty=true",
    whitespace="apply.whitespace=error-all",
    fix="apply.whitespace=fix",
    ignore="apply.ignoreWhitespace=change",
)


@pytest.mark.parametrize("setting", [*SETTINGS.values(), "all"])
def test_a_patch_does_not_depend_on_the_settings_of_git(tmp_path, monkeypatch, setting):
    """diff_since gives a patch of the whole clone, which `git apply` accepts as it is."""
    monkeypatch.setattr("plaingpt.base.source.CLONE", tmp_path / "clone" / "inner")
    inner = tmp_path / "clone" / "inner"
    inner.mkdir(parents=True)
    settings = SETTINGS.values() if setting == "all" else [setting]
    text = "".join(f"line {i}\n\n" for i in range(20))
    (inner.parent / ".gitattributes").write_text("*.py diff=python\n")
    files = {inner.parent / "a.py": text, inner / "b \u6d77.py": text, inner / "c.bin": "\0"}
    for path, contents in files.items():
        path.write_text(contents)
    for command in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b"]):
        if command[0] == "-c":
            command += ["commit", "-m", "first"]
        run_git(*command, place=inner.parent)
    for item in settings:
        run_git("config", *item.split("=", 1))
    edited = {path: contents.replace("10\n", "ten \n\t\n") for path, contents in files.items()}
    edited[inner / "c.bin"] = "\0\1"
    for path, contents in edited.items():
        path.write_text(contents)
    patch = diff_since("HEAD")
    for path, contents in files.items():
        path.write_text(contents)
    run_git("apply", "-", place=inner.parent, data=patch)
    assert {path: path.read_text() for path in files} == edited


def test_copies_leave_the_worktrees_of_a_user_alone(tmp_path, monkeypatch):
    """Also one whose disk is away. Its index has a file that is in no commit."""
    (tmp_path / "clone").mkdir()
    monkeypatch.setattr("plaingpt.base.source.CLONE", tmp_path / "clone")
    run_git("init")
    run_git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "first")
    disk = tmp_path / "disk"
    run_git("worktree", "add", "--detach", disk / "mine")
    (disk / "mine/new.txt").write_text("a")
    run_git("add", ".", place=disk / "mine")
    disk.rename(tmp_path / "away")
    make_copy(tmp_path / "copy", "HEAD")
    remove_copies([tmp_path / "copy", tmp_path / "never made"])
    (tmp_path / "away").rename(disk)
    assert run_git("status", "--short", place=disk / "mine") == b"A  new.txt\n"
    assert run_git("worktree", "list").count(b"\n") == 2 and not (tmp_path / "copy").exists()


def test_a_clone_inside_another_repository(tmp_path, monkeypatch):
    """A copy of its commit would have the program in a directory of the copy."""
    (tmp_path / "plainGPT").mkdir()
    monkeypatch.setattr("plaingpt.base.source.CLONE", tmp_path / "plainGPT")
    run_git("init", place=tmp_path)
    with pytest.raises(UserError, match="is part of another git repository; clone plainGPT by its"):
        find_commit("HEAD")
