"""Pairs of prompts and responses: their tokens, the loss on responses only, and answers.py."""

import gzip
import math
import random
import re

from plaingpt.data import Data, Sources, open_pairs
from plaingpt.errors import UserError
from plaingpt.pairs import read_pairs
from plaingpt.pretrained import same_logits
from plaingpt.scoring.benchmark import load_examples
from plaingpt.tokenizer import get_tokenizer

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import (
    CPU,
    MODEL,
    ONE_BYTE_IDS,
    ROOT,
    as_training,
    fresh,
    program,
    read_log,
    train,
    write_lines,
)
from plain import plain_curve

import answers
from train_gpt2 import DataLoaderLite, TrainConfig, estimate_loss

BYTES = get_tokenizer("bytes")


def write_pairs(path, pairs):
    return write_lines(path, [dict(prompt=prompt, response=response) for prompt, response in pairs])


def letters(rng, least, most):
    return "".join(rng.choices("abcdfghi", k=rng.randint(least, most)))


@pytest.fixture
def pairs(tmp_path):
    """A file of 400 pairs of different lengths. Micro-batches therefore have different weights."""
    rng = random.Random(0)
    return write_pairs(
        tmp_path / "pairs.jsonl", [(letters(rng, 0, 15), letters(rng, 1, 15)) for _ in range(400)]
    )


def open_loader(items, split="train", **options):
    sources = Sources([str(item) for item in items])
    data = Data(sources, sources.tokenizer, MODEL)
    return DataLoaderLite(getattr(data, split), data.shares, MODEL.block_size, **options)


def test_layout(tmp_path):
    """Each pair is within one sequence. Only the response and its end_of_text are targets."""
    given = [("ab", "c"), ("", "de"), ("fgh", "ij"), ("k", "l"), ("mnopq", "rs"), ("tuvw", "xyzz")]
    path = write_pairs(tmp_path / "p.jsonl", given)
    (ids, counted), (val_ids, val_counted) = read_pairs(path, BYTES, 8, 0.5)
    assert bytes(ids.tolist()) == b".mnopqrs.fghij...de......".replace(b".", b"\n")
    assert "".join(map(str, counted * 1)) == "0000001110001110011100000"
    assert bytes(val_ids.tolist()) == b".abc.kl..".replace(b".", b"\n")  # one pair is too long
    assert "".join(map(str, val_counted * 1)) == "000110110"
    train_set, val = open_pairs(path, BYTES, 8, val_fraction=0.5)
    assert np.array_equal(train_set.read(0, len(train_set)), ids)
    expected = [-100, -100, 99, 10, -100, 108, 10, -100]
    assert np.array_equal(val.read_sequence(0, 8)[1], expected)
    given[1] = ("d", "e")  # instead of ("", "de"): the ids are the same, but the targets differ
    other = open_pairs(write_pairs(tmp_path / "q.jsonl", given), BYTES, 8, val_fraction=0.5)
    assert other[0].fingerprint() != train_set.fingerprint()
    assert other[1].fingerprint() == val.fingerprint()


def prompts_of(tokens, tokenizer):
    """Returns the prompts of a split of pairs. Each prompt is a number."""
    return set(re.findall(r"\d+", tokenizer.decode(tokens.read(0, len(tokens)).tolist())))


def test_a_response_may_end_with_the_mark(tmp_path):
    """Training and answers.py remove <|endoftext|> at the end of a response.

    At other places, <|endoftext|> is ordinary text.
    """
    mark = "<|endoftext|>"
    found = []
    for end in ("", mark):
        path = write_pairs(
            tmp_path / "a.jsonl", [(f"{mark}1", f"{mark} {i}{end}") for i in range(9)]
        )
        ids, counted = read_pairs(path, get_tokenizer("gpt2"), 32, 0.5)[0]
        endings = [example.endings for example in load_examples(answers.BENCHMARK, path)]
        found.append((ids.tolist(), counted.tolist(), endings))
    assert found[0] == found[1]
    path = write_pairs(tmp_path / "a.jsonl", [("1", mark)])
    with pytest.raises(UserError, match="needs strings in the fields prompt and response"):
        read_pairs(path, BYTES, 32, 0.5)


def test_validation_pairs_are_training_pairs_of_no_other_run(tmp_path):
    """With a different --block_size or tokenizer, different pairs are too long, and are skipped.

    The split into training and validation pairs stays the same.
    """
    rng = random.Random(2)
    path = write_pairs(tmp_path / "p.jsonl", [(f"{n}", letters(rng, 1, 90)) for n in range(500)])
    trained, validated = set(), set()
    for tokenizer in (BYTES, get_tokenizer("gpt2")):
        for T in (32, 48, 64, 128):
            train_set, val = open_pairs(path, tokenizer, T)
            trained |= prompts_of(train_set, tokenizer)
            validated |= prompts_of(val, tokenizer)
    assert len(validated) == 50 and len(trained) == 450 and not trained & validated
    _, val = open_pairs(path, BYTES, 128, val_fraction=0.02)
    assert prompts_of(val, BYTES) <= validated


def test_files_of_pairs(tmp_path):
    """All formats yield the same pairs."""
    given = [("2+2=", "4"), ("a", "b")] * 5
    path = write_pairs(tmp_path / "a.jsonl", given)
    (tmp_path / "a.JSONL.gz").write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / "a.csv").write_text("response,prompt\n" + "".join(f"{r},{p}\n" for p, r in given))
    for other in tmp_path.iterdir():
        for part, same in zip(read_pairs(path, BYTES, 8, 0.1), read_pairs(other, BYTES, 8, 0.1)):
            assert np.array_equal(part, same), other


WAYS = {  # test_edits.py tests FSDP, TP and PP
    "2": (1, ["--batch_size", 2]),
    "mixture": (2, []),  # uses DDP
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_the_mean_over_its_counted_targets(tmp_path, pairs, shards, way):
    """Checks that losses and gradient norms match a plain loop.

    The plain loop reads the 16 sequences of a step in one batch.
    """
    (processes, layout), items = WAYS[way], [pairs]
    if way == "mixture":
        items = [f"{pairs}=0.25", f"{shards}=0.75"]
    flags = "--log_dir run --max_steps 4 --val_every 0 --val_tokens 32 --sample_tokens 1".split()
    train("--data", *items, *layout, *flags, cwd=tmp_path, processes=processes)
    loader, log = open_loader(items, seed=1337), read_log(tmp_path / "run")
    curve = plain_curve(MODEL, 4, lambda step: loader.batch(16 * step, 16, CPU))
    for step, (loss, norm) in enumerate(curve):
        assert float(log[step, "train"]) == pytest.approx(loss, rel=1e-5), step
        assert float(log[step, "norm"]) == pytest.approx(norm, rel=5e-5), step


def test_losses_equal_those_of_transformers(pairs):
    """Like our loss, the loss of Hugging Face's GPT-2 ignores labels of -100.

    A validation loss is the mean over the tokens of responses.
    """
    loader, model = open_loader([pairs], "val", shuffle=False), fresh(MODEL).eval()
    hf = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=256, n_positions=32)
    ).eval()
    assert same_logits(model, hf)  # this call also copies the weights of the model into hf
    n = loader.lengths[0]
    x, y = loader.batch(0, n, CPU)  # (B, T) each
    loss = F.cross_entropy(model(x)[0][y != -100], y[y != -100]).item()
    config = TrainConfig(batch_size=3, val_tokens=32 * n)
    val, bpb = estimate_loss(as_training(model, config), loader, ONE_BYTE_IDS)
    assert val == pytest.approx(loss, rel=1e-5) == pytest.approx(bpb * math.log(2), rel=1e-5)
    y[:, -1] = -100  # transformers shifts the labels, so it ignores the label of the last position
    expected = hf(x, labels=F.pad(y[:, :-1], (1, 0), value=-100)).loss
    torch.testing.assert_close(model(x, y)[1], expected, rtol=1e-5, atol=0)
    _, loss = model(x, torch.full_like(y, -100))
    loss.backward()
    assert loss == 0 and all((p.grad == 0).all() for p in model.parameters())


@pytest.mark.slow
def test_only_the_responses_are_learned(tmp_path):
    """Nobody can predict random prompts, so a loss near 0 shows that the loss ignores prompts."""
    rng = random.Random(1)
    write_pairs(tmp_path / "p.jsonl", [(letters(rng, 3, 9), "yes") for _ in range(600)])
    flags = "--max_steps 60 --max_lr 0.01 --batch_size 16 --eval_every 60 --log_dir run"
    evals = ["--evals", "answers=p.jsonl"]
    out, _ = train("--data", "p.jsonl", *flags.split(), *evals, cwd=tmp_path)
    log = read_log(tmp_path / "run")
    assert float(log[59, "train"]) < 0.02 > float(log[60, "val"]) and log[60, "answers"] == "1"
    assert out.count("yes\n\nexpected: yes\n") == 2
    out, _ = program(
        "--checkpoint",
        "run",
        "--prompt",
        "abc",
        "--temperature",
        0,
        cwd=tmp_path,
        program="generate.py",
    )
    assert out.strip().endswith("---\nabcyes")  # a line break ends the text
    program("--checkpoint", "run", "--output", "hf", cwd=tmp_path, program="export.py")
    hf = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    ids = hf.generate(torch.tensor([[*b"\nabc"]]), do_sample=False, max_length=32)
    assert bytes(ids[0].tolist()) == b"\nabcyes\n"  # transformers also stops at the line break
    # The last response contains half of a surrogate pair, which is not valid UTF-8.
    write_pairs(tmp_path / "q.jsonl", [("abc", r) for r in ("yes", "ye", "yes!", "yes\ud83d")])
    out, _ = program("--data", "q.jsonl", "--checkpoint", "run", cwd=tmp_path, program="answers.py")
    assert "acc                0.2500 ± 0.2165" in out


def test_only_pairs_end_at_a_line_break(pairs):
    """The data decide whether a line break ends a text.

    The weights of --init_from do not decide this, because the weights may come from different data.
    """
    for path, source in ((pairs, "lines"), (ROOT / "input.txt", "bytes")):
        for before in ("bytes", "lines"):
            data = Data(Sources([str(path)]), get_tokenizer(before), MODEL)
            assert data.tokenizer.source == source


REFUSED = {
    "": "x.jsonl: contains no training pairs of at most 8 tokens; give more pairs, or",
    '{"text": "a"}': "record 2: needs strings in the fields prompt and response; see docs/data.md",
    '{"prompt": "a", "response": ""}': "record 2: needs strings in the fields prompt and response",
    '{"prompt": "1+1=", "response": 2}': "record 2: needs strings in the fields prompt and",
    '{"prompt": "a\\nb", "response": "c"}': "record 2: contains a line break, .*; remove it, or",
    "text": r"x.jsonl, record 2: is damaged \(not JSON",
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused_pairs(tmp_path, line):
    first = '{"prompt": "a", "response": "b"}\n' if line else ""
    (tmp_path / "x.jsonl").write_text(first + line)
    with pytest.raises(UserError, match=REFUSED[line]):
        read_pairs(tmp_path / "x.jsonl", BYTES, 8, 0.1)


def test_long_pairs(tmp_path, capsys):
    path = write_pairs(tmp_path / "x.jsonl", [("a", "b" * 5)] * 9 + [("a", "b" * 30)])
    read_pairs(path, BYTES, 16, 0.1)
    assert (
        "1 of 10 pairs have more than 16 tokens and are skipped; --block_size 32 keeps all pairs\n"
        in capsys.readouterr().out
    )
    read_pairs(path, BYTES, 32, 0.1)
    assert capsys.readouterr().out == ""
    refused = "x.jsonl: contains no {} pairs of at most {} tokens; give more pairs, or a larger"
    with pytest.raises(UserError, match=refused.format("training", 4)):
        read_pairs(path, BYTES, 4, 0.1)
    pairs = [("a", "b" * n) for n in range(1, 61)]  # in the random order, n = 55 is the last pair
    with pytest.raises(UserError, match=refused.format("validation", 16)):
        read_pairs(write_pairs(path, pairs), BYTES, 16, 0.01)
    read_pairs(path, BYTES, 64, 0.01)
    with pytest.raises(UserError, match=refused.format("training", 16)):
        read_pairs(write_pairs(path, [("a", "b")]), BYTES, 16, 0.1)
