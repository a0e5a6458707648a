"""Sees the attention of a model: what F.scaled_dot_product_attention is given, and what it returns.

A model that was changed, by rotary positions or another mask, calls the same function. So its
attention is the one that it really has.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# The arguments that may be given without their names, in their order.
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
OPTIONS = {"attn_mask", "is_causal", "scale", "enable_gqa"}  # what the weights depend on
TOLERANCE = 1e-3  # relative; a GPU that multiplies in TF32 makes a smaller difference


@dataclass
class AttentionCall:
    """One call of F.scaled_dot_product_attention, for one text."""

    block: int  # in which block it was, from 0
    weights: torch.Tensor | None = None  # (nh, T, T): a row has the weights of all keys
    error: float = 0.0  # the largest difference of weights @ v from the result; relative
    fault: str = ""  # why there are no weights to show: the end of a sentence


class AttentionWatch(TorchFunctionMode):
    """A context that keeps an AttentionCall for each call of F.scaled_dot_product_attention.

    A TorchFunctionMode sees the calls of all functions of PyTorch in its context. `block` is the
    number of the block that is running, or None; the hooks of record.py set it.
    """

    def __init__(self):
        super().__init__()
        self.block = None
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention and self.block is not None:
            given = dict(zip(ARGUMENTS, args)) | (kwargs or {})
            self.calls.append(check_call(self.block, given, result))
        return result


def check_call(block, given, result):
    """Computes the weights of a call, and compares weights @ v with its result -> AttentionCall.

    block: its number. given: {name: value} of the arguments. result: (1, nh, T, hs).
    """
    query, key, value = given["query"], given["key"], given["value"]
    if query.dim() != 4 or len(query) != 1 or query.size(2) != key.size(2):
        shapes = f"{tuple(query.shape)} and {tuple(key.shape)}"
        return AttentionCall(block, fault=f"its queries and keys have the shapes {shapes}")
    options = {name: given[name] for name in OPTIONS & given.keys()}
    weights = attention_weights(query, key, **options)  # (1, nh, T, T)
    # With enable_gqa, several heads share a value.
    value = value.float().repeat_interleave(weights.size(1) // value.size(1), dim=1)
    difference = (weights @ value - result.float()).abs().max()
    error = (difference / result.float().abs().max().clamp(min=1e-9)).item()
    if not error <= TOLERANCE:  # also if it is NaN
        fault = f"softmax(qkᵀ)·v differs from the result of the call by {error:.2g}, relative"
        return AttentionCall(block, error=error, fault=fault)
    return AttentionCall(block, weights[0], error)


def attention_weights(query, key, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Returns softmax(qkᵀ), as F.scaled_dot_product_attention defines it: (B, nh, T, S), float32.

    query: (B, nh, T, hs). key: (B, nh, S, hs), or fewer heads with enable_gqa. The other arguments
    are those of PyTorch. Dropout is left out.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(1) // key.size(1), dim=1)
    if scale is None:
        scale = 1 / math.sqrt(query.size(-1))
    scores = query.float() @ key.float().transpose(-2, -1) * scale  # (B, nh, T, S)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # A token that may see no key has the weight 0 for all of them.
    return scores.softmax(dim=-1).masked_fill(scores == -math.inf, 0.0)
