"""Classes and functions for benchmarks such as hellaswag.py: examples, records and metrics."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from plaingpt.documents import load_hub, read_records
from plaingpt.errors import UserError

import numpy as np


@dataclass
class Example:
    """One question of a benchmark. Each pair of a context and an ending receives a score.

    The pairs are in this order: the first context with all endings, then the second context with
    all endings, and so on. Only core.py uses the fields kind and shots.
    """

    contexts: list[str]
    endings: list[str]  # each ending includes the whitespace before it
    label: int = 0  # index of the right pair
    # If a pair is longer than the model's context, the model reads it in windows. The stride is the
    # number of tokens that each window scores. The stride 0 means that windows do not overlap, and
    # inf means that only the last window is scored.
    stride: float = math.inf
    facts: dict = field(default_factory=dict)  # more values for report() and for --json
    kind: str = ""  # kind of task
    shots: tuple = ()  # few-shot examples, as strings

    def __len__(self):
        return len(self.contexts) * len(self.endings)


def prompt_ids(example, tokenizer):
    """Yields (ids of a context, [ids of each of its endings]), as in EleutherAI's harness.

    Raises UserError if an ending has no ids.
    """
    for context in example.contexts:
        # The tokenizer encodes the context without the whitespace at its end, which yields n ids,
        # and then the context and the ending together. All ids of the second encoding, except the
        # first n, belong to the ending.
        ids = tokenizer.encode(context.rstrip())
        endings = [tokenizer.encode(context + ending)[len(ids) :] for ending in example.endings]
        for own, ending in zip(endings, example.endings):
            check_ending(own, context, ending)
        yield ids or [tokenizer.end_of_text], endings


def check_ending(ids, context, ending):
    """Raises UserError if an ending has no ids: every model would score it with probability 1.

    This happens if the tokenizer omits the characters of the ending, or merges the whole ending
    with the end of the context into one token.
    """
    if not ids:
        raise UserError(
            f"the ending {ending!r} after {context[-20:]!r} adds no tokens to the context; remove "
            "this example, or use a model with a different tokenizer"
        )


@dataclass
class Benchmark:
    """What load_examples and run_benchmark need to know about a benchmark.

    The file NAME.py, such as hellaswag.py, stores its Benchmark in the variable BENCHMARK.
    """

    name: str
    doc: str  # text for --help
    stream: str  # name of the logged metric in a run's log
    hub: dict | None  # arguments of load_hub; None: the data are not on Hugging Face's hub
    examples: Callable | None  # (records, **options) -> iterator of Examples
    report: Callable  # (examples, scores) -> {metric: value}
    figures: dict  # {metric: its meaning, and what to compare it with}
    logged: str  # the metric that a run logs
    columns: tuple = ()  # the fields of a record that `examples` reads; (): all fields
    proportions: tuple = ()  # the metrics to print with the standard error of a proportion
    options: tuple = ()  # dataclasses with the benchmark's own flags
    input_options: tuple = ()  # names of the flags in options that take input files or directories
    load: Callable | None = None  # if examples is None: (path, limit, **options) -> Examples
    prompt_ids: Callable = prompt_ids  # (example, tokenizer) -> ids of contexts and endings
    spare: int = 0  # number of positions at the end of the model's context that stay unused


def split_by_example(examples, values):
    """Splits an array with a value for each pair, (N,). Returns a list: one array per example."""
    ends = np.cumsum([len(example) for example in examples])
    return np.split(values, ends[:-1])


def accuracy(examples, scores, lengths=1):
    """Returns the fraction of examples whose right pair has the highest log-likelihood / length.

    scores: the result of `score`. lengths: the divisor of each pair, such as the number of
    bytes of the ending, (N,); or 1 for all pairs.
    """
    likelihoods = split_by_example(examples, scores.log_likelihood / lengths)
    is_right = []
    for example, likelihood in zip(examples, likelihoods):
        is_right.append(likelihood.argmax() == example.label)
    return float(np.mean(is_right))


def perplexity(nats):
    """Returns exp(nats), or infinity if exp(nats) would overflow, or NaN if nats is NaN.

    Nats per word are large if a text is one very long word.
    """
    return math.inf if nats > 700 else math.exp(nats)


def get_fields(record, **kinds):
    """Returns the values of the fields in `kinds`, {field: its type}, as a list.

    Raises UserError if the record lacks a field, or if the value of a field has a different type.
    """
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind):
            raise bad_record(record, f"field {name!r} is missing or has a wrong type")
    return [record[name] for name in kinds]


def choice(record, context, endings, label):
    """Returns an Example with one context, and with a space before each ending.

    label: index of the right ending, from 0. Raises UserError if there is no such ending.
    """
    if str(label) not in map(str, range(len(endings))):
        raise bad_record(record, f"label {label!r}: must be from 0 to {len(endings) - 1}")
    return Example([context], [f" {ending}" for ending in endings], int(label))


def bad_record(record, reason):
    """Returns a UserError that names the record, by its file and number, and the reason."""
    return UserError(f"{record['where']}: {reason}; the program's --help shows the format")


def load_examples(benchmark, path=None, limit=0, **options):
    """Returns the Examples of a benchmark, from a file or from the Hugging Face Hub.

    path: the file, or None for the hub. limit: the number of Examples to load; 0 means all.
    options: the benchmark's own flags. Raises UserError if the data cannot be loaded.
    """
    if benchmark.load:
        return benchmark.load(path, limit, **options)
    if not path and not benchmark.hub:
        raise UserError(f"no data; give a file; {benchmark.name}.py --help shows its format")
    if path:
        files = [path]
    else:
        files = load_hub(**benchmark.hub)
    records = read_records(files, benchmark.columns)
    examples = benchmark.examples(records, **options)
    examples = list(itertools.islice(examples, limit or None))  # reads only `limit` examples
    if not examples:
        raise UserError(f"{path or benchmark.name}: no examples; see the format in --help")
    return examples
