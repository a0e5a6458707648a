"""Shards: files of token ids, and Tokens, which joins the files of a split.

A shard is a file {name}_{train|val}_{index:06d}.npy with a one-dimensional array. The ids are
uint16, as in build-nanogpt, or uint32 if the vocabulary size is above 65,536. Each document begins
with the id of the end-of-text token. The file meta.json says how fineweb.py made the shards. Until
the shards are complete, the name of this file is progress.json.

A .bin file of llm.c contains a header of 256 int32, then ids as uint16 or uint32. nanoGPT's
train.bin and val.bin contain ids as uint16, without a header.

Megatron's data are pairs of files: X.idx describes the tokens in X.bin. X.idx begins with 9 magic
bytes, the version, a code for the dtype of the tokens, the number of sequences, and the number of
document boundaries. Three arrays follow: the length of each sequence, the position of each
sequence in X.bin in bytes, and the indices of the sequences that begin documents (Megatron-LM,
megatron/core/datasets/indexed_dataset.py).
"""

import bisect
import copy
import functools
import itertools
import math
import os
import re
import struct
import zlib
from fractions import Fraction
from pathlib import Path

from plaingpt.errors import UserError
from plaingpt.files import check_pointer, read_json, reading
from plaingpt.terminal import print0

import numpy as np

BIN_HEADER = 4 * 256  # bytes
BIN_TYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # {(llm.c's magic number, version): dtype}
# The keys are the codes in X.idx. Code 4 means int32, but we read these ids as uint32, so that a
# negative id becomes a large id, which is outside every vocabulary.
MEGATRON_TYPES = {4: "<u4", 8: "<u2"}
# The name of a Megatron file with validation data matches this regular expression.
VAL_NAME = re.compile(r"(^|[_.-])val(id|idation)?([_.-]|$)")
# The fingerprint covers this many tokens at the start and at the end of each shard.
ENDS = 2**16


# FineWeb-Edu has about 100 shards. Each mapped shard is an open file, and on macOS, a process may
# open only 256 files.
@functools.lru_cache(128)
def open_shard(path):
    """Maps a shard into memory. Returns an array (n,) of ids."""
    # If the header is damaged, np.load may raise any kind of error.
    with reading(path, "make it again", "not a shard"):
        check_pointer(path)
        if path.suffix == ".npy":
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            ids = open_megatron(path) if path.suffix == ".idx" else open_bin(path)
        if ids.dtype not in (np.uint16, np.uint32) or ids.ndim != 1:
            raise ValueError(f"{ids.dtype} {ids.shape}, not uint16 or uint32 (n,)")
        described = ids.offset + ids.nbytes
        # If the file is shorter than the header says, np.load or np.memmap has already failed.
        if (size := os.path.getsize(ids.filename)) != described:
            raise ValueError(f"{size:,} bytes of data, but the header says {described:,} bytes")
        return ids


def open_megatron(index):
    """Maps the tokens that X.idx describes into memory. Returns an array (n,) of ids."""
    data = index.read_bytes()
    version, code, n_sequences = struct.unpack_from("<QBQ", data, 9)
    if data[:9] != b"MMIDIDX\0\0" or version != 1 or code not in MEGATRON_TYPES:
        raise ValueError(f"{index.name} does not begin with MMIDIDX, version 1, and type 4 or 8")
    # The array of lengths begins after the header. X.bin contains the sequences one after the
    # other, so the number of tokens in X.bin is the sum of the lengths.
    n = int(np.frombuffer(data, "<i4", n_sequences, offset=34).sum(dtype=np.int64))
    check_pointer(index.with_suffix(".bin"))
    return np.memmap(index.with_suffix(".bin"), MEGATRON_TYPES[code], "r", shape=n)


def read_bin_header(path):
    """Reads the header of an llm.c .bin file. Returns (dtype, number of tokens).

    The dtype is None if the file has a different header, or no header.
    """
    magic, version, n = np.fromfile(path, "<i4", 3).tolist()
    return BIN_TYPES.get((magic, version)), n


def open_bin(path):
    """Maps a .bin file of llm.c or nanoGPT into memory. Returns an array (n,) of ids."""
    dtype, n = read_bin_header(path)
    if dtype:
        return np.memmap(path, dtype, "r", offset=BIN_HEADER, shape=n)
    if path.name not in ("train.bin", "val.bin"):
        raise ValueError("its header does not begin with llm.c's magic number and version")
    if path.with_name("meta.pkl").exists():
        raise UserError(f"{path}: contains ids of characters; give the file input.txt as --data")
    ids = np.memmap(path, "<u2", "r")
    # If an id has 32 or 64 bits, reading the file as uint16 splits it into two or four numbers.
    # Every second number then contains only high bits of an id, so it is almost 0.
    low, high = ids[: 2**16 : 2], ids[1 : 2**16 : 2]
    if high.max(initial=0) < 16 <= low.max(initial=0):
        raise UserError(f"{path}: contains ids of 32 or 64 bits; write them as uint16")
    return ids


def check_end(path):
    """Raises UserError if all ids in the last tenth of a shard are equal.

    A download may reserve the size of the file, then stop. The rest of the file is then 0.
    """
    ids = open_shard(path)
    last_tenth = ids[-(len(ids) // 10) - 1 :]
    if len(last_tenth) < 1000:  # so few tokens may be equal in a real text
        return
    # The last tenth is read only if the last 1000 ids, and the first id of this tenth, are equal.
    for part in (last_tenth[-1000:], last_tenth[:1], last_tenth):
        if (part != ids[-1]).any():
            return
    n_equal = int(np.argmax(ids[::-1] != ids[-1])) or len(ids)
    raise UserError(
        f"{path}: is not complete, because all tokens from token {len(ids) - n_equal:,} on have "
        f"the id {ids[-1]}; download or make it again"
    )


def note_missing(directory):
    """Prints a note if shards in a directory are missing or incomplete.

    This is not an error, because a run can use the shards that are complete.
    """
    if (directory / "progress.json").exists():
        print0(
            f"note: {directory} is incomplete, because fineweb.py is running or was interrupted; "
            "a run on these shards cannot be resumed after fineweb.py has written more shards"
        )
    numbers = {}  # {name and split of shards: {number: name of the file}}
    for file in find_shards(directory, "train") + find_shards(directory, "val"):
        name, _, number = file.stem.rpartition("_")
        if number.isdecimal():
            numbers.setdefault(name, {})[int(number)] = file.stem
    for stems in numbers.values():
        first, last = min(stems), max(stems)
        if n_missing := last - first + 1 - len(stems):
            print0(
                f"note: {directory}: lacks {n_missing:,} of the shards {stems[first]} to "
                f"{stems[last]}; download or make them again"
            )
    # huggingface_hub first downloads a file into this cache.
    for place in (directory, directory / ".cache/huggingface/download"):
        for file in sorted(place.glob("*.incomplete")):
            print0(f"note: {file}: is not complete; download it again")


def find_shards(path, split):
    """Returns the paths of the shards of a split, in the order of their names.

    For Megatron's data, returns the paths of the .idx files.
    """
    if index := find_index(path):
        return [index] if split == "train" else []
    shard_name = re.compile(rf"_{split}_\d+\.(npy|bin)$|(^|_){split}\.bin$")
    found = []
    for file in sorted(Path(path).glob("[!.]*")):  # macOS and rsync add hidden files
        if file.suffix == ".idx":  # Megatron's data
            is_found = bool(VAL_NAME.search(file.stem)) == (split == "val")
        else:
            is_found = shard_name.search(file.name) and not find_index(file)
        if is_found:
            found.append(file)
    for file, other in itertools.pairwise(found):
        if file.stem == other.stem:  # a run would read these tokens twice
            raise UserError(
                f"{path}: {file.name} and {other.name} are the same shard; move one of them away"
            )
    return found


def find_index(path):
    """Returns the .idx file of Megatron's data X, X.bin or X.idx, or None for any other data."""
    path = Path(path)
    if path.suffix in (".bin", ".idx"):
        index = path.with_suffix(".idx")
    else:
        index = Path(f"{path}.idx")
    return index if index.is_file() else None


def find_meta(directory):
    """Returns the path of meta.json, or of progress.json if there is no meta.json."""
    path = directory / "meta.json"
    return path if path.exists() else directory / "progress.json"


def read_meta(directory):
    """Returns the contents of meta.json or progress.json as a dict, or {} without these files."""
    return read_json(find_meta(directory))


def check_complete(directory, n_tokens):
    """Raises UserError if the shards do not contain as many tokens as meta.json says.

    n_tokens: the number of tokens in all shards of the directory.
    """
    n = read_meta(directory).get("tokens")
    if not isinstance(n, int):  # the meta.json of another program may contain anything
        return
    # A running fineweb.py writes a shard before it writes the new number of tokens.
    is_running = (directory / "progress.json").exists()
    if n_tokens < n or (n_tokens > n and not is_running):
        raise UserError(
            f"{directory}: its shards contain {n_tokens:,} tokens, but meta.json says {n:,}; "
            "restore the shards, or move the shards to use into a directory without meta.json"
        )


class Tokens:
    """The tokens of a split: the files one after the other, from `start` to `stop`.

    name: the name that messages show. files: paths of shards, or [array] with the ids of a text
    file. vocab_size: vocabulary size of the model. counted: for pairs, whether each token of the
    array is a target, (n,) bool; None means that all tokens are targets. is_held_out: whether the
    tokens were held out from the training data, because the data contain no validation split.
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

    def hold_out(self, cut, name):
        """Splits the tokens at index `cut`. Returns (Tokens before `cut`, held-out Tokens).

        name: the name of the held-out Tokens.
        """
        train = copy.copy(self)
        val = copy.copy(self)
        train.stop = val.start = self.start + cut
        val.name = name
        val.is_held_out = True
        return train, val

    def read(self, start, count):
        """Returns the ids of `count` tokens from `start` on: (count,) uint8, uint16 or uint32.

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
        """Returns T inputs from `start` on, and their targets, the next tokens: (2, T) int64.

        If the loss ignores a target, the target is -100.
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

        The CRC-32 covers both ends of every shard, or all of a text file. This method is the first
        to read the end of a shard, so it raises UserError if a shard is not complete.
        """
        crc = zlib.crc32(self.counted[self.start : self.stop]) if self.has_pairs else 0
        bounds = (np.clip(self.starts, self.start, self.stop) - self.start).tolist()
        for file, start, stop in zip(self.files, bounds, bounds[1:]):
            n = stop - start
            if n == 0:
                continue
            if not isinstance(file, np.ndarray):
                check_end(file)
                n = min(n, ENDS)
            for first in sorted({start, stop - n}):  # only one range if n covers the whole file
                ids = self.read(first, n)
                # uint16 and uint32 shards with the same ids have the same checksum.
                dtype = "<u2" if ids.max() < 2**16 else "<u4"
                crc = zlib.crc32(ids.astype(dtype), crc)
        return f"{len(self):,} tokens with CRC-32 {crc:08x}"


def open_ids(file):
    return file if isinstance(file, np.ndarray) else open_shard(file)


def find_cut(items, val_fraction, end_of_text=None):
    """Returns the index of the first validation item. items: Tokens, or a list of pairs.

    The last val_fraction of the items are for validation. If end_of_text is given, this function
    looks for the start of a document in the first half of the validation tokens, and at most in the
    first 2^20 validation tokens. The validation tokens then begin with this document. If no
    document begins there, the index does not change.
    """
    n = math.ceil(len(items) * Fraction(str(val_fraction)))
    cut = len(items) - n
    if end_of_text is None or n == 0:
        return cut
    ids = items.read(cut, min(2**20, (n + 1) // 2))
    return cut + int(np.argmax(ids == end_of_text))  # argmax returns 0 if no id matches
