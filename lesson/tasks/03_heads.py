"""Attention with several heads.

CausalSelfAttention of lesson 5 also computes the attention of several heads. In this task, do not
use F.scaled_dot_product_attention.

Check it with: python lesson/check.py 03
"""

import math

import torch


def attention(q, k, v, n_head):
    """Returns the concatenated outputs of all heads: (B, T, C).

    q, k, v: (B, T, C) each, the outputs of the layer c_attn. C is a multiple of n_head. Head h uses
    the hs = C / n_head channels from h * hs to (h + 1) * hs - 1 of q, k and v. Each head computes

      scores = q kᵀ / sqrt(hs)                        (T, T)
      weights = softmax of each row, after the mask   (T, T)
      y = weights v                                   (T, hs)

    The output y of head h becomes the channels from h * hs to (h + 1) * hs - 1 of the result. The
    layer c_proj is not part of this task.

    Example: if T = 1, the only position attends only to itself, so the result is v.
    """
    raise NotImplementedError


if __name__ == "__main__":
    print(__doc__)
