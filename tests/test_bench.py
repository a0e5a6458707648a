"""The benchmark: what it times and what it prints."""

import json
import os
import re

import pytest
import torch
from conftest import program

import bench
from bench import Peer
from model import GPT, GPTConfig
from train_gpt2 import TrainConfig


def test_peers_compute_the_same_loss():
    torch.manual_seed(0)
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=256)
    plain, hf, ours = Peer("plain", config), Peer("transformers", config), GPT(config)
    x, y = torch.randint(256, (2, 2, 16))
    state = ours.state_dict()
    plain.model.load_state_dict(state)
    # Hugging Face keeps the matrices of the blocks transposed.
    hf.model.load_state_dict({name: p.t() if ".h." in name else p for name, p in state.items()})
    torch.testing.assert_close(plain(x, y)[1], ours(x, y)[1])
    torch.testing.assert_close(hf(x, y)[1], ours(x, y)[1])
    assert Peer("plain", GPTConfig(1, 1, 8, 8)).model.lm_head.weight.size(0) == 50304


def test_models_alternate_and_a_failed_model_is_skipped(monkeypatch):
    calls = []

    def call(_, name, config, profiled, *args):
        calls.append((name, profiled, *args))
        return dict(failure=["no"]) if name == "plain" else dict(times=[len(calls)])

    monkeypatch.setattr(bench, "in_new_process", call)
    config = TrainConfig(compile=False, dtype="float32")
    models = [(name, config) for name in ("plainGPT", "plain", "transformers")]
    results = bench.run_rounds(models, 2, True, 8)
    assert calls == [("plainGPT", True, 8), ("plain", False, 8), ("transformers", False, 8),
                     ("plainGPT", False, 8), ("transformers", False, 8)]
    assert results == {"plainGPT eager float32": dict(times=[1, 4], failure=[]),
                       "plain eager float32": dict(failure=["no"]),
                       "transformers eager float32": dict(times=[3, 5], failure=[])}


def test_a_killed_process_and_an_exception_are_reported_as_failures(capfd):
    assert "terminated abruptly" in bench.in_new_process(os.abort)["failure"][0]
    failure = dict(failure=["invalid literal for int() with base 10: 'x'"])
    assert bench.in_new_process(int, "x") == failure
    assert "Traceback" in capfd.readouterr().err  # a bug keeps its traceback


ROW = (r"^ +{B} {name} +[\d,]+ +[\d,]+-[\d,]+ +(?P<tok_s>[\d,]+) +\d+\.\d\d "
       r"+- +\d+\.\d\d +\d+\.\d +(?P<ratio>\d+\.\d\d)$")


@pytest.mark.slow
def test_bench_times_two_models_and_writes_a_profile(tmp_path):
    """The second batch size never fits into memory. The rows of the first are still printed."""
    out, _ = program("--preset", "baby", "--batch_size", 2, 10**12, "--block_size", 32,
                     "--steps", 1, "--rounds", 1, "--dtype", "float32", "--device", "cpu",
                     "--peer", "plain", "--profile", cwd=tmp_path, program="bench.py")
    rows = {name: re.search(ROW.format(B=2, name=name), out, re.M) for name in
            ("plainGPT eager float32", "plain eager float32", "plain compiled float32")}
    assert all(rows.values()), out
    assert rows["plainGPT eager float32"]["ratio"] == "1.00"
    assert len(re.findall("^10{12} .* does not fit into memory$", out, re.M)) == 3, out
    assert "baby: 433,664 parameters, T=32, adamw, 2.65 MFLOP a token with full attention" in out
    assert "one step of plainGPT at B=2; trace: bench_trace.json" in out
    operations = re.findall(r"^ *(\S+) +\d+\.\d\d% .*[um]s +\d+ *$", out, re.M)
    assert len(operations) > 9 and "aten::addmm" in operations, out
    events = json.loads((tmp_path / "bench_trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {
        "aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_fused_adamw_",
        "LinearCrossEntropy"}
    assert [p.name for p in tmp_path.iterdir()] == ["bench_trace.json"]


def test_a_preset_with_dropout(tmp_path):
    out, _ = program("--preset", "mini", "--batch_size", 1, "--block_size", 16, "--steps", 1,
                     "--rounds", 1, "--dtype", "float32", "--device", "cpu", cwd=tmp_path, program="bench.py")
    assert re.search(ROW.format(B=1, name="plainGPT eager float32"), out, re.M), out
    assert "muon" in out


@pytest.mark.parametrize("way, sizes", [([], [2, 4]), (["--pp", 2], [2])], ids=["ddp", "pp"])
def test_bench_on_two_processes(tmp_path, way, sizes):
    out, _ = program("--preset", "baby", "--batch_size", *sizes, "--block_size", 32, "--steps", 1,
                     "--dtype", "float32", "--profile", "--device", "cpu", *way,
                     cwd=tmp_path, processes=2, program="bench.py")
    for B in sizes:
        assert re.search(ROW.format(B=B, name="plainGPT eager float32"), out, re.M), out
    assert "muon" in out and "processes: 2 (ddp, tp 1, pp" in out
    events = json.loads((tmp_path / "bench_trace.json").read_text())["traceEvents"]
    assert "gloo:all_reduce" in {event["name"] for event in events}
