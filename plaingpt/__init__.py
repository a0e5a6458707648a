"""The parts of the programs. A folder imports only the folders before it in this list:

ops, base      what the model and a step compute; errors, flags, files, source code
distributed    processes, devices, memory
data           documents, tokenizers, shards, data sets, their order
weights        checkpoints, and weights of other programs
scoring        benchmarks: examples, rows of tokens, scores
               the files in no folder: settings, log, TensorBoard and W&B, batch sizes,
               and the check of GPT.loss
look           what a model does with a text, and the page that shows it
lab            experiments, which compare two programs; no other folder imports lab
large          models that are split over processes; no other folder imports large
"""

# numpy is imported before torch, because torch ignores Ctrl-C while importing numpy itself.
import numpy  # noqa: F401
