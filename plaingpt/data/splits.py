"""Opens a data set as its training split and its validation split."""

import functools
import math
from fractions import Fraction
from pathlib import Path

from plaingpt.base.errors import UserError, explaining
from plaingpt.base.terminal import print0
from plaingpt.data.foreign import find_index
from plaingpt.data.pairs import read_pairs
from plaingpt.data.records import RECORDS, kind_of
from plaingpt.data.shards import find_shards
from plaingpt.data.tokens import Tokens

import numpy as np


def is_text_file(path):
    """Returns whether a value of --data is a text file."""
    return Path(path).is_file() and not find_index(path)


@functools.cache  # a text is encoded once
def encode_file(path, tokenizer, T):
    """Returns the ids of a text file, (n,) uint16 or uint32, or uint8 for bytes, and None.

    For a file of pairs, returns the ids and counted, (n,) each, as read_pairs. Raises UserError.
    """
    if kind_of(path) in RECORDS:
        return read_pairs(path, tokenizer, T)
    data = path.read_bytes()
    if path.suffix in (".bin", ".npy"):
        raise UserError(f"--data {path}: is a shard; give its directory, {path.parent}")
    if path.suffix.lower() in (".gz", ".zst") or b"\0" in data:
        raise UserError(f"--data {path}: is not a text; make shards: fineweb.py --input {path}")
    if tokenizer.name == "bytes":
        n_bad = len(data) - len(data.decode("utf-8", "ignore").encode())
        if n_bad:
            print0(f"note: {path}: {n_bad / len(data):.1%} of its bytes are not UTF-8; convert it")
        return np.frombuffer(data, np.uint8), None
    with explaining(f"--data {path}: is not UTF-8", "convert it", UnicodeDecodeError):
        text = data.decode("utf-8-sig")
    return np.array(tokenizer.encode(text), tokenizer.dtype), None


def open_splits(path, tokenizer, val_fraction=None, vocab_size=None, T=1024):
    """Opens a data set -> (training Tokens, validation Tokens). Raises UserError.

    path: a text file or a file of pairs, which `tokenizer` encodes, a directory of shards, or
    Megatron's X.bin and X.idx as X. The validation data are the val shards. Without them, the last
    part of the data is held out: val_fraction of the tokens, by default a tenth of a text or of
    pairs, and a hundredth of shards. vocab_size: that of the model. By default, it is the number of
    the tokenizer's ids. T: tokens in a sequence; only pairs depend on it.
    """
    path = Path(path)
    vocab_size = vocab_size or tokenizer.n_vocab
    train_name = f"--data {path}, train split"
    val_name = f"--data {path}, val split"
    if is_text_file(path):
        ids, counted = encode_file(path, tokenizer, T)
        whole = Tokens(train_name, [ids], vocab_size, counted)
        cut = find_cut(whole, val_fraction or 0.1)
    else:
        files = find_shards(path, "train")
        val_files = find_shards(path, "val")
        if not files:
            raise UserError(f"--data {path}: no train shards in it; make them with fineweb.py")
        whole = Tokens(train_name, files, vocab_size)
        if val_files:
            return whole, Tokens(val_name, val_files, vocab_size)
        cut = find_cut(whole, val_fraction or 0.01)
        cut = find_document(whole, cut, tokenizer.end_of_text)
    n = len(whole)
    if not whole.has_pairs:
        return whole.part(train_name, 0, cut), whole.part(val_name, cut, n)
    # Pairs are cut between two sequences. The end_of_text there is in both splits.
    cut -= cut % T
    return whole.part(train_name, 0, cut + 1), whole.part(val_name, cut, n)


def find_cut(tokens, val_fraction):
    """Returns where the validation part begins: at the end, val_fraction of the tokens."""
    n = len(tokens)
    return n - math.ceil(n * Fraction(str(val_fraction)))


def find_document(tokens, start, end_of_text):
    """Returns where the first document from `start` on begins, or `start` if none is found.

    At most 2^20 tokens, and at most half of those after `start`, come before the result.
    """
    n = len(tokens) - start
    if n == 0:
        return start
    ids = tokens.read(start, min(2**20, (n + 1) // 2))
    return start + int(np.argmax(ids == end_of_text))  # argmax of no match is 0
