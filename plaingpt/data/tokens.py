"""The tokens of a split of a data set, from files of any kind."""

import bisect
import copy
import math
import zlib
from fractions import Fraction

from plaingpt.base.errors import UserError
from plaingpt.data.shards import open_shard

import numpy as np

# The fingerprint covers this many tokens at the start and at the end of each shard.
ENDS = 2**16


class Tokens:
    """The tokens of a split: the files one after the other, from `start` to `stop`.

    name: the name in messages. files: paths of shards, or [array] with the ids of a text file.
    vocab_size: vocabulary size of the model. counted: for pairs, (n,) bool, which tokens of the
    array are targets; None: all tokens. is_held_out: whether open_splits has held out these tokens
    from the training data, because there is no val split on disk.
    """

    def __init__(self, name, files, vocab_size, counted=None, is_held_out=False):
        self.name = name
        self.files = files
        self.vocab_size = vocab_size
        self.counted = counted
        self.is_held_out = is_held_out
        sizes = [len(open_ids(file)) for file in files]
        # The start of each file, and the end of the last file.
        self.starts = np.cumsum([0, *sizes]).tolist()
        self.start = 0
        self.stop = self.starts[-1]

    @property
    def has_pairs(self):
        """Whether the tokens are prompts and responses. The loss then includes only some tokens."""
        return self.counted is not None

    def __len__(self):
        return self.stop - self.start

    def part(self, name, start, stop, is_held_out=False):
        """Returns the tokens from `start` to `stop`, as Tokens with a new name."""
        part = copy.copy(self)
        part.name = name
        part.is_held_out = is_held_out
        part.start = self.start + start
        part.stop = self.start + stop
        return part

    def read(self, start, count):
        """Returns `count` tokens from `start`: (count,) uint16 or uint32, or uint8 for bytes.

        Raises UserError if a token id is outside the vocabulary.
        """
        first = self.start + start
        last = first + count
        i = bisect.bisect_right(self.starts, first) - 1  # the file that contains the first token
        j = bisect.bisect_left(self.starts, last)
        parts = []
        for file, begin in zip(self.files[i:j], self.starts[i:j]):
            parts.append(open_ids(file)[max(first - begin, 0) : last - begin])
        ids = np.concatenate(parts)
        top = ids.max(initial=0)
        if top >= self.vocab_size:
            raise UserError(
                f"{self.name}: id {top} is outside the vocabulary; check --tokenizer and "
                "--vocab_size"
            )
        return ids

    def read_sequence(self, start, T):
        """Returns T inputs from `start`, and the targets, which are the next tokens: (2, T) int64.

        A target that the loss ignores is -100.
        """
        ids = self.read(start, T + 1).astype(np.int64)
        sequence = np.stack([ids[:-1], ids[1:]])  # (2, T)
        if self.has_pairs:
            first = self.start + start + 1
            sequence[1, ~self.counted[first : first + T]] = -100
        return sequence

    def count_sequences(self, T):
        """Returns the number of sequences of T+1 tokens. Raises UserError if there are none.

        The last token of a sequence is also the first token of the next sequence.
        """
        n = (len(self) - 1) // T
        if n < 1:
            raise UserError(
                f"{self.name}: has {len(self)} tokens; give more tokens than --block_size {T}"
            )
        return n

    def fingerprint(self):
        """Returns the number of tokens and a CRC-32, as a string.

        The CRC-32 covers both ends of every shard, or all of a text file.
        """
        crc = zlib.crc32(self.counted[self.start : self.stop]) if self.has_pairs else 0
        bounds = (np.clip(self.starts, self.start, self.stop) - self.start).tolist()
        for file, start, stop in zip(self.files, bounds, bounds[1:]):
            n = stop - start
            if n == 0:
                continue
            if not isinstance(file, np.ndarray):
                n = min(n, ENDS)
            for first in sorted({start, stop - n}):  # only one range if n covers the whole file
                ids = self.read(first, n)
                # uint16 and uint32 shards with the same ids have the same checksum.
                dtype = "<u2" if ids.max() < 2**16 else "<u4"
                crc = zlib.crc32(ids.astype(dtype), crc)
        return f"{len(self):,} tokens with CRC-32 {crc:08x}"


def open_ids(file):
    return file if isinstance(file, np.ndarray) else open_shard(file)


def find_cut(items, val_fraction):
    """Returns the index of the first validation item.

    The last val_fraction of the items are for validation. items: Tokens, or a list of pairs.
    """
    n = len(items)
    return n - math.ceil(n * Fraction(str(val_fraction)))
