"""Causes faults in programs that run in new processes: kills, signals, full disks, damaged files.

A comment before the tests of a fault says what must happen. No fault may lose data. If a program
"prints an error message", it prints one sentence with a remedy, and ends with exit status 2.
"""

import ast
import fcntl
import gzip
import os
import pickle
import pty
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

from plaingpt.checkpoint import load_checkpoint
from plaingpt.files import lock, write_json
from plaingpt.order import permute
from plaingpt.pretrained import build_library

import numpy as np
import pytest
import torch
import transformers
from conftest import (
    FSDP,
    PP,
    ROOT,
    TEXT,
    TINY,
    checkpoint,
    everything_in,
    names,
    optimizer_values,
    program,
    read_log,
    small_disk,
    spawn,
    stopped_at,
    train,
    wait_for,
    write_lines,
)

from model import GPT

FROM_SHARDS = "--data shards --tokenizer bytes --log_dir run --save_every 0".split()
LONG = ["--max_steps", 100_000, "--val_every", 0]  # runs until the test stops it


def newest_step(run):
    return max(int(path.stem[6:]) for path in run.glob("model_*.pt"))


# After `kill -9` at 10 random moments, `--resume` yields the same log as an uninterrupted run.


@pytest.mark.slow
def test_resume_after_kills_at_random_times(tmp_path):
    """The run saves a checkpoint after each step, so that some kills interrupt a save."""
    flags = [
        "--max_steps",
        70,
        "--save_every",
        1,
        "--total_batch_size",
        128,
        "--val_every",
        70,
        "--val_tokens",
        256,
    ]
    train(*flags, "--save_every", 0, "--log_dir", "whole", cwd=tmp_path)
    rng, n_torn = random.Random(0), 0
    for _ in range(10):
        (process,) = spawn(*TINY, *flags, "--log_dir", "run", "--resume", cwd=tmp_path)
        for _ in range(rng.randrange(1, 6)):
            wait_for(process, "step ")
        in_a_save = rng.random() < 0.8
        while in_a_save and not list((tmp_path / "run").glob("*.tmp")):
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        n_torn += any((tmp_path / "run").glob("*.tmp"))
    out, _ = train(*flags, "--log_dir", "run", "--resume", cwd=tmp_path)
    assert "resumed from step" in out
    assert read_log(tmp_path / "run") == read_log(tmp_path / "whole")
    assert n_torn, "no kill interrupted a save: the test checks nothing"


# If `fineweb.py` is killed, the same command then writes the same shards as an uninterrupted run.


SHARDS = ["--output_dir", "out", "--shard_size", 6000, "--num_proc", 1, "--input"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """A directory with a.jsonl. Its folder out/ contains the shards of a.jsonl, from fineweb.py."""
    d = tmp_path_factory.mktemp("lines")
    write_lines(d / "a.jsonl", [{"text": TEXT}] * 12)
    program(*SHARDS, d / "a.jsonl", cwd=d, program="fineweb.py")
    return d


@pytest.mark.slow
def test_fineweb_continues_after_kills(tmp_path, lines):
    rng, out, flags = random.Random(2), tmp_path / "out", [*SHARDS, lines / "a.jsonl"]
    for number in [signal.SIGINT, *[signal.SIGKILL] * 7]:
        (process,) = spawn(*flags, cwd=tmp_path, program="fineweb.py")
        n = rng.randrange(1, 4) + len(names(out, "*.npy"))
        while len(names(out, "*.npy")) < n and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        process.send_signal(number)
        process.communicate()
        assert process.returncode == -number, "the run ended before the signal"
        assert not (out / "meta.json").exists(), "meta.json means complete"
    said, _ = program(*flags, cwd=tmp_path, program="fineweb.py")
    assert "complete shards: continuing" in said
    assert everything_in(out) == everything_in(lines / "out")


# SIGTERM, Ctrl-C or a closed terminal stops a run, from the first step on. The program completes
# the step, saves a checkpoint, and exits with status 0. A validation, a benchmark or a sample ends
# without a result.


@pytest.mark.slow
@pytest.mark.parametrize("moment, step", [("step", 3), ("evaluation", 5), ("save", 5)])
def test_a_signal_during_a_step_an_evaluation_or_a_save(tmp_path, whole, moment, step):
    """The signal arrives in step 2, in the validation at step 5, or during the save at step 4.

    The program completes the step or the checkpoint, but abandons the validation.
    """
    flags = [*TINY, "--log_dir", "run", "--save_every", 2]
    out, err = program(moment, *flags, cwd=tmp_path, program="tests/faulty.py")
    assert stopped_at(out) == newest_step(tmp_path / "run") == step and err == ""
    out, _ = program(*flags, "--resume", cwd=tmp_path)
    assert f"resumed from step {step} " in out
    assert read_log(tmp_path / "run") == read_log(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "long",
    [
        ["--val_every", 2, "--val_tokens", 10**6, "--data", "my.txt"],
        ["--eval_every", 2, "--evals", "lambada=lambada.jsonl"],
        ["--sample_every", 2, "--sample_tokens", 10**6],
    ],
)
def test_a_signal_ends_an_evaluation_of_two_processes(tmp_path, long):
    """Without a signal, the evaluation takes more than a second. One process gets the signal."""
    (tmp_path / "my.txt").write_text(TEXT * 5)
    write_lines(tmp_path / "lambada.jsonl", [{"text": TEXT[:40]}] * 6000)
    flags = [*TINY, "--val_tokens", 64, "--max_steps", 3, "--save_every", 0, "--log_dir", "run"]
    flags += ["--val_every", 0, *long]
    a, b = spawn(*flags, cwd=tmp_path, processes=2)
    wait_for(a, "step     1/")
    time.sleep(0.1)
    b.send_signal(signal.SIGTERM)
    (out, err), _ = (process.communicate(timeout=60) for process in (a, b))
    assert a.returncode == b.returncode == 0, err
    assert stopped_at(out) == 2 and names(tmp_path / "run", "*.pt") == ["model_000002.pt"]


@pytest.mark.slow
def test_a_signal_before_the_first_step_saves_nothing(tmp_path):
    (tmp_path / "my.txt").write_text(TEXT * 20)
    flags = ["--val_tokens", 10**6, "--data", "my.txt", "--log_dir", "run"]
    (process,) = spawn(*TINY, *flags, cwd=tmp_path)
    wait_for(process, "AdamW with decay")
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopped by a signal before the first step" in out
    assert not names(tmp_path / "run", "*.pt")


@pytest.mark.slow
def test_a_signal_that_comes_several_times(tmp_path):
    flags = [*TINY, *LONG, "--total_batch_size", 16384, "--log_dir", "run"]  # a step takes a second
    (process,) = spawn(*flags, cwd=tmp_path)
    wait_for(process, "step     0/")
    process.send_signal(signal.SIGHUP)
    wait_for(process, "stopping: the run saves a checkpoint, then ends; press Ctrl-C twice")
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and stopped_at(out) == newest_step(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("pipe", ["", " 2>&1 | tee out.txt"])
def test_a_terminal_is_closed(tmp_path, pipe, python):
    """An interactive bash in a real terminal starts the run, which often receives SIGHUP twice."""
    flags = shlex.join(map(str, [*TINY, *LONG, "--save_every", 0, "--log_dir", "run"]))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvpe("bash", ["bash", "--norc", "-i"], dict(os.environ, OMP_NUM_THREADS="1"))
    # With a pipe, the test starts a new Python process. Unlike a forked process, it buffers its
    # output.
    executable = sys.executable if pipe else python
    os.write(terminal, f"{executable} {ROOT}/train_gpt2.py {flags}{pipe}\n".encode())
    said = b""
    while b"step     4/" not in said:
        said += os.read(terminal, 1024)
    os.close(terminal)
    os.waitpid(pid, 0)
    with open(tmp_path / "run/.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits until the run has ended
    assert newest_step(tmp_path / "run") >= 4


@pytest.mark.slow
def test_a_service_manager_stops_torchrun_and_its_processes(tmp_path, python):
    """All processes receive SIGTERM. torchrun then sends SIGTERM to its processes again."""
    path = tmp_path / "torchrun.py"
    path.write_text("from torch.distributed.run import main\n\nmain()\n")
    flags = ["--standalone", "--nproc_per_node=2", "--no_python", python, ROOT / "train_gpt2.py"]
    flags += [*TINY, *LONG, "--total_batch_size", 16384, "--log_dir", "run"]
    (torchrun,) = spawn(*flags, cwd=tmp_path, program=path)
    wait_for(torchrun, "step     0/")  # only rank 0 prints
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    assert len(children) == 2
    for pid in (torchrun.pid, *map(int, children)):
        os.kill(pid, signal.SIGTERM)
    out, _ = torchrun.communicate(timeout=60)
    assert stopped_at(out) == newest_step(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("number, layout", [(signal.SIGTERM, []), (signal.SIGINT, PP)])
def test_after_a_signal_all_processes_finish_the_step_save_and_exit_0(tmp_path, number, layout):
    flags = ["--save_every", 0, "--log_dir", "run", "--val_tokens", 128, "--sample_tokens", 1]
    a, b = spawn(*TINY, *flags, *LONG, *layout, cwd=tmp_path, processes=2)
    wait_for(a, "step     2/")
    b.send_signal(number)  # only to one process: the other must stop after the same step
    (out, err), (silence, _) = (process.communicate(timeout=60) for process in (a, b))
    assert a.returncode == b.returncode == 0, err
    assert "step " not in silence
    step = stopped_at(out)
    assert checkpoint(tmp_path / "run", step)["position"] == step * 16
    assert max(s for s, _ in read_log(tmp_path / "run")) == step - 1
    out, _ = train("--resume", *flags, *layout, "--max_steps", step + 1, cwd=tmp_path, processes=2)
    assert f"resumed from step {step}" in out


# After Ctrl-C before the first step, the program ends, perhaps with a traceback, and writes
# nothing.


@pytest.mark.slow
def test_ctrl_c_before_the_first_step(tmp_path, copy):
    """Ctrl-C arrives while the model is built, or while Python imports torch.

    In the second case, Python may print a traceback.
    """
    before, flags = everything_in(copy), [*TINY, "--log_dir", "run", "--resume"]
    out, err = program("start", *flags, cwd=tmp_path, program="tests/faulty.py", status=130)
    assert "stopped" not in out and err == ""
    (process,) = spawn(*flags, cwd=tmp_path, fresh=True)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode and everything_in(copy) == before and names(tmp_path) == ["run"]


# If one of two processes is killed, the other process stops. After a restart, the run resumes.


@pytest.mark.slow
@pytest.mark.parametrize("victim, flags", [(0, []), (1, PP)])
def test_one_of_two_processes_is_killed(tmp_path, victim, flags):
    """The other process also ends. With --resume, the run continues from the newest checkpoint."""
    flags = [*TINY, "--log_dir", "run", "--save_every", 1, "--keep", 0, *flags]
    flags += ["--val_tokens", 128, "--sample_tokens", 1]
    running = spawn(*flags, *LONG, cwd=tmp_path, processes=2)
    wait_for(running[0], "step     2/")
    running[victim].send_signal(signal.SIGKILL)
    for process in running:
        process.communicate(timeout=60)  # the process group would wait for an hour
        assert process.returncode
    saved = newest_step(tmp_path / "run")
    out, _ = program(*flags, "--resume", "--max_steps", saved + 1, cwd=tmp_path, processes=2)
    assert saved >= 2 and f"resumed from step {saved} " in out
    steps = {step for step, stream in read_log(tmp_path / "run") if stream == "train"}
    assert steps == set(range(saved + 1))


# If the disk is full, the program prints an error message, and complete files remain. When the disk
# has free space again, the same command continues. Only `train_gpt2.py` also needs `--resume`.


@pytest.mark.slow
def test_a_full_disk_while_a_checkpoint_is_saved(tmp_path, whole):
    flags = ["--log_dir", "run", "--save_every", 2, "--keep", 0]
    with small_disk(tmp_path / "run", 2**20) as limits:  # a checkpoint takes 420 kB
        _, err = train(*flags, cwd=tmp_path, status=2, limits=limits)
    assert re.fullmatch(
        r"error: run/model_00000\d.pt: cannot write \(.*\); free some space, "
        r"then continue with --resume\n",
        err,
    ), err
    for path in (tmp_path / "run").glob("model*"):
        load_checkpoint(path, GPT)  # each file is a complete checkpoint
    out, _ = train(*flags, "--resume", cwd=tmp_path)
    assert read_log(tmp_path / "run") == read_log(whole) and ("resumed" in out) == (not limits)


@pytest.mark.slow
def test_a_full_disk_while_the_log_is_written(tmp_path):
    with small_disk(tmp_path / "run", 2**14) as limits:
        flags = ["--log_dir", "run", *LONG, "--total_batch_size", 128]
        without_git = dict(PATH="")  # the run then writes no changes.patch, which may be large
        _, err = train(*flags, cwd=tmp_path, status=2, limits=limits, env=without_git)
    assert re.fullmatch(
        r"error: run/log.txt: cannot write \(.*\); free some space, then continue "
        r"with --resume\n",
        err,
    ), err
    *lines, _ = (tmp_path / "run" / "log.txt").read_text().split("\n")
    assert len(lines) > 100
    assert all(re.fullmatch(r"\d+ \w+ [-+.e\d]+", line) for line in lines)


@pytest.mark.slow
def test_a_full_disk_while_fineweb_runs(tmp_path, lines):
    flags = [*SHARDS, lines / "a.jsonl"]
    program(*flags, "--max_shards", 1, cwd=tmp_path, program="fineweb.py")
    _, err = program(
        *flags, cwd=tmp_path, program="fineweb.py", status=2, limits={resource.RLIMIT_FSIZE: 11_000}
    )  # 11,000 bytes are less than a shard
    assert re.search(
        r"error: out/out_train_000001\.npy: cannot write \(File too large\); .*"
        "then run the same command again",
        err,
    )
    assert names(tmp_path / "out") == ["out_val_000000.npy", "progress.json"]
    program(*flags, cwd=tmp_path, program="fineweb.py")
    assert everything_in(tmp_path / "out") == everything_in(lines / "out")


# If the disk is full while `export.py` replaces an export, the program prints an error message, and
# the old export remains.


@pytest.mark.slow
def test_a_full_disk_leaves_the_earlier_export(tmp_path, whole):
    pytest.importorskip("transformers")
    flags = dict(cwd=tmp_path, program="export.py")
    program("--checkpoint", whole, "--dtype", "bfloat16", "--output", "out", **flags)
    before = everything_in(tmp_path / "out")
    _, err = program(
        "--checkpoint",
        whole,
        "--output",
        "out",
        status=2,
        limits={resource.RLIMIT_FSIZE: 50_000},
        **flags,
    )
    assert err.startswith("error: out/tmp") and err.count("\n") == 1, err
    assert everything_in(tmp_path / "out") == before
    program("--checkpoint", "out", "--max_new_tokens", 1, cwd=tmp_path, program="generate.py")


# If the newest checkpoint is truncated, or a bit of the file has changed, the program prints an
# error message. After the user moves the file away, the run resumes from the previous checkpoint.


UNREADABLE = r"run/model_000010\.pt: not a readable checkpoint "


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage, message",
    [
        ("truncated", UNREADABLE + r"\(.*\); move it away to resume from the previous checkpoint"),
        ("flipped", UNREADABLE + r"\(the checksum of .* is wrong\);.*"),
    ],
)
def test_a_damaged_checkpoint_is_one_sentence(tmp_path, whole, damage, message):
    """With a damaged checkpoint, --resume fails, and changes no file.

    After the damaged checkpoint is deleted, the run resumes from step 5.
    """
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


# If a field in `meta.json`, `run.json` or `core.yaml` is missing or has the wrong type, the program
# prints an error message that names the file.


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, flags, message",
    [
        ("train_gpt2.py", "--data brace", "brace/meta.json: is damaged ( ... restore it"),
        (
            "fineweb.py",
            "--input text.txt --output_dir brace",
            "brace: its files were written with a different",
        ),
        ("plot.py", "foreign", "foreign/run.json: is damaged ( ... restore it"),
        ("core.py", "--bundle foreign", "foreign/core.yaml: is damaged (no field 'icl_tasks')"),
    ],
)
def test_a_damaged_field_of_a_file_is_one_sentence(world, name, flags, message):
    """For more damaged fields, see test_records.py and test_core_tasks.py."""
    fails(world, name, flags, message)


# If a Hugging Face model contains a tensor whose shape is not GPT-2's, the program prints an error
# message.


@pytest.mark.slow
def test_a_model_of_hugging_face_that_is_not_gpt2(world):
    """This test loads one such model. test_export.py tests more models."""
    fails(world, "generate.py", "--model wide", "wide: transformers cannot load it ( ... use")


# If a checkpoint, a shard or `meta.pkl` is a pickle that contains code, the program prints an error
# message, and the code does not run.


class Mark:
    """The content of a malicious pickle: loading it creates the file MARK."""

    def __init__(self, directory):
        self.path = str(directory / "MARK")

    def __reduce__(self):
        return open, (self.path, "w")


def test_programs_load_files_safely_and_never_call_a_shell():
    """Checks every function call in our code: loading a file must not run code from the file."""
    needed = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}
    unsafe = r"(eval|exec|compile|os.system|os.popen|(pickle|marshal|shelve|dill|joblib)\..*)"
    for path in (*ROOT.glob("*.py"), *ROOT.glob("plaingpt/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                name, call = ast.unparse(node.func), ast.unparse(node)
                assert not re.fullmatch(unsafe, name) and "shell=" not in call, call
                assert needed.get(name, "") in call and "remote_code=True" not in call, call


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, message",
    [
        ("--init_from evil.pt", "evil.pt: not a readable checkpoint ... give another"),
        ("--data evil", "evil/x_train_000000.npy: not a shard ... make it again"),
        ("--data nano", "nano/train.bin: contains ids of characters"),
    ],
)
def test_code_in_a_file_does_not_run(world, flags, message):
    # `fails` also checks that the file MARK does not exist.
    fails(world, "train_gpt2.py", flags, message)


# If the data have changed when a run resumes, the program prints an error message. The message
# contains the old and the new number of tokens, and the old and the new CRC-32.


@pytest.mark.slow
def test_resumed_with_other_data(tmp_path, shards):
    """The same tokens in a different directory count as the same data.

    Different tokens lead to an error message.
    """
    flags = [*TINY, "--val_tokens", 256, "--total_batch_size", 128, "--log_dir", "run", "--resume"]
    program(*flags, "--data", "shards", "--max_steps", 2, cwd=tmp_path)
    shutil.copytree(shards, tmp_path / "other")
    out, _ = program(*flags, "--data", "other", "--max_steps", 3, cwd=tmp_path)
    assert "note: data changes from ['shards'] to ['other']" in out
    longer = tmp_path / "other" / "a_train_000001.npy"
    np.save(longer, np.append(np.load(longer), np.uint16(7)))
    _, err = program(*flags, "--data", "other", "--max_steps", 4, cwd=tmp_path, status=2)
    assert re.fullmatch(
        r"error: the run in run used different data: the training split was 3,381 tokens with "
        r"CRC-32 [0-9a-f]{8} and is now 3,382 tokens with CRC-32 [0-9a-f]{8}; use --init_from, not "
        r"--resume\n",
        err,
    ), err


# If the gradient is not finite, the step changes no parameter. After ten such steps in a row, the
# run stops.


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pp"])
def test_a_step_with_a_non_finite_gradient_changes_nothing(tmp_path, layout):
    """A gradient of the third step is NaN, so the third step changes nothing.

    The fourth step changes all weights and all moments. The optimizers are Muon and AdamW. For one
    process and more optimizers, see test_step.py.
    """
    flags = [*TINY, "--optimizer", "muon", "--max_steps", 4, "--save_every", 1, "--keep", 0]
    large = dict(fsdp=FSDP, pp=PP).get(layout, [])
    program(
        *(["sharded gradient"] if large else ["gradient"]),
        *flags,
        *large,
        "--log_dir",
        "run",
        cwd=tmp_path,
        program="tests/faulty.py",
        processes=2,
    )
    states = []
    for step in (2, 3, 4):
        saved = checkpoint(tmp_path / "run", step)
        parts = [saved["model"], optimizer_values(saved)]
        states.append([tensor for part in parts for tensor in part.values()])
    assert all(map(torch.equal, *states[:2])) and not any(map(torch.equal, *states[1:]))
    assert read_log(tmp_path / "run")[2, "norm"] == "nan"


@pytest.mark.slow
def test_ten_non_finite_gradients_in_a_row_stop_the_run(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    saved = checkpoint(tmp_path / "run", 2)
    saved["model"]["transformer.ln_f.weight"].fill_(1e38)
    torch.save(saved, tmp_path / "run" / "model_000002.pt")
    out, err = train(
        "--log_dir", "run", "--resume", "--max_steps", 50, "--val_every", 0, cwd=tmp_path, status=2
    )
    assert err.startswith("error: no finite gradient in 10 consecutive steps; use --resume")
    assert err.count("\n") == 1 and "10 skipped" in out and "step    12/" not in out


# If the data become unreadable during a run, the run saves a checkpoint of the last step, and all
# processes end with an error message. When the data are readable again, the run resumes.


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "fsdp"])
def test_a_wrong_id_in_the_middle_of_a_shard(tmp_path, layout):
    """In step 5, the last process reads a wrong id. No other process reads this id.

    At its start, a run does not find the wrong id, because it reads only both ends of each shard.
    """
    flags = [*TINY, *FROM_SHARDS, "--val_every", 0]
    large = FSDP if layout == "fsdp" else []
    options = dict(cwd=tmp_path, processes=1 if layout == "one" else 2)
    (tmp_path / "shards").mkdir()
    ids = np.random.default_rng(0).integers(0, 256, 400_000).astype(np.uint16)
    np.save(tmp_path / "shards/a_val_000000.npy", ids[:5000])
    good = tmp_path / "good.npy"
    np.save(good, ids)
    n = (len(ids) - 1) // 32
    middle = range(80_000, 320_000)
    last_of_step_5 = [permute(position, n, 1337, 0) * 32 for position in range(5 * 16 + 8, 6 * 16)]
    ids[next(start for start in last_of_step_5 if start in middle) + 3] = 999
    np.save(tmp_path / "shards/a_train_000001.npy", ids)
    out, err = program(*flags, *large, **options, status=2)
    assert err.startswith("error: --data shards, train split: id 999 is outside the vocabulary; ")
    assert "a checkpoint is saved; --resume continues from step 5" in out
    assert names(tmp_path / "run", "*.pt") == ["model_000005.pt"]
    good.rename(tmp_path / "shards/a_train_000001.npy")
    out, _ = program(*flags, *large, "--resume", **options)
    assert "resumed from step 5" in out


@pytest.mark.slow
def test_shards_that_vanish(tmp_path):
    """The shards vanish while two processes train.

    A process keeps up to 128 shards open, and can still read the open shards.
    """
    (tmp_path / "shards").mkdir()
    ids = np.random.default_rng(0).integers(0, 256, 2000).astype(np.uint16)
    for name in ("val_000000", *(f"train_{i:06}" for i in range(1, 200))):
        np.save(tmp_path / f"shards/a_{name}.npy", ids)
    flags = [*TINY, *FROM_SHARDS]
    running = spawn(*flags, *LONG, cwd=tmp_path, processes=2)
    wait_for(running[0], "step     2/")
    (tmp_path / "shards").rename(tmp_path / "elsewhere")
    outputs = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [2, 2]
    (saved,) = names(tmp_path / "run", "*.pt")
    for _, err in outputs:
        assert re.match(r"error: shards/a_train_000\d\d\d.npy: cannot be read \(", err), err
    (tmp_path / "elsewhere").rename(tmp_path / "shards")
    step = int(saved[6:12])
    out, _ = program(*flags, "--resume", "--max_steps", step + 1, cwd=tmp_path, processes=2)
    assert f"resumed from step {step}" in out


# If an input file of `fineweb.py` has changed, but its name and size are the same, the program
# prints an error message, and the old shards remain.


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--max_shards", 2], []], ids=["stopped", "complete"])
def test_another_input_of_the_same_name_and_size(tmp_path, flags):
    flags = ["--input", "a.txt", "--output_dir", "out", *flags]
    (tmp_path / "a.txt").write_text(TEXT)
    program(*flags, cwd=tmp_path, program="fineweb.py")
    before = everything(tmp_path / "out")
    half = len(TEXT) // 2
    (tmp_path / "a.txt").write_text(TEXT[:half] + TEXT[half:].replace("e", "a"))
    _, err = program(*flags, cwd=tmp_path, program="fineweb.py", status=2)
    message = "its files were written with a different input_checksum; use a new directory"
    assert err == f"error: out: {message}\n"
    assert everything(tmp_path / "out") == before
    (tmp_path / "a.txt").write_text(TEXT)
    out, _ = program(*flags, cwd=tmp_path, program="fineweb.py")
    assert "out is complete" in out


# If RANK is not less than WORLD_SIZE, or if WORLD_SIZE is set and RANK is not, the program prints
# an error message and writes nothing.


@pytest.mark.slow
def test_a_process_whose_rank_is_wrong_changes_nothing(world):
    """Some clusters set RANK and start the program without torchrun."""
    before = everything(world)
    flags = ["--preset", "baby", "--log_dir", "log/baby"]
    for variables, sentence in (
        (dict(RANK="1"), "RANK is 1, but WORLD_SIZE is 1; use torchrun, or unset RANK"),
        (
            dict(WORLD_SIZE="2"),
            "WORLD_SIZE is 2, but RANK is missing; use torchrun, or unset WORLD_SIZE",
        ),
    ):
        _, err = program(*flags, cwd=world, env=variables, status=2)
        assert err == f"error: {sentence}\n"
    assert everything(world) == before


# If two programs use the same directory for a run or for shards, the second program prints an error
# message.


@pytest.mark.slow
def test_two_runs_in_one_directory(tmp_path):
    flags = [*TINY, "--log_dir", "run", *LONG]
    # With --keep 0, the first run deletes no checkpoint that the second run may be reading.
    (first,) = spawn(*flags, "--save_every", 3, "--keep", 0, cwd=tmp_path)
    wait_for(first, "step     4/")
    for more in ([], ["--resume"]):
        _, err = program(*flags, *more, cwd=tmp_path, status=2)
        assert "run: another process uses this directory; wait until it ends, or start" in err
    first.send_signal(signal.SIGHUP)  # as if the terminal were closed
    out, _ = first.communicate(timeout=60)
    step = stopped_at(out)
    assert first.returncode == 0
    assert {step for step, _ in read_log(tmp_path / "run")} == set(range(step))
    out, _ = program(*flags, "--resume", "--max_steps", step + 1, cwd=tmp_path)
    assert f"resumed from step {step} " in out and names(tmp_path) == ["run"]


@pytest.mark.slow
def test_a_second_fineweb_in_a_directory(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "out").mkdir()
    # A killed process has left the first file. The second file belongs to the user.
    for name in (f"{'0' * 32}.tmp", "notes.2024.1.tmp"):
        (tmp_path / "out" / name).write_bytes(b"")
    flags = ["--input", "a.txt", "--output_dir", "out"]
    descriptor = lock(tmp_path / "out", "--output_dir")
    _, err = program(*flags, cwd=tmp_path, program="fineweb.py", status=2)
    message = "another process uses this directory; wait until it ends"
    assert err == f"error: --output_dir out: {message}\n"
    os.close(descriptor)
    program(*flags, cwd=tmp_path, program="fineweb.py")
    assert names(tmp_path / "out", "*.tmp") == ["notes.2024.1.tmp"]


# If the `--output_dir` of `fineweb.py` contains a `meta.json` or `tokenizer.json` of the user, the
# program prints an error message and writes nothing.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["meta.json", "progress.json", "tokenizer.json"])
def test_a_file_of_the_user_is_not_replaced(world, name):
    (world / f"my_{name}").mkdir()
    write_json(world / f"my_{name}" / name, {"mine": 1})
    flags = f"--input text.txt --output_dir my_{name}"
    fails(
        world,
        "fineweb.py",
        flags,
        f"my_{name}: its files were written with a different source, ... new dir",
    )


# If an output file is also an input file, such as `--json my.txt` with `--data my.txt`, the program
# prints an error message and writes nothing.


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, flags, output",
    [
        ("generate.py", "--json", "log/baby/run.json"),
        ("wikitext.py", "--data text.txt --json", "log/baby/model_000002.pt"),
        ("core.py", "--bundle foreign --json", "foreign/core.yaml"),
        ("experiment.py", "--flags=--data=text.txt --json", "text.txt"),
        ("export.py", "--checkpoint wide --output", "wide"),
    ],
)
def test_an_output_that_is_also_an_input(world, name, flags, output):
    fails(world, name, f"{flags} {output}", f" {output}: is also an input; give another")


# If a program has no permission for a file or a directory, the program prints an error message and
# writes nothing.


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, flags, message",
    [
        ("train_gpt2.py", "--data locked.txt", " denied: 'locked.txt'; change the permissions"),
        ("train_gpt2.py", "--data locked", "locked"),
        ("train_gpt2.py", "--init_from locked.pt", "locked.pt"),
        (
            "train_gpt2.py",
            "--log_dir fixed",
            "fixed: cannot write (Permission denied); choose another",
        ),
        (
            "train_gpt2.py",
            "TINY --log_dir fixed --resume",
            "fixed: cannot write (Permission denied)",
        ),
        ("train_gpt2.py", "--log_dir fixed/new", "fixed/new: cannot write (Permission denied)"),
        ("fineweb.py", "--input locked.txt --output_dir new", "locked.txt"),
        ("fineweb.py", "--input text.txt --output_dir locked", "locked"),
        ("generate.py", "--checkpoint locked", "locked"),
        ("export.py", "--output locked", "locked"),
    ],
)
def test_a_file_or_directory_without_permission(world, name, flags, message):
    fails(world, name, flags, message)


# If a text file is not UTF-8, the program prints a note with the share of invalid bytes. With
# `--tokenizer gpt2`, the program prints an error message instead.


@pytest.mark.slow
def test_bytes_that_are_not_utf_8_are_noted(tmp_path):
    (tmp_path / "gbk.txt").write_bytes((b"a" * 60 + "中文".encode("gbk") * 10) * 50)
    out, _ = train("--data", "gbk.txt", "--val_tokens", 64, "--max_steps", 1, cwd=tmp_path)
    assert "note: gbk.txt: 40.0% of its bytes are not UTF-8; convert the file to UTF-8\n" in out
    _, err = train("--data", "gbk.txt", "--tokenizer", "gpt2", cwd=tmp_path, status=2)
    assert re.fullmatch(r"error: --data gbk.txt: is not UTF-8 \(.*\); convert it to UTF-8\n", err)


# If the input of `fineweb.py` contains damaged records, the program skips and counts them, and
# shows the first 5. With `--strict`, it prints an error message.


@pytest.mark.slow
def test_damaged_records_are_counted_shown_and_skipped(tmp_path):
    """For each kind of damage, see test_fineweb.py."""
    write_lines(tmp_path / "a.jsonl", [{"text": "a"}, *[{}] * 7, {"text": "b"}])
    out, err = program(*SHARDS, "a.jsonl", cwd=tmp_path, program="fineweb.py")
    assert ": 1 shards (for validation: 1), 4 tokens, 2 documents, 7 damaged records" in out
    assert re.findall("skipped a.jsonl, record (.): no key 'text'", err) == [*"23456"]
    flags = [*SHARDS, "a.jsonl", "--output_dir", "strict", "--strict"]
    _, err = program(*flags, cwd=tmp_path, program="fineweb.py", status=2)
    assert "error: a.jsonl, record 2: no key 'text'" in err and "Traceback" not in err


# If a CSV file contains an unclosed quotation mark, or if a record of pairs or of a benchmark is
# damaged, the program prints an error message with the number of the record.


@pytest.mark.slow
def test_damaged_rows_of_csv(tmp_path):
    """For each kind of damage, see test_records.py."""
    (tmp_path / "a.csv").write_text('text,b\none,1\n"open,3\n')
    _, err = program(*SHARDS, "a.csv", cwd=tmp_path, program="fineweb.py", status=2)
    assert "error: a.csv: cannot be read (record 2: unexpected end of data); check it\n" in err
    (tmp_path / "b.csv").write_text("prompt,response\nWho came, and when?,Ada\n")
    _, err = train("--data", "b.csv", cwd=tmp_path, status=2)
    problem = "is damaged (more fields than column names); correct it"
    assert err == f"error: b.csv, record 1: {problem}\n"


# If a file contains a JSON object that spans several lines, an object such as `{"data": [...]}`, an
# array in a `.jsonl` file, or UTF-16 text, the program prints an error message.


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, flags, message",
    [
        (
            "fineweb.py",
            "--input pretty.json",
            "pretty.json: contains no text",
        ),
        (
            "fineweb.py",
            "--input array.jsonl",
            "array.jsonl: contains no text",
        ),
        (
            "train_gpt2.py",
            "--data data.json",
            "data.json, record 1: needs strings in the fields prompt and response",
        ),
        ("train_gpt2.py", "--data utf16.txt", "utf16.txt: is UTF-16; convert it to UTF-8"),
    ],
)
def test_another_layout_is_named(world, name, flags, message):
    fails(world, name, flags, message)


# If a text contains characters that the vocabulary lacks, each program prints a note with the share
# of unknown tokens. If the tokenizer omits such characters, the note contains no share.


@pytest.mark.slow
def test_unknown_text_is_counted(tmp_path):
    model = dict(type="WordLevel", vocab={"[UNK]": 0, "</s>": 1, "a": 2}, unk_token="[UNK]")
    write_json(
        tmp_path / "t.json",
        dict(model=model, added_tokens=[], pre_tokenizer=dict(type="Whitespace"), decoder=None),
    )
    (tmp_path / "a.txt").write_text("a b a<|endoftext|>a b b")  # 8 tokens: 6 words, and 2 x </s>
    out, _ = program(*SHARDS, "a.txt", "--tokenizer", "t.json", cwd=tmp_path, program="fineweb.py")
    assert "note: 37.5% of the tokens of out/out_val_000000.npy are the unknown token\n" in out


@pytest.mark.slow
def test_a_tokenizer_that_leaves_text_out_is_noted(tmp_path):
    """A BPE without an unknown token omits text that its vocabulary lacks."""
    model = dict(type="BPE", vocab={"</s>": 0, "a": 1}, merges=[])
    write_json(tmp_path / "t.json", dict(model=model, added_tokens=[], decoder=None))
    (tmp_path / "a.txt").write_text("aaab" * 400)
    flags = ["--data", "a.txt", "--tokenizer", "t.json", "--max_steps", 1]
    out, _ = train(*flags, cwd=tmp_path)
    assert "note: the tokenizer omits text that its vocabulary lacks\n" in out


# If a text contains the string of the end-of-text token, such as `</s>`, the program encodes the
# string like any other word, with any `tokenizer.json`. Therefore, the string does not end a
# document.


@pytest.mark.slow
def test_the_name_of_the_end_inside_a_text_is_no_end(tmp_path):
    model = dict(type="WordLevel", vocab={"[UNK]": 0, "</s>": 1, "a": 2}, unk_token="[UNK]")
    settings = dict(model=model, added_tokens=[], pre_tokenizer=dict(type="WhitespaceSplit"))
    write_json(tmp_path / "t.json", settings)
    (tmp_path / "a.txt").write_text("a </s> a<|endoftext|>a")  # 6 tokens: 4 words, and 2 x </s>
    out, _ = program(*SHARDS, "a.txt", "--tokenizer", "t.json", cwd=tmp_path, program="fineweb.py")
    assert "6 tokens, 2 documents, 0 damaged" in out


# If a tokenizer changes its input, for example with NFD normalization or with a space before the
# text, the bits per byte are `nan`, and the program prints a note.


@pytest.mark.slow
def test_a_tokenizer_that_changes_a_text_has_no_bits_per_byte(tmp_path):
    library = build_library([bytes([i]) for i in range(256)], {"<|endoftext|>": 256})
    library.normalizer = pytest.importorskip("tokenizers").normalizers.NFD()
    library.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("đã uống cà phê. " * 99, "utf-8")
    flags = ["--data", "a.txt", "--tokenizer", "t.json", "--max_steps", 1]
    out, _ = train(*flags, cwd=tmp_path)
    assert "note: bits per byte need a byte-level tokenizer that does not change its input; " in out
    assert "| nan bits per byte" in out


# If there is a mistake in flags (`--init_from ""`, `--data a=0`), in files or in prompts, the
# program prints an error message and writes nothing.


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A directory with a valid run, log/baby, and many kinds of invalid files."""
    d = tmp_path_factory.mktemp("world")
    train("--max_steps", 2, cwd=d)
    good = torch.load(d / "log/baby/model_000002.pt", weights_only=True)
    torch.save({**good, "model": Mark(d)}, d / "evil.pt")

    (d / "empty.txt").write_text("")
    (d / "text.txt").write_text("A boat came. " * 999)
    (d / "utf16.txt").write_text("A boat came. " * 999, "utf-16")
    (d / "pretty.json").write_text('{\n  "text": "a boat"\n}\n')
    (d / "array.jsonl").write_text('[{"text": "a boat"}]')
    (d / "data.json").write_text('{"data": [{"prompt": "a", "response": "b"}]}')
    (d / "no.parquet").write_text("no parquet")
    (d / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a boat"}\n' * 9)[:-9])
    shape = dict(n_layer=1, n_head=2, n_embd=8, n_positions=8, n_inner=50, vocab_size=50257)
    hf = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    hf.save_pretrained(d / "wide")
    (d / "brace").mkdir()
    (d / "brace/meta.json").write_text('{"tokenizer": "{"}')
    (d / "foreign").mkdir()
    (d / "foreign/log.txt").write_text("0 val 5.5\n")
    (d / "foreign/run.json").write_text('{"train_config": [1]}')
    (d / "foreign/core.yaml").write_text("tasks: []")
    (d / "foreign/eval_meta_data.csv").write_text("")
    (d / "bert").mkdir()
    (d / "bert/config.json").write_text('{"model_type": "bert"}')

    tokens = np.arange(9999, dtype=np.uint16) % 256
    evil = np.array([Mark(d)] * 999, object)
    for name, array in dict(good=tokens, evil=evil, meta=tokens, own=tokens).items():
        (d / name).mkdir()
        (d / name / "meta.json").write_text('{"tokenizer": "bytes"}')
        np.save(d / name / "x_val_000000.npy", tokens[:999])
        np.save(d / name / "x_train_000000.npy", array, allow_pickle=True)
    (d / "meta/meta.json").write_text('{"tokenizer": [7]}')
    library = build_library([b"a", b"b", b""], {"<|endoftext|>": 2})
    library.save(str(d / "own/tokenizer.json"))
    (d / "nano").mkdir()
    (d / "nano/meta.pkl").write_bytes(pickle.dumps(Mark(d)))
    tokens.tofile(d / "nano/train.bin")
    (d / "locked").mkdir()
    for name in ("locked.txt", "locked.pt", "locked/meta.json"):
        (d / name).write_text("{}")
    for path in d.glob("locked*"):
        path.chmod(0)
    shutil.copytree(d / "log/baby", d / "fixed").chmod(0o500)
    return d


CASES = {
    # program: [(flags, parts of the message)]
    "train_gpt2.py": [
        ("--epochs 5", "unrecognized arguments: --epochs 5"),
        ("--evals hellaswag=missing.jsonl", "missing.jsonl: cannot be read ( ... check it"),
        ("--device cuda:99", "--device cuda:99: torch 2 ... try --device cpu"),
        ("--n_head 3", "--n_head 3: must be a divisor of --n_embd, which is 128"),
        (
            "--vocab_size 100",
            "--vocab_size 100: must be at least 256, the tokenizer's vocabulary size",
        ),
        (
            "--n_embd 100000000000000000",
            "--n_embd: must be at most 100000000, not 100000000000000000",
        ),
        (
            "--vocab_size 1000000000000",
            "--vocab_size: must be at most 1000000000, not 1000000000000",
        ),
        ("--evals __main__", "--evals __main__: no such benchmark; give a module"),
        ("--n_embd 100000000 --n_head 1", "the model does not fit into memory ... smaller"),
        ("--data missing.txt", "missing.txt: not found; give a text file, or run fineweb.py"),
        ("--data empty.txt", "has 0 tokens; give more tokens than --block_size"),
        ("--data text.txt=0", "text.txt=0: give a weight above 0, such as 0.5"),
        (
            "--data own",
            "own: tokenizer.json is not bytes, the tokenizer of the shards; move tokenizer.json to "
            "a different directory",
        ),
        ("--data meta", "unknown tokenizer '[7]'; copy its tokenizer.json next to the shards"),
        ("--log_dir text.txt", "--log_dir text.txt: cannot write ... choose another place"),
        ("--init_from missing.pt", "missing.pt: no such checkpoint ... give another file"),
        ("--init_from scratch", "--init_from scratch: to start a new run, remove this flag"),
        ("--init_from=", "--init_from: is empty; give a value, or remove this flag"),
        (
            "--init_from log/baby --n_layer 3",
            "log/baby contains a different model: n_layer is 2, not 3",
        ),
        (
            "TINY --resume --optimizer muon",
            "used a different --optimizer; give all flags of that run again",
        ),
        ("TINY --resume --max_steps 1", "is at step 2; give a larger --max_steps"),
        ("TINY --resume --n_layer 3 --n_embd 64", "n_layer is 2, not 3; remove --n_layer"),
    ],
    "generate.py": [
        (f"--prompt {'a' * 32}", "...: contains 32 tokens; give at most 31"),
        ("--json no/where.json", "--json no/where.json: cannot write there ... give a file"),
        ("--model bert", "bert: ... (model_type is 'bert', not 'gpt2'); use gpt2"),
    ],
    "fineweb.py": [
        (
            "--input missing.txt",
            "missing.txt: no such file; give files, a glob pattern or a directory",
        ),
        ("--input evil.pt", "evil.pt: unknown format; fineweb.py --help"),
        ("--input utf16.txt", "utf16.txt: is UTF-16; convert it to UTF-8"),
        ("--input empty.txt", "empty.txt: contains no text ... choose a different file"),
        ("--input no.parquet", "no.parquet: cannot be read ( ... check it"),
        ("--input cut.jsonl.gz", "cut.jsonl.gz: cannot be read ( ... check it"),
        ("--input text.txt --output_dir text.txt", "--output_dir text.txt: cannot write"),
    ],
    "hellaswag.py": [("--checkpoint no.pt", "no checkpoint in no.pt")],
    "storycloze.py": [("", "error: no data; give a file; storycloze.py --help shows its format")],
}
SHAPE = (
    "--n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --total_batch_size 512 --batch_size 4 "
    "--optimizer adamw --max_lr 4e-3"
)


def everything(directory):
    """Returns {path: (modification time, size)} of all files in a directory, except .lock files."""
    paths = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


def fails(world, name, flags, message):
    """Runs a program with a mistake. The program must print one sentence and change no file."""
    before, flags = everything(world), flags.replace("TINY", SHAPE).split()
    if name == "train_gpt2.py" and "--preset" not in flags:
        flags = ["--preset", "baby", "--device", "cpu", *flags]
    out, err = program(*flags, cwd=world, program=name, status=2, root=False)
    if name == "fineweb.py":  # removes the progress bar, and the notes about skipped records
        lines = [line for line in err.splitlines() if not re.search(r"B/s]|^skipped |^\s*$", line)]
        err = "\n".join(lines) + "\n"
    if name == "train_gpt2.py" and err.startswith("usage: "):  # argparse's message has two lines
        err = err[err.index("error: ") :]
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 500, err
    assert all(part in err for part in message.split(" ... ")), err
    assert "Traceback" not in out and everything(world) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, flags, message", [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_each_mistake_gives_a_one_sentence_error(world, name, flags, message):
    fails(world, name, flags, message)
