"""train_gpt2.py. At the end each process prints the memory that it took, in bytes per parameter.

Prints "MEMORY", the maximum while the model got its weights, and the maximum of the whole run. Both
are above what the process had before.
"""

import re
from pathlib import Path

from plaingpt.base.errors import run_program
from plaingpt.weights.saver import Saver

import torch._dynamo  # noqa: F401  before memory is measured

import train_gpt2

load_weights, numbers = train_gpt2.load_weights, {}


def memory(name):
    """A number of /proc/self/status, in bytes. Not ru_maxrss, which includes the parent process."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def measured_load_weights(model, *args):
    parameters = sum(p.numel() for p in model.parameters())
    numbers.update(before=memory("VmRSS"), parameters=parameters)
    load_weights(model, *args)
    numbers["start"] = memory("VmHWM")


train_gpt2.load_weights = measured_load_weights
Saver.save = lambda *args: None  # saves time
run_program(train_gpt2.main)
taken = [most - numbers["before"] for most in (numbers["start"], memory("VmHWM"))]
print("MEMORY", *(size / numbers["parameters"] for size in taken))
