"""The shares of the data sets in a mixture.

This mixture has 70% of its sequences from fineweb:

  --data fineweb=0.7 code=0.2 zh=0.1
"""

import math
import re
from fractions import Fraction
from pathlib import Path

from plaingpt.base.errors import UserError

# A weight is a decimal number or a ratio. Fraction would compute all digits of 1e99999999.
WEIGHT = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d\d?)?|\d+/0*[1-9]\d*", re.I)
MAX_PERIOD = 100_000  # after at most so many sequences, the order of the sets repeats


def read_shares(items):
    """Values of --data, each PATH or PATH=WEIGHT -> {path: share}. The shares add up to 1.

    A set without a weight has weight 1. Raises UserError.
    """
    weights = {}
    for item in items:
        path, weight = read_weight(item)
        weights[path] = weights.get(path, 0) + weight
    total = sum(weights.values())
    shares = {path: weight / total for path, weight in weights.items()}
    period = math.lcm(*(share.denominator for share in shares.values()))
    return shares if period <= MAX_PERIOD else round_shares(shares)


def read_weight(item):
    """A value of --data, PATH or PATH=WEIGHT -> (path, weight). Raises UserError."""
    if "=" not in item[1:] or Path(item).exists():
        return item, Fraction(1)
    path, _, text = item.rpartition("=")
    if not WEIGHT.fullmatch(text) or Fraction(text) == 0:
        raise UserError(f"--data {item}: give a weight from 1e-99 to 1e99, such as 0.5")
    return path, Fraction(text)


def round_shares(shares):
    """Rounds {path: share} to multiples of 1 / MAX_PERIOD. They are above 0, and add up to 1."""
    rounded = {}
    for path, share in shares.items():
        rounded[path] = Fraction(max(1, round(share * MAX_PERIOD)), MAX_PERIOD)
    largest = max(rounded, key=rounded.get)
    rounded[largest] += 1 - sum(rounded.values())
    return rounded
