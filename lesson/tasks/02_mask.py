"""The causal mask: a position sees itself and earlier positions.

Check it with: python lesson/check.py 02
"""

import torch


def causal_weights(scores):
    """Returns the attention weights, (B, T, T): the softmax of each row after the mask.

    scores: (B, T, T). scores[b, i, j] says how well the query of position i fits the key of
    position j. Position i may see the positions 0 to i. Their weights are the softmax of their
    scores alone, and the weights of all later positions are 0, so each row adds up to 1.

    Example: for scores of [[[0.0, 5.0], [0.0, 0.0]]], the weights are [[[1.0, 0.0], [0.5, 0.5]]].
    """
    raise NotImplementedError
