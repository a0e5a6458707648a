"""Takes two steps of Muon with DDP. Each process prints its number of FLOPs in the second step."""

from plaingpt.process import setup

import torch
from torch.utils.flop_counter import FlopCounterMode

from model import GPTConfig
from train_gpt2 import TrainConfig, Training

process = setup("cpu", "float32")
shape = GPTConfig(n_layer=4, n_head=2, n_embd=64, block_size=32, vocab_size=256)
training = Training(shape, TrainConfig(optimizer="muon"), process)
model, (muon, _) = training.model, training.optimizers
x = torch.zeros((2, 32), dtype=torch.long)  # (B, T)
for _ in range(2):
    model(x, x)[1].backward()
    with FlopCounterMode(display=False) as counter:
        muon.step()
    model.zero_grad()
print(counter.get_total_flops())
process.barrier()
