"""Token files, their sequences, the order of the sequences, and invalid data."""

import re

import numpy as np
import pytest
import torch
from conftest import ROOT, write_bin

from plaingpt.cli import UserError
from plaingpt.data import find_tokenizer
from plaingpt.device import Run
from plaingpt.shards import ENDS, open_splits
from tokenizer import get_tokenizer
from train_gpt2 import DataLoaderLite, TrainConfig

T = 16
CPU = torch.device("cpu")


def open_tokens(data, split="train", vocab_size=256, tokenizer="bytes"):
    """The Tokens of a split. Shards without validation data get some."""
    if data.is_dir() and not list(data.glob("*_val_*")):
        np.save(data / "x_val_000000.npy", np.zeros(100, np.uint16))
    train, val = open_splits(data, get_tokenizer(tokenizer))
    tokens = train if split == "train" else val
    tokens.vocab_size = vocab_size
    return tokens


def open_loader(data, T=T, seed=1337, shuffle=True, **options):
    return DataLoaderLite([open_tokens(data, **options)], [1], T, seed, shuffle)


def row(directory):
    """All training tokens in the order of the file names: the reference for the tests below."""
    return np.concatenate([np.load(p) for p in sorted(directory.glob("*_train_*.npy"))])


def as_set(x, y):
    return sorted(map(tuple, np.concatenate([x, y[:, -1:]], axis=1).tolist()))


def test_sequences_cross_shards_in_source_order(shards):
    loader, tokens = open_loader(shards, shuffle=False), row(shards)
    assert loader.lengths == [(len(tokens) - 1) // T] == [211]
    for i in range(211):
        x, y = loader.batch(i, 1, CPU)
        assert x[0].tolist() == tokens[i * T : (i + 1) * T].tolist()
        assert y[0].tolist() == tokens[i * T + 1 : (i + 1) * T + 1].tolist()


def test_a_sequence_may_cross_many_shards(tmp_path):
    tokens = np.arange(100, dtype=np.uint16)
    for i, cut in enumerate(np.split(tokens, [3, 4, 9, 11, 50])):
        np.save(tmp_path / f"x_train_{i:06d}.npy", cut)
    _, y = open_loader(tmp_path, 40, shuffle=False).batch(0, 2, CPU)
    assert y.tolist() == [list(range(1, 41)), list(range(41, 81))]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_npy_and_bin_give_the_same_batches(shards, tmp_path, dtype):
    """And the same fingerprint. Ids above 65,535 keep all their bits."""
    for name in ("npy", "bin"):
        (tmp_path / name).mkdir()
    for p in shards.glob("*.npy"):
        tokens = np.load(p).astype(dtype) + dtype(100_000 if dtype == np.uint32 else 0)
        np.save(tmp_path / "npy" / p.name, tokens)
        write_bin(tmp_path / "bin" / p.with_suffix(".bin").name, tokens)
    a, b = (open_loader(tmp_path / name, vocab_size=100_256) for name in ("npy", "bin"))
    assert a.sets[0].fingerprint() == b.sets[0].fingerprint()
    assert a.sets[0].read(0, 3381).tolist() == row(tmp_path / "npy").tolist()
    for position in range(0, 500, 10):  # into the third epoch
        for u, v in zip(a.batch(position, 10, CPU), b.batch(position, 10, CPU)):
            assert u.equal(v)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("B", [1, 2, 8])
def test_a_step_has_the_same_sequences_in_any_layout(shards, world_size, B):
    """Steps of 32 sequences, over the ends of three epochs, from step 1 on."""
    loader = open_loader(shards, seed=5)
    config = TrainConfig(total_batch_size=32 * T, batch_size=B, max_steps=20)
    runs = [Run(rank, world_size, rank, world_size, CPU, torch.float32)
            for rank in range(world_size)]
    streams = [loader.batches(1, 32, config, run) for run in runs]
    for step, parts in enumerate(zip(*streams, strict=True), start=1):
        assert all(x.shape == (B, T) for part in parts for x, _ in part)
        x, y = (torch.cat(batches) for batches in zip(*(pair for part in parts for pair in part)))
        expected = [tuple(loader.sequence(32 * step + i).tolist()) for i in range(32)]
        assert as_set(x, y) == sorted(expected)
    assert step == 19


def test_each_epoch_uses_every_sequence_once_in_a_new_order(shards):
    loader, tokens = open_loader(shards), row(shards)
    (n,) = loader.lengths
    every = sorted(tuple(tokens[i * T : (i + 1) * T + 1].tolist()) for i in range(n))
    orders = []
    for epoch in range(3):
        x, y = loader.batch(epoch * n, n, CPU)
        assert as_set(x, y) == every
        orders.append(x.tolist())
    assert orders[0] != orders[1] != orders[2] != orders[0]
    source = open_loader(shards, shuffle=False).batch(0, n, CPU)[0].tolist()
    assert source not in orders and sorted(source) == sorted(orders[0])


def test_order_is_a_function_of_seed_and_position(shards):
    def first(loader):
        return loader.batch(0, 20, CPU)[0].tolist()

    loader = open_loader(shards, seed=1)
    expected = first(loader)
    loader.batch(900, 3, CPU)
    assert first(loader) == first(open_loader(shards, seed=1)) == expected  # it has no state
    assert first(open_loader(shards, seed=2)) != expected


def test_the_order_of_the_data_never_changes(tmp_path):
    """Seed 1337, 8 sequences, epochs 0 and 1. Another order would change all published curves."""
    np.save(tmp_path / "x_train_000000.npy", np.arange(8 * T + 1, dtype=np.uint16))
    x, _ = open_loader(tmp_path).batch(0, 16, CPU)
    assert (x[:, 0] // T).tolist() == [5, 0, 3, 1, 2, 6, 7, 4] + [1, 6, 2, 7, 4, 5, 0, 3]


def test_text_is_read_as_bytes_and_its_last_tenth_is_for_validation(tmp_path):
    data = bytes(range(1, 256)) * 10
    (tmp_path / "t.txt").write_bytes(data)
    train, val = (open_tokens(tmp_path / "t.txt", split) for split in ("train", "val"))
    assert bytes(train.read(0, len(train))) == data[:2295]
    assert bytes(val.read(0, len(val))) == data[2295:]


def test_text_is_tokenized_for_gpt2_weights(tmp_path):
    (tmp_path / "t.txt").write_text("Hello, I'm a language model, " * 20)
    tokens = open_tokens(tmp_path / "t.txt", vocab_size=50257, tokenizer="gpt2")
    assert tokens.read(0, 8).tolist() == [15496, 11, 314, 1101, 257, 3303, 2746, 11]


GOOD = np.arange(200, dtype=np.uint16)
REFUSED = {  # other damage is in test_bad_input.py and test_fuzz.py
    "int32": (lambda p: np.save(p, GOOD.astype(np.int32)), "int32 .*, not uint16 or uint32"),
    "two dimensions": (lambda p: np.save(p, GOOD.reshape(2, 100)), r"\(2, 100\), not uint16 or u"),
    "empty file": (lambda p: p.write_bytes(b""), "not a readable shard"),
    "no shards": (lambda p: None, "no train shards in it; make them with fineweb.py"),
    "too few tokens": (lambda p: np.save(p, GOOD[:T]), "has 16 tokens, fewer than 17"),
    "no tokens": (lambda p: np.save(p, GOOD[:0]), "has 0 tokens, fewer than|not a readable shard"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_invalid_shards(tmp_path, case):
    make, sentence = REFUSED[case]
    make(tmp_path / "x_train_000000.npy")
    with pytest.raises(UserError, match=sentence) as error:
        open_loader(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_refuses_an_id_outside_the_vocabulary(tmp_path):
    np.save(tmp_path / "x_train_000000.npy", np.arange(300, dtype=np.uint16))
    loader = open_loader(tmp_path, shuffle=False)
    loader.batch(0, 15, CPU)  # ids up to 240
    with pytest.raises(UserError, match="train split: token id 256 is outside the vocabulary of 2"):
        loader.batch(15, 1, CPU)


def fingerprint(*args, **options):
    return open_tokens(*args, **options).fingerprint()


def test_fingerprint(shards, tmp_path):
    """Checkpoints store the fingerprint, so it must not change between versions."""
    assert fingerprint(shards) == "3,381 tokens with CRC-32 101aefd2"
    assert fingerprint(shards, "val") == "700 tokens with CRC-32 7f7f507d"
    text = tmp_path / "t.txt"
    text.write_text("Hello, I'm a language model, " * 9000)
    assert fingerprint(text) == "234,900 tokens with CRC-32 7491ac53"
    gpt2 = dict(vocab_size=50257, tokenizer="gpt2")
    assert fingerprint(text, **gpt2) == "64,800 tokens with CRC-32 d5be1382"


@pytest.mark.parametrize("i, known", [(ENDS - 1, "90bc68aa"), (ENDS, "27ef8611"),
                                      (2 * ENDS - 1, "27ef8611"), (2 * ENDS, "9b0ed413")])
def test_the_fingerprint_covers_both_ends_of_a_shard(tmp_path, i, known):
    """A change of token i."""
    tokens = np.arange(3 * ENDS, dtype=np.uint32).astype(np.uint16)
    tokens[i] ^= 1
    np.save(tmp_path / "x_train_000000.npy", tokens)
    assert fingerprint(tmp_path, vocab_size=65536) == f"196,608 tokens with CRC-32 {known}"
    with pytest.raises(UserError, match="token id 65535 is outside the vocabulary of 65535"):
        fingerprint(tmp_path, vocab_size=65535)


def test_the_tokenizer_of_the_data(shards):
    assert find_tokenizer(shards).name == "bytes" == find_tokenizer(ROOT / "input.txt").name
    (shards / "meta.json").rename(shards / "progress.json")
    assert find_tokenizer(shards).name == "bytes" == find_tokenizer(shards, "bytes").name
    sentence = f"{shards}: has tokens of bytes; leave out --tokenizer gpt2"
    with pytest.raises(UserError, match=re.escape(sentence)):
        find_tokenizer(shards, "gpt2")
    (shards / "progress.json").unlink()
    assert find_tokenizer(shards).name == "gpt2"
    assert find_tokenizer(shards, "bytes").name == "bytes"
