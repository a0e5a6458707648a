"""Token files, their sequences, the order of the sequences, and invalid data."""

import os
import re

import numpy as np
import pytest
from conftest import ROOT, write_bin

from plaingpt.cli import UserError
from plaingpt.shards import ENDS, find_tokenizer, open_tokens
from tokenizer import get_tokenizer
from train_gpt2 import DataLoaderLite

T = 16


def open_loader(data, T=T, split="train", vocab_size=256, tokenizer="bytes", **options):
    """The sequences of a split, in shuffled order unless the options say otherwise."""
    if data.is_dir() and not list(data.glob("*_val_*")):
        np.save(data / "x_val_000000.npy", np.zeros(100, np.uint16))
    tokens = open_tokens(data, split, vocab_size, get_tokenizer(tokenizer))
    return DataLoaderLite(tokens, T, **options)


def row(directory, split="train"):
    """All tokens of a split in the order of the file names: the reference for the tests below."""
    return np.concatenate([np.load(p) for p in sorted(directory.glob(f"*_{split}_*.npy"))])


def step(loader, position, n_sequences, world_size, B):
    """The sequences of one step, over `world_size` processes with micro-batches of B sequences.

    Computes the positions as the training loop does.
    """
    xs, ys = [], []
    for rank in range(world_size):
        for p in range(position + rank * B, position + n_sequences, world_size * B):
            x, y = loader.batch(p, B)
            xs.append(x)
            ys.append(y)
    return np.concatenate(xs), np.concatenate(ys)


def as_set(x, y):
    return sorted(map(tuple, np.concatenate([x, y[:, -1:]], axis=1).tolist()))


def test_sequences_cross_shards_in_source_order(shards):
    loader, tokens = open_loader(shards, shuffle=False), row(shards)
    assert loader.n_sequences == (len(tokens) - 1) // T == 211
    for i in range(loader.n_sequences):
        x, y = loader.batch(i, 1)
        assert x[0].tolist() == tokens[i * T:(i + 1) * T].tolist()
        assert y[0].tolist() == tokens[i * T + 1:(i + 1) * T + 1].tolist()


def test_a_sequence_may_cross_many_shards(tmp_path):
    tokens = np.arange(100, dtype=np.uint16)
    for i, cut in enumerate(np.split(tokens, [3, 4, 9, 11, 50])):
        np.save(tmp_path / f"x_train_{i:06d}.npy", cut)
    loader = open_loader(tmp_path, 40, shuffle=False)
    assert loader.batch(0, 2)[1].tolist() == [list(range(1, 41)), list(range(41, 81))]


def test_npy_and_bin_give_the_same_batches(shards, tmp_path):
    (tmp_path / "bin").mkdir()
    for p in shards.glob("*.npy"):
        write_bin(tmp_path / "bin" / p.with_suffix(".bin").name, np.load(p))
    a, b = (open_loader(d) for d in (shards, tmp_path / "bin"))
    for position in range(0, 500, 10):  # into the third epoch
        for u, v in zip(a.batch(position, 10), b.batch(position, 10)):
            assert u.equal(v)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("B", [1, 2, 8])
def test_a_step_has_the_same_sequences_in_any_layout(shards, world_size, B):
    loader = open_loader(shards, seed=5)
    reference = open_loader(shards, seed=5)
    for position in range(0, 640, 32):  # steps of 32 sequences, over the ends of three epochs
        expected = as_set(*reference.batch(position, 32))
        assert as_set(*step(loader, position, 32, world_size, B)) == expected


def test_each_epoch_uses_every_sequence_once_in_a_new_order(shards):
    loader, tokens = open_loader(shards), row(shards)
    every = sorted(tuple(tokens[i * T:(i + 1) * T + 1].tolist()) for i in range(loader.n_sequences))
    orders = []
    for epoch in range(3):
        x, y = loader.batch(epoch * loader.n_sequences, loader.n_sequences)
        assert as_set(x, y) == every
        orders.append(x.tolist())
    assert orders[0] != orders[1] != orders[2] != orders[0]
    source = open_loader(shards, shuffle=False).batch(0, loader.n_sequences)[0].tolist()
    assert source not in orders and sorted(source) == sorted(orders[0])


def test_order_is_a_function_of_seed_and_epoch(shards):
    def first(seed, position=0):
        return open_loader(shards, seed=seed).batch(position, 20)[0].tolist()

    assert first(1) == first(1) != first(2)
    jumped = open_loader(shards, seed=1)
    jumped.batch(900, 3)
    # The loader has no state: an earlier position gives the same batch.
    assert jumped.batch(0, 20)[0].tolist() == first(1)


def test_the_order_of_the_data_never_changes(tmp_path):
    """Seed 1337, 8 sequences, epochs 0 and 1. Another order would change all published curves."""
    np.save(tmp_path / "x_train_000000.npy", np.arange(8 * T + 1, dtype=np.uint16))
    x, _ = open_loader(tmp_path).batch(0, 16)
    assert (x[:, 0] // T).tolist() == [5, 0, 3, 1, 2, 6, 7, 4] + [1, 6, 2, 7, 4, 5, 0, 3]


def test_text_is_read_as_bytes_and_its_last_tenth_is_for_validation(tmp_path):
    data = bytes(range(1, 256)) * 10
    (tmp_path / "t.txt").write_bytes(data)
    train, val = (open_loader(tmp_path / "t.txt", split=split, shuffle=False) for split in ("train", "val"))
    assert len(train.tokens) == 2295 and len(val.tokens) == 255 and train.tokens.read(0, 9).dtype == np.uint8
    assert bytes(train.batch(3, 1)[0][0].tolist()) == data[48:64]
    assert bytes(val.batch(0, 1)[0][0].tolist()) == data[2295:2311]


def test_text_is_tokenized_for_gpt2_weights(tmp_path):
    (tmp_path / "t.txt").write_text("Hello, I'm a language model, " * 20)
    x, _ = open_loader(tmp_path / "t.txt", 8, vocab_size=50257, shuffle=False, tokenizer="gpt2").batch(0, 1)
    assert x[0].tolist() == [15496, 11, 314, 1101, 257, 3303, 2746, 11]


GOOD = np.arange(200, dtype=np.uint16)


def pickled(path):
    np.save(path.with_suffix(".npy"), np.array([{"a": 1}] * 100, dtype=object), allow_pickle=True)


REFUSED = {
    "no train shards": (lambda d: np.save(d / "x_val_000000.npy", GOOD), "no train shards"),
    "float shard": (lambda d: np.save(d / "x_train_000000.npy", GOOD.astype(float)), "float64 .* is not one-dimensional uint16"),
    "int32 shard": (lambda d: np.save(d / "x_train_000000.npy", GOOD.astype(np.int32)), "int32 .* is not one-dimensional uint16"),
    "two dimensions": (lambda d: np.save(d / "x_train_000000.npy", GOOD.reshape(2, 100)), r"\(2, 100\)"),
    "pickled objects": (lambda d: pickled(d / "x_train_000000"), "not a readable shard"),
    "not a npy": (lambda d: (d / "x_train_000000.npy").write_text("hello"), "not a readable shard"),
    "empty npy": (lambda d: (d / "x_train_000000.npy").write_bytes(b""), "not a readable shard"),
    "wrong magic": (lambda d: write_bin(d / "x_train_000000.bin", GOOD, magic=1), "not begin with 20240520 and 1"),
    "wrong version": (lambda d: write_bin(d / "x_train_000000.bin", GOOD, version=2), "not begin with 20240520 and 1"),
    "truncated bin": (lambda d: write_bin(d / "x_train_000000.bin", GOOD, count=300), "1424 bytes, but its header says 300 tokens"),
    "short header": (lambda d: (d / "x_train_000000.bin").write_bytes(b"abcd" * 10), "not begin with 20240520 and 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_invalid_shards(tmp_path, case):
    make, sentence = REFUSED[case]
    make(tmp_path)
    with pytest.raises(UserError, match=sentence) as error:
        open_loader(tmp_path)
    assert "\n" not in str(error.value) and re.search(str(tmp_path), str(error.value))


@pytest.mark.parametrize("n, sentence", [(16, "16 tokens .* too few"), (0, "too few|not a readable shard")])
def test_refuses_too_few_tokens(tmp_path, n, sentence):
    np.save(tmp_path / "x_train_000000.npy", GOOD[:n])
    with pytest.raises(UserError, match=sentence) as error:
        open_loader(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_refuses_a_truncated_npy(tmp_path):
    path = tmp_path / "x_train_000000.npy"
    np.save(path, GOOD)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="not a readable shard"):
        open_loader(tmp_path)


def test_refuses_an_id_outside_the_vocabulary(tmp_path):
    np.save(tmp_path / "x_train_000000.npy", np.arange(300, dtype=np.uint16))
    loader = open_loader(tmp_path, shuffle=False)
    loader.batch(0, 15)  # ids up to 240
    with pytest.raises(UserError, match="x_train_000000.npy: token id 256 is outside the vocabulary of 256"):
        loader.batch(15, 1)


def test_a_shard_is_truncated_or_removed_during_the_run(shards):
    loader = open_loader(shards, shuffle=False)
    last = shards / "a_train_000003.npy"
    np.save(last, np.load(last)[:100])
    for damage in (lambda: None, last.unlink):
        damage()
        with pytest.raises(UserError, match="a_train_000003.npy: changed during the run; restore it, then use --resume"):
            loader.batch(200, 1)


@pytest.mark.parametrize("position, B", [(200, 1), (60, 100)], ids=["in the last shard", "up to the last shard"])
def test_a_shard_changes_during_the_run_but_keeps_its_length(shards, position, B):
    """A shard is checked when it is opened, also if the first row of the batch is in another one."""
    loader = open_loader(shards, shuffle=False)
    last = shards / "a_train_000003.npy"
    np.save(last, np.load(last)[::-1])
    os.utime(last, ns=(0, 0))
    with pytest.raises(UserError, match="changed during the run"):
        loader.batch(position, B)


def test_fingerprint(shards, tmp_path):
    """Checkpoints store the fingerprint, so it must not change between versions."""
    bytes_tokenizer = get_tokenizer("bytes")
    assert open_tokens(shards, "train", 256, bytes_tokenizer).fingerprint() == "3,381 tokens with CRC-32 101aefd2"
    assert open_tokens(shards, "val", 256, bytes_tokenizer).fingerprint() == "700 tokens with CRC-32 7f7f507d"
    text = tmp_path / "t.txt"
    text.write_text("Hello, I'm a language model, " * 9000)
    assert open_tokens(text, "train", 256, bytes_tokenizer).fingerprint() == "234,900 tokens with CRC-32 7491ac53"
    assert open_tokens(text, "train", 50257, get_tokenizer("gpt2")).fingerprint() == "64,800 tokens with CRC-32 d5be1382"
    tokens = np.arange(3 * ENDS, dtype=np.uint32).astype(np.uint16)
    (tmp_path / "large").mkdir()
    np.save(tmp_path / "large/x_val_000000.npy", tokens)
    path = tmp_path / "large/x_train_000000.npy"
    for i, known in ((ENDS - 1, "90bc68aa"), (ENDS, "27ef8611"), (2 * ENDS - 1, "27ef8611"), (2 * ENDS, "9b0ed413")):
        tokens[i] ^= 1
        np.save(path, tokens)
        tokens[i] ^= 1
        found = open_tokens(path.parent, "train", 65536, bytes_tokenizer).fingerprint()
        assert found == f"196,608 tokens with CRC-32 {known}", i
    tokens = open_tokens(path.parent, "train", 65535, bytes_tokenizer)
    with pytest.raises(UserError, match="x_train_000000.npy: token id 65535 is outside the vocabulary of 65535"):
        tokens.fingerprint()


def test_the_tokenizer_of_the_data(shards, tmp_path):
    assert find_tokenizer(shards).name == "bytes" == find_tokenizer(ROOT / "input.txt").name
    (shards / "meta.json").rename(shards / "progress.json")
    assert find_tokenizer(shards).name == "bytes" == find_tokenizer(shards, "bytes").name
    with pytest.raises(UserError, match="--tokenizer gpt2: is gpt2, but .* has tokens of bytes; leave out --tokenizer"):
        find_tokenizer(shards, "gpt2")
    (shards / "progress.json").unlink()
    assert find_tokenizer(shards).name == "gpt2" and find_tokenizer(shards, "bytes").name == "bytes"


def test_missing_data(tmp_path):
    with pytest.raises(UserError, match="not found"):
        find_tokenizer(tmp_path / "nothing")
    with pytest.raises(UserError, match="no train shards in it"):
        open_tokens(tmp_path / "nothing", "train", 256, get_tokenizer("bytes"))
