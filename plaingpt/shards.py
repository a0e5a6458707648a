"""Finds and reads files of token ids: shards, and the pairs of files of Megatron.

A shard is a file {name}_{train|val}_{index:06d}.npy with a one-dimensional array. Its ids are
uint16, as build-nanogpt writes them, or uint32 for vocabularies above 65,536 ids. Each document
begins with the end-of-text id. llm.c's .bin files are read, too: they have a header of 256 int32,
then ids that are uint16 or uint32. nanoGPT's train.bin and val.bin are uint16 without a header.
meta.json says how the shards were made. It is called progress.json until they are complete.

Megatron's data are pairs of files: X.idx describes the tokens in X.bin. X.idx begins with 9 bytes
of magic, the version, a code for the type of the tokens, the number of sequences, and the number of
document boundaries. Then come three arrays: the length of each sequence, its first byte in X.bin,
and the sequences that begin documents (Megatron-LM, megatron/core/datasets/indexed_dataset.py).
"""

import bisect
import functools
import math
import re
import struct
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np

from plaingpt.cli import UserError, explaining, print0, read_json
from plaingpt.pairs import read_pairs
from plaingpt.text import TABLES, kind_of

# The fingerprint covers so many tokens at the start of each shard, and so many at its end.
ENDS = 2**16
BIN_TYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # keys: llm.c's magic, version
# The keys are the codes in X.idx. Code 4 is int32. Read as uint32, negative ids become large ones,
# which no vocabulary has.
MEGATRON_TYPES = {4: "<u4", 8: "<u2"}
# The name of a file of Megatron for validation contains this.
VAL_NAME = re.compile(r"(^|[_.-])val(id|idation)?([_.-]|$)")


class Tokens:
    """The tokens of a split: those of its files, one file after the other, from start to stop.

    name: the name in messages. files: paths of shards, or [array] with the ids of a text.
    vocab_size: that of the model. counted: for pairs, (n,) bool, which tokens of the array are
    targets. None means that all are.
    """

    def __init__(self, name, files, vocab_size, counted=None):
        self.name, self.files, self.vocab_size, self.counted = name, files, vocab_size, counted
        self.starts = np.cumsum([0] + [len(open_ids(file)) for file in files]).tolist()
        self.start, self.stop = 0, self.starts[-1]

    def __len__(self):
        return self.stop - self.start

    def read(self, start, count):
        """Returns `count` tokens from `start`: (count,) uint16 or uint32, or uint8 for bytes.

        Raises UserError if one is outside the vocabulary.
        """
        first, last = self.start + start, self.start + start + count
        i = bisect.bisect_right(self.starts, first) - 1
        j = bisect.bisect_left(self.starts, last)
        ids = np.concatenate(
            [
                open_ids(file)[max(first - begin, 0) : last - begin]
                for file, begin in zip(self.files[i:j], self.starts[i:j])
            ]
        )
        if (top := ids.max(initial=0)) >= self.vocab_size:
            raise UserError(f"{self.name}: id {top} is too large; check --tokenizer, --vocab_size")
        return ids

    def read_sequence(self, start, T):
        """Returns T inputs from `start`, and the targets, one token later: (2, T) int64.

        A target that does not count is -100.
        """
        ids = self.read(start, T + 1).astype(np.int64)
        sequence = np.stack([ids[:-1], ids[1:]])  # (2, T)
        if self.counted is not None:
            sequence[1, ~self.counted[self.start + start + 1 :][:T]] = -100
        return sequence

    def count_sequences(self, T):
        """Returns the number of sequences of T+1 tokens. Raises UserError if there are none.

        The last token of a sequence is also the first token of the next one.
        """
        n = (len(self) - 1) // T
        if n < 1:
            raise UserError(f"{self.name}: has {len(self)} tokens; give more than --block_size {T}")
        return n

    def fingerprint(self):
        """Returns the number of tokens and a CRC-32, as a text.

        The CRC-32 covers both ends of every shard, or all of a text file.
        """
        crc = 0 if self.counted is None else zlib.crc32(self.counted[self.start : self.stop])
        bounds = (np.clip(self.starts, self.start, self.stop) - self.start).tolist()
        for file, start, stop in zip(self.files, bounds, bounds[1:]):
            n = stop - start if isinstance(file, np.ndarray) else min(stop - start, ENDS)
            for first in sorted({start, stop - n}) if n else ():
                ids = self.read(first, n)
                # uint16 and uint32 shards with the same ids have the same checksum, which older
                # versions computed, too.
                crc = zlib.crc32(ids.astype("<u2" if ids.max() < 2**16 else "<u4"), crc)
        return f"{len(self):,} tokens with CRC-32 {crc:08x}"


def open_ids(file):
    return file if isinstance(file, np.ndarray) else open_shard(file)


@functools.lru_cache(48)  # a process may open only 256 files on macOS
def open_shard(path):
    """Maps a shard into memory -> array (n,) of ids. Raises UserError."""
    # A damaged header makes np.load raise any kind of error.
    with explaining(f"{path}: not a shard", "make it again"):
        if path.suffix == ".idx":
            dtype, n = read_index(path)
            return np.memmap(path.with_suffix(".bin"), dtype, "r", shape=n)
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            if tokens.dtype not in (np.uint16, np.uint32) or tokens.ndim != 1:
                raise ValueError(f"{tokens.dtype} {tokens.shape}, not uint16 or uint32 (n,)")
            return tokens
        magic, version, n = np.fromfile(path, "<i4", 3).tolist()
        if path.name in ("train.bin", "val.bin") and (magic, version) not in BIN_TYPES:
            if path.with_name("meta.pkl").exists():
                raise UserError(f"{path}: has ids of characters; give their input.txt as --data")
            return np.memmap(path, "<u2", "r")
        if (magic, version) not in BIN_TYPES:
            raise ValueError("its header does not begin with llm.c's magic number and version")
        return np.memmap(path, BIN_TYPES[magic, version], "r", offset=4 * 256, shape=n)


def find_index(path):
    """Returns the .idx file of Megatron's data X, X.bin or X.idx, or None for any other data."""
    path = Path(path)
    index = path.with_suffix(".idx") if path.suffix in (".bin", ".idx") else Path(f"{path}.idx")
    return index if index.is_file() else None


def read_index(path):
    """X.idx -> (dtype of the tokens, their number).

    Raises ValueError, or struct.error if the file is too short.
    """
    data = path.read_bytes()
    version, code, n = struct.unpack_from("<QBQ", data, 9)
    if data[:9] != b"MMIDIDX\0\0" or version != 1 or code not in MEGATRON_TYPES:
        raise ValueError(f"{path.name} does not begin with MMIDIDX, version 1, and type 4 or 8")
    # The sequences are one after the other in X.bin, so the lengths of all are added.
    return MEGATRON_TYPES[code], int(np.frombuffer(data, "<i4", n, 34).sum(dtype=np.int64))


def is_text_file(path):
    """Returns whether a value of --data is a text file."""
    return Path(path).is_file() and not find_index(path)


@functools.cache  # a text is encoded once
def read_text(path, tokenizer, T):
    """Returns the ids of a text file, (n,) uint16 or uint32, or uint8 for bytes, and None.

    For a file of pairs, returns the ids and counted, (n,) each, as read_pairs. Raises UserError.
    """
    if kind_of(path)[0] in (".jsonl", ".json", ".csv", *TABLES):
        return read_pairs(path, tokenizer, T)
    data = path.read_bytes()
    if path.suffix in (".bin", ".npy"):
        raise UserError(f"--data {path}: is a shard; give its directory, {path.parent}")
    if path.suffix.lower() in (".gz", ".zst") or b"\0" in data:
        raise UserError(f"--data {path}: is not a text; make shards: fineweb.py --input {path}")
    if tokenizer.name == "bytes":
        if n_bad := len(data) - len(data.decode("utf-8", "ignore").encode()):
            print0(f"note: {path}: {n_bad / len(data):.1%} of its bytes are not UTF-8; convert it")
        return np.frombuffer(data, np.uint8), None
    with explaining(f"--data {path}: is not UTF-8", "convert it", UnicodeDecodeError):
        return np.array(tokenizer.encode(data.decode("utf-8-sig")), tokenizer.dtype), None


def find_shards(path, split):
    """Returns the paths of the shards of a split, in the order of their names.

    For Megatron's data, these are the .idx files.
    """
    if index := find_index(path):
        return [index] if split == "train" else []
    name = re.compile(rf"_{split}_\d+\.(npy|bin)$|(^|_){split}\.bin$")
    return [
        file
        for file in sorted(Path(path).glob("*"))
        if name.search(file.name)
        and not find_index(file)
        or file.suffix == ".idx"
        and bool(VAL_NAME.search(file.stem)) == (split == "val")
    ]


def read_meta(directory):
    """Returns the contents of meta.json or progress.json, or {} without them. Raises UserError."""
    return read_json(directory / "meta.json") or read_json(directory / "progress.json")


def open_splits(path, tokenizer, val_fraction=None, vocab_size=None, T=1024):
    """Opens a data set -> (training Tokens, validation Tokens). Raises UserError.

    path: a text file or a file of pairs, which `tokenizer` encodes, a directory of shards, or
    Megatron's X.bin and X.idx as X. The validation data are the val shards. Without them, the last
    part of the data is held out: val_fraction of the tokens, by default a tenth of a text or of
    pairs, and a hundredth of shards. vocab_size: that of the model. By default, it is the number of
    the tokenizer's ids. T: tokens in a sequence; only pairs depend on it.
    """
    path, V, counted = Path(path), vocab_size or tokenizer.n_vocab, None
    files, val_files, fraction = find_shards(path, "train"), find_shards(path, "val"), 0.01
    if is_text_file(path):
        ids, counted = read_text(path, tokenizer, T)
        files, val_files, fraction = [ids], [], 0.1
    if not files:
        raise UserError(f"--data {path}: no train shards in it; make them with fineweb.py")
    train = Tokens(f"--data {path}, train split", files, V, counted)
    val = Tokens(f"--data {path}, val split", val_files or files, V, counted)
    if val_files:
        return train, val
    n = len(train)
    cut = n - math.ceil(n * Fraction(str(val_fraction or fraction)))
    if n and not is_text_file(path):  # the part should begin with a document
        tokens = train.read(cut, min(2**20, (n - cut + 1) // 2))  # keeps at least half of the part
        cut += int(np.argmax(tokens == tokenizer.end_of_text))  # 0 if no document begins in them
    train.stop = val.start = cut
    if counted is not None:  # cuts between two sequences; both splits have the end_of_text there
        val.start -= cut % T
        train.stop = val.start + 1
    return train, val
