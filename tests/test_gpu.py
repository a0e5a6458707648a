"""The same checks on a GPU: pytest -m gpu. Without CUDA all are skipped."""

import math
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TINY, assert_close_logs, read_log

import plaingpt.evaluation
from model import GPT, PRESETS, GPTConfig
from plaingpt.checkpoint import on_meta
from plaingpt.device import choose_dtype
from tokenizer import get_tokenizer
from train_gpt2 import TrainConfig, prepare, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
CUDA = torch.device("cuda:0")
SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=128, vocab_size=1000)


def trainer_on_gpu(gpt_config=SMALL, dtype="bfloat16", **settings):
    """A trainer and a batch (x, y) of 8 sequences."""
    model, weights = on_meta(gpt_config, None)
    config = TrainConfig(**{**dict(compile=False), **settings})
    trainer = prepare(model, config, CUDA, choose_dtype(dtype, CUDA), weights)
    torch.manual_seed(0)
    x, y = torch.randint(gpt_config.vocab_size, (2, 8, gpt_config.block_size), device=CUDA)
    return trainer, (x, y)


def losses(n=5, micro_steps=2, **settings):
    """The losses and gradient norms of n steps on one batch."""
    trainer, batch = trainer_on_gpu(**settings)
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
    return torch.tensor([train_step(trainer, iter([batch] * micro_steps), micro_steps, 1.0)[:2] for _ in range(n)])


@pytest.fixture
def process_group():
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=CUDA)
    yield
    dist.destroy_process_group()


def gpu_train(*flags, cwd, processes=1):
    """Runs train_gpt2.py on GPUs with small settings -> its output."""
    flags = [*TINY, "--device", "cuda", "--no-compile", *map(str, flags)]
    command = [sys.executable, str(ROOT / "train_gpt2.py"), *flags]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_compiled_step_equals_the_eager_one():
    torch.testing.assert_close(losses(compile=True), losses(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_steps_are_close_to_float32(dtype):
    torch.testing.assert_close(losses(dtype=dtype), losses(dtype="float32"), rtol=3e-2, atol=3e-2)


def test_float16_skips_a_step_that_overflows():
    trainer, batch = trainer_on_gpu(dtype="float16")
    trainer.scaler._init_scale = 2.0**60
    before = [p.clone() for p in trainer.eval_model.parameters()]
    _, norm, _ = train_step(trainer, iter([batch]), 1, 1.0)
    assert not math.isfinite(norm) and trainer.scaler.get_scale() < 2.0**60
    assert all(map(torch.equal, before, trainer.eval_model.parameters()))


@pytest.mark.parametrize("settings", [dict(), dict(optimizer="muon"), dict(activation_checkpointing=True)],
                         ids=["adamw", "muon", "checkpointing"])
def test_ddp_compiles_without_a_graph_break(process_group, settings):
    """One process over NCCL. fullgraph=True makes a graph break an error."""
    found = losses(compile=True, **settings)
    dist.barrier()
    assert found.isfinite().all() and found[-1, 0] < found[0, 0]


def test_a_ramp_runs_under_compile(tmp_path):
    out = gpu_train("--compile", "--rampup_steps", 8, "--rampup_batch_size", 128, "--log_dir", "run", cwd=tmp_path)
    assert "done:" in out


def test_one_synchronization_per_step():
    trainer, batch = trainer_on_gpu()
    train_step(trainer, iter([batch] * 3), 3, 1.0)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(trainer, iter([batch] * 3), 3, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchron" in str(w.message) for w in caught) == 1


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 40e9, reason="needs 40 GB")
def test_memory_of_a_step_of_gpt2():
    """64 sequences of 1,024 tokens. Weights, gradients and moments: 2 GB. Activations: 36 bytes per
    token, channel and layer, 22 GB. Logits and gradients of the head: 1.3 GB."""
    trainer, _ = trainer_on_gpu(GPTConfig(**PRESETS["gpt2"]), compile=True)
    x = torch.randint(50257, (64, 1024), device=CUDA)
    for _ in range(2):
        train_step(trainer, iter([(x, x)]), 1, 1.0)
    torch.cuda.reset_peak_memory_stats()
    train_step(trainer, iter([(x, x)]), 1, 1.0)
    assert torch.cuda.max_memory_allocated() < 28e9


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, optimizer):
    flags = ["--optimizer", optimizer, "--save_every", 5, "--keep", 0]
    gpu_train("--log_dir", "whole", *flags, cwd=tmp_path)
    gpu_train("--log_dir", "halves", *flags, cwd=tmp_path)
    (tmp_path / "halves" / "model_000010.pt").unlink()
    gpu_train("--log_dir", "halves", *flags, "--resume", cwd=tmp_path)
    assert_close_logs(tmp_path / "whole", tmp_path / "halves", rel=1e-3)


@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_resumes_on_another_device(tmp_path, devices):
    flags = ["--save_every", 5, "--keep", 0]
    gpu_train("--log_dir", "whole", *flags, cwd=tmp_path)
    gpu_train("--log_dir", "run", *flags, "--device", devices[0], cwd=tmp_path)
    (tmp_path / "run" / "model_000010.pt").unlink()
    out = gpu_train("--log_dir", "run", *flags, "--resume", "--device", devices[1], cwd=tmp_path)
    assert "resumed from step 5" in out
    assert_close_logs(tmp_path / "whole", tmp_path / "run", rel=1e-3)


def test_benchmarks_give_the_scores_of_the_cpu():
    torch.manual_seed(0)
    model, tokenizer = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=128)), get_tokenizer("gpt2")
    examples = [plaingpt.evaluation.Example([f"A sentence about number {i}, and more words" * (1 + i % 3)], [" one", " of two words"])
                for i in range(50)]
    rows = plaingpt.evaluation.make_rows(examples, tokenizer, model.config)
    choose_dtype("float32", CUDA)  # no TF32
    found = [plaingpt.evaluation.score(model.to(device), examples, rows, device, torch.autocast(device.type, enabled=False), 2048)
             for device in (torch.device("cpu"), CUDA)]
    torch.testing.assert_close(*(torch.tensor(scores.log_likelihood) for scores in found), rtol=1e-4, atol=1e-4)


def test_generation():
    torch.manual_seed(0)
    model, idx = GPT(SMALL).eval(), torch.zeros(2, 1, dtype=torch.long)
    choose_dtype("float32", CUDA)
    greedy = model.generate(idx, 150, temperature=0)  # beyond the context of 128
    assert model.to(CUDA).generate(idx.to(CUDA), 150, temperature=0).tolist() == greedy.tolist()
    a, b = (model.generate(idx.to(CUDA), 20, top_k=50, seed=1).tolist() for _ in range(2))
    assert a == b


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_process_with_a_process_group(process_group, parallel):
    """The classes for several processes on one GPU. FSDP has nothing to shard there."""
    torch.testing.assert_close(losses(dtype="float32", parallel=parallel), losses(dtype="float32"), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("flags", [[], ["--parallel", "fsdp"], ["--tp", 2], ["--pp", 2]], ids=["ddp", "fsdp", "tp", "pp"])
def test_layouts_of_two_gpus(tmp_path, flags):
    gpu_train("--log_dir", "one", cwd=tmp_path)
    gpu_train("--log_dir", "two", *flags, cwd=tmp_path, processes=2)
    a, b = read_log(tmp_path / "one"), read_log(tmp_path / "two")
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert float(b[key]) == pytest.approx(float(value), rel=1e-3), key
