"""Runs train_gpt2.py and injects a fault at a fixed moment: faulty.py FAULT FLAGS…"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_gpt2  # noqa: E402
from plaingpt import (
    checkpoint,  # noqa: E402
    cli,  # noqa: E402
)

calls = 0


def nth(n, function, then):
    """The function, but its n-th call runs `then` first."""
    def wrapped(*args, **kwargs):
        global calls
        calls += 1
        if calls == n:
            then(*args)
        return function(*args, **kwargs)

    return wrapped


def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)


def jump(trainer, _):
    for p in trainer.model.parameters():
        p.grad *= 1000


fault, Trainer = sys.argv.pop(1), train_gpt2.Trainer
if fault == "signal in a step":  # a step has four micro-steps
    Trainer.forward_backward = nth(10, Trainer.forward_backward, terminate)
elif fault == "signal in an evaluation":
    train_gpt2.estimate_loss = nth(2, train_gpt2.estimate_loss, terminate)
elif fault == "signal in a save":
    checkpoint.os.fsync = nth(2, os.fsync, terminate)
elif fault == "jump":
    Trainer.clip = nth(31, Trainer.clip, jump)
elif fault == "clock":
    now, ticks = time.time(), iter(range(10**9))
    time.time = lambda: now - 3600 * next(ticks)
else:
    sys.exit(f"no such fault: {fault}")
cli.run(train_gpt2.main)
