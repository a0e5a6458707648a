"""Runs a model on a text once, and keeps what it predicts, where it looks, what each block adds."""

import contextlib
from dataclasses import dataclass

from plaingpt.look.attention import AttentionCall, AttentionWatch
from plaingpt.ops.sampling import attention_for_many_shapes
from plaingpt.scoring.rows import Row
from plaingpt.scoring.score import CHUNK, forward

import numpy as np
import torch
import torch.nn.functional as F

N_LIKELIEST = 5  # of the model's prediction
N_LIKELIEST_OF_BLOCK = 3


@dataclass
class Prediction:
    """What is predicted for each of n tokens: the text without its first token."""

    losses: np.ndarray  # (n): of the right token, in nats
    ranks: np.ndarray  # (n): how likely the right token is among all; 1 is the likeliest one
    ids: np.ndarray  # (n, k): the likeliest tokens, the likeliest one first
    probs: np.ndarray  # (n, k): their probabilities


@dataclass
class BlockOutput:
    """The residual stream after a block, and what the norm and the head make of it."""

    name: str
    prediction: Prediction | None = None
    norms: np.ndarray | None = None  # (n): the length of the stream's vector at each position
    fault: str = ""  # why there is no prediction: the end of a sentence


@dataclass
class Record:
    """What a model does with the ids of a text."""

    prediction: Prediction
    blocks: list[BlockOutput]  # the first one is the embedding
    calls: list[AttentionCall]


@torch.no_grad()
def record_text(model, ids):
    """Runs a model on a text -> Record.

    model: a GPT in float32, in eval mode. ids: list of n + 1 ids, at most its context plus 1. The
    first one is not predicted, and the last one is only predicted.
    """
    device = model.lm_head.weight.device
    idx = torch.tensor([ids[:-1]], device=device)  # (1, n)
    targets = torch.tensor(ids[1:], device=device)  # (n)
    watch = AttentionWatch()
    with attention_for_many_shapes():
        with watching(model, watch) as streams, watch:
            x = model.hidden(idx)[0]  # (n, C)
        prediction = predict(model, x, targets, N_LIKELIEST)
        prediction.losses = score_tokens(model, ids, device)
        blocks = [describe_block(model, i, stream, targets) for i, stream in enumerate(streams)]
    return Record(prediction, blocks, complete_calls(watch.calls, len(model.transformer.h)))


def score_tokens(model, ids, device):
    """Returns the loss of each token after the first one, as the benchmarks compute it: (n)."""
    row = Row(np.array(ids[:1], np.int32), [(np.array(ids[1:], np.int32), 0, True)])
    _, values = forward(model, [row], row.length, device)
    return -values[0]


@contextlib.contextmanager
def watching(model, watch):
    """Tells an AttentionWatch which block is running. Yields the list of what the blocks return.

    The first element is what the first block is given. It takes the hooks away in the end.
    """
    streams = []

    def before(block, args):
        watch.block = numbers[block]
        if not streams:
            streams.append(args[0])

    def after(block, args, output):
        watch.block = None
        streams.append(output)

    numbers = {block: i for i, block in enumerate(model.transformer.h)}
    hooks = []
    for block in numbers:
        hooks += [block.register_forward_pre_hook(before), block.register_forward_hook(after)]
    try:
        yield streams
    finally:
        for hook in hooks:
            hook.remove()


def describe_block(model, i, stream, targets):
    """Predicts from the residual stream after block i, or after the embedding for 0 -> BlockOutput.

    stream: what the block has returned. targets: (n).
    """
    name = f"block {i}" if i else "embedding"
    n = len(targets)
    if not torch.is_tensor(stream) or stream.shape != (1, n, model.config.n_embd):
        return BlockOutput(name, fault="it returns no tensor (B, T, C)")
    x = model.transformer.ln_f(stream)[0]  # (n, C)
    prediction = predict(model, x, targets, N_LIKELIEST_OF_BLOCK)
    norms = stream[0].float().norm(dim=-1).cpu().numpy()  # (n)
    return BlockOutput(name, prediction, norms)


def predict(model, x, targets, k):
    """Predicts the next tokens from hidden states after the last norm, (n, C) -> Prediction.

    targets: the right tokens, (n). k: how many of the likeliest tokens to keep.
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
    """Adds an AttentionCall with a fault for each block that has made no call. Sorts by block."""
    seen = {call.block for call in calls}
    for i in range(n_layer):
        if i not in seen:
            fault = "it makes no call of F.scaled_dot_product_attention"
            calls.append(AttentionCall(i, fault=fault))
    return sorted(calls, key=lambda call: call.block)
