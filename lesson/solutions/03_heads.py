"""A solution of task 03: attention with several heads."""

import math

import torch


def attention(q, k, v, n_head):
    """Returns the concatenated outputs of all heads: (B, T, C)."""
    B, T, C = q.size()
    q = q.view(B, T, n_head, C // n_head).transpose(1, 2)  # (B, nh, T, hs)
    k = k.view(B, T, n_head, C // n_head).transpose(1, 2)  # (B, nh, T, hs)
    v = v.view(B, T, n_head, C // n_head).transpose(1, 2)  # (B, nh, T, hs)
    scores = q @ k.transpose(2, 3) / math.sqrt(C // n_head)  # (B, nh, T, T)
    is_later = torch.ones(T, T, dtype=torch.bool).triu(1)  # (T, T)
    weights = scores.masked_fill(is_later, -math.inf).softmax(dim=3)  # (B, nh, T, T)
    y = weights @ v  # (B, nh, T, hs)
    return y.transpose(1, 2).flatten(2)  # (B, T, C)
