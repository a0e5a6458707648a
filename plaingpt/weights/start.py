"""Finds what a run starts from: random weights, the weights of --init_from, or a checkpoint."""

from dataclasses import asdict, replace
from typing import Any, NamedTuple

from plaingpt.base.errors import UserError
from plaingpt.weights.checkpoint import unpack
from plaingpt.weights.load import read_weights


class Start(NamedTuple):
    """What a run starts from."""

    weights: dict | None  # a state dict, or None for random weights
    # {name of a flag: value} of the model that the weights belong to, without its dropout. Without
    # weights, it is {}.
    shape: dict
    tokenizer: Any  # Tokenizer of the run
    place: str | None  # the weights of --init_from, or None


def find_start(given, sources, saved, GPT):
    """Finds what a run starts from -> Start.

    With --resume, it is the checkpoint. With --init_from, it is the weights that this flag names.
    Otherwise, the weights are random, and the tokenizer is that of the data.

    given: {name: value} of the flags on the command line. saved: the checkpoint that --resume
    continues, or None. GPT: the class of the model. Raises UserError if the data have ids of
    another tokenizer than the weights.
    """
    if saved:
        place = None
        config, weights, tokenizer = unpack(saved, GPT)
    elif "init_from" in given:
        place = given["init_from"]
        config, weights, tokenizer = read_weights(place, GPT)
        T = given.get("block_size", config.block_size)
        if T < config.block_size:
            config, weights = shorten_context(config, weights, T)
    else:
        return Start(None, {}, sources.tokenizer, None)
    # A text without --tokenizer takes the tokenizer of the weights.
    has_fixed_ids = "tokenizer" in given or not sources.is_text
    if has_fixed_ids and sources.tokenizer.name != tokenizer.name:
        raise UserError(f"--data: needs ids of {tokenizer.name}; give a text without --tokenizer")
    shape = asdict(config)
    del shape["dropout"]
    return Start(weights, shape, tokenizer, place)


def shorten_context(gpt_config, weights, block_size):
    """Cuts the position embedding to a shorter context, for fine-tuning -> (GPTConfig, weights)."""
    weights = dict(weights)
    name = "transformer.wpe.weight"
    if name in weights:  # a changed model may have none
        weights[name] = weights[name][:block_size]  # (block_size, C)
    return replace(gpt_config, block_size=block_size), weights
