"""What generation needs beside the model: the cache of keys and values, and drawing a token."""

import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def attention_for_many_shapes():
    """Context without cuDNN's attention, which would prepare a plan for every new shape."""
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class KVCache:
    """The keys and values of the tokens so far, of one block, in memory allocated once."""

    def __init__(self, max_length):
        self.max_length = max_length
        self.length = 0
        self.buffers = None  # keys and values: (B, nh, max_length, hs) each

    def extend(self, k, v):
        """Adds those of new tokens, (B, nh, T, hs). Returns all: (B, nh, length, hs) each."""
        if self.buffers is None:
            B, nh, _, hs = k.shape
            self.buffers = [k.new_empty(B, nh, self.max_length, hs) for _ in range(2)]
        start, self.length = self.length, self.length + k.size(2)
        for buffer, new in zip(self.buffers, (k, v)):
            buffer[:, :, start : self.length] = new
        return [buffer[:, :, : self.length] for buffer in self.buffers]


def sample(logits, temperature, top_k, top_p, generator):
    """Draws one id for each row: (B, vocab_size) -> (B, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    # NaN or infinity would end the process on a GPU.
    logits = logits.nan_to_num() / max(temperature, 1e-30)
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, [-1]]  # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p < 1:
        probs, order = logits.softmax(dim=-1).sort(descending=True)  # (B, vocab_size)
        # A token is dropped if the tokens before it already reach p. The first one always stays.
        drop = probs.cumsum(dim=-1) - probs >= top_p
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1, generator=generator)
