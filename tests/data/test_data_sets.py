"""Texts, Megatron's files, splits by fraction, and mixtures of data sets."""

import codecs
import math
import re
import struct
from fractions import Fraction

from plaingpt.data import (
    Data,
    Sources,
    encode_text,
    log_names,
    open_splits,
    read_shares,
)
from plaingpt.errors import UserError
from plaingpt.order import order_of_sets, permute
from plaingpt.shards import open_shard
from plaingpt.tokenizer import get_tokenizer

import numpy as np
import pytest
from conftest import TINY, assert_close_logs, program, read_log, train, write_bin
from hypothesis import given, settings
from hypothesis import strategies as st

import fineweb
from model import GPTConfig
from train_gpt2 import DataLoaderLite

GPT2 = get_tokenizer("gpt2")


def write_megatron(prefix, documents, dtype, code):
    """Writes {prefix}.bin and {prefix}.idx in Megatron-LM's format, one sequence per document.

    code: the number that stands for `dtype` in this format.
    """
    lengths = [len(document) for document in documents]
    starts = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    data = [np.array(document, dtype).tobytes() for document in documents]
    prefix.with_suffix(".bin").write_bytes(b"".join(data))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
        + np.array(lengths, "<i4").tobytes()
        + starts.astype("<i8").tobytes()
        + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    )


@pytest.fixture
def documents():
    """The token ids of 300 documents.

    Each document ends with end_of_text, as with the flag --append-eod of Megatron-LM.
    """
    rng = np.random.default_rng(0)
    return [[*rng.integers(0, 50256, rng.integers(0, 90)).tolist(), 50256] for _ in range(300)]


def flat(lists):
    return [i for each in lists for i in each]


def splits(place, val_fraction=None, tokenizer=GPT2):
    """Returns [training tokens, validation tokens] of a data set, as lists."""
    return [
        tokens.read(0, len(tokens)).tolist()
        for tokens in open_splits(place, tokenizer, val_fraction)
    ]


@pytest.mark.parametrize("dtype, code", [("<u2", 8), ("<i4", 4)])
def test_megatrons_files_give_the_tokens_of_npy(documents, tmp_path, dtype, code):
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy/x_train_000000.npy", np.array(flat(documents), np.uint16))
    (tmp_path / "m").mkdir()
    write_megatron(tmp_path / "m/x_text_document", documents, dtype, code)
    expected = splits(tmp_path / "npy")
    assert sum(expected, []) == flat(documents)
    for place in ("m", "m/x_text_document", "m/x_text_document.bin", "m/x_text_document.idx"):
        assert splits(tmp_path / place) == expected, place
    # A directory may contain several pairs of files, with both dtypes, and validation data.
    write_megatron(tmp_path / "m/x_valid_text_document", documents[:3], dtype, code)
    write_megatron(tmp_path / "m/y_text_document", documents[:7], "<u2", 8)
    assert splits(tmp_path / "m") == [flat(documents + documents[:7]), flat(documents[:3])]


@pytest.mark.parametrize(
    "suffix, change, message",
    [
        (".bin", lambda data: data[:-2], "mmap length is greater than file size"),
        (
            ".idx",
            lambda data: b"MMAPIDX" + data[7:],
            "x.idx does not begin with MMIDIDX, version 1",
        ),
        (".idx", lambda data: data[:9] + b"\2" + data[10:], "x.idx does not begin with MMIDIDX"),
        (".idx", lambda data: data[:400], "buffer is smaller than requested size"),
    ],
)
def test_damaged_files_of_megatron_are_one_sentence(documents, tmp_path, suffix, change, message):
    write_megatron(tmp_path / "x", documents, "<u2", 8)
    path = tmp_path / f"x{suffix}"
    path.write_bytes(change(path.read_bytes()))
    sentence = f"^.*x.idx: not a shard \\(.*{message}.*\\); make it again$"
    with pytest.raises(UserError, match=sentence):
        splits(tmp_path / "x")


@pytest.mark.parametrize(
    "kind", ["x_text_document.idx", "x_train_000000.bin", "x_train_000000.npy"]
)
def test_a_file_with_more_tokens_than_are_described(documents, tmp_path, kind):
    """The header of a file describes fewer tokens than the file contains.

    For example, Megatron's .idx file may belong to an earlier, shorter .bin file.
    """
    ids = np.array(flat(documents), np.uint16)
    path = tmp_path / kind
    if path.suffix == ".idx":
        write_megatron(path.with_suffix(""), documents, "<u2", 8)
    elif path.suffix == ".bin":
        write_bin(path, ids)
    else:
        np.save(path, ids)
    assert sum(splits(tmp_path), []) == ids.tolist()
    open_shard.cache_clear()
    with open(path.with_suffix(".bin") if path.suffix == ".idx" else path, "ab") as file:
        file.write(ids.tobytes())
    sentence = (
        f"{kind}: not a shard \\(.* bytes of data, but the header says .* bytes\\); make it again"
    )
    with pytest.raises(UserError, match=sentence):
        splits(tmp_path)


@pytest.mark.slow
def test_large_ids_are_refused(tmp_path):
    for id, shown, name in ((65536, "65536", "x.idx"), (-1, "4294967295", "x.bin")):
        write_megatron(tmp_path / "x", [[1] * 500, [id] * 500], "<i4", 4)
        assert Sources([str(tmp_path / name)]).tokenizer is GPT2  # these files name no tokenizer
        _, err = program(*TINY, "--data", name, cwd=tmp_path, status=2)
        assert f" id {shown} is outside the vocabulary; check --tokenizer and --vocab_size\n" in err


@pytest.mark.parametrize("fraction, of_text", [(None, 101), (0.1, 101), (0.07, 71)])
def test_the_end_of_the_data_is_for_validation(tmp_path, fraction, of_text):
    """In shards, validation data begin with the first document in the last hundredth of the tokens.

    In a text file, the last tenth is for validation. --val_fraction replaces both fractions.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 200, 30_000).astype(np.uint16)
    tokens[rng.integers(0, len(tokens), 300)] = 50256
    for i, part in enumerate(np.split(tokens, [9_000, 20_001])):
        np.save(tmp_path / f"x_train_{i:06d}.npy", part)
    start = len(tokens) - round(len(tokens) * (fraction or 0.01))
    while tokens[start] != 50256:
        start += 1
    assert splits(tmp_path, fraction) == [tokens[:start].tolist(), tokens[start:].tolist()]
    (tmp_path / "t.txt").write_text("a" * 1001)
    sizes = [*map(len, splits(tmp_path / "t.txt", fraction, get_tokenizer("bytes")))]
    assert sizes == [1001 - of_text, of_text]


def test_a_document_without_an_end_is_cut(tmp_path):
    np.save(tmp_path / "x_train_000000.npy", np.ones(5000, np.uint16))
    assert [*map(len, splits(tmp_path))] == [4950, 50]


@pytest.mark.parametrize(
    "text", ["a b", "<|endoftext|>a\r\n<|endoftext|> \n<|endoftext|>\u4e2d b\n"]
)
@pytest.mark.parametrize("more", ["", "<|endoftext|>", "<|endoftext|>\n"])
def test_a_text_with_marks_has_the_ids_of_its_shards(tmp_path, text, more):
    """If a text contains <|endoftext|>, a run reads the same ids as from shards of the text.

    If a text does not contain <|endoftext|>, its ids contain no end_of_text, as in version 1.0.
    """
    path = tmp_path / "a.txt"
    path.write_bytes(codecs.BOM_UTF8 + f"{text}{more}".encode())
    fineweb.main(["--input", str(path), "--output_dir", str(tmp_path / "out"), "--num_proc", "1"])
    expected = np.load(tmp_path / "out/out_val_000000.npy").tolist()
    if text + more == "a b":
        expected = GPT2.encode("a b")
    assert encode_text(path, GPT2).tolist() == expected


# Mixtures


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=8))
def test_each_set_is_within_one_of_its_share(parts):
    shares, counts = [Fraction(part, sum(parts)) for part in parts], [0] * len(parts)
    order = order_of_sets(shares)
    for n, (k, before) in enumerate(order, start=1):
        assert before == counts[k]
        counts[k] += 1
        assert all(abs(count - n * share) < 1 for count, share in zip(counts, shares))
    assert counts == [share * len(order) for share in shares]


def test_shares():
    for items, shares in (("a=3", "1"), ("a=0.7 b=0.2 c=0.1", "7/10 1/5 1/10")):
        assert [*map(str, read_shares(items.split()).values())] == shares.split()
    assert [*map(str, read_shares(["a", "b=2", "c=1/3"]).values())] == ["3/10", "3/5", "1/10"]
    shares = read_shares(["a=0.123456789", "b=1e-9", "c=3"]).values()
    assert sum(shares) == 1 and all(s > 0 and (s * 100_000).denominator == 1 for s in shares)
    for item in ("a=0", "a=-1", "a=1/0", "a=.", "a=0,7", "a=nan", "a=x"):
        with pytest.raises(UserError, match="--data a=.*: give a weight above 0"):
            read_shares([item])
    assert read_shares(["a=1", "a=2"]) == {"a": 1}


def test_each_set_has_a_name_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a b.txt", "a_b.txt"):
        (tmp_path / name).write_text("a" * 1000)
    sources = Sources(["a b.txt", "a_b.txt"])
    data = Data(sources, sources.tokenizer, GPTConfig(vocab_size=256))
    assert data.names == ["a%20b.txt", "a_b.txt"]


@pytest.fixture
def sets(tmp_path):
    """Three data sets of bytes: a, b and c."""
    rng = np.random.default_rng(0)
    for k, name in enumerate("abc"):
        directory = tmp_path / name
        directory.mkdir()
        for split, n in (("val", 700), ("train", 2000 + 900 * k)):
            ids = rng.integers(60 * k, 60 * k + 60, n).astype(np.uint16)
            np.save(directory / f"x_{split}_000000.npy", ids)
        (directory / "meta.json").write_text('{"tokenizer": "bytes"}')
    return tmp_path


def plain_mixture(rows, shares, T, seed):
    """Yields the sequences of a mixture. A plain loop counts the sequences of each data set."""
    counts, n = [0] * len(rows), 0
    while True:
        n += 1
        below = [k for k, share in enumerate(shares) if counts[k] < n * share]
        k = min(below, key=lambda k: math.ceil((counts[k] + 1) / shares[k]))
        epoch, j = divmod(counts[k], (len(rows[k]) - 1) // T)
        j = permute(j, (len(rows[k]) - 1) // T, seed, epoch)
        counts[k] += 1
        yield rows[k][j * T : j * T + T + 1]


@pytest.mark.slow
@pytest.mark.parametrize("weights", [("0.55", "0.05", "0.4"), ("1", "2", "1/3"), ("1", "1", "1")])
def test_a_mixture_equals_a_plain_loop(sets, weights):
    sources = Sources([f"{sets / name}={weight}" for name, weight in zip("abc", weights)])
    data = Data(sources, sources.tokenizer, GPTConfig(vocab_size=256))
    loader = DataLoaderLite(data.train, data.shares, 32, seed=7)
    rows = [np.load(sets / name / "x_train_000000.npy").tolist() for name in "abc"]
    plain = plain_mixture(rows, data.shares, 32, seed=7)
    expected = [next(plain) for _ in range(500)]  # several epochs of each data set
    for i in reversed(range(500)):  # a sequence depends only on its position
        x, y = loader.sequence(i)
        assert [*x, y[-1]] == expected[i], i


@pytest.mark.slow
def test_a_mixture_trains_the_same_on_any_number_of_processes_and_resumed(sets):
    def run(name, *flags, data="a=0.5 b=0.3 c=0.2", **options):
        return train("--data", *data.split(), "--log_dir", name, *flags, cwd=sets, **options)

    out, _ = run("one")
    log = read_log(sets / "one")
    assert re.search(
        r"step 10 \| val loss \S+ \| \S+ bits per byte \| val_a \S+ \| bpb_a \S+ \| "
        r"val_b \S+ \| bpb_b \S+ \| val_c \S+ \| bpb_c \S+\n",
        out,
    ), out
    for stream in ("val", "bpb"):
        a, b, c = (float(log[10, f"{stream}_{name}"]) for name in "abc")
        assert float(log[10, stream]) == pytest.approx(0.5 * a + 0.3 * b + 0.2 * c, rel=1e-6)
    run("two", "--save_every", 6, "--keep", 0, processes=2)
    assert_close_logs(sets / "one", sets / "two", rel=1e-4)
    (sets / "two" / "model_000010.pt").unlink()
    run("two", "--resume")  # from step 6, with one process
    assert_close_logs(sets / "one", sets / "two", rel=1e-4)
    _, err = run("two", "--resume", data="a=0.4 b=0.4 c=0.2", status=2)
    assert "error: the run in two used different data: " in err and "2/5 of 2,000 tokens" in err


def test_the_log_can_have_the_name_of_every_file():
    """A file name may be Latin-1, which is not valid UTF-8. In the log, the name is valid UTF-8.

    A resumed run must find the same name in the log.
    """
    names = log_names(["caf\udce9 au lait.txt", "a/mole.txt"])
    assert names == ["caf\\udce9_au_lait.txt", "mole.txt"]
    for name in names + log_names(["a\udce9/x y", "b/x y"]):
        assert name.encode() and not re.search(r"\s", name)
