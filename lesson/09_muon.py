"""Lesson 9: Muon. It makes each update of a matrix equally strong in all directions.

With max_steps = 2700 and warmup_steps = 100, this trains the baby, the model of README.md.
"""

import math
import os
import time
from glob import glob

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

data = "input.txt"  # a text, or a directory of shards
vocab_size = 256  # a token is a byte; set it to 50257 for shards of GPT-2's tokens
block_size = 64  # tokens in a sequence, T
n_layer = 2  # blocks
n_head = 2  # attention heads, nh: a position can look at two places at a time
n_embd = 128  # channels, C
batch_size = 4  # sequences in a micro-batch, B: on a GPU, as many as fit into its memory
total_batch_size = 1024  # tokens in a step, of all processes
max_steps = 300
max_lr = 8e-3  # the highest learning rate
min_lr = 0.0
warmup_steps = 50
weight_decay = 0.1
seed = 1337
# torchrun starts this file once for each process, and numbers them: this number is the rank.
rank = int(os.environ.get("RANK", 0))
world_size = int(os.environ.get("WORLD_SIZE", 1))  # the number of processes
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))  # its number on this machine
if world_size > 1:
    # The processes find each other. nccl sends tensors between GPUs, gloo between CPUs.
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
# On a GPU, matrix products are several times as fast in bfloat16. It has 2 to 3 decimal digits,
# so parameters, LayerNorms and the loss stay in float32. autocast makes this choice.
autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def load_tokens(split):
    """Reads the tokens of "train" or "val": the shards of this name, or a part of the text."""
    shards = sorted(glob(f"{data}/*_{split}_*.npy"))  # of uint16
    if shards:
        return torch.from_numpy(np.concatenate([np.load(shard) for shard in shards]))
    tokens = torch.from_numpy(np.fromfile(data, dtype=np.uint8))
    cut = len(tokens) * 9 // 10
    return tokens[:cut] if split == "train" else tokens[cut:]


class DataLoaderLite:
    """The stream of sequences of a run. Sequence j is the T+1 tokens from jT to jT+T."""

    def __init__(self, tokens, shuffle):
        self.tokens = tokens
        self.length = (len(tokens) - 1) // block_size  # in sequences
        self.order = np.arange(self.length)
        if shuffle:
            np.random.default_rng(seed).shuffle(self.order)

    def sequence(self, position):
        """position: the number of a sequence in the run, from 0. Returns its T+1 tokens."""
        j = self.order[position % self.length]
        return self.tokens[j * block_size : (j + 1) * block_size + 1]  # (T+1)

    def batch(self, position, B):
        """Reads B sequences from a position on -> x, y: (B, T)."""
        rows = torch.stack([self.sequence(position + b) for b in range(B)])  # (B, T+1)
        rows = rows.long().to(device)  # which holds a batch, not all tokens
        return rows[:, :-1], rows[:, 1:]  # the target of each token is the token after it


class Muon(torch.optim.Optimizer):
    """SGD with momentum, whose updates are nearly orthogonal matrices (Jordan et al. 2024)."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups  # there is one
        for p in group["params"]:
            if not self.state[p]:  # a dict of the Optimizer, which is empty in the first step
                self.state[p]["momentum"] = torch.zeros_like(p)
            # a.lerp(b, w) is a + w (b - a). momentum is a mean of recent gradients. Nesterov's idea
            # is to give the newest one a little more weight.
            momentum = self.state[p]["momentum"].lerp_(p.grad, 0.05)
            update = orthogonalize(p.grad.lerp(momentum, 0.95))
            p.mul_(1 - group["lr"] * weight_decay)
            p.add_(update, alpha=-0.2 * group["lr"])  # about as far as AdamW (Liu et al. 2025)


def orthogonalize(x):
    """Makes a matrix nearly orthogonal, so that it stretches all directions equally.

    A matrix stretches some directions more than others. These directions are its singular vectors,
    and the factors are its singular values. This keeps the vectors, and brings the values near 1.
    """
    if x.size(0) == 3 * x.size(1):  # c_attn: query, key and value are three matrices
        return torch.cat([orthogonalize(matrix) for matrix in x.chunk(3)])
    if x.size(0) > x.size(1):
        return orthogonalize(x.T).T  # so that gram is the smaller square
    x = x / x.norm().clamp(min=1e-7)  # the norm is at least the largest singular value
    for _ in range(5):
        gram = x @ x.T  # (rows, rows)
        # gram has the squares s^2 of the singular values, so gram @ x has s^3. So here, s becomes
        # 3.4445 s - 4.7750 s^3 + 2.0315 s^5. Jordan et al. chose these numbers so that five rounds
        # bring s between 0 and 1 near 1.
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x  # (rows, columns)
    # The squares of all r x c numbers have the sum of those of r singular values: 1 / c, now 1.
    return x * math.sqrt(x.size(1))


class CausalSelfAttention(nn.Module):
    """Each position takes a weighted mean of the values at this position and those before it.

    Its query says what it looks for, a key says what a position offers, a value is what it gives.
    """

    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)  # makes query, key and value of all heads
        self.c_proj = nn.Linear(n_embd, n_embd)  # mixes the heads

    def forward(self, x):
        B, T, C = x.size()
        qkv = self.c_attn(x).chunk(3, dim=2)  # a tuple of three (B, T, C)
        # (B, nh, T, hs) each. A head has hs = C / nh channels of q, k and v, made from all of x.
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in qkv)
        # Flash attention does the same: is_causal=True is the mask, and the root of hs is inside.
        # It works in tiles that fit into a GPU's small, fast memory. So the (T, T) scores are never
        # written to its large, slow memory.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
        y = y.transpose(1, 2).flatten(2)  # (B, T, C)
        return self.c_proj(y)


class MLP(nn.Module):
    """Computes with the channels of each position separately."""

    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)  # GPT-2 chose 4
        # This is like max(0, x), without the corner. GPT-2 computes it with a tanh.
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        x = self.gelu(self.c_fc(x))  # (B, T, 4C)
        return self.c_proj(x)  # (B, T, C)


class Block(nn.Module):
    """Attention and MLP. A LayerNorm comes before each.

    It gives the channels of each position mean 0 and variance 1, and then scales and shifts each
    channel by learned numbers.
    """

    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # (B, T, C)


class GPT(nn.Module):
    """Gives a score to each token that may come next. Such scores are called logits."""

    def __init__(self):
        super().__init__()
        # These are the names in GPT-2's files: wte for token embedding, wpe for position embedding.
        self.wte = nn.Embedding(vocab_size, n_embd)  # a vector for each token
        self.wpe = nn.Embedding(block_size, n_embd)  # one for each position, so that order matters
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])  # GPT-2 calls the blocks h
        self.ln_f = nn.LayerNorm(n_embd)  # the final one, because the blocks make x larger
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # a token's vector is also its row in lm_head
        self.init_weights()

    def init_weights(self):
        """Draws the first weights as GPT-2 does. The weights of LayerNorms stay 1."""
        torch.manual_seed(seed)  # here, because making the layers also took random numbers
        for name, p in self.named_parameters():  # the shared matrix comes once
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif name.endswith("c_proj.weight"):
                # The blocks add to the residual stream 2 n_layer times, and variances add up. With
                # the root, the variance of the sum does not grow with n_layer.
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer))
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02)  # OpenAI's, for 768 channels: 128 need lesson 5

    def configure_optimizers(self):
        """Muon for the matrices of the blocks, AdamW for vectors and embeddings, tables of rows."""
        of_muon = [p for p in self.h.parameters() if p.dim() == 2]
        matrices = [self.wte.weight, self.wpe.weight]
        vectors = [p for p in self.parameters() if p.dim() == 1]  # LayerNorms should not go to 0
        groups = [
            dict(params=matrices, weight_decay=weight_decay),
            dict(params=vectors, weight_decay=0.0),
        ]
        # AdamW divides a mean of recent gradients by the root of a mean of their squares. betas say
        # how far these means go back; eps avoids a division by 0. fused: one kernel does it all.
        adamw = torch.optim.AdamW(groups, lr=max_lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
        return [Muon(of_muon, lr=max_lr), adamw]

    def forward(self, idx, targets=None):
        """idx, targets: (B, T) token ids. Returns (logits, None), or (None, loss) with targets."""
        pos = torch.arange(idx.size(1), device=idx.device)  # (T)
        x = self.wte(idx) + self.wpe(pos)  # (B, T, C)
        for block in self.h:
            x = block(x)  # (B, T, C)
        logits = self.lm_head(self.ln_f(x))  # (B, T, vocab_size)
        if targets is None:  # to write text; training needs only the loss
            return logits, None
        logits = logits.flatten(0, 1)  # (B T, vocab_size)
        return None, F.cross_entropy(logits, targets.flatten())

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        """Draws one token after the other: (1, T) -> (1, T + max_new_tokens)."""
        for _ in range(max_new_tokens):
            # From lesson 2 on, the model can read no more than block_size tokens.
            logits, _ = self(idx[:, -block_size:])  # (1, T, vocab_size)
            p = logits[:, -1].softmax(dim=1)  # (1, vocab_size), for the token after the last
            new = torch.multinomial(p, 1)  # (1, 1)
            idx = torch.cat([idx, new], dim=1)
        return idx


@torch.no_grad()
def estimate_loss():
    """Measures the loss on all of the validation text."""
    loader = DataLoaderLite(load_tokens("val"), shuffle=False)
    total = 0.0
    for first in range(0, loader.length, batch_size):
        x, y = loader.batch(first, min(batch_size, loader.length - first))  # the last may be small
        with autocast:
            _, loss = raw_model(x, y)
        total += loss * len(x)
    return total.item() / loader.length


def get_lr(step):
    """The learning rate of a step: it rises in a straight line, then falls in another one.

    The first steps are small, because AdamW's means then have few gradients. The last steps are
    small, so that they do not jump over the minimum.
    """
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    fraction = (step - warmup_steps) / (max_steps - warmup_steps)  # from 0 to 1
    return min_lr + (1 - fraction) * (max_lr - min_lr)


raw_model = GPT().to(device)
# torch.compile makes kernels for this model and for one shape, which takes a minute. For other
# shapes, as in generate, raw_model is used. Both have the same parameters.
model = torch.compile(raw_model) if device == "cuda" else raw_model
if world_size > 1:
    # DDP averages the gradients over the processes, so all make the same step.
    model = nn.parallel.DistributedDataParallel(model)
optimizers = raw_model.configure_optimizers()
loader = DataLoaderLite(load_tokens("train"), shuffle=True)
n = total_batch_size // block_size  # sequences in a step
assert n % (world_size * batch_size) == 0  # each process has the same number of micro-batches
times = []
for step in range(max_steps):
    began = time.perf_counter()
    position = step * n  # sequences so far
    # Rank 0 takes the first micro-batch, rank 1 the second one, and so on, in turns.
    starts = range(position + rank * batch_size, position + n, world_size * batch_size)
    mean_loss = 0.0
    for first in starts:
        x, y = loader.batch(first, batch_size)  # (B, T) each
        if world_size > 1:
            # The processes average their sums once in a step, in its last backward.
            model.require_backward_grad_sync = first == starts[-1]
        with autocast:  # backward then uses the same number formats
            _, loss = model(x, y)
        # The step needs the mean of the gradients, but backward adds them up.
        loss = loss / len(starts)
        loss.backward()  # computes the gradient: how each parameter changes the loss
        mean_loss += loss.detach()  # without its graph, so that the graph's memory is freed
    # All gradients together are scaled down if their norm (root of the sum of squares) is above 1,
    # so that an unusual batch does not move the parameters far.
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    lr = get_lr(step)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()  # moves each parameter a little, against its gradient
        optimizer.zero_grad()  # because backward adds to the gradient
    if world_size > 1:
        dist.all_reduce(mean_loss)  # becomes the sum over the processes
    loss = mean_loss.item() / world_size
    times.append(time.perf_counter() - began)
    if rank == 0 and step % 50 == 0:
        print(f"step {step:4} | loss {loss:.4f} | lr {lr:.1e} | norm {norm:.2f}")
if rank == 0:
    print(f"val loss {estimate_loss():.4f} | {1000 * np.median(times):.1f} ms a step")
    print(f"{sum(p.numel() for p in raw_model.parameters()):,} parameters")
    first = 10 if vocab_size == 256 else 50256  # a newline, or GPT-2's end of text
    ids = raw_model.generate(torch.tensor([[first]], device=device), 300)[0].tolist()
    print(bytes(ids).decode(errors="replace") if vocab_size == 256 else ids)
if world_size > 1:
    dist.destroy_process_group()
