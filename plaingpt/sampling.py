"""Text generation: a KV cache, and sampling of tokens."""

import contextlib
import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# All attention kernels of PyTorch except cuDNN's, which prepares a plan for each new shape. With a
# mask and T % 128 == 64, cuDNN's kernel also computes NaN gradients (pytorch/pytorch#196678).
NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextlib.contextmanager
def attention_for_many_shapes():
    """Context manager in which a model runs in eager mode, and without cuDNN's attention.

    Generation and benchmarks use this context manager, because their forward passes have many
    different shapes. For each new shape, torch.compile would compile the model again, and cuDNN
    would prepare a new plan.
    """
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(NOT_CUDNN):
        yield


class KVCache:
    """The keys and values of one block for all tokens so far. Memory is allocated only once."""

    def __init__(self, max_length):
        self.max_length = max_length
        self.length = 0
        self.buffers = None  # keys and values: (B, nh, max_length, hs) each

    def extend(self, k, v):
        """Appends the keys and values of new tokens. k, v: (B, nh, T, hs).

        Returns [keys, values] of all tokens so far: (B, nh, length, hs) each.
        """
        if self.buffers is None:
            B, nh, _, hs = k.shape
            self.buffers = [k.new_empty(B, nh, self.max_length, hs) for _ in range(2)]
        start = self.length
        self.length += k.size(2)
        for buffer, new in zip(self.buffers, (k, v)):
            buffer[:, :, start : self.length] = new
        return [buffer[:, :, : self.length] for buffer in self.buffers]


def sample(logits, generator, temperature=1.0, top_k=0, top_p=1.0):
    """Samples one token id from each row of logits: (B, vocab_size) -> (B, 1).

    temperature: divides the logits; 0 selects the most likely token. top_k: how many of the most
    likely tokens to keep; 0 keeps all tokens. top_p: keeps the most likely tokens until the sum of
    their probabilities reaches top_p (Holtzman et al. 2020, arXiv:1904.09751).
    """
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    # On a GPU, a NaN or infinity would make torch.multinomial abort the process.
    logits = (logits / max(temperature, 1e-30)).nan_to_num()
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, [-1]]  # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p < 1:
        probs, order = logits.softmax(dim=-1).sort(descending=True)  # (B, vocab_size)
        # Drops a token if the probabilities of likelier tokens add up to top_p or more. The
        # likeliest token always stays.
        drop = probs.cumsum(dim=-1) - probs >= top_p
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1, generator=generator)


@torch.no_grad()
def generate_tokens(model, idx, max_new_tokens, seed=0, **options):
    """Samples max_new_tokens ids after each row of idx. Yields one id per row at a time, (B, 1).

    idx: (B, T). options: temperature, top_k and top_p, as in sample().
    """
    generator = torch.Generator(device=idx.device).manual_seed(seed)
    T_max = model.config.block_size
    length = min(idx.size(1) + max_new_tokens, T_max)
    cache = [KVCache(length) for _ in range(model.config.n_layer)]
    new = idx  # (B, T): the ids whose keys and values are not in the cache
    for _ in range(max_new_tokens):
        if idx.size(1) > T_max:  # the context slides: all positions change, so the cache is invalid
            cache = None
            new = idx[:, -T_max:]  # (B, T_max)
        logits = model.logits(model.hidden(new, cache)[:, -1]).float()  # (B, vocab_size)
        new = sample(logits, generator, **options)  # (B, 1)
        idx = torch.cat([idx, new], dim=1)  # (B, T+1)
        yield new
