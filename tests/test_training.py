"""Runs the real program as a user does: losses, layouts, resuming, signals and flags."""

import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, assert_close_logs, program, read_log, spawn, train

from model import GPT, GPTConfig
from plaingpt.batches import check_batch_size, get_batch_tokens, micro_batch
from plaingpt.checkpoint import fill, load_checkpoint, on_meta
from plaingpt.cli import UserError, fit, print0, show_progress
from plaingpt.device import batch_size_advice, data_parallel_rank, prefetch
from plaingpt.shards import open_tokens
from tokenizer import get_tokenizer
from train_gpt2 import (
    DataLoaderLite,
    TrainConfig,
    get_lr,
    parse_args,
    prepare,
    train_step,
)


def checkpoint(directory, step):
    return torch.load(directory / f"model_{step:06d}.pt", weights_only=True)


def text_loader(split, T, tokenizer="bytes", **options):
    tokenizer = get_tokenizer(tokenizer)
    return DataLoaderLite(open_tokens(ROOT / "input.txt", split, tokenizer.n_vocab, tokenizer), T, **options)


def gradients(saved):
    """AdamW's first moment after one step from zero is (1 - 0.9) times the gradient."""
    return [state["exp_avg"] / 0.1 for _, state in sorted(saved["optimizer"]["adamw"]["state"].items())]


# Layouts


def test_two_processes_match_one_process(tmp_path):
    flags = ["--max_steps", 20, "--total_batch_size", 1024]
    train(*flags, "--log_dir", "one", "--batch_size", 32, cwd=tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "train_gpt2.py")]
    done = subprocess.run([*torchrun, *TINY, *map(str, flags), "--log_dir", "two", "--batch_size", "4"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step     0/20") == 1  # only rank 0 prints
    assert_close_logs(tmp_path / "one", tmp_path / "two", rel=1e-5)
    # train, lr, norm and tokens at every step; val and bpb at 0, 5, … 20
    assert len(read_log(tmp_path / "one")) == 20 * 4 + 2 * 5


def fresh(config):
    """The model that a run with seed 1337 starts from."""
    model, weights = on_meta(config, None, 1337)
    fill(model, weights)
    return model


def test_gradients_of_an_accumulated_step(tmp_path):
    """16 sequences give the same gradient in one batch, in 8 micro-batches and on two processes."""
    flags = ["--max_steps", 1, "--grad_clip", 0]
    train(*flags, "--log_dir", "one", "--batch_size", 2, cwd=tmp_path)
    train(*flags, "--log_dir", "two", "--batch_size", 4, cwd=tmp_path, processes=2)
    model = fresh(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256))
    x, y = text_loader("train", 32).batch(0, 16)
    model(x, y)[1].backward()
    (optimizer,) = model.configure_optimizers(0.1, 1e-3)
    by_hand = [p.grad for group in optimizer.param_groups for p in group["params"]]
    for name in ("one", "two"):
        for a, b in zip(gradients(checkpoint(tmp_path / name, 1)), by_hand, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_saved_by_two_processes_resumed_by_one(tmp_path):
    train("--log_dir", "whole", cwd=tmp_path)
    train("--log_dir", "run", "--max_steps", 10, "--save_every", 5, "--keep", 0, cwd=tmp_path, processes=2)
    (tmp_path / "run" / "model_000010.pt").unlink()
    out, _ = train("--log_dir", "run", "--resume", "--batch_size", 16, cwd=tmp_path)
    assert "resumed from step 5" in out
    assert_close_logs(tmp_path / "whole", tmp_path / "run", rel=1e-5)


def test_muon_on_two_processes(tmp_path):
    """Muon computes in bfloat16, so rounding differences grow to 1/256. The tolerance is larger."""
    for name, processes in (("one", 1), ("two", 2)):
        train("--optimizer", "muon", "--log_dir", name, cwd=tmp_path, processes=processes)
    assert_close_logs(tmp_path / "one", tmp_path / "two", rel=2e-3)


# Resuming


def test_resume_requires_the_same_optimizer(tmp_path):
    train("--log_dir", "run", "--save_every", 5, "--keep", 0, cwd=tmp_path)
    (tmp_path / "run" / "model_000010.pt").unlink()
    _, err = train("--log_dir", "run", "--resume", "--optimizer", "muon", cwd=tmp_path, status=2)
    assert err == "error: the run in run has --preset baby and --optimizer adamw, not muon; give its flags again\n"


@pytest.mark.parametrize("optimizer, names", [("adamw", {"adamw"}), ("muon", {"muon", "adamw"})])
def test_a_resumed_run_is_bitwise_equal(tmp_path, optimizer, names):
    flags = ["--optimizer", optimizer, "--save_every", 5, "--keep", 0]
    train("--log_dir", "whole", *flags, cwd=tmp_path)
    train("--log_dir", "halves", *flags, cwd=tmp_path)
    (tmp_path / "halves" / "model_000010.pt").unlink()  # as if killed after step 5 was saved
    train("--log_dir", "halves", *flags, "--resume", "--batch_size", 4, cwd=tmp_path)
    assert read_log(tmp_path / "whole") == read_log(tmp_path / "halves")
    a, b = (checkpoint(tmp_path / name, 10) for name in ("whole", "halves"))
    assert a["position"] == b["position"] == 160 and a["step"] == b["step"] == 10
    for name in a["model"]:
        assert torch.equal(a["model"][name], b["model"][name]), name
    assert a["optimizer"].keys() == b["optimizer"].keys() == names
    for name in names:
        for i, state in a["optimizer"][name]["state"].items():
            assert all(torch.equal(value, b["optimizer"][name]["state"][i][key]) for key, value in state.items())


def test_resume_without_a_run_starts_a_new_run_and_new_runs_move_old_ones(tmp_path):
    out, _ = train("--log_dir", "run", "--resume", "--max_steps", 3, cwd=tmp_path)
    assert "nothing to resume in run: starting a new run" in out
    first = (tmp_path / "run" / "log.txt").read_text()
    out, _ = train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    assert f"the old run in run was moved to {tmp_path}/run.1" in out
    train("--log_dir", "run", "--max_steps", 1, cwd=tmp_path)
    assert (tmp_path / "run.1" / "log.txt").read_text() == first and (tmp_path / "run.1" / "model_000003.pt").exists()
    assert (tmp_path / "run.2" / "model_000002.pt").exists()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["log.txt", "model_000001.pt", "run.json"]


def test_an_error_does_not_change_the_old_run(tmp_path):
    train("--log_dir", "run", "--max_steps", 1, cwd=tmp_path)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    for flags in (["--data", "missing.txt"], ["--batch_size", 3], ["--init_from", "nowhere.pt"], ["--init_from", "no/where"], ["--resume", "--n_layer", 3]):
        _, err = train("--log_dir", "run", *flags, cwd=tmp_path, status=2)
        assert err.startswith("error: ") and err.count("\n") == 1, err
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_resume_reports_what_differs(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    _, err = train("--log_dir", "run", "--resume", "--n_layer", 3, "--n_embd", 64, cwd=tmp_path, status=2)
    assert "n_layer is 2, not 3" in err and "n_embd is 32, not 64" in err
    out, _ = train("--log_dir", "run", "--resume", "--max_steps", 4, cwd=tmp_path)
    assert "note: max_steps changes from 2 to 4" in out
    _, err = train("--log_dir", "run", "--resume", "--max_steps", 3, cwd=tmp_path, status=2)
    assert err == "error: the run in run is at step 4, beyond --max_steps 3; give more steps\n"
    assert max(step for step, _ in read_log(tmp_path / "run")) == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_signal_all_processes_finish_the_step_save_and_exit_0(tmp_path, number):
    flags = ["--max_steps", 2000, "--val_every", 0, "--save_every", 0]
    a, b = spawn(*TINY, *flags, "--log_dir", "run", cwd=tmp_path, processes=2)
    for line in a.stdout:
        if "step    20/" in line:
            break
    b.send_signal(number)  # only to one process: the other must stop after the same step
    out, err = a.communicate(timeout=60)
    b.communicate(timeout=60)
    assert a.returncode == b.returncode == 0, err
    step = int(re.search(r"stopped by a signal or --max_minutes; step (\d+) is saved", out)[1])
    assert checkpoint(tmp_path / "run", step)["position"] == step * 16
    assert max(s for s, _ in read_log(tmp_path / "run")) == step - 1
    out, _ = train("--log_dir", "run", "--resume", *flags, "--max_steps", step + 2, cwd=tmp_path)
    assert f"resumed from step {step}" in out


# Checkpoints and logs


def test_checkpoint_is_a_plain_dict(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path, processes=2)
    saved = checkpoint(tmp_path / "run", 2)
    assert set(saved) == {"model", "optimizer", "scaler", "step", "position", "model_config", "train_config", "tokenizer",
                          "best_val"}
    assert saved["tokenizer"] == "bytes" and saved["step"] == 2 and saved["position"] == 32
    model = GPT(GPTConfig(**saved["model_config"]))
    model.load_state_dict(saved["model"])  # names without prefixes
    assert not {"batch_size", "rank", "world_size"} & set(saved["train_config"])


def test_a_resumed_run_saves_at_the_same_steps(tmp_path):
    """Not at the step after the one that it resumes from."""
    train("--log_dir", "run", "--save_every", 5, "--keep", 0, "--max_steps", 5, cwd=tmp_path)
    train("--log_dir", "run", "--save_every", 5, "--keep", 0, "--max_steps", 12, "--resume", cwd=tmp_path)
    assert sorted(p.name for p in (tmp_path / "run").glob("*.pt")) == [f"model_{s:06d}.pt" for s in (5, 10, 12)]


def test_keep_removes_old_checkpoints(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    # A user's file: --keep must not remove it.
    (tmp_path / "run" / "model_000002.pt").rename(tmp_path / "run" / "model_mine.pt")
    train("--log_dir", "run", "--save_every", 2, "--keep", 3, "--resume", cwd=tmp_path)
    names = sorted(p.name for p in (tmp_path / "run").glob("*.pt"))
    assert names == [f"model_{s:06d}.pt" for s in (6, 8, 10)] + ["model_mine.pt"]


def test_malicious_checkpoint_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "mark"), "w")

    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match="not a readable checkpoint"):
        load_checkpoint(tmp_path / "evil.pt")
    assert not (tmp_path / "mark").exists()


def test_run_json(tmp_path):
    train("--log_dir", "run", "--max_steps", 1, cwd=tmp_path)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["model_config"]["n_embd"] == 32 and run["train_config"]["max_steps"] == 1
    assert run["versions"]["torch"] == torch.__version__ and run["dtype"] == "float32" and run["device"].startswith("cpu")


# Features: each has a test that fails without it


def test_shuffle_and_seed_change_the_curve(tmp_path):
    for name, flags in (("a", []), ("b", ["--no-shuffle"]), ("c", ["--seed", 2])):
        train("--log_dir", name, "--max_steps", 2, *flags, cwd=tmp_path)
    losses = {read_log(tmp_path / name)[0, "train"] for name in "abc"}
    assert len(losses) == 3


def test_validation_uses_the_same_tokens_in_every_layout(tmp_path):
    for name, B, processes in (("a", 16, 1), ("b", 1, 1), ("c", 2, 2)):
        train("--log_dir", name, "--max_steps", 1, "--batch_size", B, "--val_tokens", 32 * 27, cwd=tmp_path, processes=processes)
    loader = text_loader("val", 32, shuffle=False)
    model = fresh(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256))
    expected = model(*loader.batch(0, 27))[1].item()
    for name in "abc":
        assert float(read_log(tmp_path / name)[0, "val"]) == pytest.approx(expected, rel=1e-5)


def test_float16_scales_the_loss_and_skips_overflows(tmp_path):
    train("--log_dir", "half", "--dtype", "float16", cwd=tmp_path)
    train("--log_dir", "full", cwd=tmp_path)
    saved = checkpoint(tmp_path / "half", 10)
    assert saved["scaler"]["scale"] >= 2**10 and checkpoint(tmp_path / "full", 10)["scaler"] == {}
    half, full = read_log(tmp_path / "half"), read_log(tmp_path / "full")
    assert half.keys() == full.keys() and half != full
    # Gradients are unscaled before clipping: the norms are the same.
    assert float(half[10, "val"]) == pytest.approx(float(full[10, "val"]), rel=5e-3)
    assert float(half[9, "norm"]) == pytest.approx(float(full[9, "norm"]), rel=5e-2)

    saved["scaler"]["scale"] = 2.0**40  # The next steps overflow until the scale is small enough.
    saved["step"], saved["train_config"]["max_steps"] = 10, 40
    torch.save(saved, tmp_path / "half" / "model_000010.pt")
    out, _ = train("--log_dir", "half", "--dtype", "float16", "--resume", "--max_steps", 18, cwd=tmp_path)
    assert " | 1 skipped | " in out and "loss nan" not in out
    assert checkpoint(tmp_path / "half", 18)["scaler"]["scale"] == 2.0**32


def test_batch_size_may_exceed_the_sequences_of_a_process(tmp_path):
    """Two processes have 8 of 16 sequences each, even if --batch_size is larger."""
    for name, flags, processes in (("a", ["--batch_size", 64], 2), ("b", ["--batch_size", 1], 1)):
        train("--log_dir", name, "--max_steps", 5, *flags, cwd=tmp_path, processes=processes)
    assert_close_logs(tmp_path / "a", tmp_path / "b", rel=1e-5)


def test_every_step_of_a_ramp_has_whole_micro_batches():
    """In the ramp, a micro-batch has at most the sequences of the first step: 4, later 8."""
    config = TrainConfig(rampup_steps=4, rampup_batch_size=256, total_batch_size=512, batch_size=8)
    check_batch_size(config, 64, 1, 1000)
    sizes = [micro_batch(step, config, 64, 1) for step in range(6)]
    assert sizes == [(4, 4), (4, 4), (4, 4), (4, 4), (8, 8), (8, 8)]


def test_rampup(tmp_path):
    config = TrainConfig(rampup_steps=4, rampup_batch_size=1024, total_batch_size=4096)
    assert [get_batch_tokens(s, config) for s in range(6)] == [1024, 1024, 2048, 3072, 4096, 4096]
    out, _ = train("--log_dir", "run", "--rampup_steps", 4, "--rampup_batch_size", 128, "--max_steps", 6, cwd=tmp_path)
    assert checkpoint(tmp_path / "run", 6)["position"] == (128 + 128 + 256 + 384 + 512 + 512) // 32
    train("--log_dir", "two", "--rampup_steps", 4, "--rampup_batch_size", 128, "--max_steps", 6, "--batch_size", 1,
          cwd=tmp_path, processes=2)
    assert_close_logs(tmp_path / "run", tmp_path / "two", rel=1e-5)


def test_init_from_a_checkpoint_resets_step_and_optimizer(tmp_path):
    train("--log_dir", "base", cwd=tmp_path)
    out, _ = train("--log_dir", "tuned", "--init_from", "base", "--max_steps", 1, "--max_lr", "1e-9",
                   "--block_size", 16, "--val_tokens", 512, cwd=tmp_path)
    base, tuned = checkpoint(tmp_path / "base", 10), checkpoint(tmp_path / "tuned", 1)
    assert tuned["step"] == 1 and tuned["position"] == 32 and tuned["model_config"]["block_size"] == 16
    assert tuned["optimizer"]["adamw"]["state"][0]["step"] == 1
    for name, t in tuned["model"].items():
        torch.testing.assert_close(t, base["model"][name][:16] if "wpe" in name else base["model"][name], atol=1e-6, rtol=0)


def test_init_from_hugging_face_weights_on_a_text(tmp_path):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=32))
    model.to_hf(tmp_path / "hf")
    train("--init_from", "hf", "--log_dir", "run", "--max_steps", 1, "--max_lr", "1e-9", *TINY[-4:], cwd=tmp_path,
          status=2)  # TINY has --n_layer 2, which contradicts the weights
    flags = ["--preset", "baby", "--max_steps", 2, "--total_batch_size", 512, "--batch_size", 4, "--val_tokens", 512,
             "--dtype", "float32", "--device", "cpu", "--init_from", "hf", "--log_dir", "run", "--max_lr", "1e-9"]
    program(*flags, cwd=tmp_path)
    saved = checkpoint(tmp_path / "run", 2)
    assert saved["tokenizer"] == "gpt2" and saved["model_config"]["vocab_size"] == 50257
    x, y = text_loader("val", 32, "gpt2", shuffle=False).batch(0, 16)
    assert float(read_log(tmp_path / "run")[0, "val"]) == pytest.approx(model(x, y)[1].item(), rel=1e-4)
    out, _ = program(*flags, "--resume", "--max_steps", 3, cwd=tmp_path)
    assert "resumed from step 2" in out
    (tmp_path / "my.txt").write_bytes((ROOT / "input.txt").read_bytes()[:20_000])
    program(*flags, "--data", "my.txt=0.5", f"{ROOT / 'input.txt'}=0.5", "--log_dir", "mixed", cwd=tmp_path)
    assert checkpoint(tmp_path / "mixed", 2)["tokenizer"] == "gpt2"


def plain_curve(config, steps, loader):
    """Losses and gradient norms of the simplest loop: eager, float32, all logits, nothing fused."""
    model = fresh(config)
    decayed, other = ([p for p in model.parameters() if (p.dim() >= 2) == matrix] for matrix in (True, False))
    optimizer = torch.optim.AdamW([dict(params=decayed, weight_decay=0.1), dict(params=other, weight_decay=0.0)],
                                  betas=(0.9, 0.95), foreach=False)
    curve = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, TrainConfig(max_lr=4e-3, min_lr=4e-4, warmup_steps=2, max_steps=20))
        x, y = loader.batch(16 * step, 16)
        loss = F.cross_entropy(F.linear(model.hidden(x), model.lm_head.weight).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        curve.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))
        optimizer.step()
    return curve


@pytest.mark.parametrize("flags, tolerance", [(["--dtype", "float32", "--compile"], 1e-5),
                                              (["--dtype", "float32", "--activation_checkpointing"], 1e-5),
                                              (["--dtype", "bfloat16", "--compile", "--activation_checkpointing"], 2e-2)])
def test_the_optimized_step_matches_a_plain_loop(tmp_path, flags, tolerance):
    """20 steps of four micro-steps each. With fullgraph, a graph break is an error."""
    train("--log_dir", "run", "--max_steps", 20, *flags, cwd=tmp_path)
    log = read_log(tmp_path / "run")
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256)
    for step, (loss, norm) in enumerate(plain_curve(config, 20, text_loader("train", 32))):
        assert float(log[step, "train"]) == pytest.approx(loss, rel=tolerance), step
        assert float(log[step, "norm"]) == pytest.approx(norm, rel=5 * tolerance), step


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_synchronization_per_step(monkeypatch, optimizer, dtype):
    """Counts the transfers from the device to Python in a step of three micro-steps."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = TrainConfig(optimizer=optimizer, muon_lr=1e-3, compile=False)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=200))
    trainer = prepare(model, config, device, dtype)
    x = torch.randint(200, (2, 16), device=device)
    calls = []

    def counted(name, original):
        return lambda *args: calls.append(name) or original(*args)

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    for _ in range(2):
        calls.clear()
        loss, norm, _ = train_step(trainer, iter([(x, x)] * 3), 3, 1.0)
        assert calls == ["tolist"] and math.isfinite(loss) and math.isfinite(norm)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(trainer, iter([(x, x)] * 3), 3, 1.0)
        torch.cuda.set_sync_debug_mode("default")
        assert sum("synchron" in str(w.message) for w in caught) == 1


def test_prefetch_gives_the_same_batches_and_the_same_errors():
    def batches():
        yield from range(5)
        raise UserError("a shard broke off")

    taken = []
    with pytest.raises(UserError, match="broke off"):
        for batch in prefetch(batches(), torch.device("cpu")):
            taken.append(batch)
    assert taken == [0, 1, 2, 3, 4]
    made = []
    ahead = prefetch(iter(lambda: made.append(0) or len(made), 100), torch.device("cpu"))
    assert next(ahead) == 1
    deadline = time.time() + 10
    while len(made) < 2 and time.time() < deadline:
        time.sleep(0.01)
    assert len(made) == 2  # prefetches exactly one batch


@pytest.mark.parametrize("batch_size, share, advice", [(64, 64, "--batch_size 32 or "), (6, 12, "--batch_size 4 or "), (1, 8, "")])
def test_out_of_memory_gives_a_one_sentence_error(batch_size, share, advice):
    for error in (lambda: torch.empty(2**50), raise_cuda_out_of_memory):
        with pytest.raises(UserError) as caught, batch_size_advice(batch_size, share):
            error()
        assert str(caught.value) == (f"--batch_size {batch_size} does not fit into memory; try {advice}"
                                     "--activation_checkpointing")
    with pytest.raises(RuntimeError, match="something else"), batch_size_advice(1, 1):
        raise RuntimeError("something else")


def raise_cuda_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore lines.")


def finite_or_not(norms):
    """Runs train_step with infinite gradients in some steps -> the weights after each step."""
    torch.manual_seed(0)
    raw_model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=16))
    trainer = prepare(raw_model, TrainConfig(), torch.device("cpu"), torch.float32)
    x = torch.randint(16, (2, 4))
    weights = []
    for finite in norms:
        hook = raw_model.lm_head.weight.register_hook(lambda g: g if finite else g * math.inf)  # noqa: B023
        _, norm, _ = train_step(trainer, iter([(x, x)]), 1, 1.0)
        hook.remove()
        assert math.isfinite(norm) == finite
        weights.append(raw_model.lm_head.weight.detach().clone())
    return weights


def test_steps_with_non_finite_gradients_are_skipped():
    w = finite_or_not([True, False, True])
    assert torch.equal(w[0], w[1]) and not torch.equal(w[1], w[2]) and w[2].isfinite().all()


def test_ten_non_finite_gradients_in_a_row_stop_the_run(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    saved = checkpoint(tmp_path / "run", 2)
    saved["model"]["transformer.ln_f.weight"].fill_(1e38)
    torch.save(saved, tmp_path / "run" / "model_000002.pt")
    out, err = train("--log_dir", "run", "--resume", "--max_steps", 50, "--val_every", 0, cwd=tmp_path, status=2)
    assert err.startswith("error: no finite gradient in 10 steps in a row, up to step 11") and err.count("\n") == 1
    assert "10 skipped" in out and "step    12/" not in out


def test_fields_of_the_step_line(tmp_path):
    out, _ = train("--log_dir", "run", cwd=tmp_path)
    assert re.search(r"^step     9/10 \| loss \d\.\d{4} \| 0:00:00 to go \| norm \d+\.\d{3} \| [\d,]+ tok/s \| lr \d\.\d\de-\d\d \| "
                     r"\d+ ms \| \d+\.\d\d TFLOP/s$", out, re.M), out


def test_the_step_line_is_cut_to_the_terminal_width(monkeypatch):
    fields = ["step 19072/19073", "loss 3.1234", "12:05:10 to go", "norm 0.312", "1,520,000 tok/s", "lr 6.00e-04", "345 ms", "mfu 45.1%"]
    line = " | ".join(fields)
    assert fit(line) == line  # output to a file is not cut
    monkeypatch.setattr("sys.stdout", type("Terminal", (), dict(isatty=lambda self: True))())
    for columns, n_fields in ((130, 8), (110, 7), (100, 6), (80, 5), (20, 1)):  # whole fields
        monkeypatch.setenv("COLUMNS", str(columns))
        assert fit(line) == " | ".join(fields[:n_fields])
    assert fit("x" * 30) == "x" * 19


@pytest.mark.parametrize("checkpointing", [[], ["--activation_checkpointing"]], ids=["", "checkpointing"])
def test_resume_with_dropout_is_bitwise_equal(tmp_path, checkpointing):
    """Masks depend only on (seed, step, rank), not on earlier computations."""
    flags = ["--dropout", 0.2, "--save_every", 5, "--keep", 0, *checkpointing]
    train("--log_dir", "whole", *flags, cwd=tmp_path)
    train("--log_dir", "halves", *flags, "--val_every", 3, "--sample_every", 2, cwd=tmp_path)
    (tmp_path / "halves" / "model_000010.pt").unlink()
    train("--log_dir", "halves", *flags, "--resume", cwd=tmp_path)
    a, b = (checkpoint(tmp_path / name, 10)["model"] for name in ("whole", "halves"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    whole, halves = (read_log(tmp_path / name) for name in ("whole", "halves"))
    losses = {key: value for key, value in whole.items() if key[1] == "train"}
    assert losses.items() <= halves.items()
    train("--log_dir", "without", "--max_steps", 1, cwd=tmp_path)
    without = read_log(tmp_path / "without")
    assert without[0, "val"] == whole[0, "val"]  # evaluation has no dropout
    assert without[0, "train"] != whole[0, "train"]


def test_dropout_differs_between_steps_seeds_and_ranks(tmp_path):
    """Every step and process has the same sequence, so only the masks change the losses."""
    text = (ROOT / "input.txt").read_bytes()[:33]
    (tmp_path / "one.txt").write_bytes(text * 1000)
    flags = ["--data", "one.txt", "--dropout", 0.5, "--max_lr", 1e-12, "--max_steps", 3, "--total_batch_size", 64,
             "--block_size", 32, "--no-shuffle", "--val_tokens", 32]
    for name, more, processes in (("a", [], 1), ("b", ["--seed", 2], 1), ("two", [], 2)):
        train(*flags, "--log_dir", name, *more, cwd=tmp_path, processes=processes)
    losses = [read_log(tmp_path / name)[step, "train"] for name in ("a", "b", "two") for step in range(3)]
    assert len(set(losses)) == 9


def test_log_every(tmp_path):
    out, _ = train("--log_dir", "run", "--log_every", 4, cwd=tmp_path)
    assert re.findall(r"^step +(\d+)/10", out, re.M) == ["0", "4", "8", "9"]
    assert {step for step, stream in read_log(tmp_path / "run") if stream == "train"} == set(range(10))
    assert parse_args(["--preset", "baby"])[1].log_every == 100 and TrainConfig().log_every == 1


def test_progress_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    show_progress(5, 10, "loss 1.2345 | 1m05s to go")
    assert capsys.readouterr().out == ""  # no progress bar in a file
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show_progress(5, 10, "loss 1.2345 | 1m05s to go | " + "x" * 99)
    print0("a line")
    bar, line = capsys.readouterr().out.removeprefix("\r\x1b[K").split("\r\x1b[K")
    assert bar == "5/10 [##########          ] loss 1.2345 | 1m05s to go"
    assert line == "a line\n"


# Schedules and flags


def test_a_pipeline_has_a_micro_batch_for_each_stage():
    config = TrainConfig(total_batch_size=16 * 64, batch_size=16, pp=2)
    check_batch_size(config, 64, 1, 100)  # 16 sequences: two micro-batches of 8
    assert micro_batch(0, config, 64, 1) == (16, 16)
    for change, sentence in (
            (dict(pp=3), "--batch_size 16: each process has 16 sequences in a step; give a divisor of 16, at most 5"),
            (dict(total_batch_size=64), r"--total_batch_size 64: must be a multiple of 64 \(block_size 64 x 1 processes\), from 128 to the 6400")):
        with pytest.raises(UserError, match=sentence):
            changed = dataclasses.replace(config, **change)
            check_batch_size(changed, 64, 1, 100)


def test_data_parallel_rank():
    """The mesh is pp x dp x tp: the ranks of a tp group are adjacent and have the same data."""
    config = TrainConfig(tp=2, pp=2)
    assert [data_parallel_rank(config, rank, 8) for rank in range(8)] == \
        [(0, 2), (0, 2), (1, 2), (1, 2), (0, 2), (0, 2), (1, 2), (1, 2)]
    with pytest.raises(UserError, match="--tp 2 x --pp 2: needs a multiple of 4 processes, not 6"):
        data_parallel_rank(config, 0, 6)


def test_learning_rate_by_hand():
    c = TrainConfig(max_lr=6e-4, min_lr=6e-5, warmup_steps=715, max_steps=19073)
    assert get_lr(0, c) == pytest.approx(6e-4 / 715) and get_lr(714, c) == get_lr(715, c) == 6e-4
    assert get_lr((715 + 19073) // 2, c) == pytest.approx((6e-4 + 6e-5) / 2)
    assert get_lr(19073, c) == pytest.approx(6e-5) and get_lr(30000, c) == pytest.approx(6e-5)


def test_gpt2_preset_is_the_published_recipe(shards):
    g, c, _ = parse_args(["--preset", "gpt2", "--data", str(shards)])
    assert (g.n_layer, g.n_head, g.n_embd, g.block_size, g.vocab_size) == (12, 12, 768, 1024, 50257)
    assert (c.total_batch_size, c.max_steps, c.warmup_steps) == (2**19, 19073, 715)
    assert (c.max_lr, c.weight_decay, c.grad_clip) == (6e-4, 0.1, 1.0) and c.min_lr == pytest.approx(6e-5)
    # works on eight processes without flags
    assert c.total_batch_size % (c.batch_size * g.block_size * 8) == 0


def test_auto_preset_depends_on_the_data(tmp_path, monkeypatch, capsys, shards):
    monkeypatch.chdir(tmp_path)
    _, config, _ = parse_args([])
    assert config.preset == "baby" and config.data == [str(ROOT / "input.txt")] and config.log_dir == "log/baby"
    assert capsys.readouterr().out == f"preset baby on {ROOT}/input.txt, 2,700 steps; --preset mini is a larger model\n"
    shards.rename(tmp_path / "edu_fineweb10B")
    _, config, _ = parse_args([])
    assert config.preset == "mini" and config.data == ["edu_fineweb10B"]
    assert capsys.readouterr().out == "preset mini on edu_fineweb10B, 200 steps: no GPU, or fewer than 1B tokens; --preset gpt2 is GPT-2 124M\n"
    assert [parse_args(["--preset", name])[1].data for name in ("gpt2", "mini", "finetune")] == [["edu_fineweb10B"]] + [[str(ROOT / "input.txt")]] * 2
    assert parse_args(["--data", str(ROOT / "input.txt")])[1].preset == "baby"


def test_flags_override_the_preset_and_the_preset_overrides_defaults():
    g, c, given = parse_args(["--preset", "baby", "--n_layer", "2", "--max_lr", "1e-3"])
    assert (g.n_layer, g.n_embd, c.max_lr, c.min_lr) == (2, 128, 1e-3, 1e-4) and given == {"preset", "max_lr", "n_layer"}
    assert c.weight_decay == TrainConfig().weight_decay and c.shuffle and not parse_args(["--no-shuffle"])[1].shuffle


@pytest.mark.parametrize("flags, sentence", [
    (["--max_step", "5"], "unknown flag --max_step; did you mean --max_steps?"),
    (["--max_steps", "many"], "--max_steps: invalid int value: 'many'"),
    (["--max_steps", "0"], "--max_steps 0: must be above 0"),
    (["--grad_clip", "-1"], "--grad_clip -1.0: must be at least 0"),
    (["--max_lr", "nan"], "--max_lr nan: must be above 0"),
    (["--dropout", "1.5"], "--dropout 1.5: must be at least 0 and at most 1"),
    (["--optimizer", "sgd"], "--optimizer sgd: must be one of adamw, muon"),
    (["--parallel", "zero"], "--parallel zero: must be one of ddp, fsdp"),
    (["--tp", "0"], "--tp 0: must be above 0"),
    (["--tp", "4"], "--tp 4 x --pp 1: needs a multiple of 4 processes, not 1"),
    (["--tp", "2", "--pp", "2"], "--tp 2 x --pp 2: needs a multiple of 4 processes, not 1; use torchrun --nproc_per_node=4"),
    (["--optimizer", "adamw", "--muon_lr", "1e-3"], "--muon_lr needs --optimizer muon"),
    (["--muon_lr", "0"], "--muon_lr 0.0: must be above 0"),
    (["--preset", "gpt5"], "--preset gpt5: must be one of auto, gpt2"),
    (["--n_head", "3"], "--n_head 3 does not divide --n_embd 128; give a divisor"),
    (["--dtype", "fp8"], "--dtype fp8: must be one of auto, bfloat16"),
    (["--vocab_size", "50304"], "--vocab_size 50304 is more than the data's 256 ids; leave it out"),
    (["--min_lr", "1"], "--min_lr 1.0 is above --max_lr"),
    (["--data", "nowhere"], "--data nowhere: not found"),
    (["--log_dir", str(ROOT / "model.py")], "model.py: cannot write"),
    (["--device", "cuda"], "--device cuda: cannot be used"),
    (["--device", "toaster"], "--device toaster: cannot be used"),
    (["--total_batch_size", "1000"], "--total_batch_size 1000: must be a multiple of 64 (block_size 64 x 1 processes), from 64 to the 348544 tokens of the data"),
    (["--batch_size", "3"], "--batch_size 3: each process has 16 sequences in a step; give a divisor of 16"),
    (["--total_batch_size", str(2**30)], "from 64 to the 348544 tokens of the data"),
    (["--rampup_steps", "3", "--rampup_batch_size", "100"], "--rampup_batch_size 100: must be a multiple of 64"),
    (["--rampup_steps", "3", "--rampup_batch_size", "2048"], "tokens of the data, and at most --total_batch_size"),
])
def test_each_mistake_gives_a_one_sentence_error(flags, sentence, tmp_path, monkeypatch):
    import train_gpt2

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        train_gpt2.main(["--preset", "baby", *flags])
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
