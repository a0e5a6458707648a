"""The backward pass of LayerNorm, by hand.

Check it with: python lesson/check.py 09
"""

import torch


def layer_norm_backward(x, weight, dy, eps):
    """Returns the gradients of the loss: (dx, dweight, dbias).

    For each position, the forward pass computes

      x_hat = (x - mean) / sqrt(variance + eps)
      y = x_hat * weight + bias

    The mean and the variance are computed over the C channels of the position. The variance is the
    sum of squares divided by C, not by C - 1. x: (B, T, C), the input. weight: (C). dy: (B, T, C),
    the gradient of the loss with respect to y. dx: (B, T, C). dweight, dbias: (C) each. Do not call
    backward or torch.autograd.grad.

    A hint: mean and variance depend on all channels of x. A change in one channel of x therefore
    changes y in three ways: directly, through the mean, and through the variance.

    Example: if all channels have the same dy and the same weight, dx is 0, because adding the same
    number to all channels of x does not change y.
    """
    raise NotImplementedError


if __name__ == "__main__":
    print(__doc__)
