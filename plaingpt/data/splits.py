"""Opens a data set as its training split and its validation split."""

import functools
from pathlib import Path

from plaingpt.base.errors import UserError, explaining
from plaingpt.base.terminal import print0
from plaingpt.data.foreign import find_index
from plaingpt.data.pairs import read_pairs
from plaingpt.data.parsers import check_encoding
from plaingpt.data.records import RECORDS, kind_of
from plaingpt.data.shards import find_shards
from plaingpt.data.tokenizer import note_unknown
from plaingpt.data.tokens import Tokens, find_cut

import numpy as np


def is_text_file(path):
    """Returns whether a value of --data is a text file."""
    return Path(path).is_file() and not find_index(path)


def is_pairs_file(path):
    """Returns whether a value of --data is a file of pairs."""
    return is_text_file(path) and kind_of(Path(path)) in RECORDS


@functools.cache  # a text is encoded once
def encode_text(path, tokenizer):
    """Returns the ids of a text file, (n,) uint16 or uint32, or uint8 for bytes.

    Raises UserError.
    """
    data = path.read_bytes()
    if path.suffix in (".bin", ".npy"):
        raise UserError(f"--data {path}: is a shard; give its directory, {path.parent}")
    check_encoding(f"--data {path}", data)
    if path.suffix.lower() in (".gz", ".zst") or b"\0" in data:
        raise UserError(f"--data {path}: is not a text; make shards: fineweb.py --input {path}")
    if tokenizer.name == "bytes":
        n_bad = len(data) - len(data.decode("utf-8", "ignore").encode())
        if n_bad:
            print0(f"note: {path}: {n_bad / len(data):.1%} of its bytes are not UTF-8; convert it")
        return np.frombuffer(data, np.uint8)
    with explaining(f"--data {path}: is not UTF-8", "convert it", UnicodeDecodeError):
        text = data.decode("utf-8-sig")
    note_unknown(tokenizer, [text], path)
    return np.array(tokenizer.encode(text), tokenizer.dtype)


encode_pairs = functools.cache(read_pairs)  # pairs are encoded once


def open_pairs(path, tokenizer, T, val_fraction=None, vocab_size=None):
    """Opens a file of pairs -> (training Tokens, validation Tokens). Raises UserError.

    Holds out val_fraction of the pairs, by default a tenth. T: tokens in a sequence. vocab_size: as
    in open_splits.
    """
    path = Path(path)
    vocab_size = vocab_size or tokenizer.n_vocab
    train_name, val_name = name_splits(path)
    train, val = encode_pairs(path, tokenizer, T, val_fraction or 0.1)  # (ids, counted) each
    return (
        Tokens(train_name, [train[0]], vocab_size, train[1]),
        Tokens(val_name, [val[0]], vocab_size, val[1], is_held_out=True),
    )


def open_whole_text(path, tokenizer, vocab_size=None):
    """Opens a text file, of which nothing is held out -> Tokens. Raises UserError.

    vocab_size: as in open_splits.
    """
    if not is_text_file(path):
        raise UserError(f"{path}: there is no such text file; give another one")
    ids = encode_text(Path(path), tokenizer)
    return Tokens(str(path), [ids], vocab_size or tokenizer.n_vocab)


def open_splits(path, tokenizer, val_fraction=None, vocab_size=None):
    """Opens a text file or token files -> (training Tokens, validation Tokens). Raises UserError.

    path: a text file, which `tokenizer` encodes, a directory of shards, or Megatron's X.bin and
    X.idx as X. The validation data are the val shards. Without them, the last part of the data is
    held out: val_fraction of the tokens, by default a tenth of a text, and a hundredth of shards.
    vocab_size: that of the model. By default, it is the number of the tokenizer's ids.
    """
    path = Path(path)
    vocab_size = vocab_size or tokenizer.n_vocab
    train_name, val_name = name_splits(path)
    if is_text_file(path):
        whole = Tokens(train_name, [encode_text(path, tokenizer)], vocab_size)
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
    val = whole.part(val_name, cut, len(whole), is_held_out=True)
    return whole.part(train_name, 0, cut), val


def name_splits(path):
    """Returns the names of the training and the validation split of a data set, for messages."""
    return f"--data {path}, train split", f"--data {path}, val split"


def find_document(tokens, start, end_of_text):
    """Returns where the first document from `start` on begins, or `start` if none is found.

    At most 2^20 tokens, and at most half of those after `start`, come before the result.
    """
    n = len(tokens) - start
    if n == 0:
        return start
    ids = tokens.read(start, min(2**20, (n + 1) // 2))
    return start + int(np.argmax(ids == end_of_text))  # argmax of no match is 0
