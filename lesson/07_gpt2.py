"""Lesson 7: GPT-2's first weights, and its one matrix for both ends.

Now the model is GPT-2. OpenAI's smallest one, with 124M parameters, has vocab_size 50257,
block_size 1024, n_layer 12, n_head 12 and n_embd 768.

The first loss is about log(256), because small weights give all tokens nearly the same score. But
at the end, the loss is worse than in lesson 6. This is no mistake in the program. The weights have
a size of 0.02, and PyTorch's were larger. The first steps move each by up to lr = 0.004, so soon
little is left of them. Lesson 8 begins with smaller steps.

After 300 steps, the validation loss is 2.550.
On another CPU, it may be 0.2 lower or higher, because this training is nearly unstable.

New: GPT.init_weights. Changed: GPT.__init__.
"""

import math
import time

import numpy as np
import torch
import torch.nn as nn

vocab_size = 256  # a token is a byte
block_size = 64  # tokens in a sequence, T
n_layer = 2  # blocks
n_head = 2  # attention heads, nh
n_embd = 128  # channels, C
batch_size = 16  # sequences in a batch, B
max_steps = 300
lr = 4e-3  # the learning rate; 0.03, as in lesson 1, is too high for this model
seed = 1337

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
        # A score says how well the key of a position (column) answers the query of another (row).
        # It is a sum of hs products with random signs. If the factors have a size of about 1, the
        # sum has one of about sqrt(hs). Softmax of such large scores gives one position all the
        # weight, and has almost no gradient. So the scores are divided by sqrt(hs).
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))  # (B, nh, T, T)
        is_later = torch.ones(T, T, dtype=torch.bool).triu(1)  # (T, T); True right of the diagonal
        scores = scores.masked_fill(is_later, -math.inf)  # softmax turns -inf into a weight of 0
        y = scores.softmax(dim=-1) @ v  # (B, nh, T, hs)
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

    def forward(self, idx, targets=None):
        """idx, targets: (B, T) token ids. Returns (logits, None), or (None, loss) with targets."""
        pos = torch.arange(idx.size(1))  # (T)
        x = self.wte(idx) + self.wpe(pos)  # (B, T, C)
        for block in self.h:
            x = block(x)  # (B, T, C)
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
