"""Runs train_gpt2.py, or train_large.py with --large, and measures the memory of each process.

At the end, each process prints "MEMORY" and two numbers, in bytes per parameter: the largest memory
until the model had its weights, and the largest memory of the whole run. Both numbers exclude the
memory that the process used before it began to build the model.
"""

import re
from pathlib import Path

from plaingpt.errors import run_program

# These modules are imported before the first measurement, so that both numbers exclude them.
import torch._dynamo  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
from either import choose_main

import train_gpt2
from train_gpt2 import Training

make_training, numbers = Training.__init__, {}
# The trainer calls this method after it has loaded the weights.
configure_optimizers = train_gpt2.GPT.configure_optimizers


def memory(name):
    """Returns a field of /proc/self/status, in bytes.

    The field ru_maxrss of getrusage would include memory of the parent process.
    """
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def measured_make_training(training, *args):
    numbers["before"] = memory("VmRSS")
    make_training(training, *args)
    numbers["parameters"] = training.count_parameters()


def measured_configure_optimizers(*args):
    numbers["start"] = memory("VmHWM")
    return configure_optimizers(*args)


Training.__init__ = measured_make_training
train_gpt2.GPT.configure_optimizers = measured_configure_optimizers
train_gpt2.save = lambda *args: None  # saves time
run_program(choose_main())
taken = [most - numbers["before"] for most in (numbers["start"], memory("VmHWM"))]
print("MEMORY", *(size / numbers["parameters"] for size in taken))
