"""Runs the real program as a user does: losses, layouts, resuming, signals and flags."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, assert_close_logs, names, program, read_log, spawn, train

import train_gpt2
from model import GPT, GPTConfig
from plaingpt.checkpoint import load_weights
from plaingpt.cli import UserError, parse_flags, print0, show_progress
from plaingpt.data import Sources
from plaingpt.device import Process, memory_advice, prefetch
from plaingpt.huggingface import save_gpt2
from plaingpt.parallel import grad_scaler
from plaingpt.shards import open_splits, read_text
from tokenizer import Tokenizer, get_tokenizer
from train_gpt2 import DataLoaderLite, TrainConfig, Training, choose_data, get_lr, make_configs

CPU = torch.device("cpu")
MODEL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256)  # of TINY


def checkpoint(directory, step):
    return torch.load(directory / f"model_{step:06d}.pt", weights_only=True)


def text_batch(split, B, position=0, tokenizer="bytes", **options):
    """B sequences of 32 tokens of input.txt -> x, y: (B, 32)."""
    train, val = open_splits(ROOT / "input.txt", get_tokenizer(tokenizer))
    tokens = train if split == "train" else val
    return DataLoaderLite([tokens], [1], 32, **options).batch(position, B, CPU)


def fresh(config):
    """The model that a run with seed 1337 starts from."""
    with torch.device("meta"):
        model = GPT(config)
    load_weights(model, seed=1337)
    return model


# Layouts


def test_two_processes_match_one_process(tmp_path):
    flags = ["--max_steps", 20, "--total_batch_size", 1024]
    train(*flags, "--log_dir", "one", "--batch_size", 32, cwd=tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*torchrun, ROOT / "train_gpt2.py", *TINY, *map(str, flags),
                           "--log_dir", "two", "--batch_size", "4"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step     0/20") == 1  # only rank 0 prints
    assert_close_logs(tmp_path / "one", tmp_path / "two", rel=1e-5)
    # train, lr, norm and tokens at every step; val and bpb at 0, 5, … 20
    assert len(read_log(tmp_path / "one")) == 20 * 4 + 2 * 5


def test_gradients_of_an_accumulated_step(tmp_path):
    """16 sequences give the same gradient in one batch, in 8 micro-batches and on two processes."""
    flags = ["--max_steps", 1, "--grad_clip", 0]
    train(*flags, "--log_dir", "one", "--batch_size", 2, cwd=tmp_path)
    train(*flags, "--log_dir", "two", "--batch_size", 4, cwd=tmp_path, processes=2)
    model = fresh(MODEL)
    model(*text_batch("train", 16))[1].backward()
    for name in ("one", "two"):
        moments = checkpoint(tmp_path / name, 1)["optimizer"]["adamw"]
        for name, p in model.named_parameters():
            # The first moment after one step from zero is (1 - 0.9) times the gradient.
            gradient = moments[f"{name}.exp_avg"] / 0.1
            torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-7)


def test_muon_on_two_processes(tmp_path):
    """Muon computes in bfloat16, so rounding differences grow to 1/256. The tolerance is larger."""
    for n in (1, 2):
        train("--optimizer", "muon", "--log_dir", n, cwd=tmp_path, processes=n)
    assert_close_logs(tmp_path / "1", tmp_path / "2", rel=2e-3)


def test_validation_uses_the_same_tokens_in_every_layout(tmp_path):
    """27 sequences, always computed as 64. Two processes have 8 of a step, even if B is larger."""
    model, shapes = fresh(MODEL), set()
    model.loss_fn.register_forward_pre_hook(lambda _, args: shapes.add(tuple(args[2].shape)))
    val = open_splits(ROOT / "input.txt", get_tokenizer("bytes"))[1]
    loader = DataLoaderLite([val], [1], 32, shuffle=False)
    config, process = TrainConfig(val_tokens=32 * 27), Process(0, 1, 0, 1, CPU, torch.float32)
    found, _ = train_gpt2.estimate_loss(model, loader, torch.ones(256), config, process)
    assert shapes == {(64, 32)}  # torch.compile would compile a second one
    assert found == pytest.approx(model(*text_batch("val", 27, shuffle=False))[1].item(), rel=1e-5)
    for name, (B, processes) in dict(b=(1, 1), c=(2, 2), d=(64, 2)).items():
        train("--log_dir", name, "--max_steps", 1, "--batch_size", B, "--val_tokens", 32 * 27,
              cwd=tmp_path, processes=processes)
        assert float(read_log(tmp_path / name)[0, "val"]) == pytest.approx(found, rel=1e-5)


# Resuming


@pytest.mark.parametrize("flags", [
    [], ["--optimizer", "muon"], ["--dropout", 0.2],
    ["--dropout", 0.2, "--activation_checkpointing"]], ids=lambda flags: " ".join(map(str, flags)))
def test_a_resumed_run_is_bitwise_equal(tmp_path, flags):
    """As if killed after step 5 was saved. More validations and samples change nothing."""
    flags = [*flags, "--save_every", 5, "--keep", 0]
    train("--log_dir", "whole", *flags, cwd=tmp_path)
    flags += ["--log_dir", "halves", "--val_every", 1, "--sample_every", 2]
    train(*flags, cwd=tmp_path)
    (tmp_path / "halves" / "model_000010.pt").unlink()
    train(*flags, "--resume", cwd=tmp_path)
    assert read_log(tmp_path / "whole").items() <= read_log(tmp_path / "halves").items()
    a, b = (checkpoint(tmp_path / name, 10) for name in ("whole", "halves"))
    assert a["position"] == b["position"] == 160 and a["step"] == b["step"] == 10
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])
    assert [*a["optimizer"]] == [*b["optimizer"]] == ["muon", "adamw"][-len(a["optimizer"]):]
    for name, saved in a["optimizer"].items():
        again = b["optimizer"][name]
        assert all(torch.equal(moment, again[key]) for key, moment in saved.items())


def test_resume_without_a_run_starts_a_new_run_and_new_runs_move_old_ones(tmp_path):
    run = tmp_path / "run"
    out, _ = train("--log_dir", "run", "--resume", "--max_steps", 3, cwd=tmp_path)
    assert "nothing to resume in run: starting a new run" in out
    first = (run / "log.txt").read_text()
    out, _ = train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    assert f"the old run in run was moved to {run}.1" in out
    train("--log_dir", "run", "--max_steps", 1, cwd=tmp_path)
    assert (tmp_path / "run.1" / "log.txt").read_text() == first
    assert names(tmp_path, "*/*.pt") == [f"model_{s:06d}.pt" for s in (1, 2, 3)]
    assert names(run) == ["log.txt", "model_000001.pt", "run.json"]


def test_resume_reports_what_differs(tmp_path):
    def resume(*flags, **options):
        return train("--log_dir", "run", "--resume", *flags, cwd=tmp_path, **options)

    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    _, err = resume("--n_layer", 3, "--n_embd", 64, status=2)
    assert "n_layer is 2, not 3" in err and "n_embd is 32, not 64" in err
    out, _ = resume("--max_steps", 4, "--dropout", 0.1)
    assert "note: max_steps changes from 2 to 4" in out
    assert "note: dropout changes from 0.0 to 0.1" in out
    assert max(step for step, _ in read_log(tmp_path / "run")) == 4


def test_more_steps_do_not_change_what_was_derived_from_fewer(tmp_path):
    derived = {"warmup_steps": 4, "val_every": 2, "min_lr": 4e-4}
    flags = [*TINY, "--preset", "gpt2", "--data", ROOT / "input.txt", "--eval_every", 0,
             "--log_dir", "run", "--max_steps"]
    for flag in ("--warmup_steps", "--val_every", "--min_lr"):  # without these and their values
        del flags[flags.index(flag) : flags.index(flag) + 2]

    def found():
        config = json.loads((tmp_path / "run" / "run.json").read_text())["train_config"]
        return {name: config[name] for name in derived}

    program(*flags, 20, "--max_minutes", 1e-9, cwd=tmp_path)  # stops after a step
    assert found() == derived
    program(*flags, 100, "--resume", "--max_lr", 8e-3, "--max_minutes", 1e-9, cwd=tmp_path)
    assert found() == derived | {"min_lr": 8e-4}
    program(*flags, 22, "--resume", "--warmup_steps", 3, cwd=tmp_path)
    assert found() == derived | {"warmup_steps": 3}


def test_a_checkpoint_knows_the_code_of_its_model(tmp_path):
    """Another model.py gives one note, also before an error of its own."""
    train("--log_dir", "run", "--max_steps", 1, cwd=tmp_path)
    path, note = tmp_path / "run" / "model_000001.pt", "was written by another model.py\n"
    again, _ = train("--log_dir", "run", "--max_steps", 2, "--resume", cwd=tmp_path)
    assert note not in again
    torch.save(checkpoint(path.parent, 1) | {"model_code": "0"}, path)
    out, _ = program("--checkpoint", path, "--max_new_tokens", 1, program="generate.py",
                     cwd=tmp_path)
    assert out.count(note) == 1
    torch.save(checkpoint(path.parent, 1) | {"model": {}}, path)
    _, err = program("--checkpoint", path, program="generate.py", cwd=tmp_path, status=2)
    assert "restore that model.py; its run may have a changes.patch" in err


def test_small_data_get_a_note_each(tmp_path):
    (tmp_path / "t.txt").write_bytes((ROOT / "input.txt").read_bytes()[:3000])
    out, _ = train("--data", "t.txt", "--max_steps", 200, "--val_every", 20, "--n_embd", 128,
                   "--log_dir", "run", cwd=tmp_path)
    assert "reads the training data 37 times" in out
    assert "the validation data have only 300 tokens" in out
    assert out.count("the validation loss has risen three times in a row") == 1
    out, _ = train("--log_dir", "run", cwd=tmp_path)  # input.txt
    assert "note: " not in out


def test_the_best_model_survives_a_resume(tmp_path):
    """Its validation was after the checkpoint from which the run continues."""
    flags = ["--keep_best", "--val_every", 7, "--schedule", "constant", "--log_dir", "run",
             "--save_every", 7, "--keep", 0]
    train(*flags, "--max_steps", 20, cwd=tmp_path)
    train(*flags, "--max_steps", 21, "--resume", "--max_lr", 0.06, cwd=tmp_path)
    log, best = read_log(tmp_path / "run"), tmp_path / "run" / "model_best.pt"
    assert float(log[21, "val"]) > float(log[20, "val"])
    assert torch.load(best, weights_only=True)["step"] == 20
    for step in (20, 21):  # now the run continues from step 14
        (tmp_path / "run" / f"model_{step:06d}.pt").unlink()
    train(*flags, "--max_steps", 16, "--resume", "--max_lr", 0.06, cwd=tmp_path)
    assert torch.load(best, weights_only=True)["step"] == 20


def test_main_returns_the_last_figures(tmp_path):
    figures = train_gpt2.main([*TINY, "--log_dir", str(tmp_path / "run")])
    log = read_log(tmp_path / "run")
    assert {name: f"{figures[name]:.8g}" for name in ("val", "train", "lr", "norm")} == {
        name: log[step, name] for name, step in [("val", 10), ("train", 9), ("lr", 9), ("norm", 9)]}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_signal_all_processes_finish_the_step_save_and_exit_0(tmp_path, number):
    flags = ["--max_steps", 2000, "--val_every", 0, "--save_every", 0, "--log_dir", "run"]
    a, b = spawn(*TINY, *flags, cwd=tmp_path, processes=2)
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
    out, _ = train("--resume", *flags, "--max_steps", step + 2, cwd=tmp_path)
    assert f"resumed from step {step}" in out


@pytest.mark.parametrize("max_steps, end", [(2, "done: "), (3, "stopped by a signal")])
def test_a_signal_in_the_last_step(tmp_path, monkeypatch, capsys, max_steps, end):
    """The validation of the last step still happens, unlike that of an earlier step."""
    def interrupted(step, config):
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return get_lr(step, config)

    monkeypatch.setattr(train_gpt2, "get_lr", interrupted)
    monkeypatch.chdir(tmp_path)
    train_gpt2.main([*TINY, "--max_steps", str(max_steps), "--val_every", "2", "--log_dir", "run"])
    assert names(tmp_path / "run", "*.pt") == ["model_000002.pt"]
    assert end in capsys.readouterr().out
    assert ((2, "val") in read_log(tmp_path / "run")) == (max_steps == 2)


# Checkpoints and logs


def test_what_a_run_writes(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path, processes=2)
    saved = checkpoint(tmp_path / "run", 2)
    assert {*saved} == {"model", "model_code", "optimizer", "scaler", "step", "position",
                        "model_config", "train_config", "tokenizer", "best_val"}
    assert (saved["tokenizer"], saved["step"], saved["position"]) == ("bytes", 2, 32)
    GPT(GPTConfig(**saved["model_config"])).load_state_dict(saved["model"])  # no prefixes
    assert not {"batch_size", "rank", "world_size"} & {*saved["train_config"]}
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["model_config"]["n_embd"] == 32 and run["train_config"]["max_steps"] == 2
    assert run["versions"]["torch"] == torch.__version__ and run["dtype"] == "float32"
    assert run["device"].startswith("cpu") and run["processes"] == 2


def test_saving_and_keeping(tmp_path):
    """A resumed run saves at the same steps as a whole one, and deletes no file of the user."""
    flags = ["--log_dir", "run", "--save_every", 5]
    train(*flags, "--keep", 0, "--max_steps", 5, cwd=tmp_path)
    (tmp_path / "run" / "model_mine.pt").write_text("a file of the user")
    for keep, max_steps, steps in ((0, 12, (5, 10, 12)), (3, 16, (12, 15, 16))):
        train(*flags, "--keep", keep, "--max_steps", max_steps, "--resume", cwd=tmp_path)
        saved = [f"model_{step:06d}.pt" for step in steps]
        assert names(tmp_path / "run", "*.pt") == [*saved, "model_mine.pt"]


def test_printed_steps(tmp_path):
    out, _ = train("--log_dir", "run", "--log_every", 4, cwd=tmp_path)
    assert re.findall(r"^step +(\d+)/10", out, re.M) == ["0", "4", "8", "9"]
    assert re.search(r"^step     9/10 \| loss \d\.\d{4} \| 0:00:00 to go \| norm \d+\.\d{3} \| "
                     r"[\d,]+ tok/s \| lr \d\.\d\de-\d\d \| \d+ ms \| \d+\.\d\d TFLOP/s$",
                     out, re.M), out
    log = read_log(tmp_path / "run")
    assert [step for step, stream in log if stream == "train"] == [*range(10)]


def test_progress_bar_on_a_terminal(monkeypatch, capsys):
    """Only parts of the line that fit are shown."""
    monkeypatch.setenv("COLUMNS", "60")
    show_progress(5, 10, "loss 1.2345 | 1m05s to go")
    assert capsys.readouterr().out == ""  # no progress bar in a file
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show_progress(5, 10, "loss 1.2345 | 1m05s to go | " + "x" * 99)
    print0("a\tl\x1b[2Jine\x9b")
    bar, line = capsys.readouterr().out.removeprefix("\r\x1b[K").split("\r\x1b[K")
    assert bar == "5/10 [##########          ] loss 1.2345 | 1m05s to go"
    assert line == "a\tl\\x1b[2Jine\\x9b\n"


# Features: each has a test that fails without it


def test_shuffle_and_seed_change_the_curve(tmp_path):
    for name, flags in (("a", []), ("b", ["--no-shuffle"]), ("c", ["--seed", 2])):
        train("--log_dir", name, "--max_steps", 1, *flags, cwd=tmp_path)
    assert len({read_log(tmp_path / name)[0, "train"] for name in "abc"}) == 3


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
    torch.save(saved, tmp_path / "half" / "model_000010.pt")
    out, _ = train("--log_dir", "half", "--dtype", "float16", "--resume", "--max_steps", 18,
                   cwd=tmp_path)
    assert " | 1 skipped | " in out and "loss nan" not in out
    assert checkpoint(tmp_path / "half", 18)["scaler"]["scale"] == 2.0**32


def test_the_batch_grows_also_if_a_run_resumes_with_fewer_processes(tmp_path):
    flags = ["--rampup_steps", 4, "--rampup_batch_size", 128, "--max_steps", 6]
    train("--log_dir", "one", *flags, cwd=tmp_path)
    sizes = [128, 128, 256, 384, 512, 512]  # tokens
    assert checkpoint(tmp_path / "one", 6)["position"] == sum(sizes) // 32
    flags += ["--log_dir", "two", "--save_every", 3]
    train(*flags, "--batch_size", 1, cwd=tmp_path, processes=2)
    (tmp_path / "two" / "model_000006.pt").unlink()
    out, _ = train(*flags, "--resume", cwd=tmp_path)  # one process continues
    assert "resumed from step 3" in out
    assert_close_logs(tmp_path / "one", tmp_path / "two", rel=1e-5)


def test_init_from_a_checkpoint_resets_step_and_optimizer(tmp_path):
    train("--log_dir", "base", cwd=tmp_path)
    train("--log_dir", "tuned", "--init_from", "base", "--max_steps", 1, "--max_lr", "1e-9",
          "--block_size", 16, "--val_tokens", 512, cwd=tmp_path)
    base, tuned = checkpoint(tmp_path / "base", 10), checkpoint(tmp_path / "tuned", 1)
    assert tuned["step"] == 1 and tuned["position"] == 32
    assert tuned["model_config"]["block_size"] == 16
    assert tuned["optimizer"]["adamw"]["transformer.wpe.weight.step"] == 1
    for name, t in tuned["model"].items():
        expected = base["model"][name][:16] if "wpe" in name else base["model"][name]
        torch.testing.assert_close(t, expected, atol=1e-6, rtol=0)


def test_init_from_hugging_face_weights_on_a_text(tmp_path):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=32))
    save_gpt2(model, tmp_path / "hf")
    (tmp_path / "my.txt").write_bytes((ROOT / "input.txt").read_bytes()[:20_000])
    flags = [*TINY, "--n_layer", 1, "--n_embd", 16, "--val_tokens", 512, "--init_from", "hf",
             "--max_lr", "1e-9", "--max_steps", 2]
    program(*flags, "--log_dir", "run", cwd=tmp_path)
    saved = checkpoint(tmp_path / "run", 2)
    assert saved["tokenizer"] == "gpt2" and saved["model_config"]["vocab_size"] == 50257
    _, loss = model(*text_batch("val", 16, tokenizer="gpt2", shuffle=False))
    assert float(read_log(tmp_path / "run")[0, "val"]) == pytest.approx(loss.item(), rel=1e-4)
    out, _ = program(*flags, "--log_dir", "run", "--resume", "--max_steps", 3, cwd=tmp_path)
    assert "resumed from step 2" in out
    program(*flags, "--data", "my.txt=0.5", f"{ROOT}/input.txt=0.5", "--log_dir", "mixed",
            cwd=tmp_path)
    assert checkpoint(tmp_path / "mixed", 2)["tokenizer"] == "gpt2"


def test_a_text_is_encoded_once(tmp_path, monkeypatch):
    """Also if --preset mini counts its tokens first, and if the tokenizer is of a checkpoint."""
    text, encoded, real = "Hello, I'm a language model. " * 400, [], Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda *args: encoded.append(args[1]) or real(*args))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text(text)
    flags = [*TINY, "--preset", "mini", "--data", "t.txt", "--tokenizer", "gpt2", "--log_dir", "r"]
    for max_steps in "12":
        read_text.cache_clear()
        train_gpt2.main([*flags, "--max_steps", max_steps, "--resume"])
        assert encoded == [text]
        encoded.clear()


def plain_curve(config, steps):
    """Losses and gradient norms of the simplest loop: eager, float32, all logits, nothing fused."""
    model, curve = fresh(config), []
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    other = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([dict(params=decayed, weight_decay=0.1),
                                   dict(params=other, weight_decay=0.0)],
                                  betas=(0.9, 0.95), foreach=False)
    rates = TrainConfig(max_lr=4e-3, min_lr=4e-4, warmup_steps=2, max_steps=20)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, rates)
        x, y = text_batch("train", 16, position=16 * step)
        logits = F.linear(model.hidden(x), model.lm_head.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        curve.append((loss.item(), norm.item()))
        optimizer.step()
    return curve


@pytest.mark.parametrize("flags, tolerance", [
    (["--dtype", "float32"], 1e-5), (["--dtype", "bfloat16", "--activation_checkpointing"], 2e-2)])
def test_the_optimized_step_matches_a_plain_loop(tmp_path, flags, tolerance):
    """20 steps of four micro-steps each. With fullgraph, a graph break is an error.

    A benchmark is scored between steps.
    """
    (tmp_path / "l.jsonl").write_text('{"text": "The boats came home with the evening tide"}\n')
    train("--log_dir", "run", "--max_steps", 20, "--n_layer", 1, "--compile", *flags,
          "--eval_every", 10, "--evals", "lambada=l.jsonl", cwd=tmp_path)
    log = read_log(tmp_path / "run")
    assert {(10, "lambada"), (20, "lambada")} <= log.keys()
    for step, (loss, norm) in enumerate(plain_curve(replace(MODEL, n_layer=1), 20)):
        assert float(log[step, "train"]) == pytest.approx(loss, rel=tolerance), step
        assert float(log[step, "norm"]) == pytest.approx(norm, rel=5 * tolerance), step


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_synchronization_per_step(monkeypatch, optimizer, dtype):
    """Counts the transfers from the device to Python in a step of three micro-steps."""
    model, process = GPT(MODEL), Process(0, 1, 0, 1, CPU, dtype)
    optimizers = model.configure_optimizers(0.1, 1e-3, optimizer)
    x = torch.randint(256, (2, 16))
    training, calls = Training(model, model, optimizers, grad_scaler(process)), []

    def counted(name, original):
        return lambda *args: calls.append(name) or original(*args)

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    for _ in range(2):
        calls.clear()
        loss, norm, _ = train_gpt2.train_step(training, [(x, x)] * 3, 1.0, [], process)
        assert calls == ["tolist"] and math.isfinite(loss) and math.isfinite(norm)


def test_prefetch_gives_the_same_batches_and_the_same_errors():
    def batches():
        yield from range(5)
        raise UserError("a shard broke off")

    taken = []
    with pytest.raises(UserError, match="broke off"):
        for batch in prefetch(batches(), CPU):
            taken.append(batch)
    assert taken == [0, 1, 2, 3, 4]


def test_out_of_memory_gives_a_one_sentence_error():
    def on_cuda():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nMore lines.")

    for error in (lambda: torch.empty(2**50), on_cuda):
        with pytest.raises(UserError, match="^too large; choose a smaller one$"):
            with memory_advice("too large; choose a smaller one"):
                error()


def test_ten_non_finite_gradients_in_a_row_stop_the_run(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    saved = checkpoint(tmp_path / "run", 2)
    saved["model"]["transformer.ln_f.weight"].fill_(1e38)
    torch.save(saved, tmp_path / "run" / "model_000002.pt")
    out, err = train("--log_dir", "run", "--resume", "--max_steps", 50, "--val_every", 0,
                     cwd=tmp_path, status=2)
    assert err.startswith("error: no finite gradient in 10 steps in a row; continue with")
    assert err.count("\n") == 1 and "10 skipped" in out and "step    12/" not in out


def test_dropout_differs_between_steps_seeds_and_ranks(tmp_path):
    """Every step and process has the same sequence, so only the masks change the losses."""
    text = (ROOT / "input.txt").read_bytes()[:33]
    (tmp_path / "one.txt").write_bytes(text * 1000)
    flags = ["--data", "one.txt", "--dropout", 0.5, "--max_lr", 1e-12, "--max_steps", 3,
             "--total_batch_size", 64, "--no-shuffle", "--val_tokens", 32]
    for name, more in dict(a=[], b=["--seed", 2], none=["--dropout", 0]).items():
        train(*flags, "--log_dir", name, *more, cwd=tmp_path)
    train(*flags, "--log_dir", "two", cwd=tmp_path, processes=2)
    logs = {name: read_log(tmp_path / name) for name in ("a", "b", "two", "none")}
    losses = [log[step, "train"] for name, log in logs.items() if name != "none"
              for step in range(3)]
    assert len({*losses}) == 9
    assert logs["a"][0, "val"] == logs["none"][0, "val"]  # evaluation has no dropout


# Flags


def configs(*flags):
    given = parse_flags("", GPTConfig, TrainConfig, argv=flags)
    return make_configs(given, Sources(choose_data(given)))


def test_gpt2_preset_is_the_published_recipe(shards):
    g, c = configs("--preset", "gpt2", "--data", str(shards))
    assert (g.n_layer, g.n_head, g.n_embd, g.block_size, g.vocab_size) == (12, 12, 768, 1024, 50257)
    assert (c.total_batch_size, c.max_steps, c.warmup_steps) == (2**19, 19073, 715)
    assert (c.max_lr, c.weight_decay, c.grad_clip) == (6e-4, 0.1, 1.0)
    assert c.min_lr == pytest.approx(6e-5) and (c.save_every, c.log_every) == (1000, 1)
    # works on eight processes without flags
    assert c.total_batch_size % (c.batch_size * g.block_size * 8) == 0


def test_auto_preset_depends_on_the_data(tmp_path, monkeypatch, capsys, shards):
    monkeypatch.chdir(tmp_path)
    hint = "steps; --preset chooses another one: mini is small, gpt2 is GPT-2 124M\n"
    text = str(ROOT / "input.txt")
    _, c = configs()
    assert (c.preset, c.data, c.log_dir) == ("baby", [text], "log/baby")
    assert capsys.readouterr().out == f"preset baby on {text} (256 ids), 2,700 {hint}"
    shards.rename(tmp_path / "edu_fineweb10B")
    _, c = configs()
    assert (c.preset, c.data) == ("mini", ["edu_fineweb10B"])
    assert capsys.readouterr().out == f"preset mini on edu_fineweb10B (256 ids), 200 {hint}"
    found = [configs("--preset", name)[1].data for name in ("gpt2", "mini", "finetune")]
    assert found == [["edu_fineweb10B"], [text], [text]]


def test_flags_override_the_preset_and_the_preset_overrides_defaults():
    g, c = configs("--preset", "baby", "--n_layer", "2", "--max_lr", "1e-3", "--no-shuffle")
    assert (g.n_layer, g.n_embd, c.max_lr, c.min_lr) == (2, 128, 1e-3, 0)
    assert c.weight_decay == TrainConfig().weight_decay and not c.shuffle and c.log_every == 100
