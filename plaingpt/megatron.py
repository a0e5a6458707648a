"""Reads the index of Megatron's data: X.idx, which describes the tokens in X.bin.

The format is in Megatron-LM, megatron/core/datasets/indexed_dataset.py: 9 bytes of magic, the
version, a code for the type of the tokens, the number of sequences and of document boundaries; then
for each sequence its length and its first byte in X.bin; then the sequences that begin documents.
"""

import struct
from pathlib import Path

import numpy as np

# Negative ids of int32 become large ones, which are outside of every vocabulary.
TYPES = {4: "<u4", 8: "<u2"}


def find_index(path):
    """The .idx file of Megatron's data X, X.bin or X.idx; None if it is no such data."""
    path = Path(path)
    index = path.with_suffix(".idx") if path.suffix in (".bin", ".idx") else Path(f"{path}.idx")
    return index if index.is_file() else None


def read_index(path):
    """X.idx -> (dtype of the tokens, their number).

    Raises ValueError, or struct.error if the file is too short.
    """
    data = path.read_bytes()
    version, code, n = struct.unpack_from("<QBQ", data, 9)
    if data[:9] != b"MMIDIDX\0\0" or version != 1 or code not in TYPES:
        raise ValueError(f"{path.name} does not begin with MMIDIDX, version 1, and type 4 or 8")
    sizes = np.frombuffer(data, "<i4", n, 34)
    # The sequences are one after the other in X.bin.
    return TYPES[code], int(sizes.sum(dtype=np.int64))
