"""Builds a trainer with FSDP. Each process prints how much memory that took at most.

Usage: start.py ddp|fsdp. Prints "{rank} {bytes per parameter}".
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch  # noqa: E402

import plaingpt.parallel  # noqa: E402, F401  before memory is measured
from model import GPTConfig  # noqa: E402
from plaingpt.checkpoint import on_meta  # noqa: E402
from plaingpt.device import setup, shut_down  # noqa: E402
from train_gpt2 import TrainConfig, prepare  # noqa: E402


def memory(name):
    """A number of /proc/self/status, in bytes."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


config = TrainConfig(parallel=sys.argv[1])
rank, world_size, device = setup("cpu", keep_memory=False)
model, weights = on_meta(GPTConfig(n_layer=16, n_head=6, n_embd=384, vocab_size=256, block_size=32), None)
n = sum(p.numel() for p in model.parameters())
torch.distributed.barrier()
before = memory("VmRSS")
trainer = prepare(model, config, device, torch.float32, weights)
print(rank, (memory("VmHWM") - before) / n)
shut_down(world_size)
