"""Attention with several heads.

Lesson 5 does this in CausalSelfAttention. Do not use F.scaled_dot_product_attention here.

Check it with: python lesson/check.py 03
"""

import math

import torch


def attention(q, k, v, n_head):
    """Returns what all heads collect, side by side: (B, T, C).

    q, k, v: (B, T, C) each, after the layer c_attn. n_head divides C. Head h uses the hs = C /
    n_head channels from h * hs to (h + 1) * hs - 1 of q, k and v. In each head,

      scores = q kᵀ / sqrt(hs)                        (T, T)
      weights = softmax of each row, after the mask   (T, T)
      y = weights v                                   (T, hs)

    and y goes to the same channels of the result. The layer c_proj is not a part of this task.

    Example: with T = 1, a position sees only itself, so the result is v.
    """
    raise NotImplementedError
