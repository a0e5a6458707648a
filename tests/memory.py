"""train_gpt2.py. At the end each process prints the memory that it took, in bytes per parameter.

Prints "MEMORY", the maximum while the model was built and split, and the maximum of the whole run.
Both are above what the process had before.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch._dynamo  # noqa: E402, F401  before memory is measured

import plaingpt.parallel  # noqa: E402, F401
import train_gpt2  # noqa: E402
from model import GPTConfig  # noqa: E402
from plaingpt import checkpoint  # noqa: E402
from plaingpt.cli import run  # noqa: E402

prepare, numbers = train_gpt2.prepare, {}


def memory(name):
    """A number of /proc/self/status, in bytes. Not ru_maxrss, which includes the parent process."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def measured_prepare(model, *args):
    small, weights = checkpoint.on_meta(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=8))
    prepare(small, *args[:-1], weights)  # loads the code that prepare runs
    torch.distributed.barrier()
    numbers.update(before=memory("VmRSS"), parameters=sum(p.numel() for p in model.parameters()))
    trainer = prepare(model, *args)
    numbers["start"] = memory("VmHWM")
    return trainer


train_gpt2.prepare = measured_prepare
checkpoint.write_checkpoint = lambda *args: None  # saves time
run(train_gpt2.main)
print("MEMORY", *((most - numbers["before"]) / numbers["parameters"] for most in (numbers["start"], memory("VmHWM"))))
