"""Property tests: shards, the order of the data, JSON lines, tokenizers."""

import contextlib
import json
import re
import struct
import tempfile
from collections import Counter
from pathlib import Path

from plaingpt.data import open_splits
from plaingpt.documents import read_documents
from plaingpt.errors import UserError
from plaingpt.process import Process
from plaingpt.shards import open_shard
from plaingpt.tokenizer import get_tokenizer

import numpy as np
import pytest
import torch
from conftest import CPU, write_bin
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from train_gpt2 import DataLoaderLite
from train_large import LargeConfig

# Without this line, hypothesis would write its Unicode tables into the repository.
set_hypothesis_home_dir(Path(tempfile.gettempdir(), "hypothesis"))


def fuzz(examples, *inputs):
    how = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # a slow machine is not an error
    return lambda test: how(given(*inputs)(test))


@contextlib.contextmanager
def file_of(name, data):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, name)
        path.write_bytes(data)
        yield path


# Shards

NPY_HEADER = b"{'descr': '<u2', 'fortran_order': False, 'shape': (20,), }\n"
NPY = b"\x93NUMPY\1\0" + struct.pack("<H", len(NPY_HEADER)) + NPY_HEADER + bytes(range(40))
BIN = struct.pack("<256i", 20240520, 1, 20, *[0] * 253) + bytes(range(40))
PIECES = st.binary(max_size=4) | st.sampled_from([b"0", b"-1", b"999999999999", b"(", b"'", b">i4"])
# (position, number of bytes that are removed there, bytes that are inserted there)
EDIT = st.tuples(st.integers(0, 70) | st.integers(0, 1100), st.integers(0, 9), PIECES)


@example(".npy", [(0, 9, b"PK\3\4")])
@example(".npy", [(60, 1, b"0")])
@pytest.mark.filterwarnings("ignore")
@fuzz(400, st.sampled_from([".npy", ".bin"]), st.lists(EDIT, max_size=3))
def test_a_changed_shard_is_read_as_its_header_says_or_refused(kind, edits):
    data = NPY if kind == ".npy" else BIN
    for at, removed, inserted in edits:
        data = data[:at] + inserted + data[at + removed :]
    with file_of(f"x{kind}", data) as path:
        try:
            tokens = open_shard(path)
        except UserError as error:
            tokens = None
            assert len(str(error).splitlines()) == 1 and str(path) in str(error)
        if tokens is not None:
            assert tokens.dtype in (np.uint16, np.uint32) and tokens.ndim == 1
            assert tokens.tobytes() == data[tokens.offset :][: tokens.nbytes]
    if kind == ".bin":
        *magic, n = struct.unpack("<3i", data[:12].ljust(12))
        is_whole = magic == [20240520, 1] and 0 <= n == len(data) / 2 - 512
        assert (tokens is not None) == is_whole
    elif data.startswith(NPY[:-40]):
        assert (tokens is not None) == (len(data) == len(NPY))


# The order of the data

SEEDS, SMALL = st.integers(0, 2**32 - 1), st.integers(1, 4)


def write_shards(directory, lengths):
    """Writes shards of these lengths, alternately in two formats: .bin and .npy.

    Returns the tokens of all shards. Each token is different from all other tokens.
    """
    tokens = np.arange(60_000, 60_000 + sum(lengths), dtype=np.uint16)
    for i, part in enumerate(np.split(tokens, np.cumsum(lengths)[:-1])):
        path = Path(directory, f"x_train_{i:06d}.npy")
        np.save(path, part) if i % 2 else write_bin(path.with_suffix(".bin"), part)
    np.save(Path(directory, "x_val_000000.npy"), tokens[:0])
    return tokens.tolist()


@fuzz(
    150,
    st.lists(st.integers(0, 60), min_size=1, max_size=6),
    st.integers(1, 20),
    SMALL,
    SMALL,
    SMALL,
    st.integers(1, 3),
    st.integers(0, 4),
    SEEDS,
    st.booleans(),
)
def test_two_epochs_have_every_sequence_twice_in_any_layout(
    lengths, T, dp, pp, B, growth, rampup_steps, seed, shuffle
):
    n = (sum(lengths) - 1) // T  # sequences
    assume(n > 0)

    def numbers(x, y):
        """Checks that the rows of x are sequences of the shards, and the rows of y their targets.

        Returns the indices of these sequences.
        """
        found = [(row[0] - 60_000) // T for row in x.tolist()]
        assert x.tolist() == [tokens[i * T : (i + 1) * T] for i in found]
        assert y.tolist() == [tokens[i * T + 1 : (i + 1) * T + 1] for i in found]
        return found

    with tempfile.TemporaryDirectory() as directory:
        tokens = write_shards(directory, lengths)
        train, _ = open_splits(directory, get_tokenizer("bytes"), vocab_size=2**16)
        loader = DataLoaderLite([train], [1], T, seed, shuffle)
        order = [i for p in range(2 * n) for i in numbers(*loader.batch(p, 1, CPU))]
        for epoch in (order[:n], order[n:]):
            assert (sorted(epoch) if shuffle else epoch) == list(range(n))
        first = dp * pp * B  # sequences in the first step
        config = LargeConfig(
            batch_size=B,
            total_batch_size=growth * first * T,
            rampup_steps=rampup_steps,
            pp=pp,
            rampup_batch_size=first * T,
            max_steps=-(-2 * n // first),
        )
        steps = range(config.max_steps)
        streams = [
            list(loader.batches(steps, 0, config, Process(i, dp, CPU, torch.float32)))
            for i in range(dp)
        ]
        position = 0
        for step in steps:
            most = (growth - 1) * first
            grown = most * step // rampup_steps if step < rampup_steps else most
            end = position + first + grown // first * first
            n_step = end - position
            assert {stream[step][0] for stream in streams} == {n_step}
            seen = Counter()
            for stream in streams:
                for x, y in stream[step][1]:
                    seen.update(numbers(x, y))
            assert seen.total() == end - position
            # The last steps continue into the third epoch.
            assert not Counter(order[position:end]) - seen
            position = end


# Texts

BOM = b"\xef\xbb\xbf"
TEXTS = st.text(st.characters(), max_size=12)  # includes lone surrogates
VALUES = st.none() | st.integers() | st.floats() | TEXTS | st.lists(TEXTS, max_size=3)
RECORDS = st.fixed_dictionaries({"text": TEXTS}) | st.dictionaries(
    st.just("text") | TEXTS, VALUES, max_size=3
)
GOOD = st.builds(
    lambda record, escape: json.dumps(record, ensure_ascii=escape).encode(errors="surrogatepass"),
    RECORDS,
    st.booleans(),
)
ODD = [
    b"",
    b" \t",
    b"\x1c",
    "\u3000".encode(),
    b"1" * 5000,
    b"[" * 10**5,
    b"[1]",
    b'"text"',
    BOM + b"{}",
    rb'{"text": "\ufeff\ud83d\ude00\ud83d"}',
]
LINES = st.lists(GOOD | st.binary(max_size=12) | st.sampled_from(ODD), max_size=6)
FILES = st.builds(
    lambda bom, end, lines: bom + end.join(lines),
    st.sampled_from([b"", BOM]),
    st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
    st.lists(GOOD, max_size=3) | LINES,
)


def text_of(line):
    """Returns the text of a line of JSON, or None. A lone surrogate becomes U+FFFD."""
    try:
        text = json.loads(line.removeprefix(BOM).decode())["text"]
        return re.sub("[\ud800-\udfff]", "\ufffd", text)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


@fuzz(400, FILES)
def test_texts_of_json_lines(data):
    with file_of("x.jsonl", data) as path:
        try:
            found = [(document.where, document.text) for document in read_documents([path])]
        except UserError as error:
            assert re.search("is UTF-16", str(error)) or data.startswith((b"\x1f\x8b", b"\x28\xb5"))
            return
    lines = [line for line in data.split(b"\n") if line.strip()]
    assert found == [
        (f"{path}, record {n}", text_of(line)) for n, line in enumerate(lines, start=1)
    ]


@fuzz(200, st.lists(RECORDS | VALUES, max_size=5), st.sampled_from([None, 0, 2]))
def test_texts_of_a_json_array(records, indent):
    data = json.dumps(records, ensure_ascii=False, indent=indent).encode(errors="replace")
    with file_of("x.json", data) as path:
        found = [document.text for document in read_documents([path])]
    assert found == [text_of(json.dumps(record).encode()) for record in json.loads(data)]


HARD = st.sampled_from([*"ab1 \n\t'.é海\u3000\x85🙂", "  ", "\r\n", "'ll", "<|", "word"])
HARD = st.lists(HARD, max_size=150).map("".join)


@fuzz(200, HARD)
def test_pieces_of_a_large_document_have_the_tokens_of_the_whole(text):
    tokenizer = get_tokenizer("gpt2")
    with file_of("x.txt", text.encode()) as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr("plaingpt.documents.BLOCK", 8)
        pieces = list(read_documents([path], cut=True))
    ids = [i for piece in pieces for i in tokenizer.encode(piece.text)]
    assert ids == tokenizer.encode(text) and [p.begins for p in pieces].count(True) == (text != "")
