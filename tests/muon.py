"""Two steps of Muon under DDP. Each process prints the FLOPs of its second optimizer step."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from model import GPTConfig  # noqa: E402
from plaingpt.checkpoint import on_meta  # noqa: E402
from plaingpt.device import setup, shut_down  # noqa: E402
from train_gpt2 import TrainConfig, prepare  # noqa: E402

rank, world_size, device = setup("cpu")
model, weights = on_meta(GPTConfig(n_layer=4, n_head=2, n_embd=64, block_size=32, vocab_size=256), None)
trainer = prepare(model, TrainConfig(optimizer="muon"), device, torch.float32, weights)
x = torch.zeros((2, 32), dtype=torch.long)  # (B, T)
for _ in range(2):
    trainer.forward_backward(x, x, 1, last=True)
    with FlopCounterMode(display=False) as counter:
        trainer.optimizers[0].step()
    for optimizer in trainer.optimizers:
        optimizer.zero_grad()
print(counter.get_total_flops())
shut_down(world_size)
