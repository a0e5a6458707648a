"""Runs train_gpt2.py with Ctrl-C, or a bad gradient, at a fixed moment: faulty.py MOMENT FLAGS…"""

import math
import os
import signal
import sys

from plaingpt.base.errors import run_program

import train_gpt2

MOMENTS = {  # the function during whose n-th call Ctrl-C is pressed
    "start": (train_gpt2.Training, "build", 1),
    "step": (train_gpt2.GPT, "forward", 6),  # a step of TINY has two micro-batches
    "evaluation": (train_gpt2, "estimate_loss", 2),
    "save": (os, "fsync", 4),  # after log.txt, run.json and the first save
    "gradient": (train_gpt2.Training, "clip", 3),  # gets one that is not finite
}
owner, name, n = MOMENTS[sys.argv.pop(1)]
function, calls = getattr(owner, name), 0


def interrupted(*args, **kwargs):
    global calls
    calls += 1
    if calls == n and name == "clip":
        args[0].raw_model.transformer.ln_f.bias.grad.fill_(math.nan)
    elif calls == n:
        os.kill(os.getpid(), signal.SIGINT)
    return function(*args, **kwargs)


setattr(owner, name, interrupted)
run_program(train_gpt2.main)
