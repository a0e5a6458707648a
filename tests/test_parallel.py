"""parallel.py: whatever a model is cut into, it is the same model. Each case is the real program on gloo processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, program, read_log, spawn
from test_training import checkpoint

from model import GPT, GPTConfig

# Three blocks do not halve, nor 251 tokens; the norm is above 0.5 all along, so clipping is active; 16 sequences make at least
# two micro-steps of 4. Validation and a benchmark run on the way.
SMALL = ("--preset baby --n_layer 3 --n_head 2 --n_embd 32 --block_size 32 --vocab_size 251 --total_batch_size 512 --batch_size 4 "
         "--max_steps 20 --warmup_steps 2 --val_tokens 640 --val_every 10 --sample_every 0 --dtype float32 --device cpu "
         "--optimizer adamw --max_lr 4e-3 --grad_clip 0.5 --evals lambada=examples.jsonl").split()
FSDP, TP, PP = ["--parallel", "fsdp"], ["--tp", 2], ["--pp", 2]
WAYS = {"ddp": (2, []), "fsdp": (2, FSDP), "tp": (2, TP), "pp": (2, PP), "tp x pp": (4, TP + PP), "fsdp x tp": (4, FSDP + TP)}


def run_small(directory, processes, *flags, status=0):
    (directory / "examples.jsonl").write_text('{"text": "The boat came home with the evening tide"}\n' * 3)
    return program(*SMALL, *flags, cwd=directory, processes=processes, program="tests/quick.py", status=status)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process that all others are compared with -> (its directory, what it printed)."""
    directory = tmp_path_factory.mktemp("alone")
    out, _ = run_small(directory, 1, "--log_dir", "run", "--save_every", 5, "--keep", 0)
    return directory / "run", out


def largest_difference(a, b):
    """Of all tensors of two dicts, |a - b| / |b| at its largest."""
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).norm() / b[name].norm()).item() for name in b)


def assert_same_run(run, reference, steps=20, rel=1e-5):
    a, b = read_log(run), read_log(reference)
    assert a.keys() == b.keys() and (0, "train") in a
    for key, value in b.items():
        assert float(a[key]) == pytest.approx(float(value), rel=rel), key
    a, b = checkpoint(run, steps), checkpoint(reference, steps)
    # What bounds it: Adam divides a gradient by its own size, so one that is all rounding moves a weight by as much as any.
    assert largest_difference(a["model"], b["model"]) < 1e-4
    assert {k: a[k] for k in ("step", "position", "tokenizer", "model_config", "scaler")} == \
        {k: b[k] for k in ("step", "position", "tokenizer", "model_config", "scaler")}
    a, b = a["optimizer"]["adamw"], b["optimizer"]["adamw"]
    assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
    for i, state in b["state"].items():
        assert largest_difference(a["state"][i], state) < 1e-4


@pytest.mark.parametrize("extra", [[], ["--activation_checkpointing"]], ids=["", "checkpointing"])
@pytest.mark.parametrize("way", WAYS)
def test_parts_give_the_curve_of_one_process(tmp_path, alone, way, extra):
    processes, flags = WAYS[way]
    out, _ = run_small(tmp_path, processes, *flags, *extra, "--log_dir", "run")
    assert_same_run(tmp_path / "run", alone[0])
    norms = [float(v) for (_, stream), v in read_log(alone[0]).items() if stream == "norm"]
    assert min(norms) > 0.5  # so that the clipping was at work
    samples = [text[text.index("--- sample 0"):text.index("done:")] for text in (out, alone[1])]
    assert samples[0] == samples[1]


def test_a_checkpoint_goes_from_layout_to_layout(tmp_path, alone):
    """2-way FSDP -> one process -> 2-way TP x 2-way PP -> DDP, five steps each: one curve at every link, and one log."""
    run = tmp_path / "run"
    for start, way in ((0, "fsdp"), (5, None), (10, "tp x pp"), (15, "ddp")):
        for path in run.glob("model_*.pt"):  # each goes on to the end, and is then forgotten from its fifth step on
            if path.name > f"model_{start:06d}.pt":
                path.unlink()
        processes, flags = WAYS[way] if way else (1, [])
        out, _ = run_small(tmp_path, processes, *flags, "--log_dir", "run", "--resume", "--save_every", 5, "--keep", 0)
        assert f"resumed from step {start} " in out or start == 0
        assert_same_run(run, alone[0])


def test_a_batch_that_grows_in_a_pipeline(tmp_path):
    """8 and then 16 sequences, in micro-batches of 4 and then 8: as many each time, and not of the same size."""
    flags = ["--rampup_steps", 4, "--rampup_batch_size", 256, "--batch_size", 8, "--max_steps", 8, "--evals", ""]
    for name, processes, way in (("one", 1, []), ("two", 2, PP)):
        run_small(tmp_path, processes, *flags, *way, "--log_dir", name)
    assert_same_run(tmp_path / "two", tmp_path / "one", steps=8)


def test_float16_overflows_are_noticed_by_all(tmp_path, alone):
    """A scale that is too large for eight steps: every part drops them, and all halve the scale alike."""
    saved = checkpoint(alone[0], 5)
    saved["scaler"] = dict(scale=2.0**40, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, _growth_tracker=0)
    for way in ("fsdp", "pp"):
        (tmp_path / way).mkdir()
        torch.save(saved, tmp_path / way / "model_000005.pt")
        out, _ = run_small(tmp_path, 2, *WAYS[way][1], "--log_dir", way, "--resume", "--dtype", "float16", "--max_steps", 13)
        after = checkpoint(tmp_path / way, 13)
        assert "| 8 skipped" in out and after["scaler"]["scale"] == 2.0**32
        assert all(torch.equal(tensor, saved["model"][name]) for name, tensor in after["model"].items())


@pytest.mark.parametrize("flags", [FSDP, PP], ids=["fsdp", "pp"])
def test_muon_and_bfloat16_in_parts(tmp_path, flags):
    """Both compute in bfloat16, whose rounding differs with the order of sums."""
    muon = ["--optimizer", "muon", "--muon_lr", 4e-3, "--dtype", "bfloat16", "--max_steps", 10]
    run_small(tmp_path, 1, *muon, "--log_dir", "one")
    run_small(tmp_path, 2, *muon, *flags, "--log_dir", "two")
    one, two = checkpoint(tmp_path / "one", 10)["optimizer"], checkpoint(tmp_path / "two", 10)["optimizer"]
    for name in ("muon", "adamw"):
        assert one[name]["param_groups"] == two[name]["param_groups"] and one[name]["state"].keys() == two[name]["state"].keys()
    one, two = read_log(tmp_path / "one"), read_log(tmp_path / "two")
    assert one.keys() == two.keys()
    for key in one:
        assert float(two[key]) == pytest.approx(float(one[key]), rel=2e-2), key


def test_a_signal_to_one_part_stops_all_and_the_run_goes_on(tmp_path, alone):
    flags = [*SMALL, "--log_dir", "run", "--max_steps", 10**6, "--evals", ""]
    running = spawn(*flags, *PP, cwd=tmp_path, processes=2, program="tests/quick.py")
    for line in running[0].stdout:
        if line.startswith("step     3/"):
            running[1].send_signal(signal.SIGTERM)
            break
    outputs = [p.communicate(timeout=300) for p in running]
    assert [p.returncode for p in running] == [0, 0], outputs
    assert "stopped by a signal" in outputs[0][0] and not outputs[1][0].startswith("step")
    step = max(int(path.stem[6:]) for path in (tmp_path / "run").glob("model_*.pt"))
    out, _ = program(*flags, "--resume", "--max_steps", step + 2, cwd=tmp_path, program="tests/quick.py")
    assert f"resumed from step {step} " in out


def agents(directory, *flags):
    """Two torchrun, each as if on a machine of its own, with one process -> list of Popen."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d",
               f"--rdzv_endpoint=127.0.0.1:{port}", "--local_addr=127.0.0.1", str(ROOT / "tests/quick.py")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
    return [subprocess.Popen([*command, *map(str, flags)], cwd=directory, env=env, text=True, start_new_session=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]


@pytest.mark.slow
def test_two_machines_one_killed_both_restarted(tmp_path, alone):
    flags = [*SMALL, *FSDP, "--log_dir", "run", "--save_every", 1, "--keep", 0, "--evals", "", "--resume"]
    running = agents(tmp_path, *flags)
    deadline = time.time() + 300
    while not (tmp_path / "run" / "model_000004.pt").exists() and time.time() < deadline:
        time.sleep(0.01)
    # The machine is gone: torchrun, and what it started, which it puts into process groups of their own.
    for pid in (running[1].pid, *Path(f"/proc/{running[1].pid}/task/{running[1].pid}/children").read_text().split()):
        os.kill(int(pid), signal.SIGKILL)
    out, _ = running[0].communicate(timeout=300)
    running[1].communicate()
    assert running[0].returncode != 0 and not (tmp_path / "run" / "model_000020.pt").exists(), out[-3000:]
    running = agents(tmp_path, *flags)
    outputs = [p.communicate(timeout=300)[0] for p in running]
    assert [p.returncode for p in running] == [0, 0], outputs
    resumed = re.search(r"resumed from step (\d+) ", "".join(outputs))
    assert int(resumed[1]) >= 4
    a, b = read_log(tmp_path / "run"), read_log(alone[0])
    assert all(float(a[key]) == pytest.approx(float(b[key]), rel=1e-5) for key in a) and len(a) > 60


@pytest.mark.slow
def test_fsdp_takes_the_memory_that_arithmetic_says(tmp_path):
    """28.5M parameters in float32. DDP keeps 16 bytes of each in every process: the weight, its gradient, two moments. FSDP
    halves them, and borrows the other halves of two blocks, their gradients and what is being sent: 2 more at the most."""
    flags = ("--n_layer 16 --n_head 6 --n_embd 384 --vocab_size 256 --batch_size 1 --total_batch_size 64 --max_steps 3 "
             "--val_tokens 32 --evals").split()
    with torch.device("meta"):
        n = sum(p.numel() for p in GPT(GPTConfig(n_layer=16, n_head=6, n_embd=384, block_size=32, vocab_size=256)).parameters())
    taken = {}
    for way in ("ddp", "fsdp"):
        running = spawn(*SMALL, *WAYS[way][1], *flags, "", "--log_dir", way, cwd=tmp_path, processes=2, program="tests/quick.py",
                        fresh=True)
        outputs = [p.communicate(timeout=300) for p in running]
        before, most = re.search(r"MB (\S+) (\S+)", outputs[1][0]).groups()  # rank 0 also gathers the checkpoint, on the CPU
        taken[way] = (float(most) - float(before)) * 1e6 / n  # bytes a parameter
    assert 16 < taken["ddp"] < 20 and 8 < taken["fsdp"] < 8 + 2 + 2, taken


@pytest.mark.parametrize("way, expected", [
    # The weights of each of 3 blocks twice a micro-step, in bfloat16; those of embedding, head and last norm once, in float32;
    # their gradients once a step, in float32.
    (("fsdp", 1, 1), {"allgatherbase bfloat16 49984": 3 * 2 * 2, "allgatherbase float32 18560": 2,
                      "reducescatterbase float32 24992": 3, "reducescatterbase float32 9280": 1}),
    # The sums behind attention and MLP of each block, for each micro-step: forward in bfloat16, backward in float32; one
    # behind the embedding and one before the head; the largest logit, the norm and the target's logit of each of 64 positions.
    (("ddp", 2, 1), {"allreduce bfloat16 4096": 3 * 2 * 2, "allreduce float32 4096": (3 * 2 + 2) * 2,
                     "allreduce float32 64": 2, "allreduce float32 128": 2}),
    # The residual stream of each micro-batch forward, its gradient backward; the embedding's gradient once a step, both ways.
    (("ddp", 1, 2), {"send float32 4096": 2, "recv float32 4096": 2, "send float32 16384": 1, "recv float32 16384": 1}),
], ids=["fsdp", "tp", "pp"])
def test_what_a_step_sends(tmp_path, way, expected):
    """Two micro-steps of 2 x 32 tokens, 64 wide: 4,096 numbers; 49,984 weights in a block, 256 x 64 in the embedding."""
    out, _ = program(*way, cwd=tmp_path, processes=2, program="tests/collectives.py")
    assert json.loads(out.splitlines()[-1]) == {**expected, "allreduce float32 1": 1, "allreduce float32 3": 1}  # the norm; the loss and two more
