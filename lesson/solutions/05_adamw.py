"""A solution of task 05: one step of AdamW."""


def adamw_step(p, grad, m, v, step, lr, beta1, beta2, eps, weight_decay):
    """Returns the parameter and its two running averages after a step: (p, m, v)."""
    if p.dim() == 2:
        p = p * (1 - lr * weight_decay)
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad**2
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    return p - lr * m_hat / (v_hat.sqrt() + eps), m, v
