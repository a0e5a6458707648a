"""bench.py: which steps it times, and what it prints."""

import math
import multiprocessing
import re
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace

from plaingpt.errors import UserError

import pytest
import torch
from conftest import program
from forked import CONTEXT
from torch.optim.optimizer import register_optimizer_step_post_hook

import bench
from model import GPT, GPTConfig

pytestmark = pytest.mark.slow  # most tests in this file start a program

SMALL = [
    "--preset",
    "baby",
    "--block_size",
    32,
    "--steps",
    2,
    "--dtype",
    "float32",
    "--device",
    "cpu",
]
ROW = (
    r"^{}\w+ float32 {} \| baby B=(2|32) T=32 \| [\d,]+ ms \([\d,]+-[\d,]+\) \| [\d,]+ tok/s "
    r"\| \d+\.\d\d TFLOP/s \| \d+\.\d\d GB \| first step \d+\.\d s$"
)


def test_peers_compute_the_same_loss():
    torch.manual_seed(0)
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=256)
    plain, hf, ours = bench.Peer("plain", config), bench.Peer("transformers", config), GPT(config)
    x, y = torch.randint(256, (2, 2, 16))  # (B, T) each
    state = ours.state_dict()
    plain.model.load_state_dict(state)
    # Hugging Face's GPT-2 stores the matrices of the blocks transposed.
    hf.model.load_state_dict({name: p.t() if ".h." in name else p for name, p in state.items()})
    torch.testing.assert_close(plain(x, y)[1], ours(x, y)[1])
    torch.testing.assert_close(hf(x, y)[1], ours(x, y)[1])
    assert bench.Peer("plain", GPTConfig(1, 1, 8, 8)).model.lm_head.weight.size(0) == 50304


@pytest.mark.parametrize(
    "optimizer, processes, flags",
    [
        ("muon", 1, ["--batch_size", 2, "--profile"]),
        ("adamw", 2, ["--batch_size", 2, "--optimizer", "adamw"]),
        ("muon", 2, ["--large", "--pp", 2]),  # a step consists of two micro-batches
    ],
    ids=["profile", "ddp", "pp"],
)
def test_bench_prints_a_row(tmp_path, optimizer, processes, flags):
    out, _ = program(*SMALL, *flags, cwd=tmp_path, processes=processes, program="bench.py")
    assert re.search(ROW.format("", optimizer), out, re.M), out
    if "--profile" in flags:
        assert "Self CPU time total" in out and (tmp_path / "bench_trace.json").stat().st_size


@pytest.fixture
def forks(monkeypatch):
    """Makes bench.py fork its processes from a process that has already imported torch."""
    monkeypatch.setattr(bench.multiprocessing, "get_context", lambda method: CONTEXT)


@dataclass
class LoggedPipe:
    """The end of a pipe that bench.py uses. Appends each message in both directions to a log."""

    end: Connection
    log: list

    def send(self, request):
        self.log.append(request)
        self.end.send(request)

    def recv(self):
        answer = self.end.recv()
        self.log.append("row of a model" if "tok/s" in answer else answer)
        return answer


def test_peers_get_a_row_each(monkeypatch, capsys):
    """The models take turns: bench.py waits for a model before it sends the next request."""
    log = []

    def logged_pipe():
        end, other_end = CONTEXT.Pipe()
        return LoggedPipe(end, log), other_end

    context = SimpleNamespace(Process=CONTEXT.Process, Pipe=logged_pipe)
    monkeypatch.setattr(bench.multiprocessing, "get_context", lambda method: context)
    bench.main([*map(str, SMALL), *"--batch_size 2 --peer transformers plain".split()])
    rows = capsys.readouterr().out.splitlines()
    for row, name in zip(rows, ("plaingpt", "transformers", "plain"), strict=True):
        assert re.search(ROW.format(f"{name} ", "adamw"), row), row
    assert log == 3 * ["start", "done"] + 9 * ["round", "done"] + 3 * ["row", "row of a model"]


def test_models_are_compared_with_the_same_settings():
    """All models use AdamW and no dropout, although the preset sets Muon and dropout."""
    given = dict(preset="mini", block_size=8, device="cpu", batch_size=1, peer=["plain"])
    for name in (bench.OURS, "plain", "transformers"):
        training = bench.make_subject(name, given).training
        assert training.config.optimizer == "adamw" and training.model.training
        modules = training.model.modules()
        assert {each.p for each in modules if isinstance(each, torch.nn.Dropout)} == {0.0}
        assert training.gpt_config.dropout == 0.0


def test_a_round_has_an_untimed_step():
    """The optimizer takes one step at the start, and then 1 + --steps steps in each round."""
    n_steps = 0

    def count(*_):
        nonlocal n_steps
        n_steps += 1

    pipe, other_end = multiprocessing.Pipe()
    for request in ("start", "round", "round", "round", "row"):
        pipe.send(request)
    given = dict(preset="baby", block_size=32, batch_size=2, steps=2, device="cpu")
    hook = register_optimizer_step_post_hook(count)
    bench.serve("plain", given, other_end)
    hook.remove()
    assert n_steps == 1 + 3 * (1 + 2)
    answers = [pipe.recv() for _ in range(5)]
    assert answers[:4] == ["done"] * 4 and "baby B=2 T=32" in answers[4]


@pytest.mark.parametrize(
    "function, argument, error, words",
    [
        (signal.raise_signal, signal.SIGKILL, UserError, "the process of a model was killed; try"),
        (math.sqrt, -1, SystemExit, "^1$"),  # simulates a bug
    ],
    ids=["killed", "bug"],
)
def test_only_a_signal_kills_a_model(function, argument, error, words):
    pipe, other_end = CONTEXT.Pipe()
    worker = CONTEXT.Process(target=function, args=[argument])
    worker.start()
    other_end.close()
    with pytest.raises(error, match=words):
        bench.ask(worker, pipe, "start")


@pytest.mark.parametrize(
    "flags, variables, sentence",
    [
        ("--peer plain", dict(RANK="0", WORLD_SIZE="2"), "--peer plain: needs a single process"),
        ("--peer plain --activation_checkpointing", {}, "--peer: no peer uses activation checkp"),
        ("--peer plain --large", {}, "--peer: needs a single process, but --large needs several"),
        ("--peer plain --optimizer muon", {}, "--peer: all models use AdamW; remove --optimizer"),
    ],
)
def test_peers_that_cannot_be_timed(flags, variables, sentence, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{sentence}"):
        bench.main(flags.split())


def test_a_peer_that_does_not_fit_into_memory(forks):
    with pytest.raises(UserError, match="^--batch_size 10{11}: out of memory; try "):
        bench.main([*map(str, SMALL), "--batch_size", f"{10**11}", "--peer", "plain"])


def test_a_batch_that_does_not_fit_into_memory(tmp_path):
    _, err = program(*SMALL, "--batch_size", 10**11, cwd=tmp_path, program="bench.py", status=2)
    assert re.fullmatch("error: --batch_size 10{11}: out of memory; try .*\n", err)
