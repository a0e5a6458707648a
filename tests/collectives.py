"""Counts what a step of two micro-steps in bfloat16 sends.

Prints {"collective dtype elements": count} as JSON.
"""

import contextlib
import json
import sys
from collections import Counter
from itertools import repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from model import GPTConfig  # noqa: E402
from plaingpt.checkpoint import on_meta  # noqa: E402
from plaingpt.device import setup, shut_down  # noqa: E402
from train_gpt2 import TrainConfig, prepare, train_step  # noqa: E402

counts = Counter()


class Count(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor handles it, then calls its collectives
        namespace, _, name = str(function).rpartition(".")[0].partition(".")
        if "c10d" in namespace and "wait" not in name and "wrap" not in name:
            sent = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            counts[f"{name.strip('_').replace('_', '')} {str(sent.dtype)[6:]} {sent.numel()}"] += 1
        return function(*args, **(kwargs or {}))


parallel, tp, pp = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rank, world_size, device = setup("cpu")
config = TrainConfig(batch_size=2, min_lr=0.0, parallel=parallel, tp=tp, pp=pp)
model, weights = on_meta(GPTConfig(n_layer=3, n_head=2, n_embd=64, block_size=32, vocab_size=256), None)
trainer = prepare(model, config, device, torch.bfloat16, weights)
rows, micro_steps = (4, 1) if pp > 1 else (2, 2)  # a pipeline gets both micro-batches at once
x = torch.zeros((rows, 32), dtype=torch.long)  # (B, T)
for counting in (False, True):  # do not count the first step, which includes the setup
    with Count() if counting else contextlib.nullcontext():
        train_step(trainer, repeat((x, x)), micro_steps, 1.0)
if rank == 0:
    print(json.dumps(counts))
shut_down(world_size)
