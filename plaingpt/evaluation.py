"""Scores endings: the log-likelihood that a model gives to an ending after a context.

A benchmark, such as hellaswag.py, makes examples from records, and figures from scores. This file
turns examples into rows of tokens. Endings of one context share a row:

    token     c0 c1 c2 c3   a0 a1   b0 b1 b2      context c, endings a and b, each without its
    position   0  1  2  3    4  5    4  5  6      last token, which is only predicted
    part       0  0  0  0    1  1    2  2  2

A token attends to the context and to earlier tokens of its own part, never to another ending.
"""

import importlib.util
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Annotated, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import plaingpt.device as devices
from plaingpt.checkpoint import find_model, load_model
from plaingpt.cli import UserError, check_output, parse_flags, print0, show_progress, write_json
from plaingpt.corpus import load_hub, read_records

CHUNK = 256  # positions whose logits are in memory at a time: 50 MB in float32
TOKENS = dict(cpu=2048, cuda=16384, mps=16384)  # of a forward pass; the caches of a CPU are small
ROUND = dict(cpu=1, cuda=64, mps=64)  # row lengths are padded to a multiple: few shapes on a GPU
# Without cuDNN's attention, which prepares a plan for each new shape.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class Example:
    """One question. Its pairs are contexts x endings, in this order."""
    contexts: list[str]
    endings: list[str]  # each starts with its white space
    label: int = 0  # the right pair
    stride: float = math.inf  # of windows (0: no overlap; math.inf: only the last window)
    shots: tuple = ()  # solved examples, as texts; only a benchmark's own encode() reads them
    counts: dict | None = None  # other numbers that report() needs

    def __len__(self):
        return len(self.contexts) * len(self.endings)


class Row(NamedTuple):
    """Ids of a context, and its endings: (ids, number of the pair, whether they end the pair)."""
    context: np.ndarray
    endings: list

    @property
    def length(self):
        return len(self.context) + sum(len(ids) - 1 for ids, _, _ in self.endings)


def windows(context, ending, block_size, stride):
    """Splits ids longer than block_size. Yields (context, piece of the ending, is_last)."""
    ids, done = context + ending, len(context)
    while done < len(ids):
        end = min(len(ids), max(block_size + 1, done + (stride or block_size)))
        start = max(0, end - block_size - 1)
        done = max(done, start + 1)
        yield ids[start:done], ids[done:end], end == len(ids)
        done = end


def encode_texts(example, tokenizer):
    """Yields (ids of a context, [ids of each of its endings]), as EleutherAI's harness does."""
    for context in example.contexts:
        # White space at the end of the context moves to the ending. The ending has the ids of
        # context + ending, without the first len(ids) of them.
        ids = tokenizer.encode(context.rstrip())
        endings = [tokenizer.encode(context + ending)[len(ids) :] for ending in example.endings]
        yield ids or [tokenizer.end_of_text], endings


@dataclass
class Benchmark:
    """A benchmark. The file NAME.py has one, called BENCHMARK."""
    name: str
    doc: str  # text for --help
    stream: str  # name of its first figure in a run's log
    hub: dict | None  # arguments of load_hub
    examples: Callable | None  # (records, **options) -> iterator of Examples
    report: Callable  # (examples, scores) -> {figure: value}
    figures: dict  # {figure: what it is, and what it compares with}
    options: tuple = ()  # dataclasses with flags of its own
    no_data: str = "not on the hub; give --data FILE or --evals NAME=FILE"  # if hub is None
    load: Callable | None = None  # if examples is None: (path, limit, **options) -> Examples
    encode: Callable = encode_texts  # (example, tokenizer) -> ids of contexts and endings
    spare: int = 0  # positions of the model's context that a long text leaves free
    score: Callable | None = None  # in place of score() below


def make_rows(examples, tokenizer, config, encode=encode_texts, spare=0):
    """Examples -> Rows for a model with this GPTConfig. Raises UserError if an id is too high.

    encode, spare: of the Benchmark.
    """
    T, rows, pair, n_cut = config.block_size - spare, [], 0, 0
    for example in examples:
        if T < example.stride < math.inf:
            raise UserError(f"--stride {example.stride}: must be at most {T}, the model's context")
        for context, endings in encode(example, tokenizer):
            if max(itertools.chain(context, *endings)) >= config.vocab_size:
                raise UserError(f"the tokenizer has more ids than the model's {config.vocab_size}")
            first = len(rows)
            for ending in endings:
                n_cut += example.stride == math.inf and len(context) + len(ending) - 1 > T
                for before, piece, is_last in windows(context, ending, T, example.stride):
                    before, piece = np.array(before, np.uint16), np.array(piece, np.uint16)
                    shares = len(rows) > first and example.stride == math.inf
                    if not (shares and np.array_equal(rows[-1].context, before)):
                        rows.append(Row(before, []))
                    rows[-1].endings.append((piece, pair, is_last))
                pair += 1
    if n_cut:
        print0(f"note: {n_cut:,} of {pair:,} endings, with context, were cut to {T + 1} tokens")
    return rows


def lay_out(row):
    """Row -> its tokens (L, 3) and its scored tokens (M, 4).

    tokens: id, position, part, as at the top of this file. scored: index of the previous token, id,
    pair, 1 for a pair's last token.
    """
    P = L = len(row.context)
    tokens, scored = [columns(row.context, np.arange(P), 0)], []
    for part, (ids, pair, is_last) in enumerate(row.endings, start=1):
        n = len(ids)
        ends = is_last * (np.arange(n) == n - 1)
        scored.append(columns(np.r_[P - 1, L : L + n - 1], ids, pair, ends))
        tokens.append(columns(ids[:-1], np.arange(P, P + n - 1), part))
        L += n - 1
    return torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(scored))


def columns(*values):
    """Arrays (n) and numbers -> array (n, number of values)."""
    return np.stack(np.broadcast_arrays(*values), axis=1).astype(np.int64)


def round_up(length, device):
    return length + -length % ROUND[device.type]


def forward(model, rows, device):
    """Runs the model on rows -> log-likelihood, greedy, pair, is_last of scored tokens (M)."""
    tokens, scored = zip(*map(lay_out, rows))
    L = round_up(max(map(len, tokens)), device)  # no token sees the padding
    tokens = torch.stack([F.pad(t, (0, 0, 0, L - len(t))) for t in tokens])  # (B, L, 3)
    idx, pos, part = tokens.permute(2, 0, 1).contiguous().to(device)  # (B, L) each
    scored = torch.cat([s + torch.tensor([b * L, 0, 0, 0]) for b, s in enumerate(scored)])  # (M, 4)
    at, target = scored[:, :2].T.contiguous().to(device)  # (M) each
    mask = None  # causal, unless endings share a row
    if tokens[:, :, 2].max() > 1:
        mask = (part[:, None] == 0) | (part[:, None] == part[:, :, None])  # (B, L, L)
        mask = mask.tril()[:, None]  # (B, 1, L, L)
    x = model.hidden(idx, pos=pos, mask=mask).flatten(0, 1)[at]  # (B, L, C) -> (M, C)
    log_likelihood, greedy = [], []
    with torch.autocast(device.type, enabled=False):  # bfloat16 numbers near 100 are 0.5 apart
        for x_part, target_part in zip(x.float().split(CHUNK), target.split(CHUNK)):
            logits = model.logits(x_part)  # (CHUNK, C) -> (CHUNK, vocab_size)
            log_likelihood.append(-F.cross_entropy(logits, target_part, reduction="none"))
            greedy.append(logits.argmax(-1) == target_part)
    return *(torch.cat(x).cpu().numpy() for x in (log_likelihood, greedy)), *scored[:, 2:].T.numpy()


@torch.no_grad()
def score(model, examples, rows, device, autocast, tokens_per_forward, dp_rank=0, dp_size=1):
    """Scores the N pairs of the examples -> arrays (N), the same on every process."""
    rows = sorted(rows, key=lambda row: -row.length)  # first the one that needs most memory
    sums = np.zeros((4, sum(map(len, examples))))  # log-likelihood, tokens, greedy, last greedy
    first = 0
    with autocast, sdpa_kernel(KERNELS):  # entered once: the weights are converted once
        while first < len(rows):
            L = round_up(rows[first].length, device)
            B = max(1, tokens_per_forward // L)  # with padding
            batch = rows[first : first + B * dp_size]
            first += len(batch)
            own = batch[dp_rank::dp_size]
            # A process without rows also runs a row, because all must join the collectives.
            log_likelihood, greedy, pair, is_last = forward(model, own or batch[:1], device)
            if own:
                values = [log_likelihood, np.ones_like(greedy), greedy, greedy & (is_last > 0)]
                np.add.at(sums, (slice(None), pair), np.stack(values))
            loss = -sums[0].sum() / max(1, sums[1].sum())
            show_progress(first, len(rows), f"loss {loss:.3f}")
    sums = devices.sum_over_data(torch.from_numpy(sums), device, dp_size).cpu().numpy()
    if not np.isfinite(sums[0]).all():
        raise UserError("the model's log-likelihoods are not finite; use an earlier checkpoint")
    return SimpleNamespace(
        log_likelihood=sums[0],  # of the ending, in nats
        tokens=sums[1].astype(int),  # all of the ending, unless it was cut
        bytes=np.array([len(ending.encode()) for example in examples for _ in example.contexts
                        for ending in example.endings]),  # with the white space at its start
        greedy=sums[2] == sums[1],  # whether every token is the likeliest one
        last_greedy=sums[3] > 0)  # whether the last token is, given the correct earlier ones


def accuracy(examples, scores, lengths=1):
    """How often the right pair has the highest log-likelihood / length. lengths: (N), or 1."""
    ends = np.cumsum([len(example) for example in examples])
    found = np.split(scores.log_likelihood / lengths, ends[:-1])
    return float(np.mean([a.argmax() == example.label for a, example in zip(found, examples)]))


def perplexity(nats):
    """exp(nats), or infinity if a float cannot hold it, as for a text that is one long word."""
    return math.exp(nats) if nats < 700 else math.inf


def take(record, **kinds):
    """The values of a record's fields {name: type}. Raises UserError."""
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind):
            raise bad_record(record, f"field {name!r} is missing or has a wrong type")
    return [record[name] for name in kinds]


def choice(record, context, endings, label, first_label=0):
    """Example with a space before each ending. label counts from first_label. Raises UserError."""
    if not all(isinstance(ending, str) and ending.strip() for ending in endings):
        raise bad_record(record, "an ending is empty or not a text")
    labels = [str(first_label + i) for i in range(len(endings))]
    if str(label) not in labels:
        raise bad_record(record, f"label {label!r}: must be one of {', '.join(labels)}")
    return Example([context], [" " + ending for ending in endings], labels.index(str(label)))


def bad_record(record, reason):
    """A UserError that says where the record is."""
    return UserError(f"{record['where']}: {reason}; the program's --help shows the format")


def load_examples(benchmark, path=None, limit=0, **options):
    """Examples of a file or of the hub. Raises UserError."""
    if benchmark.load:
        return benchmark.load(path, limit, **options)
    if not path and not benchmark.hub:
        raise UserError(benchmark.no_data)
    files = [path] if path else load_hub(**benchmark.hub, patient=False)[0]
    records = ({**record, "where": f"{file}, {where}"}
               for file in files for where, record in read_records(file))
    found = list(itertools.islice(benchmark.examples(records, **options), limit or None))
    if not found:
        raise UserError(f"{path or benchmark.name}: has no example; the program's --help shows the "
                        "format")
    return found


def load_evals(config, known, tokenizer, gpt_config):
    """--evals -> [(Benchmark, its examples, rows)]. Without data: skips NAME, rejects NAME=FILE."""
    evals = []
    for item in filter(None, config.evals.split(",") if config.eval_every else []):
        name, _, path = item.partition("=")
        if any(name == benchmark.name for benchmark, _, _ in evals):
            raise UserError(f"--evals {name}: is given twice; give each benchmark once")
        if name not in known and ("." in name or not importlib.util.find_spec(name)):
            raise UserError(f"--evals {name}: must be one of {', '.join(known)}, or a module")
        try:
            benchmark = importlib.import_module(name).BENCHMARK
            examples = devices.on_rank0(load_examples, benchmark, path)
            rows = make_rows(
                examples, tokenizer, gpt_config, benchmark.encode, benchmark.spare)
            evals.append((benchmark, examples, rows))
        except UserError as error:
            if path:
                raise
            print0(f"note: {name} is skipped: {error}")
    return evals


def run_evals(evals, trainer, config, step, device, dp_rank, dp_size):
    """Scores all benchmarks. Prints and returns {stream: first figure}, equal on all processes."""
    model, figures = trainer.eval_model, {}
    tokens = min(config.batch_size * model.config.block_size, TOKENS[device.type])
    model.eval()
    for benchmark, examples, rows in evals:
        scores = (benchmark.score or score)(
            model, examples, rows, device, trainer.autocast, tokens, dp_rank, dp_size)
        figures[benchmark.stream] = next(iter(benchmark.report(examples, scores).values()))
    model.train()
    print0(" | ".join([f"step {step}", *(f"{k} {value:.4f}" for k, value in figures.items())]))
    return figures


@dataclass
class EvalConfig:
    checkpoint: Annotated[str | None, "checkpoint or run directory [newest in log/]"] = None
    model: Annotated[str | None, "or GPT-2 from Hugging Face: name or directory"] = None
    data: Annotated[str | None, ".jsonl, .csv, .parquet or text file [from the hub]"] = None
    limit: Annotated[int, "number of examples; 0: all", "at least 0"] = 0
    tokens_per_forward: Annotated[int | None, "[16384; on a CPU 2048]", "at least 1"] = None
    device: Annotated[str, "cuda, cuda:1, mps or cpu"] = "auto"
    dtype: Annotated[devices.Dtype, "number format; float32 is the most exact"] = "auto"
    json: Annotated[str | None, "also write figures, examples and scores to this file"] = None


@devices.lost_process_advice()
def main(benchmark, argv=None):
    """The program of a benchmark: reads the flags, scores a model, prints the figures."""
    given = parse_flags(benchmark.doc, EvalConfig, *benchmark.options, argv=argv)
    options = {f.name: given.pop(f.name, f.default) for c in benchmark.options for f in fields(c)}
    config = EvalConfig(**given)
    check_output("--json", config.json)
    source = find_model(config)
    rank, world_size, device = devices.setup(config.device)
    dtype = devices.choose_dtype(config.dtype, device)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    examples = devices.on_rank0(load_examples, benchmark, config.data, config.limit, **options)
    model, tokenizer = load_model(source)
    model.to(device).eval()
    rows = make_rows(examples, tokenizer, model.config, benchmark.encode, benchmark.spare)
    tokens = config.tokens_per_forward or TOKENS[device.type]
    start = time.monotonic()
    with devices.memory_advice(f"--tokens_per_forward {tokens}: out of memory; give fewer"):
        scores = (benchmark.score or score)(
            model, examples, rows, device, autocast, tokens, rank, world_size)
    figures = benchmark.report(examples, scores)
    if rank == 0:
        facts = dict(
            benchmark=benchmark.name, data=config.data or (benchmark.hub or {}).get("dataset"),
            **options, limit=config.limit or None, model=str(source),
            parameters=sum(p.numel() for p in model.parameters()),
            tokenizer=tokenizer.name, dtype=str(dtype).removeprefix("torch."),
            device=f"{world_size} x {device.type}", seconds=round(time.monotonic() - start, 1),
            n_examples=len(examples))
        facts = {name: value for name, value in facts.items() if value is not None}
        print0("\n".join(f"{name:<18} {value}" for name, value in facts.items()))
        for name, value in figures.items():
            if name not in benchmark.figures:  # only for the file
                continue
            text = f"{value:,.4f}" if value < 1e9 else f"{value:.4g}"
            if "acc" in name:  # with the standard error of a mean
                text += f" ± {math.sqrt(value * (1 - value) / len(examples)):.4f}"
            print(f"{name:<18} {text:<18} {benchmark.figures[name]}")
        if config.json:
            ends = np.cumsum([len(example) for example in examples])
            split = {name: np.split(column, ends[:-1]) for name, column in vars(scores).items()}
            results = [dict(label=example.label, **(example.counts or {}),
                            **{name: arrays[i].tolist() for name, arrays in split.items()})
                       for i, example in enumerate(examples)]
            write_json(config.json, dict(**facts, figures=figures, examples=results))
    devices.shut_down(world_size)
