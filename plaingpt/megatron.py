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
    """X.idx -> (dtype of the tokens, the first token of each document and the end of the last one).

    Raises OSError, or ValueError if it does not fit X.bin.
    """
    data, tokens = path.read_bytes(), path.with_suffix(".bin")
    if len(data) < 34 or data[:9] != b"MMIDIDX\0\0":
        raise ValueError(f"{path.name} does not begin with MMIDIDX")
    version, code, n, n_documents = struct.unpack_from("<QBQQ", data, 9)
    if version != 1 or code not in TYPES:
        raise ValueError(f"{path.name} has version {version} and type {code}, not version 1 and "
                         "type 4 (int32) or 8 (uint16)")
    if len(data) < 34 + 12 * n + 8 * n_documents:
        raise ValueError(f"{path.name} has {len(data)} bytes, too few for {n} sequences")
    sizes = np.frombuffer(data, "<i4", n, 34).astype(np.int64) * np.dtype(TYPES[code]).itemsize
    first_bytes = np.frombuffer(data, "<i8", n, 34 + 4 * n)
    documents = np.frombuffer(data, "<i8", n_documents, 34 + 12 * n)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    if (sizes < 0).any() or (first_bytes != ends[:-1]).any():
        raise ValueError(f"the sequences in {path.name} are not one after the other")
    if ends[-1] != tokens.stat().st_size:
        raise ValueError(f"{tokens.name} has {tokens.stat().st_size} bytes, not the {ends[-1]} of "
                         f"{path.name}")
    documents = np.unique([0, *documents.clip(0, n), n])
    return TYPES[code], ends[documents] // np.dtype(TYPES[code]).itemsize
