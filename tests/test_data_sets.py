"""Megatron's files, splits by fraction, mixtures, and shards from the hub."""

import re
import struct

import numpy as np
import pytest
from conftest import TINY, names, program, read_log, train, write_bin
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in_hub import stand_in_hub

from plaingpt.batches import load_batch
from plaingpt.cli import UserError
from plaingpt.mixture import Mixture, make_order, read_shares
from plaingpt.shards import open_tokens
from tokenizer import get_tokenizer
from train_gpt2 import DataLoaderLite

GPT2 = get_tokenizer("gpt2")


def write_megatron(prefix, documents, dtype, code, magic=b"MMIDIDX\0\0", version=1, shift=0):
    """Writes X.bin and X.idx as Megatron-LM does: a sequence for each document."""
    lengths = [len(document) for document in documents]
    pointers = [shift + sum(lengths[:i]) * np.dtype(dtype).itemsize for i in range(len(lengths))]
    prefix.with_suffix(".bin").write_bytes(b"".join(np.array(document, dtype).tobytes() for document in documents))
    prefix.with_suffix(".idx").write_bytes(
        magic + struct.pack("<QBQQ", version, code, len(lengths), len(lengths) + 1) + np.array(lengths, "<i4").tobytes()
        + np.array(pointers, "<i8").tobytes() + np.arange(len(lengths) + 1, dtype="<i8").tobytes())


@pytest.fixture
def documents():
    """Ids of 300 documents that end with end-of-text, as Megatron's --append-eod writes them."""
    rng = np.random.default_rng(0)
    return [[*rng.integers(0, 50256, rng.integers(0, 90)).tolist(), 50256] for _ in range(300)]


def batches(data, T=32, B=50, split="train"):
    loader = DataLoaderLite(open_tokens(data, split, 50257, GPT2), T)
    return [loader.batch(i, B)[0].tolist() for i in (0, B, 2 * B)]


@pytest.mark.parametrize("dtype, code", [("<u2", 8), ("<i4", 4)])
def test_megatrons_files_give_the_batches_of_npy(documents, tmp_path, dtype, code):
    tokens = np.array([i for document in documents for i in document], np.uint16)
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy/x_train_000000.npy", tokens)
    (tmp_path / "m").mkdir()
    write_megatron(tmp_path / "m/x_text_document", documents, dtype, code)
    expected = batches(tmp_path / "npy")
    for place in ("m", "m/x_text_document", "m/x_text_document.bin", "m/x_text_document.idx"):
        assert batches(tmp_path / place) == expected, place
        assert batches(tmp_path / place, 8, 2, "val") == batches(tmp_path / "npy", 8, 2, "val")
    # its own validation data
    write_megatron(tmp_path / "m/x_valid_text_document", documents[:3], dtype, code)
    val = open_tokens(tmp_path / "m", "val", 50257, GPT2)
    assert val.read(0, len(val)).tolist() == [i for document in documents[:3] for i in document]
    assert len(open_tokens(tmp_path / "m", "train", 50257, GPT2)) == len(tokens)


def test_two_of_megatrons_files_are_joined(documents, tmp_path):
    write_megatron(tmp_path / "a_val", documents[:1], "<u2", 8)
    write_megatron(tmp_path / "b", documents[:7], "<i4", 4)
    write_megatron(tmp_path / "c", documents[7:], "<u2", 8)
    tokens = open_tokens(tmp_path, "train", 50257, GPT2)
    assert tokens.read(0, len(tokens)).tolist() == [i for document in documents for i in document]


def damage(path, change):
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("change, message", [
    (lambda x: damage(x.with_suffix(".bin"), lambda data: data[:-2]), "x.bin has .* bytes, not the .* of x.idx"),
    (lambda x: damage(x.with_suffix(".idx"), lambda data: b"MMAPIDX" + data[7:]), "x.idx does not begin with MMIDIDX"),
    (lambda x: damage(x.with_suffix(".idx"), lambda data: data[:9] + b"\2" + data[10:]), "version 2 and type 8, not version 1"),
    (lambda x: damage(x.with_suffix(".idx"), lambda data: data[:17] + b"\6" + data[18:]), "version 1 and type 6, not version 1"),
    (lambda x: damage(x.with_suffix(".idx"), lambda data: data[:400]), "x.idx has 400 bytes, too few for 300 sequences"),
    (lambda x: damage(x.with_suffix(".idx"), lambda data: data[:20]), "x.idx does not begin with MMIDIDX"),
    (lambda x: write_megatron(x, [[1, 2], [3]], "<u2", 8, shift=2), "the sequences in x.idx are not one after the other"),
    (lambda x: x.with_suffix(".bin").unlink(), "No such file"),
])
def test_damaged_files_of_megatron_are_one_sentence(documents, tmp_path, change, message):
    write_megatron(tmp_path / "x", documents, "<u2", 8)
    change(tmp_path / "x")
    _, err = program(*TINY, "--data", "x", cwd=tmp_path, status=2)
    assert re.fullmatch(f"error: .*x.idx: not a readable shard \\(.*{message}.*\\); make it again\n", err), err


def test_large_ids_are_refused(tmp_path):
    write_megatron(tmp_path / "x", [[1] * 500, [65536] * 500], "<i4", 4)
    write_megatron(tmp_path / "y", [[1] * 500, [-1] * 500], "<i4", 4)
    for name in "xy":
        _, err = program(*TINY, "--data", name, cwd=tmp_path, status=2)
        assert re.fullmatch(r"error: \w.bin: token id (65536|4294967295) is outside the vocabulary of 50257; .*\n", err), err


@pytest.mark.parametrize("dtype, code", [("<u2", 8), ("<i4", 4)])
def test_megatrons_files_become_shards(documents, tmp_path, dtype, code):
    """fineweb.py puts end-of-text before each document, where Megatron has it behind."""
    write_megatron(tmp_path / "x", documents, dtype, code)
    write_megatron(tmp_path / "y", [document[:-1] for document in documents[:5]], dtype, code)
    program("--input", "x.idx", "y.bin", "--output_dir", "out", "--shard_size", 2000, cwd=tmp_path, program="fineweb.py")
    tokens = np.concatenate([np.load(p) for p in sorted((tmp_path / "out").glob("*.npy"), key=lambda p: p.name[-10:])])
    assert tokens.tolist() == [i for document in documents + documents[:5] for i in [50256, *document[:-1]]]
    write_megatron(tmp_path / "z", [[50257] * 9], "<i4", 4)
    _, err = program("--input", "z.idx", "--output_dir", "z", cwd=tmp_path, program="fineweb.py", status=2)
    assert "has token id 50257, but gpt2 has 50,257 ids; give the data's --tokenizer\n" in err


@pytest.mark.parametrize("fraction", [None, "0.1", "0.07"])
def test_the_end_of_shards_is_for_validation(tmp_path, fraction):
    """From the first document that begins in the last hundredth, or --val_fraction."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 200, 30_000).astype(np.uint16)
    tokens[rng.integers(0, len(tokens), 300)] = 50256
    for i, part in enumerate(np.split(tokens, [9_000, 20_001])):
        np.save(tmp_path / f"x_train_{i:06d}.npy", part)
    start = len(tokens) - round(len(tokens) * float(fraction or 0.01))
    while tokens[start] != 50256:
        start += 1
    train, val = (open_tokens(tmp_path, split, 50257, GPT2, fraction and float(fraction)) for split in ("train", "val"))
    assert train.read(0, len(train)).tolist() == tokens[:start].tolist() and len(train) == start
    assert val.read(0, len(val)).tolist() == tokens[start:].tolist()
    text = tmp_path / "t.txt"
    text.write_text("a" * 1001)
    sizes = [len(open_tokens(text, split, 256, get_tokenizer("bytes"), fraction and float(fraction))) for split in ("train", "val")]
    assert sizes == {None: [900, 101], "0.1": [900, 101], "0.07": [930, 71]}[fraction]


def test_a_document_without_an_end_is_cut(tmp_path):
    np.save(tmp_path / "x_train_000000.npy", np.ones(5000, np.uint16))
    assert [len(open_tokens(tmp_path, split, 256, GPT2)) for split in ("train", "val")] == [4950, 50]


# --- mixtures ---------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=8))
def test_each_set_is_within_one_of_its_share(parts):
    period, counts = sum(parts), [0] * len(parts)
    order = make_order(parts)
    assert len(order) == period
    for n, (k, before) in enumerate(order, start=1):
        assert before == counts[k]
        counts[k] += 1
        assert all(abs(count * period - n * part) < period for count, part in zip(counts, parts))
    assert counts == parts


def test_shares():
    assert {k: str(v) for k, v in read_shares(["a=0.7", "b=0.2", "c=0.1"]).items()} == {"a": "7/10", "b": "1/5", "c": "1/10"}
    assert [str(v) for v in read_shares(["a", "b=2", "c=1/3"]).values()] == ["3/10", "3/5", "1/10"]
    shares = read_shares(["a=0.123456789", "b=1e-9", "c=3"])
    assert sum(shares.values()) == 1 and all(0 < s and (s * 100_000).denominator == 1 for s in shares.values())
    for item in ("a=0", "a=-1", "a=1/0", "a=.", "a=0,7", "a=nan", "a=x"):
        with pytest.raises(UserError, match="--data a=.*: the weight must be a number above 0"):
            read_shares([item])
    with pytest.raises(UserError, match="--data a: is given twice"):
        read_shares(["a=1", "a=2"])


class Loader:
    def __init__(self, name, n_sequences):
        self.name, self.n_sequences, self.T = name, n_sequences, 4

    def sequence(self, position, check=True):
        return np.array([self.name, position, 0, 0, 0])


def test_positions_of_a_mixture_go_through_each_set():
    mixture = Mixture([Loader(0, 10), Loader(1, 20), Loader(2, 5)], read_shares(["a=0.55", "b=0.05", "dir/c d=0.4"]))
    found = [mixture.sequence(i).tolist()[:2] for i in range(1000)]
    for k in range(3):
        own = [position for name, position in found if name == k]
        assert own == list(range(len(own))) and len(own) == {0: 550, 1: 50, 2: 400}[k]
    assert mixture.epochs(1000) == {"a": 55.0, "b": 2.5, "c_d": 80.0} and mixture.n_sequences == 35
    assert load_batch(mixture, 7, 3, "cpu")[0].tolist() == [[*found[i], 0, 0] for i in (7, 8, 9)]


@pytest.fixture
def sets(tmp_path):
    """Three data sets of bytes: a, b and c."""
    rng = np.random.default_rng(0)
    for k, name in enumerate("abc"):
        directory = tmp_path / name
        directory.mkdir()
        for split, n in (("val", 700), ("train", 2000 + 900 * k)):
            np.save(directory / f"x_{split}_000000.npy", rng.integers(60 * k, 60 * k + 60, n).astype(np.uint16))
        (directory / "meta.json").write_text('{"tokenizer": "bytes"}')
    return tmp_path


def test_one_set_with_a_weight_is_that_set_alone(sets):
    train("--data", "a", "--log_dir", "alone", cwd=sets)
    out, _ = train("--data", "a=3", "--log_dir", "weight", cwd=sets)
    assert read_log(sets / "alone") == read_log(sets / "weight") and "shares" not in out


@pytest.mark.slow
def test_a_mixture_trains_the_same_on_any_number_of_processes_and_resumed(sets):
    mixture = ["--data", "a=0.5", "b=0.3", "c=0.2"]
    out, _ = train(*mixture, "--log_dir", "one", cwd=sets)
    log = read_log(sets / "one")
    assert re.search(r"step 10 \| val loss .* \| a: loss .*, epoch 1.29 \| b: loss .* \| c: loss .*, epoch 0.27\n", out), out
    assert "shares" not in out  # the weights add up to 1
    for step in (0, 5, 10):
        for stream in ("val", "bpb"):
            parts = [float(log[step, f"{stream}_{name}"]) for name in "abc"]
            assert float(log[step, stream]) == pytest.approx(0.5 * parts[0] + 0.3 * parts[1] + 0.2 * parts[2], rel=1e-6)
    for processes in (2, 4):
        train(*mixture, "--log_dir", f"p{processes}", cwd=sets, processes=processes)
        other = read_log(sets / f"p{processes}")
        assert all(float(other[key]) == pytest.approx(float(value), rel=1e-4) for key, value in log.items())
    # stopped after 4 of 10 steps, and resumed
    train(*mixture, "--log_dir", "r", "--save_every", 4, "--keep", 0, cwd=sets)
    for name in ("model_000008.pt", "model_000010.pt"):
        (sets / "r" / name).unlink()
    train(*mixture, "--log_dir", "r", "--save_every", 4, "--keep", 0, "--resume", cwd=sets)
    assert read_log(sets / "r") == log
    for data, message in ((["a=0.5", "b=0.5"], "not the data of the run"), (["a=0.4", "b=0.4", "c=0.2"], "2/5 of 2,000 tokens")):
        _, err = train("--data", *data, "--log_dir", "r", "--resume", cwd=sets, status=2)
        assert "is not the data of the run in r" in err and message in err
    out, _ = train("--data", "a=1", "b=1", "c=2", "--log_dir", "n", "--max_steps", 1, cwd=sets)
    assert "note: shares of the sequences, which add up to 1: a 0.25, b 0.25, c 0.5\n" in out


# --- shards from the hub ----------------------------------------------------------------------------------------------


def test_prebuilt_shards_come_from_the_hub(tmp_path):
    rng, files = np.random.default_rng(0), {"README.md": b"hi", "old/x_train_000009.bin": b""}
    for split, i in (("val", 0), ("train", 1), ("train", 2), ("train", 3)):
        write_bin(tmp_path / "x.bin", rng.integers(0, 50257, 3000))
        files[f"fw_{split}_{i:06d}.bin"] = (tmp_path / "x.bin").read_bytes()
    broken = {**files, "fw_train_000002.bin": b"<html>"}
    with stand_in_hub({"some/shards": files, "some/broken": broken, "some/text": {"README.md": b"hi"}}, cut=1) as (url, requests):
        def fetch(*flags, status=0):
            return program(*flags, cwd=tmp_path, program="fineweb.py", online=True, status=status,
                           env=dict(HF_ENDPOINT=url, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_XET="1"))

        out, _ = fetch("--prebuilt", "some/shards", "--max_shards", 3, "--output_dir", "s")
        assert "s has 3 of 4 shards of some/shards" in out and "python train_gpt2.py --data s" in out
        assert names(tmp_path / "s", "*.bin") == ["fw_train_000001.bin", "fw_train_000002.bin", "fw_val_000000.bin"]
        assert all((tmp_path / "s" / name).read_bytes() == files[name] for name in names(tmp_path / "s", "*.bin"))
        n = len([path for method, path, _ in requests if method == "GET" and path.endswith(".bin")])
        fetch("--prebuilt", "some/shards", "--output_dir", "s")
        assert len([path for method, path, _ in requests if method == "GET" and path.endswith(".bin")]) == n + 1
        _, err = fetch("--prebuilt", "some/broken", "--output_dir", "b", status=2)
        assert "fw_train_000002.bin: not a readable shard" in err and names(tmp_path / "b", "*.bin") == ["fw_train_000001.bin", "fw_val_000000.bin"]
        _, err = fetch("--prebuilt", "some/text", status=2)
        assert "error: --prebuilt some/text: no shards X_train_000001.bin; give another data set\n" in err
        _, err = fetch("--prebuilt", "some/missing", status=2)  # at once, without trying again
        assert err.startswith("error: some/missing: ") and err.endswith("; check the name, or set HF_ENDPOINT to a mirror\n")
    _, err = fetch("--prebuilt", "some/shards", "--strict", status=2)
    assert err == "error: --prebuilt: leave out --strict; the shards are made already\n"
    train("--data", "s", "--max_steps", 1, cwd=tmp_path)


def test_megatrons_files_without_a_tokenizer_are_gpt2s(documents, tmp_path):
    write_megatron(tmp_path / "x", documents, "<u2", 8)
    for name in ("x", "x.bin", "x.idx"):
        out, _ = train("--data", name, "--max_steps", 1, cwd=tmp_path)
        assert f"note: {name} has no tokenizer; gpt2 is assumed, --tokenizer sets another one\n" in out
    out, _ = program("--input", "x.idx", "--output_dir", "out", cwd=tmp_path, program="fineweb.py")
    assert out.startswith("copied: ")


def test_a_hub_that_does_not_answer(tmp_path):
    _, err = program("--prebuilt", "some/shards", cwd=tmp_path, program="fineweb.py", online=True, status=2,
                     env=dict(HF_ENDPOINT="http://127.0.0.1:9"))
    assert err == "error: --prebuilt some/shards: the hub does not answer; check the network, or set HF_ENDPOINT to a mirror\n"
