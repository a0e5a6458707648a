"""What the file of a benchmark needs: Examples, and metrics of their scores."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from plaingpt.base.errors import UserError
from plaingpt.data.documents import load_hub, read_records

import numpy as np


@dataclass
class Example:
    """One question. Its pairs are contexts x endings, in this order."""

    contexts: list[str]
    endings: list[str]  # each begins with its white space
    label: int = 0  # the right pair
    stride: float = math.inf  # of windows, in tokens (0: no overlap; inf: only the last window)
    facts: dict = field(default_factory=dict)  # what else report() needs, and --json writes
    # Only core.py uses the next two fields.
    kind: str = ""  # kind of task
    shots: tuple = ()  # solved examples, as texts

    def __len__(self):
        return len(self.contexts) * len(self.endings)


def prompt_ids(example, tokenizer):
    """Yields (ids of a context, [ids of each of its endings]), as in EleutherAI's harness.

    Raises UserError if an ending has no ids.
    """
    for context in example.contexts:
        # White space at the end of the context moves to the ending. The ids of the ending are the
        # ids of context + ending, without the first len(ids) ids.
        ids = tokenizer.encode(context.rstrip())
        endings = [tokenizer.encode(context + ending)[len(ids) :] for ending in example.endings]
        for own, ending in zip(endings, example.endings):
            check_ending(own, context, ending)
        yield ids or [tokenizer.end_of_text], endings


def check_ending(ids, context, ending):
    """Raises UserError if an ending has no ids, because any model would predict this ending.

    The tokenizer may omit the text of the ending, or use one token for the end of the context and
    all of the ending.
    """
    if not ids:
        raise UserError(
            f"the ending {ending!r} after {context[-20:]!r} has no tokens of its own; remove this "
            "example, or use a model with another tokenizer"
        )


@dataclass
class Benchmark:
    """A benchmark. The file NAME.py contains one, called BENCHMARK."""

    name: str
    doc: str  # text for --help
    stream: str  # name of the logged metric in a run's log
    hub: dict | None  # arguments of load_hub; None: the data are not on the hub
    examples: Callable | None  # (records, **options) -> iterator of Examples
    report: Callable  # (examples, scores) -> {metric: value}
    figures: dict  # {metric: its meaning, and what to compare it with}
    logged: str  # the metric that a run logs
    columns: tuple = ()  # the fields that examples reads, the only ones decoded. (): all
    proportions: tuple = ()  # the metrics to print with the standard error of a proportion
    options: tuple = ()  # dataclasses with the benchmark's own flags
    input_options: tuple = ()  # names of these flags that are files or directories to read
    load: Callable | None = None  # if examples is None: (path, limit, **options) -> Examples
    prompt_ids: Callable = prompt_ids  # (example, tokenizer) -> ids of contexts and endings
    spare: int = 0  # positions of the model's context that stay free after a long text


def split_by_example(examples, values):
    """Splits an array (N) of all pairs -> one array per example."""
    ends = np.cumsum([len(example) for example in examples])
    return np.split(values, ends[:-1])


def accuracy(examples, scores, lengths=1):
    """Returns the fraction of examples whose right pair has the highest log-likelihood / length.

    lengths: (N), such as the bytes of the endings, or 1.
    """
    likelihoods = split_by_example(examples, scores.log_likelihood / lengths)
    is_right = []
    for example, likelihood in zip(examples, likelihoods):
        is_right.append(likelihood.argmax() == example.label)
    return float(np.mean(is_right))


def perplexity(nats):
    """Returns exp(nats), or infinity if a float would overflow: a text may be one long word."""
    return math.exp(nats) if nats < 700 else math.inf


def get_fields(record, **kinds):
    """Returns the values of a record's fields. kinds: {name: type}. Raises UserError."""
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind):
            raise bad_record(record, f"field {name!r} is missing or has a wrong type")
    return [record[name] for name in kinds]


def choice(record, context, endings, label):
    """Returns an Example with a space before each ending. label: from 0. Raises UserError."""
    if str(label) not in map(str, range(len(endings))):
        raise bad_record(record, f"label {label!r}: must be from 0 to {len(endings) - 1}")
    return Example([context], [f" {ending}" for ending in endings], int(label))


def bad_record(record, reason):
    """Returns a UserError that says where the record is."""
    return UserError(f"{record['where']}: {reason}; the program's --help shows the format")


def load_examples(benchmark, path=None, limit=0, **options):
    """Loads the Examples of a file or of the hub. Raises UserError."""
    if benchmark.load:
        return benchmark.load(path, limit, **options)
    if not path and not benchmark.hub:
        raise UserError(f"no data; give a file, as {benchmark.name}.py --help explains")
    if path:
        files = [path]
    else:
        files, _, _ = load_hub(**benchmark.hub, patient=False)
    records = read_records(files, benchmark.columns)
    examples = benchmark.examples(records, **options)
    examples = list(itertools.islice(examples, limit or None))  # reads only `limit` examples
    if not examples:
        raise UserError(f"{path or benchmark.name}: has no example; see the program's --help")
    return examples
