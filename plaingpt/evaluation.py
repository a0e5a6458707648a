"""Scores endings. A score is the log-likelihood that a model gives to an ending after a context.

A benchmark, such as hellaswag.py, makes examples from records, and figures from scores. This file
turns examples into rows of tokens. Endings of one context share a row:

    token     c0 c1 c2 c3   a0 a1   b0 b1 b2      context c, endings a and b, each without its
    position   0  1  2  3    4  5    4  5  6      last token, which is only predicted
    part       0  0  0  0    1  1    2  2  2

A token attends to the context and to earlier tokens of its own part, never to another ending.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Annotated, NamedTuple

import numpy as np
import torch

import plaingpt.device as devices
from plaingpt import cli
from plaingpt.checkpoint import load_model, newest_model
from plaingpt.cli import OR, UserError, print0
from plaingpt.sampling import attention_for_many_shapes
from plaingpt.text import clean_text, load_hub, read_records

CHUNK = 256  # positions whose logits are in memory at a time: 50 MB in float32
# A forward pass has so many tokens. The caches of a CPU are small.
TOKENS = dict(cpu=2048, cuda=16384, mps=16384)
# Rows are padded to a multiple of so many tokens, so that a GPU sees few shapes.
ROUND = dict(cpu=1, cuda=64, mps=64)


@dataclass
class Example:
    """One question. Its pairs are contexts x endings, in this order."""

    contexts: list[str]
    endings: list[str]  # each starts with its white space
    label: int = 0  # the right pair
    stride: float = math.inf  # of windows (0: no overlap; math.inf: only the last window)
    shots: tuple = ()  # solved examples, as texts; only a benchmark's own prompt_ids() reads them
    counts: dict = field(default_factory=dict)  # other facts that report() needs

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
    """Splits ids that are longer than block_size. Yields (context, piece of ending, is_last)."""
    ids, done = context + ending, len(context)
    while done < len(ids):
        end = min(len(ids), max(block_size + 1, done + (stride or block_size)))
        start = max(0, end - block_size - 1)
        done = max(done, start + 1)
        yield ids[start:done], ids[done:end], end == len(ids)
        done = end


def prompt_ids(example, tokenizer):
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
    hub: dict | None  # arguments of load_hub; None: the data are in no data set of the hub
    examples: Callable | None  # (records, **options) -> iterator of Examples
    report: Callable  # (examples, scores) -> {figure: value}
    figures: dict  # {figure: what it is, and what it compares with}
    options: tuple = ()  # dataclasses with flags of its own
    load: Callable | None = None  # if examples is None: (path, limit, **options) -> Examples
    prompt_ids: Callable = prompt_ids  # (example, tokenizer) -> ids of contexts and endings
    spare: int = 0  # positions of the model's context that a long text leaves free


def make_rows(examples, tokenizer, config, prompt_ids=prompt_ids, spare=0):
    """Examples -> Rows for a model with this GPTConfig. Raises UserError if the stride is too long.

    prompt_ids and spare are those of the Benchmark.
    """
    T, rows, pair, n_cut = config.block_size - spare, [], 0, 0
    for example in examples:
        if T < example.stride < math.inf:
            raise UserError(f"--stride {example.stride}: must be at most {T}, the model's context")
        for context, endings in prompt_ids(example, tokenizer):
            first = len(rows)
            for ending in endings:
                n_cut += example.stride == math.inf and len(context) + len(ending) - 1 > T
                for before, piece, is_last in windows(context, ending, T, example.stride):
                    before, piece = np.array(before, np.int32), np.array(piece, np.int32)
                    shares = len(rows) > first and example.stride == math.inf
                    if not (shares and np.array_equal(rows[-1].context, before)):
                        rows.append(Row(before, []))
                    rows[-1].endings.append((piece, pair, is_last))
                pair += 1
    if n_cut:
        print0(f"note: {n_cut:,} of {pair:,} endings, with context, were cut to {T + 1} tokens")
    return rows


def lay_out(rows, L):
    """Lays out B Rows -> tokens (3, B, L), padded with 0, and the M scored tokens (4, M).

    tokens has the id, position and part of each token, as at the top of this file. scored has, for
    each scored token, the index in B x L of the token before it, its id, its pair, and 1 if it is
    the last one of its pair.
    """
    tokens = np.zeros((3, len(rows), L), np.int64)
    scored = []
    for b, row in enumerate(rows):
        P = end = len(row.context)
        tokens[:2, b, :P] = row.context, np.arange(P)
        for part, (ids, pair, is_last) in enumerate(row.endings, start=1):
            n = len(ids)
            previous = b * L + np.r_[P - 1, end : end + n - 1]
            ends = is_last * (np.arange(n) == n - 1)
            scored.append(np.broadcast_arrays(previous, ids, pair, ends))  # (4, n)
            tokens[:, b, end : end + n - 1] = np.broadcast_arrays(
                ids[:-1], np.arange(P, P + n - 1), part
            )
            end += n - 1
    return torch.from_numpy(tokens), torch.from_numpy(np.concatenate(scored, axis=1))


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
        # (B, 1, L, L)
        mask = ((part[:, None] == 0) | (part[:, None] == part[:, :, None])).tril()[:, None]
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

    rows: from make_rows. process: a device.Process.
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
            cli.show_progress(first, len(rows), "rows")
    sums = process.sum(torch.from_numpy(sums)).cpu().numpy()
    return SimpleNamespace(
        log_likelihood=sums[0],  # of the ending, in nats
        tokens=sums[1].astype(int),  # all of the ending, unless it was cut
        # of the ending, with the white space at its start
        bytes=np.array(
            [len(clean_text(e).encode()) for x in examples for e in x.endings * len(x.contexts)]
        ),
        greedy=sums[2] == sums[1],  # whether every token is the likeliest one
        last_greedy=sums[3] > 0,
    )  # whether the last token is, given the correct earlier ones


def split(examples, values):
    """Splits an array (N) over all pairs -> one array for each example."""
    return np.split(values, np.cumsum([len(example) for example in examples])[:-1])


def accuracy(examples, scores, lengths=1):
    """How often the right pair has the highest log-likelihood / length. lengths: (N), or 1."""
    found = split(examples, scores.log_likelihood / lengths)
    return float(np.mean([a.argmax() == example.label for a, example in zip(found, examples)]))


def perplexity(nats):
    """exp(nats), or infinity if a float cannot hold it, as for a text that is one long word."""
    return math.exp(nats) if nats < 700 else math.inf


def get_fields(record, **kinds):
    """Returns the values of a record's fields. kinds: {name: type}. Raises UserError."""
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind):
            raise bad_record(record, f"field {name!r} is missing or has a wrong type")
    return [record[name] for name in kinds]


def choice(record, context, endings, label):
    """Makes an Example with a space before each ending. label counts from 0. Raises UserError."""
    if str(label) not in map(str, range(len(endings))):
        raise bad_record(record, f"label {label!r}: must be from 0 to {len(endings) - 1}")
    return Example([context], [f" {ending}" for ending in endings], int(label))


def bad_record(record, reason):
    """Makes a UserError that says where the record is."""
    return UserError(f"{record['where']}: {reason}; the program's --help shows the format")


def load_examples(benchmark, path=None, limit=0, **options):
    """Loads the Examples of a file or of the hub. Raises UserError."""
    if benchmark.load:
        return benchmark.load(path, limit, **options)
    if not path and not benchmark.hub:
        raise UserError(f"no data; give a file, as {benchmark.name}.py --help explains")
    files = [path] if path else load_hub(**benchmark.hub, patient=False)[0]
    found = [*benchmark.examples(read_records(files), **options)][: limit or None]
    if not found:
        raise UserError(f"{path or benchmark.name}: has no example; see the program's --help")
    return found


def load_evals(config, tokenizer, gpt_config):
    """Loads --evals -> [(Benchmark, its examples, its rows)].

    If there are no data, skips NAME with a note, and raises UserError for NAME=FILE.
    """
    evals = []
    for item in filter(None, config.evals.split(",") if config.eval_every else []):
        name, _, path = item.strip().partition("=")
        found = "." not in name and importlib.util.find_spec(name)
        benchmark = getattr(found and importlib.import_module(name), "BENCHMARK", None)
        if not benchmark:
            raise UserError(f"--evals {name}: no such benchmark; give a module, such as lambada")
        if benchmark in [known for known, *_ in evals]:
            raise UserError(f"--evals {name}: is given twice; give it once")
        try:
            examples = devices.on_rank0(load_examples, benchmark, path)
            rows = make_rows(examples, tokenizer, gpt_config, benchmark.prompt_ids, benchmark.spare)
            evals.append((benchmark, examples, rows))
        except UserError as error:
            if path:
                raise
            print0(f"note: {name} is skipped: {error}")
    return evals


def run_evals(evals, model, process, config, step):
    """Scores all benchmarks. Prints and returns {stream: figure}, equal on all processes.

    evals: from load_evals. model: a GPT or a Pipeline. config: TrainConfig.
    """
    figures = {}
    tokens = min(config.batch_size * model.config.block_size, TOKENS[process.device.type])
    model.eval()
    for benchmark, examples, rows in evals:
        scores = score(model, examples, rows, process, tokens)
        figures[benchmark.stream] = next(iter(benchmark.report(examples, scores).values()))
    model.train()
    print0(" | ".join([f"step {step}", *(f"{k} {value:.4f}" for k, value in figures.items())]))
    return figures


@dataclass
class EvalConfig:
    checkpoint: Annotated[str | None, "checkpoint or run directory [newest in log/]"] = None
    model: Annotated[str | None, "or GPT-2 from Hugging Face: name or directory", OR] = None
    data: Annotated[str | None, ".jsonl, .csv, .parquet or text file [the hub's, if any]"] = None
    limit: Annotated[int, "number of examples; 0: all", "at least 0"] = 0
    tokens_per_forward: Annotated[int | None, "[16384; on a CPU 2048]", "at least 1"] = None
    device: Annotated[str, "cuda, cuda:1, mps or cpu"] = "auto"
    dtype: Annotated[devices.Dtype, "number format; float32 is the most exact"] = "auto"
    json: Annotated[str | None, "also write figures, examples and scores to this file"] = None


def main(benchmark, argv=None):
    """Runs the program of a benchmark: reads the flags, scores a model, prints the figures.

    Returns the figures, the same on every process.
    """
    given = cli.parse_flags(benchmark.doc, EvalConfig, *benchmark.options, argv=argv)
    options = {f.name: given.pop(f.name, f.default) for c in benchmark.options for f in fields(c)}
    config = EvalConfig(**given)
    cli.check_output("--json", config.json, [config.data, options.get("bundle")])
    source = config.model or newest_model(config.checkpoint)
    process = devices.start(config.device, config.dtype)
    examples = devices.on_rank0(load_examples, benchmark, config.data, config.limit, **options)
    model, tokenizer = load_model(source)
    model.to(process.device).eval()
    rows = make_rows(examples, tokenizer, model.config, benchmark.prompt_ids, benchmark.spare)
    tokens = config.tokens_per_forward or TOKENS[process.device.type]
    with devices.memory_advice(f"--tokens_per_forward {tokens}: out of memory; give fewer"):
        scores = score(model, examples, rows, process, tokens)
    figures = benchmark.report(examples, scores)
    facts = dict(
        benchmark=benchmark.name,
        data=config.data or (benchmark.hub or {}).get("dataset"),
        **options,
        limit=config.limit or None,
        model=str(source),
        n_examples=len(examples),
        tokenizer=tokenizer.name,
        dtype=process.dtype_name,
        device=f"{process.world_size} x {process.device.type}",
    )
    facts = {name: value for name, value in facts.items() if value is not None}
    for name, value in facts.items():
        print0(f"{name:<18} {value}")
    for name, meaning in benchmark.figures.items():
        value = figures[name]
        text = f"{value:,.4f}" if value < 1e9 else f"{value:.4g}"
        if "acc" in name:  # adds the standard error of a mean
            text += f" ± {math.sqrt(value * (1 - value) / len(examples)):.4f}"
        print0(f"{name:<18} {text:<18} {meaning}")
    if config.json and process.rank == 0:
        results = [dict(label=example.label, **example.counts) for example in examples]
        for name, values in vars(scores).items():
            for result, own in zip(results, split(examples, values)):
                result[name] = own.tolist()
        cli.write_json(config.json, dict(**facts, figures=figures, examples=results))
    process.barrier()
    return figures


def launch(benchmark):
    """Runs a benchmark's file as a program."""
    cli.run_program(lambda: main(benchmark))
