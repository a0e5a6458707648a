"""Attention with a cache of keys and values, for generation.

To write a text, a model reads one new token after another. The keys and values of earlier tokens do
not change, so generate.py keeps them in a cache.

Check it with: python lesson/check.py 12
"""

import math

import torch


def attention_with_cache(q, k, v, cache):
    """Returns (y, cache): the output of the new tokens, (B, n, C), and the cache for the next call.

    q, k, v: (B, n, C) each, of the n tokens that are new in this call. There is one head, so divide
    the scores by sqrt(C). cache: None in the first call, then the cache that the last call has
    returned. Its form is your choice. y must equal what attention without a cache computes at the
    positions of the new tokens: each new token sees all tokens of earlier calls, and of this call
    the tokens up to itself.

    Example: the first call has a prompt of 4 tokens, and the result is (B, 4, C). The second call
    has 1 token, which sees 5. The third one may have 2 tokens: the first of them sees 6 tokens, and
    the second one sees 7.
    """
    raise NotImplementedError
