"""train_gpt2.py, or with --large train_large.py.

At the end, each process prints the memory that it took, in bytes per parameter.

Prints "MEMORY", the maximum while the model got its weights, and the maximum of the whole run. Both
are above what the process had before.
"""

import re
from pathlib import Path

from plaingpt.errors import run_program

# These imports come before memory is measured.
import torch._dynamo  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
from either import choose_main

import train_gpt2
from train_gpt2 import Training

make_training, numbers = Training.__init__, {}
configure_optimizers = train_gpt2.GPT.configure_optimizers  # is called when there are weights


def memory(name):
    """A number of /proc/self/status, in bytes. Not ru_maxrss, which includes the parent process."""
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
