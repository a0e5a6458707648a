"""A solution of task 02: the causal mask."""

import torch


def causal_weights(scores):
    """Returns the attention weights, (B, T, T): the softmax of each row after the mask."""
    T = scores.size(1)
    is_later = torch.ones(T, T, dtype=torch.bool, device=scores.device).triu(1)  # (T, T)
    return scores.masked_fill(is_later, -torch.inf).softmax(dim=2)
