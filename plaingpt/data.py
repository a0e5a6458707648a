"""The data of a run: --data with its tokenizer and its splits; the sizes of steps and batches.

  --data fineweb=0.7 code=0.2 zh=0.1
"""

import math
import re
from fractions import Fraction
from pathlib import Path

from plaingpt.cli import UserError, print0
from plaingpt.megatron import find_index
from plaingpt.shards import is_text, open_splits, read_meta
from tokenizer import get_tokenizer, load_tokenizer

MAX_PERIOD = 100_000  # sequences after which the order of the sets repeats


class Data:
    """The data sets of --data: one or several. Raises UserError.

    items: values of --data, each PATH or PATH=WEIGHT. tokenizer: value of --tokenizer.
    shares: {path: its share of the sequences}. fingerprints: {name of a split: text}.
    """

    def __init__(self, items, tokenizer=None, val_fraction=None):
        self.sources = items
        self.shares = read_shares(items)
        self.val_fraction = val_fraction
        self.is_text = all(map(is_text, self.shares))
        self.tokenizer = find_common_tokenizer(self.shares, tokenizer)
        # A text has no tokenizer of its own: a model that is trained further brings its own.
        self.is_plain_text = self.is_text and not tokenizer
        names = [re.sub(r"\s", "_", Path(path).name) for path in self.shares]
        unique = len({*names}) == len(names)
        self.names = names if unique else [re.sub(r"\s", "_", path) for path in self.shares]

    def open(self, vocab_size):
        """Opens all sets -> (list of training Tokens, list of validation Tokens)."""
        pairs = [open_splits(path, self.tokenizer, self.val_fraction) for path in self.shares]
        for tokens in sum(pairs, ()):
            tokens.vocab_size = vocab_size
        train, val = map(list, zip(*pairs))
        self.train_tokens = sum(map(len, train))
        self.val_tokens = min(map(len, val))  # of the smallest set
        self.fingerprints = {"training split": self.fingerprint(train),
                             "validation split": self.fingerprint(val)}
        return train, val

    def count_train_tokens(self):
        """Number of training tokens. May be called before open()."""
        return sum(len(open_splits(path, self.tokenizer, self.val_fraction)[0])
                   for path in self.shares)

    def fingerprint(self, sets):
        """Fingerprint of a split: token count and CRC-32 of each set, with its share."""
        texts = [tokens.fingerprint() for tokens in sets]
        if len(sets) > 1:
            texts = [f"{share} of {text}" for text, share in zip(texts, self.shares.values())]
        return " + ".join(texts)


def read_shares(items):
    """Values of --data, each PATH or PATH=WEIGHT -> {path: share}. The shares add up to 1.

    A set without a weight has weight 1. Raises UserError.
    """
    weights = {}
    for item in items:
        path, weight = item, Fraction(1)
        if "=" in item[1:] and not Path(item).exists():
            path, _, text = item.rpartition("=")
            try:
                weight = Fraction(text)
            except (ValueError, ZeroDivisionError):
                weight = 0
            if weight <= 0:
                raise UserError(f"--data {item}: the weight must be above 0, as in {path}=0.5")
        weights[path] = weights.get(path, 0) + weight
    total = sum(weights.values())
    shares = {path: weight / total for path, weight in weights.items()}
    if math.lcm(*(share.denominator for share in shares.values())) > MAX_PERIOD:
        shares = {path: Fraction(max(1, round(share * MAX_PERIOD)), MAX_PERIOD)
                  for path, share in shares.items()}
        shares[max(shares, key=shares.get)] += 1 - sum(shares.values())
    return shares


def find_common_tokenizer(paths, place):
    """The Tokenizer of all data sets. place: value of --tokenizer. Raises UserError."""
    first, *others = [(path, find_tokenizer(path, place)) for path in paths]
    for path, tokenizer in others:
        if tokenizer.name != first[1].name:
            raise UserError(f"--data: {path} has tokens of {tokenizer.name}, {first[0]} those of "
                            f"{first[1].name}; use one tokenizer for all")
    return first[1]


def find_tokenizer(data, place=None):
    """Tokenizer of a data set: its own, else --tokenizer, else gpt2 for shards, bytes for a text.

    place: value of --tokenizer. Raises UserError without data, or if the data have another.
    """
    path, own = Path(data), None
    if not (path.is_dir() or is_text(path) or find_index(path)):
        raise UserError(f"--data {data}: not found; give a text file or a directory of shards")
    if (path / "progress.json").exists():
        print0(f"note: {path} is not complete; fineweb.py is still running, or was interrupted")
    given = load_tokenizer(place) if place else None
    name = read_meta(path).get("tokenizer")
    if (path / "tokenizer.json").exists():
        own = load_tokenizer(path)
    elif name and not (given and given.name == name):
        own = get_tokenizer(str(name))
    if own and name and own.name != name:
        raise UserError(f"{data}: its tokenizer.json is not that of its shards, {name}; move it "
                        "away, or make the shards again")
    if own and given and own.name != given.name:
        raise UserError(f"{data}: has tokens of {own.name}; leave out --tokenizer {place}")
    return own or given or get_tokenizer("bytes" if is_text(path) else "gpt2")


def tokens_in_step(step, config):
    """Rises linearly to total_batch_size in rampup_steps, in multiples of rampup_batch_size."""
    if step >= config.rampup_steps:
        return config.total_batch_size
    first = config.rampup_batch_size
    growth = (config.total_batch_size - first) * step // config.rampup_steps
    return first + growth // first * first


def sequences_in_step(step, config, T, dp_size):
    """Returns (sequences in a step, B). B: a micro-batch; with PP, all sequences of a process."""
    n = tokens_in_step(step, config) // T
    if config.pp > 1:
        return n, n // dp_size  # the pipeline cuts them into micro-batches
    # A ramp has one micro-batch size, because torch.compile compiles each size.
    smallest = tokens_in_step(0 if step < config.rampup_steps else step, config)
    return n, min(config.batch_size, smallest // (T * dp_size))


def check_batch_size(config, T, n_sequences, dp_size):
    """Raises UserError unless every process gets whole micro-batches in every step.

    n_sequences: of T tokens, in the training data.
    """
    unit, most = T * dp_size, n_sequences * T  # tokens
    for step in range(config.rampup_steps + 1):
        size = tokens_in_step(step, config)
        name = "rampup_batch_size" if step < config.rampup_steps else "total_batch_size"
        if size % unit or not config.pp * unit <= size <= most:
            raise UserError(f"--{name}: must be a multiple of {unit} (block_size {T} x {dp_size} "
                            f"processes), from {config.pp * unit} to {most}, the data's tokens")
        share = size // unit  # sequences of a process in this step
        if share % min(config.batch_size, share // config.pp):
            raise UserError(f"--batch_size: each process has {share} sequences in a step; give a "
                            f"divisor of {share}, at most {share // config.pp}")
