"""Runs a model on a text, and records predictions, attention weights and outputs of the blocks.

The attention weights are computed from the arguments of F.scaled_dot_product_attention. A changed
model, for example with rotary embeddings or a different mask, calls the same function, so the
record contains the weights that the model really uses.
"""

import contextlib
import math
from dataclasses import dataclass

from plaingpt.sampling import attention_for_many_shapes
from plaingpt.scoring.score import CHUNK

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# The positional arguments of F.scaled_dot_product_attention, in their order.
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
OPTIONS = {"attn_mask", "is_causal", "scale", "enable_gqa"}  # arguments that change the weights
TOLERANCE = 1e-3  # relative error; rounding to TF32 on a GPU causes smaller errors
N_LIKELIEST = 5  # how many of the likeliest tokens to record for the model's prediction
N_LIKELIEST_OF_BLOCK = 3  # how many of the likeliest tokens to record after each block


@dataclass
class AttentionCall:
    """One call of F.scaled_dot_product_attention, for one text."""

    block: int  # index of the block that made the call
    weights: torch.Tensor | None = None  # (nh, T, T): each row contains the weights of one query
    error: float = 0.0  # largest relative difference between weights @ v and the result
    fault: str = ""  # why the page cannot show the weights, as the end of a sentence


class AttentionWatch(TorchFunctionMode):
    """Context manager that records each call of F.scaled_dot_product_attention inside a block.

    A TorchFunctionMode sees all calls of PyTorch functions in its context. `block` is the index of
    the block that is running, or None. The function `watching` sets this index.
    """

    def __init__(self):
        super().__init__()
        self.block = None
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention and self.block is not None:
            given = dict(zip(ARGUMENTS, args)) | (kwargs or {})
            self.calls.append(record_call(self.block, given, result))
        return result


def record_call(block, given, result):
    """Computes the weights of a call, and compares weights @ v with the result of the call.

    Returns an AttentionCall. block: index of the block. given: the arguments of the call, {name:
    value}. result: the result of the call, (1, nh, T, hs).
    """
    query, key, value = given["query"], given["key"], given["value"]
    if query.dim() != 4 or len(query) != 1 or query.size(2) != key.size(2):
        shapes = f"{tuple(query.shape)} and {tuple(key.shape)}"
        return AttentionCall(block, fault=f"its queries and keys have the shapes {shapes}")
    options = {name: given[name] for name in OPTIONS & given.keys()}
    weights = attention_weights(query, key, **options)  # (1, nh, T, T)
    # With enable_gqa, several query heads share a value head.
    value = value.float().repeat_interleave(weights.size(1) // value.size(1), dim=1)
    difference = (weights @ value - result.float()).abs().max()
    error = (difference / result.float().abs().max().clamp(min=1e-9)).item()
    if not error <= TOLERANCE:  # also true for NaN
        fault = (
            f"softmax(qkᵀ)·v differs from the result of the call by {error:.2g} "
            "of the largest result"
        )
        return AttentionCall(block, error=error, fault=fault)
    return AttentionCall(block, weights[0], error)


def attention_weights(query, key, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Returns softmax(qkᵀ), as F.scaled_dot_product_attention defines it: (B, nh, T, S), float32.

    query: (B, nh, T, hs). key: (B, nh, S, hs); with enable_gqa, key may have fewer heads. The other
    arguments are as in PyTorch. Dropout is ignored.
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
    # If the mask hides all keys from a query, the query gives all keys a weight of 0.
    return scores.softmax(dim=-1).masked_fill(scores == -math.inf, 0.0)


@dataclass
class Prediction:
    """A model's predictions of n tokens: all tokens of the text except the first token."""

    losses: np.ndarray  # (n): the losses of the right tokens, in nats
    ranks: np.ndarray  # (n): the ranks of the right tokens; rank 1 is the likeliest token
    ids: np.ndarray  # (n, k): the k likeliest tokens; the likeliest comes first
    probs: np.ndarray  # (n, k): their probabilities


@dataclass
class BlockOutput:
    """Norms of the residual stream after a block, and a prediction from this stream.

    The prediction applies the model's final LayerNorm and its head to the stream.
    """

    name: str
    prediction: Prediction | None = None
    norms: np.ndarray | None = None  # (n): the norm of the residual stream at each position
    fault: str = ""  # why there is no prediction, as the end of a sentence


@dataclass
class Record:
    """What a model does with the ids of a text."""

    prediction: Prediction
    blocks: list[BlockOutput]  # the first element is the embedding
    calls: list[AttentionCall]


@torch.no_grad()
def record_text(model, ids):
    """Runs a model on a text. Returns a Record.

    model: a GPT in float32, in eval mode. ids: list of n + 1 ids; n is at most the block_size. The
    first id is only an input, and the last id is only a target.
    """
    device = model.lm_head.weight.device
    idx = torch.tensor([ids[:-1]], device=device)  # (1, n)
    targets = torch.tensor(ids[1:], device=device)  # (n)
    watch = AttentionWatch()
    with attention_for_many_shapes():
        with watching(model, watch) as streams, watch:
            x = model.hidden(idx)[0]  # (n, C)
        prediction = predict(model, x, targets, N_LIKELIEST)
        blocks = [describe_block(model, i, stream, targets) for i, stream in enumerate(streams)]
    return Record(prediction, blocks, complete_calls(watch.calls, len(model.transformer.h)))


@contextlib.contextmanager
def watching(model, watch):
    """Context manager that tells an AttentionWatch which block is running.

    Yields a list, to which it appends the input of the first block, then the output of each block.
    At the end of the context, it removes its hooks from the blocks.
    """
    streams = []

    def before(block, args, kwargs):
        if not streams:
            streams.append([*args, *kwargs.values()][0])  # GPT.hidden may call block(x=x, pos=pos)
        # The index counts the earlier calls, because one module may run as several blocks.
        watch.block = len(streams) - 1

    def after(block, args, output):
        watch.block = None
        streams.append(output)

    hooks = []
    for block in set(model.transformer.h):
        hooks.append(block.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(block.register_forward_hook(after))
    try:
        yield streams
    finally:
        for hook in hooks:
            hook.remove()


def describe_block(model, i, stream, targets):
    """Predicts the next tokens from the residual stream after block i. Returns a BlockOutput.

    i: number of the block, from 1; 0 means the embedding. stream: the output of the block, or the
    embedding. targets: (n).
    """
    name = f"block {i}" if i else "embedding"
    n = len(targets)
    if not torch.is_tensor(stream) or stream.shape != (1, n, model.config.n_embd):
        return BlockOutput(name, fault="it does not return a tensor of shape (B, T, C)")
    x = model.transformer.ln_f(stream)[0]  # (n, C)
    prediction = predict(model, x, targets, N_LIKELIEST_OF_BLOCK)
    norms = stream[0].float().norm(dim=-1).cpu().numpy()  # (n)
    return BlockOutput(name, prediction, norms)


def predict(model, x, targets, k):
    """Predicts the next tokens from hidden states. Returns a Prediction.

    x: the hidden states after the final LayerNorm, (n, C). targets: the right tokens, (n). k: how
    many of the likeliest tokens to keep.
    """
    parts = []
    for x_part, target in zip(x.float().split(CHUNK), targets.split(CHUNK)):
        logits = model.logits(x_part).float()  # (CHUNK, vocab_size)
        losses = F.cross_entropy(logits, target, reduction="none")
        ranks = (logits > logits.gather(1, target[:, None])).sum(dim=1) + 1
        probs, ids = logits.softmax(dim=-1).topk(min(k, logits.size(1)))  # (CHUNK, k) each
        parts.append((losses, ranks, ids, probs))
    return Prediction(*[torch.cat(part).cpu().numpy() for part in zip(*parts)])


def complete_calls(calls, n_layer):
    """Adds an AttentionCall with a fault for each block without a call. Sorts calls by block."""
    seen = {call.block for call in calls}
    for i in range(n_layer):
        if i not in seen:
            fault = "it does not call F.scaled_dot_product_attention"
            calls.append(AttentionCall(i, fault=fault))
    return sorted(calls, key=lambda call: call.block)
