"""When a run saves a checkpoint, what a checkpoint contains, and how a run resumes."""

import contextlib
import json
import math
import os
import re
import resource
import shutil
from dataclasses import replace
from types import SimpleNamespace

from plaingpt.checkpoint import (
    find_checkpoints,
    load_checkpoint,
    load_newest,
    read_best_val,
    write_checkpoint,
)
from plaingpt.errors import UserError
from plaingpt.files import read_json, read_streams
from plaingpt.pretrained import load_model, save_gpt2
from plaingpt.settings import settings_of_losses
from plaingpt.shards import open_shard
from plaingpt.tokenizer import get_tokenizer

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    assert_close_logs,
    checkpoint,
    everything_in,
    names,
    optimizer_values,
    program,
    read_log,
    train,
    write_lines,
)
from edited import SWAPPED, copy_program, edit_model
from other_optimizers import assert_equal

from model import GPT, GPTConfig
from train_gpt2 import TrainConfig, resume

# Saving

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of a parameter


@pytest.mark.slow
def test_what_a_run_writes(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path, processes=2)
    saved = checkpoint(tmp_path / "run", 2)
    page = (ROOT / "docs" / "resume.md").read_text(encoding="utf-8")
    table = page.partition("| entry of a checkpoint |")[2].partition("\n\n")[0]
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    assert {*saved} == {*listed} - {"val"}  # val is only in model_best.pt
    assert (saved["tokenizer"], saved["step"], saved["position"]) == ("bytes", 2, 32)
    model = GPT(GPTConfig(**saved["model_config"]))
    model.load_state_dict(saved["model"])  # the names have no prefix, such as "module."
    (adamw,) = model.configure_optimizers(0.1, 1e-3)
    adamw.load_state_dict(saved["optimizers"][0])
    values = [(name, key) for name, _ in model.named_parameters() for key in MOMENTS]
    assert optimizer_values(saved).keys() == {f"{name}.{key}" for name, key in values}
    assert not {"batch_size", "log_dir", "resume"} & {*saved["train_config"]}
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["model_config"]["n_embd"] == 32 and run["train_config"]["max_steps"] == 2
    assert run["versions"]["torch"] == torch.__version__ and run["dtype"] == "float32"
    assert run["device"].startswith("cpu") and run["processes"] == 2


@pytest.mark.slow
def test_saving_and_keeping(tmp_path):
    """A resumed run saves checkpoints at the same steps as an uninterrupted run.

    A run never deletes a file of the user, such as model_mine.pt.
    """
    flags = ["--log_dir", "run", "--save_every", 5]
    train(*flags, "--keep", 0, "--max_steps", 5, cwd=tmp_path)
    (tmp_path / "run" / "model_mine.pt").write_text("a file of the user")
    for keep, max_steps, steps in ((0, 12, (5, 10, 12)), (3, 16, (12, 15, 16))):
        train(*flags, "--keep", keep, "--max_steps", max_steps, "--resume", cwd=tmp_path)
        saved = [f"model_{step:06d}.pt" for step in steps]
        assert names(tmp_path / "run", "*.pt") == [*saved, "model_mine.pt"]


@pytest.mark.slow
def test_a_resume_without_keep_deletes_no_older_checkpoint(tmp_path):
    flags = ["--log_dir", "run", "--save_every", 2, "--resume"]
    train(*flags, "--keep", 0, "--max_steps", 6, cwd=tmp_path)
    train(*flags, "--max_steps", 10, cwd=tmp_path)
    assert names(tmp_path / "run", "*.pt") == [f"model_{step:06d}.pt" for step in (2, 4, 6, 8, 10)]
    train(*flags, "--keep", 1, "--max_steps", 12, cwd=tmp_path)
    assert names(tmp_path / "run", "*.pt") == ["model_000012.pt"]


@pytest.mark.slow
def test_keep_best_keeps_the_lowest_validation_loss(tmp_path):
    # The training split, the first 90% of the text, contains only a and b. The validation split
    # also contains x and y, so its loss rises again when the model predicts only a and b.
    (tmp_path / "my.txt").write_text("ab" * 4500 + "abxy" * 250)
    flags = [
        "--data",
        "my.txt",
        "--log_dir",
        "run",
        "--keep_best",
        "--val_every",
        2,
        "--save_every",
        4,
        "--keep",
        1,
    ]
    train(*flags, "--max_steps", 16, cwd=tmp_path)
    best = tmp_path / "run/model_best.pt"
    step = torch.load(best)["step"]
    losses = read_streams(tmp_path / "run/log.txt")["val"]
    assert 0 < step < 16 and losses[step] == min(losses.values())
    program("--checkpoint", best, "--max_new_tokens", 2, cwd=tmp_path, program="generate.py")
    train("--log_dir", "run", cwd=tmp_path)  # a new run
    assert not best.exists() and (tmp_path / "run/old-1/model_best.pt").exists()
    # With a directory of this name, the run cannot save model_best.pt. In this case, the run must
    # not log the validation loss, because a resumed run will validate again.
    best.mkdir()
    train(*flags[2:5], "--resume", "--val_every", 12, "--max_steps", 12, cwd=tmp_path, status=2)
    assert (12, "val") not in read_log(tmp_path / "run")


def test_the_best_loss_is_that_of_the_file(tmp_path):
    """The best loss is the loss of model_best.pt, although log.txt may contain a lower loss.

    An earlier part of the run, without --keep_best, may have reached the lower loss.
    """
    (tmp_path / "log.txt").write_text("0 val 1.0\n2 val 3.0\n4 val 2.0\n6 val 2.5\n8 val 2.1\n")
    assert read_best_val(tmp_path) == math.inf
    torch.save(dict(step=6, val=2.25), tmp_path / "model_best.pt")
    assert read_best_val(tmp_path) == 2.25


@pytest.mark.slow
def test_a_damaged_best_model_is_found_before_the_first_step(copy):
    log = (copy / "log.txt").read_text()
    (copy / "model_best.pt").write_bytes(b"damaged")
    flags = ["--log_dir", copy, "--resume", "--keep_best", "--max_steps", 12]
    _, err = train(*flags, cwd=copy.parent, status=2)
    assert "model_best.pt: not a readable checkpoint" in err and "; move it away" in err
    assert (copy / "log.txt").read_text() == log


@pytest.mark.slow
def test_keep_best_first_given_at_a_resume(tmp_path):
    (tmp_path / "my.txt").write_text("ab" * 4500 + "abxy" * 250)
    flags = ["--data", "my.txt", "--log_dir", "run", "--val_every", 2]
    train(*flags, "--max_steps", 12, cwd=tmp_path)
    train(*flags, "--max_steps", 16, "--resume", "--keep_best", cwd=tmp_path)
    step = torch.load(tmp_path / "run/model_best.pt")["step"]
    losses = read_streams(tmp_path / "run/log.txt")["val"]
    assert min(losses.values()) < losses[step] == min(losses[i] for i in (12, 14, 16))


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    """From step 1,000,000 on, the step in a file name has seven digits.

    If checkpoints were sorted by file name, --keep would delete the newest checkpoint.
    """
    checkpoints = [f"model_{step:06d}.pt" for step in (5, 999_000, 1_000_000)]
    for name in checkpoints:
        (tmp_path / name).touch()
    assert [path.name for path in find_checkpoints(tmp_path)] == checkpoints


@pytest.mark.slow
def test_the_newest_checkpoint_has_the_highest_step(tmp_path, whole):
    """The modification time of a file does not matter, because a clock may go backwards.

    Files whose names contain no step are ignored.
    """
    shutil.copytree(whole, tmp_path / "log" / "run")
    os.utime(tmp_path / "log" / "run" / "model_000005.pt", (2e9, 2e9))
    (tmp_path / "log" / "run" / "model_².pt").write_text("")
    out, _ = program("--max_new_tokens", 3, "--num_samples", 3, cwd=tmp_path, program="generate.py")
    assert out.startswith("log/run/model_000010.pt, 34,688 parameters, ")
    assert out.count("--- sample ") == 3


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_one_sentence(copy):
    path, saved = copy / "model_000010.pt", checkpoint(copy, 10)
    wpe = saved["model"]["transformer.wpe.weight"]
    for change in (
        dict(model={**saved["model"], "transformer.wpe.weight": wpe[1:]}),
        dict(model={**saved["model"], "more": wpe}),
        dict(model_config={**saved["model_config"], "end_of_text": 10}),
    ):
        torch.save(saved | change, path)
        with pytest.raises(UserError) as error:
            load_model(path, GPT)
        remedy = "restore the model.py of that run; the run directory may contain a changes.patch"
        start, end = f"{path}: does not fit this model.py (", f"); {remedy}"
        text = str(error.value)
        assert text.startswith(start) and text.endswith(end) and "\n" not in text


# Resuming


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--dropout", 0.2, "--optimizer", "muon"],
        ["--dropout", 0.2, "--activation_checkpointing"],
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)
def test_a_resumed_run_is_bitwise_equal(tmp_path, flags):
    """Deleting the last checkpoint simulates a run that was killed after it had saved step 3.

    The resumed run also validates and samples more often than the uninterrupted run. This must not
    affect training.
    """
    flags = [*flags, *"--max_steps 6 --save_every 3 --keep 0 --val_tokens 128".split()]
    train("--log_dir", "whole", *flags, cwd=tmp_path)
    flags += ["--log_dir", "halves", "--val_every", 1, "--sample_every", 2]
    train(*flags, cwd=tmp_path)
    (tmp_path / "halves" / "model_000006.pt").unlink()
    train(*flags, "--resume", cwd=tmp_path)
    assert read_log(tmp_path / "whole").items() <= read_log(tmp_path / "halves").items()
    a, b = (checkpoint(tmp_path / name, 6) for name in ("whole", "halves"))
    assert a["position"] == b["position"] == 96 and a["step"] == b["step"] == 6
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)
    is_muon = ["n_stacked" in state["param_groups"][0] for state in a["optimizers"]]
    assert is_muon == ([True, False] if "muon" in flags else [False])
    assert_equal(a["optimizers"], b["optimizers"], "optimizers")


@pytest.mark.slow
def test_a_run_resumes_with_another_micro_batch_device_and_dtype(copy, whole):
    """For resumed runs with FSDP, TP and PP, see test_parallel.py."""
    (copy / "model_000010.pt").unlink()
    flags = ["--log_dir", "run", "--resume"]
    train(*flags, "--batch_size", 16, "--device", "auto", cwd=copy.parent)
    assert_close_logs(copy, whole, rel=1e-5)
    for dtype, step in (("float16", 12), ("bfloat16", 14)):
        out, _ = train(*flags, "--max_steps", step, "--dtype", dtype, cwd=copy.parent)
        assert f"resumed from step {step - 2} " in out and "note: dtype changes from " in out
        assert f"note: max_steps changes from {step - 2} to {step}\n" in out


def test_a_note_says_that_the_learning_rate_changes_when_a_run_is_extended(tmp_path, capsys):
    """Checks the learning rates in docs/resume.md. The test does not train a model."""
    linear = dict(max_lr=8e-3, min_lr=0.0, schedule="linear", warmup_steps=60)
    cosine = dict(max_lr=6e-4, min_lr=6e-5, schedule="cosine", warmup_steps=715)
    wsd = dict(linear, schedule="wsd")
    for settings, step, before, after, note in (
        (linear, 300, 300, 320, "3.3e-05 in step 299 to 6.2e-04 in step 300"),
        (linear, 300, 300, 300, None),
        (cosine, 19073, 19073, 40000, "6.0e-05 in step 19072 to 3.6e-04 in step 19073"),
        (wsd, 240, 300, 320, None),  # the last checkpoint before the decay
        (wsd, 300, 300, 320, "1.3e-04 in step 299 to 2.5e-03 in step 300"),
    ):
        config = TrainConfig(**settings, log_dir=str(tmp_path))
        saved = dict(
            step=step,
            position=0,
            train_config=settings_of_losses(replace(config, max_steps=before)),
            model_config={},
        )
        training = SimpleNamespace(
            config=replace(config, max_steps=after),
            gpt_config=GPTConfig(),
            load_state_dict=lambda checkpoint: None,
        )
        resume(training, saved, SimpleNamespace(fingerprints={}))
        lines = [line for line in capsys.readouterr().out.splitlines() if "learning rate" in line]
        assert lines == ([f"note: the learning rate changes from {note}"] if note else [])


@pytest.mark.slow
def test_a_wsd_run_goes_on_from_any_checkpoint_as_one_longer_run(tmp_path):
    flags = ["--schedule", "wsd", "--decay_steps", 4]
    train(*flags, "--log_dir", "long", "--max_steps", 14, cwd=tmp_path)
    train(*flags, "--log_dir", "run", "--save_every", 6, "--max_steps", 10, cwd=tmp_path)
    (tmp_path / "run/model_000010.pt").unlink()  # the next run resumes before the decay
    train(*flags, "--log_dir", "run", "--resume", "--max_steps", 14, cwd=tmp_path)
    long, run = (read_streams(tmp_path / name / "log.txt")["train"] for name in ("long", "run"))
    assert long == run and len(run) == 14


@pytest.mark.slow
def test_the_best_model_survives_a_resume(tmp_path):
    """model_best.pt is newer than the checkpoint from which the run resumes."""
    flags = [
        "--keep_best",
        "--val_every",
        7,
        "--log_dir",
        "run",
        "--save_every",
        7,
        "--keep",
        0,
        "--min_lr",
        4e-3,
    ]  # the learning rate is constant: --min_lr equals --max_lr
    bad = ["--resume", "--max_lr", 0.06, "--min_lr", 0.06]
    train(*flags, "--max_steps", 20, cwd=tmp_path)
    train(*flags, "--max_steps", 21, *bad, cwd=tmp_path)
    log, best = read_log(tmp_path / "run"), tmp_path / "run" / "model_best.pt"
    assert float(log[21, "val"]) > float(log[20, "val"])
    assert torch.load(best, weights_only=True)["step"] == 20
    for step in (20, 21):  # the next run resumes from step 14
        (tmp_path / "run" / f"model_{step:06d}.pt").unlink()
    out, _ = train(*flags, "--max_steps", 16, *bad, cwd=tmp_path)
    assert "resumed from step 14 " in out
    assert torch.load(best, weights_only=True)["step"] == 20


@pytest.mark.slow
def test_more_steps_do_not_change_what_was_derived_from_fewer(tmp_path):
    derived = {"warmup_steps": 4, "val_every": 2, "min_lr": 4e-4}
    flags = [
        *TINY,
        "--preset",
        "gpt2",
        "--data",
        ROOT / "input.txt",
        "--eval_every",
        0,
        "--log_dir",
        "run",
        "--max_steps",
    ]
    # This loop removes three flags and their values.
    for flag in ("--warmup_steps", "--val_every", "--min_lr"):
        del flags[flags.index(flag) : flags.index(flag) + 2]

    def found():
        config = json.loads((tmp_path / "run" / "run.json").read_text())["train_config"]
        return {name: config[name] for name in derived}

    program(*flags, 20, "--max_minutes", 1e-9, cwd=tmp_path)  # stops after one step
    assert found() == derived
    program(*flags, 100, "--resume", "--max_lr", 8e-3, "--max_minutes", 1e-9, cwd=tmp_path)
    assert found() == derived | {"min_lr": 8e-4}
    program(*flags, 22, "--resume", "--warmup_steps", 3, cwd=tmp_path)
    assert found() == derived | {"warmup_steps": 3}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_weights_of_an_earlier_version_stay_readable(tmp_path, version):
    """Version 1.0 or 2.0 saved tests/version-{version}.pt at step 2 of a run.

    Never replace this file. The expected validation loss is the loss that version 2.1 logged at
    step 2 of both runs.
    """
    (tmp_path / "text.txt").write_text("".join(f"{i} green bottles\n" for i in range(500)))
    (tmp_path / "run").mkdir()
    old = shutil.copy(
        ROOT / "tests" / f"version-{version}.pt", tmp_path / "run" / "model_000002.pt"
    )
    flags = "--data text.txt --tokenizer bytes --n_layer 1 --n_embd 8 --max_lr 8e-3".split()
    before = everything_in(tmp_path / "run")
    _, err = train(*flags, "--log_dir", "run", "--resume", cwd=tmp_path, status=2)
    assert err == (
        "error: run/model_000002.pt: version 2.1 or older wrote it; finish the run with that "
        "version, or replace --resume with --init_from run, and give --preset, --data and "
        "another --log_dir\n"
    )
    assert everything_in(tmp_path / "run") == before
    train(*flags, "--init_from", "run", "--log_dir", "new", "--max_steps", 1, cwd=tmp_path)
    assert float(read_log(tmp_path / "new")[0, "val"]) == pytest.approx(5.390677, abs=1e-4)
    program("--checkpoint", old, "--max_new_tokens", 2, cwd=tmp_path, program="generate.py")
    write_lines(tmp_path / "l.jsonl", [dict(text="9 green bottles")])
    flags = ["--checkpoint", old, "--data", "l.jsonl"]
    program(*flags, "--device", "cpu", cwd=tmp_path, program="lambada.py")


@pytest.mark.slow
def test_a_run_of_version_3_resumes_with_its_losses(tmp_path):
    """Version 3.0 saved tests/version-3.0.pt at step 2 of a run of 5 steps.

    Never replace this file. The test contains the losses that version 3.0 logged afterwards.
    """
    (tmp_path / "text.txt").write_text("".join(f"{i} green bottles\n" for i in range(500)))
    (tmp_path / "run").mkdir()
    shutil.copy(ROOT / "tests/version-3.0.pt", tmp_path / "run/model_000002.pt")
    flags = "--data text.txt --tokenizer bytes --n_layer 1 --n_embd 8 --max_lr 8e-3".split()
    train(*flags, "--log_dir", "run", "--max_steps", 5, "--resume", cwd=tmp_path)
    log = read_log(tmp_path / "run")
    losses = [float(log[step, "train"]) for step in (2, 3, 4)]
    assert losses == pytest.approx([5.372203, 5.263807, 5.185441], abs=1e-4)


# Starting from other weights


@pytest.mark.slow
def test_init_from_a_checkpoint_resets_step_and_optimizer(tmp_path, whole):
    train(
        "--log_dir",
        "tuned",
        "--init_from",
        whole,
        "--max_steps",
        1,
        "--max_lr",
        "1e-9",
        "--min_lr",
        0,
        "--block_size",
        16,
        "--val_tokens",
        512,
        cwd=tmp_path,
    )
    base, tuned = checkpoint(whole, 10), checkpoint(tmp_path / "tuned", 1)
    assert tuned["step"] == 1 and tuned["position"] == 32
    assert tuned["model_config"]["block_size"] == 16
    assert optimizer_values(tuned)["transformer.wpe.weight.step"] == 1
    for name, t in tuned["model"].items():
        expected = base["model"][name][:16] if "wpe" in name else base["model"][name]
        torch.testing.assert_close(t, expected, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_init_from_hugging_face_weights_on_a_text(tmp_path):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=32))
    save_gpt2(model, tmp_path / "hf", get_tokenizer("gpt2"))
    (tmp_path / "hf" / "tokenizer.json").unlink()  # without this file, the tokenizer is GPT-2's
    (tmp_path / "my.txt").write_bytes((ROOT / "input.txt").read_bytes()[:20_000])
    flags = [
        *TINY,
        "--n_layer",
        1,
        "--n_embd",
        16,
        "--total_batch_size",
        128,
        "--val_tokens",
        128,
        "--init_from",
        "hf",
        "--max_lr",
        "1e-9",
        "--min_lr",
        0,
        "--max_steps",
        2,
    ]
    program(*flags, "--log_dir", "run", cwd=tmp_path)
    saved = checkpoint(tmp_path / "run", 2)
    assert saved["tokenizer"] == "gpt2" and saved["model_config"]["vocab_size"] == 50257
    torch.testing.assert_close(saved["model"], model.state_dict(), atol=1e-6, rtol=0)
    out, _ = program(*flags, "--log_dir", "run", "--resume", "--max_steps", 3, cwd=tmp_path)
    assert "resumed from step 2" in out
    program(
        *flags, "--data", "my.txt=0.5", f"{ROOT}/input.txt=0.5", "--log_dir", "mixed", cwd=tmp_path
    )
    assert checkpoint(tmp_path / "mixed", 2)["tokenizer"] == "gpt2"


@pytest.mark.slow
def test_a_resumed_run_keeps_the_shape_of_its_weights(copy, tmp_path):
    """A run that began with --init_from resumes without this flag.

    The resumed run does not need the flags for the sizes of the model either.
    """
    flags = (
        "--total_batch_size 512 --val_tokens 1024 --device cpu --sample_tokens 1 "
        "--optimizer adamw --log_dir new --max_steps"
    ).split()
    program(*flags, 2, "--init_from", "run", cwd=tmp_path)
    out, _ = program(*flags, 3, "--resume", cwd=tmp_path)
    assert "resumed from step 2" in out and "34,688 parameters" in out


# A checkpoint of an earlier version

# A run with these flags saved tests/checkpoints/adamw.pt after 4 of 8 steps. Later versions must be
# able to resume from this file.
STORED = ROOT / "tests/checkpoints/adamw.pt"
FLAGS = [
    *TINY,
    *(
        "--n_embd 8 --block_size 8 --total_batch_size 64 --max_steps 8 --val_tokens 32 "
        "--val_every 0 --sample_tokens 1 --log_dir run"
    ).split(),
]
# {step: training loss} of this run in the remaining steps.
LOSSES = {4: 5.3931274, 5: 5.3403149, 6: 5.3432436, 7: 5.3175859}


@pytest.mark.slow
def test_a_run_goes_on_from_a_stored_file(tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(STORED, tmp_path / "run" / "model_000004.pt")
    out, _ = program(*FLAGS, "--resume", cwd=tmp_path)
    assert "resumed from step 4" in out
    log = read_log(tmp_path / "run")
    for step, loss in LOSSES.items():
        assert float(log[step, "train"]) == pytest.approx(loss, rel=1e-5), step


# Faults that would be silent without a check. Other files test two more of these faults:
# test_reliability.py flips a bit of a checkpoint, and test_optimizers.py stores a NumPy number in
# an optimizer.


@pytest.mark.slow
def test_layers_that_change_places_do_not_exchange_their_moments(tmp_path):
    """An edit swaps two LayerNorms of the same shape, so the order of the parameters changes.

    PyTorch's optimizers identify parameters only by their order.
    """
    copy_program(tmp_path)
    options = dict(cwd=tmp_path, program=tmp_path / "train_gpt2.py")
    program(*FLAGS, "--max_steps", 4, **options)
    before = everything_in(tmp_path / "run")
    edit_model(tmp_path, SWAPPED)
    _, err = program(*FLAGS, "--resume", **options, status=2)
    assert err.splitlines()[-1] == (
        "error: --resume: the parameters of the optimizers in the checkpoint differ from model.py, "
        "or have a different order; restore the model.py of that run; the run directory may "
        "contain a changes.patch"
    )
    assert everything_in(tmp_path / "run") == before


@pytest.mark.slow
def test_on_windows_a_checkpoint_is_not_mapped(tmp_path, monkeypatch):
    """Windows cannot delete a file that is mapped into memory.

    A resumed run must be able to delete the checkpoint from which it resumed.
    """
    monkeypatch.setattr("plaingpt.checkpoint.sys", SimpleNamespace(platform="win32"))
    path = shutil.copy(STORED, tmp_path / "model.pt")
    checkpoint = load_checkpoint(path, GPT)
    # If the file were mapped into memory, this line would set all weights to 0.
    path.write_bytes(bytes(path.stat().st_size))
    assert all(w.any() for name, w in checkpoint["model"].items() if "weight" in name)


def test_a_name_that_is_not_utf8_is_no_damage(tmp_path):
    """PyTorch cannot read a file whose name is not UTF-8. The message names the file and cause."""
    directory = tmp_path / os.fsdecode(b"r\xffn")
    directory.mkdir()
    shutil.copy(STORED, directory / "model_000004.pt")
    with pytest.raises(UserError, match=r"model_000004\.pt: cannot be read \('utf-8' .*\); remove"):
        load_newest(directory, GPT)


def test_only_a_damaged_file_of_this_run_is_to_be_moved_away(tmp_path, monkeypatch):
    """The message advises the user to move away only a damaged checkpoint of this run.

    The user may still need a file that another program wrote. A file that cannot be read at the
    moment may be intact.
    """
    torch.save(dict(model={}, model_args={}), tmp_path / "ckpt.pt")  # in nanoGPT's format
    torch.save(dict(config=TrainConfig()), tmp_path / "pickle.pt")  # in build-nanogpt's format
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    for name in ("ckpt.pt", "pickle.pt", "model.safetensors"):
        with pytest.raises(
            UserError, match="not a readable checkpoint .*; give another checkpoint$"
        ) as e:
            load_checkpoint(tmp_path / name, GPT)
        assert "\x1b" not in str(e.value) and "\n" not in str(e.value)
    path = tmp_path / "model_000001.pt"
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match="move it away to resume from the previous checkpoint$"):
        load_newest(tmp_path, GPT)

    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("zipfile.ZipFile", fail)
    with pytest.raises(UserError, match=r"\(Input/output error\); remove the cause, then try aga"):
        load_newest(tmp_path, GPT)


@contextlib.contextmanager
def at_most_open(n):
    """In the `with` block, this process can open at most n more files."""
    first = os.open(os.devnull, os.O_RDONLY)
    os.close(first)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + n, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_open_files_are_no_damage(tmp_path):
    """The files are intact, so the messages must not tell the user to delete or recreate them."""
    shutil.copy(STORED, tmp_path / "model_best.pt")
    np.save(tmp_path / "x_train_000000.npy", np.arange(9, dtype=np.uint16))
    (tmp_path / "run.json").write_text("{}")
    for n, name, read in (
        (0, "model_best.pt", lambda path: load_checkpoint(path, GPT)),
        (0, "model_best.pt", lambda path: read_best_val(tmp_path)),
        (0, "x_train_000000.npy", open_shard),
        (0, "run.json", read_json),
    ):
        sentence = rf"{name}: cannot be read \(Too many open files\); remove the cause, then try "
        with pytest.raises(UserError, match=sentence), at_most_open(n):
            read(tmp_path / name)


def test_a_checkpoint_that_cannot_be_read_back_replaces_no_file(tmp_path):
    path = tmp_path / "model_best.pt"
    write_checkpoint(path, dict(step=1))
    with pytest.raises(UserError, match="contain a value that cannot be read back"):
        write_checkpoint(path, dict(step=np.float64(2)))
    assert torch.load(path) == dict(step=1)
    assert names(tmp_path) == ["model_best.pt"]
