"""Calls the methods of a GPT that is split over processes. Usage: methods.py TP PP FILE.

The process with rank R saves its results to FILE.R. A single process does not split the GPT.
"""

import sys

from plaingpt.machine import read_ranks
from plaingpt.sampling import generate_tokens

import torch

from model import GPTConfig
from train_gpt2 import Training, train_step
from train_large import LargeConfig, choose_training

tp, pp = int(sys.argv[1]), int(sys.argv[2])
config = LargeConfig(
    batch_size=2, tp=tp, pp=pp, max_lr=0.01, grad_clip=0.5, device="cpu", dtype="float32"
)
rank, _, world_size = read_ranks()
training_class = choose_training(config) if world_size > 1 else Training
process = training_class.setup(config)
shape = GPTConfig(n_layer=3, n_head=2, n_embd=32, block_size=16, vocab_size=97)
training = training_class(shape, config, process)
model = training.raw_model
torch.manual_seed(1)
x, y = torch.randint(97, (2, 4, 16))  # (B, T) each
micro_batches = [*zip(x.split(1), y.split(1))]
found = {}
for step in range(2):  # the second iteration uses the weights after the first training step
    model.eval()
    with torch.no_grad():
        h = model.hidden(x)  # (B, T, C)
        found[step] = dict(
            hidden=h,
            logits=model.logits(h[:, -1]),
            loss=model.loss(h, y),
            losses=model.loss(h, y, reduction="none"),
            greedy=[*generate_tokens(model, x, 9, temperature=0)],
            drawn=[*generate_tokens(model, x[:, :3], 9, top_k=9, top_p=0.9, seed=2)],
        )
    model.train()
    metrics = train_step(training, micro_batches)
    found[step]["trained"] = metrics["train"], metrics["norm"]
torch.save(found, f"{sys.argv[3]}.{rank}")
process.barrier()
