"""Micro-batches that have unequal numbers of targets.

In data of prompts and responses, only the responses count in the loss. The targets of all other
positions are -100, so micro-batches of the same shape have different numbers of targets.

Check it with: python lesson/check.py 06
"""

import torch
import torch.nn.functional as F


def backward_of_step(model, micro_batches):
    """Adds the gradient of a whole step to p.grad of the parameters. Returns the loss of the step.

    model: model(x) returns the logits, (B, T, V). micro_batches: a list of (x, y), (B, T) int64
    each. A target of -100 in y does not count: F.cross_entropy ignores it.

    The loss of the step is the mean over all its targets, so each target counts the same, in
    whichever micro-batch it is. Return this loss as a float or as a tensor without a graph
    (detached). A micro-batch may have no target at all. To save memory, call backward for each
    micro-batch before the next one goes through the model. p.grad may contain a gradient already:
    keep it, and add to it.

    Example: two micro-batches have 3 targets with a mean loss of 2.0, and 1 target with a loss of
    6.0. The loss of the step is (3 * 2.0 + 6.0) / 4 = 3.0, and not 4.0.
    """
    raise NotImplementedError
