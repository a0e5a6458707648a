"""Compiles a model under DDP with small buckets, and checks what crosses from part to part."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from model import GPT, GPTConfig

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
dist._DEFAULT_FIRST_BUCKET_BYTES = 1000  # DDP's first bucket
B, T, C = 2, 32, 64
model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=C, block_size=T, vocab_size=256))
parts = []


def backend(graph, inputs):
    parts.append([t.dtype for t in inputs if isinstance(t, torch.Tensor) and t.shape == (B, T, C)])
    return graph


compiled = DDP(torch.compile(model, backend=backend, dynamic=False), bucket_cap_mb=0.02)
x = torch.zeros((B, T), dtype=torch.long)
with torch.autocast("cpu", torch.bfloat16):
    compiled(x, x)[1].backward()
assert len(parts) > 4, parts
assert all(part.count(torch.float32) <= 1 for part in parts), parts
print(parts)
