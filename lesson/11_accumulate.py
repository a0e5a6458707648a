"""Lesson 11: gradient accumulation. A step averages the gradients of several micro-batches.

Only one micro-batch needs to fit into memory, not all sequences of a step. Each sequence of a run
now has a number, its position in the run. (Do not confuse this position with the position of a
token in a sequence.) A step reads the next n sequences, n = total_batch_size / block_size, in
micro-batches of batch_size sequences, so n must be a multiple of batch_size. Except for rounding,
the losses do not depend on batch_size. They differ from the losses of lesson 10, which reads
different sequences.

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
block_size = 64  # tokens per sequence, T
n_layer = 2  # the number of blocks
n_head = 2  # the number of attention heads, nh
n_embd = 128  # channels per token, C
batch_size = 4  # sequences per micro-batch, B; on a GPU, as many as fit into its memory
total_batch_size = 1024  # tokens per step
max_steps = 300
max_lr = 4e-3  # the peak learning rate
warmup_steps = 50
weight_decay = 0.1
seed = 1337
device = "cuda" if torch.cuda.is_available() else "cpu"
# On a GPU, matrix multiplications in bfloat16 are several times as fast as in float32. autocast
# casts their inputs to bfloat16, which has a precision of 2 to 3 decimal digits. Parameters,
# LayerNorms and the loss stay in float32.
autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

# The model trains on nine tenths of the text. The rest is held out. The loss on the held-out text,
# the validation loss, shows how well the model predicts text that it has not seen in training.
tokens = torch.from_numpy(np.fromfile("input.txt", dtype=np.uint8)).long().to(device)
cut = len(tokens) * 9 // 10
train = tokens[:cut]
val = tokens[cut:]


class DataLoaderLite:
    """Reads the sequences of a run. Sequence j contains the T+1 tokens jT, jT+1, ..., jT+T.

    The order of the sequences depends only on the seed, and is the same in each epoch. An epoch is
    one pass over all sequences.
    """

    def __init__(self, tokens, shuffle):
        self.tokens = tokens
        self.length = (len(tokens) - 1) // block_size  # the number of sequences
        self.order = np.arange(self.length)
        if shuffle:
            np.random.default_rng(seed).shuffle(self.order)

    def sequence(self, position):
        """Returns a sequence, (T+1) tokens. position: the number of the sequence in the run."""
        j = self.order[position % self.length]
        return self.tokens[j * block_size : (j + 1) * block_size + 1]  # (T+1)

    def batch(self, position, B):
        """Reads B sequences, starting at `position`. Returns x, y: (B, T) each."""
        rows = torch.stack([self.sequence(position + b) for b in range(B)])  # (B, T+1)
        return rows[:, :-1], rows[:, 1:]  # the target of each token is the next token


class CausalSelfAttention(nn.Module):
    """For each position, computes a weighted mean of the values at this position and earlier ones.

    The query of a position says what the position looks for, its key says what the position offers,
    and its value is what the position passes on.
    """

    def __init__(self):
        super().__init__()
        # The c stands for convolution, OpenAI's name for a linear layer that all positions share.
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)  # computes query, key and value of all heads
        self.c_proj = nn.Linear(n_embd, n_embd)  # mixes the outputs of the heads

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).chunk(3, dim=2)  # (B, T, C) each
        # Each head uses hs = C / nh channels. GPT-2 has 768 channels and 12 heads, so hs = 64.
        # transpose moves nh before T, because @ multiplies matrices in the last two dimensions.
        q = q.view(B, T, n_head, C // n_head).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, n_head, C // n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, n_head, C // n_head).transpose(1, 2)  # (B, nh, T, hs)
        # This function divides the scores by sqrt(hs), masks later positions (is_causal=True), and
        # returns the weighted means of the values. Flash attention computes the scores in tiles
        # that fit into a small, fast memory. It never writes all T x T scores to the large, slow
        # memory.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
        y = y.transpose(1, 2).flatten(2)  # (B, T, C)
        return self.c_proj(y)


class MLP(nn.Module):
    """Transforms the vector at each position, independently of all other positions."""

    def __init__(self):
        super().__init__()
        # c_fc computes 4C features per position, and c_proj mixes these features. The first
        # Transformer used the factor 4, and nearly all later Transformers have kept this factor.
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)  # fc means fully connected
        # GELU is a smooth version of max(0, x). GPT-2 approximates GELU with tanh. Without GELU,
        # the two linear layers would be equivalent to one, because the product of two matrices is
        # one matrix.
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * n_embd, n_embd)  # projects back to C channels

    def forward(self, x):
        x = self.gelu(self.c_fc(x))  # (B, T, 4C)
        return self.c_proj(x)  # (B, T, C)


class Block(nn.Module):
    """Attention and MLP. Each reads LayerNorm(x), and adds its output to x, the residual stream."""

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
    """Computes a score for each token that may come next. The scores are called logits."""

    def __init__(self):
        super().__init__()
        # The names come from OpenAI's code: wte is the token embedding, wpe the position embedding.
        self.wte = nn.Embedding(vocab_size, n_embd)  # one vector per token
        self.wpe = nn.Embedding(block_size, n_embd)  # one vector per position: order matters
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])  # GPT-2 calls the blocks h
        self.ln_f = nn.LayerNorm(n_embd)  # f means final
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        # The embedding of a token is also its row in lm_head, so tokens with similar embeddings get
        # similar logits. Sharing the matrix saves vocab_size x C parameters: 32,768 here, and 38.6M
        # of 163M in GPT-2.
        self.lm_head.weight = self.wte.weight
        self.init_weights()

    def init_weights(self):
        """Initializes the weights as GPT-2 does. The weights of LayerNorms stay 1."""
        torch.manual_seed(seed)  # set the seed here: creating the layers has drawn random numbers
        for name, p in self.named_parameters():  # yields the shared matrix only once
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif name.endswith("c_proj.weight"):
                # Each block adds two outputs (attention and MLP) to the residual stream, so
                # 2 * n_layer variances add up. Dividing the standard deviation by
                # sqrt(2 * n_layer) keeps their sum from growing with n_layer.
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer))
            elif p.dim() == 2:
                # OpenAI chose 0.02 for C = 768. The output of a linear layer is a sum over C
                # channels. If the weights have a standard deviation of s, this sum is sqrt(C) * s
                # times as large as the inputs, so s = 1 / sqrt(C) preserves the scale. 1 / sqrt(C)
                # is 0.036 for C = 768 and 0.088 for C = 128, so 0.02 is small for this model.
                nn.init.normal_(p, std=0.02)

    def configure_optimizers(self):
        """Returns AdamW. Weight decay shrinks matrices by the fraction lr * weight_decay per step.

        If the gradient does not keep a weight large, the weight shrinks toward 0. This should
        reduce overfitting. (PyTorch's default is a weight decay of 0.01 for all parameters.)
        """
        matrices = [p for p in self.parameters() if p.dim() == 2]
        # Biases and LayerNorms do not decay: they contain too few numbers to overfit, and decay
        # would make a LayerNorm scale its channels toward 0.
        vectors = [p for p in self.parameters() if p.dim() == 1]
        groups = [
            dict(params=matrices, weight_decay=weight_decay),
            dict(params=vectors, weight_decay=0.0),
        ]
        # AdamW averages the gradients over about 10 steps (beta1 is 0.9), and their squares over
        # about 20 steps (beta2 is 0.95). The update is the first average divided by the square root
        # of the second. eps avoids 0 / 0. With fused=True, one kernel updates all parameters;
        # without it, each parameter needs several kernels.
        return torch.optim.AdamW(groups, lr=max_lr, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def forward(self, idx, targets=None):
        """idx, targets: (B, T) token ids. Returns (logits, None), or (None, loss) given targets."""
        pos = torch.arange(idx.size(1), device=idx.device)  # (T)
        x = self.wte(idx) + self.wpe(pos)  # (B, T, C)
        for block in self.h:
            x = block(x)  # (B, T, C)
        logits = self.lm_head(self.ln_f(x))  # (B, T, vocab_size)
        if targets is None:  # generate needs the logits, and training needs only the loss
            return logits, None
        logits = logits.flatten(0, 1)  # (B T, vocab_size)
        return None, F.cross_entropy(logits, targets.flatten())

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
    loader = DataLoaderLite(val, shuffle=False)
    total = torch.zeros((), device=device)
    for position in range(0, loader.length, batch_size):
        x, y = loader.batch(position, min(batch_size, loader.length - position))
        with autocast:
            _, loss = raw_model(x, y)
        total += loss * len(x)  # weighted by the batch size: the last batch may be smaller
    return total.item() / loader.length


def sample(max_new_tokens):
    """Returns the text that the model generates from a fixed prompt."""
    idx = torch.tensor([list(b"MARLOW: ")], device=device)  # (1, 8)
    ids = raw_model.generate(idx, max_new_tokens)[0].tolist()
    return bytes(ids).decode(errors="replace")


def get_lr(step):
    """Returns the learning rate of a step, which first rises linearly, then falls linearly to 0.

    The first steps are small, because the initial weights are small and AdamW's running averages
    contain few gradients. The last steps are small, so that they do not jump over the minimum.
    """
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    return max_lr * (max_steps - step) / (max_steps - warmup_steps)


raw_model = GPT().to(device)
# torch.compile generates kernels for inputs of shape (B, T), which takes a minute. raw_model is the
# same model without compilation, for inputs of different shapes: in generate, T grows.
model = torch.compile(raw_model) if device == "cuda" else raw_model
optimizer = raw_model.configure_optimizers()
loader = DataLoaderLite(train, shuffle=True)
n = total_batch_size // block_size  # sequences per step
if total_batch_size % (batch_size * block_size):
    raise SystemExit(
        "total_batch_size is not a multiple of batch_size x block_size = "
        f"{batch_size} x {block_size}"
    )
times = []
for step in range(max_steps):
    began = time.perf_counter()
    position = step * n  # the first position of this step
    starts = range(position, position + n, batch_size)  # the first position of each micro-batch
    mean_loss = torch.zeros((), device=device)
    for first in starts:
        x, y = loader.batch(first, batch_size)  # (B, T) each
        with autocast:  # backward will use the same dtypes as forward
            _, loss = model(x, y)
        # The loss of a step is the mean over its micro-batches, which have equal sizes. backward
        # adds up their gradients, so each loss is first divided by the number of micro-batches.
        loss = loss / len(starts)
        loss.backward()  # computes the gradient: how each parameter changes the loss
        mean_loss += loss.detach()  # detach, because mean_loss needs no graph
    # Scale the gradients down if their global norm, the root of the sum of squares, is above 1. A
    # very large gradient would otherwise stay in AdamW's running averages for many steps.
    norm = nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)
    lr = get_lr(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()  # moves each parameter a little, opposite to its gradient
    optimizer.zero_grad()  # resets all gradients, because backward adds to them
    loss = mean_loss.item()
    times.append(time.perf_counter() - began)
    if step % 50 == 0:
        print(f"step {step:4} | loss {loss:.4f} | lr {lr:.1e} | norm {norm:.2f}")
    steps_done = step + 1  # steps are numbered from 0
    if steps_done % 100 == 0 or steps_done == max_steps:
        val_loss = estimate_loss()
        ms = 1000 * np.median(times)
        print(f"after {steps_done} steps | val loss {val_loss:.4f} | {ms:.1f} ms | {sample(40)!r}")
print(f"{sum(p.numel() for p in raw_model.parameters()):,} parameters")
print(sample(300))
