"""plaingpt/files.py: checks of output paths, writing through links and pipes, and locks."""

import errno
import fcntl
import json
import os
import stat

from plaingpt.checkpoint import list_model_files
from plaingpt.errors import UserError
from plaingpt.files import check_output, lock, write_json

import pytest


@pytest.mark.parametrize("output", ["a.txt", "../d/a.txt", "link", "linked/a.txt", "sub/b.txt"])
@pytest.mark.parametrize("given", ["a.txt", "link", "../d", "linked", "."])
def test_an_output_is_no_input(tmp_path, monkeypatch, output, given):
    """given: the input, which may be a directory.

    The paths of input and output may be symbolic links, or contain symbolic links.
    """
    directory = tmp_path / "d"
    (directory / "sub").mkdir(parents=True)
    (directory / "a.txt").touch()
    (directory / "sub/b.txt").touch()
    (directory / "link").symlink_to("a.txt")
    (directory / "linked").symlink_to(directory)
    monkeypatch.chdir(directory)
    check_output("--json", "new.json", [None, given])
    if output == "sub/b.txt" and given in ("a.txt", "link"):
        check_output("--json", output, [None, given])
        return
    with pytest.raises(UserError, match=f"--json {output}: is also an input; give another file"):
        check_output("--json", output, [None, given])


@pytest.mark.parametrize("output", [".", "no/a.json", "link", "file/a.json"])
def test_an_output_that_cannot_be_written(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("no/a.json")
    with pytest.raises(UserError, match=f"--json {output}: cannot write there; give a file in a w"):
        check_output("--json", output)


def test_a_link_stays_a_link(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to("new.json")
    for value in (1, 2):
        check_output("--json", link)
        write_json(link, value)
        assert link.is_symlink() and json.loads((tmp_path / "new.json").read_text()) == value


@pytest.mark.parametrize("name", [f"{'x' * 250}.json", f"{chr(0x4E2D) * 83}.json"])
def test_an_output_may_have_the_longest_name(tmp_path, name):
    """The longest possible file name has 255 bytes.

    If check_output accepts a file name at the start, writing the file at the end must not fail.
    """
    check_output("--json", tmp_path / name)
    write_json(tmp_path / name, 1)
    assert os.listdir(tmp_path) == [name]
    with pytest.raises(OSError, match="File name too long"):
        check_output("--json", tmp_path / f"{name}ab")


@pytest.mark.parametrize("name", ["pipe", "link"])
def test_an_output_may_be_a_pipe(tmp_path, name):
    """Writing must not replace a pipe or a device with a file: root could lose /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)) as reader:
        check_output("--json", tmp_path / name)
        write_json(tmp_path / name, ["text"])
        assert json.load(reader) == ["text"]
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_the_files_of_a_model(tmp_path, monkeypatch):
    """list_model_files lists the files of a run or an export, but not scores.json or look.html."""
    for name in ("model_000005.pt", "model_best.pt", "run.json", "scores.json", "look.html"):
        (tmp_path / name).touch()
    (tmp_path / "hf").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer_config.json", "scores.json"):
        (tmp_path / "hf" / name).touch()
    found = {path.name for path in list_model_files(tmp_path / "model_000005.pt")}
    assert found == {"model_000005.pt", "model_best.pt", "run.json"}
    found = {path.name for path in list_model_files(tmp_path / "hf")}
    assert found == {"config.json", "model.safetensors", "tokenizer_config.json"}
    monkeypatch.chdir(tmp_path / "hf")
    assert list_model_files("openai-community/gpt2") == []


def test_another_machine_sees_the_lock_on_nfs(tmp_path, monkeypatch):
    """On NFS, other machines see the lock of a file, but not the lock of a directory.

    NFS locks a file only if the process has opened the file for writing.
    """

    def flock_of_nfs(descriptor, operation):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return  # only processes on this machine would see this lock
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    descriptor = lock(tmp_path, "--log_dir")
    message = f"--log_dir {tmp_path}: another process uses this directory; wait until it ends"
    with pytest.raises(UserError, match=message):
        lock(tmp_path, "--log_dir")
    os.close(descriptor)
    os.close(lock(tmp_path, "--log_dir"))
