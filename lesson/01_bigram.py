"""Lesson 1: a bigram model. A table predicts the next byte from the current byte.

The table contains a row for each byte. Each row contains a score for each byte that may come next.
Training changes the scores until they fit the text. docs/lesson.md explains all programs of the
lesson. Run the programs in the root directory of the repository, which contains input.txt:

  python lesson/01_bigram.py

After 300 steps, the validation loss is 2.396.
"""

import time

import numpy as np
import torch
import torch.nn as nn

vocab_size = 256  # a token is a byte
block_size = 64  # tokens per sequence, T
batch_size = 16  # sequences per batch, B
max_steps = 300
lr = 0.03  # the learning rate: AdamW moves a parameter by at most about lr per step
seed = 1337
torch.manual_seed(seed)

# The model trains on nine tenths of the text. The rest is held out. The loss on the held-out text,
# the validation loss, shows how well the model predicts text that it has not seen in training.
tokens = torch.from_numpy(np.fromfile("input.txt", dtype=np.uint8)).long()
cut = len(tokens) * 9 // 10
train = tokens[:cut]
val = tokens[cut:]


def random_batch():
    """Reads B sequences from random places in the training text. Returns x, y: (B, T) each."""
    starts = torch.randint(len(train) - block_size, (batch_size, 1))  # (B, 1)
    # (B, 1) + (T+1) broadcasts to (B, T+1): each row contains T+1 consecutive indices.
    rows = train[starts + torch.arange(block_size + 1)]  # (B, T+1)
    return rows[:, :-1], rows[:, 1:]  # the target of each token is the next token


def cross_entropy(logits, targets):
    """Returns mean(-log(probability of the target)). logits: (B, T, vocab_size), targets: (B, T).

    -log(1) is 0, and -log of a small probability is large. If all 256 bytes have the same
    probability, the loss is log(256) = 5.545.
    """
    # Softmax converts scores to probabilities, which are positive and add up to 1.
    exp = logits.exp()
    p = exp / exp.sum(dim=2, keepdim=True)  # (B, T, vocab_size)
    # At each position, gather selects the probability of the target from 256 probabilities.
    p_target = p.gather(2, targets.unsqueeze(2))  # (B, T, 1)
    return -p_target.log().mean()


class GPT(nn.Module):
    """Computes a score for each token that may come next. The scores are called logits."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)  # returns one row per token id
        nn.init.zeros_(self.table.weight)  # at first, all tokens have the same probability

    def forward(self, idx, targets=None):
        """idx, targets: (B, T) token ids. Returns (logits, None), or (None, loss) given targets."""
        logits = self.table(idx)  # (B, T, vocab_size)
        if targets is None:  # generate needs the logits, and training needs only the loss
            return logits, None
        return None, cross_entropy(logits, targets)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        """Samples one token at a time, and appends it: (1, T) -> (1, T + max_new_tokens)."""
        # Each call uses the same seed, so the samples after different steps are comparable.
        generator = torch.Generator(idx.device).manual_seed(seed)
        for _ in range(max_new_tokens):
            # From lesson 2 on, the model accepts at most block_size tokens.
            logits, _ = self(idx[:, -block_size:])  # (1, T, vocab_size)
            p = logits[:, -1].softmax(dim=1)  # (1, vocab_size), for the next token
            new = torch.multinomial(p, 1, generator=generator)  # (1, 1)
            idx = torch.cat([idx, new], dim=1)
        return idx


@torch.no_grad()
def estimate_loss():
    """Returns the mean loss on the whole validation text."""
    n = (len(val) - 1) // block_size  # the number of sequences
    x = val[: n * block_size].view(n, block_size)  # (n, T)
    y = val[1 : n * block_size + 1].view(n, block_size)  # (n, T)
    _, loss = model(x, y)
    return loss.item()


def sample(max_new_tokens):
    """Returns the text that the model generates from a fixed prompt."""
    idx = torch.tensor([list(b"MARLOW: ")])  # (1, 8)
    ids = model.generate(idx, max_new_tokens)[0].tolist()
    return bytes(ids).decode(errors="replace")


model = GPT()
# AdamW moves a parameter by at most about lr per step, even if its gradient is large (lesson 8).
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
times = []
for step in range(max_steps):
    began = time.perf_counter()
    x, y = random_batch()  # (B, T) each
    _, loss = model(x, y)
    loss.backward()  # computes the gradient: how each parameter changes the loss
    optimizer.step()  # moves each parameter a little, opposite to its gradient
    optimizer.zero_grad()  # resets all gradients, because backward adds to them
    loss = loss.item()
    times.append(time.perf_counter() - began)
    if step % 50 == 0:
        print(f"step {step:4} | loss {loss:.4f}")
    steps_done = step + 1  # steps are numbered from 0
    if steps_done % 100 == 0 or steps_done == max_steps:
        val_loss = estimate_loss()
        ms = 1000 * np.median(times)
        print(f"after {steps_done} steps | val loss {val_loss:.4f} | {ms:.1f} ms | {sample(40)!r}")
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
print(sample(300))
