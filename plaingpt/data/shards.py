"""Finds and opens files of token ids: shards, and the files of other programs.

A shard is a file {name}_{train|val}_{index:06d}.npy with a one-dimensional array. Its ids are
uint16, as build-nanogpt writes them, or uint32 for vocabularies above 65,536 ids. Each document
begins with the end-of-text id. meta.json says how the shards were made. It is called progress.json
until they are complete.
"""

import functools
import re
from pathlib import Path

from plaingpt.base.errors import explaining
from plaingpt.base.files import read_json
from plaingpt.data.foreign import VAL_NAME, find_index, open_bin, open_megatron

import numpy as np


@functools.lru_cache(48)  # a process may open only 256 files on macOS
def open_shard(path):
    """Maps a shard into memory -> array (n,) of ids. Raises UserError."""
    # A damaged header makes np.load raise any kind of error.
    with explaining(f"{path}: not a shard", "make it again"):
        if path.suffix == ".idx":
            return open_megatron(path)
        if path.suffix == ".bin":
            return open_bin(path)
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        if ids.dtype not in (np.uint16, np.uint32) or ids.ndim != 1:
            raise ValueError(f"{ids.dtype} {ids.shape}, not uint16 or uint32 (n,)")
        return ids


def find_shards(path, split):
    """Returns the paths of the shards of a split, in the order of their names.

    For Megatron's data, these are the .idx files.
    """
    if index := find_index(path):
        return [index] if split == "train" else []
    shard_name = re.compile(rf"_{split}_\d+\.(npy|bin)$|(^|_){split}\.bin$")
    found = []
    for file in sorted(Path(path).glob("*")):
        if file.name.startswith("."):  # macOS and rsync write such files beside shards
            continue
        if file.suffix == ".idx":  # of Megatron
            is_val = VAL_NAME.search(file.stem) is not None
            if is_val == (split == "val"):
                found.append(file)
        elif shard_name.search(file.name) and not find_index(file):
            found.append(file)
    return found


def find_meta(directory):
    """Returns the path of meta.json, or of progress.json if there is no meta.json."""
    path = directory / "meta.json"
    return path if path.exists() else directory / "progress.json"


def read_meta(directory):
    """Returns the contents of meta.json or progress.json, or {} without them. Raises UserError."""
    return read_json(find_meta(directory))
