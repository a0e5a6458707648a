"""Opens the token files of other programs: llm.c, nanoGPT and Megatron.

llm.c's .bin files have a header of 256 int32, then ids that are uint16 or uint32. nanoGPT's
train.bin and val.bin are uint16 without a header.

Megatron's data are pairs of files: X.idx describes the tokens in X.bin. X.idx begins with 9 bytes
of magic, the version, a code for the type of the tokens, the number of sequences, and the number of
document boundaries. Then come three arrays: the length of each sequence, its first byte in X.bin,
and the sequences that begin documents (Megatron-LM, megatron/core/datasets/indexed_dataset.py).
"""

import re
import struct
from pathlib import Path

from plaingpt.base.errors import UserError

import numpy as np

BIN_TYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # keys: llm.c's magic, version
# The keys are the codes in X.idx. Code 4 is int32. Read as uint32, negative ids become large ones,
# which no vocabulary has.
MEGATRON_TYPES = {4: "<u4", 8: "<u2"}
# The name of a file of Megatron for validation contains this.
VAL_NAME = re.compile(r"(^|[_.-])val(id|idation)?([_.-]|$)")


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
    # The array of lengths begins after the header. The sequences are one after the other in X.bin,
    # so it has as many tokens as all of them.
    lengths = np.frombuffer(data, "<i4", count=n_sequences, offset=34)
    n = int(lengths.sum(dtype=np.int64))
    return np.memmap(index.with_suffix(".bin"), MEGATRON_TYPES[code], "r", shape=n)


def open_bin(path):
    """Maps a .bin file of llm.c or nanoGPT into memory -> array (n,) of ids.

    Raises ValueError if it is neither, or UserError if the ids are those of nanoGPT's characters.
    """
    magic, version, n = np.fromfile(path, "<i4", 3).tolist()
    if (magic, version) in BIN_TYPES:
        return np.memmap(path, BIN_TYPES[magic, version], "r", offset=4 * 256, shape=n)
    if path.name not in ("train.bin", "val.bin"):
        raise ValueError("its header does not begin with llm.c's magic number and version")
    if path.with_name("meta.pkl").exists():
        raise UserError(f"{path}: has ids of characters; give their input.txt as --data")
    return np.memmap(path, "<u2", "r")
