"""Tests that need a GPU: pytest -m gpu. On a machine without CUDA, pytest skips these tests."""

import math
import subprocess
import sys
import warnings
from dataclasses import replace

from plaingpt.device import choose_dtype, set_matmul_precision
from plaingpt.large.process import SplitProcess
from plaingpt.loss import ChunkedCrossEntropy
from plaingpt.process import Process
from plaingpt.scoring.benchmark import Example
from plaingpt.scoring.score import make_rows, score
from plaingpt.tokenizer import get_tokenizer

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import FSDP, PP, ROOT, TINY, TP, assert_close_logs, checkpoint, read_log

from model import GPT, GPTConfig
from train_gpt2 import TrainConfig, Training, train_step
from train_large import LargeConfig, ShardedTraining

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
CUDA = torch.device("cuda:0")
SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=128, vocab_size=1000)


def make(gpt_config=SMALL, dtype="bfloat16", way="one", **settings):
    """Builds a model and its optimizers on the GPU. Returns (Training, Process, (x, y)).

    way: "one", "ddp" or "fsdp". With "ddp" and "fsdp", one process uses the code for several
    processes. x, y: the inputs and targets of 8 sequences, (8, T) each.
    """
    dtype = choose_dtype(dtype, CUDA)
    set_matmul_precision(dtype, CUDA)
    process = Process(0, 1, CUDA, dtype)
    settings = {"compile": False, "max_lr": 1e-3, **settings}
    if way == "fsdp":
        process = SplitProcess(0, 1, CUDA, dtype)
        training = ShardedTraining(gpt_config, LargeConfig(**settings), process)
    else:
        both = replace(process, world_size=1 + (way == "ddp"))
        training = Training(gpt_config, TrainConfig(**settings), both)
    x, y = torch.randint(gpt_config.vocab_size, (2, 8, gpt_config.block_size), device=CUDA)
    return training, process, (x, y)


def losses(n_micro=2, **settings):
    """Takes five steps on one batch. Returns the loss and gradient norm of each step, (5, 2)."""
    torch.manual_seed(0)
    training, process, batch = make(**settings)
    steps = [train_step(training, [batch] * n_micro) for _ in range(5)]
    return torch.tensor([(metrics["train"], metrics["norm"]) for metrics in steps])


@pytest.fixture
def process_group():
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=CUDA)
    yield
    dist.barrier()
    dist.destroy_process_group()


def gpu_train(*flags, cwd, processes=1):
    """Runs train_gpt2.py, or train_large.py with --large, on a small model. Returns the output."""
    flags = [*TINY, "--device", "cuda", "--no-compile", *map(str, flags)]
    path = ROOT / "train_gpt2.py"
    if "--large" in flags:
        path = ROOT / "train_large.py"
        flags.remove("--large")
    command = [sys.executable, str(path), *flags]
    if processes > 1:
        command[1:1] = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={processes}",
        ]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_compiled_step_equals_the_eager_one():
    torch.testing.assert_close(losses(compile=True), losses(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_steps_are_close_to_float32(dtype):
    torch.testing.assert_close(losses(dtype=dtype), losses(dtype="float32"), rtol=3e-2, atol=3e-2)


def test_the_residual_stream_is_bfloat16_on_cuda():
    """With bfloat16 autocast on CUDA, the residual stream is bfloat16.

    With float16 autocast, the residual stream stays float32, because float16 could overflow. For a
    CPU, see test_model.py.
    """
    model, dtypes = GPT(SMALL).to(CUDA), []
    for block in model.transformer.h:
        block.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype):
            model.hidden(torch.zeros(2, 32, dtype=torch.long, device=CUDA))
    assert dtypes == [torch.bfloat16] * 2 + [torch.float32] * 2


def test_float16_skips_a_step_that_overflows():
    training, process, batch = make(dtype="float16")
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**60)
    training.scaler, parameters = scaler, training.raw_model.parameters
    before = [p.clone() for p in parameters()]
    metrics = train_step(training, [batch])
    assert not math.isfinite(metrics["norm"]) and scaler.get_scale() < 2.0**60
    assert all(map(torch.equal, before, parameters()))


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(optimizer="muon"), dict(activation_checkpointing=True)],
    ids=["adamw", "muon", "checkpointing"],
)
def test_ddp_compiles_without_a_graph_break(process_group, settings):
    """A single process uses DDP with NCCL. With fullgraph=True, a graph break raises an error."""
    found = losses(compile=True, way="ddp", **settings)
    assert found.isfinite().all() and found[-1, 0] < found[0, 0]


def test_one_synchronization_per_step():
    training, process, batch = make()
    train_step(training, [batch] * 3)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(training, [batch] * 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchron" in str(w.message) for w in caught) == 1


def test_memory_of_a_step_of_gpt2():
    """A micro-batch contains 64 sequences of 1,024 tokens.

    Weights, gradients and moments need 2 GB. Activations need 32 bytes per token, channel and
    layer, which is 19 GB. The logits of a chunk need 1.65 GB, and their gradient overwrites them.
    """
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB")
    training, process, _ = make(GPTConfig(), compile=True)
    x = torch.randint(50257, (64, 1024), device=CUDA)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        train_step(training, [(x, x)])
    # Version 2.1 needed 29.6e9 on an H100, because it kept the logits of all chunks.
    assert torch.cuda.max_memory_allocated() < 27e9  # we calculated 25.1e9


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_loss_with_more_than_2_to_the_31_logits(is_compiled):
    """In a kernel that reads all logits, 32-bit indices would overflow.

    The test compares the loss with PyTorch's cross-entropy, for one sequence at a time.
    """
    if torch.cuda.get_device_properties(0).total_memory < 20e9:
        pytest.skip("needs 20 GB")
    torch.manual_seed(0)
    V, C = 50257, 768
    x = torch.randn((64, 1024, C), device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    y = torch.randint(V, (64, 1024), device=CUDA)
    y[:, ::7] = -100
    weight = (0.02 * torch.randn((V, C), device=CUDA)).requires_grad_()
    loss_fn = ChunkedCrossEntropy(V)
    if is_compiled:
        loss_fn.compile(dynamic=False, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = loss_fn(x, y, weight)
        with torch.no_grad():
            losses = loss_fn(x, y, weight, reduction="none")  # (B, T)
    loss.backward()
    found = [x.grad, weight.grad]
    x.grad = weight.grad = None
    n = (y != -100).sum()
    for i in range(64):
        with torch.autocast("cuda", torch.bfloat16):
            logits = F.linear(x[i], weight).float()  # (T, V)
        expected = F.cross_entropy(logits, y[i], reduction="none")  # (T)
        torch.testing.assert_close(losses[i], expected, rtol=1e-2, atol=1e-2)
        (expected.sum() / n).backward()
    torch.testing.assert_close(loss, losses.sum() / n)
    for a, b in zip(found, [x.grad, weight.grad]):
        assert (a - b).norm() < 1e-2 * b.norm()


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--compile"]], ids=["eager", "compiled"])
def test_a_run_without_a_micro_batch_size_finds_one(tmp_path, how):
    i = TINY.index("--batch_size")
    flags = [*TINY[:i], *TINY[i + 2 :], "--device", "cuda", "--no-compile", *how]
    command = [sys.executable, str(ROOT / "train_gpt2.py"), *flags, "--log_dir", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "--batch_size 16 fits into memory" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer, first, second",
    [
        ("adamw", "cuda", "cuda"),
        ("muon", "cuda", "cuda"),
        ("adamw", "cpu", "cuda"),
        ("adamw", "cuda", "cpu"),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, optimizer, first, second):
    """The first half and the second half of a run may use different devices: a CPU and a GPU."""
    flags = ["--optimizer", optimizer, "--save_every", 5, "--keep", 0]
    gpu_train("--log_dir", "whole", *flags, cwd=tmp_path)
    gpu_train("--log_dir", "run", *flags, "--device", first, cwd=tmp_path)
    (tmp_path / "run" / "model_000010.pt").unlink()
    out = gpu_train("--log_dir", "run", *flags, "--resume", "--device", second, cwd=tmp_path)
    assert "resumed from step 5" in out
    assert_close_logs(tmp_path / "whole", tmp_path / "run", rel=1e-3)


def test_benchmarks_give_the_scores_of_the_cpu():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=128))
    texts = [f"A sentence about number {i}, and more words" * (1 + i % 3) for i in range(50)]
    examples = [Example([text], [" one", " of two words"]) for text in texts]
    rows = make_rows(examples, get_tokenizer("gpt2"), model.config)
    found = []
    for device in (torch.device("cpu"), CUDA):
        set_matmul_precision(torch.float32, device)  # no TF32
        process = Process(0, 1, device, torch.float32)
        scores = score(model.to(device), examples, rows, process, 2048)
        found.append(torch.tensor(scores.log_likelihood))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_generation():
    torch.manual_seed(0)
    model, idx = GPT(SMALL).eval(), torch.zeros(2, 1, dtype=torch.long)
    set_matmul_precision(torch.float32, CUDA)
    greedy = model.generate(idx, 150, temperature=0)  # beyond the context of 128
    assert model.to(CUDA).generate(idx.to(CUDA), 150, temperature=0).tolist() == greedy.tolist()
    a, b = (model.generate(idx.to(CUDA), 20, top_k=50, seed=1).tolist() for _ in range(2))
    assert a == b


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_one_process_with_a_process_group(process_group, way):
    """A single process, with a process group, uses the classes for several processes."""
    found = losses(dtype="float32", way=way)
    torch.testing.assert_close(found, losses(dtype="float32"), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("flags", [[], FSDP, TP, PP], ids=["ddp", "fsdp", "tp", "pp"])
@pytest.mark.parametrize(
    "how, rel",
    [([], 1e-3), (["--compile", "--dtype", "bfloat16"], 3e-2)],
    ids=["float32", "compiled"],
)
def test_layouts_of_two_gpus(tmp_path, flags, how, rel):
    gpu_train("--log_dir", "one", *how, cwd=tmp_path)
    gpu_train("--log_dir", "two", *how, *flags, cwd=tmp_path, processes=2)
    assert_close_logs(tmp_path / "one", tmp_path / "two", rel=rel)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_runs_are_equal_bit_for_bit(tmp_path, dtype):
    for name in ("one", "two"):
        gpu_train("--log_dir", name, "--deterministic", "--dtype", dtype, cwd=tmp_path)
    assert read_log(tmp_path / "one") == read_log(tmp_path / "two")
    one, two = (checkpoint(tmp_path / name, 10)["model"] for name in ("one", "two"))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
