"""Decides the configuration of a run from the flags, the preset and the data."""

from dataclasses import asdict
from pathlib import Path

from plaingpt.base.errors import UserError
from plaingpt.base.flags import pick
from plaingpt.base.terminal import print0
from plaingpt.run.presets import PRESETS

import torch

# --help shows the flags in groups. Each key is the first flag of a group, each value its title.
GROUPS = dict(
    n_layer="model",
    preset="preset and data",
    batch_size="batch and steps",
    optimizer="optimizer",
    val_every="evaluation",
    log_dir="output",
    device="hardware",
)
SHARDS = "edu_fineweb10B"  # fineweb.py writes it into the current directory
TEXT = Path(__file__).parents[2] / "input.txt"  # comes with plainGPT


def choose_data(given):
    """Returns --data, a list.

    If it is not given, returns input.txt for baby, mini and fine-tuning, and for --preset auto if
    there are no shards. Otherwise, returns the directory of shards.

    given: {name: value} of the flags on the command line.
    """
    if given.get("data"):
        return given["data"]
    preset = given.get("preset", "auto")
    for_text = preset in ("baby", "mini", "finetune") or "init_from" in given
    has_no_shards = preset == "auto" and not Path(SHARDS).is_dir()
    if not (for_text or has_no_shards):
        return [SHARDS]
    if TEXT.parent == Path.cwd():
        return [TEXT.name]  # the log shows a short name if it can
    return [str(TEXT)]


def choose_preset(given, sources):
    """Makes the choice of --preset auto. It depends on --init_from, the data and the device."""
    if "init_from" in given:
        return "finetune"
    if sources.is_text:
        return "baby"
    may_use_gpu = given.get("device", "auto").startswith(("auto", "cuda"))  # also cuda:1
    if may_use_gpu and torch.cuda.is_available() and sources.count_train_tokens() >= 10**9:
        return "gpt2"
    return "mini"


def fit_mini(recipe, given, sources):
    """Returns the recipe of mini with the steps and the dropout that fit the size of the data."""
    T = given.get("block_size", recipe["block_size"])
    n_tokens = max(1, sources.count_train_tokens(T))
    tokens_per_step = recipe["total_batch_size"]
    # Trains for ten epochs, but for at least 200 steps and at most those of the recipe.
    steps = max(200, min(10 * n_tokens // tokens_per_step, recipe["max_steps"]))
    # The more often the model reads the data, the more dropout it gets: 0.1 for 10 epochs.
    epochs = steps * tokens_per_step / n_tokens
    return recipe | dict(max_steps=steps, dropout=round(min(0.1, epochs / 100), 2))


def make_configs(given, sources, GPTConfig, TrainConfig):
    """Makes the configurations from the flags that are given -> (GPTConfig, TrainConfig).

    Takes the other values from the preset, and those that it lacks from the defaults.

    given: {name: value} of the flags on the command line. GPTConfig, TrainConfig: the dataclasses.
    choose_start completes the GPTConfig: its vocab_size is that of the data or of the weights.
    Raises UserError if flags contradict each other.
    """
    preset = given.get("preset", "auto")
    if preset == "auto":
        preset = choose_preset(given, sources)
    recipe = PRESETS[preset]
    if preset == "mini":
        recipe = fit_mini(recipe, given, sources)
    values = {**asdict(GPTConfig()), **asdict(TrainConfig()), "log_dir": f"log/{preset}", **recipe}
    if "evals" in given:
        values["eval_every"] = TrainConfig.eval_every  # baby, mini and finetune set 0
    values.update(given, preset=preset, data=sources.items)
    steps = values["max_steps"]
    if values["min_lr"] is None:
        values["min_lr"] = values["max_lr"] / 10
    # In a short run, validate about ten times, and warm up for at most a fifth of the steps.
    if "val_every" not in given:
        values["val_every"] = min(values["val_every"], max(1, steps // 10))
    if "warmup_steps" not in given:
        values["warmup_steps"] = min(values["warmup_steps"], steps // 5)
    check_contradictions(values)
    print0(
        f"preset {preset} on {', '.join(sources.shares)} ({sources.tokenizer.n_vocab:,} ids), "
        f"{steps:,} steps; --preset chooses another one: mini is small, gpt2 is GPT-2 124M"
    )
    return pick(GPTConfig, values), pick(TrainConfig, values)


def check_contradictions(values):
    """Raises UserError if values contradict each other. values: {name of a flag: value}."""
    if values["n_embd"] % values["n_head"]:
        raise UserError(f"--n_head: must be a divisor of --n_embd, which is {values['n_embd']}")
    if values["muon_lr"] and values["optimizer"] != "muon":
        raise UserError("--muon_lr: needs --optimizer muon; give both, or leave it out")
    if values["decay_steps"] and values["schedule"] != "wsd":
        raise UserError("--decay_steps: needs --schedule wsd; give both, or leave it out")
