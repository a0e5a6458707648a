"""Tokens and checkpoints of nanoGPT, build-nanogpt and llm.c, and data sets of `datasets`."""

import dataclasses
import sys

from plaingpt.checkpoint import load_newest
from plaingpt.data import Sources, open_splits
from plaingpt.errors import UserError
from plaingpt.pretrained import load_model
from plaingpt.tokenizer import get_tokenizer

import numpy as np
import pytest
import torch
from conftest import program, randomise, write_bin

from model import GPT, GPTConfig

SHAPE = dict(block_size=8, n_layer=2, n_head=2, n_embd=4)


def test_tokens_of_nanogpt_and_llm_c(tmp_path):
    ids = np.arange(40, dtype="<u2")
    for name in ("train.bin", "val.bin"):
        ids.tofile(tmp_path / name)
    for name in ("my_train.bin", "my_val.bin"):
        (tmp_path / "c").mkdir(exist_ok=True)
        write_bin(tmp_path / "c" / name, ids)
    for place in (tmp_path, tmp_path / "c"):
        for tokens in open_splits(place, get_tokenizer("gpt2")):
            assert tokens.read(0, len(tokens)).tolist() == ids.tolist()
    with pytest.raises(UserError, match="train.bin: is a shard; give the directory"):
        open_splits(tmp_path / "train.bin", get_tokenizer("gpt2"))


@pytest.mark.parametrize("dtype, first", [("<u4", 0), ("<u4", 70_000), ("<i8", 0)])
def test_ids_of_nanogpt_with_more_than_16_bits(tmp_path, dtype, first):
    np.arange(first, first + 40, dtype=dtype).tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match="train.bin: contains ids of 32 or 64 bits; write them as"):
        Sources([str(tmp_path)])


def test_ids_of_characters_are_not_gpt2s(tmp_path):
    """The user has not copied nanoGPT's meta.pkl, which shows that the ids mean characters."""
    np.arange(65, dtype="<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match="all ids are below 256, like ids of bytes or characters"):
        Sources([str(tmp_path)])
    assert Sources([str(tmp_path)], "bytes").tokenizer.name == "bytes"


@pytest.fixture
def theirs():
    """Returns a GPT whose biases are 0, and a dict of the other weights of this GPT.

    In the dict, the weights have the names that nanoGPT and build-nanogpt use.
    """
    model = randomise(GPT(GPTConfig(vocab_size=50257, **SHAPE)))
    weights = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if name.endswith(".bias"):
            p.data.zero_()
        elif p.shape[0] == 50257:
            weights[f"_orig_mod.{name}"] = torch.cat([p, torch.ones(47, p.shape[1])]).detach()
        else:
            weights[f"_orig_mod.{name}"] = p.detach()
    weights["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # nanoGPT's causal mask
    return model, weights


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["nanogpt", "build-nanogpt"])
def test_checkpoints_of_others(trainer, theirs, tmp_path, monkeypatch, capsys):
    model, weights = theirs
    found, path = dict(model=weights), tmp_path / "model_00010.pt"
    if trainer == "nanogpt":
        found |= dict(model_args=dict(SHAPE, vocab_size=50304, bias=False, dropout=0.0), iter_num=3)
    else:
        kind = dataclasses.make_dataclass("GPTConfig", [*SHAPE, "vocab_size"])
        kind.__module__ = "__main__"
        monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", kind, raising=False)
        found |= dict(config=kind(**SHAPE, vocab_size=50304), step=10)
    torch.save(found, path)
    loaded, tokenizer = load_model(str(path), GPT)
    idx = torch.randint(50257, (2, 8))
    torch.testing.assert_close(loaded(idx)[0], model(idx)[0])
    assert tokenizer.name == "gpt2"
    assert ("GELU is exact" in capsys.readouterr().out) == (trainer == "nanogpt")
    with pytest.raises(UserError, match="another program wrote it; use --init_from"):
        load_newest(tmp_path, GPT)
    program("--checkpoint", path, "--max_new_tokens", 2, cwd=tmp_path, program="generate.py")
    torch.save(dict(found, model_args=dict(SHAPE, vocab_size=65)), path)
    with pytest.raises(UserError, match="or the token ids are not GPT-2's"):
        load_model(str(path), GPT)


def test_only_biases_may_be_missing(theirs, tmp_path):
    """Missing biases become zeros. A file in which other weights are missing is refused."""
    _, weights = theirs
    del weights["_orig_mod.transformer.h.1.mlp.c_fc.weight"]
    torch.save(dict(model=weights, model_args=dict(SHAPE, vocab_size=50304)), tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match="not a readable checkpoint"):
        load_model(str(tmp_path / "ckpt.pt"), GPT)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", "module._orig_mod."])
def test_weights_of_a_model_in_ddp(prefix, theirs, tmp_path):
    """DDP and torch.compile add prefixes to the names of the weights."""
    model, weights = theirs
    weights = {prefix + name.removeprefix("_orig_mod."): p for name, p in weights.items()}
    torch.save(dict(model=weights, model_args=dict(SHAPE, vocab_size=50304)), tmp_path / "ckpt.pt")
    loaded, _ = load_model(str(tmp_path / "ckpt.pt"), GPT)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters()))


@pytest.mark.slow
def test_a_directory_of_save_to_disk(tmp_path):
    import datasets

    rows = [f"document {n}" for n in range(300)]
    datasets.Dataset.from_dict(dict(text=rows)).save_to_disk(tmp_path / "saved", num_shards=2)
    program(
        "--input",
        "saved",
        "--output_dir",
        "o",
        "--shard_size",
        10**4,
        "--val_shards",
        0,
        cwd=tmp_path,
        program="fineweb.py",
    )
    tokens = np.load(next((tmp_path / "o").glob("*.npy"))).tolist()
    assert get_tokenizer("gpt2").decode(tokens).split("<|endoftext|>") == ["", *rows]
