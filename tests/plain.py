"""A reference for tests: the simplest training loop, which is not optimized for speed."""

import torch
import torch.nn.functional as F
from conftest import fresh, text_batch

from train_gpt2 import TrainConfig, get_lr


def text_step(step):
    return text_batch("train", 16, position=16 * step)


def plain_curve(config, steps, batch=text_step):
    """Trains in eager mode and float32. Returns [(loss, gradient norm)], one pair for each step.

    The loop computes all logits at once, and fuses nothing. The loss ignores targets of -100.
    batch: a function that returns the x and y of a step, (B, T) each.
    """
    model, curve = fresh(config), []
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    other = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [dict(params=decayed, weight_decay=0.1), dict(params=other, weight_decay=0.0)],
        betas=(0.9, 0.95),
        foreach=False,
    )
    rates = TrainConfig(max_lr=4e-3, min_lr=4e-4, warmup_steps=2, max_steps=steps)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, rates)
        x, y = batch(step)
        logits = F.linear(model.hidden(x), model.lm_head.weight)
        loss = F.cross_entropy(logits[y != -100], y[y != -100])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        curve.append((loss.item(), norm.item()))
        optimizer.step()
    return curve
