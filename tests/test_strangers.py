"""What new users tripped over: wrong results without a word, and starts that got stuck."""

import json
import math
import re
import signal
import struct

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, program, read_log, spawn, train
from wandb.proto import wandb_internal_pb2

from model import GPT, GPTConfig
from plaingpt.cli import parse_flags
from plaingpt.data import Sources, plan_steps
from plaingpt.loss import CHUNK_SIZE
from train_gpt2 import TrainConfig, choose_data, get_lr, make_configs


def config_of(*flags):
    """The TrainConfig of these flags."""
    given = parse_flags("", GPTConfig, TrainConfig, argv=list(map(str, flags)))
    return make_configs(given, Sources(choose_data(given)))[1]


# The loss


def model_and_batch():
    torch.manual_seed(0)
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=256)
    return GPT(config), *torch.randint(256, (2, 3, 8))


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


@pytest.mark.parametrize("target", [-1, 256])
def test_a_target_outside_the_vocabulary_raises(target):
    model, x, y = model_and_batch()
    y[1, 2] = target
    with pytest.raises(RuntimeError, match="a target is outside the vocabulary"):
        model(x, y)


# Starts


@pytest.mark.parametrize("name", ["own.jsonl", "own.json", "own.parquet", "own.txt.gz"])
def test_data_that_is_no_text_names_the_command_for_shards(tmp_path, name):
    (tmp_path / name).write_bytes(b"{}" * 5000)
    _, err = train("--data", name, cwd=tmp_path, status=2)
    assert err == f"error: --data {name}: is not a text; make shards: fineweb.py --input {name}\n"


def test_fine_tuning_has_a_recipe_of_its_own(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    (tmp_path / "my.txt").write_text((ROOT / "input.txt").read_text()[:100_000])
    out, _ = program("--data", "my.txt", "--init_from", "run", "--max_steps", 3, "--device", "cpu",
                     "--sample_tokens", 1, cwd=tmp_path)
    assert out.startswith("preset finetune on my.txt (256 ids), 3 steps; --preset chooses ")
    assert "starting from the weights in run" in out
    log = read_log(tmp_path / "log/finetune")
    assert float(log[3, "val"]) < float(log[0, "val"])
    assert config_of("--init_from", "x").optimizer == "adamw"
    assert config_of("--init_from", "x", "--preset", "baby").optimizer == "muon"


def fake_shards(directory, tokens):
    """Shards whose headers say that they have so many tokens, without taking the space."""
    directory.mkdir()
    for split in ("val_000000", "train_000001"):
        with open(directory / f"a_{split}.bin", "wb") as file:
            file.write(struct.pack("<3i", 20240520, 1, tokens))
            file.truncate(1024 + 2 * tokens)
    return directory


def test_the_preset_for_shards_follows_from_device_and_tokens(monkeypatch, tmp_path):
    large, small = (fake_shards(tmp_path / str(n), n) for n in (10**9, 10**9 - 1))
    for cuda, data, flags, preset in (
            (True, large, [], "gpt2"), (True, small, [], "mini"), (False, large, [], "mini"),
            (True, large, ["--device", "cpu"], "mini"), (False, small, ["--preset", "gpt2"],
            "gpt2"), (True, large, ["--init_from", "x"], "finetune")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        assert config_of("--data", data, *flags).preset == preset


def test_a_short_run_has_fewer_steps_and_validations(tmp_path):
    for n_bytes, steps in ((10_000, 200), (100_000, 10 * 90_000 // 2048), (10**8, 2500)):
        path = tmp_path / f"{n_bytes}.txt"
        path.write_bytes(b"a" * n_bytes)
        assert config_of("--preset", "mini", "--data", path).max_steps == steps
    assert config_of("--preset", "mini", "--max_steps", 7).max_steps == 7
    found = {n: config_of("--max_steps", n).val_every for n in (5, 300, 2700, 19073)}
    assert found == {5: 1, 300: 30, 2700: 270, 19073: 500}  # ten, or each 500 steps


def test_a_ramp_has_two_micro_batch_sizes():
    """torch.compile compiles the step for each size, and fails after eight."""
    config = TrainConfig(rampup_steps=100, rampup_batch_size=2**15)
    sizes = plan_steps(config, 1024, 10**7, 8)
    assert {B for _, B in sizes[:100]} == {4} and {B for _, B in sizes[100:]} == {64}
    assert all(n % (8 * B) == 0 for n, B in sizes)


def test_the_last_line_of_fineweb_works_as_printed(tmp_path):
    (tmp_path / "my.txt").write_text((ROOT / "input.txt").read_text()[:100_000])
    out, _ = program("--input", "my.txt", "--output_dir", "mine", cwd=tmp_path,
                     program="fineweb.py")
    command = re.search(r"^to train on it: python train_gpt2.py (.+)\n\Z", out, re.M)[1]
    small = "--n_layer 1 --n_head 1 --n_embd 16 --max_steps 2 --val_tokens 512 --sample_tokens 1"
    out, _ = program(*command.split(), *small.split(), cwd=tmp_path)
    assert "preset mini on mine (" in out and "step     1/2" in out
    assert (tmp_path / "log/mini/model_000002.pt").is_file()


# Runs


def lr_of(schedule, **options):
    config = TrainConfig(schedule=schedule, max_lr=1.0, min_lr=0.1, warmup_steps=10, max_steps=110,
                         **options)
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
    train(*flags, "--log_dir", "run", "--save_every", 6, "--max_steps", 10, cwd=tmp_path)
    (tmp_path / "run/model_000010.pt").unlink()  # continue before the decay
    train(*flags, "--log_dir", "run", "--resume", "--max_steps", 14, cwd=tmp_path)
    long, run = ({key: value for key, value in read_log(tmp_path / name).items()
                  if key[1] == "train"} for name in ("long", "run"))
    assert long == run and len(run) == 14


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_says_what_happens_and_can_be_forced(tmp_path, again):
    (process,) = spawn(*TINY, "--log_dir", "run", "--max_steps", 100_000,
                       "--total_batch_size", 16384, cwd=tmp_path)
    for words in ("step     1/", "finishing this step; Ctrl-C again to quit now"):
        assert any(line.startswith(words) for line in process.stdout)  # reads up to this line
        if again or words.startswith("step"):
            process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == (130 if again else 0)
    assert bool(list((tmp_path / "run").glob("model_*.pt"))) != again


def test_max_minutes_saves_and_ends(tmp_path):
    out, _ = train("--log_dir", "run", "--max_steps", 10**6, "--max_minutes", 0.01,
                   "--val_every", 0, cwd=tmp_path)
    step = int(re.search(r"stopped by a signal or --max_minutes; step (\d+) is saved", out)[1])
    assert (tmp_path / f"run/model_{step:06d}.pt").is_file()


def test_keep_best_keeps_the_lowest_validation_loss(tmp_path):
    # The model becomes too sure of a and b.
    (tmp_path / "my.txt").write_text("ab" * 4500 + "abxy" * 250)
    flags = ["--data", "my.txt", "--log_dir", "run", "--keep_best", "--val_every", 2,
             "--save_every", 4, "--keep", 1]
    train(*flags, "--max_steps", 16, cwd=tmp_path)
    best = tmp_path / "run/model_best.pt"
    data, step = best.read_bytes(), torch.load(best)["step"]
    losses = {key[0]: float(value) for key, value in read_log(tmp_path / "run").items()
              if key[1] == "val"}
    assert 0 < step < 16 and losses[step] == min(losses.values())
    out, _ = train(*flags, "--max_steps", 18, "--resume", cwd=tmp_path)
    assert "resumed from step 16" in out and best.read_bytes() == data  # no later step is better
    program("--checkpoint", best, "--max_new_tokens", 2, cwd=tmp_path, program="generate.py")
    train("--log_dir", "run", cwd=tmp_path)  # a new run
    assert not best.exists() and (tmp_path / "run.1/model_best.pt").exists()


# Weights & Biases


def wandb_records(data):
    """Yields the records of a .wandb file: 7 bytes, then a log of LevelDB (doc/log_format.md)."""
    at, record = 7, b""
    while at < len(data):
        if 2**15 - at % 2**15 < 7:  # the rest of a block of 32 kB is empty
            at += 2**15 - at % 2**15
        length, kind = struct.unpack("<4xHB", data[at : at + 7])  # after 4 bytes of checksum
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole, or the last part
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
                settings += [item.value_json for item in record.run.config.update
                             if item.key == "max_steps"]
            row = {".".join(item.nested_key) or item.key: json.loads(item.value_json)
                   for item in record.history.item}
            samples |= {row["_step"] for name in row if name.startswith("sample 0")}
            for stream in row.keys() & {"train", "val", "bpb", "lr", "norm", "tokens"}:
                number = pytest.approx(row[stream], rel=1e-7)  # log.txt has 8 digits
                assert found.setdefault((row["_step"], stream), row[stream]) == number
    assert len(ids) == 1 and settings == ["6", "12"] and samples == {5, 6, 10, 12}
    log = {key: float(value) for key, value in read_log(tmp_path / "run").items()}
    assert found == pytest.approx(log, rel=1e-6)
