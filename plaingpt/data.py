"""The data of a run: --data with its tokenizer and its splits; the sizes of its steps.

  --data fineweb=0.7 code=0.2 zh=0.1
"""

import math
import re
from fractions import Fraction
from pathlib import Path

from plaingpt.cli import UserError, print0
from plaingpt.shards import find_index, is_text_file, open_splits, read_meta
from tokenizer import get_tokenizer, load_tokenizer

MAX_PERIOD = 100_000  # sequences after which the order of the sets repeats


class Sources:
    """What --data names: one or several data sets, before they are opened. Raises UserError.

    items: values of --data, each PATH or PATH=WEIGHT. tokenizer: value of --tokenizer. The
    attribute `tokenizer` is that of the shards, or for a text that of the flag, or bytes.
    shares: {path: its share of the sequences}, Fractions that add up to 1.
    """

    def __init__(self, items, tokenizer=None, val_fraction=None):
        self.items, self.val_fraction = items, val_fraction
        self.shares = read_shares(items)
        self.is_text = all(map(is_text_file, self.shares))
        self.tokenizer = find_common_tokenizer(self.shares, tokenizer)

    def count_train_tokens(self):
        """Number of training tokens."""
        return sum(len(open_splits(path, self.tokenizer, self.val_fraction)[0])
                   for path in self.shares)


class Data:
    """The open data sets of a run. Raises UserError.

    train, val: lists of Tokens. shares: Fractions. names: of the sets, for the log. fingerprints:
    {name of a split: text}. gpt_config: of the model that reads the data.
    """

    def __init__(self, sources, tokenizer, gpt_config):
        self.tokenizer, self.shares = tokenizer, list(sources.shares.values())
        pairs = [open_splits(path, tokenizer, sources.val_fraction, gpt_config.vocab_size)
                 for path in sources.shares]
        self.train, self.val = map(list, zip(*pairs))
        names = [re.sub(r"\s", "_", Path(path).name) for path in sources.shares]
        unique = len({*names}) == len(names)
        self.names = names if unique else [re.sub(r"\s", "_", path) for path in sources.shares]
        self.fingerprints = {"training split": fingerprint(self.train, self.shares),
                             "validation split": fingerprint(self.val, self.shares)}


def fingerprint(sets, shares):
    """Fingerprint of a split: token count and CRC-32 of each set, with its share."""
    texts = [tokens.fingerprint() for tokens in sets]
    if len(sets) > 1:
        texts = [f"{share} of {text}" for text, share in zip(texts, shares)]
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
    if not (path.is_dir() or is_text_file(path) or find_index(path)):
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
        raise UserError(f"{data}: its tokenizer.json is not of its shards, {name}; move it away")
    if own and given and own.name != given.name:
        raise UserError(f"{data}: has tokens of {own.name}; leave out --tokenizer {place}")
    return own or given or get_tokenizer("bytes" if is_text_file(path) else "gpt2")


def plan_steps(config, T, n_sequences, dp_size):
    """The sizes of the steps: [(n, B)] of each step of the ramp, and of all later steps.

    n: sequences of a step, of all processes. It rises linearly to total_batch_size / T, in
    multiples of the ramp's first n. B: sequences of a micro-batch of one process. In a ramp n grows
    and B stays, so that torch.compile compiles one shape. n_sequences: of the training data. Raises
    UserError unless every process gets whole micro-batches in every step.
    """
    n, B = step_size(config, "total_batch_size", T, n_sequences, dp_size)
    if not config.rampup_steps:
        return [(n, B)]
    if config.rampup_batch_size > config.total_batch_size:
        raise UserError("--rampup_batch_size: is above --total_batch_size; give a smaller one")
    first, first_B = step_size(config, "rampup_batch_size", T, n_sequences, dp_size)
    growth = [(n - first) * step // config.rampup_steps for step in range(config.rampup_steps)]
    return [(first + more // first * first, first_B) for more in growth] + [(n, B)]


def step_size(config, flag, T, n_sequences, dp_size):
    """(n, B) of a step that has as many tokens as the flag says. Raises UserError."""
    size, unit = getattr(config, flag), T * dp_size  # tokens
    if size % unit or not unit <= size <= n_sequences * T:
        raise UserError(f"--{flag}: must be a multiple of {unit} (block_size {T} x {dp_size} "
                        f"processes), from {unit} to {n_sequences * T}, the data's tokens")
    share = size // unit  # sequences of a process
    if share < config.pp:
        raise UserError(f"--pp {config.pp}: needs a sequence for each stage, but each process has "
                        f"{share} in a step; give more sequences, or fewer stages")
    B = min(config.batch_size, share // config.pp)  # every stage gets work
    if share % B:
        raise UserError(f"--batch_size: each process has {share} sequences in a step; give a "
                        f"divisor of {share}, at most {share // config.pp}")
    return share * dp_size, B
