"""Decides the configuration of a run: from flags, preset, data, weights, checkpoint and device."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from plaingpt.base.errors import UserError
from plaingpt.base.flags import pick
from plaingpt.base.terminal import print0
from plaingpt.distributed.device import choose_compile
from plaingpt.run.presets import PRESETS
from plaingpt.weights.checkpoint import load_newest
from plaingpt.weights.start import find_start

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
    """Returns --preset. The choice of auto depends on --init_from, the data and the device."""
    preset = given.get("preset", "auto")
    if preset != "auto":
        return preset
    if "init_from" in given:
        return "finetune"
    if sources.is_text:
        return "baby"
    may_use_gpu = given.get("device", "auto").startswith(("auto", "cuda"))  # also cuda:1
    if may_use_gpu and torch.cuda.is_available():
        if sources.count_train_tokens(sources.tokenizer, T=1024) >= 10**9:
            return "gpt2"
    return "mini"


def load_saved(given, sources, GPT):
    """Loads the newest checkpoint of the run that --resume continues, or returns None.

    The run is in --log_dir, whose default depends on the preset. Raises UserError.
    """
    if not given.get("resume"):
        return None
    return load_newest(given.get("log_dir") or f"log/{choose_preset(given, sources)}", GPT)


class Settings:
    """The values of all flags, each with its origin.

    values: {name of a flag: value}. origins: {name of a flag: origin}. An origin is "flag", which
    is the command line; "preset", "data", "weights" (of --init_from or --resume), "checkpoint",
    "steps" (computed from max_steps or max_lr), "device" or "default". A flag that is given keeps
    its value. The value of another flag is from the last `take` that has it.
    """

    def __init__(self, defaults, given):
        self.values = defaults | given
        self.origins = dict.fromkeys(defaults, "default") | dict.fromkeys(given, "flag")

    def take(self, origin, values):
        """Takes values from an origin. values: {name of a flag: value}."""
        for name, value in values.items():
            if self.origins[name] != "flag":
                self.values[name] = value
                self.origins[name] = origin


class Resolved(NamedTuple):
    """What `resolve` decides."""

    gpt_config: Any  # GPTConfig
    config: Any  # TrainConfig
    weights: dict | None  # a state dict, or None for random weights
    tokenizer: Any  # Tokenizer of the run
    origins: dict  # {name of a flag: where its value is from}, see Settings


def resolve(given, sources, saved, process, GPT, TrainConfig):
    """Decides all settings of a run -> Resolved. This is the only place that decides them.

    given: {name: value} of the flags on the command line. saved: the checkpoint that --resume
    continues, or None. GPT, TrainConfig: the classes. Raises a UserError that has all problems.
    """
    start = find_start(given, sources, saved, GPT)
    preset = choose_preset(given, sources)
    settings = Settings({**asdict(GPT.config_class()), **asdict(TrainConfig())}, given)
    settings.take("default", dict(data=sources.items))
    settings.take("preset", PRESETS[preset] | dict(log_dir=f"log/{preset}"))
    if "evals" in given:  # the presets baby, mini and finetune compute none
        settings.take("default", dict(eval_every=TrainConfig.eval_every))
    settings.take("data", dict(preset=preset, vocab_size=start.tokenizer.n_vocab))
    settings.values["preset"] = preset  # also if the flag is auto
    settings.take("weights", start.shape)
    if preset == "mini":
        settings.take("data", fit_mini(settings.values, sources, start.tokenizer))
    if preset == "finetune" and start.weights:
        settings.take("weights", recipe_for_width(settings.values["n_embd"]))
    if saved:
        # These two follow from the --max_steps of the start. A new --max_steps changes neither.
        before = saved["train_config"]
        names = before.keys() & {"warmup_steps", "val_every"}
        settings.take("checkpoint", {name: before[name] for name in names})
        # A run keeps its validation data. Older runs took those at the start.
        settings.take("checkpoint", dict(val_spread=before.get("val_spread", False)))
    settings.take("steps", fit_to_steps(settings))
    problems = find_useless(given, settings.values)
    problems += find_misfits(given, settings.values, start, process.device)
    if problems:
        raise UserError("; ".join(problems))
    show_choices(settings, start, sources)
    compile = choose_compile(settings.values["compile"], process.device)
    settings.take("device", dict(compile=compile))
    if process.device.type == "cuda":  # the device may lower it: main calls fit_batch_size
        settings.take("device", dict(batch_size=settings.values["batch_size"]))
    return Resolved(
        pick(GPT.config_class, settings.values),
        pick(TrainConfig, settings.values),
        start.weights,
        start.tokenizer,
        settings.origins,
    )


def fit_mini(values, sources, tokenizer):
    """Returns the steps and the dropout of mini that fit the size of the data: {name: value}.

    It trains for ten epochs, but for at least 200 steps and at most those of the preset. The more
    often the model reads the data, the more dropout it gets: 0.1 for 10 epochs.
    """
    n_tokens = max(1, sources.count_train_tokens(tokenizer, values["block_size"]))
    tokens_per_step = values["total_batch_size"]
    most = PRESETS["mini"]["max_steps"]
    steps = max(200, min(10 * n_tokens // tokens_per_step, most))
    epochs = steps * tokens_per_step / n_tokens
    return dict(max_steps=steps, dropout=round(min(0.1, epochs / 100), 2))


def recipe_for_width(n_embd):
    """Returns what fine-tunes weights that are narrower than GPT-2's: {name: value}.

    They take more steps. Their rate grows with 1 / width^2: it is 1.8e-3 for baby, see
    docs/measurements.md. n_embd: the width of the weights.
    """
    if n_embd >= 768:
        return {}
    max_lr = PRESETS["finetune"]["max_lr"] * (768 / n_embd) ** 2
    return dict(batch_size=16, max_steps=400, max_lr=max_lr)


def fit_to_steps(settings):
    """Returns what follows from max_steps and max_lr: {name: value}.

    In a short run, validate about ten times, and warm up for at most a fifth of the steps. A
    resumed run keeps what it had.
    """
    values = settings.values
    limits = dict(
        val_every=max(1, values["max_steps"] // 10), warmup_steps=values["max_steps"] // 5
    )
    found = {}
    for name, limit in limits.items():
        if values[name] > limit and settings.origins[name] != "checkpoint":
            found[name] = limit
    if values["min_lr"] is None:
        found["min_lr"] = values["max_lr"] / 10
    return found


def find_useless(given, values):
    """Returns a sentence for each flag that does nothing with the other values, and was given."""
    # (a flag, whether it does something, what it needs)
    rules = (
        ("muon_lr", values["optimizer"] == "muon", "--optimizer muon"),
        ("decay_steps", values["schedule"] == "wsd", "--schedule wsd"),
        ("min_lr", values["schedule"] != "constant", "another --schedule than constant"),
        ("rampup_batch_size", values["rampup_steps"] > 0, "--rampup_steps"),
    )
    problems = []
    for name, is_used, needed in rules:
        if given.get(name) is not None and not is_used:
            problems.append(f"--{name}: needs {needed}; give both, or leave it out")
    return problems


def find_misfits(given, values, start, device):
    """Returns a sentence for each flag that does not fit the model, its weights, data or device."""
    problems = []
    n_head, n_embd = values["n_head"], values["n_embd"]
    if n_embd % n_head:
        problems.append(f"--n_head {n_head}: must be a divisor of --n_embd, which is {n_embd}")
    n_vocab, size = start.tokenizer.n_vocab, values["vocab_size"]
    if not start.weights and size < n_vocab:
        problems.append(
            f"--vocab_size {size}: the tokenizer has {n_vocab:,} ids; give at least as many"
        )
    if values["activation_checkpointing"] and values["dropout"] and device.type == "mps":
        # torch draws other dropout masks the second time, and the gradients are wrong
        # (pytorch/pytorch#127676).
        problems.append("--activation_checkpointing: is wrong with dropout on mps; add --dropout 0")
    wrong = []
    for name, value in start.shape.items():
        if given.get(name, value) != value:
            wrong.append(f"{name} is {value}, not {given[name]}")
    if wrong:
        place = start.place or values["log_dir"]
        problems.append(f"{place} has another model: {', '.join(wrong)}; leave out these flags")
    return problems


def show_choices(settings, start, sources):
    """Prints the choices that a user should know: preset, steps, weights, and their recipe."""
    values = settings.values
    print0(
        f"preset {values['preset']} on {', '.join(sources.shares)} "
        f"({start.tokenizer.n_vocab:,} ids), {values['max_steps']:,} steps; "
        "--preset chooses another one: mini is small, gpt2 is GPT-2 124M"
    )
    if start.place:
        print0(f"starting from the weights in {start.place}")
    recipe = []
    for name, origin in settings.origins.items():
        if origin == "weights" and name not in start.shape:
            recipe.append(f"{name} {values[name]:g}")
    if recipe:
        print0(f"{values['n_embd']} channels: {', '.join(recipe)}")
