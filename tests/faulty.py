"""Runs train_gpt2.py, or train_large.py with --large, and causes a fault at a fixed moment.

Usage: faulty.py MOMENT FLAGS. The fault is Ctrl-C, or a gradient that is NaN.
"""

import math
import os
import signal
import sys

from plaingpt.errors import run_program

from either import choose_main

import train_gpt2
import train_large

main = choose_main()
# {moment: (object, name, n)}. The fault happens in the n-th call of the object's function `name`.
MOMENTS = {
    "start": (train_gpt2.Training, "build", 1),
    "step": (train_gpt2.GPT, "forward", 6),  # a step of TINY has two micro-batches
    "evaluation": (train_gpt2, "estimate_loss", 2),
    # The first three calls write log.txt, run.json and the first checkpoint.
    "save": (os, "fsync", 4),
    # The fault makes a gradient of one block NaN. With --pp, only one stage contains this block.
    "gradient": (train_gpt2.Training, "clip", 3),
    "sharded gradient": (train_large.ShardedTraining, "clip", 3),
}
owner, name, n = MOMENTS[sys.argv.pop(1)]
function, calls = getattr(owner, name), 0


def interrupted(*args, **kwargs):
    global calls
    calls += 1
    if calls == n and name == "clip":  # clip computes the gradient norm, so it must find the NaN
        for key, p in args[0].raw_model.named_parameters():
            if key == "transformer.h.1.ln_1.bias":
                p.grad.fill_(math.nan)
    elif calls == n:
        os.kill(os.getpid(), signal.SIGINT)
    return function(*args, **kwargs)


setattr(owner, name, interrupted)
run_program(main)
