"""Cross-entropy that does not overflow.

Lesson 1 computes exp(logit). In float32, exp of a logit above about 88 is inf, and the loss becomes
nan. Compute the same loss without overflow. Do not use the functions of torch that avoid overflow
for you: F.cross_entropy, log_softmax and logsumexp.

Check it with: python lesson/check.py 01
"""

import torch


def cross_entropy(logits, targets):
    """Returns the mean of -ln(probability of the target), a tensor without dimensions.

    logits: (B, T, V), float32; the logits may be arbitrarily large. targets: (B, T), int64, from 0
    to V-1. targets[b, t] already is the token after position t.

    For one position with the logits a_0, a_1, ... and the target y, the loss is

      -ln( exp(a_y) / (exp(a_0) + exp(a_1) + ...) )

    A hint: adding the same number to all logits of a position does not change the loss. Do not
    modify the tensor `logits` in place, because the caller still needs it.

    Example: for logits of [[[0.0, 0.0]]] and targets of [[1]], the loss is ln 2 = 0.6931. For
    logits of [[[0.0, 1000.0]]], the loss is 0 if the target is 1, and 1000 if the target is 0.
    """
    raise NotImplementedError


if __name__ == "__main__":
    print(__doc__)
