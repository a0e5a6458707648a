"""Which sequences a rank reads: all ranks together read each sequence of a step once.

Check it with: python lesson/check.py 07
"""


def starts_of_rank(rank, world_size, position, n, B):
    """Returns the first position of each micro-batch of this rank, as a list or a range.

    A step reads n sequences, whose positions in the run are `position` to `position + n - 1`. A
    micro-batch with the first position s contains the B positions s to s + B - 1. There are
    world_size ranks, numbered from 0, and n is a multiple of world_size * B.

    All ranks together must read each position of the step once, and no other positions. All ranks
    must read the same number of micro-batches. You choose which rank reads which positions.

    Example: with world_size = 1, position = 100, n = 8 and B = 4, the result for rank 0 is
    [100, 104].
    """
    raise NotImplementedError


if __name__ == "__main__":
    print(__doc__)
