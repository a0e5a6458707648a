"""The parts of the programs, in rooms. A room imports only those that stand before it in this list:

ops, base      what the model and a step compute; flags, errors, files
distributed    processes, devices, memory, models that are split over processes
data           texts, tokens, shards, tokenizers
weights        checkpoints, and where a run starts
scoring        benchmarks
run            the configuration and the log of a training run
look           what a model does with a text, and the page that shows it
"""

import os

# This import comes before torch, which ignores Ctrl-C while it imports numpy itself.
import numpy  # noqa: F401

# Waiting threads spin by default. When another program uses the cores, that makes a step several
# times slower, so let them sleep early. torch reads this when it is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
