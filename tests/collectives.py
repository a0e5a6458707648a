"""Counts what a step of two micro-steps in bfloat16 sends: collectives.py ddp|fsdp TP PP.

Prints {"collective dtype elements": count} as JSON.
"""

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from bench import make_step  # noqa: E402
from model import GPTConfig  # noqa: E402
from plaingpt.device import start  # noqa: E402
from train_gpt2 import TrainConfig, train_step  # noqa: E402

counts = Counter()


class Count(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor handles it, then calls its collectives
        namespace, _, name = str(function).rpartition(".")[0].partition(".")
        if "c10d" in namespace and "wait" not in name and "wrap" not in name:
            sent = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            counts[f"{name.replace('_', '')} {str(sent.dtype)[6:]} {sent.numel()}"] += 1
        return function(*args, **(kwargs or {}))


parallel, tp, pp = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
run = start("cpu", "bfloat16", tp, pp)
config = TrainConfig(batch_size=2, parallel=parallel, tp=tp, pp=pp)
shape = GPTConfig(n_layer=3, n_head=2, n_embd=64, block_size=32, vocab_size=256)
step = make_step("plaingpt", shape, config, run)
x = torch.zeros((4, 32), dtype=torch.long)  # (B, T)
batches = [(x, x)] if pp > 1 else [(x[:2], x[:2])] * 2  # a pipeline splits its batch by itself
for counting in (False, True):  # do not count the first step, which includes the setup
    with Count() if counting else contextlib.nullcontext():
        train_step(*step, batches, 1.0, run)
if run.rank == 0:
    print(json.dumps(counts))
run.barrier()
