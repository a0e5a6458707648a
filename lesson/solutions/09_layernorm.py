"""A solution of task 09: the backward pass of LayerNorm, by hand."""


def layer_norm_backward(x, weight, dy, eps):
    """Returns the gradients of the loss: (dx, dweight, dbias)."""
    mean = x.mean(dim=-1, keepdim=True)  # (B, T, 1)
    std = (x.var(dim=-1, keepdim=True, unbiased=False) + eps).sqrt()  # (B, T, 1)
    x_hat = (x - mean) / std  # (B, T, C)
    dx_hat = dy * weight  # (B, T, C)
    # If mean and std were constants, dx would be dx_hat / std. But both depend on x. The gradient
    # through the mean adds the term with along_mean, and the gradient through std adds the term
    # with along_x_hat.
    along_mean = dx_hat.mean(dim=-1, keepdim=True)  # (B, T, 1)
    along_x_hat = (dx_hat * x_hat).mean(dim=-1, keepdim=True)  # (B, T, 1)
    dx = (dx_hat - along_mean - x_hat * along_x_hat) / std  # (B, T, C)
    return dx, (dy * x_hat).sum(dim=(0, 1)), dy.sum(dim=(0, 1))
