"""The backward pass of LayerNorm, by hand.

Check it with: python lesson/check.py 09
"""

import torch


def layer_norm_backward(x, weight, dy, eps):
    """Returns the gradients of the loss: (dx, dweight, dbias).

    The forward pass, for each position, where mean and variance are over its C channels:

      x_hat = (x - mean) / sqrt(variance + eps)
      y = x_hat * weight + bias

    The variance divides by C, not by C - 1. x: (B, T, C), the input. weight: (C). dy: (B, T, C),
    the gradient of the loss with respect to y. dx: (B, T, C). dweight, dbias: (C). Do not call
    backward.

    A hint: mean and variance depend on each channel of x, so a change of one channel reaches y in
    three ways: directly, through the mean, and through the variance.

    Example: if dy is the same for all channels, and so is weight, then dx is 0. Adding the same
    number to all channels of x does not change y.
    """
    raise NotImplementedError
