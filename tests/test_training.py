"""The real program, run as a user runs it: curves, layouts, resuming, being killed, and the flags."""

import dataclasses
import json
import math
import os
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
from torch.nn.attention import SDPBackend

from model import GPT, GPTConfig
from plaingpt.checkpoint import load_checkpoint
from plaingpt.cli import UserError, fit
from plaingpt.device import memory_advice, prefer_attention
from train_gpt2 import (
    DataLoaderLite,
    TrainConfig,
    check_batches,
    get_batch_tokens,
    get_lr,
    parse_args,
    portion,
    prefetch,
    prepare,
    train_step,
)


def checkpoint(directory, step):
    return torch.load(directory / f"model_{step:06d}.pt", weights_only=True)


def gradients(saved):
    """AdamW's first moment after one step from zero is (1 - 0.9) times the gradient."""
    return [state["exp_avg"] / 0.1 for _, state in sorted(saved["optimizer"]["adamw"]["state"].items())]


# Layouts


def test_two_processes_give_the_single_curve(tmp_path):
    flags = ["--max_steps", 20, "--total_batch_size", 1024]
    train(*flags, "--log_dir", "one", "--batch_size", 32, cwd=tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "train_gpt2.py")]
    done = subprocess.run([*torchrun, *TINY, *map(str, flags), "--log_dir", "two", "--batch_size", "4"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step     0/20") == 1  # rank 0 alone talks
    assert_close_logs(tmp_path / "one", tmp_path / "two", rel=1e-5)
    assert len(read_log(tmp_path / "one")) == 20 * 3 + 5  # train, lr, norm of every step; val at 0, 5, … 20


def test_gradients_of_an_accumulated_step(tmp_path):
    """16 sequences as one batch, by hand; as 8 micro-batches; and as 2 x 2 on two processes: one gradient."""
    flags = ["--max_steps", 1, "--grad_clip", 0]
    train(*flags, "--log_dir", "one", "--batch_size", 2, cwd=tmp_path)
    train(*flags, "--log_dir", "two", "--batch_size", 4, cwd=tmp_path, processes=2)
    torch.manual_seed(1337)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256))
    x, y = DataLoaderLite(ROOT / "input.txt", "train", 32, 256).batch(0, 16)
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
    """Muon computes in bfloat16, which makes steps of 1/256 of the last differences in rounding: no 1e-5 here."""
    for name, processes in (("one", 1), ("two", 2)):
        train("--optimizer", "muon", "--log_dir", name, cwd=tmp_path, processes=processes)
    assert_close_logs(tmp_path / "one", tmp_path / "two", rel=2e-3)


# Resuming


def test_a_run_goes_on_with_its_own_optimizer_and_old_checkpoints_still_do(tmp_path):
    train("--log_dir", "whole", cwd=tmp_path)
    train("--log_dir", "run", "--save_every", 5, "--keep", 0, cwd=tmp_path)
    (tmp_path / "run" / "model_000010.pt").unlink()
    _, err = train("--log_dir", "run", "--resume", "--optimizer", "muon", cwd=tmp_path, status=2)
    assert err == "error: the run in run is one of --optimizer adamw, not muon\n"
    saved = checkpoint(tmp_path / "run", 5)
    saved["optimizer"] = saved["optimizer"]["adamw"]  # the format of before there was a choice
    torch.save(saved, tmp_path / "run" / "model_000005.pt")
    train("--log_dir", "run", "--resume", cwd=tmp_path)
    assert read_log(tmp_path / "whole") == read_log(tmp_path / "run")


@pytest.mark.parametrize("optimizer, names", [("adamw", {"adamw"}), ("muon", {"muon", "adamw"})])
def test_ten_steps_equal_five_and_five_bit_for_bit(tmp_path, optimizer, names):
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


def test_resume_without_a_run_starts_afresh_and_a_fresh_run_moves_the_old_aside(tmp_path):
    out, _ = train("--log_dir", "run", "--resume", "--max_steps", 3, cwd=tmp_path)
    assert "nothing to resume in run: starting afresh" in out
    first = (tmp_path / "run" / "log.txt").read_text()
    out, _ = train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    assert "the run in run was moved to run.1" in out
    train("--log_dir", "run", "--max_steps", 1, cwd=tmp_path)
    assert (tmp_path / "run.1" / "log.txt").read_text() == first and (tmp_path / "run.1" / "model_000003.pt").exists()
    assert (tmp_path / "run.2" / "model_000002.pt").exists()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["log.txt", "model_000001.pt", "run.json"]


def test_a_mistake_leaves_the_old_run_alone(tmp_path):
    train("--log_dir", "run", "--max_steps", 1, cwd=tmp_path)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    for flags in (["--data", "missing.txt"], ["--batch_size", 3], ["--init_from", "nowhere.pt"], ["--init_from", "no/where"], ["--resume", "--n_layer", 3]):
        _, err = train("--log_dir", "run", *flags, cwd=tmp_path, status=2)
        assert err.startswith("error: ") and err.count("\n") == 1, err
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_resume_says_what_differs(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    _, err = train("--log_dir", "run", "--resume", "--n_layer", 3, "--n_embd", 64, cwd=tmp_path, status=2)
    assert "n_layer is 2, not 3" in err and "n_embd is 32, not 64" in err
    out, _ = train("--log_dir", "run", "--resume", "--max_steps", 4, cwd=tmp_path)
    assert "note: max_steps was 2 until here and is 4 from here on" in out
    _, err = train("--log_dir", "run", "--resume", "--max_steps", 3, cwd=tmp_path, status=2)
    assert err == "error: the run in run is at step 4 already, past --max_steps 3; give more\n"
    assert max(step for step, _ in read_log(tmp_path / "run")) == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_finish_the_step_save_and_exit_0_everywhere(tmp_path, number):
    flags = ["--max_steps", 2000, "--val_every", 0, "--save_every", 0]
    a, b = spawn(*TINY, *flags, "--log_dir", "run", cwd=tmp_path, processes=2)
    for line in a.stdout:
        if "step    20/" in line:
            break
    b.send_signal(number)  # to one process only: the other must stop after the same step
    out, err = a.communicate(timeout=60)
    b.communicate(timeout=60)
    assert a.returncode == b.returncode == 0, err
    step = int(re.search(r"stopped by a signal; step (\d+) is saved", out)[1])
    assert checkpoint(tmp_path / "run", step)["position"] == step * 16
    assert max(s for s, _ in read_log(tmp_path / "run")) == step - 1
    out, _ = train("--log_dir", "run", "--resume", *flags, "--max_steps", step + 2, cwd=tmp_path)
    assert f"resumed from step {step}" in out


# Checkpoints and logs


def test_checkpoint_is_a_plain_dict(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path, processes=2)
    saved = checkpoint(tmp_path / "run", 2)
    assert set(saved) == {"model", "optimizer", "scaler", "step", "position", "model_config", "train_config", "tokenizer"}
    assert saved["tokenizer"] == "bytes" and saved["step"] == 2 and saved["position"] == 32
    model = GPT(GPTConfig(**saved["model_config"]))
    model.load_state_dict(saved["model"])  # bare names
    assert not {"batch_size", "rank", "world_size"} & set(saved["train_config"])


def test_keep(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    (tmp_path / "run" / "model_000002.pt").rename(tmp_path / "run" / "model_best.pt")  # somebody's own: not ours to remove
    train("--log_dir", "run", "--save_every", 2, "--keep", 3, "--resume", cwd=tmp_path)
    names = sorted(p.name for p in (tmp_path / "run").glob("*.pt"))
    assert names == [f"model_{s:06d}.pt" for s in (6, 8, 10)] + ["model_best.pt"]


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


# Features, each with a test that would fail without it


def test_shuffle_and_seed_change_the_curve(tmp_path):
    for name, flags in (("a", []), ("b", ["--no-shuffle"]), ("c", ["--seed", 2])):
        train("--log_dir", name, "--max_steps", 2, *flags, cwd=tmp_path)
    losses = {read_log(tmp_path / name)[0, "train"] for name in "abc"}
    assert len(losses) == 3


def test_validation_is_on_the_same_tokens_in_every_setting(tmp_path):
    for name, B, processes in (("a", 16, 1), ("b", 1, 1), ("c", 2, 2)):
        train("--log_dir", name, "--max_steps", 1, "--batch_size", B, "--val_tokens", 32 * 27, cwd=tmp_path, processes=processes)
    loader = DataLoaderLite(ROOT / "input.txt", "val", 32, 256, shuffle=False)
    torch.manual_seed(1337)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256))
    expected = model(*loader.batch(0, 27))[1].item()
    for name in "abc":
        assert float(read_log(tmp_path / name)[0, "val"]) == pytest.approx(expected, rel=1e-5)


def test_float16_scales_the_loss_and_survives_an_overflow(tmp_path):
    train("--log_dir", "half", "--dtype", "float16", cwd=tmp_path)
    train("--log_dir", "full", cwd=tmp_path)
    saved = checkpoint(tmp_path / "half", 10)
    assert saved["scaler"]["scale"] >= 2**10 and checkpoint(tmp_path / "full", 10)["scaler"] == {}
    half, full = read_log(tmp_path / "half"), read_log(tmp_path / "full")
    assert half.keys() == full.keys() and half != full
    assert float(half[10, "val"]) == pytest.approx(float(full[10, "val"]), rel=5e-3)  # unscaled before clipping: same norms
    assert float(half[9, "norm"]) == pytest.approx(float(full[9, "norm"]), rel=5e-2)

    saved["scaler"]["scale"] = 2.0**40  # the next steps overflow until the scale has been halved often enough
    saved["step"], saved["train_config"]["max_steps"] = 10, 40
    torch.save(saved, tmp_path / "half" / "model_000010.pt")
    out, _ = train("--log_dir", "half", "--dtype", "float16", "--resume", "--max_steps", 18, cwd=tmp_path)
    assert "| 1 skipped" in out and "loss nan" not in out
    assert checkpoint(tmp_path / "half", 18)["scaler"]["scale"] == 2.0**32


def test_a_small_batch_needs_no_smaller_micro_batch(tmp_path):
    """16 sequences on two processes are 8 each, whatever more --batch_size would allow."""
    for name, flags, processes in (("a", ["--batch_size", 64], 2), ("b", ["--batch_size", 1], 1)):
        train("--log_dir", name, "--max_steps", 5, *flags, cwd=tmp_path, processes=processes)
    assert_close_logs(tmp_path / "a", tmp_path / "b", rel=1e-5)


def test_rampup(tmp_path):
    config = TrainConfig(rampup_steps=4, rampup_batch_size=1024, total_batch_size=4096)
    assert [get_batch_tokens(s, config) for s in range(6)] == [1024, 1024, 2048, 3072, 4096, 4096]
    out, _ = train("--log_dir", "run", "--rampup_steps", 4, "--rampup_batch_size", 128, "--max_steps", 6, cwd=tmp_path)
    assert checkpoint(tmp_path / "run", 6)["position"] == (128 + 128 + 256 + 384 + 512 + 512) // 32
    train("--log_dir", "two", "--rampup_steps", 4, "--rampup_batch_size", 128, "--max_steps", 6, "--batch_size", 1,
          cwd=tmp_path, processes=2)
    assert_close_logs(tmp_path / "run", tmp_path / "two", rel=1e-5)


def test_init_from_a_checkpoint_starts_step_and_optimizer_anew(tmp_path):
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
          status=2)  # TINY asks for two layers: an explicit flag that contradicts the weights is refused
    flags = ["--preset", "baby", "--max_steps", 2, "--total_batch_size", 512, "--batch_size", 4, "--val_tokens", 512,
             "--dtype", "float32", "--device", "cpu", "--init_from", "hf", "--log_dir", "run", "--max_lr", "1e-9"]
    program(*flags, cwd=tmp_path)
    saved = checkpoint(tmp_path / "run", 2)
    assert saved["tokenizer"] == "gpt2" and saved["model_config"]["vocab_size"] == 50257
    x, y = DataLoaderLite(ROOT / "input.txt", "val", 32, 50257, shuffle=False, tokenizer="gpt2").batch(0, 16)
    assert float(read_log(tmp_path / "run")[0, "val"]) == pytest.approx(model(x, y)[1].item(), rel=1e-4)
    out, _ = program(*flags, "--resume", "--max_steps", 3, cwd=tmp_path)
    assert "resumed from step 2" in out


def plain_curve(config, steps, loader):
    """Losses and gradient norms of a loop as one would write it first: eager, float32, all logits, nothing fused."""
    torch.manual_seed(1337)
    model = GPT(config)
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
def test_the_fast_step_gives_the_curve_of_a_plain_one(tmp_path, flags, tolerance):
    """20 steps, of four micro-steps each. A compiled step is one graph or an error (fullgraph)."""
    train("--log_dir", "run", "--max_steps", 20, *flags, cwd=tmp_path)
    log = read_log(tmp_path / "run")
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256)
    for step, (loss, norm) in enumerate(plain_curve(config, 20, DataLoaderLite(ROOT / "input.txt", "train", 32, 256))):
        assert float(log[step, "train"]) == pytest.approx(loss, rel=tolerance), step
        assert float(log[step, "norm"]) == pytest.approx(norm, rel=5 * tolerance), step


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_synchronisation_a_step(monkeypatch, optimizer, dtype):
    """Every way for a number to come from a device to Python is counted over a step of three micro-steps."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = TrainConfig(optimizer=optimizer, muon_lr=1e-3, compile=False)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=200))
    model, optimizers, _ = prepare(model, config, device, dtype)
    x = torch.randint(200, (2, 16), device=device)
    calls = []

    def counted(name, original):
        return lambda *args: calls.append(name) or original(*args)

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    for _ in range(2):
        calls.clear()
        loss, norm, _ = train_step(model, optimizers, iter([(x, x)] * 3), 3, 1.0)
        assert calls == ["tolist"] and math.isfinite(loss) and math.isfinite(norm)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(model, optimizers, iter([(x, x)] * 3), 3, 1.0)
        torch.cuda.set_sync_debug_mode("default")
        assert sum("synchron" in str(w.message) for w in caught) == 1


def test_prefetch_gives_the_same_batches_and_the_same_errors():
    def batches():
        yield from range(5)
        raise UserError("a shard broke off")

    taken = []
    with pytest.raises(UserError, match="broke off"):
        for batch in prefetch(batches()):
            taken.append(batch)
    assert taken == [0, 1, 2, 3, 4]
    made = []
    ahead = prefetch(iter(lambda: made.append(0) or len(made), 100))
    assert next(ahead) == 1
    deadline = time.time() + 10
    while len(made) < 2 and time.time() < deadline:
        time.sleep(0.01)
    assert len(made) == 2  # the next one is made while this one is used, and no more than that


@pytest.mark.parametrize("batch_size, share, advice", [(64, 64, "--batch_size 32 keeps the batch of the step, and "),
                                                       (6, 12, "--batch_size 4 keeps the batch of the step, and "), (1, 8, "")])
def test_out_of_memory_is_one_sentence(batch_size, share, advice):
    for error in (lambda: torch.empty(2**50), raise_cuda_out_of_memory):
        with pytest.raises(UserError) as caught, memory_advice(batch_size, share):
            error()
        assert str(caught.value) == (f"--batch_size {batch_size} does not fit into memory; {advice}"
                                     "--activation_checkpointing takes less memory and more time")
    with pytest.raises(RuntimeError, match="something else"), memory_advice(1, 1):
        raise RuntimeError("something else")


def raise_cuda_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore lines.")


def test_attention_kernels_are_preferred_where_they_are_faster(capsys):
    before = torch._C._get_sdp_priority_order()
    try:
        prefer_attention((8, 0), 92000)
        assert torch._C._get_sdp_priority_order() == before and capsys.readouterr().out == ""
        prefer_attention((9, 0), 91002)
        assert torch._C._get_sdp_priority_order() == before and "cuDNN 91002 is older" in capsys.readouterr().out
        prefer_attention((9, 0), 91900)
        first, second = (int(b) for b in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION))
        assert torch._C._get_sdp_priority_order()[:2] == [first, second]
    finally:
        torch._C._set_sdp_priority_order(before)


def finite_or_not(norms):
    """Runs train_step on a model whose gradients are made infinite in some steps -> how many updates the optimizer made."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=16))
    raw_model = model
    model, optimizers, _ = prepare(raw_model, TrainConfig(), torch.device("cpu"), torch.float32)
    x = torch.randint(16, (2, 4))
    weights = []
    for finite in norms:
        hook = raw_model.lm_head.weight.register_hook(lambda g: g if finite else g * math.inf)  # noqa: B023
        _, norm, _ = train_step(model, optimizers, iter([(x, x)]), 1, 1.0)
        hook.remove()
        assert math.isfinite(norm) == finite
        weights.append(raw_model.lm_head.weight.detach().clone())
    return weights


def test_a_gradient_that_is_not_finite_is_skipped():
    w = finite_or_not([True, False, True])
    assert torch.equal(w[0], w[1]) and not torch.equal(w[1], w[2]) and w[2].isfinite().all()


def test_ten_bad_gradients_in_a_row_end_the_run(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    saved = checkpoint(tmp_path / "run", 2)
    saved["model"]["transformer.ln_f.weight"].fill_(math.nan)
    torch.save(saved, tmp_path / "run" / "model_000002.pt")
    out, err = train("--log_dir", "run", "--resume", "--max_steps", 50, "--val_every", 0, cwd=tmp_path, status=2)
    assert err.startswith("error: no finite gradient in 10 steps in a row, up to step 11") and err.count("\n") == 1
    assert "10 skipped" in out and "step    12/" not in out


def test_training_from_shards_imports_torch_and_numpy_alone(shards, tmp_path):
    flags = [*TINY, "--data", str(shards), "--vocab_size", "256", "--max_steps", "2", "--val_tokens", "256", "--parallel", "fsdp"]
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train_gpt2; train_gpt2.main({flags!r}); "
            "print('loaded:', *{'plaingpt.parallel', 'tiktoken', 'datasets', 'transformers', 'matplotlib'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--- sample 1 at step 2 ---" in done.stdout and done.stdout.endswith("loaded:\n")


def test_step_line_says_what_a_person_wants_to_know(tmp_path):
    out, _ = train("--log_dir", "run", cwd=tmp_path)
    assert re.search(r"^step     9/10 \| loss \d\.\d{4} \| lr \d\.\d\de-\d\d \| norm \d+\.\d{3} \| \d+ ms \| [\d,]+ tok/s \| "
                     r"\d+\.\d\d TFLOP/s \| 0s to go$", out, re.M), out


def test_a_narrow_terminal_has_a_line_for_a_step(monkeypatch):
    fields = ["step 19072/19073", "loss 3.1234", "lr 6.00e-04", "norm 0.312", "345 ms", "1,520,000 tok/s", "mfu 45.1%", "12h05m to go"]
    assert fit(fields, (6, 4, 2)) == " | ".join(fields)  # into a file
    monkeypatch.setattr("sys.stdout", type("Terminal", (), dict(isatty=lambda self: True))())
    for columns in (110, 100, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert len(line := fit(fields, (6, 4, 2))) <= columns
    assert line == "step 19072/19073 | loss 3.1234 | norm 0.312 | 1,520,000 tok/s | 12h05m to go"


# Schedules and flags


def test_a_pipeline_has_a_micro_batch_for_each_stage():
    config = TrainConfig(total_batch_size=16 * 64, batch_size=16, pp=2)
    check_batches(config, 64, 1, 100)  # 16 sequences: two micro-batches of 8
    assert portion(0, config, 64, 1) == (16, 16)
    for change, sentence in ((dict(pp=3), "--batch_size 16 does not divide the 16 sequences that each of 1 processes has in a step, "
                              "or leaves some of --pp 3 idle; --batch_size 4 would"),
                             (dict(total_batch_size=64), "--pp 2 less than one sequence to work on; 128 would do")):
        with pytest.raises(UserError, match=sentence):
            check_batches(dataclasses.replace(config, **change), 64, 1, 100)


def test_learning_rate_by_hand():
    c = TrainConfig(max_lr=6e-4, min_lr=6e-5, warmup_steps=715, max_steps=19073)
    assert get_lr(0, c) == pytest.approx(6e-4 / 715) and get_lr(714, c) == get_lr(715, c) == 6e-4
    assert get_lr((715 + 19073) // 2, c) == pytest.approx((6e-4 + 6e-5) / 2)
    assert get_lr(19073, c) == pytest.approx(6e-5) and get_lr(30000, c) == pytest.approx(6e-5)


def test_gpt2_is_the_published_recipe(shards):
    g, c, _ = parse_args(["--preset", "gpt2", "--data", str(shards)])
    assert (g.n_layer, g.n_head, g.n_embd, g.block_size, g.vocab_size) == (12, 12, 768, 1024, 50257)
    assert (c.total_batch_size, c.max_steps, c.warmup_steps) == (2**19, 19073, 715)
    assert (c.max_lr, c.weight_decay, c.grad_clip) == (6e-4, 0.1, 1.0) and c.min_lr == pytest.approx(6e-5)
    assert c.total_batch_size % (c.batch_size * g.block_size * 8) == 0  # eight processes, no flag


def test_auto_preset_goes_by_the_data(tmp_path, monkeypatch, capsys, shards):
    monkeypatch.chdir(tmp_path)
    _, config, _ = parse_args([])
    assert config.preset == "baby" and config.data == str(ROOT / "input.txt") and config.log_dir == "log/baby"
    assert capsys.readouterr().out == f"preset baby on {ROOT}/input.txt; python fineweb.py makes edu_fineweb10B/ for gpt2\n"
    shards.rename(tmp_path / "edu_fineweb10B")
    _, config, _ = parse_args([])
    assert config.preset == "gpt2" and config.data == "edu_fineweb10B"
    assert "--preset baby" in capsys.readouterr().out
    assert parse_args(["--data", str(ROOT / "input.txt")])[1].preset == "baby"


def test_precedence_defaults_then_preset_then_flags():
    g, c, given = parse_args(["--preset", "baby", "--n_layer", "2", "--max_lr", "1e-3"])
    assert (g.n_layer, g.n_embd, c.max_lr, c.min_lr) == (2, 128, 1e-3, 1e-4) and given == {"preset", "n_layer", "max_lr"}
    assert c.weight_decay == TrainConfig().weight_decay and c.shuffle and not parse_args(["--no-shuffle"])[1].shuffle


@pytest.mark.parametrize("flags, sentence", [
    (["--max_step", "5"], "unknown flag --max_step; did you mean --max_steps?"),
    (["--max_steps", "many"], "--max_steps: invalid int value: 'many'"),
    (["--max_steps", "0"], "--max_steps 0 cannot be: it is a number above 0"),
    (["--grad_clip", "-1"], "--grad_clip -1.0 cannot be: it is a number from 0 up"),
    (["--max_lr", "nan"], "--max_lr nan cannot be"),
    (["--optimizer", "sgd"], "--optimizer sgd is none of adamw, muon"),
    (["--parallel", "zero"], "--parallel zero is none of ddp, fsdp"),
    (["--tp", "0"], "--tp 0 cannot be: it is a number above 0"),
    (["--tp", "4"], "--tp 4 does not divide the 2 heads of this model; 1, 2 do"),
    (["--pp", "3"], "--pp 3 is more than the 2 blocks of this model"),
    (["--tp", "2", "--pp", "2"], "--tp 2 x --pp 2 takes a multiple of 4 processes, and there are 1: torchrun --nproc_per_node=4"),
    (["--optimizer", "adamw", "--muon_lr", "1e-3"], "--muon_lr 0.001 is for --optimizer muon alone"),
    (["--muon_lr", "0"], "--muon_lr 0.0 cannot be: it is a number above 0"),
    (["--preset", "gpt5"], "--preset gpt5 is none of auto, gpt2"),
    (["--n_head", "3"], "--n_head 3 does not divide --n_embd 128; --n_head 2 would"),
    (["--dtype", "fp8"], "--dtype fp8 is none of auto, bfloat16"),
    (["--vocab_size", "50304"], "leave the flag out"),
    (["--min_lr", "1"], "--min_lr 1.0 is above --max_lr"),
    (["--data", "nowhere"], "--data nowhere: no such file or directory"),
    (["--log_dir", str(ROOT / "model.py")], "model.py: cannot be written"),
    (["--device", "cuda"], "--device cuda cannot be used"),
    (["--device", "toaster"], "--device toaster cannot be used"),
    (["--total_batch_size", "1000"], "--total_batch_size 1000 is no multiple of block_size 64 x 1 processes; 960 would do"),
    (["--batch_size", "3"], "--batch_size 3 does not divide the 16 sequences that each of 1 processes has"),
    (["--total_batch_size", str(2**30)], "is more than the"),
    (["--rampup_steps", "3", "--rampup_batch_size", "768"], "--rampup_batch_size 768 does not divide --total_batch_size 1024; 512 would do"),
])
def test_mistakes_are_answered_by_one_sentence(flags, sentence, tmp_path, monkeypatch):
    import train_gpt2

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        train_gpt2.main(["--preset", "baby", *flags])
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
