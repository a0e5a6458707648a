"""What new users tripped over: wrong results without a word, and starts that got stuck."""

import json
import math
import re
import signal
import struct
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, program, read_log, spawn, train
from wandb.proto import wandb_internal_pb2

from model import GPT, GPTConfig
from plaingpt.batches import micro_batch
from plaingpt.cli import UserError
from plaingpt.loss import CHUNK_SIZE
from plaingpt.runlog import RunLog
from train_gpt2 import TrainConfig, get_lr, parse_args

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=256)


def model_and_batch():
    torch.manual_seed(0)
    return GPT(CONFIG), *torch.randint(256, (2, 3, 8))


@pytest.mark.parametrize("chunk", [5, 384])
@pytest.mark.parametrize("ignored", [0, 7, 23])
def test_targets_of_minus_100_are_ignored(monkeypatch, chunk, ignored):
    """In the loss and in every gradient, as torch.nn.functional.cross_entropy does."""
    monkeypatch.setitem(CHUNK_SIZE, "cpu", chunk)
    model, x, y = model_and_batch()
    y.view(-1)[:ignored] = -100
    _, loss = model(x, y)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for p, gradient in zip(model.parameters(), gradients):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-7)


def test_a_batch_without_targets_is_not_a_number():
    model, x, y = model_and_batch()
    assert model(x, torch.full_like(y, -100))[1].isnan()  # as in PyTorch


@pytest.mark.parametrize("target", [-1, 256, 300, -99])
def test_a_target_outside_the_vocabulary_raises(target):
    model, x, y = model_and_batch()
    y[1, 2] = target
    with pytest.raises(RuntimeError, match="a target is outside the vocabulary"):
        model(x, y)


@pytest.mark.parametrize("name", ["own.jsonl", "own.json", "own.parquet", "own.txt.gz", "own.txt.zst"])
def test_data_that_is_no_text_names_the_command_for_shards(tmp_path, name):
    (tmp_path / name).write_bytes(b"{}" * 5000)
    _, err = train("--data", name, cwd=tmp_path, status=2)
    assert err == (f"error: --data {name}: is not a text; python fineweb.py --input {name} --output_dir mine makes shards of it, "
                   "for --data mine\n")


def test_fine_tuning_has_a_recipe_of_its_own(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    (tmp_path / "my.txt").write_text((ROOT / "input.txt").read_text()[:100_000])
    out, _ = program("--data", "my.txt", "--init_from", "run", "--max_steps", 3, "--device", "cpu", "--sample_every", 0,
                     cwd=tmp_path)
    assert re.match(r"preset finetune on my.txt, 3 steps: max_lr 5e-05, .*dropout 0.1, val_tokens 65536, eval_every 0, log_every 10\n", out), out
    assert "starting from the weights in run" in out
    log = read_log(tmp_path / "log/finetune")
    assert float(log[3, "val"]) < float(log[0, "val"])
    _, c, _ = parse_args(["--init_from", "x", "--data", str(tmp_path / "my.txt"), "--max_lr", "1"])
    assert (c.preset, c.optimizer, c.max_lr, c.log_dir) == ("finetune", "adamw", 1.0, "log/finetune")
    assert parse_args(["--init_from", "x", "--preset", "baby"])[1].optimizer == "muon"


def lr_of(schedule, **options):
    config = TrainConfig(schedule=schedule, max_lr=1.0, min_lr=0.1, warmup_steps=10, max_steps=110, **options)
    return [get_lr(step, config) for step in range(111)]


def test_schedules():
    for schedule in ("cosine", "linear", "wsd", "constant"):
        rates = lr_of(schedule)
        assert rates[:10] == [(i + 1) / 10 for i in range(10)] and rates[10] == 1.0
        assert rates[110] == pytest.approx(1.0 if schedule == "constant" else 0.1)
        assert all(a >= b for a, b in zip(rates[10:], rates[11:]))
    assert lr_of("linear")[60] == pytest.approx(0.55) == lr_of("cosine")[60]
    assert lr_of("cosine")[35] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    wsd = lr_of("wsd", decay_steps=20)
    assert wsd[90] == 1.0 > wsd[91] and wsd[100] == pytest.approx(0.55)
    assert lr_of("wsd")[88] == 1.0 > lr_of("wsd")[89]


def test_a_wsd_run_goes_on_from_any_checkpoint_as_one_longer_run(tmp_path):
    flags = ["--schedule", "wsd", "--decay_steps", 4]
    train(*flags, "--log_dir", "long", "--max_steps", 14, cwd=tmp_path)
    train(*flags, "--log_dir", "run", "--save_every", 6, "--keep", 0, "--max_steps", 10, cwd=tmp_path)
    (tmp_path / "run/model_000010.pt").unlink()  # continue before the decay
    train(*flags, "--log_dir", "run", "--resume", "--max_steps", 14, cwd=tmp_path)
    long, run = (read_log(tmp_path / name) for name in ("long", "run"))
    assert {k: v for k, v in run.items() if k[1] == "train"} == {k: v for k, v in long.items() if k[1] == "train"}


def test_a_rate_that_jumps_when_a_run_is_extended_is_said(tmp_path):
    train("--log_dir", "run", "--max_steps", 10, cwd=tmp_path)
    out, _ = train("--log_dir", "run", "--resume", "--max_steps", 20, cwd=tmp_path)
    assert re.search(r"note: the learning rate rises from \d\.\d\de-04 to \d\.\d\de-03: it depends on --max_steps; with wsd, resume from a checkpoint before", out), out
    assert "learning rate rises" not in train("--log_dir", "run", "--resume", "--max_steps", 20, cwd=tmp_path)[0]


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_says_what_happens_and_can_be_forced(tmp_path, again):
    (process,) = spawn(*TINY, "--log_dir", "run", "--max_steps", "100000", "--total_batch_size", "16384", cwd=tmp_path)
    while "step     1/" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    while "finishing this step, then saving; Ctrl-C again to quit now" not in (line := process.stdout.readline()):
        assert line
    if again:
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == (130 if again else 0)
    assert bool(list((tmp_path / "run").glob("model_*.pt"))) != again


def test_a_run_validates_about_ten_times():
    assert [parse_args(["--max_steps", str(n)])[1].val_every for n in (5, 300, 2700, 19073)] == [1, 30, 250, 250]
    assert parse_args(["--val_every", "7"])[1].val_every == 7


def test_there_is_nothing_to_install():
    """`pip install .` would install nothing, so there is no table that describes a package."""
    text = (ROOT / "pyproject.toml").read_text()
    assert "[project]" not in text and "[build-system]" not in text


def test_a_ramp_has_two_micro_batch_sizes():
    """torch.compile compiles the step for each size, and fails after eight."""
    config = TrainConfig(rampup_steps=100, rampup_batch_size=2**15, total_batch_size=2**19, batch_size=64)
    sizes = [micro_batch(step, config, 1024, 8) for step in range(120)]
    assert {B for _, B in sizes} == {4, 64} and {B for _, B in sizes[:100]} == {4}
    assert all(n % (8 * B) == 0 for n, B in sizes)


def fake_shards(directory, tokens):
    """A directory whose training shard says that it has so many tokens, without taking the space."""
    directory.mkdir()
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, tokens
    for split in ("val_000000", "train_000001"):
        with open(directory / f"a_{split}.bin", "wb") as file:
            file.write(header.tobytes())
            file.truncate(1024 + 2 * tokens)
    return str(directory)


@pytest.mark.parametrize("cuda, tokens, preset", [(True, 10**9, "gpt2"), (True, 10**9 - 1, "mini"), (False, 10**9, "mini")])
def test_the_preset_for_shards_follows_from_device_and_tokens(monkeypatch, tmp_path, capsys, cuda, tokens, preset):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    data = fake_shards(tmp_path / "shards", tokens)
    _, config, _ = parse_args(["--data", data])
    other = dict(gpt2="--preset mini is the small model", mini="--preset gpt2 is GPT-2 124M")[preset]
    assert config.preset == preset and other in capsys.readouterr().out
    assert parse_args(["--data", data, "--device", "cpu"])[1].preset == "mini"
    assert parse_args(["--data", data, "--preset", "gpt2"])[1].preset == "gpt2"
    assert parse_args(["--data", data, "--init_from", "x"])[1].preset == "finetune"


def test_mini_takes_fewer_steps_for_less_text(tmp_path):
    for n_bytes, steps in ((10_000, 200), (100_000, 10 * 90_000 // 2048), (10**8, 2500)):
        with open(tmp_path / "my.txt", "wb") as file:
            file.truncate(n_bytes)
        assert parse_args(["--preset", "mini", "--data", str(tmp_path / "my.txt")])[1].max_steps == steps
    assert parse_args(["--preset", "mini", "--max_steps", "7"])[1].max_steps == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["my.txt", "my.jsonl", "my.parquet"])
def test_the_last_line_of_fineweb_works_as_printed(tmp_path, name):
    """For a corpus of 100 kB; the JSON and Parquet files are smaller."""
    text = (ROOT / "input.txt").read_text()[:100_000]
    records = [dict(text=part) for part in text.split("\n\n")]
    if name == "my.parquet":
        pq.write_table(pa.Table.from_pylist(records), tmp_path / name)
    else:
        (tmp_path / name).write_text(text if name == "my.txt" else "\n".join(map(json.dumps, records)))
    out, _ = program("--input", name, "--output_dir", "mine", cwd=tmp_path, program="fineweb.py")
    command = re.search(r"^to train on it: python train_gpt2.py (.+)\n\Z", out, re.M)[1]
    small = ["--n_layer", 1, "--n_head", 1, "--n_embd", 16, "--max_steps", 2, "--val_tokens", 512]  # saves time
    out, _ = program(*command.split(), *small, cwd=tmp_path)
    assert "preset mini on mine, 2 steps: no GPU" in out and "step     1/2" in out and (tmp_path / "log/mini/model_000002.pt").is_file()


def test_keep_best_keeps_the_lowest_validation_loss(tmp_path):
    (tmp_path / "my.txt").write_text("ab" * 4500 + "abxy" * 250)  # the model becomes too sure of a and b
    flags = ["--data", "my.txt", "--log_dir", "run", "--keep_best", "--val_every", 2, "--save_every", 4, "--keep", 1]
    train(*flags, "--max_steps", 16, cwd=tmp_path)

    def best():
        return torch.load(tmp_path / "run/model_best.pt")["step"], (tmp_path / "run/model_best.pt").stat().st_mtime_ns

    losses = {int(step): float(value) for (step, stream), value in read_log(tmp_path / "run").items() if stream == "val"}
    step, time = best()
    assert 0 < step < 16 and losses[step] == min(losses.values())
    out, _ = train(*flags, "--max_steps", 18, "--resume", cwd=tmp_path)
    assert "resumed from step 16" in out and best() == (step, time)  # no later step is better
    program("--checkpoint", "run/model_best.pt", "--max_new_tokens", 2, cwd=tmp_path, program="generate.py")
    train("--log_dir", "run", cwd=tmp_path)  # a new run
    assert not (tmp_path / "run/model_best.pt").exists() and (tmp_path / "run.1/model_best.pt").exists()


def test_max_minutes_saves_and_ends(tmp_path):
    out, _ = train("--log_dir", "run", "--max_steps", 10**6, "--max_minutes", 0.01, "--val_every", 0, cwd=tmp_path)
    step = int(re.search(r"stopped by a signal or --max_minutes; step (\d+) is saved", out)[1])
    assert (tmp_path / f"run/model_{step:06d}.pt").is_file()


def wandb_records(data):
    """Yields the records of a .wandb file: 7 bytes, then a log of LevelDB (its doc/log_format.md)."""
    at, record = 7, b""
    while at < len(data):
        if 2**15 - at % 2**15 < 7:  # the rest of a block of 32 kB is empty
            at += 2**15 - at % 2**15
        length, kind = struct.unpack("<4xHB", data[at:at + 7])  # after 4 bytes of checksum
        record += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def wandb_runs(directory):
    """[(id, settings, [{stream: value}])] of the runs that wandb wrote, oldest first."""
    runs = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        id_, settings, history = None, {}, []
        for record in wandb_records(path.read_bytes()):
            if record.HasField("run"):
                id_ = record.run.run_id
                settings.update({item.key: json.loads(item.value_json) for item in record.run.config.update})
            if record.HasField("history"):
                history.append({".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item})
        runs.append((id_, settings, history))
    return runs


@pytest.mark.slow
def test_wandb_has_the_numbers_of_the_log_and_a_resumed_run_goes_on(tmp_path):
    flags = ["--log_dir", "run", "--wandb", "boats", "--sample_every", 5]
    env = dict(WANDB_MODE="offline", WANDB_SILENT="true")
    train(*flags, "--max_steps", 6, cwd=tmp_path, env=env)
    train(*flags, "--max_steps", 12, "--resume", cwd=tmp_path, env=env)
    runs = wandb_runs(tmp_path / "run")
    assert len(runs) == 2 and runs[0][0] == runs[1][0]
    assert [settings["max_steps"] for _, settings, _ in runs] == [6, 12] and runs[0][1]["n_layer"] == 2
    found = {}
    for _, _, history in runs:
        for row in history:
            for stream in row.keys() & {"train", "val", "bpb", "lr", "norm", "tokens"}:
                assert found.setdefault((row["_step"], stream), row[stream]) == row[stream]
    assert found == pytest.approx({key: float(value) for key, value in read_log(tmp_path / "run").items()}, rel=1e-6)
    assert {row["_step"] for _, _, history in runs for row in history if any(map(re.compile("sample 0").match, row))} == {5, 6, 10, 12}


@pytest.mark.parametrize("missing", [True, False])
def test_wandb_that_cannot_start_is_one_sentence(monkeypatch, tmp_path, missing):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "")
    if missing:
        monkeypatch.setitem(sys.modules, "wandb", None)
    config = TrainConfig(wandb="boats", log_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match="pip install wandb" if missing else "--wandb boats: .*log in; or set WANDB_MODE=offline"):
        RunLog(config, CONFIG, 0, rank=0)


def test_steps_that_become_slow_are_said_once(tmp_path, capsys):
    log = RunLog(TrainConfig(log_dir=str(tmp_path), max_steps=999), CONFIG, 0, rank=0)
    log.flops_per_token, log.peak_flops = 1, None
    for step in range(200):
        seconds = 1 if step == 50 or step >= 100 else 0.01  # another program starts
        log.write_step(step, 1.0, 1e-3, 1.0, 64, 64 * step, time.perf_counter() - seconds)
        assert ("GOMP_SPINCOUNT" in capsys.readouterr().out) == (step == 104)
