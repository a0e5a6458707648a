"""The causal mask: a position attends only to itself and to earlier positions.

Check it with: python lesson/check.py 02
"""

import torch


def causal_weights(scores):
    """Returns the attention weights, (B, T, T): the softmax of each row after the mask.

    scores: (B, T, T). scores[b, i, j] says how well the query of position i matches the key of
    position j. Position i may attend to the positions 0 to i. In row i, the weights of these
    positions are the softmax of their scores, and the weights of all later positions are 0. Each
    row adds up to 1.

    Example: for scores of [[[0.0, 5.0], [0.0, 0.0]]], the weights are [[[1.0, 0.0], [0.5, 0.5]]].
    """
    raise NotImplementedError


if __name__ == "__main__":
    print(__doc__)
