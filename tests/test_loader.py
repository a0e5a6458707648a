"""The stream of sequences: which tokens, in which order, whatever asks for them; and the data it refuses."""

import re

import numpy as np
import pytest
from conftest import write_bin

from plaingpt.cli import UserError
from train_gpt2 import DataLoaderLite

T = 16


def row(directory, split="train"):
    """All tokens of a split in the order of the files' names: the reference for everything below."""
    return np.concatenate([np.load(p) for p in sorted(directory.glob(f"*_{split}_*.npy"))])


def step(loader, position, n_sequences, world_size, B):
    """One step's sequences as `world_size` processes with micro-batches of B see them, in the loop's own arithmetic."""
    xs, ys = [], []
    for rank in range(world_size):
        for p in range(position + rank * B, position + n_sequences, world_size * B):
            x, y = loader.batch(p, B)
            xs.append(x)
            ys.append(y)
    return np.concatenate(xs), np.concatenate(ys)


def as_set(x, y):
    return sorted(map(tuple, np.concatenate([x, y[:, -1:]], axis=1).tolist()))


def test_source_order_crosses_shards(shards):
    loader, tokens = DataLoaderLite(shards, "train", T, 256, shuffle=False), row(shards)
    assert loader.n_sequences == (len(tokens) - 1) // T == 211
    for i in range(loader.n_sequences):
        x, y = loader.batch(i, 1)
        assert x[0].tolist() == tokens[i * T:(i + 1) * T].tolist()
        assert y[0].tolist() == tokens[i * T + 1:(i + 1) * T + 1].tolist()


def test_a_sequence_may_cross_many_shards(tmp_path):
    tokens = np.arange(100, dtype=np.uint16)
    for i, cut in enumerate(np.split(tokens, [3, 4, 9, 11, 50])):
        np.save(tmp_path / f"x_train_{i:06d}.npy", cut)
    loader = DataLoaderLite(tmp_path, "train", 40, 256, shuffle=False)
    assert loader.batch(0, 2)[1].tolist() == [list(range(1, 41)), list(range(41, 81))]


def test_npy_and_bin_give_the_same_batches(shards, tmp_path):
    (tmp_path / "bin").mkdir()
    for p in shards.iterdir():
        write_bin(tmp_path / "bin" / p.with_suffix(".bin").name, np.load(p))
    a, b = (DataLoaderLite(d, "train", T, 256) for d in (shards, tmp_path / "bin"))
    for position in range(0, 500, 10):  # into the third epoch
        for u, v in zip(a.batch(position, 10), b.batch(position, 10)):
            assert u.equal(v)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("B", [1, 2, 8])
def test_a_step_is_the_same_set_for_any_layout(shards, world_size, B):
    loader = DataLoaderLite(shards, "train", T, 256, seed=5)
    reference = DataLoaderLite(shards, "train", T, 256, seed=5)
    for position in range(0, 640, 32):  # steps of 32 sequences, across the ends of three epochs
        expected = as_set(*reference.batch(position, 32))
        assert as_set(*step(loader, position, 32, world_size, B)) == expected


def test_an_epoch_uses_every_sequence_once_in_an_order_of_its_own(shards):
    loader, tokens = DataLoaderLite(shards, "train", T, 256), row(shards)
    every = sorted(tuple(tokens[i * T:(i + 1) * T + 1].tolist()) for i in range(loader.n_sequences))
    orders = []
    for epoch in range(3):
        x, y = loader.batch(epoch * loader.n_sequences, loader.n_sequences)
        assert as_set(x, y) == every
        orders.append(x.tolist())
    assert orders[0] != orders[1] != orders[2] != orders[0]
    source = DataLoaderLite(shards, "train", T, 256, shuffle=False).batch(0, loader.n_sequences)[0].tolist()
    assert source not in orders and sorted(source) == sorted(orders[0])


def test_order_is_a_function_of_seed_and_epoch(shards):
    def first(seed, position=0):
        return DataLoaderLite(shards, "train", T, 256, seed=seed).batch(position, 20)[0].tolist()

    assert first(1) == first(1) != first(2)
    jumped = DataLoaderLite(shards, "train", T, 256, seed=1)
    jumped.batch(900, 3)
    assert jumped.batch(0, 20)[0].tolist() == first(1)  # going back gives the same again: there is no state


def test_order_is_frozen(tmp_path):
    """Written down, for any other order would change every published curve: seed 1337, 8 sequences, epochs 0 and 1."""
    np.save(tmp_path / "x_train_000000.npy", np.arange(8 * T + 1, dtype=np.uint16))
    x, _ = DataLoaderLite(tmp_path, "train", T, 256).batch(0, 16)
    assert (x[:, 0] // T).tolist() == [1, 3, 5, 4, 0, 6, 2, 7] + [0, 3, 1, 4, 7, 5, 2, 6]


def test_text_is_bytes_and_its_last_tenth_validates(tmp_path):
    data = bytes(range(1, 256)) * 10
    (tmp_path / "t.txt").write_bytes(data)
    train, val = (DataLoaderLite(tmp_path / "t.txt", split, 16, 256, shuffle=False) for split in ("train", "val"))
    assert train.starts[-1] == 2295 and val.starts[-1] == 255
    assert bytes(train.batch(3, 1)[0][0].tolist()) == data[48:64]
    assert bytes(val.batch(0, 1)[0][0].tolist()) == data[2295:2311]


def test_text_for_gpt2_weights_is_gpt2_tokens(tmp_path):
    (tmp_path / "t.txt").write_text("Hello, I'm a language model, " * 20)
    x, _ = DataLoaderLite(tmp_path / "t.txt", "train", 8, 50257, shuffle=False, tokenizer="gpt2").batch(0, 1)
    assert x[0].tolist() == [15496, 11, 314, 1101, 257, 3303, 2746, 11]


GOOD = np.arange(200, dtype=np.uint16)


def pickled(path):
    np.save(path.with_suffix(".npy"), np.array([{"a": 1}] * 100, dtype=object), allow_pickle=True)


REFUSED = {
    "no train shards": (lambda d: np.save(d / "x_val_000000.npy", GOOD), "no train shards"),
    "float shard": (lambda d: np.save(d / "x_train_000000.npy", GOOD.astype(float)), "float64 .* one-dimensional uint16"),
    "int32 shard": (lambda d: np.save(d / "x_train_000000.npy", GOOD.astype(np.int32)), "int32 .* one-dimensional uint16"),
    "two dimensions": (lambda d: np.save(d / "x_train_000000.npy", GOOD.reshape(2, 100)), r"\(2, 100\)"),
    "pickled objects": (lambda d: pickled(d / "x_train_000000"), "not a readable shard"),
    "not a npy": (lambda d: (d / "x_train_000000.npy").write_text("hello"), "not a readable shard"),
    "empty npy": (lambda d: (d / "x_train_000000.npy").write_bytes(b""), "not a readable shard"),
    "wrong magic": (lambda d: write_bin(d / "x_train_000000.bin", GOOD, magic=1), "beginning with 20240520"),
    "wrong version": (lambda d: write_bin(d / "x_train_000000.bin", GOOD, version=2), "beginning with 20240520"),
    "truncated bin": (lambda d: write_bin(d / "x_train_000000.bin", GOOD, count=300), "300 tokens .* truncated"),
    "short header": (lambda d: (d / "x_train_000000.bin").write_bytes(b"abcd" * 10), "not a shard"),
    "too few tokens": (lambda d: np.save(d / "x_train_000000.npy", GOOD[:16]), "16 tokens .* too few"),
    "no tokens": (lambda d: np.save(d / "x_train_000000.npy", GOOD[:0]), "too few|not a readable shard"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(tmp_path, case):
    make, sentence = REFUSED[case]
    make(tmp_path)
    with pytest.raises(UserError, match=sentence) as error:
        DataLoaderLite(tmp_path, "train", T, 256)
    assert "\n" not in str(error.value) and re.search(str(tmp_path), str(error.value))


def test_refuses_a_truncated_npy(tmp_path):
    path = tmp_path / "x_train_000000.npy"
    np.save(path, GOOD)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="not a readable shard"):
        DataLoaderLite(tmp_path, "train", T, 256)


def test_refuses_an_id_outside_the_vocabulary(tmp_path):
    np.save(tmp_path / "x_train_000000.npy", np.arange(300, dtype=np.uint16))
    loader = DataLoaderLite(tmp_path, "train", T, 256, shuffle=False)
    loader.batch(0, 15)  # ids up to 240
    with pytest.raises(UserError, match="x_train_000000.npy: token id 256 is outside the vocabulary of 256"):
        loader.batch(15, 1)


def test_a_shard_that_shrinks_or_goes_during_the_run(shards):
    loader = DataLoaderLite(shards, "train", T, 256, shuffle=False)
    last = shards / "a_train_000003.npy"
    np.save(last, np.load(last)[:100])
    with pytest.raises(UserError, match="was changed during the run"):
        loader.batch(200, 1)
    last.unlink()
    with pytest.raises(UserError, match="unreadable"):
        loader.batch(200, 1)


def test_missing_data(tmp_path):
    with pytest.raises(UserError, match="no such file or directory"):
        DataLoaderLite(tmp_path / "nothing", "train", T, 256)
