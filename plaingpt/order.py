"""The order in which a run reads its sequences, and a background thread that reads ahead.

In DataLoaderLite of train_gpt2.py, Turns chooses the data set of each sequence, and permute chooses
the sequence in this data set.
"""

import math
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import torch


class Turns:
    """Decides which data set of a mixture provides each sequence: the data sets take turns.

    shares: the share of the sequences from each data set, as Fractions that add up to 1.
    """

    def __init__(self, shares):
        # The order of the turns repeats after one period. For the shares 2/3 and 1/3, a period is
        # [(0, 0), (0, 1), (1, 0)]; for a single data set, a period is [(0, 0)].
        self.order = order_of_sets(shares)
        self.per_period = [int(share * len(self.order)) for share in shares]

    def find(self, position):
        """Returns the index of the data set at a position, and the number of its earlier turns."""
        periods, turn = divmod(position, len(self.order))
        k, earlier = self.order[turn]
        return k, periods * self.per_period[k] + earlier


def order_of_sets(shares):
    """Returns one period of a mixture: for each turn, (data set k, number of its earlier turns).

    shares: Fractions that add up to 1. Of the first n turns, each data set takes n x share, with an
    error of less than one turn. The data sets take turns in the order of their deadlines (Baruah et
    al. 1996, "Proportionate Progress").
    """
    period = math.lcm(*(share.denominator for share in shares))
    parts = [int(share * period) for share in shares]  # sequences of each data set in a period
    counts = [0] * len(parts)
    order = []
    for n in range(1, period + 1):
        due = []  # (deadline, data set) of each data set that may be next
        for k, part in enumerate(parts):
            # Only a data set that has taken fewer turns than its share may be next. The deadline is
            # the last turn in which it may read its next sequence.
            if counts[k] * period < n * part:
                deadline = -(-(counts[k] + 1) * period // part)  # rounds the quotient up
                due.append((deadline, k))
        _, first = min(due)
        order.append((first, counts[first]))
        counts[first] += 1
    return order


def permute(i, n, seed, epoch):
    """Returns the image of i under a random permutation of range(n).

    The permutation needs no memory, even for large n. A Feistel network with six rounds permutes
    the two digits of i in base ceil(sqrt(n)). A result outside range(n) goes through the network
    again. This is called cycle walking (Black & Rogaway 2002, "Ciphers with Arbitrary Finite
    Domains").
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
    """Hashes numbers to 64 bits, with SplitMix64's finalizer per number (Steele et al. 2014)."""
    x = 0
    for number in numbers:
        x += number
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        x = x ^ x >> 31
    return x


def prefetch(batches, process):
    """Yields the batches. While the caller uses a batch, a background thread reads the next batch.

    process.stop knows the next batch: if it cannot be read, the run stops before it needs the
    batch. On MPS, there is no background thread.
    """
    device = process.device
    # Two threads that use MPS may crash the process (pytorch/pytorch#197805).
    thread = MainThread() if device.type == "mps" else ThreadPoolExecutor(1)

    def read_next():
        process.stop.next_batch = thread.submit(next, batches, None)

    def generate():
        with thread:
            while (batch := process.stop.next_batch.result()) is not None:
                read_next()
                yield batch

    if device.type == "cuda":  # otherwise, the thread would also use memory of GPU 0
        thread.submit(torch.cuda.set_device, device)
    read_next()
    return generate()


class MainThread(Executor):
    """An executor without a thread."""

    def submit(self, function, *args):
        future = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future
