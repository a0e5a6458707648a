"""A solution of task 12: attention with a KV cache, for generation."""

import math

import torch


def attention_with_cache(q, k, v, cache):
    """Returns (y, cache): the output of the new tokens, (B, n, C), and the next cache."""
    if cache is not None:
        k = torch.cat([cache[0], k], dim=1)  # (B, T, C), keys of all tokens so far
        v = torch.cat([cache[1], v], dim=1)  # (B, T, C), values of all tokens so far
    n, T = q.size(1), k.size(1)
    scores = q @ k.transpose(1, 2) / math.sqrt(q.size(2))  # (B, n, T)
    # Query i belongs to token T - n + i, so the mask is shifted to the right by T - n columns.
    is_later = torch.ones(n, T, dtype=torch.bool).triu(T - n + 1)  # (n, T)
    weights = scores.masked_fill(is_later, -math.inf).softmax(dim=2)  # (B, n, T)
    return weights @ v, (k, v)
