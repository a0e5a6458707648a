"""Reads the checkpoints of nanoGPT and build-nanogpt."""

from dataclasses import asdict

from plaingpt.distributed.fill import make_whole_gpt

import torch


def convert_nanogpt(found, GPT):
    """Dict of a checkpoint of nanoGPT or build-nanogpt -> one with the model as we store it.

    Raises ValueError unless its ids are GPT-2's. Their vocabulary of 50,304 has unused ids, which
    are cut off.
    """
    settings = found.get("model_args")  # of nanoGPT
    if not settings:
        settings = getattr(found.get("config"), "__dict__", {})  # of build-nanogpt
    if settings.get("vocab_size") not in (50257, 50304):
        raise ValueError("another program wrote it, or its ids are not GPT-2's")
    config = GPT.config_class(
        vocab_size=50257,
        block_size=settings["block_size"],
        n_layer=settings["n_layer"],
        n_head=settings["n_head"],
        n_embd=settings["n_embd"],
    )
    given = {}
    for name, tensor in found["model"].items():
        given[name.removeprefix("_orig_mod.")] = tensor  # torch.compile has added this prefix
    weights = {}
    for name, p in make_whole_gpt(GPT, config).named_parameters(remove_duplicate=False):
        if name in given:
            weights[name] = given[name].float()[: len(p)]
        elif name.endswith(".bias"):  # with nanoGPT's bias=False, they are missing
            weights[name] = torch.zeros(p.shape)
    return found | dict(model=weights, model_config=asdict(config), tokenizer="gpt2")
