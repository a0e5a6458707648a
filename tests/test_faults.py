"""Faults in long runs: each test injects one into the real program, which must lose no data."""

import contextlib
import json
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
import torch
from conftest import TINY, assert_close_logs, names, program, read_log, spawn, train
from test_training import checkpoint

from plaingpt.checkpoint import load_checkpoint
from plaingpt.cli import UserError
from plaingpt.device import setup
from plaingpt.runlog import JUMP, RunLog

LONG = ["--max_steps", 100_000, "--val_every", 0]  # runs until the test stops it


def wait_for(process, words):
    """Reads the program's output up to a line that starts with `words`."""
    line = next((line for line in process.stdout if line.startswith(words)), None)
    assert line, process.stderr.read()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of ten steps without a fault."""
    directory = tmp_path_factory.mktemp("whole")
    train("--log_dir", "run", cwd=directory)
    return directory / "run"


# Kills and signals


@pytest.mark.slow
def test_resume_after_fifty_kills_at_random_times(tmp_path):
    """The run spends half its time on saving, so that some kills interrupt a save."""
    flags = ["--max_steps", 400, "--save_every", 1, "--total_batch_size", 128, "--val_every", 100, "--val_tokens", 256]
    train(*flags, "--log_dir", "whole", cwd=tmp_path)
    rng, torn = random.Random(0), 0
    for _ in range(50):
        (process,) = spawn(*TINY, *flags, "--log_dir", "run", "--resume", cwd=tmp_path)
        for _ in range(rng.randrange(1, 6)):
            wait_for(process, "step ")
        time.sleep(rng.random() * 0.03)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        torn += any((tmp_path / "run").glob("model_*.tmp"))
    out, _ = train(*flags, "--log_dir", "run", "--resume", cwd=tmp_path)
    assert "resumed from step" in out
    assert read_log(tmp_path / "run") == read_log(tmp_path / "whole")
    a, b = (checkpoint(tmp_path / name, 400) for name in ("whole", "run"))
    assert all(torch.equal(a["model"][n], b["model"][n]) for n in a["model"])
    assert torn, "no kill interrupted a save: the test checks nothing"


@pytest.mark.parametrize("victim, flags", [(0, []), (1, []), (1, ["--parallel", "fsdp"]), (0, ["--pp", 2])])
def test_one_of_two_processes_is_killed(tmp_path, victim, flags):
    flags = [*TINY, "--log_dir", "run", "--save_every", 1, "--keep", 0, *flags]
    running = spawn(*flags, *LONG, cwd=tmp_path, processes=2)
    wait_for(running[0], "step     4/")
    running[victim].send_signal(signal.SIGKILL)
    _, err = running[1 - victim].communicate(timeout=60)  # gloo's own timeout is half an hour
    assert running[1 - victim].returncode == 1
    assert err.startswith("error: lost the connection to another process of this run (") and err.count("\n") == 1, err
    assert err.endswith("); see what it printed, then start again (training: --resume)\n"), err
    running[victim].communicate()
    saved = max(int(path.stem[6:]) for path in (tmp_path / "run").glob("model_*.pt"))
    out, _ = program(*flags, "--resume", "--max_steps", saved + 2, cwd=tmp_path, processes=2)
    # A thread writes the checkpoint of step 4 while the others go on.
    assert saved >= 3 and f"resumed from step {saved} " in out
    assert {step for step, stream in read_log(tmp_path / "run") if stream == "train"} == set(range(saved + 2))


@pytest.mark.parametrize("moment, at_least", [("step", 3), ("evaluation", 6), ("save", 5)])
def test_a_signal_during_a_step_an_evaluation_or_a_save(tmp_path, whole, moment, at_least):
    """The program finishes the step, the validation at step 5 or the save of step 4.

    Then it saves the next step and stops.
    """
    flags = [*TINY, "--log_dir", "run", "--save_every", 2]
    out, err = program(f"signal in a{'n' * (moment == 'evaluation')} {moment}", *flags, cwd=tmp_path, program="tests/faulty.py")
    assert f"stopped by a signal or --max_minutes; step {at_least} is saved" in out and err == ""
    out, _ = program(*flags, "--resume", cwd=tmp_path)
    assert f"resumed from step {at_least} " in out
    assert read_log(tmp_path / "run") == read_log(whole)


@pytest.mark.parametrize("number", [signal.SIGHUP, None])
def test_stdout_is_closed_during_a_run(tmp_path, whole, number):
    """With a signal the run saves and stops. Without one it continues to its end."""
    flags = [*TINY, "--log_dir", "run"]
    (process,) = spawn(*flags, *(LONG if number else []), cwd=tmp_path)
    wait_for(process, "step     2/")
    process.stdout.close()
    if number:
        process.send_signal(number)
    process.process.join(60)
    assert process.returncode == 0 and process.stderr.read() == ""
    if number:
        (saved,) = (tmp_path / "run").glob("model_*.pt")
        out, _ = program(*flags, "--resume", "--max_steps", int(saved.stem[6:]) + 1, cwd=tmp_path)
        assert f"resumed from step {int(saved.stem[6:])} " in out
    else:
        assert read_log(tmp_path / "run") == read_log(whole)


# Disks


@contextlib.contextmanager
def small_disk(directory, size):
    """Mounts a disk of `size` bytes as a directory -> limits for a Program.

    Without the right to mount, the limits restrict the size of each file instead.
    """
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", directory], capture_output=True).returncode == 0
    try:
        yield {} if mounted else {resource.RLIMIT_FSIZE: size // 3}
    finally:
        if mounted:
            shutil.copytree(directory, f"{directory}.copy")
            subprocess.run(["umount", "--lazy", directory], check=True)
            directory.rmdir()
            os.rename(f"{directory}.copy", directory)


def test_a_full_disk_while_a_checkpoint_is_saved(tmp_path, whole):
    flags = ["--log_dir", "run", "--save_every", 2, "--keep", 0]
    with small_disk(tmp_path / "run", 2**20) as limits:  # a checkpoint takes 420 kB
        _, err = train(*flags, cwd=tmp_path, status=2, limits=limits)
    assert re.fullmatch(r"error: run/model_00000\d.pt: cannot write \(.*\); the older checkpoints are complete: free some space, then "
                        r"continue with --resume\n", err), err
    for path in (tmp_path / "run").glob("model*"):
        load_checkpoint(path)  # all are complete, and there is no temporary file
    out, _ = train(*flags, "--resume", cwd=tmp_path)
    assert read_log(tmp_path / "run") == read_log(whole) and ("resumed" in out) == (not limits)


def test_a_full_disk_while_the_log_is_written(tmp_path):
    with small_disk(tmp_path / "run", 2**14) as limits:
        _, err = train("--log_dir", "run", *LONG, cwd=tmp_path, status=2, limits=limits)
    assert re.fullmatch(r"error: run/log.txt: cannot write \(.*\); free some space, then continue with --resume\n", err)
    *lines, rest = (tmp_path / "run" / "log.txt").read_text().split("\n")
    assert len(lines) > 100 and all(re.fullmatch(r"\d+ \w+ [-+.e\d]+", line) for line in lines) and "\n" not in rest


def test_a_run_directory_that_is_a_mount_point(tmp_path):
    """Old runs move to another disk. If --log_dir is a link, they move next to its target."""
    with small_disk(tmp_path / "run", 2**23):
        train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
        (tmp_path / "link").symlink_to("run")
        for flags in (["--log_dir", "run", "--max_steps", 1], ["--log_dir", "link", "--max_steps", 1]):
            train(*flags, cwd=tmp_path)
    assert names(tmp_path) == ["link", "run", "run.1", "run.2"]
    assert names(tmp_path / "run.1") == ["log.txt", "model_000002.pt", "run.json"]
    assert names(tmp_path / "run") == names(tmp_path / "run.2") == ["log.txt", "model_000001.pt", "run.json"]


def test_a_read_only_directory(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    (tmp_path / "run").chmod(0o500)
    for directory, flags in (("run", []), ("run", ["--resume", "--max_steps", 5]), ("run/deeper", [])):
        _, err = train("--log_dir", directory, *flags, cwd=tmp_path, status=2, root=False)
        assert err == (f"error: --log_dir {directory}: cannot write (Permission denied); choose another place, or free some space\n")
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before and names(tmp_path) == ["run"]
    a, b = spawn(*TINY, "--log_dir", "run", cwd=tmp_path, processes=2, root=False)
    assert b.communicate(timeout=60)[1].startswith("error: lost the connection to another process of this run") and b.returncode == 1
    assert "run: cannot write" in a.communicate(timeout=60)[1] and a.returncode == 2


# Checkpoints


def test_every_flipped_bit_is_detected_or_harmless(tmp_path, whole):
    """torch.save stores a CRC-32 of its records. A flip elsewhere, as in padding, has no effect."""
    path, good, rng, refused = whole / "model_000010.pt", checkpoint(whole, 10), random.Random(0), 0
    data = path.read_bytes()
    for i in [*range(60), *range(len(data) - 200, len(data)), *rng.sample(range(len(data)), 200)]:
        damaged = bytearray(data)
        damaged[i] ^= 1 << rng.randrange(8)
        (tmp_path / "x.pt").write_bytes(damaged)
        try:
            read = load_checkpoint(tmp_path / "x.pt")
        except UserError as error:
            assert str(error).startswith(f"{tmp_path}/x.pt: ") and "\n" not in str(error)
            refused += 1
        else:
            assert all(torch.equal(read["model"][n], good["model"][n]) for n in good["model"]), i
            assert {k: v for k, v in read.items() if k not in ("model", "optimizer")} == \
                {k: v for k, v in good.items() if k not in ("model", "optimizer")}, i
    assert refused > 200


@pytest.mark.parametrize("damage", [lambda data: data[:len(data) // 2], lambda data: bytes(len(data)), lambda data: b"",
                                    lambda data: data[:200_000] + bytes([data[200_000] ^ 1]) + data[200_001:]],
                         ids=["truncated", "zeros", "empty", "one bit"])
def test_resume_skips_a_damaged_checkpoint(tmp_path, whole, damage):
    train("--log_dir", "run", "--save_every", 4, cwd=tmp_path)
    newest = tmp_path / "run" / "model_000010.pt"
    newest.write_bytes(damage(newest.read_bytes()))
    out, _ = train("--log_dir", "run", "--resume", cwd=tmp_path)
    assert "skipped run/model_000010.pt: " in out and "resumed from step 8 " in out
    assert read_log(tmp_path / "run") == read_log(whole)


# Data


@pytest.mark.parametrize("fault, sentence", [("removed", "changed during the run"), ("truncated", "changed during the run"),
                                             ("replaced", "changed during the run; restore it, then use --resume")])
def test_a_shard_is_removed_or_changed_during_a_run(tmp_path, shards, fault, sentence):
    flags = [*TINY, "--data", "shards", "--val_tokens", 256, "--total_batch_size", 128, "--log_dir", "run"]
    shard = shards / "a_train_000003.npy"
    good, status = shard.read_bytes(), shard.stat()
    (process,) = spawn(*flags, *LONG, "--save_every", 5, cwd=tmp_path)
    wait_for(process, "step     7/")
    if fault == "removed":
        shard.unlink()
    elif fault == "truncated":
        shard.write_bytes(good[:1000])
    else:
        (tmp_path / "other.npy").write_bytes(good[:-2] + b"\0\0")
        os.replace(tmp_path / "other.npy", shard)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.startswith("error: shards/a_train_000003.npy: ") and sentence in err, err
    if fault == "replaced":
        _, err = program(*flags, *LONG, "--resume", cwd=tmp_path, status=2)
        assert "--data shards is not the data of the run in run: the training split was 3,381 tokens with CRC-32 " in err
    shard.write_bytes(good)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    saved = max(int(path.stem[6:]) for path in (tmp_path / "run").glob("model_*.pt"))
    out, _ = program(*flags, "--resume", "--max_steps", saved + 2, cwd=tmp_path)
    assert f"resumed from step {saved} " in out


def test_resumed_with_other_data(tmp_path, shards):
    """The same tokens in another directory are the same data. Other tokens are refused."""
    flags = [*TINY, "--val_tokens", 256, "--total_batch_size", 128, "--log_dir", "run", "--resume"]
    program(*flags, "--data", "shards", "--max_steps", 2, cwd=tmp_path)
    shutil.copytree(shards, tmp_path / "other")
    out, _ = program(*flags, "--data", "other", "--max_steps", 3, cwd=tmp_path)
    assert "note: data changes from shards to other" in out
    longer, before = tmp_path / "other" / "a_train_000001.npy", names(tmp_path / "run")
    np.save(longer, np.append(np.load(longer), np.uint16(7)))
    _, err = program(*flags, "--data", "other", "--max_steps", 4, cwd=tmp_path, status=2)
    assert re.fullmatch(r"error: --data other is not the data of the run in run: the training split was 3,381 tokens with "
                        r"CRC-32 [0-9a-f]{8} and is 3,382 tokens with CRC-32 [0-9a-f]{8}; for a new run: "
                        r"--init_from run, not --resume\n", err), err
    assert names(tmp_path / "run") == before
    program(*flags[:-1], "--data", "other", "--max_steps", 1, "--init_from", "run", "--log_dir", "new", cwd=tmp_path)


# Other circumstances


def test_two_runs_in_one_directory(tmp_path):
    flags = [*TINY, "--log_dir", "run", *LONG]
    (first,) = spawn(*flags, "--save_every", 3, cwd=tmp_path)
    wait_for(first, "step     4/")
    for more in ([], ["--resume"]):
        _, err = program(*flags, *more, cwd=tmp_path, status=2)
        assert err == "error: --log_dir run: another process is writing there; stop it, or choose another directory\n"
    first.send_signal(signal.SIGTERM)
    out, _ = first.communicate(timeout=60)
    step = int(re.search(r"stopped by a signal or --max_minutes; step (\d+) is saved", out)[1])
    assert first.returncode == 0 and sorted({s for s, _ in read_log(tmp_path / "run")}) == list(range(step))
    out, _ = program(*flags, "--resume", "--max_steps", step + 1, cwd=tmp_path)
    assert f"resumed from step {step} " in out and names(tmp_path) == ["run"]


def test_the_clock_goes_backwards(tmp_path, whole):
    flags = [*TINY, "--log_dir", "log/run", "--save_every", 2, "--keep", 0]
    program("clock", *flags, cwd=tmp_path, program="tests/faulty.py")
    run = tmp_path / "log" / "run"
    (run / "model_000010.pt").unlink()
    for step in (2, 4, 6, 8):
        os.utime(run / f"model_{step:06d}.pt", (1e9 - step, 1e9 - step))
    out, _ = program("--max_new_tokens", 3, cwd=tmp_path, program="generate.py")
    assert out.startswith("log/run/model_000008.pt, ")
    out, _ = program("clock", *flags, "--resume", cwd=tmp_path, program="tests/faulty.py")
    assert "resumed from step 8 " in out and read_log(run) == read_log(whole)


def test_a_run_resumes_with_another_layout_device_and_dtype(tmp_path, whole):
    """Stops after 3, 5 and 7 of ten steps, and resumes with other settings.

    The micro-batch, the number of processes, the device and the dtype change.
    """
    for stop, processes, flags in ((3, 1, []), (5, 2, ["--batch_size", 2]), (7, 1, ["--batch_size", 16, "--device", "auto"])):
        train("--log_dir", "run", "--resume", "--save_every", stop, "--keep", 0, *flags, cwd=tmp_path, processes=processes)
        for path in (tmp_path / "run").glob("model_*.pt"):
            if int(path.stem[6:]) > stop:  # as if killed after the save of step `stop`
                path.unlink()
    out, _ = train("--log_dir", "run", "--resume", cwd=tmp_path)
    assert "resumed from step 7 " in out
    assert_close_logs(tmp_path / "run", whole, rel=1e-5)
    for dtype, step in (("bfloat16", 12), ("float16", 14), ("float32", 16)):
        out, _ = train("--log_dir", "run", "--resume", "--max_steps", step, "--dtype", dtype, cwd=tmp_path)
        assert f"resumed from step {step - 2} in run\n" in out and "note: dtype changes from " in out
    assert json.loads((tmp_path / "run" / "run.json").read_text())["dtype"] == "float32"


# Numbers


def test_gradient_norm_jumps_are_marked_and_counted(tmp_path):
    out, _ = program("jump", *TINY, "--log_dir", "run", "--total_batch_size", 128, "--max_steps", 40, cwd=tmp_path,
                     program="tests/faulty.py")
    marked = [line for line in out.splitlines() if " | jump: " in line]
    assert len(marked) == 1 and re.match(r"step    30/40 \| loss \S+ \| jump: norm \d+ x its median \| ", marked[0]), marked
    norms = [float(read_log(tmp_path / "run")[step, "norm"]) for step in range(31)]
    assert f"norm {norms[30] / np.median(norms[:30]):.0f} x" in marked[0] and norms[30] > 300 * np.median(norms[:30])
    assert "done: steps skipped: 0, jumps of the gradient norm: 1; the log and checkpoints are in run; " in out


def test_gradient_norm_jump_threshold():
    log = RunLog(None, None, 0, rank=1)
    norms = [1.0, 5.0, 3.0, *[2.0] * 6]
    # nine norms are too few for a median
    assert [log.check(norm) for norm in norms] == [""] * 9 and log.check(99.0) == ""
    assert log.check(JUMP * 2.0) == "" and log.check(JUMP * 2.0 + 0.1) == " | jump: norm 10 x its median"
    assert log.check(float("inf")) == " | 1 skipped" and log.check(2.0) == ""
    assert log.check(float("nan")) == " | 2 skipped" and log.bad_in_a_row == 1
    assert log.summary() == "steps skipped: 2, jumps of the gradient norm: 1"


def test_deterministic_runs_are_bitwise_equal(tmp_path):
    for name in ("a", "b"):
        train("--log_dir", name, "--deterministic", "--optimizer", "muon", "--dtype", "bfloat16", cwd=tmp_path)
    assert read_log(tmp_path / "a") == read_log(tmp_path / "b")
    a, b = (checkpoint(tmp_path / name, 10)["model"] for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_deterministic_enables_pytorch_deterministic_algorithms(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    setup("cpu")
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        setup("cpu", deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
