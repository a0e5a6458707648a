"""Attention with several heads.

Lesson 5 does this in CausalSelfAttention. Do not use F.scaled_dot_product_attention here.

Check it with: python lesson/check.py 03
"""

import math

import torch


def attention(q, k, v, n_head):
    """Returns the concatenated outputs of all heads: (B, T, C).

    q, k, v: (B, T, C) each, after the layer c_attn. n_head divides C. Head h uses the hs = C /
    n_head channels from h * hs to (h + 1) * hs - 1 of q, k and v. In each head,

      scores = q kᵀ / sqrt(hs)                        (T, T)
      weights = softmax of each row, after the mask   (T, T)
      y = weights v                                   (T, hs)

    and y fills the same channels of the result. This task does not include the layer c_proj.

    Example: with T = 1, a position sees only itself, so the result is v.
    """
    raise NotImplementedError
