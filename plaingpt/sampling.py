"""What generation needs beside the model: the cache of keys and values, and drawing a token."""

import math

import torch
import torch.nn.functional as F


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


def pad_mask(padding, start, T):
    """Positions and mask of T new tokens after `start` tokens, for rows that begin with padding.

    padding: (B), the ids at the start of each row that are no text. Returns pos (B, T) and a bool
    mask (B, 1, T, start + T). A token attends to earlier tokens of the text, and to itself.
    """
    columns = torch.arange(start + T, device=padding.device)  # (start + T)
    own = columns[start:, None]  # (T, 1)
    pos = (own.T - padding[:, None]).clamp(min=0)  # (B, T)
    text = columns >= padding[:, None, None]  # (B, 1, start + T)
    mask = (text & (columns <= own)) | (columns == own)  # (B, T, start + T)
    return pos, mask[:, None]


def sample(logits, temperature, top_k, top_p, generator):
    """Draws one id for each row: (B, vocab_size) -> (B, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.nan_to_num() / temperature  # NaN would end the process on a GPU
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, [-1]]  # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p < 1:
        probs, order = F.softmax(logits, dim=-1).sort(descending=True)  # (B, vocab_size)
        # A token is dropped if the tokens before it already reach p. The first one always stays.
        drop = probs.cumsum(dim=-1) - probs >= top_p
        drop[:, 0] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -math.inf)
    return torch.multinomial(F.softmax(logits, dim=-1), num_samples=1, generator=generator)
