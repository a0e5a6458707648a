"""The referee of experiment.py: how it splits data, its losses, and what it finds."""

import importlib
import json
import os
import subprocess
import sys

from plaingpt.base.errors import UserError
from plaingpt.data.data_sets import Sources, open_pairs, open_splits
from plaingpt.data.tokenizer import get_tokenizer
from plaingpt.data.tokens import Tokens

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, program, randomise, write_lines

from model import GPT, GPTConfig
from train_gpt2 import DataLoaderLite

T = 16
BYTES = get_tokenizer("bytes")


@pytest.fixture
def referee(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return importlib.import_module("referee")


def whole_ids(path, tokenizer=BYTES):
    """All ids of a data set: those of its training split, then those of its validation split."""
    return np.concatenate([part.read(0, len(part)) for part in open_splits(path, tokenizer)])


def test_a_text_is_cut_between_two_characters(referee, tmp_path):
    """As the base cuts it, up to a character. Both parts together are the text."""
    text = "日本語の文章 " * 999
    (tmp_path / "a.txt").write_text(text)
    parts = referee.split_set(tmp_path / "a.txt", BYTES, 0.25, tmp_path / "lab")
    train, sealed = [open(parts[kind], "rb").read() for kind in ("train", "sealed")]
    assert train.decode() + sealed.decode() == text  # neither begins or ends within a character
    _, val = open_splits(tmp_path / "a.txt", BYTES, 0.25)
    assert 0 <= len(val) - len(sealed) < 4 and parts["is_held_out"]
    # It is made once.
    written = (tmp_path / "lab/data").stat().st_mtime_ns
    assert referee.split_set(tmp_path / "a.txt", BYTES, 0.25, tmp_path / "lab") == parts
    assert (tmp_path / "lab/data").stat().st_mtime_ns == written
    (tmp_path / "a.txt").write_text(text + "!")
    assert referee.split_set(tmp_path / "a.txt", BYTES, 0.25, tmp_path / "lab") != parts


def test_pairs_stay_pairs(referee, tmp_path):
    """The sealed pairs are those that the base would hold out."""
    records = [dict(prompt=f"{i} ", response="x" * (i % 5 + 1), other=i) for i in range(60)]
    path = write_lines(tmp_path / "a.jsonl", records)
    parts = referee.split_set(path, BYTES, None, tmp_path / "lab")
    found = []
    for kind in ("train", "sealed"):
        found += [json.loads(line) for line in open(parts[kind])]
    pairs = [(record["prompt"], record["response"]) for record in records]
    assert sorted((record["prompt"], record["response"]) for record in found) == sorted(pairs)
    tokens = referee.open_whole(parts["sealed"], BYTES, T, 256, True)
    _, val = open_pairs(path, BYTES, T)
    assert tokens.fingerprint() == val.fingerprint() and tokens.has_pairs
    write_lines(path, [dict(prompt="a")])
    with pytest.raises(UserError, match=f"{path}, line 1: needs prompt and response texts"):
        referee.split_set(path, BYTES, None, tmp_path / "lab")


def test_val_shards_are_the_sealed_part(referee, shards, tmp_path):
    parts = referee.split_set(shards, BYTES, None, tmp_path / "lab")
    train, val = open_splits(shards, BYTES)
    tokens = referee.open_whole(parts["sealed"], BYTES, T, 256)
    assert tokens.fingerprint() == val.fingerprint() and not parts["is_held_out"]
    assert (whole_ids(parts["train"]) == train.read(0, len(train))).all()
    assert Sources([parts["train"]]).tokenizer.name == "bytes"  # meta.json comes with it


def test_shards_without_val_shards_are_cut(referee, shards, tmp_path):
    """Within a shard, where the base cuts."""
    next(shards.glob("*val*")).unlink()
    ids = whole_ids(shards)
    parts = referee.split_set(shards, BYTES, 0.3, tmp_path / "lab")
    _, val = open_splits(shards, BYTES, 0.3)
    tokens = referee.open_whole(parts["sealed"], BYTES, T, 256)
    assert tokens.fingerprint() == val.fingerprint() and parts["is_held_out"]
    assert (whole_ids(parts["train"]) == ids[: -len(val)]).all()


def test_sets_of_a_mixture_are_split_alone_and_keep_their_weights(referee, tmp_path):
    paths = []
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} sentence with {name * 9}.\n" * 90)
        paths.append(str(tmp_path / f"{name}.txt"))
    given = dict(
        flags=["--data", f"{paths[0]}=3", paths[1]],
        more=["--optimizer", "adamw", "--data", paths[0], f"{paths[2]}=0.5", "--mine"],
        place=str(tmp_path / "lab"),
    )
    found = referee.split(given)
    weights = [item.rpartition("=")[2] for item in found["data"]["base"] + found["data"]["change"]]
    assert weights == ["3", "1", "1", "1/2"]
    assert found["data"]["base"][0] == found["data"]["change"][0].replace("=1", "=3")
    assert [part["share"] for part in found["sealed"]] == ["3/4", "1/4"]
    Sources(found["data"]["change"])  # these are values of --data
    # A set of the change that has the sealed text of the base, under another name.
    (tmp_path / "copy.txt").write_bytes(open(paths[1], "rb").read()[-300:] * 2)
    given["more"] = ["--data", paths[0], str(tmp_path / "copy.txt")]
    referee.split(given)  # these texts are repetitions, so the base trains on the same
    (tmp_path / "b.txt").write_bytes(np.random.default_rng(0).integers(32, 127, 3000, np.uint8))
    (tmp_path / "copy.txt").write_bytes((tmp_path / "b.txt").read_bytes()[-300:] * 2)
    with pytest.raises(UserError, match="copy.txt: has .*% of the text that is sealed for the val"):
        referee.split(given)


def loader_of(ids):
    return DataLoaderLite([Tokens("val", [ids], 256)], [1], T, shuffle=False)


def answer_with(monkeypatch, referee, logits_of):
    """The referee asks logits_of, (R, T) -> (R, T, vocab_size). Returns shapes of its questions."""
    shapes = []

    def ask_for_logits(models, run, rows, positions=None):
        shapes.append(tuple(rows.shape))
        logits = logits_of(rows)
        return logits if positions is None else logits[range(len(rows)), positions]

    monkeypatch.setattr(referee, "ask_for_logits", ask_for_logits)
    return shapes


@pytest.mark.parametrize("vocab_size", [256, 2**17])  # all sequences at once, or two
def test_the_referee_finds_one_position_that_sees_the_next_token(referee, monkeypatch, vocab_size):
    facts = dict(block_size=T, val_tokens=6 * T, vocab_size=vocab_size)
    model = randomise(GPT(GPTConfig(1, 2, 16, T, 256))).requires_grad_(False).eval()
    loader = loader_of(torch.randint(256, (8 * T,)).numpy().astype(np.uint8))
    x, y = loader.batch(0, 6, torch.device("cpu"))  # (6, T) each
    answer_with(monkeypatch, referee, lambda idx: model(idx)[0])
    found = referee.measure_run(None, 0, [loader], [1], facts, 256)
    expected = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten()).item()
    assert found["loss"] == pytest.approx(expected) and found["later"] < 1e-5
    for place in range(T - 1):

        def leak(idx, place=place):
            logits = model(idx)[0]
            later = model.transformer.wte(idx[:, place + 1 :]).sum((1, 2))  # (R)
            logits[:, place] += 0.01 * later[:, None]
            return logits

        answer_with(monkeypatch, referee, leak)
        assert referee.measure_run(None, 0, [loader], [1], facts, 256)["later"] > 1e-4, place


def test_a_long_context_has_few_passes(referee, monkeypatch):
    facts = dict(block_size=1024, val_tokens=3 * 1024, vocab_size=256)
    loader = DataLoaderLite([Tokens("val", [np.zeros(3073, np.uint8)], 256)], [1], 1024)
    shapes = answer_with(monkeypatch, referee, lambda idx: torch.ones(*idx.shape, 2))
    referee.measure_run(None, 0, [loader], [1], facts, 256)
    assert len(shapes) < 80 and max(R for R, _ in shapes) <= 32
    assert sum(R for R, _ in shapes) == 3 + 2 * 1023  # each position in two sequences


@pytest.mark.slow
def test_the_referee_agrees_with_validate(tmp_path):
    """On an honest run, with bfloat16, and on a mixture: within 0.2 %."""
    (tmp_path / "b.txt").write_bytes((ROOT / "input.txt").read_bytes()[:30_000])
    data = ["--data", f"{ROOT / 'input.txt'}=3", "b.txt"]
    train = [*TINY, *data, "--dtype", "bfloat16", "--max_steps", 30]
    program(*train, "--log_dir", "run", cwd=tmp_path)
    facts = json.loads((tmp_path / "run/run.json").read_text())
    logged = [line.split() for line in (tmp_path / "run/log.txt").read_text().splitlines()]
    (val,) = [float(value) for step, stream, value in logged if (step, stream) == ("30", "val")]
    given = dict(flags=list(map(str, [*TINY, *data])), more=[], place=str(tmp_path / "lab"))
    out = run_referee("split", given, tmp_path)
    given = dict(
        base_run=str(tmp_path / "run"),
        facts=facts["train_config"] | facts["model_config"],
        sealed=out["sealed"],
        program=str(ROOT / "experiments/give_logits.py"),
        runs=[str(tmp_path / "run")] * 2,
    )
    first, second = run_referee("measure", given, tmp_path)
    assert first["loss"] == pytest.approx(val, rel=0.002)
    assert first["loss"] == second["loss"] and first["later"] < 1e-5


def run_referee(task, given, cwd):
    """Runs the program as experiment.py does, but with the code of this clone."""
    done = subprocess.run(
        [sys.executable, ROOT / "experiments/referee.py", task],
        input=json.dumps(given),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
