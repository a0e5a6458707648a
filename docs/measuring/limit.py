"""Compares a step on this machine with the rate at which it multiplies matrices.

  PYTHONPATH=. python docs/measuring/limit.py baby
  PYTHONPATH=. python docs/measuring/limit.py mini

PyTorch counts the operations of a step, with those of the optimizer. The rate
is that of the products of the MLP, in the same number format, forward and
backward. Steps and products take turns. The last figure is the share of the
limit: how long the step would take at that rate, divided by how long it takes.
"""

import statistics
import sys
import time

from plaingpt.settings import PRESETS

import torch
from torch.utils.flop_counter import FlopCounterMode

import bench

ROUNDS = 15


def time_products(a, b, gradient):
    """Returns the seconds of a product and its two gradients. a: (N, C), b: (C, 4C)."""
    began = time.perf_counter()
    a @ b
    gradient @ b.T
    a.T @ gradient
    return time.perf_counter() - began


def main(preset):
    recipe = PRESETS[preset]
    n_sequences = recipe["total_batch_size"] // recipe["block_size"]
    given = dict(preset=preset, optimizer=recipe["optimizer"], batch_size=n_sequences, device="cpu")
    subject = bench.make_subject(bench.OURS, given)
    subject.time_step()
    with FlopCounterMode(display=False) as counter:
        subject.time_step()
    flops = counter.get_total_flops()
    N, C = recipe["total_batch_size"], recipe["n_embd"]
    shapes = ((N, C), (C, 4 * C), (N, 4 * C))
    matrices = [torch.randn(shape).to(subject.process.dtype) for shape in shapes]
    steps, products = [], []
    for _ in range(ROUNDS):
        steps.append(subject.time_step())
        products.append(statistics.median(time_products(*matrices) for _ in range(20)))
    rate = 3 * 2 * N * C * 4 * C / statistics.median(products)
    seconds = statistics.median(steps)
    print(
        f"{preset}: {flops / 1e9:.2f} GFLOP, {1000 * seconds:.1f} ms a step, products at "
        f"{rate / 1e9:.0f} GFLOP/s, {flops / rate / seconds:.0%} of the limit"
    )


if __name__ == "__main__":
    main(sys.argv[1])
