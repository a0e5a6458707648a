"""The parts of the programs.

The files of this folder are the core: what train_gpt2.py and most other programs import. Each
subfolder is a room, which the core does not import:

scoring  benchmarks
large    models that are split over processes, for train_large.py
lab      comparisons of two programs, for experiment.py
look     what a model does with a text, for look.py
"""

# numpy is imported before torch, because torch ignores Ctrl-C while importing numpy itself.
import numpy  # noqa: F401
