"""Runs a model on rows of tokens, and scores each ending."""

from types import SimpleNamespace

from plaingpt.base.terminal import show_progress
from plaingpt.data.text import clean_text
from plaingpt.ops.sampling import attention_for_many_shapes
from plaingpt.scoring.rows import lay_out

import numpy as np
import torch

CHUNK = 256  # positions whose logits are in memory at a time: 50 MB in float32
# A forward pass has so many tokens, by device. The caches of a CPU are small.
TOKENS = dict(cpu=2048, cuda=16384, mps=16384)
# Rows are padded to a multiple of so many tokens, so that a GPU sees few shapes.
ROUND = dict(cpu=1, cuda=64, mps=64)


def forward(model, rows, L, device):
    """Runs the model on rows, padded to length L -> pair (M), values (4, M) of the scored tokens.

    values has, for each scored token, its log-likelihood, 1, whether it is the likeliest one, and
    whether it is the likeliest one and also the last one of its pair.
    """
    tokens, scored = lay_out(rows, L)
    idx, pos, part = tokens.to(device)  # (B, L) each
    at, target = scored[:2].to(device)  # (M) each
    # None means causal attention. This is enough unless endings share a row. The padding comes
    # last, so no token sees it.
    mask = None
    if tokens[2].max() > 1:
        in_context = part[:, None] == 0  # (B, 1, L)
        in_same_part = part[:, None] == part[:, :, None]  # (B, L, L)
        mask = (in_context | in_same_part).tril()[:, None]  # (B, 1, L, L)
    x = model.hidden(idx, pos=pos, mask=mask).flatten(0, 1)[at]  # (B, L, C) -> (M, C)
    chunks = []
    with torch.autocast(device.type, enabled=False):  # bfloat16 numbers near 100 are 0.5 apart
        for x_part, target_part in zip(x.float().split(CHUNK), target.split(CHUNK)):
            logits = model.logits(x_part)  # (CHUNK, C) -> (CHUNK, vocab_size)
            nats = torch.nn.functional.cross_entropy(logits, target_part, reduction="none")
            greedy = logits.argmax(-1) == target_part
            chunks.append(torch.stack([-nats, greedy.float()]))  # (2, CHUNK)
    log_likelihood, greedy = torch.cat(chunks, dim=1).cpu().numpy()  # (M) each
    pair, is_last = scored[2:].numpy()
    return pair, np.stack([log_likelihood, np.ones_like(greedy), greedy, greedy * is_last])


@torch.no_grad()
def score(model, examples, rows, process, tokens_per_forward):
    """Scores the N pairs of the examples -> arrays (N), the same on every process.

    rows: from make_rows. process: a Process.
    """
    rows = sorted(rows, key=lambda row: -row.length)  # the row that needs most memory comes first
    sums = np.zeros((4, sum(map(len, examples))))  # log-likelihood, tokens, greedy, last greedy
    first = 0
    # The block is entered once, so that autocast converts the weights once.
    with process.autocast, attention_for_many_shapes():
        while first < len(rows):
            L = rows[first].length
            L += -L % ROUND[process.device.type]
            B = max(1, tokens_per_forward // L)
            batch = rows[first : first + B * process.dp_size]
            first += len(batch)
            own = batch[process.dp_rank :: process.dp_size]
            # A process without rows runs a row with weight 0, because all must join the
            # collectives.
            pair, values = forward(model, own or batch[:1], L, process.device)
            np.add.at(sums, (slice(None), pair), values * bool(own))
            show_progress(first, len(rows), "rows")
    sums = process.sum(torch.from_numpy(sums)).cpu().numpy()
    return SimpleNamespace(
        log_likelihood=sums[0],  # of the ending, in nats
        tokens=sums[1].astype(int),  # all of the ending, unless it was cut
        bytes=count_bytes(examples),  # of the ending, with the white space at its start
        greedy=sums[2] == sums[1],  # whether every token is the likeliest one
        last_greedy=sums[3] > 0,  # whether the last token is, given the correct earlier ones
    )


def count_bytes(examples):
    """Returns the number of bytes of the ending of each pair: (N)."""
    sizes = []
    for example in examples:
        of_endings = [len(clean_text(ending).encode()) for ending in example.endings]
        sizes += of_endings * len(example.contexts)
    return np.array(sizes)
