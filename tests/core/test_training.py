"""Runs train_gpt2.py as a user does: on two processes, with several seeds, and stopped early."""

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plaingpt.data import open_splits
from plaingpt.errors import UserError
from plaingpt.tokenizer import get_tokenizer

import numpy as np
import pytest
import torch
from conftest import (
    MODEL,
    ONE_BYTE_IDS,
    ROOT,
    TEXT,
    TINY,
    as_training,
    assert_close_logs,
    checkpoint,
    fresh,
    names,
    program,
    read_log,
    spawn,
    train,
    wait_for,
)

import train_gpt2
from train_gpt2 import TrainConfig, get_lr

# Processes


@pytest.mark.slow
def test_validation_uses_the_same_tokens_in_every_layout(tmp_path):
    """Validation reads 27 sequences, evenly spaced over the whole held-out text.

    A batch always contains --batch_size sequences; surplus sequences are ignored. In the last run,
    --batch_size is 64, although a training step has only 8 sequences per process.
    """
    model, shapes = fresh(MODEL), set()
    model.loss_fn.register_forward_pre_hook(lambda _, args: shapes.add(tuple(args[1].shape)))
    val = open_splits(ROOT / "input.txt", get_tokenizer("bytes"))[1]
    config = TrainConfig(val_tokens=32 * 27)
    loader = train_gpt2.make_val_loader(val, 32, config)
    found, _ = train_gpt2.estimate_loss(as_training(model, config), loader, ONE_BYTE_IDS)
    assert shapes == {(64, 32)}  # torch.compile would compile the loss again for a second shape
    total = (len(val) - 1) // 32  # sequences
    starts = [int(i * total / 27) * 32 for i in range(27)]
    assert starts[-1] > 0.95 * len(val)
    rows = np.stack([val.read_sequence(start, 32) for start in starts], axis=1)
    assert found == pytest.approx(model(*torch.from_numpy(rows))[1].item(), rel=1e-5)
    for name, (B, processes) in dict(b=(1, 1), c=(2, 2), d=(64, 2)).items():
        train(
            "--log_dir",
            name,
            "--max_steps",
            1,
            "--batch_size",
            B,
            "--val_tokens",
            32 * 27,
            cwd=tmp_path,
            processes=processes,
        )
        assert float(read_log(tmp_path / name)[0, "val"]) == pytest.approx(found, rel=1e-5)


@pytest.mark.slow
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


@pytest.mark.slow
def test_processes_with_different_data_flags_or_checkpoints(copy, tmp_path):
    """The second process has a different text, learning rate or run directory.

    Only the run directory of the first process contains a checkpoint.
    """
    (tmp_path / "my.txt").write_text(TEXT * 9)
    (tmp_path / "train.py").write_text(
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import train_gpt2\nfrom plaingpt.errors import run_program\n"
        "i = 2 + 2 * int(os.environ['RANK'])\n"
        "run_program(lambda: train_gpt2.main([*sys.argv[5:], *sys.argv[i - 1:i + 1]]))\n"
    )
    for flag, message in (
        (["--data", "my.txt"], "--data: the processes have different data; give all the same"),
        (["--max_lr", 1.0], "the processes have different flags; give all the same"),
        (
            ["--log_dir", "other"],
            "the processes have different checkpoints; use the same --log_dir",
        ),
    ):
        _, err = program(
            "--log_dir",
            "run",
            *flag,
            *TINY,
            "--resume",
            "--log_dir",
            "run",
            cwd=tmp_path,
            processes=2,
            status=2,
            program=tmp_path / "train.py",
        )
        assert message in err


@pytest.mark.slow
def test_one_process_checks_a_checkpoint(tmp_path):
    """Checking a checkpoint means reading the whole file, so only rank 0 checks the checkpoint."""
    train("--max_steps", 4, "--val_every", 2, "--keep_best", "--log_dir", "run", cwd=tmp_path)
    (tmp_path / "train.py").write_text(
        f"import os, sys, zipfile; sys.path.insert(0, {str(ROOT)!r})\n"
        "import train_gpt2\ntestzip = zipfile.ZipFile.testzip\n"
        "def log(self):\n"
        "    open('checks', 'a').write(os.environ['RANK'] + os.path.basename(self.filename))\n"
        "    return testzip(self)\n"
        "zipfile.ZipFile.testzip = log\ntrain_gpt2.main()\n"
    )
    program(
        *TINY,
        "--max_steps",
        5,
        "--keep_best",
        "--log_dir",
        "run",
        "--resume",
        cwd=tmp_path,
        processes=2,
        program=tmp_path / "train.py",
    )
    assert (tmp_path / "checks").read_text() == "0model_000004.pt"


# Seeds


@pytest.mark.slow
def test_shuffle_and_seed_change_the_curve(tmp_path):
    for name, flags in (("a", []), ("b", ["--no-shuffle"]), ("c", ["--seed", 2])):
        train("--log_dir", name, "--max_steps", 1, *flags, cwd=tmp_path)
    assert len({read_log(tmp_path / name)[0, "train"] for name in "abc"}) == 3


@pytest.mark.slow
def test_dropout_differs_between_steps_seeds_and_ranks(tmp_path):
    """All steps and processes read the same sequence, so only dropout masks change the losses."""
    text = (ROOT / "input.txt").read_bytes()[:33]
    (tmp_path / "one.txt").write_bytes(text * 1000)
    flags = [
        "--data",
        "one.txt",
        "--dropout",
        0.5,
        "--max_lr",
        1e-12,
        "--min_lr",
        0,
        "--max_steps",
        3,
        "--total_batch_size",
        64,
        "--no-shuffle",
        "--val_tokens",
        32,
    ]
    for name, more in dict(a=[], b=["--seed", 2], none=["--dropout", 0]).items():
        train(*flags, "--log_dir", name, *more, cwd=tmp_path)
    train(*flags, "--log_dir", "two", cwd=tmp_path, processes=2)
    logs = {name: read_log(tmp_path / name) for name in ("a", "b", "two", "none")}
    losses = [
        log[step, "train"] for name, log in logs.items() if name != "none" for step in range(3)
    ]
    assert len({*losses}) == 9
    assert logs["a"][0, "val"] == logs["none"][0, "val"]  # validation uses no dropout


# Stopping early


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_says_what_happens_and_can_be_forced(tmp_path, again):
    (process,) = spawn(
        *TINY, "--log_dir", "run", "--max_steps", 100_000, "--total_batch_size", 16384, cwd=tmp_path
    )
    wait_for(process, "step     0/")
    process.send_signal(signal.SIGINT)
    wait_for(process, "stopping: the run saves a checkpoint, then ends; press Ctrl-C again")
    if again:
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGINT if again else 0)
    assert bool(list((tmp_path / "run").glob("model_*.pt"))) != again


def test_a_signal_in_the_last_step(tmp_path, monkeypatch, capsys):
    """If a signal stops a run in its last step, the run saves a checkpoint, but does not validate.

    The resumed run then computes the missing validation loss.
    """

    def interrupted(step, config):
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return get_lr(step, config)

    monkeypatch.setattr(train_gpt2, "get_lr", interrupted)
    monkeypatch.chdir(tmp_path)
    flags = [*TINY, "--max_steps", "2", "--val_every", "2", "--log_dir", "run"]
    train_gpt2.main(flags)
    assert names(tmp_path / "run", "*.pt") == ["model_000002.pt"]
    text = "stopped by a signal or --max_minutes; --resume continues from step 2"
    assert text in capsys.readouterr().out
    assert (2, "val") not in read_log(tmp_path / "run")
    train_gpt2.main([*flags, "--resume"])
    assert (2, "val") in read_log(tmp_path / "run")


# main() from Python


def test_main_returns_the_last_figures(tmp_path):
    figures = train_gpt2.main([*TINY, "--log_dir", str(tmp_path / "run")])
    log = read_log(tmp_path / "run")
    assert len(log) == 10 * 4 + 2 * 3  # train, lr, norm, tokens; val and bpb at 0, 5 and 10
    assert {name: f"{figures[name]:.8g}" for name in ("val", "train", "lr", "norm")} == {
        name: log[step, name] for name, step in [("val", 10), ("train", 9), ("lr", 9), ("norm", 9)]
    }


def test_main_in_a_thread(tmp_path):
    """A program with a graphical window may call main in a thread.

    In Python, only the main thread can handle signals.
    """
    with ThreadPoolExecutor() as pool:
        run = pool.submit(train_gpt2.main, [*TINY, "--log_dir", str(tmp_path / "run")])
        assert run.result().keys() >= {"val", "train"}
    assert names(tmp_path / "run", "*.pt") == ["model_000010.pt"]


@pytest.mark.slow
def test_main_twice_in_one_process(tmp_path, capsys):
    """A notebook may call main several times.

    After each call, main has unlocked the run directory and restored Python's signal handlers.
    """
    flags = [*TINY, "--log_dir", str(tmp_path / "run"), "--max_steps"]
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train_gpt2.main([*flags, "2"])
    with pytest.raises(UserError):
        train_gpt2.main([*flags, "2", "--resume", "--data", "nowhere"])
    train_gpt2.main([*flags, "4", "--resume"])
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert "resumed from step 2" in capsys.readouterr().out


def test_main_again_reads_files_that_have_changed(tmp_path):
    (tmp_path / "my.txt").write_text(TEXT)
    flags = [*TINY, "--max_steps", "1", "--data", str(tmp_path / "my.txt"), "--log_dir"]
    seen = []
    for name in ("a", "b"):
        train_gpt2.main([*flags, str(tmp_path / name)])
        seen.append(json.loads((tmp_path / name / "run.json").read_text())["fingerprints"])
        # The new text has the same number of bytes.
        (tmp_path / "my.txt").write_text(TEXT.replace("text", "page"))
    assert seen[0] != seen[1]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_resumed_run_lets_go_of_its_checkpoint(tmp_path, monkeypatch):
    """A resumed run may delete the checkpoint from which it resumed.

    If the run still had the file mapped into memory, the disk space would stay in use.
    """
    flags = [*TINY, "--save_every", "2", "--log_dir", str(tmp_path), "--max_steps"]
    train_gpt2.main([*flags, "2"])
    mapped = []
    real = train_gpt2.train_step

    def look(*args):
        mapped.append(f"{tmp_path}/model_000002.pt" in Path("/proc/self/maps").read_text())
        return real(*args)

    monkeypatch.setattr(train_gpt2, "train_step", look)
    train_gpt2.main([*flags, "4", "--resume"])
    assert mapped == [False, False]


def test_a_job_that_starts_while_the_last_one_saves(tmp_path, monkeypatch):
    """The second job reads a checkpoint before the first job saves a newer checkpoint.

    If the second job did not stop, it would repeat steps of the first job.
    """
    flags = [*TINY, "--save_every", "2", "--log_dir", str(tmp_path), "--max_steps"]
    train_gpt2.main([*flags, "2"])
    check_loss = train_gpt2.check_loss

    def other_job_ends(*args):
        shutil.copy(tmp_path / "model_000002.pt", tmp_path / "model_000004.pt")
        check_loss(*args)

    monkeypatch.setattr(train_gpt2, "check_loss", other_job_ends)
    log = (tmp_path / "log.txt").read_text()
    with pytest.raises(UserError, match="another process changed the checkpoints"):
        train_gpt2.main([*flags, "8", "--resume"])
    assert (tmp_path / "log.txt").read_text() == log
    assert names(tmp_path, "*.pt") == ["model_000002.pt", "model_000004.pt"]


def test_a_notebook_resumes_after_an_error(tmp_path, monkeypatch):
    """A notebook keeps the traceback of an error, and therefore all objects of the failed run."""
    flags = [*TINY, "--log_dir", str(tmp_path), "--max_steps", "2", "--resume"]
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt2, "train_step", None)
        with pytest.raises(TypeError) as kept:
            train_gpt2.main(flags)
    train_gpt2.main(flags)
    assert kept.tb and names(tmp_path, "*.pt") == ["model_000002.pt"]
