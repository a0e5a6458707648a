"""Runs train_gpt2.py and sends it SIGTERM at a fixed moment: faulty.py MOMENT FLAGS…"""

import os
import signal
import sys

import train_gpt2
from plaingpt.cli import run_program

MOMENTS = {  # the function during whose n-th call the signal arrives
    "step": (train_gpt2.GPT, "forward", 10),  # a step of TINY has four micro-batches
    "evaluation": (train_gpt2, "estimate_loss", 2),
    "save": (os, "fsync", 4),  # after log.txt, run.json and the first save
}
owner, name, n = MOMENTS[sys.argv.pop(1)]
function, calls = getattr(owner, name), 0


def interrupted(*args, **kwargs):
    global calls
    calls += 1
    if calls == n:
        os.kill(os.getpid(), signal.SIGTERM)
    return function(*args, **kwargs)


setattr(owner, name, interrupted)
run_program(train_gpt2.main)
