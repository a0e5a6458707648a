"""Finds and opens files of token ids: shards, and similar files of other programs.

A shard is a file {name}_{train|val}_{index:06d}.npy with a one-dimensional array. The ids are
uint16, as in build-nanogpt, or uint32 for vocabularies above 65,536 ids. Each document begins with
the end-of-text id. The file meta.json says how fineweb.py made the shards. Until the shards are
complete, the name of this file is progress.json.

A .bin file of llm.c contains a header of 256 int32, then ids as uint16 or uint32. nanoGPT's
train.bin and val.bin contain ids as uint16, without a header.

Megatron's data are pairs of files: X.idx describes the tokens in X.bin. X.idx begins with 9 magic
bytes, the version, a code for the dtype of the tokens, the number of sequences, and the number of
document boundaries. Three arrays follow: the length of each sequence, the position of its first
byte in X.bin, and the indices of the sequences that begin documents (Megatron-LM,
megatron/core/datasets/indexed_dataset.py).
"""

import functools
import os
import re
import struct
from pathlib import Path

from plaingpt.base.errors import UserError
from plaingpt.base.files import read_json, reading

import numpy as np

BIN_TYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # {(llm.c's magic number, version): dtype}
# The keys are the codes in X.idx. Code 4 means int32, but we read these ids as uint32, so that a
# negative id becomes a large id, which is outside every vocabulary.
MEGATRON_TYPES = {4: "<u4", 8: "<u2"}
# The name of a Megatron file with validation data matches this pattern.
VAL_NAME = re.compile(r"(^|[_.-])val(id|idation)?([_.-]|$)")


@functools.lru_cache(48)  # a process may open only 256 files on macOS
def open_shard(path):
    """Maps a shard into memory -> array (n,) of ids."""
    # If the header is damaged, np.load may raise any kind of error.
    with reading(path, "make it again", "not a shard"):
        if path.suffix == ".idx":
            ids = open_megatron(path)
        elif path.suffix == ".bin":
            ids = open_bin(path)
        else:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        if ids.dtype not in (np.uint16, np.uint32) or ids.ndim != 1:
            raise ValueError(f"{ids.dtype} {ids.shape}, not uint16 or uint32 (n,)")
        described = ids.offset + ids.nbytes
        # If the file is shorter, mapping it has already failed.
        if (size := os.path.getsize(ids.filename)) != described:
            raise ValueError(f"{size:,} bytes of data, but the header says {described:,} bytes")
        return ids


def find_shards(path, split):
    """Returns the paths of the shards of a split, in the order of their names.

    For Megatron's data, returns the paths of the .idx files.
    """
    if index := find_index(path):
        return [index] if split == "train" else []
    shard_name = re.compile(rf"_{split}_\d+\.(npy|bin)$|(^|_){split}\.bin$")
    found = []
    for file in sorted(Path(path).glob("*")):
        if file.name.startswith("."):  # macOS and rsync write such files next to shards
            continue
        if file.suffix == ".idx":  # Megatron's data
            is_val = VAL_NAME.search(file.stem) is not None
            if is_val == (split == "val"):
                found.append(file)
        elif shard_name.search(file.name) and not find_index(file):
            if found and found[-1].stem == file.stem:  # a run would read its tokens twice
                raise UserError(
                    f"{path}: {found[-1].name} and {file.name} are the same shard; move one of "
                    "them away"
                )
            found.append(file)
    return found


def find_meta(directory):
    """Returns the path of meta.json, or of progress.json if there is no meta.json."""
    path = directory / "meta.json"
    return path if path.exists() else directory / "progress.json"


def read_meta(directory):
    """Returns the contents of meta.json or progress.json.

    Returns {} if neither file exists.
    """
    return read_json(find_meta(directory))


def check_complete(directory, n_tokens):
    """Raises UserError unless shards contain as many tokens as meta.json says."""
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


def find_index(path):
    """Returns the .idx file of Megatron's data X, X.bin or X.idx, or None for any other data."""
    path = Path(path)
    if path.suffix in (".bin", ".idx"):
        index = path.with_suffix(".idx")
    else:
        index = Path(f"{path}.idx")
    return index if index.is_file() else None


def open_megatron(index):
    """Maps the tokens that X.idx describes into memory -> array (n,) of ids.

    Raises ValueError, or struct.error if the file is too short.
    """
    data = index.read_bytes()
    version, code, n_sequences = struct.unpack_from("<QBQ", data, 9)
    if data[:9] != b"MMIDIDX\0\0" or version != 1 or code not in MEGATRON_TYPES:
        raise ValueError(f"{index.name} does not begin with MMIDIDX, version 1, and type 4 or 8")
    # The array of lengths begins after the header. X.bin contains the sequences one after the
    # other, so the number of tokens in X.bin is the sum of the lengths.
    lengths = np.frombuffer(data, "<i4", count=n_sequences, offset=34)
    n = int(lengths.sum(dtype=np.int64))
    return np.memmap(index.with_suffix(".bin"), MEGATRON_TYPES[code], "r", shape=n)


def open_bin(path):
    """Maps a .bin file of llm.c or nanoGPT into memory -> array (n,) of ids.

    Raises ValueError if neither program wrote the file. Raises UserError if the ids are nanoGPT's
    ids of characters, or ids with more than 16 bits.
    """
    magic, version, n = np.fromfile(path, "<i4", 3).tolist()
    if (magic, version) in BIN_TYPES:
        return np.memmap(path, BIN_TYPES[magic, version], "r", offset=4 * 256, shape=n)
    if path.name not in ("train.bin", "val.bin"):
        raise ValueError("its header does not begin with llm.c's magic number and version")
    if path.with_name("meta.pkl").exists():
        raise UserError(f"{path}: contains ids of characters; give the file input.txt as --data")
    ids = np.memmap(path, "<u2", "r")
    # Read as uint16, an id of 32 or 64 bits becomes two or four ids, and every second of these ids
    # is nearly 0.
    low, high = ids[: 2**16 : 2], ids[1 : 2**16 : 2]
    if high.max(initial=0) < 16 <= low.max(initial=0):
        raise UserError(f"{path}: contains ids of 32 or 64 bits; write them as uint16")
    return ids
