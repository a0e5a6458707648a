"""Pure functions that give the order of the sequences of a run.

DataLoaderLite in train_gpt2.py uses them. order_of_sets chooses the data set, and permute chooses
the sequence in it.
"""

import math


def order_of_sets(shares):
    """Returns one period of a mixture: for each turn, (data set k, number of its earlier turns).

    shares: Fractions that add up to 1. Of the first n turns, each set has n x share, with an error
    of less than one. The sets take turns in the order of their deadlines (Baruah et al. 1996,
    "Proportionate Progress").
    """
    period = math.lcm(*(share.denominator for share in shares))
    parts = [int(share * period) for share in shares]  # sequences of each set in a period
    counts = [0] * len(parts)
    order = []
    for n in range(1, period + 1):
        due = []  # (deadline, data set) of each set that may be next
        for k, part in enumerate(parts):
            # Only a set that is below its share may be next. Its deadline is the last place that
            # its next sequence may have.
            if counts[k] * period < n * part:
                deadline = -(-(counts[k] + 1) * period // part)  # the quotient is rounded up
                due.append((deadline, k))
        _, first = min(due)
        order.append((first, counts[first]))
        counts[first] += 1
    return order


def permute(i, n, seed, epoch):
    """Returns the image of i under a random permutation of range(n).

    This needs no memory, whatever n is. A Feistel network with six rounds works on the two digits
    of i in base ceil(sqrt(n)). A result outside range(n) passes through the network again. This is
    called cycle walking (Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
    """
    base = math.isqrt(n - 1) + 1
    key = hash_numbers(seed, epoch)
    while True:
        left, right = divmod(i, base)
        for i_round in range(6):
            left, right = right, (left + hash_numbers(key + (i_round << 48) + right)) % base
        i = left * base + right
        if i < n:
            return i


def hash_numbers(*numbers):
    """Hashes numbers to 64 bits, with the finalizer of SplitMix64 for each (Steele et al. 2014)."""
    x = 0
    for number in numbers:
        x += number
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        x = x ^ x >> 31
    return x
