"""Attention: PyTorch's, and for short sequences on a CPU the same in three products."""

import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# On a CPU, PyTorch's kernel for bfloat16 is slower than products for up to so many keys. See
# docs/measuring/attention.py, which times both.
SHORT = 128
# All kernels but cuDNN's. With a mask, it gives gradients of NaN if T % 128 is 64
# (pytorch/pytorch#196678). And it prepares a plan for each new shape.
NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(q, k, v, mask=None, dropout=0.0, is_causal=False, enable_gqa=False):
    """Does what F.scaled_dot_product_attention does with these arguments.

    q: (B, nh, T, hs). k, v: (B, nh, S, hs), or fewer heads with enable_gqa. mask: bool, or numbers
    that are added to the scores; it broadcasts to (B, nh, T, S). Returns (B, nh, T, hs). Nothing is
    timed at run time: the choice depends on device, dtype and shape alone, so a run and its resume
    make the same one.
    """
    is_short = 1 < q.size(2) and k.size(2) <= SHORT
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and is_short:
        return attention_in_products(q, k, v, mask, dropout, is_causal)
    if mask is not None and q.is_cuda:
        with sdpa_kernel(NOT_CUDNN):
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, enable_gqa=enable_gqa)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, enable_gqa=enable_gqa)


def attention_in_products(q, k, v, mask, dropout, is_causal):
    """Computes softmax(q kᵀ / √hs) v. The scores are float32, as in PyTorch's kernel."""
    B, nh, T, hs = q.shape
    S = k.size(2)
    if k.size(1) < nh:  # with enable_gqa
        k = k.repeat_interleave(nh // k.size(1), dim=1)  # (B, nh, S, hs)
        v = v.repeat_interleave(nh // v.size(1), dim=1)
    if is_causal:
        mask = torch.ones(T, S, dtype=torch.bool).tril()
    bias = torch.zeros(1, 1, 1)
    if mask is not None:
        if mask.dtype == torch.bool:
            bias = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
        else:
            bias = mask.float()
        if mask.dim() > 2:
            bias = bias.expand(B, nh, T, S).flatten(0, 1)  # (B nh, T, S)
    q, k = q.float().flatten(0, 1), k.float().flatten(0, 1)  # (B nh, T or S, hs)
    scores = torch.baddbmm(bias, q, k.mT, alpha=1 / math.sqrt(hs))  # (B nh, T, S)
    weights = scores.softmax(dim=-1).to(v.dtype)
    if dropout > 0:
        weights = F.dropout(weights, dropout)
    return (weights @ v.flatten(0, 1)).view(B, nh, T, hs)
