"""Lesson 11: batches that do not fit into memory. A step averages over micro-batches.

Each sequence of a run now has a number, its position in the run. (The tokens of a sequence have
positions, too; these are others.) A step takes the next n sequences, in micro-batches of a size
that divides n. This size does not change the losses, except for rounding. The sequences are not
those of lesson 10, so the losses are others.

After 300 steps, the validation loss is 1.977.

New: total_batch_size, DataLoaderLite; random_batch is gone. Changed: estimate_loss, the loop.
"""

import math
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

vocab_size = 256  # a token is a byte
block_size = 64  # tokens in a sequence, T
n_layer = 2  # blocks
n_head = 2  # attention heads, nh
n_embd = 128  # channels, C
batch_size = 4  # sequences in a micro-batch, B: on a GPU, as many as fit into its memory
total_batch_size = 1024  # tokens in a step
max_steps = 300
max_lr = 4e-3  # the highest learning rate
warmup_steps = 50
weight_decay = 0.1
seed = 1337
device = "cuda" if torch.cuda.is_available() else "cpu"
# On a GPU, matrix products are several times as fast in bfloat16, which has 2 to 3 decimal digits.
# autocast rounds their inputs. Parameters, LayerNorms and the loss stay in float32.
autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

# The model trains on nine tenths of the text. The rest stays new to it. The loss on the rest, which
# is called validation loss, shows how well the model has learned.
tokens = torch.from_numpy(np.fromfile("input.txt", dtype=np.uint8)).long().to(device)
cut = len(tokens) * 9 // 10
train = tokens[:cut]
val = tokens[cut:]


class DataLoaderLite:
    """The stream of sequences of a run. Sequence j is the T+1 tokens from jT to jT+T.

    Which sequence is where in the run depends on the seed alone. The order is the same in each
    epoch, which is a pass over all sequences.
    """

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
        return rows[:, :-1], rows[:, 1:]  # the target of each token is the token after it


class CausalSelfAttention(nn.Module):
    """Each position takes a weighted mean of the values at this position and those before it.

    Its query says what it looks for, a key says what a position offers, a value is what it gives.
    """

    def __init__(self):
        super().__init__()
        # c is for convolution, OpenAI's word for a linear layer that all positions share.
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)  # makes query, key and value of all heads
        self.c_proj = nn.Linear(n_embd, n_embd)  # mixes the heads

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).chunk(3, dim=2)  # (B, T, C) each
        # A head has hs = C / nh of these channels. GPT-2 has 768 channels and 12 heads, so hs = 64.
        # The heads move before the positions, because @ multiplies the last two dimensions.
        q = q.view(B, T, n_head, C // n_head).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, n_head, C // n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, n_head, C // n_head).transpose(1, 2)  # (B, nh, T, hs)
        # Flash attention does the same: is_causal=True is the mask, and the root of hs is inside.
        # It works in tiles that fit into a small, fast memory. So the (T, T) scores are never
        # written to the large, slow memory.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
        y = y.transpose(1, 2).flatten(2)  # (B, T, C)
        return self.c_proj(y)


class MLP(nn.Module):
    """Computes with the channels of each position separately."""

    def __init__(self):
        super().__init__()
        # In the middle, it has room for 4C features of the position, and then sums them up. The
        # first Transformer chose 4, and nearly all later ones have kept it.
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)  # fc is for fully connected
        # GELU is like max(0, x), without the corner. GPT-2's formula for it has a tanh. Two layers
        # with no GELU between them would be one layer, as a product of two matrices is a matrix.
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * n_embd, n_embd)  # projects back to C channels

    def forward(self, x):
        x = self.gelu(self.c_fc(x))  # (B, T, 4C)
        return self.c_proj(x)  # (B, T, C)


class Block(nn.Module):
    """Attention and MLP. Each reads the residual stream x through a LayerNorm, and adds to it."""

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
        self.ln_f = nn.LayerNorm(n_embd)  # f is for final
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        # A token's vector is also its row in lm_head, so tokens that are alike when they are read
        # are alike when they are predicted. This saves vocab_size x C parameters: 32,768 here, and
        # 38.6M of 163M in GPT-2.
        self.lm_head.weight = self.wte.weight
        self.init_weights()

    def init_weights(self):
        """Draws the first weights as GPT-2 does. The weights of LayerNorms stay 1."""
        torch.manual_seed(seed)  # here, because making the layers also took random numbers
        for name, p in self.named_parameters():  # the shared matrix comes once
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif name.endswith("c_proj.weight"):
                # Attention and MLP of all blocks add to the residual stream, 2 n_layer times, and
                # variances add up. With this root, the sum's variance does not grow with n_layer.
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer))
            elif p.dim() == 2:
                # OpenAI's number, for C = 768. A sum of C products with weights of size s is
                # sqrt(C) s times as large. So 1 / sqrt(C) keeps the size: 0.036 for 768 channels.
                # For 128 it would be 0.088, so 0.02 is small here.
                nn.init.normal_(p, std=0.02)

    def configure_optimizers(self):
        """AdamW. In each step, it also shrinks the matrices, by the fraction lr * weight_decay.

        So a weight that the gradient does not need becomes small. This is against memorizing. (By
        default, AdamW shrinks all parameters, with 0.01.)
        """
        matrices = [p for p in self.parameters() if p.dim() == 2]
        # Biases are too few to memorize a text, and weights of LayerNorms should not go to 0.
        vectors = [p for p in self.parameters() if p.dim() == 1]
        groups = [
            dict(params=matrices, weight_decay=weight_decay),
            dict(params=vectors, weight_decay=0.0),
        ]
        # AdamW divides a mean of recent gradients by the root of a mean of their squares. betas say
        # how far the means go back: 0.9 is about 10 steps, 0.95 about 20. eps avoids 0 / 0.
        # fused: one kernel moves all parameters, in place of several for each of them.
        return torch.optim.AdamW(groups, lr=max_lr, betas=(0.9, 0.95), eps=1e-8, fused=True)

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
        # Each text gets the same random numbers, so that texts of different steps compare.
        generator = torch.Generator(idx.device).manual_seed(seed)
        for _ in range(max_new_tokens):
            # From lesson 2 on, the model can read no more than block_size tokens.
            logits, _ = self(idx[:, -block_size:])  # (1, T, vocab_size)
            p = logits[:, -1].softmax(dim=1)  # (1, vocab_size), for the token after the last
            new = torch.multinomial(p, 1, generator=generator)  # (1, 1)
            idx = torch.cat([idx, new], dim=1)
        return idx


@torch.no_grad()
def estimate_loss():
    """Measures the loss on all of the validation text."""
    loader = DataLoaderLite(val, shuffle=False)
    total = torch.zeros((), device=device)
    for position in range(0, loader.length, batch_size):
        x, y = loader.batch(position, min(batch_size, loader.length - position))
        with autocast:
            _, loss = raw_model(x, y)
        total += loss * len(x)  # the last batch may have fewer sequences, so it counts less
    return total.item() / loader.length


def sample(max_new_tokens):
    """Returns what the model writes after a fixed beginning."""
    idx = torch.tensor([list(b"MARLOW: ")], device=device)  # (1, 8)
    ids = raw_model.generate(idx, max_new_tokens)[0].tolist()
    return bytes(ids).decode(errors="replace")


def get_lr(step):
    """The learning rate of a step: it rises in a straight line, then falls in another one to 0.

    The first steps are small, because the first weights are, and AdamW's means then have only few
    gradients. The last steps are small, so that they do not jump over the minimum.
    """
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    return max_lr * (max_steps - step) / (max_steps - warmup_steps)


raw_model = GPT().to(device)
# torch.compile makes kernels for x of shape (B, T), which takes a minute. raw_model has the same
# parameters as `model`. It is for everything else, such as generate, where T grows.
model = torch.compile(raw_model) if device == "cuda" else raw_model
optimizer = raw_model.configure_optimizers()
loader = DataLoaderLite(train, shuffle=True)
n = total_batch_size // block_size  # sequences in a step
if total_batch_size % (batch_size * block_size):
    raise SystemExit(f"total_batch_size is no multiple of {batch_size} x {block_size}")
times = []
for step in range(max_steps):
    began = time.perf_counter()
    position = step * n  # the first sequence of this step
    starts = range(position, position + n, batch_size)  # of the micro-batches
    mean_loss = torch.zeros((), device=device)
    for first in starts:
        x, y = loader.batch(first, batch_size)  # (B, T) each
        with autocast:  # where this rounds, backward rounds, too
            _, loss = model(x, y)
        # The step needs the mean over its micro-batches, which have equal sizes. backward adds
        # their gradients up, so each loss is divided by their number first.
        loss = loss / len(starts)
        loss.backward()  # computes the gradient: how each parameter changes the loss
        mean_loss += loss.detach()  # without its graph, so that the graph's memory is freed
    # All gradients together are scaled down if their norm (root of the sum of squares) is above 1.
    # AdamW ignores their usual size, but a large one would stay in its means for many steps.
    norm = nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)
    lr = get_lr(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()  # moves each parameter a little, against its gradient
    optimizer.zero_grad()  # because backward adds to the gradient
    loss = mean_loss.item()
    times.append(time.perf_counter() - began)
    if step % 50 == 0:
        print(f"step {step:4} | loss {loss:.4f} | lr {lr:.1e} | norm {norm:.2f}")
    steps_done = step + 1  # the first step has the number 0
    if steps_done % 100 == 0 or steps_done == max_steps:
        val_loss = estimate_loss()
        ms = 1000 * np.median(times)
        print(f"after {steps_done} steps | val loss {val_loss:.4f} | {ms:.1f} ms | {sample(40)!r}")
print(f"{sum(p.numel() for p in raw_model.parameters()):,} parameters")
print(sample(300))
