"""Micro-batches with different numbers of targets.

In data that consists of prompts and responses, only the tokens of the responses count in the loss.
All other targets are -100, so micro-batches of the same shape contain different numbers of targets.

Check it with: python lesson/check.py 06
"""

import torch
import torch.nn.functional as F


def backward_of_step(model, micro_batches):
    """Adds the gradient of a whole step to p.grad of the parameters. Returns the loss of the step.

    model: model(x) returns the logits, (B, T, V). micro_batches: a list of pairs (x, y), both
    (B, T) and int64. A target of -100 in y does not count: F.cross_entropy ignores such a target.

    The loss of the step is the mean over all targets of the step, so each target has the same
    weight, whichever micro-batch contains it. Return this loss as a float or as a detached tensor.
    A micro-batch may contain no targets. To save memory, call backward for each micro-batch before
    you pass the next micro-batch to the model. p.grad may already contain a gradient: add the
    gradient of the step to it.

    Example: the first micro-batch contains 3 targets with a mean loss of 2.0, and the second
    micro-batch contains 1 target with a loss of 6.0. The loss of the step is
    (3 * 2.0 + 6.0) / 4 = 3.0, not (2.0 + 6.0) / 2 = 4.0.
    """
    raise NotImplementedError


if __name__ == "__main__":
    print(__doc__)
