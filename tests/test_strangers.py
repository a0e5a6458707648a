"""What new users tripped over: wrong results without a word, and starts that got stuck."""

import math
import re
import signal

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, program, read_log, spawn, train

from model import GPT, GPTConfig
from plaingpt.loss import CHUNK_SIZE
from train_gpt2 import TrainConfig, get_lr, micro_batch, parse_args

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
    assert re.match(r"preset finetune on my.txt: \{'max_lr': 5e-05, .*'dropout': 0.1", out), out
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
    assert re.search(r"note: the learning rate rises from \d\.\d\de-04 to \d\.\d\de-03: it depends on --max_steps; --schedule wsd", out), out
    assert "learning rate rises" not in train("--log_dir", "run", "--resume", "--max_steps", 20, cwd=tmp_path)[0]


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_says_what_happens_and_can_be_forced(tmp_path, again):
    (process,) = spawn(*TINY, "--log_dir", "run", "--max_steps", "100000", "--total_batch_size", "16384", cwd=tmp_path, fresh=True)
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
