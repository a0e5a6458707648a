"""bench.py: which steps it times, and what it prints."""

import re
import threading
from queue import Queue
from types import SimpleNamespace

from plaingpt.errors import UserError

import pytest
import torch
from conftest import program
from forked import CONTEXT

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
    # Hugging Face stores the matrices of the blocks transposed.
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
    """Makes bench.py fork its workers from a process that has already imported torch."""
    monkeypatch.setattr(bench.multiprocessing, "get_context", lambda method: CONTEXT)


def test_peers_get_a_row_each(forks, capsys):
    bench.main([*map(str, SMALL), *"--batch_size 2 --peer transformers plain".split()])
    rows = capsys.readouterr().out.splitlines()
    for row, (name, optimizer) in zip(
        rows, [("plaingpt", "muon"), ("transformers", "adamw"), ("plain", "adamw")], strict=True
    ):
        assert re.search(ROW.format(f"{name} ", optimizer), row), row


def test_models_are_timed_in_turn(monkeypatch, capsys):
    """In each of three rounds, each model takes an untimed step, and then --steps timed steps."""
    made = []

    class Subject:
        def __init__(self, name):
            self.name = name

        def time_step(self):
            made.append(self.name)
            return len(made)

    def make_pipe():
        first, second = Queue(), Queue()
        return [
            SimpleNamespace(send=outbox.put, recv=inbox.get, close=lambda: None)
            for inbox, outbox in ((first, second), (second, first))
        ]

    threads = SimpleNamespace(Process=threading.Thread, Pipe=make_pipe)

    monkeypatch.setattr(bench, "make_subject", lambda name, given: Subject(name))
    monkeypatch.setattr(bench, "describe", lambda subject, first, seconds: f"{first} {seconds}")
    monkeypatch.setattr(bench.multiprocessing, "get_context", lambda method: threads)
    monkeypatch.setattr(bench.signal, "signal", lambda *handler: None)
    bench.main(["--peer", "plain", "--steps", "2"])
    assert made == ["plaingpt", "plain", *3 * (3 * ["plaingpt"] + 3 * ["plain"])]
    assert capsys.readouterr().out == (
        "plaingpt 1 [4, 5, 10, 11, 16, 17]\nplain 2 [7, 8, 13, 14, 19, 20]\n"
    )


@pytest.mark.parametrize(
    "flags, variables, sentence",
    [
        ("--peer plain", dict(RANK="0", WORLD_SIZE="2"), "--peer plain: needs a single process"),
        ("--peer plain --large", {}, "--peer: needs a single process, but --large needs several"),
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
