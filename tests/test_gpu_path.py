"""What the main use, several GPUs, needs, as far as a CPU can see it."""

import builtins
import math
import os
import re
import threading
import time

import numpy as np
import pytest
import torch
from conftest import names, program, spawn, train

import plaingpt.checkpoint
import plaingpt.evaluation
import plaingpt.shards
from model import GPT, PRESETS, GPTConfig
from plaingpt.checkpoint import Saver, fill, on_meta
from plaingpt.cli import UserError
from plaingpt.device import prefetch, sum_over_data
from plaingpt.loss import CHUNK_SIZE, LinearCrossEntropyLoss
from plaingpt.shards import open_tokens, permute
from tokenizer import get_tokenizer
from train_gpt2 import RECIPES, DataLoaderLite, TrainConfig, prepare, train_step

CPU = torch.device("cpu")
SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256)


# The head


def test_the_compiled_head_keeps_one_chunk_of_logits_in_memory(monkeypatch):
    """The generated code for four chunks: no float32 logits, and one buffer for all chunks."""
    import torch._inductor.config as inductor
    import torch._inductor.ir as ir
    from torch._inductor.utils import run_and_get_code

    # On a CPU, Inductor stores results of exp that are used twice. On a GPU it does not.
    monkeypatch.setattr(ir, "is_cpu", lambda device: False)
    monkeypatch.setattr(inductor, "fx_graph_cache", False)
    monkeypatch.setitem(CHUNK_SIZE, "cpu", 64)
    V, loss_fn = 1000, LinearCrossEntropyLoss()
    x, w = torch.randn(4, 64, 32, requires_grad=True), (0.02 * torch.randn(V, 32)).requires_grad_()
    y = torch.randint(V, (4, 64))

    def run(function):
        x.grad = w.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(x, w, y)
        loss.backward()
        return loss, x.grad, w.grad

    expected = run(loss_fn)
    found, code = run_and_get_code(lambda: run(torch.compile(loss_fn, fullgraph=True, dynamic=False)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert buffers(code) == ["torch.bfloat16"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # of a validation
        _, code = run_and_get_code(lambda: torch.compile(loss_fn, fullgraph=True, dynamic=False)(x, w, y))
    assert buffers(code) == ["torch.bfloat16"]


def buffers(code):
    """The dtypes of the buffers for logits, (64, 1024), in Inductor's code."""
    return re.findall(r"empty_strided_cpu\(\(64, 1024\), \(1024, 1\), (\S+)\)", "\n".join(code))


def test_sums_of_one_process_stay_where_they_are():
    """Benchmarks sum in float64, which MPS does not have."""
    sums = torch.ones(3, dtype=torch.float64)
    assert sum_over_data(sums, torch.device("mps"), 1) is sums


def test_validation_uses_the_compiled_head():
    config = TrainConfig(compile=True, batch_size=2)
    model, weights = on_meta(SMALL, None)
    trainer = prepare(model, config, CPU, torch.float32, weights)
    compiled = []
    assert trainer.eval_model.loss_fn._compiled_call_impl is not None
    trainer.eval_model.loss_fn._compiled_call_impl = lambda *args: compiled.append(args) or torch.zeros(())
    trainer.eval_model.loss(torch.zeros(1, 4, 32), torch.zeros(1, 4, dtype=torch.long))
    assert len(compiled) == 1


# The step


def test_a_step_with_a_non_finite_gradient_changes_nothing():
    """Fused AdamW starts before the CPU knows the norm."""
    for optimizer in ("adamw", "muon"):
        model, weights = on_meta(SMALL, None)
        trainer = prepare(model, TrainConfig(optimizer=optimizer, compile=False), CPU, torch.float32, weights)
        x = torch.randint(256, (2, 32))
        train_step(trainer, [(x, x)], 1, 1.0)
        before = [p.clone() for p in model.parameters()]
        states = [{key: value.clone() for key, value in state.items()} for o in trainer.optimizers for state in o.state.values()]
        trainer.clip = lambda max_norm: torch.tensor(math.nan)
        train_step(trainer, [(x, x)], 1, 1.0)
        assert all(map(torch.equal, before, model.parameters()))
        after = [state for o in trainer.optimizers for state in o.state.values()]
        assert all(torch.equal(a[key], b[key]) for a, b in zip(states, after, strict=True) for key in a)
        del trainer.clip
        train_step(trainer, [(x, x)], 1, 1.0)
        assert not any(map(torch.equal, before, model.parameters()))


def test_ddp_passes_bfloat16_between_its_compiled_parts(tmp_path):
    """DDP's compiler cuts the graph where a bucket is full. Only the residual stream is float32."""
    program(cwd=tmp_path, processes=1, program="tests/ddp_parts.py")


def test_two_processes_share_the_work_of_muon(tmp_path):
    flops = {}
    for processes in (1, 2):
        running = spawn(cwd=tmp_path, processes=processes, program="tests/muon.py")
        outputs = [p.communicate(timeout=120) for p in running]
        assert all(p.returncode == 0 for p in running), outputs
        flops[processes] = [int(out) for out, _ in outputs]
    (whole,) = flops[1]
    assert sum(flops[2]) == whole > 0 and max(flops[2]) < 0.51 * whole


# Saving


def saver(tmp_path, monkeypatch, write):
    monkeypatch.setattr(plaingpt.checkpoint, "write_checkpoint", write)
    model, weights = on_meta(SMALL, None)
    config = TrainConfig(log_dir=str(tmp_path), compile=False, min_lr=0.0, max_lr=1.0)
    trainer = prepare(model, config, CPU, torch.float32, weights)
    return Saver(trainer, config, get_tokenizer("bytes"), {}, None), trainer


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """One write at a time, of the state at the time of the call."""
    may_write, running, most = threading.Event(), [], []
    write_checkpoint = plaingpt.checkpoint.write_checkpoint

    def slow(*args):
        running.append(args)
        most.append(len(running))
        assert may_write.wait(20)
        write_checkpoint(*args)
        running.pop()

    saves, trainer = saver(tmp_path, monkeypatch, slow)
    saves.save(1, 16)
    at_step_1 = trainer.eval_model.lm_head.weight.detach().clone()
    with torch.no_grad():
        trainer.eval_model.lm_head.weight.add_(1)
    assert names(tmp_path) == []
    second = threading.Thread(target=saves.save, args=(2, 32))
    second.start()
    time.sleep(0.2)
    assert second.is_alive()  # waits for the first write
    may_write.set()
    second.join()
    saves.wait()
    assert names(tmp_path) == ["model_000001.pt", "model_000002.pt"] and most == [1, 1]
    first = torch.load(tmp_path / "model_000001.pt", weights_only=True)["model"]
    assert torch.equal(first["lm_head.weight"], at_step_1)
    assert first["lm_head.weight"].data_ptr() == first["transformer.wte.weight"].data_ptr()


@pytest.mark.parametrize("call", ["save", "wait"])
def test_a_failed_write_is_reported_by_the_next_call(tmp_path, monkeypatch, call):
    def fail(*args):
        raise UserError("the disk is full")

    saves, _ = saver(tmp_path, monkeypatch, fail)
    saves.save(1, 16)
    with pytest.raises(UserError, match="the disk is full"):
        saves.save(2, 32) if call == "save" else saves.wait()


def test_a_write_is_finished_when_the_run_fails(tmp_path, monkeypatch):
    """The saver waits when it is freed, before the lock of the run directory is released."""
    write_checkpoint = plaingpt.checkpoint.write_checkpoint

    def slow(*args):
        time.sleep(0.5)
        write_checkpoint(*args)

    saves, _ = saver(tmp_path, monkeypatch, slow)
    saves.save(1, 16)
    del saves
    assert names(tmp_path) == ["model_000001.pt"]


def test_a_run_of_an_older_version_gives_a_note(tmp_path):
    """It had another order of the sequences."""
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    path = tmp_path / "run" / "model_000002.pt"
    saved = torch.load(path, weights_only=True)
    del saved["train_config"]["order"]
    torch.save(saved, path)
    out, _ = train("--log_dir", "run", "--max_steps", 3, "--resume", cwd=tmp_path)
    assert "the order of the data is now different" in out
    out, _ = train("--log_dir", "run", "--max_steps", 4, "--resume", cwd=tmp_path)
    assert "order of the data" not in out


# Benchmarks


def test_rounded_rows_have_few_shapes_and_equal_scores(monkeypatch):
    model, weights = on_meta(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=80, vocab_size=256), None)
    fill(model, weights)
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, n))) for n in rng.integers(2, 60, 80)]
    examples = [plaingpt.evaluation.Example([text], [" a", " bcd"]) for text in texts]
    rows = plaingpt.evaluation.make_rows(examples, get_tokenizer("bytes"), model.config)
    hidden, shapes, found = model.hidden, set(), {}
    model.hidden = lambda idx, **kwargs: shapes.add(idx.shape[1]) or hidden(idx, **kwargs)
    for multiple in (1, 64):
        shapes.clear()
        monkeypatch.setitem(plaingpt.evaluation.ROUND, "cpu", multiple)
        scores = plaingpt.evaluation.score(model, examples, rows, CPU, torch.autocast("cpu", enabled=False), 64)
        found[multiple] = scores.log_likelihood, len(shapes)
    np.testing.assert_allclose(found[64][0], found[1][0], rtol=1e-5)
    assert found[64][1] == 1 < 20 < found[1][1]


# The data


def test_the_prefetch_thread_uses_the_gpu_of_its_process(monkeypatch):
    """Else pinned memory would also start CUDA on GPU 0 for every process."""
    used = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append((device, threading.current_thread())))
    device = torch.device("cuda:3")
    assert list(prefetch(iter([1, 2]), device)) == [1, 2]
    assert [place for place, _ in used] == [device] and used[0][1] is not threading.main_thread()


@pytest.mark.parametrize("n", [1, 2, 3, 8, 211, 1000, 4097])
def test_permute_is_a_permutation(n):
    orders = [[permute(i, n, 1337, epoch) for i in range(n)] for epoch in range(3)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    if n > 8:
        assert orders[0] != orders[1] != orders[2] != orders[0] != [permute(i, n, 1338, 0) for i in range(n)]


def test_permute_is_uniform():
    """Chi-squared of (position, image) over many epochs, and of the distance of neighbors."""
    n, epochs = 30, 3000
    orders = np.array([[permute(i, n, 0, epoch) for i in range(n)] for epoch in range(epochs)])
    counts = np.stack([np.bincount(column, minlength=n) for column in orders.T])
    steps = np.bincount((np.diff(orders) % n).ravel(), minlength=n)[1:]  # 0 does not occur
    for found, degrees in ((counts, (n - 1)**2), (steps, n - 2)):
        expected = found.sum() / found.size
        chi = ((found - expected)**2 / expected).sum()
        assert abs(chi - degrees) < 5 * (2 * degrees)**0.5, (chi, degrees)


def test_the_order_of_a_trillion_tokens_takes_no_memory_and_no_time():
    n, start = 10**12 // 1024, time.perf_counter()
    images = {permute(n - 1 - i, n, 1337, 7) for i in range(1000)}
    assert len(images) == 1000 and max(images) < n and time.perf_counter() - start < 5


def test_shards_stay_open_and_are_checked_once_per_batch(shards, monkeypatch):
    tokens = open_tokens(shards, "train", 256, get_tokenizer("bytes"))
    loader, opened, checked = DataLoaderLite(tokens, 16), [], []
    open_file, fstat = builtins.open, os.fstat
    monkeypatch.setattr(builtins, "open", lambda *args, **kwargs: opened.append(args) or open_file(*args, **kwargs))
    monkeypatch.setattr(os, "fstat", lambda file: checked.append(file) or fstat(file))
    for i in range(20):
        loader.batch(8 * i, 8)
    assert len(opened) == 3 and 20 <= len(checked) <= 25  # a sequence may lie in two shards
    monkeypatch.setattr(plaingpt.shards, "MAX_OPEN", 1)
    expected = loader.batch(0, 8)
    assert sum(shard.file is not None for shard in tokens.shards) == 1
    assert all(map(torch.equal, loader.batch(0, 8), expected))


# Large models


@pytest.mark.parametrize("preset, millions", [
    ("gpt3-350m", 356), ("gpt3-760m", 760), ("gpt3-1.3b", 1316), ("gpt3-2.7b", 2652), ("gpt3-6.7b", 6658),
    ("gpt3-13b", 12853)])
def test_presets_of_gpt3(preset, millions):
    """GPT-3 paper, table 2.1: names, batches of 0.5M, 1M or 2M tokens, at most 10B tokens here."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**PRESETS[preset]))
    assert round(sum(p.numel() for p in model.parameters()) / 10**6) == millions and model.config.block_size == 2048
    config = TrainConfig(**RECIPES[preset])
    assert 9.9e9 < config.total_batch_size * config.max_steps < 10.1e9
    assert config.warmup_steps * config.total_batch_size == pytest.approx(375e6, rel=2e-3)
    assert config.total_batch_size % (8 * config.batch_size * 2048) == 0
