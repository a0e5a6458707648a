"""What the main use, several GPUs, needs, as far as a CPU can see it."""

import math
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import program, spawn

import plaingpt.device as devices
import plaingpt.evaluation as evaluation
from model import GPT, PRESETS, GPTConfig
from plaingpt.cli import UserError
from plaingpt.device import Process
from plaingpt.loss import CHUNK_SIZE, LinearCrossEntropyLoss
from plaingpt.order import permute
from tokenizer import get_tokenizer
from train_gpt2 import RECIPES, TrainConfig, make_training, train_step

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256)
ALONE = Process(0, 1, 0, 1, torch.device("cpu"), torch.float32)


# The head


def test_the_compiled_head_keeps_one_chunk_of_logits_in_memory(monkeypatch):
    """The generated code for two chunks: no float32 logits, and one buffer for all chunks."""
    import torch._inductor.config as inductor
    import torch._inductor.ir as ir
    from torch._inductor.utils import run_and_get_code

    # On a CPU, Inductor stores results of exp that are used twice. On a GPU it does not.
    monkeypatch.setattr(ir, "is_cpu", lambda device: False)
    monkeypatch.setattr(inductor, "fx_graph_cache", False)
    V, loss_fn = 1000, LinearCrossEntropyLoss()
    x, w = torch.randn(8, 64, 32, requires_grad=True), (0.02 * torch.randn(V, 32)).requires_grad_()
    y = torch.randint(V, (8, 64))
    compiled = torch.compile(loss_fn, fullgraph=True, dynamic=False)

    def run(function, rows):
        monkeypatch.setitem(CHUNK_SIZE, "cpu", rows)
        x.grad = w.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(x, w, y)
        loss.backward()
        return loss, x.grad, w.grad

    expected = run(loss_fn, 256)
    found, code = run_and_get_code(lambda: run(compiled, 64))  # 4 x 64 if compiled
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert buffers(code) == ["torch.bfloat16"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # of a validation
        _, code = run_and_get_code(lambda: compiled(x, w, y))
    assert buffers(code) == ["torch.bfloat16"]


def buffers(code):
    """The dtypes of the buffers for logits of 4 x 64 positions in Inductor's code."""
    return re.findall(r"empty_strided_cpu\(\(256, 1024\), \(1024, 1\), (\S+)\)", "\n".join(code))


def test_sums_of_one_process_stay_where_they_are():
    """Benchmarks sum in float64, which MPS does not have."""
    sums = torch.ones(3, dtype=torch.float64)
    assert Process(0, 1, 0, 1, torch.device("mps"), torch.float32).sum(sums) is sums


# The step


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_with_a_non_finite_gradient_changes_nothing(optimizer):
    config = TrainConfig(optimizer=optimizer, max_lr=0.01)
    training = make_training(SMALL, config, ALONE)
    model = training.raw_model
    x, norms = torch.randint(256, (2, 32)), []  # (B, T)

    def step():
        """Takes a step -> copies of all parameters and moments after it."""
        norms.append(train_step(training, [(x, x)], 1.0, [], ALONE)[1])
        states = [state for o in training.optimizers for state in o.state.values()]
        moments = [moment for state in states for moment in state.values()]
        return [tensor.detach().clone() for tensor in (*model.parameters(), *moments)]

    before = step()
    hook = model.transformer.ln_f.bias.register_hook(lambda gradient: gradient * math.nan)
    assert all(map(torch.equal, before, step()))
    hook.remove()
    assert not any(map(torch.equal, before, step()))
    assert [math.isfinite(norm) for norm in norms] == [True, False, True]


def test_a_run_compiles_its_model_once():
    """Although train_step sets an attribute for DDP, and a validation uses the same model."""
    training = make_training(SMALL, TrainConfig(), ALONE)
    raw_model = training.raw_model
    x, graphs = torch.randint(256, (2, 32)), []  # (B, T)
    model = torch.compile(raw_model, backend=lambda graph, _: graphs.append(graph) or graph,
                          dynamic=False, fullgraph=True)
    for _ in range(2):
        train_step(training._replace(model=model), [(x, x)] * 3, 1.0, [], ALONE)
        with torch.no_grad():
            raw_model.eval().loss(raw_model.hidden(x), x)
        raw_model.train()
    assert len(graphs) == 1


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


# Benchmarks


def test_rounded_rows_have_few_shapes_and_equal_scores(monkeypatch):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=80, vocab_size=256))
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, n))) for n in rng.integers(2, 60, 80)]
    examples = [evaluation.Example([text], [" a", " bcd"]) for text in texts]
    rows = evaluation.make_rows(examples, get_tokenizer("bytes"), model.config)
    hidden, shapes, found = model.hidden, set(), {}
    model.hidden = lambda idx, **kwargs: shapes.add(idx.shape[1]) or hidden(idx, **kwargs)
    for multiple in (1, 64):
        shapes.clear()
        monkeypatch.setitem(evaluation.ROUND, "cpu", multiple)
        scores = evaluation.score(model, examples, rows, ALONE, 64)
        found[multiple] = scores.log_likelihood, len(shapes)
    np.testing.assert_allclose(found[64][0], found[1][0], rtol=1e-5)
    assert found[64][1] == 1 < 20 < found[1][1]


# The device


def test_a_gpu_that_cannot_be_used_is_an_error(monkeypatch):
    """A driver too old for torch: is_available() only warns. A hidden GPU is no error."""
    exists = Path.exists

    def ones(size, device):
        if device.type == "cuda":
            raise RuntimeError("The NVIDIA driver on your system is too old\nlonger text")

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "nvidia0" or exists(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=r"is too old \(torch 2.*, driver .*\);.* --device cpu$"):
        devices.find_device("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.find_device("auto", world_size=2).type == "cpu"  # hidden
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, local_rank in (("cuda:1", 0), ("cuda", 2), ("auto", 2)):
        with pytest.raises(UserError, match="own GPU, and there are 2; .* --nproc_per_node=2$"):
            devices.find_device(name, local_rank, world_size=3)


def test_compile_says_what_it_needs_and_that_it_takes_long(monkeypatch, capsys):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not devices.choose_compile(None, cpu) and not devices.choose_compile(False, cuda)
    assert devices.choose_compile(None, cuda) and devices.choose_compile(True, cpu)
    assert capsys.readouterr().out.count("take a minute or more") == 2  # once for each True
    monkeypatch.setenv("CC", "missing")
    with pytest.raises(UserError, match="needs a C.. compiler .* or use --no-compile$"):
        devices.choose_compile(None, cuda)


def test_the_residual_stream_is_bfloat16_on_cuda(monkeypatch):
    """Only with products in bfloat16: float16 would overflow. A CPU plays CUDA here."""
    model, dtypes = GPT(SMALL), []
    for block in model.transformer.h:
        block.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    for is_cuda, dtype in ((True, torch.bfloat16), (True, torch.float16), (False, torch.bfloat16)):
        monkeypatch.setattr(torch.Tensor, "is_cuda", is_cuda, raising=False)
        with torch.autocast("cpu", dtype):
            model.hidden(torch.zeros(2, 32, dtype=torch.long))
    assert dtypes == [torch.bfloat16] * 2 + [torch.float32] * 4


# The data


def test_the_prefetch_thread_uses_the_gpu_of_its_process(monkeypatch):
    """Else pinned memory would also start CUDA on GPU 0 for every process."""
    used, device = [], torch.device("cuda:3")
    monkeypatch.setattr(torch.cuda, "set_device",
                        lambda device: used.append((device, threading.current_thread())))
    assert list(devices.prefetch(iter([1, 2]), device)) == [1, 2]
    assert [place for place, _ in used] == [device]
    assert used[0][1] is not threading.main_thread()


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


# Large models


@pytest.mark.parametrize("preset, millions", [
    ("gpt3-350m", 356), ("gpt3-760m", 760), ("gpt3-1.3b", 1316), ("gpt3-2.7b", 2652),
    ("gpt3-6.7b", 6658), ("gpt3-13b", 12853)])
def test_presets_of_gpt3(preset, millions):
    """GPT-3 paper, table 2.1: names, batches of 0.5M, 1M or 2M tokens, at most 10B tokens here."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**PRESETS[preset]))
    assert round(sum(p.numel() for p in model.parameters()) / 10**6) == millions
    config = TrainConfig(**RECIPES[preset])
    assert 9.9e9 < config.total_batch_size * config.max_steps < 10.1e9
    assert config.warmup_steps * config.total_batch_size == pytest.approx(375e6, rel=2e-3)
    assert config.total_batch_size % (8 * config.batch_size * 2048) == 0
