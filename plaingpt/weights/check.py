"""Checks weights from a file before a model gets them."""

from plaingpt.distributed.fill import make_whole_gpt

import torch


def check_weights(weights, config, GPT):
    """Raises an error of some kind unless a GPT of this GPTConfig can have these weights.

    weights: a state dict. It must have the right names and shapes, and finite values. A matrix that
    is tied, as those of embedding and head, must have the same values under each of its names.
    load_state_dict would take the last ones. GPT: the class of the model.
    """
    if config.n_embd % config.n_head:  # no shape depends on the number of heads
        raise ValueError(f"n_head {config.n_head} is no divisor of n_embd {config.n_embd}")
    model = make_whole_gpt(GPT, config)
    first_names = {}  # {parameter: its first name}
    tied = []  # pairs of names
    for name, p in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(p, name)
        if first != name:
            tied.append((first, name))
    model.load_state_dict(weights, assign=True)  # compares names and shapes
    if not all(tensor.isfinite().all() for tensor in weights.values()):
        raise ValueError("its weights are not finite")
    for first, name in tied:
        if not torch.equal(weights[first], weights[name]):
            raise ValueError(f"{first} and {name} have different values, and the model ties them")
