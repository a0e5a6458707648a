"""The order of the sequences of a run: pure functions of numbers, which need no memory.

train_gpt2.DataLoaderLite uses them: order_of_sets chooses the data set, permute the sequence in it.
"""

import math


def order_of_sets(shares):
    """The order of the sets in a period: [(set k, how many of set k are before)].

    Of the first n sequences, each set has n x share, with an error of less than one. The sets take
    turns in the order of their deadlines (Baruah et al. 1996, "Proportionate Progress").
    """
    period = math.lcm(*(share.denominator for share in shares))
    parts = [int(share * period) for share in shares]  # sequences of each set in a period
    counts, order = [0] * len(parts), []
    for n in range(1, period + 1):
        # Only sets below their share may be next. Deadline: the latest place of the next sequence.
        due = [(-((counts[k] + 1) * period // -part), k)
               for k, part in enumerate(parts) if counts[k] * period < n * part]
        _, k = min(due)
        order.append((k, counts[k]))
        counts[k] += 1
    return order


def permute(i, n, seed, epoch):
    """Image of i under a random permutation of range(n). It needs no memory, whatever n is.

    A Feistel network with six rounds on the two digits of i in base ceil(sqrt(n)). A result
    outside range(n) passes through the network again: cycle walking (Black & Rogaway 2002,
    "Ciphers with Arbitrary Finite Domains").
    """
    base = math.isqrt(n - 1) + 1
    key = hash_numbers(seed, epoch)
    while True:
        left, right = divmod(i, base)
        for step in range(6):
            left, right = right, (left + hash_numbers(key + (step << 48) + right)) % base
        i = left * base + right
        if i < n:
            return i


def hash_numbers(*numbers):
    """A 64-bit hash of numbers: the finalizer of SplitMix64 (Steele et al. 2014) on each."""
    x = 0
    for number in numbers:
        x += number
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        x = x ^ x >> 31
    return x
