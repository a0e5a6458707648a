"""A solution of task 09: the backward pass of LayerNorm, by hand."""


def layer_norm_backward(x, weight, dy, eps):
    """Returns the gradients of the loss: (dx, dweight, dbias)."""
    mean = x.mean(dim=-1, keepdim=True)  # (B, T, 1)
    std = (x.var(dim=-1, keepdim=True, unbiased=False) + eps).sqrt()  # (B, T, 1)
    x_hat = (x - mean) / std  # (B, T, C)
    dx_hat = dy * weight  # (B, T, C)
    # Adding the same number to all channels of x does not change x_hat, so subtract the mean of the
    # gradient. Moving x along x_hat does not change x_hat either, so subtract the part along x_hat.
    along_mean = dx_hat.mean(dim=-1, keepdim=True)  # (B, T, 1)
    along_x_hat = (dx_hat * x_hat).mean(dim=-1, keepdim=True)  # (B, T, 1)
    dx = (dx_hat - along_mean - x_hat * along_x_hat) / std  # (B, T, C)
    return dx, (dy * x_hat).sum(dim=(0, 1)), dy.sum(dim=(0, 1))
