"""Turns examples into rows of tokens, runs a model on them, and scores each ending.

A score is the log-likelihood of an ending, given its context.

A benchmark, such as hellaswag.py, turns records into examples, and scores into metrics. This file
turns examples into rows of tokens. All endings of a context share a row:

    token     c0 c1 c2 c3   a0 a1   b0 b1 b2      context c, endings a and b, each without its
    position   0  1  2  3    4  5    4  5  6      last token, which is only a target
    part       0  0  0  0    1  1    2  2  2

A token attends to the context and to earlier tokens of its own part, never to another ending.
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

from plaingpt.errors import UserError
from plaingpt.sampling import attention_for_many_shapes
from plaingpt.scoring.benchmark import prompt_ids
from plaingpt.terminal import print0, show_progress
from plaingpt.tokenizer import clean_text, note_unknown

import numpy as np
import torch

# Number of positions whose logits are in memory at a time. With GPT-2's vocabulary size, these
# logits take 50 MB.
CHUNK = 256
# Tokens per forward pass. A CPU is faster with few tokens, because its caches are small.
TOKENS = dict(cpu=2048, cuda=16384, mps=16384)
# `forward` pads rows to a multiple of this many tokens, so that a GPU sees few different shapes.
ROUND = dict(cpu=1, cuda=64, mps=64)


class Row(NamedTuple):
    """The ids of a context, and its endings, which the model reads in one row of a batch.

    An ending is (ids, index of its pair, whether these ids contain the last token of the pair).
    """

    context: np.ndarray
    endings: list

    @property
    def length(self):
        return len(self.context) + sum(len(ids) - 1 for ids, _, _ in self.endings)


def windows(context, ending, block_size, stride):
    """Splits a context and its ending into windows of at most block_size tokens.

    Yields (context, piece of the ending, is_last) for each window. is_last: whether the piece
    contains the end of the ending. context, ending: lists of ids. stride: see Example.
    """
    ids = context + ending
    done = len(context)  # the ids before this index are context, or already have a score
    while done < len(ids):
        # A window contains up to block_size + 1 ids, because the last id is only a target. Each
        # window after the first scores `stride` ids, or block_size ids if stride is 0.
        end = max(block_size + 1, done + (stride or block_size))
        end = min(end, len(ids))
        start = max(0, end - block_size - 1)
        done = max(done, start + 1)  # the model can only score an id that follows another id
        yield ids[start:done], ids[done:end], end == len(ids)
        done = end


def make_rows(examples, tokenizer, config, prompt_ids=prompt_ids, spare=0):
    """Encodes Examples. Returns their Rows, for a model with this GPTConfig.

    prompt_ids, spare: fields of the Benchmark. Raises UserError if a stride is longer than the
    context.
    """
    T = config.block_size - spare
    rows = []
    n_pairs = 0
    n_cut = 0
    for example in examples:
        has_one_window = example.stride == math.inf  # truncates a long pair instead of splitting it
        if T < example.stride and not has_one_window:
            raise UserError(f"--stride {example.stride}: must be at most {T}, the model's context")
        for context, endings in prompt_ids(example, tokenizer):
            own_rows = []  # the Rows of `context`
            for ending in endings:
                if has_one_window and len(context) + len(ending) - 1 > T:
                    n_cut += 1
                for before, piece, is_last in windows(context, ending, T, example.stride):
                    before = np.array(before, np.int32)
                    piece = np.array(piece, np.int32)
                    # If two endings have different lengths, truncation shortens their context
                    # differently, so they cannot share a row.
                    can_share = has_one_window and len(own_rows) > 0
                    if not (can_share and np.array_equal(own_rows[-1].context, before)):
                        own_rows.append(Row(before, []))
                    own_rows[-1].endings.append((piece, n_pairs, is_last))
                n_pairs += 1
            rows += own_rows
    parts = []  # arrays of ids
    for row in rows:
        parts += [row.context, *(piece for piece, _, _ in row.endings)]
    note_unknown(tokenizer, parts, "the examples")
    if n_cut:
        print0(f"note: {n_cut:,} of {n_pairs:,} contexts with endings were cut to {T + 1} tokens")
    return rows


def lay_out(rows, L):
    """Turns B Rows into two tensors: tokens (3, B, L), padded with 0, and scored (4, M).

    tokens contains the id, position and part of each token, as in the picture at the top of this
    file. M is the number of tokens that receive a score. For each of these tokens, scored contains
    four numbers: the index of the previous token in the flattened (B, L), the token's id, the index
    of its pair, and 1 if the token is the last token of its pair, otherwise 0.
    """
    tokens = np.zeros((3, len(rows), L), np.int64)
    scored = []
    for b, row in enumerate(rows):
        P = len(row.context)
        tokens[0, b, :P] = row.context
        tokens[1, b, :P] = np.arange(P)
        start = P  # the index at which the next ending begins
        for part, (ids, pair, is_last) in enumerate(row.endings, start=1):
            n = len(ids)
            end = start + n - 1  # without the last id, which is only a target
            tokens[0, b, start:end] = ids[:-1]
            tokens[1, b, start:end] = np.arange(P, P + n - 1)
            tokens[2, b, start:end] = part
            # The token before the first token of an ending is the last token of the context.
            previous = b * L + np.r_[P - 1, start:end]  # (n)
            is_end_of_pair = is_last * (np.arange(n) == n - 1)  # (n)
            scored.append(np.broadcast_arrays(previous, ids, pair, is_end_of_pair))  # (4, n)
            start = end
    return torch.from_numpy(tokens), torch.from_numpy(np.concatenate(scored, axis=1))


def forward(model, rows, L, device):
    """Runs the model on rows that are padded to length L. Returns arrays: pair (M), values (4, M).

    M is the number of tokens that receive a score. pair contains the index of each token's pair.
    values contains four numbers per token: the log-likelihood; 1, which counts the token; whether
    the token is the likeliest token; and whether the token is both the likeliest token and the last
    token of its pair.
    """
    tokens, scored = lay_out(rows, L)
    idx, pos, part = tokens.to(device)  # (B, L) each
    at, target = scored[:2].to(device)  # (M) each
    # The mask None means causal attention, which is correct unless several endings share a row. The
    # padding is at the end of a row, so no token attends to the padding.
    mask = None
    if tokens[2].max() > 1:
        in_context = part[:, None] == 0  # (B, 1, L)
        in_same_part = part[:, None] == part[:, :, None]  # (B, L, L)
        mask = (in_context | in_same_part).tril()[:, None]  # (B, 1, L, L)
    x = model.hidden(idx, pos=pos, mask=mask).flatten(0, 1)[at]  # (B, L, C) -> (M, C)
    chunks = []
    with torch.autocast(device.type, enabled=False):  # bfloat16 rounds 100.2 to 100
        for x_part, target_part in zip(x.float().split(CHUNK), target.split(CHUNK)):
            logits = model.logits(x_part)  # (CHUNK, C) -> (CHUNK, vocab_size)
            nats = torch.nn.functional.cross_entropy(logits, target_part, reduction="none")
            greedy = logits.argmax(-1) == target_part
            chunks.append(torch.stack([-nats, greedy.float()]))  # (2, CHUNK)
    log_likelihood, greedy = torch.cat(chunks, dim=1).cpu().numpy()  # (M) each
    pair, is_last = scored[2:].numpy()
    return pair, np.stack([log_likelihood, np.ones_like(greedy), greedy, greedy * is_last])


def rows_alone(rows):
    """Splits `rows` into one Row per ending. Each new Row contains the context and one ending."""
    return [Row(row.context, [ending]) for row in rows for ending in row.endings]


def mixes_endings(model, rows, process):
    """Returns whether an ending's log-likelihood depends on the other endings in its row.

    In GPT-2, attention uses `mask`, and the position embedding uses `pos`, so the result is False.
    A changed model.py may ignore one of these arguments, or read the previous position, as a
    convolution does. This function tests the row whose endings contain the most tokens.
    """
    shared = [row for row in rows if len(row.endings) > 1]
    if not shared:
        return False
    row = max(shared, key=lambda row: row.length - len(row.context))
    L = row.length
    L += -L % ROUND[process.device.type]
    _, together = forward(model, [row], L, process.device)  # (4, M)
    alone = [forward(model, [each], L, process.device)[1] for each in rows_alone([row])]
    difference = np.abs(together - np.concatenate(alone, axis=1))[0].mean()  # nats per token
    # Rounding causes a difference of about 1e-6 in float32, and of 1e-3 in bfloat16.
    limit = 1e-3 if process.dtype == torch.float32 else 0.03
    return process.mean(dict(difference=torch.tensor(difference)))["difference"] > limit


@torch.no_grad()
def score(model, examples, rows, process, tokens_per_forward):
    """Scores the N pairs of the examples. Returns named arrays, the same on every process: (N,).

    rows: the result of make_rows. process: a Process. Raises Stopped after a signal.
    """
    sums = np.zeros((4, sum(map(len, examples))))  # log-likelihood, tokens, greedy, last greedy
    first = 0
    # autocast keeps converted weights until its `with` block ends, so this block contains all rows.
    with process.autocast, attention_for_many_shapes():
        if mixes_endings(model, rows, process):
            print0("note: model.py mixes endings that share a row, so each ending gets its own row")
            rows = rows_alone(rows)
        rows = sorted(rows, key=lambda row: -row.length)  # the first row needs the most memory
        while first < len(rows):
            process.check_stop()
            L = rows[first].length
            L += -L % ROUND[process.device.type]
            B = max(1, tokens_per_forward // L)
            batch = rows[first : first + B * process.world_size]
            first += len(batch)
            own = batch[process.rank :: process.world_size]
            # A process that has no rows left runs one row with weight 0, because all processes must
            # take part in the collective operations.
            pair, values = forward(model, own or batch[:1], L, process.device)
            np.add.at(sums, (slice(None), pair), values * bool(own))
            show_progress(first, len(rows), "rows")
    sums = process.sum(torch.from_numpy(sums)).cpu().numpy()
    return SimpleNamespace(
        log_likelihood=sums[0],  # log-likelihood of the ending, in nats
        tokens=sums[1].astype(int),  # number of scored tokens of the ending
        bytes=count_bytes(examples),  # number of bytes of the ending and the space before it
        greedy=sums[2] == sums[1],  # whether every token of the ending is the likeliest token
        last_greedy=sums[3] > 0,  # whether the last token of the ending is the likeliest
    )


def count_bytes(examples):
    """Returns the number of bytes of each pair's ending: (N)."""
    sizes = []
    for example in examples:
        of_endings = [len(clean_text(ending).encode()) for ending in example.endings]
        sizes += of_endings * len(example.contexts)
    return np.array(sizes)
