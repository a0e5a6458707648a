"""Opens the data sets of --data, with their tokenizer, and plans the sizes of the steps.

This mixture has 70% of its sequences from fineweb:

  --data fineweb=0.7 code=0.2 zh=0.1
"""

import math
import re
from fractions import Fraction
from pathlib import Path

from plaingpt.cli import UserError, print0
from plaingpt.shards import find_index, find_shards, is_text_file, open_splits, read_meta
from tokenizer import get_tokenizer, load_tokenizer

# A weight is a decimal number or a ratio. Fraction would compute all digits of 1e99999999.
WEIGHT = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d\d?)?|\d+/0*[1-9]\d*", re.I)
MAX_PERIOD = 100_000  # after at most so many sequences, the order of the sets repeats


class Sources:
    """The data sets that --data names, before they are opened. Raises UserError.

    items: values of --data, each PATH or PATH=WEIGHT. tokenizer: value of --tokenizer. The
    attribute `tokenizer` is what find_tokenizer returns. The attribute `shares` is {path: its share
    of the sequences}, with Fractions that add up to 1.
    """

    def __init__(self, items, tokenizer=None, val_fraction=None):
        self.items, self.val_fraction = items, val_fraction
        self.shares = read_shares(items)
        self.is_text = all(map(is_text_file, self.shares))
        self.tokenizer = find_common_tokenizer(self.shares, tokenizer)
        if val_fraction and all(find_shards(path, "val") for path in self.shares):
            raise UserError("--val_fraction: the data have val shards; leave this flag out")

    def count_train_tokens(self, T=1024):
        """Returns the number of training tokens of all data sets. T: as in open_splits."""
        return sum(
            len(open_splits(path, self.tokenizer, self.val_fraction, T=T)[0])
            for path in self.shares
        )


class Data:
    """The open data sets of a run. Raises UserError.

    tokenizer: the Tokenizer of the run. gpt_config: the GPTConfig of the model that reads the data.
    For each data set, the lists train and val have its Tokens, shares has its Fraction, and names
    has its name in the log. fingerprints: {name of a split: text}.
    """

    def __init__(self, sources, tokenizer, gpt_config):
        self.shares = list(sources.shares.values())
        shape = gpt_config.vocab_size, gpt_config.block_size
        splits = [
            open_splits(path, tokenizer, sources.val_fraction, *shape) for path in sources.shares
        ]
        self.train, self.val = map(list, zip(*splits))
        # In pairs, a line break ends a text. Without pairs, it does not, whatever the weights of
        # --init_from were trained on.
        kind = "lines" if any(tokens.counted is not None for tokens in self.val) else "bytes"
        self.tokenizer = get_tokenizer(kind) if tokenizer.name == "bytes" else tokenizer
        names = [re.sub(r"\s", "_", Path(path).name) for path in sources.shares]
        unique = len({*names}) == len(names)
        self.names = names if unique else [re.sub(r"\s", "%20", path) for path in sources.shares]
        self.fingerprints = {
            "training split": fingerprint(self.train, self.shares),
            "validation split": fingerprint(self.val, self.shares),
        }


def fingerprint(sets, shares):
    """Describes a split: the number of tokens and the CRC-32 of each set, with its share."""
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
            weight = Fraction(text) if WEIGHT.fullmatch(text) else 0
            if weight == 0:
                raise UserError(f"--data {item}: give a weight from 1e-99 to 1e99, such as 0.5")
        weights[path] = weights.get(path, 0) + weight
    total = sum(weights.values())
    shares = {path: weight / total for path, weight in weights.items()}
    if math.lcm(*(share.denominator for share in shares.values())) > MAX_PERIOD:
        shares = {
            path: Fraction(max(1, round(share * MAX_PERIOD)), MAX_PERIOD)
            for path, share in shares.items()
        }
        shares[max(shares, key=shares.get)] += 1 - sum(shares.values())
    return shares


def find_common_tokenizer(paths, place):
    """The Tokenizer of all data sets. place: value of --tokenizer. Raises UserError."""
    # A text takes the tokenizer of the shards beside it.
    paths = [path for path in paths if not is_text_file(path)] or paths
    found = [find_tokenizer(path, place) for path in paths]
    if len({tokenizer.name for tokenizer in found}) > 1:
        names = ", ".join(f"{path} has {tokenizer.name}" for path, tokenizer in zip(paths, found))
        raise UserError(f"--data: {names}; use one tokenizer for all")
    return found[0]


def find_tokenizer(data, place=None):
    """Returns the Tokenizer of a data set.

    If the data set has none of its own, it is that of --tokenizer. Without this flag, it is gpt2
    for shards and bytes for a text. place: value of --tokenizer. Raises UserError if there are no
    data, or if they have another tokenizer than the flag.
    """
    path, own = Path(data), None
    if not (path.is_dir() or is_text_file(path) or find_index(path)):
        raise UserError(f"--data {data}: not found; give a text file, or run fineweb.py")
    if (path / "progress.json").exists():
        print0(f"note: {path} is not complete; fineweb.py is still running, or was interrupted")
    given = load_tokenizer(place) if place else None
    name = read_meta(path).get("tokenizer")
    if (path / "tokenizer.json").exists():
        own = load_tokenizer(path)
    elif name and not (given and given.name == name):
        own = get_tokenizer(str(name))
    if own and name and own.name != name:
        raise UserError(f"{data}: tokenizer.json is not that of the shards, {name}; move it away")
    if own and given and own.name != given.name:
        raise UserError(f"{data}: has tokens of {own.name}; leave out --tokenizer {place}")
    return own or given or get_tokenizer("bytes" if is_text_file(path) else "gpt2")


def plan_steps(config, T, n_sequences, dp_size):
    """Returns the sizes of the steps: an (n, B) for each step of the ramp, and one for all others.

    n: sequences in a step of all processes. It rises linearly to total_batch_size / T, in multiples
    of the ramp's first n. B: sequences in a micro-batch of one process, which is batch_size, or
    less if a process has too few sequences for that, or for pp micro-batches. In a ramp n grows and
    B stays, so that torch.compile compiles one shape. n_sequences: the number of training ones.
    Raises UserError unless every process gets whole micro-batches in every step.
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
    """Returns (n, B) of a step that has as many tokens as the flag says. Raises UserError."""
    size, unit = getattr(config, flag), T * dp_size  # tokens
    if size % unit or not unit <= size <= n_sequences * T:
        raise UserError(f"--{flag}: give a multiple of {unit}, up to the data's {n_sequences * T}")
    share = size // unit  # sequences of a process
    if share < config.pp:
        raise UserError(f"--pp {config.pp}: must be at most {share}, the sequences of a process")
    B = min(config.batch_size, share // config.pp)  # so every stage has work
    if share % B:
        raise UserError(f"--batch_size: give a divisor of {share}, at most {share // config.pp}")
    return share * dp_size, B
