"""Tests some patches in experiments/: a second computation must return the same results."""

import importlib.util
import math
import sys

import pytest
import torch
from conftest import MODEL, ROOT, TINY, apply_patch, fresh, randomise, read_log, text_batch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from train_gpt2 import TrainConfig, get_lr

FLAGS = [*TINY, "--val_every", "0", "--val_tokens", "32", "--sample_tokens", "1"]


def patched(name, directory, monkeypatch):
    """Applies a patch to copies of model.py and train_gpt2.py. Returns both files as modules."""
    for path in ("model.py", "train_gpt2.py", "plaingpt/settings.py"):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes((ROOT / path).read_bytes())
    apply_patch(name, directory)
    return [load(directory / f"{each}.py", each, monkeypatch) for each in ("model", "train_gpt2")]


def load(path, name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_a_schedule_for_each_parameter_group(tmp_path, monkeypatch):
    """Compares the hyperparameters that the optimizers use in each step with the schedules.

    A resumed run uses the same hyperparameters, and logs the same losses.
    """
    _, program = patched("group-schedule", tmp_path, monkeypatch)
    used = []

    def record(optimizer, *_):
        for group in optimizer.param_groups:
            values = {name: group.get(name) for name in ("lr", "momentum", "weight_decay")}
            used.append((type(optimizer).__name__, values))

    flags = [*FLAGS, "--optimizer", "muon", "--muon_lr", "8e-3", "--max_steps", "6"]
    flags += ["--save_every", "3", "--keep", "0", "--log_dir"]
    hook = register_optimizer_step_pre_hook(record)
    program.main([*flags, str(tmp_path / "run")])
    whole, used[:] = list(used), []
    log = read_log(tmp_path / "run")
    (tmp_path / "run/model_000006.pt").unlink()
    program.main([*flags, str(tmp_path / "run"), "--resume"])
    hook.remove()
    assert used == whole[12:] and read_log(tmp_path / "run") == log
    config = TrainConfig(max_lr=4e-3, min_lr=4e-4, warmup_steps=2, max_steps=6)
    for step in range(6):
        lr = get_lr(step, config)
        decay = 0.1 * (1 - step / 6)
        muon, qkv, matrices, vectors = whole[4 * step : 4 * step + 4]
        for name, values in (muon, qkv):
            expected = dict(lr=2 * lr, momentum=0.85 + 0.1 * step / 300, weight_decay=decay)
            assert name == "Muon" and values == pytest.approx(expected)
        assert matrices[1] == pytest.approx(
            dict(lr=4e-3 * min(1, (step + 1) / 2), momentum=None, weight_decay=decay)
        )
        assert vectors[1] == pytest.approx(dict(lr=lr, momentum=None, weight_decay=0.0))


def test_gradient_noise(tmp_path, monkeypatch):
    _, program = patched("gradient-noise", tmp_path, monkeypatch)
    program.main([*FLAGS, "--max_steps", "1", "--log_dir", str(tmp_path / "run")])
    log = read_log(tmp_path / "run")
    model = fresh(MODEL)
    batch = text_batch("train", 16)  # the sequences of step 0
    norms = []
    for n in (8, 16):  # number of sequences: in the first micro-batch, and in the whole step
        x, y = (ids[:n] for ids in batch)
        loss = torch.nn.functional.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(math.sqrt(sum(grad.square().sum().item() for grad in grads)))
    found = [float(log[0, name]) for name in ("norm_small", "norm")]
    assert found == pytest.approx(norms, rel=1e-5)


def test_documents_in_a_sequence_are_like_documents_alone(tmp_path, monkeypatch):
    module, _ = patched("document-mask", tmp_path, monkeypatch)
    shape = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256)
    model = randomise(module.GPT(module.GPTConfig(**shape, end_of_text=10)))
    model.requires_grad_(False).eval()
    idx = torch.randint(11, 256, (1, 32))
    starts = [0, 7, 20, 21, 32]
    idx[0, starts[1:-1]] = 10
    x = model.hidden(idx)  # (1, 32, C)
    for start, stop in zip(starts, starts[1:]):
        pos = torch.arange(start, stop)[None]  # (1, T)
        alone = model.hidden(idx[:, start:stop], pos=pos)
        torch.testing.assert_close(alone, x[:, start:stop], rtol=1e-4, atol=1e-5)
    cache = [module.KVCache(32) for _ in range(2)]
    parts = [model.hidden(idx[:, :9], cache)]
    for t in range(9, 32):
        parts.append(model.hidden(idx[:, t : t + 1], cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), x, rtol=1e-4, atol=1e-5)


def test_a_mixture_of_experts_is_the_sum_of_its_experts(tmp_path, monkeypatch):
    module, _ = patched("mixture-of-experts", tmp_path, monkeypatch)
    torch.manual_seed(0)
    shape = dict(n_layer=2, n_head=2, n_embd=16, block_size=32, vocab_size=64)
    model = module.GPT(module.GPTConfig(**shape))
    mlp = model.transformer.h[0].mlp
    x = torch.randn(2, 32, 16)
    up, down = mlp.c_fc.view(8, 16, 64), mlp.c_proj.view(8, 64, 16)
    y = mlp.gelu(torch.einsum("btc,ecd->betd", x, up)) @ down  # (B, E, T, C): all experts
    probs = mlp.router(x).softmax(dim=-1)  # (B, T, E)
    best = probs * (probs >= probs.topk(2).values[..., 1:])  # (B, T, E); 0 except for two experts
    torch.testing.assert_close(mlp(x), torch.einsum("bte,betc->btc", best, y))
    used = (best > 0).float().mean(dim=(0, 1)) / 2  # (E)
    torch.testing.assert_close(mlp.balance, 8 * (used * probs.mean(dim=(0, 1))).sum())
    idx = torch.randint(64, (4, 33))
    _, loss, metrics = model(idx[:, :-1], idx[:, 1:])
    loss.backward()
    assert (mlp.c_fc.grad.view(8, -1).norm(dim=1) > 0).all() and mlp.router.weight.grad.norm() > 0
    val = model.loss(model.hidden(idx[:, :-1]), idx[:, 1:])
    assert metrics["cross_entropy"] == val and 1 <= metrics["balance"] < 2
    torch.testing.assert_close(loss, val + 0.01 * metrics["balance"])
    assert [group["n_stacked"] for group in muon_groups(model)] == [1, 3, 8]


def muon_groups(model):
    muon, _ = model.configure_optimizers(0.1, 1e-3, "muon")
    return muon.param_groups
