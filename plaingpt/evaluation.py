"""The one scoring path: how likely does a model find each ending of a context?

A benchmark (hellaswag.py, lambada.py, storycloze.py, wikitext.py) is a module that yields examples, each a context and one
or more endings. Here they become rows of tokens, the rows become batches of like length, and the raw model gives for each
ending what all figures are made of: its log-likelihood, its tokens and bytes, and whether it is the greedy continuation.

Endings that share a context stand in one row, so that the context is computed once:

    token     c0 c1 c2 c3   a0 a1   b0 b1 b2      the context c, then the endings a and b, each without its last token,
    position   0  1  2  3    4  5    4  5  6      which is only predicted
    part       0  0  0  0    1  1    2  2  2

A token may look at what stands before it in the context and in its own part: for it the other endings do not exist.
"""

# Read next: hellaswag.py, the first of four benchmarks.

import itertools
import math
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from plaingpt.checkpoint import find_model, load_model
from plaingpt.cli import UserError, check_json, duration, parse_flags, print0, write_json
from plaingpt.corpus import load_hub, read_records
from plaingpt.device import choose_dtype, setup, shut_down
from tokenizer import get_encoding, start_id

CHUNK = 256  # positions whose logits are in memory at a time: 50 MB in float32, which a cache may hold


class Example(NamedTuple):
    """What a benchmark asks of a model."""
    context: str
    endings: list  # of str, each with the white space before it
    label: int = 0  # which of them is right
    stride: int = None  # an ending longer than the model's context is read in windows that move on by so many tokens


class Row(NamedTuple):
    """L tokens that go through the model together, and the M tokens to be scored among what follows them."""
    ids: np.ndarray  # (L)
    pos: np.ndarray  # (L)
    part: np.ndarray  # (L) 0: the context, k: the k-th ending
    at: np.ndarray  # (M) where in the row a token is predicted
    target: np.ndarray  # (M) its id
    ending: np.ndarray  # (M) the ending it belongs to, of all endings of all examples
    final: np.ndarray  # (M) whether it is that ending's last


class Scores(NamedTuple):
    """One number for each of the N endings of all examples, in their order."""
    log_likelihood: np.ndarray  # (N) in nats, summed over the ending's tokens
    tokens: np.ndarray  # (N) the tokens scored: all, unless the ending alone is longer than the model's context
    bytes: np.ndarray  # (N) the ending's length in UTF-8, with the white space before it
    greedy: np.ndarray  # (N) whether every token is the likeliest one
    last_greedy: np.ndarray  # (N) whether its last token is, after the right ones


def encode(example, encoding, start):
    """An example -> the ids of its context and of each ending.

    As EleutherAI's harness has it: white space at the end of the context goes over to the ending; an ending's ids are those
    that context and ending together have beyond the context's own; an empty context is the id that starts a text.
    """
    context = example.context.rstrip()
    space = example.context[len(context):]
    ids = encoding.encode_ordinary(context)
    endings = [encoding.encode_ordinary(context + space + ending)[len(ids):] for ending in example.endings]
    return ids or [start], endings


def windows(context, ending, block_size, stride):
    """Cuts what does not fit into pieces that do -> pairs of a context and a part of the ending.

    Without a stride there is one piece, the end of it all: tokens are lost on the left. With one, every token of the ending
    is scored once, and after the first window each sees the block_size - stride tokens before its piece, if not more.
    """
    ids, done = context + ending, len(context)
    while done < len(ids):
        end = len(ids) if stride is None else min(len(ids), max(block_size + 1, done + min(stride, block_size)))
        start = max(0, end - block_size - 1)
        done = max(done, start + 1)
        yield ids[start:done], ids[done:end]
        done = end


def make_row(context, endings, first):
    """A context and endings, in ids, as one row; `first` is the number of the first ending."""
    P = len(context)
    ids, pos, part = list(context), list(range(P)), [0] * P
    at, target, number, final = [], [], [], []
    for k, ending in enumerate(endings):
        n = len(ending)
        at += [P - 1, *range(len(ids), len(ids) + n - 1)][:n]  # each ending's first token is predicted by the context's last
        target += ending
        number += [first + k] * n
        final += [i == n - 1 for i in range(n)]
        ids += ending[:-1]
        pos += range(P, P + n - 1)
        part += [k + 1] * (n - 1)
    return Row(*(np.array(column, np.int64) for column in (ids, pos, part, at, target, number, final)))


def make_rows(examples, tokenizer, config):
    """Examples -> rows for a model with that GPTConfig. Raises UserError if the model does not know the tokens."""
    encoding, start = get_encoding(tokenizer), start_id(tokenizer, config.vocab_size)
    rows, first, n_cut = [], 0, 0
    for example in examples:
        context, endings = encode(example, encoding, start)
        if len(context) + max(map(len, endings)) - 1 <= config.block_size:
            rows.append(make_row(context, endings, first))
        else:
            if example.stride not in (None, math.inf) and example.stride > config.block_size:
                raise UserError(f"--stride {example.stride} is more than the {config.block_size} tokens of the model's context")
            for k, ending in enumerate(endings):
                pieces = [make_row(before, [piece], first + k) for before, piece in
                          windows(context, ending, config.block_size, example.stride)]
                for row in pieces[:-1]:
                    row.final[:] = False
                rows += pieces
                n_cut += example.stride is None and len(context) + len(ending) - 1 > config.block_size
        first += len(endings)
    highest = max(max(row.ids.max(), row.target.max(initial=0)) for row in rows)
    if highest >= config.vocab_size:
        raise UserError(f"the text has token id {highest}, but this model knows {config.vocab_size} ids only")
    if n_cut:
        print0(f"note: {n_cut:,} of {first:,} endings, with their context, are longer than the {config.block_size} tokens that "
               "this model reads: they are scored on the last of them")
    return rows


def forward(model, rows):
    """A batch of rows through the model -> for all their scored tokens, in order: log-likelihoods, and whether greedy."""
    device = next(model.parameters()).device
    idx, pos, part = np.zeros((3, len(rows), max(len(row.ids) for row in rows)), np.int64)  # (B, L) each
    for b, row in enumerate(rows):
        n = len(row.ids)  # what follows them stands at the end, where no scored token sees it
        idx[b, :n], pos[b, :n], part[b, :n] = row.ids, row.pos, row.part
    at = np.concatenate([b * idx.shape[1] + row.at for b, row in enumerate(rows)])
    target = np.concatenate([row.target for row in rows])
    idx, pos, part, at, target = (torch.from_numpy(a).to(device) for a in (idx, pos, part, at, target))
    mask = None  # the usual one, if no two endings share a row
    if any(row.part[-1] > 1 for row in rows):
        mask = ((part[:, None] == 0) | (part[:, None] == part[:, :, None])).tril()[:, None]  # (B, 1, L, L)
    x = model.hidden(idx, pos=pos, mask=mask).flatten(0, 1)[at]  # (B, L, C) -> (M, C)
    log_likelihood, greedy = [], []
    with torch.autocast(device.type, enabled=False):  # bfloat16 would round a logit of 100 to halves
        for part_x, part_target in zip(x.float().split(CHUNK), target.split(CHUNK)):
            logits = model.logits(part_x)  # (CHUNK, vocab_size)
            log_likelihood.append(-F.cross_entropy(logits, part_target, reduction="none"))
            greedy.append(logits.argmax(-1) == part_target)
    return torch.cat(log_likelihood).cpu().numpy(), torch.cat(greedy).cpu().numpy()


def tally(sums, examples, done):
    """The examples all of whose endings are done (N), and their Scores. sums: (4, N)."""
    counts = [len(example.endings) for example in examples]
    whole = np.minimum.reduceat(done, np.cumsum([0] + counts[:-1]))
    log_likelihood, tokens, greedy, last_greedy = sums[:, np.repeat(whole, counts)]
    tokens = tokens.astype(int)
    examples = list(itertools.compress(examples, whole))
    n_bytes = np.array([len(ending.encode()) for example in examples for ending in example.endings])
    return examples, Scores(log_likelihood, tokens, n_bytes, greedy == tokens, last_greedy > 0)


@torch.no_grad()
def score(model, examples, rows, autocast, batch_size, report=None, share=None):
    """Scores every ending of the examples, whose rows make_rows made -> Scores, the same on every process.

    model: the raw GPT, neither compiled nor wrapped, on its device. autocast: the context to run it in. batch_size: how
    many tokens, padding included, a process takes through the model at a time, if more than one row. report: a benchmark's,
    for a progress bar with its first figure so far. share: (number, of how many) of the rows this process takes, where some
    hold parts of one model and so take the same [each its own]. Every process makes the same number of forwards, and one
    reduction.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    number, of = share or (rank, world_size)
    sums = np.zeros((4, sum(len(example.endings) for example in examples)))  # log-likelihood, tokens, greedy, last greedy
    expected = np.bincount(np.concatenate([row.ending for row in rows]), minlength=sums.shape[1])
    rows, first = sorted(rows, key=lambda row: -len(row.ids)), 0  # the longest first: what fits then, fits to the end
    bar = tqdm(total=len(rows), unit="row", leave=False, disable=rank > 0 or report is None)
    with autocast, bar:  # entered once, so that the weights are converted once
        while first < len(rows):
            batch = rows[first:first + max(1, batch_size // len(rows[first].ids)) * of]
            first += len(batch)
            own = batch[number::of]
            log_likelihood, greedy = forward(model, own or batch[:1])
            if own:
                ending, final = np.concatenate([(row.ending, row.final) for row in own], axis=1)  # (M) each
                values = log_likelihood, np.ones_like(greedy), greedy, greedy & (final > 0)
                np.add.at(sums, (slice(None), ending), np.stack(values))
            if not bar.disable and time.time() >= bar.last_print_t + bar.mininterval:  # about to be drawn again
                some, scores = tally(sums, examples, sums[1] == expected)
                if some:
                    name, value = next(iter(report(some, scores).items()))
                    bar.set_postfix_str(f"{name} {value:.4f}", refresh=False)
            bar.update(len(batch))
    if world_size > 1:
        total = torch.from_numpy(sums).to(next(model.parameters()).device)
        dist.all_reduce(total)
        sums = total.cpu().numpy() / (world_size // of)
    return tally(sums, examples, sums[1] == expected)[1]


def accuracy(examples, scores, lengths):
    """How often the likeliest ending, its log-likelihood divided by its length, is the right one."""
    picks = (scores.log_likelihood / lengths).reshape(len(examples), -1).argmax(axis=1)
    return float(np.mean(picks == [example.label for example in examples]))


# --- examples from records --------------------------------------------------------------------------------------------------

def take(record, **kinds):
    """The values of a record's fields, each of the type given. Raises ValueError."""
    for name, kind in kinds.items():
        if name not in record:
            raise ValueError(f"no {name!r}, but {', '.join(map(str, record)) or 'nothing at all'}")
        if not isinstance(record[name], kind):
            raise ValueError(f"{name!r} is no {kind.__name__}, but {str(record[name])[:40]!r}")
    return [record[name] for name in kinds]


def choice(context, endings, label, first_label=0):
    """An Example of several endings, a space before each; its label counted from first_label. Raises ValueError."""
    for ending in endings:
        if not isinstance(ending, str) or not ending.strip():
            raise ValueError(f"an ending is empty: {ending!r}")
    labels = [str(i + first_label) for i in range(len(endings))]
    if str(label) not in labels:
        raise ValueError(f"the label {label!r} is none of {', '.join(labels)}")
    return Example(context, [" " + ending for ending in endings], labels.index(str(label)))


def read_examples(module, path, limit, options):
    here = path or module.HUB

    def records():  # what examples() makes an example of, and where that stood in case it cannot
        nonlocal here
        if not path and not module.HUB:
            raise UserError(module.NO_DATA)
        for file in [path] if path else load_hub(**module.HUB, patient=False)[0]:
            for where, record in read_records(file):
                here = f"{file}, {where}"
                yield record

    try:
        examples = list(itertools.islice(module.examples(records(), **options), limit or None))
    except ValueError as error:
        raise UserError(f"{here}: {error}; --help shows what a record looks like") from error
    if not examples:
        raise UserError(f"{here}: there is no example in it; --help shows what a record looks like")
    return examples


def load_examples(module, path=None, limit=0, **options):
    """A benchmark's examples, from a file or else from the hub: rank 0 reads, all get them. Raises UserError on all."""
    result = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            result = [read_examples(module, path, limit, options)]
        except UserError as error:
            result = [error]
        except ModuleNotFoundError as error:
            result = [UserError(f"the package {error.name} is missing: pip install {error.name}")]
    if dist.is_initialized():
        dist.broadcast_object_list(result)
    if isinstance(result[0], UserError):
        raise result[0]
    return result[0]


# --- the command line that all benchmarks share -----------------------------------------------------------------------------

@dataclass
class EvalConfig:
    checkpoint: str = None  # a checkpoint, or a run directory, whose newest counts [the newest under log/]
    model: str = None  # or weights of Hugging Face's GPT-2: a name, such as gpt2-xl, or a directory
    data: str = None  # the examples: a .jsonl, .csv, .parquet or text file [the hub's, if it has them; fetched once]
    limit: int = 0  # score only so many examples; 0: all
    batch_size: int = None  # tokens that a process takes through the model at a time [16384, on a CPU 2048]
    device: str = "auto"  # cuda, cuda:1, mps or cpu
    dtype: str = "auto"  # bfloat16, float16, or float32, the most exact
    json: str = None  # also write the figures, and the numbers of each example, to this file


def default_batch_size(model):
    """Tokens: on a GPU enough to keep it busy, on a CPU few enough for its caches, where 16384 take 1.7 times as long."""
    return 2048 if next(model.parameters()).device.type == "cpu" else 16384


def per_example(examples, scores):
    """What --json keeps of each example: the label and the like, and a list of each score, in the order of its endings."""
    ends = np.cumsum([len(example.endings) for example in examples])
    columns = {name: np.split(column, ends[:-1]) for name, column in scores._asdict().items()}
    texts = ("context", "endings", "stride")
    return [{**{k: v for k, v in example._asdict().items() if k not in texts},
             **{name: column[i].tolist() for name, column in columns.items()}} for i, example in enumerate(examples)]


def main(module, argv=None):
    """What running a benchmark does: reads the flags, the data and the model, scores, prints a table."""
    kinds = [EvalConfig, *([module.Options] if hasattr(module, "Options") else [])]
    given = parse_flags(module.__doc__, *kinds, argv=argv)
    config, *rest = (kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given}) for kind in kinds)
    options = asdict(rest[0]) if rest else {}
    for name, least in dict(limit=0, batch_size=1).items():
        if getattr(config, name) is not None and getattr(config, name) < least:
            raise UserError(f"--{name} {getattr(config, name)} cannot be: it is a number from {least} up")
    check_json(config.json)
    source = find_model(config)
    rank, world_size, device = setup(config.device)
    dtype = choose_dtype(config.dtype, device)
    examples = load_examples(module, config.data, config.limit, **options)
    model, tokenizer = load_model(source)
    rows = make_rows(examples, tokenizer, model.config)
    batch_size = config.batch_size or default_batch_size(model.to(device))
    start, autocast = time.perf_counter(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    try:
        scores = score(model, examples, rows, autocast, batch_size, module.report)
    except torch.OutOfMemoryError as error:
        raise UserError(f"--batch_size {batch_size} does not fit into the memory of {device}; {batch_size // 2} may") from error
    figures, seconds = module.report(examples, scores), time.perf_counter() - start
    if rank == 0:
        facts = dict(benchmark=Path(module.__file__).stem, **options, data=config.data or module.HUB, model=str(source),
                     parameters=sum(p.numel() for p in model.parameters()), tokenizer=tokenizer,
                     dtype=str(dtype).removeprefix("torch."), device=f"{world_size} x {device.type}")
        print(f"{facts['benchmark']}{''.join(f' --{name} {value}' for name, value in options.items())} of {source}")
        print(f"{facts['parameters']:,} parameters, tokens of {tokenizer}, {facts['dtype']}; {len(examples):,} "
              f"example{'s' * (len(examples) != 1)} in {duration(seconds)} on {facts['device']}\n")
        for name, value in figures.items():
            value = f"{value:,.4f}" + (f" ± {math.sqrt(value * (1 - value) / len(examples)):.4f}" if "acc" in name else "")
            print(f"  {name:<16} {value:<16} {module.METRICS[name]}")  # ±: the standard error of so many examples
        if config.json:
            write_json(config.json, dict(**facts, figures=figures, examples=per_example(examples, scores)))
    shut_down(world_size)
