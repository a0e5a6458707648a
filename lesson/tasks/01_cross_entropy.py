"""Cross-entropy that does not overflow.

Lesson 1 computes exp(logit). In float32, exp of a logit above 88 is inf, and then the loss is nan.
Compute the same loss for logits of any size. Do not use torch's own loss functions: no
F.cross_entropy, log_softmax or logsumexp.

Check it with: python lesson/check.py 01
"""

import torch


def cross_entropy(logits, targets):
    """Returns the mean of -ln(probability of the target), a tensor without dimensions.

    logits: (B, T, V), float32, of any size. targets: (B, T), int64, from 0 to V-1. targets[b, t]
    already is the token after position t.

    For one position with the logits a_0, a_1, ... and the target y, the loss is

      -ln( exp(a_y) / (exp(a_0) + exp(a_1) + ...) )

    Adding the same number to all logits of a position does not change the loss. But do not change
    the tensor `logits` itself, which belongs to the caller.

    Example: for logits of [[[0.0, 0.0]]] and targets of [[1]], the loss is ln 2 = 0.6931. For
    logits of [[[0.0, 1000.0]]], it is 0 with the target 1, and 1000 with the target 0.
    """
    raise NotImplementedError
