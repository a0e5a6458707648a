"""The data of a run: one data set, or a mixture of several, each with its share of the sequences.

  --data fineweb=0.7 code=0.2 zh=0.1
"""

import math
import re
from fractions import Fraction
from pathlib import Path

from plaingpt.cli import UserError, print0
from plaingpt.shards import find_tokenizer, open_tokens

MAX_PERIOD = 100_000  # sequences after which the order of the sets repeats


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
                raise UserError(f"--data {item}: the weight must be a number above 0, as in "
                                f"{path}=0.5")
        if path in weights:
            raise UserError(f"--data {path}: is given twice; give each data set once")
        weights[path] = weight
    total = sum(weights.values())
    shares = {path: weight / total for path, weight in weights.items()}
    if math.lcm(*(share.denominator for share in shares.values())) > MAX_PERIOD:
        shares = {path: Fraction(max(1, round(share * MAX_PERIOD)), MAX_PERIOD)
                  for path, share in shares.items()}
        shares[max(shares, key=shares.get)] += 1 - sum(shares.values())
    return shares


def find_common_tokenizer(config):
    """The Tokenizer of all data sets. Raises UserError if they differ."""
    found = {path: find_tokenizer(path, config.tokenizer) for path in read_shares(config.data)}
    first = next(iter(found))
    for path, tokenizer in found.items():
        if tokenizer.name != found[first].name:
            raise UserError(f"--data {path}: has tokens of {tokenizer.name}, but {first} has those "
                            f"of {found[first].name}; use one tokenizer for all; "
                            "--tokenizer sets the tokenizer of a text")
    return found[first]


def open_splits(config, vocab_size, tokenizer):
    """Opens --data -> (list of training Tokens, list of validation Tokens, fingerprints).

    The lists have one item per set. fingerprints: {split: text}. Raises UserError.
    """
    shares = read_shares(config.data)
    given = [f"{path}={float(share):g}" for path, share in shares.items()] == config.data
    if len(shares) > 1 and not given:
        text = ", ".join(f"{path} {float(share):.6g}" for path, share in shares.items())
        print0(f"note: shares of the sequences, which add up to 1: {text}")
    splits, fingerprints = [], {}
    for split, name in (("train", "training split"), ("val", "validation split")):
        sets = [open_tokens(path, split, vocab_size, tokenizer, config.val_fraction)
                for path in shares]
        texts = [tokens.fingerprint() for tokens in sets]
        if len(sets) > 1:
            texts = [f"{share} of {text}" for text, share in zip(texts, shares.values())]
        splits.append(sets)
        fingerprints[name] = " + ".join(texts)
    return *splits, fingerprints


class Mixture:
    """The sequences of several loaders, in one order. micro_batches uses it like a DataLoaderLite.

    Of the first n sequences, each set has n x share, with an error of less than one. The sets take
    turns in the order of their deadlines (Baruah et al. 1996, "Proportionate Progress"). A position
    counts the sequences of all sets. shares: {path: Fraction}, in the order of the loaders.
    """

    def __init__(self, loaders, shares):
        self.loaders, self.shares, self.T = loaders, list(shares.values()), loaders[0].T
        last_parts = [Path(path).name for path in shares]
        unique = len({*last_parts}) == len(last_parts)
        self.names = [re.sub(r"\s", "_", name) for name in (last_parts if unique else shares)]
        self.n_sequences = sum(loader.n_sequences for loader in loaders)
        period = math.lcm(*(share.denominator for share in self.shares))
        self.parts = [int(share * period) for share in self.shares]  # sequences in a period
        self.order = make_order(self.parts)

    def sequence(self, position, check=True):
        """The T+1 tokens at a position: (T+1,)."""
        n, i = divmod(position, len(self.order))
        k, before = self.order[i]
        return self.loaders[k].sequence(n * self.parts[k] + before, check)

    def epochs(self, position):
        """How often each set was read in `position` sequences -> {name: number}."""
        return {name: position * float(share) / loader.n_sequences
                for name, share, loader in zip(self.names, self.shares, self.loaders)}


def make_order(parts):
    """Order of a period with parts[k] sequences of set k: [(k, how many of set k are before)]."""
    period, counts, order = sum(parts), [0] * len(parts), []
    for n in range(1, period + 1):
        # Only sets below their share may be next. Deadline: the latest place of the next sequence.
        due = [(-((counts[k] + 1) * period // -part), k)
               for k, part in enumerate(parts) if counts[k] * period < n * part]
        _, k = min(due)
        order.append((k, counts[k]))
        counts[k] += 1
    return order
