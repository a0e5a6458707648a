"""The order in which a run reads its sequences, and a background thread that reads ahead.

DataLoaderLite of train_gpt2.py reads a stream of sequences. For each position in this stream, Turns
chooses the data set, and permute chooses the sequence of the data set.
"""

import math
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import torch


class Turns:
    """Decides which data set of a mixture provides the sequence at each position.

    Each data set has a share of the sequences. The data set whose next sequence is due first comes
    next: earliest-deadline-first scheduling. This spreads the sequences of each data set evenly.

    shares: the share of each data set, as Fractions that add up to 1.
    """

    def __init__(self, shares):
        # The order of the data sets repeats after one period. For the shares 2/3 and 1/3, a period
        # is [(0, 0), (0, 1), (1, 0)]; for a single data set, a period is [(0, 0)].
        self.order = order_of_sets(shares)
        self.per_period = [int(share * len(self.order)) for share in shares]

    def find(self, position):
        """Returns (data set, number of earlier sequences of this data set) for a position."""
        periods, turn = divmod(position, len(self.order))
        k, earlier = self.order[turn]
        return k, periods * self.per_period[k] + earlier


def order_of_sets(shares):
    """Returns one period of a mixture: a list with an element for each position of the period.

    An element is (data set, number of earlier sequences of this data set in the period).

    shares: Fractions that add up to 1. The first n positions contain n x share sequences of each
    data set, with an error of less than one sequence. Baruah et al. 1996, "Proportionate Progress",
    describe such schedules.
    """
    period = math.lcm(*(share.denominator for share in shares))
    parts = [int(share * period) for share in shares]  # sequences of each data set in a period
    counts = [0] * len(parts)
    order = []
    for n in range(1, period + 1):
        due = []  # (deadline, data set) for each data set that may be next
        for k, part in enumerate(parts):
            # A data set may be next only if it has provided fewer sequences than n x share. The
            # deadline of its next sequence is the last n that keeps the error below one sequence.
            if counts[k] * period < n * part:
                deadline = -(-(counts[k] + 1) * period // part)  # rounds the quotient up
                due.append((deadline, k))
        _, first = min(due)
        order.append((first, counts[first]))
        counts[first] += 1
    return order


def permute(i, n, seed, epoch):
    """Returns the image of i under a random permutation of range(n).

    permute stores no table, so it needs no memory even for a large n. A Feistel network with
    six rounds transforms the two digits of i in base ceil(sqrt(n)). A result outside range(n) goes
    through the network again, which is called cycle walking (Black & Rogaway 2002, "Ciphers with
    Arbitrary Finite Domains").

    seed, epoch: integers, which together select the permutation.
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
    """Hashes numbers to 64 bits: SplitMix64's finalizer, once per number (Steele et al. 2014)."""
    x = 0
    for number in numbers:
        x += number
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        x = x ^ x >> 31
    return x


def prefetch(batches, process):
    """Yields the batches. While the caller uses a batch, a background thread reads the next batch.

    process.stop stores the Future of the next batch: if a batch cannot be read, the run stops
    before the step that needs this batch. On MPS, the main thread reads the batches.

    batches: an iterator. process: a Process.
    """
    device = process.device
    # If two threads use MPS, the process may crash (pytorch/pytorch#197805).
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
    """An executor that calls each function at once, in the thread that calls `submit`."""

    def submit(self, function, *args):
        future = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future
