"""One step of AdamW, equal to torch.optim.AdamW to 1e-6.

Check it with: python lesson/check.py 05
"""

import torch


def adamw_step(p, grad, m, v, step, lr, beta1, beta2, eps, weight_decay):
    """Returns the parameter and its two means after a step: (p, m, v).

    p: a parameter, a matrix or a vector. grad: its gradient, of the same shape. m: the running mean
    of the gradients. v: the running mean of their squares. Before the first step, m and v are 0.
    step: the number of this step; the first one is 1. The other arguments are numbers.

      decay    p is multiplied by 1 - lr * weight_decay, but only if p is a matrix
      means    m = beta1 * m + (1 - beta1) * grad
               v = beta2 * v + (1 - beta2) * grad^2
      step     p is lowered by lr * m_hat / (sqrt(v_hat) + eps)

    m and v begin at 0, so they are too small at first. Bias correction compensates for this:
    m_hat = m / (1 - beta1^step), and v_hat = v / (1 - beta2^step). Return m and v without the
    correction.

    Example: in the first step, m_hat is grad and v_hat is grad^2, so a vector moves by almost
    exactly lr against the sign of its gradient; eps makes the step slightly smaller.
    """
    raise NotImplementedError
