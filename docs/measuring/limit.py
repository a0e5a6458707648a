"""Compares a training step with the speed at which this machine multiplies matrices.

  PYTHONPATH=. python docs/measuring/limit.py baby
  PYTHONPATH=. python docs/measuring/limit.py mini

PyTorch counts the FLOPs of a step, including the optimizer's FLOPs. The program
also times a matrix multiplication of the MLP and the backward pass of this
matrix multiplication, in the same dtype, and computes their speed in FLOP/s.
The program alternates between training steps and these matrix multiplications.
The last printed number is the share of the limit: the time that the step would
take at the speed of the matrix multiplications, divided by the time that the
step really takes.
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
    """Returns the seconds that a @ b and the gradients of a and b take.

    a: (N, C). b: (C, 4C). gradient: the gradient of a @ b, (N, 4C).
    """
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
        f"{preset}: {flops / 1e9:.2f} GFLOPs, {1000 * seconds:.1f} ms a step, matrix "
        f"multiplications at {rate / 1e9:.0f} GFLOP/s, {flops / rate / seconds:.0%} of the limit"
    )


if __name__ == "__main__":
    main(sys.argv[1])
