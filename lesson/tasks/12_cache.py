"""Attention with a KV cache, a cache of keys and values, for generation.

To generate text, a model reads one new token at a time. The keys and values of earlier tokens do
not change, so generate.py keeps these keys and values in a cache.

Check it with: python lesson/check.py 12
"""

import math

import torch


def attention_with_cache(q, k, v, cache):
    """Returns (y, cache): the output of the new tokens, (B, n, C), and the cache for the next call.

    q, k, v: (B, n, C) each, computed from the n new tokens of this call. There is one head, so
    divide the scores by sqrt(C). cache: None in the first call, and in later calls the cache that
    the previous call returned. You choose what a cache contains. y must equal the output of
    attention without a cache at the positions of the new tokens. Each new token attends to all
    tokens of earlier calls, to the new tokens before it, and to itself.

    Example: the first call gets a prompt of 4 tokens, and y has the shape (B, 4, C). The second
    call gets 1 token, which attends to 5 tokens. If the third call gets 2 tokens, the first of
    these tokens attends to 6 tokens, and the second token attends to 7.
    """
    raise NotImplementedError


if __name__ == "__main__":
    print(__doc__)
