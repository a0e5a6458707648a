"""Decides where a run starts: at random weights, at --init_from, or at a checkpoint."""

from dataclasses import asdict, replace

from plaingpt.base.errors import UserError
from plaingpt.base.terminal import print0
from plaingpt.weights.checkpoint import unpack
from plaingpt.weights.load import read_weights

# Fine-tuning of weights that are narrower than GPT-2's takes more steps. Its rate grows with
# 1 / width^2: it is 1.8e-3 for baby, see docs/measurements.md.
NARROW = dict(batch_size=16, max_steps=400, val_every=40)


def choose_start(checkpoint, GPT, gpt_config, config, given, sources):
    """Decides what a run starts from -> (GPTConfig, weights, Tokenizer, overrides).

    With --resume, the checkpoint decides. With --init_from, the weights that this flag names
    decide. Otherwise, the flags and the vocabulary of the data decide. GPT: the class of the model.
    given: {name: value} of the flags on the command line. weights: a state dict, or None for random
    weights. overrides: {name of a flag: value}, settings that the checkpoint or the width of the
    weights decides. Raises UserError if weights, flags and data do not fit together.
    """
    if not (checkpoint or config.init_from):
        # A larger --vocab_size is allowed; the data never have the additional ids.
        n_vocab = given.get("vocab_size", sources.tokenizer.n_vocab)
        return replace(gpt_config, vocab_size=n_vocab), None, sources.tokenizer, {}
    if checkpoint:
        place = config.log_dir
        found, weights, tokenizer = unpack(checkpoint, GPT)
        overrides = settings_to_keep(checkpoint, given)
    else:
        place = config.init_from
        found, weights, tokenizer = read_weights(place, GPT)
        overrides = {}
        print0(f"starting from the weights in {place}")
        if "block_size" in given and gpt_config.block_size < found.block_size:
            found, weights = shorten_context(found, weights, gpt_config.block_size)
    found = replace(found, dropout=gpt_config.dropout)
    if config.preset == "finetune" and found.n_embd < 768:
        overrides = recipe_for_narrow(found.n_embd, config, given, overrides)
    # A text without --tokenizer takes the tokenizer of the weights.
    has_fixed_ids = "tokenizer" in given or not sources.is_text
    if has_fixed_ids and sources.tokenizer.name != tokenizer.name:
        raise UserError(f"--data: needs ids of {tokenizer.name}; give a text without --tokenizer")
    check_model_flags(found, gpt_config, given, place)
    return found, weights, tokenizer, overrides


def check_model_flags(found, gpt_config, given, place):
    """Raises UserError if the flags that are given describe another model than the weights are.

    found: GPTConfig of the weights. gpt_config: that of the flags. place: where the weights are.
    """
    wrong = []
    for name, value in asdict(found).items():
        asked = getattr(gpt_config, name)
        if name in given and value != asked:
            wrong.append(f"{name} is {value}, not {asked}")
    if wrong:
        raise UserError(f"{place} has another model: {', '.join(wrong)}; leave out these flags")


def settings_to_keep(checkpoint, given):
    """Returns {name: value} of the settings that were computed from the --max_steps of the start.

    A new --max_steps does not change them.
    """
    before = checkpoint["train_config"]
    kept = {}
    for name in ("warmup_steps", "val_every"):
        if name in before and name not in given:
            kept[name] = before[name]
    return kept


def shorten_context(gpt_config, weights, block_size):
    """Cuts the position embedding to a shorter context, for fine-tuning -> (GPTConfig, weights)."""
    weights = dict(weights)
    name = "transformer.wpe.weight"
    if name in weights:  # a changed model may have none
        weights[name] = weights[name][:block_size]  # (block_size, C)
    return replace(gpt_config, block_size=block_size), weights


def recipe_for_narrow(n_embd, config, given, kept):
    """Returns {name: value} of the settings with which a model narrower than GPT-2 is fine-tuned.

    n_embd: the width of the model. given: flags, which are left out. kept: settings that a
    resumed run keeps.
    """
    recipe = NARROW | dict(max_lr=config.max_lr * (768 / n_embd) ** 2) | kept
    recipe = {name: value for name, value in recipe.items() if name not in given}
    texts = [f"{name} {value:g}" for name, value in recipe.items()]
    print0(f"{n_embd} channels: {', '.join(texts)}")
    return recipe
