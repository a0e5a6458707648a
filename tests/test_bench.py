"""The benchmark: what it times and what it prints."""

import re
import runpy
import shutil
import subprocess

import pytest
import torch
from conftest import ROOT, program

from model import GPT, GPTConfig

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
    r"^{}\w+ float32 {} \| baby B=2 T=32 \| [\d,]+ ms \([\d,]+-[\d,]+\) \| [\d,]+ tok/s "
    r"\| \d+\.\d\d TFLOP/s \| \d+\.\d\d GB \| first step \d+\.\d s$"
)


@pytest.fixture(scope="module")
def with_peers(tmp_path_factory):
    """A copy of bench.py to which experiments/peers.patch is applied."""
    directory = tmp_path_factory.mktemp("peers")
    shutil.copy(ROOT / "bench.py", directory)
    subprocess.run(["git", "apply", ROOT / "experiments/peers.patch"], cwd=directory, check=True)
    return directory / "bench.py"


def test_peers_compute_the_same_loss(with_peers):
    Peer = runpy.run_path(with_peers)["Peer"]
    torch.manual_seed(0)
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=256)
    plain, hf, ours = Peer("plain", config), Peer("transformers", config), GPT(config)
    x, y = torch.randint(256, (2, 2, 16))  # (B, T) each
    state = ours.state_dict()
    plain.model.load_state_dict(state)
    # Hugging Face keeps the matrices of the blocks transposed.
    hf.model.load_state_dict({name: p.t() if ".h." in name else p for name, p in state.items()})
    torch.testing.assert_close(plain(x, y)[1], ours(x, y)[1])
    torch.testing.assert_close(hf(x, y)[1], ours(x, y)[1])
    assert Peer("plain", GPTConfig(1, 1, 8, 8)).model.lm_head.weight.size(0) == 50304


@pytest.mark.parametrize(
    "optimizer, processes, flags",
    [("muon", 1, ["--profile"]), ("adamw", 2, ["--optimizer", "adamw"]), ("muon", 2, ["--pp", 2])],
    ids=["profile", "ddp", "pp"],
)
def test_bench_prints_a_row(tmp_path, optimizer, processes, flags):
    out, _ = program(
        *SMALL, "--batch_size", 2, *flags, cwd=tmp_path, processes=processes, program="bench.py"
    )
    assert re.search(ROW.format("", optimizer), out, re.M), out
    if "--profile" in flags:
        assert "Self CPU time total" in out and (tmp_path / "bench_trace.json").stat().st_size


@pytest.mark.parametrize("step", ["plaingpt", "plain", "transformers"])
def test_peers_print_a_row(tmp_path, with_peers, step):
    out, _ = program(*SMALL, "--batch_size", 2, "--step", step, cwd=tmp_path, program=with_peers)
    assert re.search(ROW.format(f"{step} ", "muon" if step == "plaingpt" else "adamw"), out, re.M)


def test_a_batch_that_does_not_fit_into_memory(tmp_path):
    _, err = program(*SMALL, "--batch_size", 10**12, cwd=tmp_path, program="bench.py", status=2)
    assert re.fullmatch("error: --batch_size 10{12}: out of memory; try .*\n", err)
