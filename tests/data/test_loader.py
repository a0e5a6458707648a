"""Token files, their sequences, the order of the sequences, and invalid data."""

import re
import resource

from plaingpt.data import find_tokenizer, open_pairs, open_splits
from plaingpt.errors import UserError
from plaingpt.order import permute
from plaingpt.shards import ENDS, open_shard
from plaingpt.tokenizer import Tokenizer, get_tokenizer

import numpy as np
import pytest
import torch
from conftest import CPU, ROOT, TINY, write_bin
from test_data_sets import write_megatron

import train_gpt2
from train_gpt2 import DataLoaderLite, TrainConfig, make_val_loader

T = 16


def open_tokens(data, split="train", vocab_size=256, tokenizer="bytes"):
    """Opens a split of the data. Returns the Tokens of the split.

    If the data are a directory without a validation shard, first adds a validation shard.
    """
    if data.is_dir() and not list(data.glob("*_val_*")):
        np.save(data / "x_val_000000.npy", np.zeros(100, np.uint16))
    train, val = open_splits(data, get_tokenizer(tokenizer), vocab_size=vocab_size)
    return train if split == "train" else val


def open_loader(data, T=T, seed=1337, shuffle=True, **options):
    return DataLoaderLite([open_tokens(data, **options)], [1], T, seed, shuffle)


def measured(val, **settings):
    """Returns the positions, in tokens, of the first five sequences that a validation reads.

    The ids of the validation split must be 10, 11, 12, and so on.
    """
    loader = make_val_loader(val, T, TrainConfig(val_tokens=5 * T, **settings))
    return (loader.batch(0, 5, CPU)[0][:, 0] - 10).tolist()


def test_validation_of_a_part_that_was_held_out_is_spread(tmp_path):
    """A validation reads sequences that are evenly spaced over the held-out part of the data.

    In a val shard, a validation reads the first sequences.
    """
    ids = np.zeros(2000, np.uint16)
    # 12 sequences of 16 tokens are held out. A validation reads 5 of these sequences.
    ids[-200:] = np.arange(10, 210)
    np.save(tmp_path / "x_train_000000.npy", ids)
    splits = open_splits(tmp_path, get_tokenizer("bytes"), 0.1)
    assert measured(splits[1]) == [0, 32, 64, 112, 144]  # sequences 0, 2, 4, 7 and 9
    assert measured(splits[1], val_spread=False) == [0, 16, 32, 48, 64]
    np.save(tmp_path / "x_val_000000.npy", np.arange(10, 210, dtype=np.uint16))
    _, val = open_splits(tmp_path, get_tokenizer("bytes"))
    assert measured(val) == [0, 16, 32, 48, 64]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "Who?", "response": "The pilot."}\n' * 100)
    train, val = open_pairs(pairs, get_tokenizer("bytes"), T)
    assert val.is_held_out and not train.is_held_out


def test_how_many_shards_stay_open(tmp_path):
    """A process may open 256 files, as on macOS. It can still read 300 shards, one after the other.

    100 shards, as many as FineWeb-Edu has, stay open, so each shard is opened only once.
    """
    for i in range(300):
        np.save(tmp_path / f"x_train_{i:06d}.npy", np.full(10, i, np.uint16))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        tokens = open_tokens(tmp_path, vocab_size=300)
        for i in range(300):
            assert tokens.read(10 * i, 10).tolist() == [i] * 10
        open_shard.cache_clear()
        for _ in range(2):
            for i in range(100):
                tokens.read(10 * i, 10)
        assert open_shard.cache_info().misses == 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_npy_and_bin_give_the_same_batches(shards, tmp_path, dtype):
    """The fingerprints of both formats are the same. Ids above 65,535 keep all their bits."""
    for name in ("npy", "bin"):
        (tmp_path / name).mkdir()
    for p in shards.glob("*.npy"):
        tokens = np.load(p).astype(dtype) + dtype(100_000 if dtype == np.uint32 else 0)
        np.save(tmp_path / "npy" / p.name, tokens)
        write_bin(tmp_path / "bin" / p.with_suffix(".bin").name, tokens)
    a, b = (open_loader(tmp_path / name, vocab_size=100_256) for name in ("npy", "bin"))
    assert a.sets[0].fingerprint() == b.sets[0].fingerprint()
    parts = [np.load(p) for p in sorted(tmp_path.glob("npy/*_train_*"))]
    assert a.sets[0].read(0, 3381).tolist() == np.concatenate(parts).tolist()
    for position in range(0, 500, 10):  # into the third epoch
        for u, v in zip(a.batch(position, 10, CPU), b.batch(position, 10, CPU)):
            assert u.equal(v)


def test_the_order_of_the_data_never_changes(tmp_path):
    """The test checks the order of 8 sequences in epochs 0 and 1, with the seed 1337.

    With a different order, a new version would not reproduce published losses.
    """
    np.save(tmp_path / "x_train_000000.npy", np.arange(8 * T + 1, dtype=np.uint16))
    x, _ = open_loader(tmp_path).batch(0, 16, CPU)
    assert (x[:, 0] // T).tolist() == [5, 0, 3, 1, 2, 6, 7, 4] + [1, 6, 2, 7, 4, 5, 0, 3]


def test_permute_is_uniform():
    """Runs two chi-squared tests over many epochs.

    In each epoch, `permute` maps position i to p(i). One test is about the pairs (i, p(i)), and the
    other test is about the differences p(i + 1) - p(i).
    """
    n, epochs = 30, 3000
    orders = np.array([[permute(i, n, 0, epoch) for i in range(n)] for epoch in range(epochs)])
    counts = np.stack([np.bincount(column, minlength=n) for column in orders.T])
    # A difference of 0 cannot occur.
    steps = np.bincount((np.diff(orders) % n).ravel(), minlength=n)[1:]
    for found, degrees in ((counts, (n - 1) ** 2), (steps, n - 2)):
        expected = found.sum() / found.size
        chi = ((found - expected) ** 2 / expected).sum()
        assert abs(chi - degrees) < 5 * (2 * degrees) ** 0.5, (chi, degrees)


def test_only_cuda_copies_batches_while_the_program_goes_on(tmp_path, monkeypatch):
    """On MPS, a copy in the background might read memory that the program has already freed."""
    (tmp_path / "t.txt").write_bytes(b"text\n" * 200)
    loader, seen = open_loader(tmp_path / "t.txt"), {}
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda batch: batch)
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda batch, device, non_blocking: seen.update({device.type: non_blocking}) or batch,
    )
    for name in ("cuda", "mps", "cpu"):
        loader.batch(0, 1, torch.device(name))
    assert seen == dict(cuda=True, mps=False, cpu=False)


@pytest.mark.slow
def test_a_text_is_encoded_once(tmp_path, monkeypatch):
    """The text is encoded once, even if the tokenizer comes from a checkpoint."""
    text, encoded, real = "Hello, I'm a language model. " * 400, [], Tokenizer.encode_documents
    monkeypatch.setattr(
        Tokenizer, "encode_documents", lambda *args: encoded.extend(args[1]) or real(*args)
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text(text)
    flags = [*TINY, *"--total_batch_size 128 --val_tokens 128 --log_dir r".split()]
    flags += ["--data", "t.txt", "--tokenizer", "gpt2"]
    for max_steps in "12":
        train_gpt2.main([*flags, "--max_steps", max_steps, "--resume"])
        assert encoded == [text]
        encoded.clear()


GOOD = np.arange(200, dtype=np.uint16)
REFUSED = {  # test_reliability.py and test_fuzz.py test more kinds of damage
    "int32": (lambda p: np.save(p, GOOD.astype(np.int32)), "int32 .*, not uint16 or uint32"),
    "two dimensions": (lambda p: np.save(p, GOOD.reshape(2, 100)), r"\(2, 100\), not uint16 or u"),
    "empty file": (lambda p: p.write_bytes(b""), "not a shard"),
    "no shards": (lambda p: None, "contains no train shards; make them with fineweb.py"),
    "too few tokens": (lambda p: np.save(p, GOOD[:T]), "has 16 tokens; give more tokens than"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_invalid_shards(tmp_path, case):
    make, sentence = REFUSED[case]
    make(tmp_path / "x_train_000000.npy")
    with pytest.raises(UserError, match=sentence) as error:
        open_loader(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "name, is_there",
    [
        ("a_val_000000.npy", False),
        ("a_train_000002.npy", False),
        ("a_train_000002.npy", True),
        ("b_train_000000.npy", True),
    ],
)
def test_the_shards_have_the_tokens_that_meta_json_says(shards, name, is_there):
    """The test removes a shard, replaces a shard, or adds a shard that meta.json does not count.

    Without the val shard, a run would validate on tokens on which other runs train.
    """
    (shards / "meta.json").write_text('{"tokenizer": "bytes", "tokens": 4081}')
    _, val = open_splits(shards, get_tokenizer("bytes"))
    assert len(val) == 700
    open_shard.cache_clear()
    (shards / name).unlink(missing_ok=True)
    if is_there:
        np.save(shards / name, GOOD)
    sentence = (
        "its shards contain .* tokens, but meta.json says 4,081; restore the shards, or move the "
        "shards to use into a directory without meta.json$"
    )
    with pytest.raises(UserError, match=sentence):
        open_splits(shards, get_tokenizer("bytes"))
    (shards / "meta.json").write_text('{"tokenizer": "bytes", "tokens": ["a", "b"]}')
    open_splits(shards, get_tokenizer("bytes"))


def test_a_shard_in_two_formats_is_refused(shards):
    """In each epoch, a run would train twice on the tokens of such a shard."""
    write_bin(shards / "a_train_000002.bin", np.load(shards / "a_train_000002.npy"))
    sentence = "a_train_000002.bin and a_train_000002.npy are the same shard; move one of them away"
    with pytest.raises(UserError, match=sentence):
        open_splits(shards, get_tokenizer("bytes"))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 200000128\n"


@pytest.mark.parametrize("name", ["x_train_000000.npy", "x_train_000000.bin", "train.bin", "x.idx"])
def test_a_pointer_of_git_lfs_is_no_shard(tmp_path, name):
    """nanoGPT's train.bin has no header, so a run would read the pointer as token ids."""
    (tmp_path / name).write_bytes(POINTER)
    sentence = f"{name}: is a pointer of Git LFS instead of the file; run git lfs pull$"
    with pytest.raises(UserError, match=sentence):
        open_splits(tmp_path, get_tokenizer("gpt2"))


@pytest.mark.parametrize("name", ["x.bin", "a.txt"])
def test_a_pointer_of_git_lfs_is_no_data(tmp_path, name):
    """Git LFS may replace Megatron's .bin file with a pointer, but not its small .idx file."""
    write_megatron(tmp_path / "x", [[1] * 500], "<u2", 8)
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(UserError, match=f"{name}: is a pointer of Git LFS instead of the file; ru"):
        open_splits(tmp_path / name, get_tokenizer("gpt2"))


SHARD_NAMES = ["x_train_000001.npy", "x_train_000001.bin", "train.bin", "x.idx"]


def write_shard(directory, name, ids):
    """Writes a shard in the format that its name selects."""
    if name == "x.idx":
        write_megatron(directory / "x", [ids], "<u2", 8)
    elif name == "train.bin":
        ids.tofile(directory / name)
    elif name.endswith(".bin"):
        write_bin(directory / name, ids)
    else:
        np.save(directory / name, ids)


@pytest.mark.parametrize("name", SHARD_NAMES)
@pytest.mark.parametrize("id", [0, 50256])
def test_a_shard_that_one_id_fills_to_its_end(tmp_path, name, id):
    """A download may reserve the size of a file, then stop. The rest of the file contains zeros."""
    ids = np.random.default_rng(0).integers(1, 50256, 20_000).astype(np.uint16)
    ids[18_100:] = id  # fewer than a tenth of the ids, which is not an error
    write_shard(tmp_path, name, ids)
    fingerprint(tmp_path, vocab_size=50257, tokenizer="gpt2")
    open_shard.cache_clear()
    ids[13_021:] = id
    write_shard(tmp_path, name, ids)
    sentence = (
        f"{name}: is not complete, because all tokens from token 13,021 on have the id {id}; "
        "download or make it again$"
    )
    with pytest.raises(UserError, match=sentence):
        fingerprint(tmp_path, vocab_size=50257, tokenizer="gpt2")
    open_shard.cache_clear()
    ids[:] = id
    write_shard(tmp_path, name, ids)
    with pytest.raises(UserError, match=f"all tokens from token 0 on have the id {id}"):
        fingerprint(tmp_path, vocab_size=50257, tokenizer="gpt2")


@pytest.mark.parametrize("name", ["own.txt.GZ", "own.zst", "own.dat"])
def test_data_that_is_no_text_names_the_command_for_shards(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"{}" * 5000 + b"\0" * (name == "own.dat"))
    with pytest.raises(UserError) as error:
        open_tokens(path)
    expected = f"--data {path}: is not a text file; make shards from it: fineweb.py --input {path}"
    assert str(error.value) == expected


def fingerprint(*args, **options):
    return open_tokens(*args, **options).fingerprint()


def test_fingerprint(shards, tmp_path):
    """Checkpoints contain fingerprints, so a fingerprint must not change between versions."""
    assert fingerprint(shards) == "3,381 tokens with CRC-32 101aefd2"
    assert fingerprint(shards, "val") == "700 tokens with CRC-32 7f7f507d"
    text = tmp_path / "t.txt"
    text.write_text("Hello, I'm a language model, " * 9000)
    assert fingerprint(text) == "234,900 tokens with CRC-32 7491ac53"
    gpt2 = dict(vocab_size=50257, tokenizer="gpt2")
    assert fingerprint(text, **gpt2) == "64,800 tokens with CRC-32 d5be1382"


@pytest.mark.parametrize(
    "i, known",
    [
        (ENDS - 1, "90bc68aa"),
        (ENDS, "27ef8611"),
        (2 * ENDS - 1, "27ef8611"),
        (2 * ENDS, "9b0ed413"),
    ],
)
def test_the_fingerprint_covers_both_ends_of_a_shard(tmp_path, i, known):
    """The fingerprint depends on token i only if token i is near an end of the shard."""
    tokens = np.arange(3 * ENDS, dtype=np.uint32).astype(np.uint16)
    tokens[i] ^= 1
    np.save(tmp_path / "x_train_000000.npy", tokens)
    assert fingerprint(tmp_path, vocab_size=65536) == f"196,608 tokens with CRC-32 {known}"
    with pytest.raises(
        UserError, match="id 65535 is outside the vocabulary; check --tokenizer and --vocab_size"
    ):
        fingerprint(tmp_path, vocab_size=65535)


def test_what_a_directory_lacks_is_noted(shards, capsys):
    find_tokenizer(shards)
    assert capsys.readouterr().out == ""
    np.save(shards / "a_train_000007.npy", GOOD)
    (shards / "c_train_000001.bin.incomplete").write_bytes(b"")
    downloads = shards / ".cache/huggingface/download"
    downloads.mkdir(parents=True)
    (downloads / "bd1.5ce8.incomplete").write_bytes(b"")
    find_tokenizer(shards)
    assert capsys.readouterr().out.splitlines() == [
        f"note: {shards}: lacks 3 of the shards a_train_000001 to a_train_000007; download or make "
        "them again",
        f"note: {shards / 'c_train_000001.bin.incomplete'}: is not complete; download it again",
        f"note: {downloads / 'bd1.5ce8.incomplete'}: is not complete; download it again",
    ]


def test_the_tokenizer_of_the_data(shards, capsys):
    assert find_tokenizer(shards).name == "bytes" == find_tokenizer(ROOT / "input.txt").name
    (shards / "meta.json").rename(shards / "progress.json")
    assert find_tokenizer(shards).name == "bytes" == find_tokenizer(shards, "bytes").name
    assert (
        "a run on these shards cannot be resumed after fineweb.py has written"
        in capsys.readouterr().out
    )
    sentence = f"{shards}: contains tokens of bytes; remove --tokenizer gpt2"
    with pytest.raises(UserError, match=re.escape(sentence)):
        find_tokenizer(shards, "gpt2")
    (shards / "progress.json").unlink()
    with pytest.raises(UserError, match="all ids are below 256, like ids of bytes"):
        find_tokenizer(shards)
    assert find_tokenizer(shards, "bytes").name == "bytes"
