"""From flags to the configuration of a run: presets, schedules, and the sizes of steps."""

import math
import re
import struct
from dataclasses import asdict, replace
from unittest import mock

from plaingpt.batch_size import check_step_size
from plaingpt.data import Sources
from plaingpt.errors import UserError
from plaingpt.flags import parse_flags
from plaingpt.settings import choose_preset, find_start, resolve

import pytest
import torch
from conftest import ALONE, ROOT, program, read_log, train

from model import GPT, GPTConfig
from train_gpt2 import TrainConfig, get_lr, step_size
from train_large import LargeConfig


def given_flags(*flags):
    """Parses flags. Returns {name of a flag: value}."""
    return parse_flags("", GPTConfig, TrainConfig, argv=list(map(str, flags)))


def configs(*flags):
    """Returns the GPTConfig and the TrainConfig that these flags result in."""
    return resolved(*flags)


def resolved(*flags, saved=None, process=ALONE):
    """Returns the GPTConfig and the TrainConfig that `resolve` builds from these flags.

    saved: the checkpoint from which the run resumes, or None.
    """
    given = given_flags(*flags)
    with mock.patch("plaingpt.settings.load_newest", return_value=saved):
        start = find_start(given | dict(resume=saved is not None), GPT)
    return resolve(given, start, process.device, GPTConfig, TrainConfig)


def config_of(*flags):
    """Returns the TrainConfig that these flags result in."""
    return configs(*flags)[1]


# Presets


def test_gpt2_preset_is_the_published_recipe(shards):
    g, c = configs("--preset", "gpt2", "--data", shards, "--vocab_size", 50257)
    assert (g.n_layer, g.n_head, g.n_embd, g.block_size, g.vocab_size) == (12, 12, 768, 1024, 50257)
    assert (c.total_batch_size, c.max_steps, c.warmup_steps) == (2**19, 19073, 715)
    assert (c.max_lr, c.weight_decay, c.grad_clip) == (6e-4, 0.1, 1.0)
    assert c.min_lr == pytest.approx(6e-5) and (c.save_every, c.log_every) == (1000, 1)
    # The preset works on eight processes without more flags.
    assert c.total_batch_size % (c.batch_size * g.block_size * 8) == 0


@pytest.mark.parametrize(
    "preset, millions",
    [
        ("gpt3-350m", 356),
        ("gpt3-760m", 760),
        ("gpt3-1.3b", 1316),
        ("gpt3-2.7b", 2652),
        ("gpt3-6.7b", 6658),
        ("gpt3-13b", 12853),
    ],
)
def test_presets_of_gpt3(preset, millions, shards):
    """The sizes are from table 2.1 of the GPT-3 paper. Each preset trains on about 10B tokens."""
    gpt_config, config = configs("--preset", preset, "--data", shards, "--vocab_size", 50257)
    with torch.device("meta"):
        model = GPT(gpt_config)
    assert round(sum(p.numel() for p in model.parameters()) / 10**6) == millions
    assert 9.9e9 < config.total_batch_size * config.max_steps < 10.1e9
    assert config.warmup_steps * config.total_batch_size == pytest.approx(375e6, rel=2e-3)
    assert config.total_batch_size % (8 * config.batch_size * 2048) == 0


def test_auto_preset_depends_on_the_data(tmp_path, monkeypatch, capsys, shards):
    monkeypatch.chdir(tmp_path)
    hint = "steps; --preset chooses a different preset: mini is small, gpt2 is GPT-2 124M\n"
    text = str(ROOT / "input.txt")
    _, c = configs()
    assert (c.preset, c.data, c.log_dir) == ("baby", [text], "log/baby")
    assert capsys.readouterr().out == f"preset baby on {text} (vocabulary size 256), 2,700 {hint}"
    shards.rename(tmp_path / "edu_fineweb10B")
    _, c = configs()
    assert (c.preset, c.data) == ("mini", ["edu_fineweb10B"])
    size = "(vocabulary size 256)"
    assert capsys.readouterr().out == f"preset mini on edu_fineweb10B {size}, 2,500 {hint}"
    found = [configs("--preset", name)[1].data for name in ("gpt2", "mini", "finetune")]
    assert found == [["edu_fineweb10B"], [text], [text]]


def fake_shards(directory, tokens):
    """Writes a training and a validation shard. Returns their directory.

    tokens: the number of tokens in each shard. The files are sparse, so they need almost no disk
    space.
    """
    directory.mkdir()
    for split in ("val_000000", "train_000001"):
        with open(directory / f"a_{split}.bin", "wb") as file:
            file.write(struct.pack("<3i", 20240520, 1, tokens))
            file.seek(1024)
            file.write(struct.pack("<H", 50256))  # an id that byte tokens do not have
            file.truncate(1024 + 2 * tokens)
    return directory


def test_the_preset_for_shards_follows_from_device_and_tokens(monkeypatch, tmp_path):
    large, small = (fake_shards(tmp_path / str(n), n) for n in (10**9, 10**9 - 1))
    for cuda, data, flags, preset in (
        (True, large, [], "gpt2"),
        (True, small, [], "mini"),
        (False, large, [], "mini"),
        (True, large, ["--device", "cpu"], "mini"),
        (False, small, ["--preset", "gpt2"], "gpt2"),
        (True, large, ["--init_from", "x"], "finetune"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        given = given_flags("--data", data, *flags)
        assert choose_preset(given, Sources(given["data"])) == preset


def test_a_text_beside_shards_is_not_encoded_to_choose_the_preset(monkeypatch, tmp_path):
    """choose_preset does not open the text files: both files are invalid, so reading would fail."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (tmp_path / "a.jsonl").write_text("{broken")
    for n, preset in ((10**9, "gpt2"), (10**9 - 1, "mini")):
        shards = fake_shards(tmp_path / str(n), n)
        given = given_flags("--data", shards, tmp_path / "a.txt", tmp_path / "a.jsonl")
        assert choose_preset(given, Sources(given["data"])) == preset


@pytest.mark.slow
def test_fine_tuning_has_a_recipe_of_its_own(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    (tmp_path / "my.txt").write_text((ROOT / "input.txt").read_text()[:100_000])
    out, _ = program(
        "--data",
        "my.txt",
        "--init_from",
        "run",
        "--max_steps",
        3,
        "--device",
        "cpu",
        "--sample_tokens",
        1,
        cwd=tmp_path,
    )
    assert out.startswith("preset finetune on my.txt (vocabulary size 256), 3 steps; --preset ")
    assert "weights in run\nsettings for 32 channels: batch_size 16, max_lr 0.0288\n" in out
    log = read_log(tmp_path / "log/finetune")
    assert float(log[3, "val"]) < float(log[0, "val"])
    run = tmp_path / "run"
    assert config_of("--init_from", run).optimizer == "adamw"
    assert config_of("--init_from", run, "--preset", "baby").optimizer == "muon"


def test_flags_override_the_preset_and_the_preset_overrides_defaults():
    g, c = configs("--preset", "baby", "--n_layer", "2", "--max_lr", "1e-3", "--no-shuffle")
    assert (g.n_layer, g.n_embd, c.max_lr, c.min_lr) == (2, 128, 1e-3, 0)
    assert c.weight_decay == TrainConfig().weight_decay and not c.shuffle and c.log_every == 100


@pytest.mark.parametrize("name", ["warmup_steps", "rampup_steps"])
def test_a_phase_that_is_longer_than_the_run_is_noted(name, capsys):
    configs("--preset", "baby", "--max_steps", "20", f"--{name}", "20")
    assert "note: --" not in capsys.readouterr().out
    configs("--preset", "baby", "--max_steps", "20", f"--{name}", "50")
    assert f"note: --{name} is 50, but the run ends after 20 steps\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--optimizer adamw --muon_lr 1",
            "--muon_lr: needs --optimizer muon; give both, or remove",
        ),
        ("--decay_steps 9", "--decay_steps: needs --schedule wsd; give both, or remove --decay"),
        ("--schedule constant --min_lr 0", "--min_lr: needs a --schedule other than constant"),
        ("--rampup_batch_size 64", "--rampup_batch_size: needs --rampup_steps; give both"),
        ("--min_lr 1 --max_lr 0.1", "--min_lr 1.0: must be at most --max_lr, which is 0.1"),
        (
            "--vocab_size 255",
            "--vocab_size 255: must be at least 256, the tokenizer's vocabulary size",
        ),
    ],
)
def test_flags_that_contradict_others(flags, message):
    with pytest.raises(UserError, match=message):
        config_of(*flags.split())


def test_mps_recomputes_no_dropout():
    """When PyTorch recomputes a block on MPS, the dropout masks differ, and gradients are wrong."""
    process = replace(ALONE, device=torch.device("mps"))
    flags = ["--activation_checkpointing", "--dropout"]
    with pytest.raises(
        UserError, match="gives wrong gradients with dropout on mps; add --dropout 0$"
    ):
        resolved(*flags, 0.1, process=process)
    resolved(*flags, 0, process=process)
    resolved(*flags, 0.1)


def test_restarts_of_torchrun_need_resume(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")  # torchrun's default
    assert not config_of("--preset", "baby").resume
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert config_of("--preset", "baby", "--resume").resume
    message = "^torchrun --max_restarts: each restart would begin at step 0; add --resume$"
    with pytest.raises(UserError, match=message):
        config_of("--preset", "baby")


def save_weights(directory, **train_config):
    """Saves a checkpoint of a small model, as a run does. Returns the dict of the checkpoint."""
    config = GPTConfig(n_layer=1, n_head=1, n_embd=32, block_size=32, vocab_size=256)
    saved = dict(
        model=GPT(config).state_dict(),
        model_config=asdict(config),
        tokenizer="bytes",
        step=1,
        train_config=train_config,
    )
    directory.mkdir()
    torch.save(saved, directory / "model_000001.pt")
    return saved


def test_weights_decide_the_shape_and_the_recipe(tmp_path):
    save_weights(tmp_path / "run")
    gpt_config, config = resolved("--init_from", tmp_path / "run", "--max_steps", 20)
    assert gpt_config == GPTConfig(1, 1, 32, 32, 256, dropout=0.1)  # the preset sets dropout to 0.1
    assert (config.max_lr, config.max_steps) == (5e-5 * (768 / 32) ** 2, 20)
    assert config.val_every == 2  # a tenth of the steps


def test_a_resumed_run_keeps_what_its_first_max_steps_decided(tmp_path):
    saved = save_weights(tmp_path / "run", warmup_steps=7, val_every=3)
    _, config = resolved("--max_steps", 9, "--val_every", 4, saved=saved)
    assert (config.warmup_steps, config.val_every) == (7, 4)
    _, config = resolved("--max_steps", 9, saved=saved)
    assert (config.warmup_steps, config.val_every) == (7, 3)


def test_validation_on_val_shards_has_no_fraction(shards):
    with pytest.raises(UserError, match="--val_fraction: the data have val shards; remove"):
        Sources([str(shards)], None, 0.1)
    Sources([str(shards), str(ROOT / "input.txt")], None, 0.1)  # a part of the text is held out


# Schedules and steps


def lr_of(schedule, **options):
    config = TrainConfig(
        schedule=schedule, max_lr=1.0, min_lr=0.1, warmup_steps=10, max_steps=110, **options
    )
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


def test_a_short_run_has_fewer_validations():
    found = {n: config_of("--max_steps", n).val_every for n in (5, 300, 2700, 19073)}
    # A run validates ten times, or, if it has more than 5000 steps, every 500 steps.
    assert found == {5: 1, 300: 30, 2700: 270, 19073: 500}


def sizes_of_steps(config, n_steps, T=64, world_size=1):
    """Returns [(n, B)] for the first n_steps steps.

    n: the number of sequences in the step. B: the number of sequences in a micro-batch.
    """
    process = replace(ALONE, world_size=world_size)
    return [step_size(step, config, T, process) for step in range(n_steps)]


def test_a_ramp_has_two_micro_batch_sizes():
    """torch.compile compiles the step again for each new B, and fails after eight compilations."""
    config = TrainConfig(rampup_steps=100, rampup_batch_size=2**15)
    sizes = sizes_of_steps(config, 200, 1024, 8)
    assert {B for _, B in sizes[:100]} == {4} and {B for _, B in sizes[100:]} == {64}
    assert all(n % (8 * B) == 0 for n, B in sizes)


@pytest.mark.parametrize(
    "settings, sizes",
    [
        (dict(batch_size=4), [(8, 4)]),
        (dict(batch_size=8, pp=2), [(8, 4)]),  # 1F1B needs at least one micro-batch per stage
        # All steps of the ramp-up have the same B. The first step has only one sequence.
        (
            dict(batch_size=16, rampup_steps=4, rampup_batch_size=64),
            [(1, 1), (2, 1), (4, 1), (6, 1), (8, 8)],
        ),
    ],
)
def test_the_sizes_of_the_steps(settings, sizes):
    """sizes: (n, B) of the first steps, as in sizes_of_steps. A sequence has 64 tokens.

    After the ramp-up, a step has 8 sequences.
    """
    config = LargeConfig(total_batch_size=512, **settings)
    check_step_size(config, 64, 10**6, ALONE, is_B_given=True)
    assert sizes_of_steps(config, len(sizes)) == sizes


@pytest.mark.parametrize(
    "batch_size, n, B", [(16, 75, 15), (64, 75, 25), (16, 17, 1), (16, 32, 16)]
)
def test_a_micro_batch_that_is_not_given_divides_the_step(batch_size, n, B):
    config = TrainConfig(total_batch_size=64 * n, batch_size=batch_size)
    check_step_size(config, 64, 10**6, ALONE, is_B_given=False)
    assert step_size(0, config, 64, ALONE) == (n, B)
    config = LargeConfig(total_batch_size=64 * n, batch_size=batch_size, pp=2)
    assert step_size(0, config, 64, ALONE)[1] <= n // 2


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            dict(rampup_steps=4, rampup_batch_size=1024),
            "--rampup_batch_size 1024: is above --total_batch_size 512; give a smaller number",
        ),
        (
            dict(batch_size=3),
            "--batch_size 3: each process has 8 sequences in a step (--total_batch_size 512 / "
            "--block_size 64 / 1 data-parallel processes); give a divisor of 8",
        ),
        (
            dict(batch_size=3, rampup_steps=4, rampup_batch_size=256),
            "--batch_size 3: each process has 8 sequences in a step (--total_batch_size 512 / "
            "--block_size 64 / 1 data-parallel processes); give a divisor of 8",
        ),
        (
            dict(batch_size=3, pp=2),  # pp is a flag of train_large.py
            "--batch_size 3: each process has 8 sequences in a step (--total_batch_size 512 / "
            "--block_size 64 / 1 data-parallel processes); give a divisor of 8, at most 4",
        ),
        (
            dict(pp=16),
            "--total_batch_size 512: a step needs 16 micro-batches, but each process has only 8 "
            "sequences; give a multiple of 1024",
        ),
        (
            dict(total_batch_size=500),
            "--total_batch_size 500: must be a multiple of 64 (--block_size 64 x 1 "
            "data-parallel processes) and at most 64000000, the number of training tokens",
        ),
    ],
)
def test_sizes_that_do_not_fit(settings, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        config = LargeConfig(**{"total_batch_size": 512, **settings})
        check_step_size(config, 64, 10**6, ALONE, is_B_given=True)
