"""Lesson 6: the same model, faster. One kernel does what took many lines, on a GPU if there is one.

A kernel is one program that runs on the device. On a CPU, the losses stay the same, except for
rounding. A GPU draws other random numbers.
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
n_head = 2  # attention heads, nh: a position can look at two places at a time
n_embd = 128  # channels, C
batch_size = 16  # sequences in a batch, B
max_steps = 300
max_lr = 4e-3  # the highest learning rate
min_lr = max_lr / 10
warmup_steps = 50
weight_decay = 0.1
seed = 1337
device = "cuda" if torch.cuda.is_available() else "cpu"
# On a GPU, matrix products are several times as fast in bfloat16. It has 2 to 3 decimal digits,
# so parameters, LayerNorms and the loss stay in float32. autocast makes this choice.
autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

# The model trains on nine tenths of the text. The rest stays new to it. The loss on the rest, which
# is called validation loss, shows how well the model has learned.
tokens = torch.from_numpy(np.fromfile("input.txt", dtype=np.uint8)).long().to(device)
cut = len(tokens) * 9 // 10
train = tokens[:cut]
val = tokens[cut:]


def random_batch():
    """Takes sequences from random places of the training text -> x, y: (B, T)."""
    starts = torch.randint(len(train) - block_size, (batch_size, 1), device=device)  # (B, 1)
    rows = train[starts + torch.arange(block_size + 1, device=device)]  # (B, T+1)
    return rows[:, :-1], rows[:, 1:]  # the target of each token is the token after it


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
        """AdamW. In each step, it also shrinks the matrices, by the fraction lr * weight_decay."""
        matrices = [p for p in self.parameters() if p.dim() == 2]
        vectors = [p for p in self.parameters() if p.dim() == 1]  # LayerNorms should not go to 0
        groups = [
            dict(params=matrices, weight_decay=weight_decay),
            dict(params=vectors, weight_decay=0.0),
        ]
        # AdamW divides a mean of recent gradients by the root of a mean of their squares. betas say
        # how far these means go back; eps avoids a division by 0. fused: one kernel does it all.
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
    n = (len(val) - 1) // block_size  # sequences
    x = val[: n * block_size].view(n, block_size)  # (n, T)
    y = val[1 : n * block_size + 1].view(n, block_size)  # (n, T)
    with autocast:
        _, loss = raw_model(x, y)
    return loss.item()


def get_lr(step):
    """The learning rate of a step: it rises in a straight line, then falls along a cosine.

    The first steps are small, because AdamW's means then have few gradients. The last steps are
    small, so that they do not jump over the minimum.
    """
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    fraction = (step - warmup_steps) / (max_steps - warmup_steps)  # from 0 to 1
    # 0.5 * (1 + cos) falls from 1 to 0, slowly at both ends.
    return min_lr + 0.5 * (1 + math.cos(math.pi * fraction)) * (max_lr - min_lr)


raw_model = GPT().to(device)
# torch.compile makes kernels for this model and for one shape, which takes a minute. For other
# shapes, as in generate, raw_model is used. Both have the same parameters.
model = torch.compile(raw_model) if device == "cuda" else raw_model
optimizer = raw_model.configure_optimizers()
times = []
for step in range(max_steps):
    began = time.perf_counter()
    x, y = random_batch()  # (B, T) each
    with autocast:  # backward then uses the same number formats
        _, loss = model(x, y)
    loss.backward()  # computes the gradient: how each parameter changes the loss
    # All gradients together are scaled down if their norm (root of the sum of squares) is above 1,
    # so that an unusual batch does not move the parameters far.
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    lr = get_lr(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()  # moves each parameter a little, against its gradient
    optimizer.zero_grad()  # because backward adds to the gradient
    loss = loss.item()
    times.append(time.perf_counter() - began)
    if step % 50 == 0:
        print(f"step {step:4} | loss {loss:.4f} | lr {lr:.1e} | norm {norm:.2f}")
print(f"val loss {estimate_loss():.4f} | {1000 * np.median(times):.1f} ms a step")
print(f"{sum(p.numel() for p in raw_model.parameters()):,} parameters")
newline = torch.tensor([[10]], device=device)  # (1, 1): the new text starts after it
ids = raw_model.generate(newline, 300)[0].tolist()
print(bytes(ids).decode(errors="replace"))
