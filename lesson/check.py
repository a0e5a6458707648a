"""Checks your answers to the tasks in lesson/tasks/.

  python lesson/check.py                  lists the tasks, and says which are solved
  python lesson/check.py 02               checks your answer to task 02
  python lesson/check.py 02 --solution    also shows our answer, once you have written yours

Each file in lesson/tasks/ describes a function without code. Replace the line `raise
NotImplementedError` with your code. A check trains no model, but it needs a few seconds to import
torch. A check reports the first mistake that it finds. An answer is right if the results are right,
even if the code differs from ours. But an answer must not use a function that the task forbids.
"""

import _thread
import ast
import copy
import itertools
import math
import sys
import threading
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.adamw import adamw as adamw_of_torch

TASKS = Path(__file__).parent / "tasks"
SOLUTIONS = Path(__file__).parent / "solutions"


class Wrong(Exception):
    """Raised if an answer is wrong. The message says what is wrong."""


def expect(is_right, sentence):
    if not is_right:
        raise Wrong(sentence)


def expect_tensor(x, shape, what="the function"):
    if not isinstance(x, torch.Tensor):
        raise Wrong(f"{what} returns {type(x).__name__}, not a tensor of shape {shape}")
    expect(x.shape == shape, f"{what} returns the shape {tuple(x.shape)}, not {shape}")


def is_close(x, y, tolerance=1e-5):
    """Returns whether x and y are equal within a tolerance, which is relative to the largest |y|.

    x, y: two tensors, or two lists of tensors.
    """
    if isinstance(x, (list, tuple)):
        return all(is_close(a, b, tolerance) for a, b in zip(x, y, strict=True))
    limit = tolerance * max(1e-3, y.abs().max().item())
    return bool(((x.double() - y.double()).abs() <= limit).all())


def expect_none_of(x, mistakes):
    """Raises Wrong if x equals the result of a common mistake.

    mistakes: {sentence that explains the mistake: result of the mistake}.
    """
    for sentence, result in mistakes.items():
        expect(not is_close(x, result), sentence)


def first_wrong(x, y):
    """Returns the index of the first number in x that differs from y."""
    differs = (x.double() - y.double()).abs() > 1e-5 * max(1e-3, y.abs().max().item())
    return tuple((differs | x.isnan()).nonzero()[0].tolist())


# 01: cross-entropy


def check_cross_entropy(task):
    torch.manual_seed(0)
    logits = 3 * torch.randn(2, 5, 7)  # (B, T, V)
    targets = torch.randint(7, (2, 5))  # (B, T)
    given = logits.clone()
    loss = task.cross_entropy(given, targets)
    expect_tensor(loss, ())
    expect(
        torch.equal(given, logits),
        "the function changes the logits of its caller in place: write logits = logits - ... "
        "instead of logits -= ...",
    )
    log_p = logits.log_softmax(dim=2)  # (B, T, V)
    losses = -log_p.gather(2, targets[..., None])[..., 0]  # (B, T)
    if not is_close(loss, losses.mean()):
        shifted = -log_p[:, :-1].gather(2, targets[:, 1:, None]).mean()
        mistakes = {
            "the loss is negative: the minus before the logarithm is missing": -losses.mean(),
            "the loss is the sum over the positions, not their mean": losses.sum(),
            "the loss is the sum over the positions of a sequence: take the mean over all B x T "
            "positions": losses.sum() / 2,
            "the targets are shifted by one position, but targets[b, t] already is the token after "
            "position t": shifted,
            "the logarithm has base 2, but it should have base e": losses.mean() / math.log(2),
            "softmax runs over the positions, not over the vocabulary": -logits.log_softmax(dim=1)
            .gather(2, targets[..., None])
            .mean(),
            "the loss is the mean of -p: the logarithm is missing": -losses.neg().exp().mean(),
            "the maximum is subtracted in the sum, but not from the logit of the target": (
                losses - logits.amax(dim=2)
            ).mean(),
        }
        expect_none_of(loss, mistakes)
        raise Wrong(
            f"with logits between -10 and 10, the loss is {loss:.4f}, but it should be "
            f"{losses.mean():.4f}"
        )
    loss = task.cross_entropy(logits + 1000, targets)
    expect(
        is_close(loss, losses.mean(), 1e-3),
        f"if the check adds 1000 to all logits, the loss becomes {loss:.4f}, but it should stay "
        f"{losses.mean():.4f}: exp(1000) is inf in float32. Adding the same number to all logits "
        "of a position does not change the loss",
    )
    two = torch.stack([logits[:, 0] + 1000, logits[:, 1] - 1000], dim=1)  # (B, 2, V)
    loss = task.cross_entropy(two, targets[:, :2])
    expected = losses[:, :2].mean()
    expect(
        is_close(loss, expected, 1e-3),
        f"with logits near 1000 at position 0 and near -1000 at position 1, the loss is {loss:.4f} "
        f"and not {expected:.4f}: subtract from each position its own maximum, not a shared one",
    )
    logits = torch.tensor([[[0.0, 200.0]]], requires_grad=True)  # (1, 1, 2)
    loss = task.cross_entropy(logits * 1, torch.tensor([[0]]))
    expect(
        is_close(loss, torch.tensor(200.0)),
        f"if the logits are 0 and 200, and the target is token 0, the loss is {loss:.4f} and not "
        "200. exp(-200) is 0 in float32, so do not compute the logarithm of a probability: "
        "simplify log(exp(a) / sum) first",
    )
    expect(
        loss.requires_grad,
        "the loss has no gradient: compute it from the logits without .item() and .detach()",
    )
    loss.backward()
    expect(
        is_close(logits.grad, torch.tensor([[[-1.0, 1.0]]])),
        f"the loss is right, but its gradient for logits of 0 and 200 is "
        f"{logits.grad.flatten().tolist()}, not [-1, 1]",
    )


# 02: the mask


def check_mask(task):
    torch.manual_seed(0)
    for T, mean in ((6, 0), (1, 0), (9, -50)):  # -20 is no mask for scores near -50
        scores = mean + torch.randn(2, T, T)
        weights = task.causal_weights(scores.clone())
        expect_tensor(weights, (2, T, T))
        check_weights(weights, scores)
    weights = task.causal_weights(torch.tensor([[[0.0, 200.0], [200.0, 0.0]]]))
    expect(
        not is_close(weights[0, 0], torch.tensor([0.0, 1.0])),
        "position 0 looks at position 1 if its score is 200: the mask adds a number to this score "
        "that is too close to 0. Add -inf instead, or replace the score by -inf",
    )
    for i in range(2):
        expect(
            is_close(weights[0, i], torch.tensor([1.0, 0.0])),
            f"if the scores of row {i} are {[[0, 200], [200, 0]][i]}, its weights are "
            f"{weights[0, i].tolist()} and not [1, 0]. In float32, exp(200) is inf, and the "
            "softmax of 0 next to 200 is 0. So mask the scores first, and then take their softmax",
        )


def why_nan(is_nan):
    """Returns a sentence that explains nan in a result of attention. is_nan: (B, T, any size)."""
    rows = is_nan.any(dim=2).any(dim=0)  # (T)
    if rows.all():
        return "all rows are nan. 0 * (-inf) is nan: do you multiply a mask by -inf?"
    if rows[:-1].all():
        return (
            "all rows except the last one are nan: softmax does not run over the positions of the "
            "keys, which are the last dimension"
        )
    if rows[-1]:
        return (
            "the last row is nan: all its scores are -inf. The mask hides earlier positions "
            "instead of later positions"
        )
    i = int(rows.nonzero()[0])
    return (
        f"row {i} is nan: all its scores are -inf, so position {i} sees nothing, not even itself. "
        "The mask must not cover the diagonal"
    )


def check_weights(weights, scores):
    T = scores.size(1)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)  # (T, T)
    expected = scores.masked_fill(later, -math.inf).softmax(dim=2)  # (B, T, T)
    if is_close(weights, expected):
        return
    if weights.isnan().any():
        raise Wrong(why_nan(weights.isnan()))
    is_weight = (weights >= 0) & (weights < 1.001)
    if not is_weight.all():
        b, i, j = (~is_weight).nonzero()[0].tolist()
        raise Wrong(
            f"the weight in row {i}, column {j} is {weights[b, i, j]:.3f}, but weights are between "
            "0 and 1: is the softmax missing?"
        )
    if T > 1 and (weights[:, later] > 1e-6).any():
        earlier = torch.ones(T, T, dtype=torch.bool).tril(-1)
        ahead = later & ~torch.ones(T, T, dtype=torch.bool).triu(2)  # only the next position
        expect(
            not is_close(weights, scores.softmax(dim=2)),
            "position 0 changes if token 1 changes: the mask is missing",
        )
        expect(
            not (weights[:, earlier] < 1e-6).all(),
            "position 0 looks at position 1, and position 1 does not look at position 0: the mask "
            "hides earlier positions instead of later positions",
        )
        check_masked_scores(weights, scores)
        expect(
            (weights[:, later & ~ahead] > 1e-6).any(),
            "position 0 looks at position 1, but not at position 2: the mask is shifted by one "
            "place. A position may look at itself, and not at the next one",
        )
        i, j = (weights > 1e-6).any(dim=0).logical_and(later).nonzero()[0].tolist()
        raise Wrong(f"position {i} changes if token {j} changes: the mask is missing or shifted")
    for i in range(1, T):
        expect(
            (weights[:, i, i] > 0).all(),
            f"position {i} does not look at itself: the mask is shifted by one place",
        )
    sums = weights.sum(dim=2)  # (B, T)
    if not is_close(sums, torch.ones_like(sums)):
        expect(
            not is_close(weights.sum(dim=1), torch.ones_like(sums)),
            "the columns add up to 1, but the rows should: softmax must run over the last "
            "dimension, the positions of the keys",
        )
        b, i = first_wrong(sums, torch.ones_like(sums))
        sentence = f"row {i} adds up to {sums[b, i]:.6f}, not to 1"
        if is_close(weights, scores.softmax(dim=2).masked_fill(later, 0)):
            sentence += ": the mask comes after the softmax. Mask the scores before the softmax"
        raise Wrong(sentence)
    b, i, j = first_wrong(weights, expected)
    raise Wrong(
        f"the weight in row {i}, column {j} is {weights[b, i, j]:.3f}, but the softmax over the "
        f"unmasked scores of this row is {expected[b, i, j]:.3f}"
    )


def check_masked_scores(weights, scores):
    """Raises Wrong if the mask writes or adds a finite number, instead of -inf.

    The masked scores follow from the weights: log(weight) is the score minus a number that is the
    same for all scores of a row.
    """
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)  # (T, T)
    log_w = weights.log()  # (B, T, T)
    own = scores.diagonal(dim1=1, dim2=2) - log_w.diagonal(dim1=1, dim2=2)  # (B, T)
    masked = log_w + own[..., None]  # (B, T, T)
    for number, what in (
        (masked[:, later], "a masked score is {0:.3g}, but exp({0:.3g}) = {1:.2g}"),
        ((masked - scores)[:, later], "the mask adds {0:.3g} to the scores of later positions"),
    ):
        value = round(number.mean().nan_to_num().item(), 2) + 0.0  # + 0.0 turns -0.0 into 0.0
        if (number - value).abs().max() < 0.01:
            raise Wrong(
                f"position 0 looks at position 1: {what.format(value, math.exp(value))}, so its "
                "weight is not 0. Softmax gives the weight 0 only to a score of -inf"
            )


# 03: heads


def attend(
    q, k, v, n_head, split="right", merge="right", scale=None, ahead=0, is_late=False, dim=3
):
    """Computes attention, with the mistakes that the arguments select. q, k, v: (B, T, C).

    split, merge: how the channels are split into heads, and the heads concatenated. scale: divisor
    of the scores. ahead: how many later positions a query sees. is_late: whether the mask comes
    after softmax. dim: the dimension of softmax.
    """
    B, T, C = q.size()
    hs = C // n_head
    parts = []
    for x in (q, k, v):
        if split == "right":
            parts.append(x.view(B, T, n_head, hs).transpose(1, 2))
        elif split == "flat":
            parts.append(x.reshape(B, n_head, T, hs))
        elif split == "interleaved":
            parts.append(x.view(B, T, hs, n_head).permute(0, 3, 1, 2))
        elif split == "none":
            parts.append(x.view(B, T, n_head, hs))
    q, k, v = parts  # (B, nh, T, hs)
    scores = q @ k.transpose(2, 3) / (math.sqrt(hs) if scale is None else scale)
    is_later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 + ahead)  # (T, T)
    if is_late:
        weights = scores.softmax(dim).masked_fill(is_later, 0)  # (B, nh, T, T)
    else:
        weights = scores.masked_fill(is_later, -math.inf).softmax(dim)  # (B, nh, T, T)
    y = weights @ v  # (B, nh, T, hs)
    if split == "none":
        return y.flatten(2)
    if merge == "flat":
        return y.reshape(B, T, C)
    if split == "interleaved":
        return y.permute(0, 2, 3, 1).flatten(2)
    return y.transpose(1, 2).flatten(2)


def check_heads(task):
    torch.manual_seed(0)
    B, T, C, n_head = 2, 5, 12, 3
    q, k, v = torch.randn(3, B, T, C).unbind()
    y = task.attention(q, k, v, n_head)
    expect_tensor(y, (B, T, C))
    expected = attend(q, k, v, n_head)
    if not is_close(y, expected):
        hs = C // n_head
        for scale in (math.sqrt(C), math.sqrt(hs)):
            expect(
                not is_close(y, attend(q, k, v, 1, scale=scale)),
                "there is only one head, which uses all C channels",
            )
        for scale in (math.sqrt(n_head), math.sqrt(hs)):
            expect(
                not is_close(y, attend(q, k, v, hs, scale=scale)),
                f"with n_head = {n_head} and C = {C}, there are {hs} heads of {n_head} channels "
                f"instead of {n_head} heads of {hs} channels",
            )
        check_heads_mistakes(y, q, k, v, n_head)
        if y.isnan().any():
            raise Wrong(why_nan(y.isnan()))
        check_reach(task, (q, k, v), n_head, y)
        b, t, c = first_wrong(y, expected)
        raise Wrong(
            f"at position {t}, channel {c}, the result is {y[b, t, c]:.3f} and not "
            f"{expected[b, t, c]:.3f}. Later positions and other heads have no effect on this "
            "number, so look at the scores and the softmax"
        )
    q, k, v = torch.randn(3, 1, 7, 8).unbind()
    for n_head in (1, 4):
        y = task.attention(q, k, v, n_head)
        expect_tensor(y, (1, 7, 8))
        expect(
            is_close(y, attend(q, k, v, n_head)),
            "the result is right with 3 heads, but wrong for (B, T, C) = (1, 7, 8) with n_head = "
            f"{n_head}",
        )


def check_heads_mistakes(y, q, k, v, n_head):
    """Raises Wrong if y is the result of one, two or three common mistakes in attention."""
    T, C = q.size(1), q.size(2)
    hs = C // n_head
    mistakes = (  # (an argument of attend, its value, the sentence)
        (
            "split",
            "flat",
            "view(B, n_head, T, hs) mixes the positions: head 0 gets the first T x hs numbers, "
            "which are all channels of the first positions",
        ),
        (
            "split",
            "none",
            "at each position, the heads attend to each other, but positions should attend to "
            "positions: T and hs must be the last two dimensions of q, k and v",
        ),
        (
            "split",
            "interleaved",
            "head 0 uses the channels 0, 3, 6 and 9 (of 12), but it should use the channels 0 to 3",
        ),
        (
            "merge",
            "flat",
            "the heads are concatenated wrong: the dimensions of y are in the order B, n_head, T, "
            "hs, but the result needs the order B, T, n_head, hs",
        ),
        (
            "scale",
            math.sqrt(C),
            "the scores are divided by sqrt(C), but a head has only hs = C / n_head channels, so "
            "divide by sqrt(hs)",
        ),
        ("scale", 1, "the scores are not divided by sqrt(hs)"),
        ("scale", hs, "the scores are divided by hs, not by sqrt(hs)"),
        ("ahead", T, "position 0 changes if token 1 changes: the mask is missing"),
        (
            "ahead",
            1,
            "position 0 changes if token 1 changes: the mask is shifted by one place",
        ),
        ("is_late", True, "the mask comes after softmax, so the weights do not add up to 1"),
        ("dim", 2, "softmax runs over the queries, not over the keys: use the last dimension"),
        ("dim", 1, "softmax runs over the heads, not over the keys: use the last dimension"),
    )
    for n_mistakes in (1, 2, 3):
        for chosen in itertools.combinations(mistakes, n_mistakes):
            arguments = {name: value for name, value, _ in chosen}
            if len(arguments) == n_mistakes and is_close(y, attend(q, k, v, n_head, **arguments)):
                sentences = [sentence for *_, sentence in chosen]
                if n_mistakes == 1:
                    raise Wrong(sentences[0])
                numbered = [f"({i}) {sentence}" for i, sentence in enumerate(sentences, start=1)]
                raise Wrong(f"there are {n_mistakes} mistakes: {'; '.join(numbered)}")


def check_reach(task, given, n_head, y):
    """Raises Wrong if a token or a channel of q, k or v changes results that it must not change."""
    T, C = y.size(1), y.size(2)
    hs = C // n_head

    def differs(i, place, dims):
        """Flips the sign of q, k or v (i = 0, 1, 2) at a place. Returns which results change."""
        changed = [x.clone() for x in given]
        changed[i][place] *= -1
        return (task.attention(*changed, n_head) - y).abs().amax(dim=dims) > 1e-5

    for i, name in enumerate("qkv"):
        for t in range(T):
            for other in differs(i, (slice(None), t), (0, 2)).nonzero().flatten().tolist():
                expect(
                    other >= t,
                    f"position {other} of the result changes if token {t} changes in {name}: the "
                    "mask is missing or shifted, or splitting into heads mixes the positions",
                )
                expect(
                    name != "q" or other == t,
                    f"position {other} of the result changes if the query of position {t} changes, "
                    "but a query affects only its own position. Are q and k swapped?",
                )
    for i, name in enumerate("qkv"):
        for c in range(C):
            found = differs(i, (..., c), (0, 1)).nonzero().flatten().tolist()
            expect(found, f"channel {c} of {name} has no effect")
            for other in found:
                expect(
                    other // hs == c // hs,
                    f"channel {other} of the result changes if channel {c} of {name} changes, but "
                    f"with hs = {hs}, these channels belong to different heads",
                )


# 04: initialization


class Layers(nn.Module):
    """A module that contains the given layers under their names."""

    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def make_gpt(n_layer, C=64):
    """Builds the layers of a GPT-2, named as in the lesson. The result has no forward method."""
    blocks = []
    for _ in range(n_layer):
        blocks.append(
            Layers(
                ln_1=nn.LayerNorm(C),
                attn=Layers(c_attn=nn.Linear(C, 3 * C), c_proj=nn.Linear(C, C)),
                ln_2=nn.LayerNorm(C),
                mlp=Layers(c_fc=nn.Linear(C, 4 * C), c_proj=nn.Linear(4 * C, C)),
            )
        )
    gpt = Layers(
        wte=nn.Embedding(256, C),
        wpe=nn.Embedding(C, C),
        h=nn.ModuleList(blocks),
        ln_f=nn.LayerNorm(C),
        lm_head=nn.Linear(C, 256, bias=False),
    )
    gpt.lm_head.weight = gpt.wte.weight
    return gpt


def check_init(task):
    torch.manual_seed(0)
    for n_layer in (8, 3):
        gpt = make_gpt(n_layer)
        before = {name: p.clone() for name, p in gpt.named_parameters()}
        task.init_weights(gpt, n_layer)
        expect(
            gpt.lm_head.weight is gpt.wte.weight,
            "lm_head.weight and wte.weight are no longer the same parameter: change the values of "
            "parameters, but do not replace parameters",
        )
        matrices = {name: p for name, p in gpt.named_parameters() if p.dim() == 2}
        same = [name for name, p in matrices.items() if torch.equal(p, before[name])]
        expect(
            len(same) < len(matrices),
            "all matrices still have PyTorch's initial values: change the parameters themselves, "
            "not copies",
        )
        if same:
            name = same[0]
            hint = ". Embeddings are matrices, too" if name in ("wte.weight", "wpe.weight") else ""
            raise Wrong(
                f"{name} still has PyTorch's initial values, but other matrices have changed: the "
                f"function skips {name}, or changes a copy of it{hint}"
            )
        for name, p in gpt.named_parameters():
            check_initial_values(name, p.detach(), n_layer)
        first, second = gpt.h[0].mlp.c_fc.weight, gpt.h[1].mlp.c_fc.weight
        expect(
            not torch.equal(first, second),
            "h.0.mlp.c_fc.weight and h.1.mlp.c_fc.weight have the same values: set the random seed "
            "once, or not at all",
        )


def check_initial_values(name, p, n_layer):
    """Checks p, the values of a parameter after init_weights."""
    if name.endswith("bias"):
        expect((p == 0).all(), f"{name} is not 0")
        return
    if p.dim() == 1:
        expect((p == 1).all(), f"{name} is not 1: the initial weight of a LayerNorm is 1")
        return
    is_last = name.endswith("c_proj.weight")
    expected = 0.02 / math.sqrt(2 * n_layer) if is_last else 0.02
    std = p.std().item()
    if abs(std / expected - 1) > 0.08:
        place = f"{name} has a standard deviation of {std:.4f}"
        if is_last:
            mistakes = {
                0.02: f"the residual stream adds up {2 * n_layer} outputs of {n_layer} blocks, and "
                "their variances add up, so the variance of the stream would grow with n_layer",
                0.02 / math.sqrt(n_layer): f"{n_layer} blocks add {2 * n_layer} outputs to the "
                "residual stream, because attention and MLP each add one output",
                0.02 / (2 * n_layer): "variances add up, but standard deviations do not, so a "
                "root is missing",
                0.005: "the standard deviation does not change with n_layer. With n_layer = "
                f"{n_layer}, it should be {expected:.4f}",
            }
            for value, sentence in mistakes.items():
                expect(abs(std / value - 1) > 0.08, f"{place}: {sentence}")
        expect(
            abs(std / 0.02**2 - 1) > 0.08,
            f"{place}: 0.02 is the standard deviation, not the variance",
        )
        raise Wrong(f"{place} instead of {expected:.4f}, with n_layer = {n_layer}")
    expect(abs(p.mean().item()) < 0.1 * std, f"{name} has a mean of {p.mean():.4f} instead of 0")
    expect(
        p.abs().max().item() > 2.5 * std,
        f"{name} has the right standard deviation, but is not drawn from a normal distribution",
    )


# 05: AdamW


HYPERPARAMETERS = dict(lr=0.1, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.1)


def adamw(p, grad, m, v, step, mistake=None):
    """Takes one step of AdamW, with the given mistake, if any. Returns (p, m, v)."""
    lr, beta1, beta2, eps, decay = HYPERPARAMETERS.values()
    if mistake == "l2" and p.dim() == 2:
        grad = grad + decay * p
    if p.dim() == 2 and mistake == "late decay":
        p, m, v = adamw(p, grad, m, v, step, "no decay")
        return p * (1 - lr * decay), m, v
    if p.dim() == 2 or mistake == "vectors":
        if mistake == "no lr":
            p = p * (1 - decay)
        elif mistake not in ("no decay", "l2"):
            p = p * (1 - lr * decay)
    if mistake in ("betas", "betas of averages"):
        beta1, beta2 = beta2, beta1
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * (grad if mistake == "no square" else grad**2)
    if mistake in ("betas of averages", "betas of correction"):
        beta1, beta2 = beta2, beta1
    if mistake == "step":
        step = step + 1
    if mistake == "no power":
        step = 1
    power = 1 if mistake == "no power of m" else step
    m_hat = m if mistake in ("no correction", "no m") else m / (1 - beta1**power)
    v_hat = v if mistake in ("no correction", "no v") else v / (1 - beta2**step)
    size = (v_hat + eps).sqrt() if mistake == "eps" else v_hat.abs().sqrt() + eps
    if mistake == "root of v":
        size = v.abs().sqrt() / (1 - beta2**step) + eps
    if mistake == "no root":
        size = v_hat + eps
    p = p + lr * m_hat / size if mistake == "sign" else p - lr * m_hat / size
    if mistake == "hats":
        return p, m_hat, v_hat
    return p, m, v


ADAMW_MISTAKES = {
    "no correction": "the bias correction is missing: after one step, m is only a tenth of the "
    "gradient, and v a twentieth of its square",
    "no m": "m is not divided by 1 - beta1^step",
    "no v": "v is not divided by 1 - beta2^step",
    "no power": "the bias correction divides by 1 - beta, but it should divide by 1 - beta^step",
    "no power of m": "m is divided by 1 - beta1, and not by 1 - beta1^step",
    "step": "the bias correction uses step + 1, but `step` already is 1 in the first step",
    "eps": "eps is added inside the root; it belongs outside, after the root",
    "l2": "the decay is added to the gradient, so the decay is also divided by the root of v. This "
    "is Adam with L2 regularization. In AdamW, the decay changes only the parameter",
    "no lr": "the decay is not multiplied by lr",
    "no decay": "the matrix does not decay",
    "vectors": "the vector also decays, but only matrices should decay. Vectors are the biases and "
    "the weights of LayerNorms",
    "late decay": "p decays after the update, but it must decay before the update",
    "root of v": "v is divided by 1 - beta2^step after the root, but v_hat is under the root: "
    "divide first",
    "betas": "beta1 and beta2 are swapped",
    "betas of averages": "beta1 and beta2 are swapped in the averages, but not in the bias "
    "correction. m is averaged with beta1, and v with beta2",
    "betas of correction": "beta1 and beta2 are swapped in the bias correction",
    "no root": "the root of v is missing",
    "no square": "v must be a mean of the squares of the gradients",
    "sign": "the parameter moves in the direction of its gradient, so the loss would rise",
}


class Trained:
    """A parameter, and the state of AdamW for this parameter.

    step() calls the same function as torch.optim.AdamW, but not this class, because the class
    imports PyTorch's compiler, which takes a second.
    """

    def __init__(self, p):
        self.p = p.clone()
        self.means = [torch.zeros_like(p), torch.zeros_like(p)]
        self.n_steps = torch.tensor(0.0)

    def step(self, grad):
        numbers = dict(HYPERPARAMETERS, amsgrad=False, maximize=False)
        if self.p.dim() == 1:
            numbers["weight_decay"] = 0.0
        m, v = self.means
        adamw_of_torch([self.p], [grad], [m], [v], [], [self.n_steps], **numbers)


def check_adamw(task):
    torch.manual_seed(0)
    for what, shape in (("matrix", (4, 3)), ("vector", (5,))):
        p = torch.randn(shape)
        m = torch.zeros(shape)
        v = torch.zeros(shape)
        trained = Trained(p)
        for step in range(1, 6):
            grad = torch.randn(shape) * step
            grad.view(-1)[0] = 0.0
            trained.step(grad)
            before = [x.clone() for x in (p, grad, m, v)]
            result = task.adamw_step(p.clone(), grad, m.clone(), v.clone(), step, **HYPERPARAMETERS)
            expect(
                isinstance(result, (tuple, list)) and len(result) == 3,
                "the function does not return three tensors: p, m, v",
            )
            for name, x in zip("pmv", result):
                expect_tensor(x, shape, f"for {name}, the function")
            place = f"step {step} of a {what}"
            expected = [trained.p, *adamw(*before, step)[1:]]
            if not is_close(result[0], expected[0], 1e-6):
                for mistake, sentence in ADAMW_MISTAKES.items():
                    wrong, _, _ = adamw(*before, step, mistake)
                    expect(not is_close(result[0], wrong, 1e-6), f"{place}: {sentence}")
                expect(
                    not result[0].isnan().any(),
                    f"{place}: p contains nan. Is the number under the root negative? In Python, "
                    "beta^step is beta**step, not beta * step",
                )
                i = first_wrong(result[0], expected[0])
                state = []
                for name, x, y in zip("mv", result[1:], expected[1:]):
                    state.append(f"{name} is {'right' if is_close(x, y) else 'wrong'}")
                raise Wrong(
                    f"{place}: p{list(i)} becomes {result[0][i]:.6f}, but with torch.optim.AdamW "
                    f"it becomes {expected[0][i]:.6f}. The returned "
                    f"{', and '.join(state)}"
                )
            _, *hats = adamw(*before, step, "hats")
            for name, x, y, hat in zip("mv", result[1:], expected[1:], hats):
                expect(
                    not is_close(x, hat) or is_close(x, y),
                    f"{place}: p is right, but the returned {name} is already divided by the bias "
                    "correction. Return m and v without bias correction",
                )
                if not is_close(x, y):
                    wrong = f"{place}: p is right, but the returned {name} is wrong"
                    for mistake, sentence in ADAMW_MISTAKES.items():
                        state = dict(zip("pmv", adamw(*before, step, mistake)))
                        expect(not is_close(x, state[name]), f"{wrong}: {sentence}")
                    raise Wrong(wrong)
            p, m, v = (x.detach() for x in result)


# 06: micro-batches


class Model(nn.Module):
    """Predicts the next token from one token. Before the step, its gradient contains only ones.

    found_gradient: a list with one bool per forward pass, which says whether the gradient had
    changed when the pass began.
    """

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 11)
        self.table.weight.grad = torch.ones(11, 11)
        self.found_gradient = []

    def forward(self, x):
        grad = self.table.weight.grad
        self.found_gradient.append(grad is None or bool((grad != 1).any()))
        return self.table(x)  # (B, T, V)


def make_micro_batches():
    """Returns four pairs (x, y), (2, 6) each, which contain 12, 3, 0 and 7 targets."""
    micro_batches = []
    for n_targets in (12, 3, 0, 7):
        x = torch.randint(11, (2, 6))
        y = torch.randint(11, (12,))
        y[n_targets:] = -100
        micro_batches.append((x, y.view(2, 6)))
    return micro_batches


def check_micro_batches(task):
    torch.manual_seed(0)
    micro_batches = make_micro_batches()
    for chosen in (micro_batches[:1], micro_batches[:2], micro_batches):
        check_step(task, chosen)


def check_step(task, micro_batches):
    model = Model()
    losses = []  # one per micro-batch, summed over its targets
    for x, y in micro_batches:
        logits = model.table(x).flatten(0, 1)  # (B T, V)
        losses.append(F.cross_entropy(logits, y.flatten(), reduction="sum"))
    gradients = []  # (V, V) each
    for loss in losses:
        gradients.append(torch.autograd.grad(loss, model.table.weight)[0])
    counts = [int((y != -100).sum()) for _, y in micro_batches]
    n_tokens = sum(y.numel() for _, y in micro_batches)
    n_batches = len(micro_batches)
    result = task.backward_of_step(model, micro_batches)
    found = model.table.weight.grad
    expect(
        found is not None and not (found == 1).all(),
        "the gradient of the parameters has not changed: call backward of the loss",
    )
    expected = sum(gradients) / sum(counts)
    numbers = f"{n_batches} micro-batches with {', '.join(map(str, counts))} targets"
    if n_batches == 1:
        numbers = f"one micro-batch with {counts[0]} targets"
    expect(
        not found.isnan().any(),
        f"{numbers}: the gradient is nan. A mean over no targets is 0 / 0",
    )
    lost = "the gradient that p.grad contained before the step is lost. Only add to p.grad: the "
    lost += "caller sets p.grad to zero"
    expect(not is_close(found, expected), f"{numbers}: {lost}")
    found = found - 1
    if not is_close(found, expected):
        means = sum(g / max(1, count) for g, count in zip(gradients, counts))
        mistakes = {
            "this is the gradient of the mean of the micro-batches' mean losses: a target has more "
            "weight in a micro-batch with few targets": means / n_batches,
            "this is the gradient of the sum of the micro-batches' mean losses: divide the sum of "
            "all losses by the number of targets of the step": means,
            "this is the gradient of the sum over all targets: divide by their number": sum(
                gradients
            ),
            f"the sum is divided by all {n_tokens} positions, but targets of -100 do not count in "
            "the loss": sum(gradients) / n_tokens,
            "the sum is divided by the number of micro-batches: divide by the number of targets": (
                sum(gradients) / n_batches
            ),
            "only the last micro-batch is in the gradient": gradients[-1] / max(1, counts[-1]),
            "only the last micro-batch is in the gradient: call backward for each micro-batch": (
                gradients[-1] / sum(counts)
            ),
            "each sum is divided by the number of targets so far: first count the targets of all "
            "micro-batches": sum(g / sum(counts[: i + 1]) for i, g in enumerate(gradients)),
        }
        for sentence, wrong in mistakes.items():
            expect(not is_close(found, wrong), f"{numbers}: {sentence}")
        factor = (found.norm() / expected.norm()).item()
        raise Wrong(
            f"{numbers}: the gradient is wrong. Its norm is {factor:.3f} times the right norm"
        )
    expect(
        isinstance(result, (float, torch.Tensor)),
        f"the gradient is right, but the function returns {type(result).__name__}, not a loss",
    )
    has_graph = isinstance(result, torch.Tensor) and result.requires_grad
    expect(not has_graph, "the returned loss still has a graph, which uses memory: detach the loss")
    right = sum(losses).detach() / sum(counts)
    expect(
        not math.isnan(result),
        f"{numbers}: the gradient is right, but the returned loss is nan. A mean over no targets "
        "is 0 / 0",
    )
    expect(
        is_close(torch.as_tensor(result), right),
        f"{numbers}: the gradient is right, but the returned loss is {float(result):.4f} and not "
        f"{right:.4f}",
    )
    expect(
        n_batches == 1 or any(model.found_gradient[1:]),
        "the model reads all micro-batches before the first backward, so all their graphs are in "
        "memory at once: call backward after each forward pass",
    )


# 07: ranks


def check_ranks(task):
    for world_size, position, n, B in ((1, 0, 8, 4), (2, 100, 16, 2), (4, 48, 16, 4), (3, 9, 9, 1)):
        check_positions(task, world_size, position, n, B)


def check_positions(task, world_size, position, n, B):
    where = f"world_size = {world_size}, position = {position}, n = {n}, B = {B}"
    readers = {}  # position: the ranks that read it
    counts = []
    for rank in range(world_size):
        found = task.starts_of_rank(rank, world_size, position, n, B)
        expect(
            isinstance(found, (list, tuple, range)),
            f"the function returns {type(found).__name__}, not a list or a range",
        )
        counts.append(len(found))
        for start in found:
            expect(
                hasattr(start, "__index__"),
                f"{where}: a micro-batch of rank {rank} begins at {start!r}, which is not an int",
            )
            for i in range(start, start + B):
                readers.setdefault(i, []).append(rank)
                expect(
                    position <= i < position + n,
                    f"{where}: the micro-batch that begins at {start} makes rank {rank} read "
                    f"position {i}, but the positions of this step are {position} to "
                    f"{position + n - 1}",
                )
    expect(readers, f"{where}: no rank has a micro-batch")
    for i in range(position, position + n):
        ranks = readers.get(i, [])
        if len(ranks) > 1 and len(set(ranks)) == 1:
            raise Wrong(f"{where}: rank {ranks[0]} reads position {i} {len(ranks)} times")
        if len(ranks) > 1:
            raise Wrong(f"{where}: rank {ranks[0]} and rank {ranks[1]} both read position {i}")
        expect(ranks, f"{where}: no rank reads position {i}")
    expect(
        len(set(counts)) == 1,
        f"{where}: rank {counts.index(max(counts))} has {max(counts)} micro-batches, but rank "
        f"{counts.index(min(counts))} has {min(counts)}. All ranks need the same number",
    )


# 08: save and resume


def train(model, optimizer, first, last):
    """Takes the steps first to last-1. Returns the losses. Data and lr depend only on the step."""
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_run(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    return model, torch.optim.AdamW(model.parameters())


def tensors_in(value):
    """Yields the tensors in dicts and lists, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def expect_unchanged(checkpoint, before, sentence):
    for x, y in zip(tensors_in(checkpoint), tensors_in(before), strict=True):
        expect(torch.equal(x, y), sentence)


def check_resume(task):
    model, optimizer = make_run(seed=1)
    whole = train(model, optimizer, 0, 10)
    model, optimizer = make_run(seed=1)
    train(model, optimizer, 0, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    checkpoint = task.save_checkpoint(model, optimizer, 5)
    expect(checkpoint is not None, "save_checkpoint returns nothing")
    for x, y in zip(tensors_in((model.state_dict(), optimizer.state_dict())), tensors_in(saved)):
        expect(torch.equal(x, y), "save_checkpoint changes the model or the optimizer")
    before = copy.deepcopy(checkpoint)
    train(model, optimizer, 5, 10)  # the run continues after the checkpoint
    final = copy.deepcopy(model.state_dict())
    expect_unchanged(
        checkpoint,
        before,
        "the checkpoint of step 5 changes while the run continues: state_dict() returns the "
        "tensors of the model, not copies, and the next step changes these tensors",
    )
    for attempt in ("first", "second"):
        model, optimizer = make_run(seed=2)  # as in a new process: different weights, no state
        done = task.load_checkpoint(checkpoint, model, optimizer)
        for name, x in model.state_dict().items():
            expect(
                not torch.equal(x, final[name]),
                f"after load_checkpoint, {name} of the model is from step 10, not from step 5: "
                "the checkpoint contains the model itself, not a copy, and the run continues to "
                "train this model",
            )
            expect(
                torch.equal(x, saved[0][name]),
                f"after load_checkpoint, {name} of the model differs from the saved tensor: load "
                "the saved tensors into the model that load_checkpoint gets"
                if attempt == "first"
                else f"after a second load_checkpoint of the same checkpoint, {name} of the model "
                "differs from the saved tensor: training after the first load has changed the "
                "checkpoint",
            )
        check_optimizer_state(optimizer, saved[1], attempt)
        found = done if isinstance(done, int) else type(done).__name__
        expect(
            done == 5,
            f"load_checkpoint returns {found}, but 5 steps are done, so the run would continue "
            "with the wrong data and learning rate",
        )
        rest = train(model, optimizer, 5, 10)
        for step, (x, y) in enumerate(zip(rest, whole[5:]), start=5):
            expect(x == y, f"the loss of step {step} is {x:.6f} and not {y:.6f}")


def check_optimizer_state(optimizer, saved, attempt):
    """Compares the state of the optimizer with `saved`, its state_dict() after five steps."""
    state = optimizer.state_dict()["state"]
    expect(
        len(state) == len(saved["state"]),
        "after load_checkpoint, the optimizer has no running averages (exp_avg, exp_avg_sq), so "
        "they would begin again at 0: the loss of step 5 would be right, but the loss of step 6 "
        "wrong",
    )
    for i, values in saved["state"].items():
        for name, value in values.items():
            found = state.get(i, {}).get(name)
            expect(
                found is not None,
                f"after load_checkpoint, the optimizer has no {name} for parameter {i}",
            )
            expect(
                torch.equal(found, value),
                f"after load_checkpoint, {name} of the optimizer differs from the saved value"
                if attempt == "first"
                else f"after a second load_checkpoint of the same checkpoint, {name} of the "
                "optimizer differs from the saved value: training after the first load has changed "
                "the checkpoint. load_state_dict of an optimizer does not copy the tensors",
            )


# 09: the backward pass of LayerNorm


DX_MISTAKES = {
    "mean and variance are treated as constants, but both change with x": (0, 0),
    "the mean is treated as a constant, but it changes with x": (0, 1),
    "the variance is treated as a constant, but it changes with x": (1, 0),
    "the term for the mean is half as large as it should be": (0.5, 1),
    "the term for the mean is twice as large as it should be": (2, 1),
    "the term for the variance is half as large as it should be": (1, 0.5),
    "the term for the variance is twice as large as it should be": (1, 2),
    "the term for the mean has the wrong sign": (-1, 1),
    "the term for the variance has the wrong sign": (1, -1),
    "the terms for the mean and for the variance both have the wrong sign": (-1, -1),
    "the sums over the channels are not divided by C": (6, 6),
    "the sum in the term for the mean is not divided by C": (6, 1),
    "the sum in the term for the variance is not divided by C": (1, 6),
}


def check_dx(dx, x_hat, std, weight, dy):
    """Raises Wrong if dx is the result of a common mistake."""

    def mistaken(of_mean, of_variance, dx_hat):
        along_mean = dx_hat.mean(dim=2, keepdim=True)  # (B, T, 1)
        along_x_hat = (dx_hat * x_hat).mean(dim=2, keepdim=True)  # (B, T, 1)
        return (dx_hat - of_mean * along_mean - of_variance * x_hat * along_x_hat) / std

    mistakes = {
        sentence: mistaken(*factors, dy * weight) for sentence, factors in DX_MISTAKES.items()
    }
    mistakes["dy is not multiplied by weight, which comes after the normalization"] = mistaken(
        1, 1, dy
    )
    mistakes["the division by the standard deviation is missing"] = std * mistaken(
        1, 1, dy * weight
    )
    for sentence, wrong in mistakes.items():
        expect(not is_close(dx, wrong), f"dx is wrong: {sentence}")


def check_layernorm(task):
    torch.manual_seed(0)
    for eps in (0.1, 1e-5):
        x = torch.randn(3, 4, 6, requires_grad=True)  # (B, T, C)
        weight = torch.randn(6, requires_grad=True)
        bias = torch.zeros(6, requires_grad=True)
        dy = torch.randn(3, 4, 6)
        F.layer_norm(x, (6,), weight, bias, eps).backward(dy)
        with torch.no_grad():
            result = task.layer_norm_backward(x, weight, dy, eps)
            expect(
                isinstance(result, (tuple, list)) and len(result) == 3,
                "the function does not return three tensors: dx, dweight, dbias",
            )
            shapes = dict(dx=(3, 4, 6), dweight=(6,), dbias=(6,))
            for (name, shape), found in zip(shapes.items(), result):
                expect_tensor(found, shape, f"for {name}, the function")
            dx, dweight, dbias = result
            expect(
                is_close(dbias, bias.grad),
                "dbias is wrong: the bias is added at each position, so dbias is the sum of dy "
                "over all positions",
            )
            expect(
                not is_close(dweight, bias.grad),
                "dweight equals dbias: for dweight, multiply dy by x_hat, which the forward pass "
                "multiplies by weight",
            )
            centered = x - x.mean(dim=2, keepdim=True)  # (B, T, C)
            variance = x.var(dim=2, keepdim=True, unbiased=False)  # (B, T, 1)
            std = (variance + eps).sqrt()
            mistakes = {
                "the variance is divided by C - 1, but LayerNorm divides by C: unbiased=False": (
                    variance * 6 / 5 + eps
                ).sqrt(),
                "eps is missing": variance.sqrt(),
                "eps is added outside the root; it belongs inside": variance.sqrt() + eps,
                "the root is missing": variance + eps,
            }
            if not is_close(dweight, weight.grad):
                for sentence, divisor in mistakes.items():
                    wrong = (dy * centered / divisor).sum(dim=(0, 1))  # (C)
                    expect(not is_close(dweight, wrong), f"dweight is wrong: in x_hat, {sentence}")
                raise Wrong("dweight is wrong: it is the sum of dy times x_hat over all positions")
            if not is_close(dx, x.grad):
                check_dx(dx, centered / std, std, weight, dy)
                b, t, c = first_wrong(dx, x.grad)
                raise Wrong(
                    f"dbias and dweight are right. dx is wrong with eps = {eps}: at position {t}, "
                    f"channel {c}, dx is {dx[b, t, c]:.6f}, but autograd computes "
                    f"{x.grad[b, t, c]:.6f}"
                )


# 10: Muon


def check_orthogonalize(task):
    torch.manual_seed(0)
    for rows, columns in ((16, 16), (12, 20), (20, 12)):
        rank = min(rows, columns)
        u, _ = torch.linalg.qr(torch.randn(rows, rank))  # (rows, rank)
        v, _ = torch.linalg.qr(torch.randn(columns, rank))  # (columns, rank)
        # Dividing by the norm makes all singular values smaller. Most of them are 1 here, so that
        # the norm is large, and the smallest singular value needs all five iterations.
        sizes = torch.ones(rank)
        sizes[-3:] = torch.tensor([0.3, 0.1, 1 / 30])
        for scale in (1.0, 50.0):
            x = scale * (u * sizes) @ v.T  # (rows, columns)
            y = task.orthogonalize(x.clone())
            place = f"a matrix of {rows} x {columns} with a largest singular value of {scale:.0f}"
            expect_tensor(y, (rows, columns), f"for {place}, the function")
            y = y.float()
            if not y.isfinite().all():
                check_iterations(task)
                raise Wrong(
                    f"{place}: the result is not finite, but the iterations are right for [[1.0]]. "
                    "The iterations need singular values of at most 1: divide x by the norm first, "
                    "which is the square root of the sum of all squares"
                )
            inside = u.T @ y @ v  # (rank, rank); diagonal if the directions are kept
            found = (
                inside.diagonal()
            )  # the singular values of y, if y has the singular vectors of x
            off = (inside - found.diag()).abs().max() + (y - u @ inside @ v.T).abs().max()
            expect(
                off < 0.1 * max(1.0, y.abs().max().item()),
                f"{place}: the singular vectors have changed; change only the singular values",
            )
            expect(
                not is_close(found / found[0], sizes, 1e-2),
                f"{place}: all singular values are multiplied by the same factor, so the ratio of "
                "the smallest to the largest singular value has not changed",
            )
            for factor, name in ((columns, "columns"), (rows, "rows")):
                scaled = found / math.sqrt(factor)
                expect(
                    not ((scaled > 0.6) & (scaled < 1.3)).all(),
                    f"{place}: the singular values are about {found.mean():.1f}, the root of the "
                    f"number of {name}, but in this task, they should be about 1",
                )
            expect((found > 0).all(), f"{place}: the signs of some singular values have changed")
            if not ((found > 0.6) & (found < 1.3)).all():
                check_iterations(task)
                raise Wrong(
                    f"{place}: the singular values are between {found.min():.3f} and "
                    f"{found.max():.3f}, but they should be between 0.6 and 1.3. Are there five "
                    "iterations?"
                )
            expect(
                not is_close(found, torch.ones(rank), 1e-3),
                f"{place}: all singular values are 1.000, but five iterations would return "
                "different values between 0.6 and 1.3. Use the iterations, without a singular "
                "value decomposition",
            )


def check_iterations(task):
    """Checks the five iterations with the matrix [[1.0]], whose norm already is 1."""
    found = task.orthogonalize(torch.ones(1, 1)).item()
    expected = 1.0
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    expect(
        abs(found - expected) < 0.015,
        f"the iterations are wrong: for the matrix [[1.0]], five iterations return "
        f"[[{expected:.3f}]], but your function returns [[{found:.3f}]]. Check the number of "
        "iterations, the signs and the powers",
    )


# 11: byte pair encoding


def merge(ids, pair, new):
    """Replaces each occurrence of a pair of ids with the id `new`, from left to right."""
    merged = []
    i = 0
    while i < len(ids):
        if tuple(ids[i : i + 2]) == pair:
            merged.append(new)
            i += 2
        else:
            merged.append(ids[i])
            i += 1
    return merged


MERGE_TEXTS = (
    b"abababab cdcd",  # the second merge contains the id of the first merge
    b"zzyzzyxxwxxw",  # the pairs zz and xx are equally frequent
    b"aaaa aaab aaa",  # in aaa, only one of the two overlapping pairs can be merged
    b"aaa bcbc",  # in aaa, both overlapping pairs count
    b"the cat and the hat and the mat in the bath",
    "雪と雪と雪".encode(),
)


def check_merges(task):
    for text in MERGE_TEXTS:
        ids = list(text)
        shown = repr(text) if text.isascii() else "a Japanese text"
        found = task.learn_merges(text, 4)
        expect(isinstance(found, list), f"the function returns {type(found).__name__}, not a list")
        expect(len(found) == 4, f"{shown}: the list contains {len(found)} merges instead of 4")
        for i, pair in enumerate(found):
            pair = tuple(pair)
            expect(
                all(isinstance(id, int) for id in pair),
                f"the merge with the id {256 + i} is {pair}, but a merge is a pair of two ints",
            )
            counts = Counter(zip(ids, ids[1:]))
            apart = {pair: len(ids) - len(merge(ids, pair, None)) for pair in counts}
            most = max(counts.values())
            best = min(pair for pair, count in counts.items() if count == most)
            place = f"{shown}, the merge with the id {256 + i}"
            now = f". Before this merge, the ids are {ids}"
            if pair != best:
                expect(
                    max(pair) in range(256) or max(pair) in ids,
                    f"{place}: no token has the id {max(pair)} of your pair {pair}. The first "
                    f"merge gets the id 256, the second merge 257{now}",
                )
                expect(
                    pair in counts,
                    f"{place}: your pair {pair} does not occur{now}",
                )
                expect(
                    pair != min(counts, key=lambda pair: (-apart[pair], pair)),
                    f"{place}: the count of {best} is {most}, because overlapping occurrences "
                    f"also count, as in aaa, so this pair comes before your pair {pair}{now}",
                )
                expect(
                    counts[pair] == most,
                    f"{place}: the count of your pair {pair} is {counts[pair]}, but the count of "
                    f"{best} is {most}{now}",
                )
                raise Wrong(
                    f"{place}: your pair {pair} and the pair {best} both have the count {most}; "
                    f"choose the smaller pair, {best}{now}"
                )
            ids = merge(ids, best, 256 + i)


# 12: a cache of keys and values


def check_cache(task):
    torch.manual_seed(0)
    B, T, C = 2, 7, 8
    q, k, v = torch.randn(3, B, T, C).unbind()
    expected = attend(q, k, v, n_head=1)
    for sizes in ((7,), (4, 1, 1, 1), (1, 1, 1, 1, 1, 1, 1), (3, 4)):
        cache = None
        first = 0
        last_size = 0
        for size in sizes:
            part = slice(first, first + size)
            result = task.attention_with_cache(q[:, part], k[:, part], v[:, part], cache)
            expect(
                isinstance(result, (tuple, list)) and len(result) == 2,
                "the function must return two values: the output and the cache",
            )
            y, cache = result
            expect_tensor(y, (B, size, C))
            place = f"tokens {first} to {first + size - 1} in one call"
            if size == 1:
                place = f"token {first} alone"
            place += f", after {first} tokens in the cache" if first else ", with an empty cache"
            if not is_close(y, expected[:, part]):
                check_cache_mistakes(y, q[:, part], k, v, first, last_size, place)
                raise Wrong(f"{place}: the output differs from attention without a cache")
            first += size
            last_size = size


def check_cache_mistakes(y, q, k, v, first, last_size, place):
    """Raises Wrong if y is the result of a common mistake.

    q: (B, n, C), the new queries. k, v: (B, T, C), all keys and values. first: the number of tokens
    of earlier calls. last_size: the number of tokens of the previous call.
    """
    n = q.size(1)
    last = first + n
    scores = q @ k[:, :last].transpose(1, 2) / math.sqrt(q.size(2))  # (B, n, last)
    ones = torch.ones(n, last, dtype=torch.bool)
    right = ones.tril(first)
    own = right.clone()
    own[:, :first] = False  # the queries see only the new keys
    recent = right.clone()
    recent[:, : first - last_size] = False
    masks = {
        "the new queries see later tokens: inside one call, the mask is still needed": ones,
        "each query also sees the next token: the mask is shifted by one place": ones.tril(
            first + 1
        ),
        "the queries see only the keys of this call: the cache is not used": own,
        "the keys and values from before the previous call are lost: return a cache of all keys "
        "and values": recent,
        "the mask expects the new keys after the cached keys, but the new keys come first": (
            right.roll(first, dims=1)
        ),
        f"the mask begins at the left: query 0 of this call is token {first}, so it must see the "
        f"keys 0 to {first}": ones.tril(),
        "the token does not see itself: first append its key and its value to the cache": ones.tril(
            first - 1
        ),
    }
    weights = {}  # sentence: (B, n, last)
    for sentence, mask in masks.items():
        weights[sentence] = scores.masked_fill(~mask, -math.inf).softmax(dim=2)
    hidden = scores.masked_fill(~right, -math.inf)
    weights["softmax runs over the queries, not over the keys"] = hidden.softmax(dim=1)
    swapped = scores.roll(n, dims=2).masked_fill(~right, -math.inf)
    weights["the keys and the values are in different orders"] = swapped.softmax(dim=2)
    root = math.sqrt(q.size(2))
    weights["the scores are not divided by sqrt(C)"] = (hidden * root).softmax(dim=2)
    weights["the scores are divided by C, not by sqrt(C)"] = (hidden / root).softmax(dim=2)
    for sentence, wrong in weights.items():
        expect(not is_close(y, wrong @ v[:, :last]), f"{place}: {sentence}")
    if y.isnan().any():
        raise Wrong(f"{place}: {why_nan(y.isnan())}")


CHECKS = {
    "01": check_cross_entropy,
    "02": check_mask,
    "03": check_heads,
    "04": check_init,
    "05": check_adamw,
    "06": check_micro_batches,
    "07": check_ranks,
    "08": check_resume,
    "09": check_layernorm,
    "10": check_orthogonalize,
    "11": check_merges,
    "12": check_cache,
}


# The functions of PyTorch that an answer may not use, because they would solve the task.
FORBIDDEN = {
    "01": ("cross_entropy", "CrossEntropyLoss", "log_softmax", "LogSoftmax", "logsumexp"),
    "03": ("scaled_dot_product_attention",),
    "09": ("backward", "autograd"),
}
# The time limit of a check, in seconds. Task 08 takes the longest: PyTorch needs up to 5 seconds to
# import its compiler.
LIMIT = 30


def find(folder, number):
    """Returns the file of a task: find(TASKS, "02") -> lesson/tasks/02_mask.py."""
    (path,) = folder.glob(f"{number}_*.py")
    return path


def check(number, text, path):
    """Checks an answer. Returns None if the answer is right, and "open" if it is not written yet.

    If the answer is wrong, returns a sentence that says what is wrong. text: the program that
    contains the function. path: the file of this program, which the sentence names.
    """
    names = {"__name__": "task"}
    is_late = threading.Event()

    def stop():
        is_late.set()
        _thread.interrupt_main()  # raises KeyboardInterrupt in the main thread, on all systems

    timer = threading.Timer(LIMIT, stop)
    timer.daemon = True
    try:
        expect_no_forbidden(number, ast.parse(text), path)
        timer.start()
        exec(compile(text, str(path), "exec"), names)
        CHECKS[number](SimpleNamespace(**names))
    except KeyboardInterrupt as error:
        if not is_late.is_set():  # the user has pressed Ctrl-C
            raise
        line = line_of(error, path)
        if line is None:
            return f"the check itself takes more than {LIMIT} seconds. Is the machine busy?"
        return f"line {line} of {path.name} still runs after {LIMIT} seconds. Is its loop endless?"
    except NotImplementedError as error:  # PyTorch also raises this error, but with a message
        return place_of(error, path) if str(error) else "open"
    except Wrong as wrong:
        return str(wrong)
    except SyntaxError as error:
        return f"line {error.lineno} of {path.name} is not valid Python: {error.msg}"
    except AttributeError as error:
        if isinstance(error.obj, SimpleNamespace):
            return f"{path.name} does not contain the function {error.name}"
        return place_of(error, path)
    except Exception as error:
        return place_of(error, path)
    finally:
        timer.cancel()
    return None


def expect_no_forbidden(number, tree, path):
    """Raises Wrong if a program uses a name that its task forbids. tree: the parsed program."""
    for node in ast.walk(tree):
        used = None
        if isinstance(node, ast.Attribute):  # such as F.cross_entropy
            used = node.attr
        elif isinstance(node, ast.alias):  # from torch.nn.functional import cross_entropy
            used = node.name.split(".")[-1]
        expect(
            used not in FORBIDDEN.get(number, ()),
            f"line {getattr(node, 'lineno', 0)} of {path.name} uses {used}, but this task asks you "
            "to compute the result without it",
        )


def line_of(error, path):
    """Returns the number of the last line of the answer in an error's traceback, or None."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return lines[-1] if lines else None


def place_of(error, path):
    """Returns a sentence that names the line of the answer that failed, and Python's message."""
    line = line_of(error, path)
    what = f"{type(error).__name__}: {error}".rstrip(".")
    if line is None:  # the error is in the check, which used the result of the answer
        return f"the check cannot use the result: {what}"
    return f"line {line} of {path.name} raises {what}"


def title(path):
    """Returns the first sentence of a task's docstring."""
    return path.read_text(encoding="utf-8").split("\n")[0].strip('"')


def list_tasks():
    """Prints the state of each task. Returns whether all tasks are solved."""
    n_solved = 0
    for number in CHECKS:
        path = find(TASKS, number)
        sentence = check(number, path.read_text(encoding="utf-8"), path)
        state = {None: "solved", "open": "open  "}.get(sentence, "WRONG ")
        print(f"{number}  {state}  {title(path)}")
        if state == "WRONG ":
            print(f"            {sentence}")
        n_solved += sentence is None
    print(f"{n_solved} of {len(CHECKS)} tasks are solved. They are in lesson/tasks/")
    return n_solved == len(CHECKS)


def main(arguments):
    """Runs a command. Returns the exit status, which is 0 if all checked answers are right."""
    if not arguments:
        return int(not list_tasks())
    name, *flags = arguments
    number = Path(name).name.split("_")[0].zfill(2)  # name: 2, 02 or lesson/tasks/02_mask.py
    if name.startswith("-"):
        print(__doc__)
        return 2
    if number not in CHECKS:
        print(f"There is no task {name}. The tasks are {', '.join(CHECKS)}.")
        return 2
    if flags not in ([], ["--solution"]):
        print(f"After {name}, only --solution can follow, not {' '.join(flags)}.")
        return 2
    path = find(TASKS, number)
    sentence = check(number, path.read_text(encoding="utf-8"), path)
    if sentence == "open":
        print(f"{number} is open: write your code into lesson/tasks/{path.name}")
        return 1
    end = "" if sentence and sentence.endswith("?") else "."
    print(
        f"{number} is right." if sentence is None else f"{number} is not right yet: {sentence}{end}"
    )
    if flags:
        print(find(SOLUTIONS, number).read_text(encoding="utf-8"))
    return int(sentence is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
