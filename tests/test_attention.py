"""plaingpt/ops/attention.py: compared with PyTorch's own function in float64."""

from plaingpt.ops.attention import SHORT, attention

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode


def make(T, S, dtype, n_kv=4):
    q = torch.randn(3, 4, T, 16).to(dtype).requires_grad_()
    k, v = (torch.randn(3, n_kv, S, 16).to(dtype).requires_grad_() for _ in range(2))
    return q, k, v


def results(function, qkv, *args, **options):
    """The result, and the gradients of all three, in float64."""
    torch.manual_seed(1)
    y = function(*qkv, *args, **options)
    gradients = torch.autograd.grad(y, qkv, torch.randn(y.shape).to(y.dtype))
    return [tensor.double() for tensor in (y, *gradients)]


@pytest.mark.parametrize("T", [2, 5, 64, SHORT, SHORT + 1])
@pytest.mark.parametrize("kind", ["causal", "mask", "mask of all", "grouped", "numbers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_equals_that_of_pytorch(T, kind, dtype):
    qkv = make(T, T, dtype, n_kv=2 if kind == "grouped" else 4)
    mask = None
    if kind.startswith("mask"):
        size = 3 if kind == "mask" else 1
        mask = (torch.rand(size, 1, T, T) < 0.5) | torch.eye(T, dtype=torch.bool)
    elif kind == "numbers":  # as a bias for each head and distance
        mask = torch.randn(4, T, T).to(dtype)
    args = mask, 0.0, mask is None
    found = results(attention, qkv, *args, enable_gqa=True)
    exact = [t.detach().double().requires_grad_() for t in qkv]
    exact_args = (mask.double() if kind == "numbers" else mask), *args[1:]
    expected = results(F.scaled_dot_product_attention, exact, *exact_args, enable_gqa=True)
    kernel = results(F.scaled_dot_product_attention, qkv, *args, enable_gqa=True)
    for a, b, c in zip(found, expected, kernel):
        assert a.shape == b.shape
        # Its error is that of PyTorch's kernel in this dtype.
        assert (a - b).norm() <= 1.5 * (c - b).norm() + 1e-6 * b.norm()


def test_a_new_token_attends_to_the_cache():
    """With one query, and with several that have a mask."""
    for T in (1, 3):
        qkv = make(T, 9, torch.bfloat16)
        mask = torch.ones(T, 9, dtype=torch.bool).tril(9 - T)[None, None] if T > 1 else None
        found = attention(*qkv, mask)
        expected = F.scaled_dot_product_attention(*[t.double() for t in qkv], mask)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.02)


def test_dropout_of_the_weights():
    q, k, v = make(64, 64, torch.bfloat16)
    torch.manual_seed(3)
    means = torch.stack([attention(q, k, v, None, 0.25, True) for _ in range(400)]).float().mean(0)
    torch.testing.assert_close(means, attention(q, k, v, None, 0.0, True).float(), rtol=0, atol=0.3)
    torch.manual_seed(4)
    one = attention(q, k, v, None, 0.25, True)
    torch.manual_seed(4)
    assert torch.equal(one, attention(q, k, v, None, 0.25, True))
    assert not torch.equal(one, attention(q, k, v, None, 0.25, True))


def test_only_short_sequences_in_bfloat16_on_a_cpu_are_products():
    """The products are counted; PyTorch's kernel for a CPU is not."""

    def counted(T, dtype):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            attention(*make(T, T, dtype), None, 0.0, True)
        return "bmm" in str(counter.get_flop_counts())

    assert counted(64, torch.bfloat16) and counted(SHORT, torch.bfloat16)
    assert not counted(SHORT + 1, torch.bfloat16) and not counted(64, torch.float32)
