"""Which positions a rank reads: each position of a step once.

Check it with: python lesson/check.py 07
"""


def starts_of_rank(rank, world_size, position, n, B):
    """Returns a list or range: where each micro-batch of this rank begins.

    A step has n sequences, which have the positions `position` to `position + n - 1` in the run. A
    micro-batch that begins at s reads the B positions s to s + B - 1. There are world_size ranks,
    numbered from 0, and n is a multiple of world_size * B.

    All ranks together must read each position of the step once, and no other position. All ranks
    must have equally many micro-batches. Which rank reads which position is your choice.

    Example: with world_size = 1, position = 100, n = 8 and B = 4, rank 0 gets [100, 104].
    """
    raise NotImplementedError
