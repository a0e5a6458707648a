"""Training steps: compared with a plain loop, compiled, in float16, and with Muon."""

import math
from dataclasses import replace
from types import SimpleNamespace

from plaingpt.data import open_splits
from plaingpt.process import Process
from plaingpt.tokenizer import get_tokenizer

import pytest
import torch
from conftest import (
    CPU,
    MODEL,
    ONE_BYTE_IDS,
    ROOT,
    TINY,
    as_training,
    assert_close_logs,
    checkpoint,
    fresh,
    read_log,
    spawn,
    train,
    write_lines,
)
from plain import plain_curve
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt2
from model import GPT
from train_gpt2 import (
    TrainConfig,
    Training,
    estimate_loss,
    make_val_loader,
    train_step,
)


@pytest.mark.slow
def test_the_compiled_step_matches_a_plain_loop(tmp_path):
    """Takes 6 steps of two micro-batches each. With fullgraph, a graph break raises an error.

    The run also computes validation losses and a benchmark. torch.compile must compile exactly
    three graphs: the training step, the hidden states of a validation, and the loss of a
    validation.
    """
    torch._dynamo.reset()
    counters.clear()
    evals = write_lines(tmp_path / "l.jsonl", [dict(text="The boats came home with the tide")])
    flags = "--compile --activation_checkpointing --n_layer 1 --max_steps 6 --eval_every 3".split()
    flags += ["--evals", f"lambada={evals}", "--log_dir", str(tmp_path / "run")]
    train_gpt2.main([*TINY, *flags])
    assert counters["stats"]["unique_graphs"] == 3
    assert {(3, "lambada"), (6, "lambada")} <= read_log(tmp_path / "run").keys()
    assert_plain_curve(tmp_path / "run", 1e-5)


def test_a_step_in_bfloat16_is_close_to_a_plain_loop(tmp_path):
    flags = "--dtype bfloat16 --activation_checkpointing --n_layer 1 --max_steps 6".split()
    train_gpt2.main([*TINY, *flags, "--log_dir", str(tmp_path / "run")])
    assert_plain_curve(tmp_path / "run", 2e-2)


def assert_plain_curve(run, tolerance):
    """Checks that the log of 6 steps matches a plain loop. run: the run directory.

    Also checks that the first validation matches a validation in eager mode. tolerance: relative.
    """
    config, log = replace(MODEL, n_layer=1), read_log(run)
    for step, (loss, norm) in enumerate(plain_curve(config, 6)):
        assert float(log[step, "train"]) == pytest.approx(loss, rel=tolerance), step
        assert float(log[step, "norm"]) == pytest.approx(norm, rel=5 * tolerance), step
    settings = TrainConfig(batch_size=4, val_tokens=1024)
    val = open_splits(ROOT / "input.txt", get_tokenizer("bytes"))[1]
    loader = make_val_loader(val, 32, settings)
    eager = estimate_loss(as_training(fresh(config), settings), loader, ONE_BYTE_IDS)
    assert [float(log[0, name]) for name in ("val", "bpb")] == pytest.approx(eager, rel=tolerance)


@pytest.mark.slow
def test_float16_scales_the_loss_and_skips_overflows(tmp_path, whole):
    flags = ["--log_dir", "half", "--dtype", "float16", "--sample_tokens", 1]
    train(*flags, cwd=tmp_path)
    saved = checkpoint(tmp_path / "half", 10)
    assert saved["scaler"]["scale"] >= 2**10 and checkpoint(whole, 10)["scaler"] == {}
    half, full = read_log(tmp_path / "half"), read_log(whole)
    assert half.keys() == full.keys() and half != full
    # Gradients are unscaled before clipping, so both runs have nearly the same norms.
    assert float(half[10, "val"]) == pytest.approx(float(full[10, "val"]), rel=5e-3)
    assert float(half[9, "norm"]) == pytest.approx(float(full[9, "norm"]), rel=5e-2)

    saved["scaler"]["scale"] = 2.0**40  # the next steps overflow until the scale is small enough
    torch.save(saved, tmp_path / "half" / "model_000010.pt")
    out, _ = train(*flags, "--resume", "--max_steps", 12, "--val_tokens", 128, cwd=tmp_path)
    assert " | 1 skipped | " in out and "loss nan" not in out
    assert checkpoint(tmp_path / "half", 12)["scaler"]["scale"] == 2.0**38


@pytest.mark.parametrize("counts", [[2, 0], [3, 5], [0, 0]])
def test_targets_have_the_same_weight_in_a_step(counts):
    """The test simulates eight processes. Seven of these processes have no targets."""
    training = SimpleNamespace(process=SimpleNamespace(sum=lambda total: total, world_size=8))
    x = torch.zeros(2, 3, dtype=torch.long)
    micro_batches = []
    for n in counts:
        y = torch.full((6,), -100)
        y[:n] = 1
        micro_batches.append((x, y.view(2, 3)))
    weights = Training.loss_weights(training, micro_batches)
    n_targets = max(1, sum(counts))
    assert weights.tolist() == pytest.approx([8 * n / n_targets for n in counts])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_synchronization_per_step(monkeypatch, optimizer, dtype):
    """Counts the transfers from the device to Python in a step of three micro-batches."""
    process = Process(0, 1, CPU, dtype)
    training = Training(MODEL, TrainConfig(optimizer=optimizer), process)
    x = torch.randint(256, (2, 16))
    calls = []

    def counted(name, original):
        return lambda *args: calls.append(name) or original(*args)

    class Waits(TorchDispatchMode):
        """Records each operator whose result has a size or a value that the host must know."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            is_mask = name == "index" and any(
                i.dtype == torch.bool for i in args[1] if i is not None
            )
            if is_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal"):
                calls.append(name)
            return function(*args, **kwargs or {})

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    step_of = train_gpt2.take_step
    monkeypatch.setattr(train_gpt2, "take_step", counted("step", step_of))
    for _ in range(2):
        calls.clear()
        with Waits():
            metrics = train_step(training, [(x, x)] * 3)
        # Before Python waits for the device, Python has queued the work of all optimizers.
        assert calls == [*["step"] * len(training.optimizers), "tolist"]
        assert all(map(math.isfinite, metrics.values()))


class Counting(torch.optim.AdamW):
    """AdamW with additional updates, which do not depend on found_inf.

    AdamW.step itself changes nothing if found_inf is 1.
    """

    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
                p.mul_(0.99)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parameters_of_no_optimizer_do_not_count(monkeypatch, dtype):
    """A parameter that no optimizer updates must not affect the gradient norm.

    The norm is the same as if the parameter had requires_grad = False.
    """
    x = torch.randint(256, (2, 16))
    norms = []
    for is_frozen in (False, True):

        def configure_optimizers(self, *_, is_frozen=is_frozen):
            self.transformer.h.requires_grad_(not is_frozen)
            return [torch.optim.AdamW(self.transformer.wte.parameters(), 0.1, fused=True)]

        monkeypatch.setattr(GPT, "configure_optimizers", configure_optimizers)
        training = Training(MODEL, TrainConfig(), Process(0, 1, CPU, dtype))
        training.raw_model.transformer.wpe.requires_grad_(False)
        training.raw_model.transformer.ln_f.requires_grad_(False)
        norms.append([train_step(training, [(x, x)] * 2)["norm"] for _ in range(3)])
    assert norms[0] == norms[1]


OWN_OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, 0.9),
    "fused SGD": lambda p: torch.optim.SGD(p, 0.1, 0.9, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "subclass": lambda p: Counting(p, 0.1, fused=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["adamw", "muon", *OWN_OPTIMIZERS])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_no_bit(monkeypatch, dtype, name, value):
    """A step with such a gradient changes no weights, moments and step counts.

    For several processes, see test_reliability.py.
    """
    if make := OWN_OPTIMIZERS.get(name):
        monkeypatch.setattr(
            GPT, "configure_optimizers", lambda self, *_: [make([*self.parameters()])]
        )
    process = Process(0, 1, CPU, dtype)
    optimizer = name if name in ("adamw", "muon") else "adamw"
    training = Training(MODEL, TrainConfig(optimizer=optimizer), process)
    x = torch.randint(256, (2, 16))
    clip = training.clip

    def spoiled(max_norm):
        training.raw_model.transformer.h[0].ln_1.bias.grad[3] = value
        return clip(max_norm)

    def state():
        return [t.clone() if torch.is_tensor(t) else t for t in tree_leaves(training.state_dict())]

    train_step(training, [(x, x)] * 2)
    before = state()
    monkeypatch.setattr(training, "clip", spoiled)
    metrics = train_step(training, [(x, x)] * 2)
    assert not math.isfinite(metrics["norm"])
    after = state()
    differ = [
        a
        for a, b in zip(before, after, strict=True)
        if not (torch.equal(a, b) if torch.is_tensor(a) else a == b)
    ]
    # Only the float16 scaler may change: the scaler counts the steps since its last new scale.
    assert len(differ) <= (dtype == torch.float16)
    monkeypatch.setattr(training, "clip", clip)
    train_step(training, [(x, x)] * 2)
    assert not torch.equal(before[0], state()[0])


# Muon


@pytest.mark.slow
def test_muon_on_two_processes(tmp_path):
    """The tolerance is larger than usual, because Muon may compute in bfloat16.

    The relative rounding errors of bfloat16 are up to 1/256.
    """
    for n in (1, 2):
        train("--optimizer", "muon", "--log_dir", n, "--max_steps", 4, cwd=tmp_path, processes=n)
    assert_close_logs(tmp_path / "1", tmp_path / "2", rel=2e-3)


@pytest.mark.slow
def test_two_processes_share_the_work_of_muon(tmp_path):
    flops = {}
    for processes in (1, 2):
        running = spawn(cwd=tmp_path, processes=processes, program="tests/muon.py")
        outputs = [p.communicate(timeout=120) for p in running]
        assert all(p.returncode == 0 for p in running), outputs
        flops[processes] = [int(out) for out, _ in outputs]
    (whole,) = flops[1]
    assert sum(flops[2]) == whole > 0 and max(flops[2]) < 0.51 * whole
