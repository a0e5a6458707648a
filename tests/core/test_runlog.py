"""The outputs of a run: its directory, log.txt, notes, TensorBoard, and Weights & Biases."""

import json
import os
import re
import resource
import struct
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

from plaingpt.checkpoint import find_newest_model
from plaingpt.errors import UserError
from plaingpt.files import read_streams
from plaingpt.log import RunLog, prepare_run_directory, print_summary
from plaingpt.trackers import find_wandb_id

import conftest
import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    everything_in,
    names,
    program,
    read_log,
    small_disk,
    spawn,
    train,
    wait_for,
)
from edited import OWN_FIGURE, copy_program, edit_model, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

import train_gpt2


def open_log(**settings):
    """Returns the RunLog of a run of five steps."""
    training = SimpleNamespace(
        config=train_gpt2.TrainConfig(max_steps=5, **settings),
        gpt_config=conftest.MODEL,
        process=conftest.ALONE,
        flops_per_token=lambda: 1,
    )
    return RunLog({}, training, None, 5)


# The run directory


@pytest.mark.slow
def test_resume_without_a_run_starts_a_new_run_and_new_runs_move_old_ones(tmp_path):
    run = tmp_path / "run"
    out, _ = train("--log_dir", "run", "--resume", "--max_steps", 3, cwd=tmp_path)
    assert "nothing to resume in run: starting a new run" in out
    first = (run / "log.txt").read_text()
    out, _ = train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    assert "the old run in run was moved to run/old-1\n" in out
    train("--log_dir", "run", "--max_steps", 1, cwd=tmp_path)
    assert (run / "old-1" / "log.txt").read_text() == first
    assert names(tmp_path, "**/*.pt") == [f"model_{s:06d}.pt" for s in (1, 2, 3)]
    assert names(run) == ["log.txt", "model_000001.pt", "old-1", "old-2", "run.json"]


@pytest.mark.slow
def test_a_run_directory_that_is_a_mount_point(tmp_path):
    """Old runs stay on the mounted disk, even if --log_dir is a symbolic link."""
    with small_disk(tmp_path / "run", 2**23):
        train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
        (tmp_path / "link").symlink_to("run")
        for directory in ("run", "link"):
            train("--log_dir", directory, "--max_steps", 1, cwd=tmp_path)
    assert names(tmp_path) == ["link", "run"]
    assert names(tmp_path / "run/old-1") == ["log.txt", "model_000002.pt", "run.json"]
    assert names(tmp_path / "run/old-2") == ["log.txt", "model_000001.pt", "run.json"]


def test_an_old_run_moves_whole_or_not_at_all(tmp_path, monkeypatch):
    """On Windows, a run cannot move a file that another program has opened."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("log.txt", "run.json", "model_000001.pt", "model_000002.pt", "mine.txt"):
        (run / name).write_text(f"0 val {len(name)}\n")
    before = everything_in(run)
    rename = os.rename

    def refuse(old, new):
        if "model_" in str(new):
            raise PermissionError(13, "Permission denied")
        rename(old, new)

    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match="run: cannot write \\(Perm"),
    ):
        patch.setattr(os, "rename", refuse)
        prepare_run_directory(run, step=0)
    assert everything_in(run) == before
    prepare_run_directory(run, step=0)
    assert names(run) == ["log.txt", "mine.txt", "old-1"]


def test_an_old_run_is_not_the_newest_model(tmp_path):
    """find_newest_model returns no model of an old run, even if the new run has no checkpoint yet.

    The user can still load the model of an old run, with the directory of the old run.
    """
    old = tmp_path / "log/baby/old-1"
    old.mkdir(parents=True)
    (old / "model_000001.pt").touch()
    (tmp_path / "log/baby/log.txt").touch()
    for place in ("log", "log/baby"):
        with pytest.raises(UserError, match="no checkpoint in"):
            find_newest_model(tmp_path / place)
    assert find_newest_model(old) == old / "model_000001.pt"
    (tmp_path / "log/baby/log.txt").unlink()  # now log/baby is a directory of runs
    assert find_newest_model(tmp_path / "log/baby") == old / "model_000001.pt"


# Steps and notes


@pytest.mark.slow
def test_the_log_is_utf8_in_every_locale(tmp_path):
    """The log contains the names of data sets, which may be Chinese.

    On Windows, the default encoding is not UTF-8.
    """
    code = r"""
import sys
sys.path[:0] = sys.argv[1:]
from test_runlog import open_log
with open_log(log_dir=".") as log:
    log.write(1, **{"val_\u6570": 2.5})
"""
    ascii_only = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    env = dict(os.environ, PYTHONPATH=str(ROOT), **ascii_only)
    command = [sys.executable, "-c", code, ROOT / "tests", ROOT / "tests/core"]
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
    assert (tmp_path / "log.txt").read_text("utf-8") == "1 val_\u6570 2.5\n"


@pytest.mark.slow
def test_printed_steps(tmp_path):
    out, _ = train("--log_dir", "run", "--log_every", 4, cwd=tmp_path)
    assert re.findall(r"^step +(\d+)/10", out, re.M) == ["0", "4", "8", "9"]
    assert re.search(
        r"^step     9/10 \| loss \d\.\d{4} \| 0:00:00 to go \| norm \d+\.\d{3} \| "
        r"[\d,]+ tok/s \| lr \d\.\d\de-\d\d \| \d+ ms \| \d+\.\d\d TFLOP/s$",
        out,
        re.M,
    ), out
    log = read_log(tmp_path / "run")
    assert [step for step, stream in log if stream == "train"] == [*range(10)]


@pytest.mark.parametrize("flags", [[], ["--tensorboard"]])
def test_after_a_full_disk_a_notebook_starts_the_next_run(tmp_path, monkeypatch, flags):
    """A run that fails because the disk is full must unlock its directory.

    In a notebook, the exception of the failed run still exists when the next run starts.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    train_step = train_gpt2.train_step

    def fill_disk(*args):  # simulates a full disk: no file may become larger than 600 bytes
        if (tmp_path / "log.txt").stat().st_size > 200:
            resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
        return train_step(*args)

    monkeypatch.setattr(train_gpt2, "train_step", fill_disk)
    argv = [*TINY, *flags, "--log_dir", str(tmp_path)]
    try:
        with pytest.raises(UserError, match="cannot write .*; free some space, then continue with"):
            train_gpt2.main(argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "log.txt").stat().st_size <= 600
    monkeypatch.setattr(train_gpt2, "train_step", train_step)
    assert "train" in train_gpt2.main([*argv, "--max_steps", "2"])


def test_the_clock_stands_while_evaluating_and_saving(tmp_path, monkeypatch):
    """A step takes 1 s. Logging takes 2 s. A validation, samples or a checkpoint take 100 s."""
    now = [0.0]

    def slow(function, seconds):
        def call(*args):
            now[0] += seconds
            return function(*args)

        return call

    monkeypatch.setattr(train_gpt2.time, "perf_counter", lambda: now[0])
    for owner, name, seconds in (
        (train_gpt2, "train_step", 1),
        (train_gpt2, "validate", 100),
        (train_gpt2, "draw_samples", 100),
        (train_gpt2, "save", 100),
        (RunLog, "write_step", 2),
    ):
        monkeypatch.setattr(owner, name, slow(getattr(owner, name), seconds))
    flags = "--max_steps 4 --val_every 1 --sample_every 1 --save_every 1 --log_dir".split()
    train_gpt2.main([*TINY, *flags, str(tmp_path)])
    speeds = read_streams(tmp_path / "log.txt")["tok_s"]
    seconds = [512 / speed for _, speed in sorted(speeds.items())]
    # The time of a step includes the logging of the previous step.
    assert seconds == pytest.approx([1, 3, 3, 3])


def test_the_time_to_go_in_a_ramp(tmp_path, capsys):
    """The batch grows in the first steps, so the five steps take 1, 2, 3, 4 and 4 seconds."""
    log = open_log(rampup_steps=3, log_dir=str(tmp_path))
    for step, n in enumerate((1, 2, 3, 4, 4)):
        log.write_step(step, n * 2**17, n, dict(train=5.0, lr=1e-3, norm=1.0, tok_s=1.0))
    shown = re.findall(r"0:00:(\d+) to go", capsys.readouterr().out)
    assert shown == ["13", "11", "08", "04", "00"]


@pytest.mark.parametrize(
    "keep_best, advice",
    [
        (False, "start again with --keep_best, which saves the best checkpoint"),
        (True, "baby/model_best.pt is the best checkpoint"),
    ],
)
def test_the_advice_after_three_rises(tmp_path, monkeypatch, capsys, keep_best, advice):
    monkeypatch.chdir(tmp_path)
    log = open_log(keep_best=keep_best, log_dir="baby")
    for step, val in enumerate((5.0, 3.0, 3.1, 3.2, 3.3, 3.4)):
        log.write_validation(step, dict(val=val, bpb=1.0))
    out = capsys.readouterr().out
    assert out.count(f"note: the validation loss has risen three times in a row; {advice}\n") == 1


def test_a_step_on_a_gpu_says_how_much_memory_is_reserved(tmp_path, monkeypatch, capsys):
    log = open_log(log_dir=str(tmp_path))
    log.process = replace(conftest.ALONE, device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 12_345_678_901)
    log.write_step(0, 2**17, 1.0, dict(train=5.0, lr=1e-3, norm=1.0, tok_s=1.0))
    assert capsys.readouterr().out.endswith(" | 0.00 TFLOP/s | 12.3 GB\n")
    (tmp_path / "run.json").write_text("{}")
    log.write_end(5, is_complete=True)
    assert json.loads((tmp_path / "run.json").read_text()) == dict(gpu_memory_gb=12.3)


def test_what_a_resumed_run_keeps_of_the_step_where_it_begins(tmp_path):
    """A training step logs "train" first, and then the user's own metrics.

    A resumed run logs the metrics of its first step again, so the old lines are removed.
    """
    step_3 = "3 val 2.0\n3 lambada 0.1\n"
    earlier = "2 train 3.0\n2 mine 7\n" + step_3
    (tmp_path / "log.txt").write_text(f"{earlier}3 train 2.9\n3 lr 0.1\n3 mine 8\n4 train 2.8\n")
    assert prepare_run_directory(tmp_path, 3) == dict(val=2.0, lambada=0.1)
    assert (tmp_path / "log.txt").read_text() == earlier


@pytest.mark.slow
def test_small_data_get_a_note_each(tmp_path):
    (tmp_path / "t.txt").write_bytes((ROOT / "input.txt").read_bytes()[:1500])
    flags = "--max_steps 200 --val_every 20 --total_batch_size 256 --batch_size 8 --n_layer 1"
    out, _ = train("--data", "t.txt", *flags.split(), "--n_embd", 128, cwd=tmp_path)
    assert "reads the data 37 times" in out
    assert "only 150 validation tokens, so the loss is inexact" in out
    assert out.count("the validation loss has risen three times in a row") == 1
    out, _ = train("--log_dir", "run", "--max_steps", 3, cwd=tmp_path)  # input.txt
    assert "note: " not in out


# TensorBoard, and Weights & Biases


@pytest.mark.slow
def test_tensorboard_has_each_number_once_after_a_kill(tmp_path):
    """Kills a run between two checkpoints, and resumes the run twice.

    TensorBoard must contain each number and each sample once.
    """
    flags = [*TINY, *"--log_dir run --tensorboard --save_every 5 --sample_every 5".split()]
    (process,) = spawn(*flags, "--max_steps", 12, cwd=tmp_path)
    wait_for(process, "step     7/")
    process.kill()
    process.communicate()
    for steps in (12, 14):
        out, _ = program(*flags, "--resume", "--max_steps", steps, cwd=tmp_path)
        assert "resumed from step " in out
    events = EventAccumulator(str(tmp_path / "run"), size_guidance=dict(scalars=0, tensors=0))
    tags = events.Reload().Tags()["scalars"]
    found = [
        ((e.step, name), e.value) for name in tags for e in events.Scalars(name) if name != "tok_s"
    ]
    log = {key: float(value) for key, value in read_log(tmp_path / "run").items()}
    assert len(found) == len(log) and dict(found) == pytest.approx(log, rel=1e-6)
    samples = {
        e.step: e.tensor_proto.string_val[0].decode()
        for e in events.Tensors("sample 1/text_summary")
    }
    assert sorted(samples) == [5, 10, 12, 14]
    assert all(re.fullmatch("<pre>.+</pre>", text, re.S) for text in samples.values())


def wandb_records(data):
    """Yields the records of a .wandb file.

    data: the content of the file, which is 7 bytes, then a log in LevelDB's format. For this
    format, see doc/log_format.md of LevelDB.
    """
    at, record = 7, b""
    while at < len(data):
        if 2**15 - at % 2**15 < 7:  # the rest of a block of 32 KiB is padding
            at += 2**15 - at % 2**15
        length, kind = struct.unpack("<4xHB", data[at : at + 7])  # after a checksum of 4 bytes
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of a record
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


@pytest.mark.slow
def test_wandb_has_the_numbers_of_the_log_and_a_resumed_run_goes_on(tmp_path):
    flags = ["--log_dir", "run", "--wandb", "boats", "--sample_every", 5]
    env = dict(WANDB_MODE="offline", WANDB_SILENT="true")
    train(*flags, "--max_steps", 6, cwd=tmp_path, env=env)
    train(*flags, "--max_steps", 12, "--resume", cwd=tmp_path, env=env)
    ids, settings, found, samples = set(), [], {}, set()
    for path in sorted((tmp_path / "run").glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path.read_bytes()):
            if record.HasField("run"):
                ids.add(record.run.run_id)
                settings += [
                    item.value_json for item in record.run.config.update if item.key == "max_steps"
                ]
            row = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            samples |= {row["_step"] for name in row if name.startswith("sample 0")}
            for stream in row.keys() & {"train", "val", "bpb", "lr", "norm", "tokens"}:
                number = pytest.approx(row[stream], rel=1e-7)  # log.txt contains 8 digits
                assert found.setdefault((row["_step"], stream), row[stream]) == number
    assert len(ids) == 1 and settings == ["6", "12"] and samples == {5, 6, 10, 12}
    log = {key: float(value) for key, value in read_log(tmp_path / "run").items()}
    assert found == pytest.approx(log, rel=1e-6)


def test_the_run_of_wandb_that_goes_on(tmp_path):
    """A resumed run continues the newest W&B run, online or offline.

    The id of a W&B run may contain dashes.
    """
    assert find_wandb_id(tmp_path) is None
    for name in (
        "offline-run-20260102_101010-my-2-run-9",
        "run-20260101_101010-abc",
        "latest-run",
        "run-x",
    ):
        (tmp_path / "wandb" / name).mkdir(parents=True)
    assert find_wandb_id(tmp_path) == "my-2-run-9"


@pytest.mark.slow
def test_wandb_without_a_login_is_one_sentence(tmp_path):
    env = dict(
        HOME=str(tmp_path),
        WANDB_API_KEY="",
        WANDB_SILENT="true",
        WANDB_MODE="online",
        WANDB_BASE_URL="http://127.0.0.1:9",
    )
    err = train("--wandb", "boats", cwd=tmp_path, env=env, status=2)[1]
    assert "error: --wandb (" in err and "; first run wandb login" in err
    assert "Traceback" not in err


def test_a_run_records_the_changes_of_its_clone(tmp_path, monkeypatch):
    """The clone contains a changed file, which is not UTF-8, and new files that are not in git."""
    package = tmp_path / "clone/plaingpt"
    package.mkdir(parents=True)
    (package / "git.py").write_text("")
    (package / "a.txt").write_bytes(b"caf\xe9 1\n")
    for command in (
        ["init"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first"],
    ):
        subprocess.run(["git", *command], cwd=package.parent, check=True, capture_output=True)
    (package / "a.txt").write_bytes(b"caf\xe9 2\n")
    (tmp_path / "clone/idea.py").write_text("")
    (tmp_path / "clone/\u60f3\u6cd5.py").write_text("")
    monkeypatch.setattr("plaingpt.source_code.CLONE", package.parent)
    train_gpt2.main([*TINY, "--max_steps", "1", "--log_dir", str(tmp_path / "run")])
    assert json.loads((tmp_path / "run/run.json").read_text())["untracked_files"] == [
        "idea.py",
        "\u60f3\u6cd5.py",
    ]
    assert b"+caf\xe9 2\n" in (tmp_path / "run/changes.patch").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "norm", "lr", "my own"])
def test_a_figure_with_the_name_of_another_one_is_refused(tmp_path, name):
    copy_program(tmp_path)
    edit_model(tmp_path, (OWN_FIGURE[0], OWN_FIGURE[1].replace('"own"', f'"{name}"')))
    _, err = run(tmp_path, "run", 3, status=1)
    message = f"got multiple values for keyword argument '{name}'"
    if name == "my own":
        message = "the name of a metric must be one word, not 'my own'"
    assert message in err


def test_two_metrics_of_a_step_have_different_names(tmp_path):
    """For example, an edited model logs a metric with the name of the validation loss, "val"."""
    with open_log(log_dir=str(tmp_path)) as log:
        log.write_validation(3, dict(val=2.5, bpb=1.0))
        with pytest.raises(ValueError, match="step 3 has two metrics named 'val'"):
            log.write(3, train=2.0, val=7.0)
        log.write(4, val=2.0)
    assert (tmp_path / "log.txt").read_text() == "3 val 2.5\n3 bpb 1\n4 val 2\n"


def test_the_note_on_many_epochs_counts_the_share_of_each_data_set(capsys):
    """A run of 1.2M tokens reads one data set 60 times, and the other data set 0.12 times."""
    training = SimpleNamespace(
        config=train_gpt2.TrainConfig(max_steps=1200, total_batch_size=1000, min_lr=0.0),
        gpt_config=conftest.MODEL,
        process=conftest.ALONE,
        count_parameters=lambda: 1,
        optimizers=[],
    )
    sizes, shares = (18_000, 1_000_000), (0.9, 0.1)
    data = SimpleNamespace(train=[range(n) for n in sizes], shares=shares, val=[range(5000)])
    print_summary(training, data, (8, 8))
    assert "note: the run reads one of the data sets 60 times" in capsys.readouterr().out
