"""What most tests share: small data, the flags of a tiny run, and functions that run programs."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

# This import comes before torch, which reads the number of threads that forked.py sets.
from forked import Program, forking_python  # isort: skip


from plaingpt.data import open_splits
from plaingpt.process import Process
from plaingpt.tokenizer import get_tokenizer

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig
from train_gpt2 import DataLoaderLite

torch.set_num_threads(1)  # two pytest workers share the machine
# If a shell starts pytest in the background or with nohup, pytest ignores SIGINT or SIGHUP. A
# program that a test starts would then also ignore this signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
ROOT = Path(__file__).parent.parent
# The flags of FSDP, TP and PP. If the flags contain --large, `spawn` starts train_large.py instead
# of train_gpt2.py.
FSDP, TP, PP = ["--large"], ["--large", "--tp", 2], ["--large", "--pp", 2]
# The flags of a run of about one second. Each step reads 16 sequences of 32 bytes. The model has
# two layers. The optimizer is AdamW: Muon would use bfloat16 on a CPU that supports bfloat16.
TINY = (
    "--preset baby --n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --total_batch_size 512 "
    "--batch_size 8 --max_steps 10 --warmup_steps 2 --val_tokens 1024 --val_every 5 "
    "--sample_every 0 --sample_tokens 4 --log_every 1 --dtype float32 --device cpu "
    "--optimizer adamw --max_lr 4e-3 --min_lr 4e-4 --schedule cosine"
).split()
# The GPTConfig of a run with the flags TINY.
MODEL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256)
CPU = torch.device("cpu")
ALONE = Process(0, 1, CPU, torch.float32)
# A stand-in for a Data object in a call of estimate_loss: each token id stands for one byte.
ONE_BYTE_IDS = SimpleNamespace(n_bytes_of_id=np.ones(256, np.int64))
TEXT = "".join(f"Sentence {i} of a text that is long enough.\n" for i in range(4000))
WORDS = (
    "the old harbour bell rang twice and few in Wrenmouth's café had ever counted the "
    "antidisestablishmentarian gulls"
).split()


STARTED = []  # the processes that the current test has started


def spawn(
    *flags,
    cwd,
    processes=1,
    program="train_gpt2.py",
    online=False,
    fresh=False,
    env=None,
    **options,
):
    """Starts a program in one or more processes, as torchrun does. Returns a list of Programs.

    fresh: start new Python interpreters instead of forking, and return a list of Popen objects.
    online: the program may use the Hugging Face Hub. options: passed to Program.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    path, flags = ROOT / program, list(map(str, flags))
    if "--large" in flags and path.name == "train_gpt2.py":
        path = path.with_name("train_large.py")
        flags.remove("--large")
    env = {
        **os.environ,
        **(env or {}),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": str(int(not online)),
    }
    for rank in range(processes):
        if processes > 1:
            env = dict(
                env,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(processes),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        if fresh:
            started = subprocess.Popen(
                [sys.executable, str(path), *flags],
                cwd=cwd,
                env=env,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        else:
            started = Program(path, flags, cwd, env, **options)
        STARTED.append(started)
    return STARTED[-processes:]


def wait_for(process, words):
    """Reads the output of a process until a line starts with `words`.

    Fails if the process exits before it prints such a line.
    """
    assert any(line.startswith(words) for line in process.stdout), process.stderr.read()


def program(*flags, cwd, status=0, **options):
    """Runs a program to its end. Returns (stdout, stderr) of rank 0.

    Every process must exit with `status`. options: passed to spawn.
    """
    running = spawn(*flags, cwd=cwd, **options)
    outputs = [p.communicate(timeout=300) for p in running]
    for p, (out, err) in zip(running, outputs):
        assert p.returncode == status, f"exit status {p.returncode}\n{out[-2000:]}\n{err[-4000:]}"
    return outputs[0]


def train(*flags, cwd, **options):
    return program(*TINY, *flags, cwd=cwd, **options)


def read_log(directory):
    """Reads log.txt. Returns {(step, name): value as a string}, without the values of tok_s.

    Fails if log.txt contains two values for the same step and name.
    """
    numbers = {}
    for line in Path(directory, "log.txt").read_text().splitlines():
        step, stream, value = line.split()
        assert (step, stream) not in numbers, f"{line}: written twice"
        if stream != "tok_s":
            numbers[int(step), stream] = value
    return numbers


def checkpoint(directory, step):
    return torch.load(directory / f"model_{step:06d}.pt", weights_only=True)


def optimizer_values(saved):
    """Returns the optimizer state of a checkpoint: {"transformer.wte.weight.exp_avg": value}."""
    values = {}
    for state in saved["optimizers"]:
        for group in state["param_groups"]:
            for i, name in zip(group["params"], group["param_names"], strict=True):
                for key, value in state["state"].get(i, {}).items():
                    values[f"{name}.{key}"] = value
    return values


def forget_steps_after(directory, step):
    """Deletes all checkpoints of steps after `step`, as if the run had been killed earlier."""
    for path in directory.glob("model_*.pt"):
        if path.name > f"model_{step:06d}.pt":
            path.unlink()


def stopped_at(out):
    """Returns the step of the last checkpoint of a stopped run, according to its output."""
    text = r"stopped by a signal or --max_minutes; --resume continues from step (\d+)"
    return int(re.search(text, out)[1])


def everything_in(directory):
    """Returns {name: content} of the files in a directory, except the empty file .lock."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != ".lock"}


def names(directory, pattern="*"):
    """Returns the sorted names of the files in a directory, except .lock and changes.patch.

    A run writes changes.patch only if this clone has uncommitted changes.
    """
    left_out = ("changes.patch", ".lock")
    return sorted(path.name for path in directory.glob(pattern) if path.name not in left_out)


def assert_close_logs(a, b, rel):
    a, b = read_log(a), read_log(b)
    assert a.keys() == b.keys() and len(a) > 10
    for key, value in a.items():
        assert float(b[key]) == pytest.approx(float(value), rel=rel), key


def text_batch(split, B, position=0, tokenizer="bytes", **options):
    """Reads B sequences of 32 tokens from input.txt. Returns x and y, (B, 32) each."""
    train, val = open_splits(ROOT / "input.txt", get_tokenizer(tokenizer))
    tokens = train if split == "train" else val
    return DataLoaderLite([tokens], [1], 32, **options).batch(position, B, CPU)


def fresh(config):
    """Returns the initialized model of a run with seed 1337."""
    return GPT(config, seed=1337)


def randomise(model):
    """Draws all parameters from a normal distribution, including biases and gains.

    If biases were 0 and gains were 1, a test would not notice a missing bias or gain. GPT-2's
    initialization has a std of 0.02. With 0.3, the logits of a position differ more.
    """
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def overfit(model, rows, last, steps=40, lr=0.01):
    """Trains a model to predict the last tokens of each row.

    rows: lists of token ids. last: the number of tokens to predict in each row.
    """
    idx = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])  # (B, T)
    at = torch.tensor([[len(row) - last + i for i in range(last)] for row in rows])  # (B, last)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for _ in range(steps):
        x = model.hidden(idx[:, :-1]).take_along_dim((at - 1)[..., None], dim=1)  # (B, last, C)
        model.loss(x, idx.gather(1, at)).backward()
        optimizer.step()
        optimizer.zero_grad()


def as_training(model, config):
    """Returns a stand-in for a Training, with all attributes that estimate_loss needs.

    config: TrainConfig.
    """

    def losses(x, y):
        return model.loss(model.hidden(x), y, reduction="none")

    return SimpleNamespace(raw_model=model, losses=losses, config=config, process=ALONE)


def apply_patch(name, directory):
    """Applies experiments/{name}.patch to the files in a directory.

    directory: contains copies of this clone's files, including uncommitted edits. If a copy differs
    from the version for which the patch was made, git merges the differences with the patch. For
    this merge, git reads that version from the history of this clone.
    """

    def git(*command, cwd=directory):
        done = subprocess.run(["git", *command], cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    git("init")
    objects = ROOT / git("rev-parse", "--git-path", "objects", cwd=ROOT)
    (directory / ".git/objects/info/alternates").write_text(f"{objects}\n")
    git("add", ".")
    git("apply", "--3way", ROOT / f"experiments/{name}.patch")
    shutil.rmtree(directory / ".git")


def write_lines(path, records):
    """Writes records as JSON lines. Returns the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_bin(path, tokens):
    """Writes a shard in llm.c's format. tokens: uint16 ids of GPT-2, or uint32 ids of Llama 3."""
    header = np.zeros(256, "<i4")
    header[:3] = *((20240801, 7) if tokens.dtype == np.uint32 else (20240520, 1)), len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())


@contextlib.contextmanager
def small_disk(directory, size):
    """Mounts a disk of `size` bytes on a directory. Yields the argument `limits` for a Program.

    If this process may not mount a disk, `limits` restricts the size of each file to size // 3
    bytes. Otherwise, `limits` is empty.
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


def pytest_collection_modifyitems(items):
    # Slow tests run first, so that no worker starts a slow test at the end.
    items.sort(key=lambda item: "slow" not in item.keywords)


@pytest.fixture(autouse=True)
def no_process_survives(request):
    """Kills the programs that are still running after a test.

    Fails if a test starts a program and is not marked as slow.
    """
    yield
    has_started = len(STARTED) > 0
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
    assert not has_started or "slow" in request.keywords, "add @pytest.mark.slow: starts a program"


@pytest.fixture(autouse=True)
def full_precision():
    """Restores the full precision of float32 matrix multiplications before each test.

    An earlier test in this process may have called setup(..., "bfloat16"), which lowers this
    precision.
    """
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True)
def ctrl_c():
    """Restores Python's handler of SIGINT before each test.

    An earlier test may have run a program that lets Ctrl-C end the process at once.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def shards(tmp_path):
    """A directory of shards with byte tokens.

    It contains three training shards of different lengths, and one validation shard.
    """
    directory = tmp_path / "shards"
    directory.mkdir()
    rng = np.random.default_rng(0)
    for name, n in (
        ("val_000000", 700),
        ("train_000001", 1001),
        ("train_000002", 333),
        ("train_000003", 2047),
    ):
        np.save(directory / f"a_{name}.npy", rng.integers(0, 256, n).astype(np.uint16))
    (directory / "meta.json").write_text('{"tokenizer": "bytes"}')
    return directory


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The directory of an uninterrupted run of ten steps, with the checkpoints of steps 5 and 10.

    Tests only read this directory. A test that changes the files uses the fixture `copy`.
    """
    directory = tmp_path_factory.mktemp("whole")
    train("--log_dir", "run", "--save_every", 5, cwd=directory)
    return directory / "run"


@pytest.fixture(scope="module")
def python():
    """The path of an executable that starts a Python program fast, by forking a process."""
    with forking_python() as path:
        yield path


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"
