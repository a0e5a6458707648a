"""Times attention on a CPU: PyTorch's kernel, and the products of plaingpt/ops/attention.py.

  PYTHONPATH=. python docs/measuring/attention.py

`python docs/measure.py attention` puts its figures into docs/measurements.md.
Forward and backward, in bfloat16, in turn. The figures are medians, in ms.
SHORT in plaingpt/ops/attention.py is the largest T at which the products win.
"""

import statistics
import time

from plaingpt.ops.attention import attention_in_products

import torch
import torch.nn.functional as F

# (B, nh, T, hs): the baby's and mini's are the first two.
SHAPES = ((16, 2, 64, 64), (16, 3, 128, 64), (8, 4, 256, 64), (4, 12, 1024, 64))


def kernel(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def products(q, k, v):
    return attention_in_products(q, k, v, None, 0.0, True)


def time_once(function, qkv, gradient):
    """Returns the seconds of a forward and a backward pass. qkv: (B, T, 3, nh, hs)."""
    began = time.perf_counter()
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # (B, nh, T, hs) each
    function(q, k, v).backward(gradient)
    seconds = time.perf_counter() - began
    qkv.grad = None
    return seconds


def main():
    for B, nh, T, hs in SHAPES:
        qkv = torch.randn(B, T, 3, nh, hs, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn(B, nh, T, hs, dtype=torch.bfloat16)
        seconds = {kernel: [], products: []}
        for _ in range(50 if T < 512 else 5):
            for function, found in seconds.items():
                found.append(time_once(function, qkv, gradient))
        ms = [1000 * statistics.median(found) for found in seconds.values()]
        print(f"({B}, {nh}, {T}, {hs}) kernel {ms[0]:.2f} products {ms[1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
