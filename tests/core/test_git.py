"""plaingpt/source_code.py works with any git settings of a user, and in unusual clones."""

import re

from plaingpt.errors import UserError
from plaingpt.lab.copies import make_copy, remove_copies
from plaingpt.source_code import diff_since, read_git, run_git

import pytest

# Git settings of a user that could change a patch, or how git applies it. The values of external,
# driver and textconv are programs.
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


def make_repository(directory):
    """Creates a git repository in a directory, and commits the files of the directory."""
    run_git("init", place=directory)
    run_git("add", ".", place=directory)
    user = ("-c", "user.name=a", "-c", "user.email=a@b")
    run_git(*user, "commit", "-m", "first", place=directory)


@pytest.mark.parametrize("setting", [*SETTINGS.values(), "all"])
def test_a_patch_does_not_depend_on_the_settings_of_git(tmp_path, monkeypatch, setting):
    """diff_since returns a patch of the whole clone.

    `git apply` must be able to apply the patch, with the same git settings.
    """
    clone = tmp_path
    monkeypatch.setattr("plaingpt.source_code.CLONE", clone)
    settings = SETTINGS.values() if setting == "all" else [setting]
    text = "".join(f"line {i}\n\n" for i in range(20))
    (clone / ".gitattributes").write_text("*.py diff=python\n")
    files = {clone / "a.py": text, clone / "b \u6d77.py": text, clone / "c.bin": "\0"}
    for path, contents in files.items():
        path.write_text(contents)
    make_repository(clone)
    for item in settings:
        run_git("config", *item.split("=", 1))
    edited = {path: contents.replace("10\n", "ten \n\t\n") for path, contents in files.items()}
    edited[clone / "c.bin"] = "\0\1"
    for path, contents in edited.items():
        path.write_text(contents)
    patch = diff_since("HEAD")
    for path, contents in files.items():
        path.write_text(contents)
    run_git("apply", "-", data=patch)
    assert {path: path.read_text() for path in files} == edited


def test_copies_leave_the_worktrees_of_a_user_alone(tmp_path, monkeypatch):
    """A worktree of the user is on a disk that is not mounted while experiment.py makes its copies.

    The index of this worktree contains a file that is in no commit.
    """
    (tmp_path / "clone").mkdir()
    monkeypatch.setattr("plaingpt.source_code.CLONE", tmp_path / "clone")
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


def test_a_copy_without_git_inside_a_repository(tmp_path, monkeypatch):
    """plainGPT was copied into a user's own repository, without its .git directory.

    A run must not record the state of the user's repository, and git commands must fail.
    """
    (tmp_path / "diary.txt").write_text("public")
    make_repository(tmp_path)
    (tmp_path / "diary.txt").write_text("secret")
    (tmp_path / "plainGPT").mkdir()
    monkeypatch.setattr("plaingpt.source_code.CLONE", tmp_path / "plainGPT")
    assert read_git() == ("", [], b"")
    with pytest.raises(UserError, match="git rev-parse .fatal: not a git repository"):
        run_git("rev-parse", "HEAD")


def test_the_repository_is_that_of_the_clone(tmp_path, monkeypatch):
    """read_git reads the repository of the clone, even if GIT_DIR names a different repository.

    A git hook sets GIT_DIR. Moreover, a different user may own the clone.
    """
    for name in ("clone", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text("1\n")
        make_repository(tmp_path / name)
        (tmp_path / name / f"{name}.txt").write_text("2\n")
    monkeypatch.setattr("plaingpt.source_code.CLONE", tmp_path / "clone")
    found = read_git()
    assert b"clone.txt" in found[2]
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other/.git/index"))
    # With this variable, git behaves as if a different user owned the repository.
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert read_git() == found


def test_a_clone_whose_git_does_not_work(tmp_path, monkeypatch, capsys):
    (tmp_path / ".git").write_text("gitdir: elsewhere\n")
    monkeypatch.setattr("plaingpt.source_code.CLONE", tmp_path)
    assert read_git() == ("", [], b"")
    note = r"note: git does not work here \(fatal: .*elsewhere\), so run.json lacks the commit\n"
    assert re.fullmatch(note, capsys.readouterr().out)


def test_the_commit_is_a_hash_although_it_has_a_tag(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("1\n")
    make_repository(tmp_path)
    run_git("-c", "user.name=a", "-c", "user.email=a@b", "tag", "-am", "one", "v1", place=tmp_path)
    monkeypatch.setattr("plaingpt.source_code.CLONE", tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", read_git()[0])
