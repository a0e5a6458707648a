"""Faults in long runs: each test injects one into the real program, which must lose no data."""

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from conftest import TINY, assert_close_logs, names, program, read_log, spawn, train

from plaingpt.checkpoint import load_checkpoint

LONG = ["--max_steps", 100_000, "--val_every", 0]  # runs until the test stops it


def wait_for(process, words):
    """Reads the program's output up to a line that starts with `words`."""
    assert any(line.startswith(words) for line in process.stdout), process.stderr.read()


def newest_step(run):
    return max(int(path.stem[6:]) for path in run.glob("model_*.pt"))


def stopped_at(out):
    """The step that a stopped run says it has saved."""
    return int(re.search(r"stopped by a signal or --max_minutes; step (\d+) is saved", out)[1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of ten steps without a fault, with checkpoints of steps 5 and 10."""
    directory = tmp_path_factory.mktemp("whole")
    train("--log_dir", "run", "--save_every", 5, cwd=directory)
    return directory / "run"


# Kills and signals


@pytest.mark.slow
def test_resume_after_kills_at_random_times(tmp_path):
    """The run spends much of its time on saving, so that some kills interrupt a save."""
    flags = ["--max_steps", 150, "--save_every", 1, "--total_batch_size", 128,
             "--val_every", 100, "--val_tokens", 256]
    train(*flags, "--log_dir", "whole", cwd=tmp_path)
    rng, n_torn = random.Random(0), 0
    for _ in range(10):
        (process,) = spawn(*TINY, *flags, "--log_dir", "run", "--resume", cwd=tmp_path)
        for _ in range(rng.randrange(1, 6)):
            wait_for(process, "step ")
        time.sleep(rng.random() * 0.03)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        n_torn += any((tmp_path / "run").glob("model_*.tmp"))
    out, _ = train(*flags, "--log_dir", "run", "--resume", cwd=tmp_path)
    assert "resumed from step" in out
    assert read_log(tmp_path / "run") == read_log(tmp_path / "whole")
    assert n_torn, "no kill interrupted a save: the test checks nothing"


@pytest.mark.parametrize("victim, flags", [
    (0, []), (1, ["--parallel", "fsdp"]), (0, ["--pp", 2])])
def test_one_of_two_processes_is_killed(tmp_path, victim, flags):
    """The other one ends, too. The run continues from the last step that was saved."""
    flags = [*TINY, "--log_dir", "run", "--save_every", 1, "--keep", 0, *flags]
    running = spawn(*flags, *LONG, cwd=tmp_path, processes=2)
    wait_for(running[0], "step     4/")
    running[victim].send_signal(signal.SIGKILL)
    for process in running:
        process.communicate(timeout=60)  # gloo's own timeout is half an hour
        assert process.returncode
    saved = newest_step(tmp_path / "run")
    out, _ = program(*flags, "--resume", "--max_steps", saved + 2, cwd=tmp_path, processes=2)
    assert saved >= 4 and f"resumed from step {saved} " in out
    steps = {step for step, stream in read_log(tmp_path / "run") if stream == "train"}
    assert steps == set(range(saved + 2))


@pytest.mark.parametrize("moment, step", [("step", 3), ("evaluation", 6), ("save", 5)])
def test_a_signal_during_a_step_an_evaluation_or_a_save(tmp_path, whole, moment, step):
    """The program finishes the step 2, the validation at step 5 or the save of step 4.

    After the next complete step it saves and stops.
    """
    flags = [*TINY, "--log_dir", "run", "--save_every", 2]
    out, err = program(moment, *flags, cwd=tmp_path, program="tests/faulty.py")
    assert stopped_at(out) == newest_step(tmp_path / "run") == step and err == ""
    out, _ = program(*flags, "--resume", cwd=tmp_path)
    assert f"resumed from step {step} " in out
    assert read_log(tmp_path / "run") == read_log(whole)


# Disks


@contextlib.contextmanager
def small_disk(directory, size):
    """Mounts a disk of `size` bytes as a directory -> limits for a Program.

    Without the right to mount, the limits restrict the size of each file instead.
    """
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", directory]
    if subprocess.run(command, capture_output=True).returncode:
        yield {resource.RLIMIT_FSIZE: size // 3}
        return
    try:
        yield {}
    finally:
        shutil.copytree(directory, f"{directory}.copy")
        subprocess.run(["umount", "--lazy", directory], check=True)
        directory.rmdir()
        os.rename(f"{directory}.copy", directory)


def test_a_full_disk_while_a_checkpoint_is_saved(tmp_path, whole):
    flags = ["--log_dir", "run", "--save_every", 2, "--keep", 0]
    with small_disk(tmp_path / "run", 2**20) as limits:  # a checkpoint takes 420 kB
        _, err = train(*flags, cwd=tmp_path, status=2, limits=limits)
    assert re.fullmatch(
        r"error: run/model_00000\d.pt: cannot write \(.*\); the older checkpoints are complete: "
        r"free some space, then continue with --resume\n", err), err
    for path in (tmp_path / "run").glob("model*"):
        load_checkpoint(path)  # all are complete, and there is no temporary file
    out, _ = train(*flags, "--resume", cwd=tmp_path)
    assert read_log(tmp_path / "run") == read_log(whole) and ("resumed" in out) == (not limits)


def test_a_full_disk_while_the_log_is_written(tmp_path):
    with small_disk(tmp_path / "run", 2**14) as limits:
        _, err = train("--log_dir", "run", *LONG, cwd=tmp_path, status=2, limits=limits,
                       env=dict(GIT_DIR="none"))  # no changes.patch, which could be large
    assert re.fullmatch(r"error: run/log.txt: cannot write \(.*\); free some space, then continue "
                        r"with --resume\n", err), err
    *lines, _ = (tmp_path / "run" / "log.txt").read_text().split("\n")
    assert len(lines) > 100
    assert all(re.fullmatch(r"\d+ \w+ [-+.e\d]+", line) for line in lines)


def test_a_run_directory_that_is_a_mount_point(tmp_path):
    """Old runs move to another disk. If --log_dir is a link, they move next to its target."""
    with small_disk(tmp_path / "run", 2**23):
        train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
        (tmp_path / "link").symlink_to("run")
        for directory in ("run", "link"):
            train("--log_dir", directory, "--max_steps", 1, cwd=tmp_path)
    assert names(tmp_path) == ["link", "run", "run.1", "run.2"]
    assert names(tmp_path / "run.1") == ["log.txt", "model_000002.pt", "run.json"]
    for run in ("run", "run.2"):
        assert names(tmp_path / run) == ["log.txt", "model_000001.pt", "run.json"]


def test_a_read_only_directory(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    (tmp_path / "run").chmod(0o500)
    resumed = ["--resume", "--max_steps", 12]
    for directory, flags in (("run", []), ("run", resumed), ("run/new", [])):
        _, err = train("--log_dir", directory, *flags, cwd=tmp_path, status=2, root=False)
        assert err == (f"error: --log_dir {directory}: cannot write (Permission denied); choose "
                       "another place, or free some space\n")
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    assert names(tmp_path) == ["run"]


# Checkpoints


UNREADABLE = r"run/model_000010\.pt: not a readable checkpoint "


@pytest.mark.parametrize("damage, message", [
    ("truncated", UNREADABLE + r"\(.*\); give another one, or delete it to resume "
                  "from the one before"),
    ("flipped", UNREADABLE + r"\(the checksum of .* is wrong\);.*")])
def test_a_damaged_checkpoint_is_one_sentence(tmp_path, whole, damage, message):
    """It ends --resume and changes nothing. Without it, the run continues from step 5."""
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / "model_000010.pt"
    data = bytearray(path.read_bytes())
    data[200_000] ^= 1
    path.write_bytes(data[:100_000] if damage == "truncated" else data)
    _, err = train("--log_dir", "run", "--resume", cwd=tmp_path, status=2)
    assert re.fullmatch(f"error: {message}\n", err), err
    assert names(tmp_path / "run") == names(whole) and names(tmp_path) == ["run"]
    if damage == "truncated":
        path.unlink()
        out, _ = train("--log_dir", "run", "--resume", cwd=tmp_path)
        assert "resumed from step 5 " in out and read_log(tmp_path / "run") == read_log(whole)


def test_the_newest_checkpoint_has_the_highest_step(tmp_path, whole):
    """Not the latest time, because a clock may go backwards. Names of other kinds are ignored."""
    shutil.copytree(whole, tmp_path / "log" / "run")
    os.utime(tmp_path / "log" / "run" / "model_000005.pt", (2e9, 2e9))
    (tmp_path / "log" / "run" / "model_².pt").write_text("")
    out, _ = program("--max_new_tokens", 3, cwd=tmp_path, program="generate.py")
    assert out.startswith("log/run/model_000010.pt, ")


# Other circumstances


def test_resumed_with_other_data(tmp_path, shards):
    """The same tokens in another directory are the same data. Other tokens are refused."""
    flags = [*TINY, "--val_tokens", 256, "--total_batch_size", 128, "--log_dir", "run", "--resume"]
    program(*flags, "--data", "shards", "--max_steps", 2, cwd=tmp_path)
    shutil.copytree(shards, tmp_path / "other")
    out, _ = program(*flags, "--data", "other", "--max_steps", 3, cwd=tmp_path)
    assert "note: data changes from ['shards'] to ['other']" in out
    longer = tmp_path / "other" / "a_train_000001.npy"
    np.save(longer, np.append(np.load(longer), np.uint16(7)))
    _, err = program(*flags, "--data", "other", "--max_steps", 4, cwd=tmp_path, status=2)
    assert re.fullmatch(
        r"error: the run in run had other --data: the training split was 3,381 tokens with CRC-32 "
        r"[0-9a-f]{8} and is 3,382 tokens with CRC-32 [0-9a-f]{8}; for a new run: --init_from run, "
        r"not --resume\n", err), err


def test_two_runs_in_one_directory(tmp_path):
    flags = [*TINY, "--log_dir", "run", *LONG]
    (first,) = spawn(*flags, "--save_every", 3, cwd=tmp_path)
    wait_for(first, "step     4/")
    for more in ([], ["--resume"]):
        _, err = program(*flags, *more, cwd=tmp_path, status=2)
        assert err == "error: --log_dir run: another process writes there; stop it\n"
    first.send_signal(signal.SIGHUP)  # as when the terminal is closed
    out, _ = first.communicate(timeout=60)
    step = stopped_at(out)
    assert first.returncode == 0
    assert {step for step, _ in read_log(tmp_path / "run")} == set(range(step))
    out, _ = program(*flags, "--resume", "--max_steps", step + 1, cwd=tmp_path)
    assert f"resumed from step {step} " in out and names(tmp_path) == ["run"]


def test_a_run_resumes_with_another_layout_device_and_dtype(tmp_path, whole):
    """Stops after 3, 5 and 7 of ten steps, and resumes with other settings.

    The micro-batch, the number of processes, the device and the dtype change.
    """
    for stop, processes, flags in ((3, 1, []), (5, 2, ["--batch_size", 2]),
                                   (7, 1, ["--batch_size", 16, "--device", "auto"])):
        train("--log_dir", "run", "--resume", "--save_every", stop, "--keep", 0, *flags,
              cwd=tmp_path, processes=processes)
        for path in (tmp_path / "run").glob("model_*.pt"):
            if int(path.stem[6:]) > stop:  # as if killed after the save of step `stop`
                path.unlink()
    out, _ = train("--log_dir", "run", "--resume", cwd=tmp_path)
    assert "resumed from step 7 " in out
    assert_close_logs(tmp_path / "run", whole, rel=1e-5)
    for dtype, step in (("float16", 12), ("bfloat16", 14)):
        out, _ = train("--log_dir", "run", "--resume", "--max_steps", step, "--dtype", dtype,
                       cwd=tmp_path)
        assert f"resumed from step {step - 2} " in out and "note: dtype changes from " in out
