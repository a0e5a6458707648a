"""Lesson 4: LayerNorm. What attention, MLP and lm_head read always has the same size.

The numbers in the residual stream grow with everything that is added to it, and those who read it
would have to follow. So they read it through a LayerNorm, which gives the channels of each position
mean 0 and variance 1. Then it scales and shifts each channel by learned numbers. The stream itself
stays as it is.

After 300 steps, the validation loss is 1.940.

New: nothing. Changed: Block, GPT.__init__, GPT.forward.
"""

import math
import time

import numpy as np
import torch
import torch.nn as nn

vocab_size = 256  # a token is a byte
block_size = 64  # tokens in a sequence, T
n_embd = 128  # channels, C
batch_size = 16  # sequences in a batch, B
max_steps = 300
lr = 4e-3  # the learning rate; 0.03, as in lesson 1, is too high for this model
seed = 1337
torch.manual_seed(seed)

# The model trains on nine tenths of the text. The rest stays new to it. The loss on the rest, which
# is called validation loss, shows how well the model has learned.
tokens = torch.from_numpy(np.fromfile("input.txt", dtype=np.uint8)).long()
cut = len(tokens) * 9 // 10
train = tokens[:cut]
val = tokens[cut:]


def random_batch():
    """Takes sequences from random places of the training text -> x, y: (B, T)."""
    starts = torch.randint(len(train) - block_size, (batch_size, 1))  # (B, 1)
    # (B, 1) + (T+1) broadcasts to (B, T+1): each start gets the T+1 places from there on.
    rows = train[starts + torch.arange(block_size + 1)]  # (B, T+1)
    return rows[:, :-1], rows[:, 1:]  # the target of each token is the token after it


def cross_entropy(logits, targets):
    """The mean of -log(probability of the target). logits: (B, T, vocab_size), targets: (B, T).

    -log(1) is 0, and a small probability of the right token costs much. If all 256 bytes have the
    same probability, this is log(256) = 5.545.
    """
    # Softmax makes probabilities of scores: they are positive, and their sum is 1.
    exp = logits.exp()
    p = exp / exp.sum(dim=2, keepdim=True)  # (B, T, vocab_size)
    # At each position, gather takes one of the 256 numbers: the one whose index is the target.
    p_target = p.gather(2, targets.unsqueeze(2))  # (B, T, 1)
    return -p_target.log().mean()


class CausalSelfAttention(nn.Module):
    """Each position takes a weighted mean of the values at this position and those before it.

    Its query says what it looks for, a key says what a position offers, a value is what it gives.
    """

    def __init__(self):
        super().__init__()
        # c is for convolution, OpenAI's word for a linear layer that all positions share.
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)  # makes query, key and value

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).chunk(3, dim=2)  # (B, T, C) each
        # A score says how well the key of a position (column) answers the query of another (row).
        # It is a sum of C products with random signs. If the factors have a size of about 1, the
        # sum has one of about sqrt(C). Softmax of such large scores gives one position all the
        # weight, and has almost no gradient. So the scores are divided by sqrt(C).
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))  # (B, T, T)
        is_later = torch.ones(T, T, dtype=torch.bool).triu(1)  # (T, T); True right of the diagonal
        scores = scores.masked_fill(is_later, -math.inf)  # softmax turns -inf into a weight of 0
        y = scores.softmax(dim=-1) @ v  # (B, T, C)
        return y


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
        self.block = Block()
        self.ln_f = nn.LayerNorm(n_embd)  # f is for final
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets=None):
        """idx, targets: (B, T) token ids. Returns (logits, None), or (None, loss) with targets."""
        pos = torch.arange(idx.size(1))  # (T)
        x = self.wte(idx) + self.wpe(pos)  # (B, T, C)
        x = self.block(x)  # (B, T, C)
        logits = self.lm_head(self.ln_f(x))  # (B, T, vocab_size)
        if targets is None:  # to write text; training needs only the loss
            return logits, None
        return None, cross_entropy(logits, targets)

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
    n = (len(val) - 1) // block_size  # sequences
    x = val[: n * block_size].view(n, block_size)  # (n, T)
    y = val[1 : n * block_size + 1].view(n, block_size)  # (n, T)
    _, loss = model(x, y)
    return loss.item()


def sample(max_new_tokens):
    """Returns what the model writes after a fixed beginning."""
    idx = torch.tensor([list(b"MARLOW: ")])  # (1, 8)
    ids = model.generate(idx, max_new_tokens)[0].tolist()
    return bytes(ids).decode(errors="replace")


model = GPT()
# AdamW moves each parameter by up to about lr, whatever the size of its gradient (lesson 8).
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
times = []
for step in range(max_steps):
    began = time.perf_counter()
    x, y = random_batch()  # (B, T) each
    _, loss = model(x, y)
    loss.backward()  # computes the gradient: how each parameter changes the loss
    optimizer.step()  # moves each parameter a little, against its gradient
    optimizer.zero_grad()  # because backward adds to the gradient
    loss = loss.item()
    times.append(time.perf_counter() - began)
    if step % 50 == 0:
        print(f"step {step:4} | loss {loss:.4f}")
    steps_done = step + 1  # the first step has the number 0
    if steps_done % 100 == 0 or steps_done == max_steps:
        val_loss = estimate_loss()
        ms = 1000 * np.median(times)
        print(f"after {steps_done} steps | val loss {val_loss:.4f} | {ms:.1f} ms | {sample(40)!r}")
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
print(sample(300))
