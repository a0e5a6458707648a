"""One step of AdamW, equal to a step of torch.optim.AdamW (tolerance: 1e-6).

Check it with: python lesson/check.py 05
"""

import torch


def adamw_step(p, grad, m, v, step, lr, beta1, beta2, eps, weight_decay):
    """Returns the parameter and its two running averages after a step: (p, m, v).

    p: a parameter, which is a matrix or a vector. grad: the gradient of p, of the same shape.
    m: the running average of the gradients. v: the running average of the squared gradients.
    Before the first step, m and v are 0. step: the number of this step, counted from 1. The other
    arguments are hyperparameters, which are numbers. A step consists of three parts:

      decay    if p is a matrix, multiply p by 1 - lr * weight_decay
      average  m = beta1 * m + (1 - beta1) * grad
               v = beta2 * v + (1 - beta2) * grad^2
      update   subtract lr * m_hat / (sqrt(v_hat) + eps) from p

    m and v begin at 0, so in the first steps, both are too small. The update therefore uses m and v
    with bias correction: m_hat = m / (1 - beta1^step), and v_hat = v / (1 - beta2^step). Return m
    and v without bias correction.

    Example: in the first step, m_hat is grad and v_hat is grad^2, so each number in a vector moves
    by almost exactly lr, in the direction opposite to its gradient. Because of eps, the number
    moves slightly less than lr.
    """
    raise NotImplementedError


if __name__ == "__main__":
    print(__doc__)
