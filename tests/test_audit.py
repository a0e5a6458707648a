"""The programs of experiment.py that watch a run: what it has read, its loss, later tokens."""

import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

from plaingpt.base.errors import UserError
from plaingpt.data.tokens import Tokens
from plaingpt.run.inputs import find_stream, hash_inputs

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, randomise

from model import GPT, GPTConfig

T = 16
FACTS = dict(model_config=dict(block_size=T), val_tokens=6 * T)


@pytest.fixture
def audit_losses(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return importlib.import_module("audit_losses")


def data_of(ids):
    tokenizer = SimpleNamespace(n_vocab=256)
    return SimpleNamespace(val=[Tokens("val", [ids], 256)], shares=[1], tokenizer=tokenizer)


def answer_with(monkeypatch, audit_losses, logits_of):
    """The audit asks logits_of, (R, T) -> (R, T, vocab_size). Returns shapes of its questions."""
    shapes = []

    def ask_for_logits(models, run, rows, positions=None):
        shapes.append(tuple(rows.shape))
        logits = logits_of(rows)
        return logits[0] if positions is None else logits[range(len(rows)), positions]

    monkeypatch.setattr(audit_losses, "ask_for_logits", ask_for_logits)
    return shapes


def test_the_audit_finds_one_position_that_sees_the_next_token(audit_losses, monkeypatch):
    model = randomise(GPT(GPTConfig(1, 2, 16, T, 256))).requires_grad_(False).eval()
    data = data_of(torch.randint(256, (8 * T,)).numpy().astype(np.uint8))
    answer_with(monkeypatch, audit_losses, lambda idx: model(idx)[0])
    loss, later = audit_losses.audit(None, 0, data, FACTS)
    ids = torch.from_numpy(data.val[0].read(0, 6 * T + 1).astype(np.int64))
    x, y = ids[:-1].view(6, T), ids[1:].view(6, T)
    assert loss == pytest.approx(F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten()).item())
    assert later < 1e-5
    for place in range(T - 1):

        def leak(idx, place=place):
            logits = model(idx)[0]
            logits[:, place] += (
                0.01 * model.transformer.wte(idx[:, place + 1 :]).sum((1, 2))[:, None]
            )
            return logits

        answer_with(monkeypatch, audit_losses, leak)
        assert audit_losses.audit(None, 0, data, FACTS)[1] > 1e-4, place


def test_the_audit_of_a_long_context_has_few_passes(audit_losses, monkeypatch):
    data = data_of(np.zeros(3 * 1024 + 1, np.uint8))
    facts = dict(model_config=dict(block_size=1024), val_tokens=3 * 1024)
    shapes = answer_with(monkeypatch, audit_losses, lambda idx: torch.ones(*idx.shape, 2))
    audit_losses.audit(None, 0, data, facts)
    rows = sum(R for R, _ in shapes)
    assert len(shapes) < 80 and max(R for R, _ in shapes) <= 32
    assert rows == 3 + 2 * 1023  # each position in two sequences


def test_the_audit_counts_the_sequences_that_were_trained(audit_losses, tmp_path):
    import record_run

    ids = torch.randint(256, (100 * T,))
    data = data_of(ids.numpy().astype(np.uint8))
    starts = [0, 5, 5 * T]  # all in the measured part
    others = torch.randint(256, (7, T))
    rows = torch.stack(
        [*(ids[start : start + T] for start in starts), ids[50 * T : 51 * T], *others]
    )
    record_run.write_records(
        tmp_path, [], [record_run.number_of(each) for each in (rows, rows[:2])]
    )
    assert audit_losses.share_of_seen(tmp_path, data, FACTS) == 3 / 6


@pytest.mark.slow
def test_what_is_recorded_of_a_run(tmp_path):
    """A file that the program writes itself is no input. The records of a resumed run are added."""
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "in.txt").write_text("a")
    (tmp_path / "program.py").write_text(
        "import sys, torch\n"
        "open('in.txt').read()\n"
        "open('out.txt', 'w').close()\n"
        "open('out.txt').read()\n"
        "import helper\n"
        "layer = torch.nn.Embedding(9, 2)\n"
        "layer(torch.tensor([[int(sys.argv[1]), 2]]))\n"
        "with torch.no_grad():\n    layer(torch.tensor([[5, 6]]))\n"
        "sys.exit(3)\n"
    )
    recorder = [sys.executable, str(ROOT / "experiments/record_run.py"), str(tmp_path)]
    for first in "13":
        command = [*recorder, str(tmp_path / "program.py"), first]
        assert subprocess.run(command, cwd=tmp_path).returncode == 3
    files = json.loads((tmp_path / "read.json").read_text())["files"]
    own = [file for file in files if file.startswith(f"{tmp_path}/") and not file.endswith("pyc")]
    assert own == [f"{tmp_path}/{name}" for name in ("helper.py", "in.txt", "program.py")]
    assert len(np.load(tmp_path / "trained.npy")) == 2


def test_the_inputs_of_a_run(tmp_path):
    copy, clone = tmp_path / "copy", tmp_path / "clone"
    for place in (copy, clone):
        place.mkdir()
        (place / "std.txt").write_text("0.02")
    (copy / "model.py").write_text("x = 1")
    (clone / "text.txt").write_text("data")
    (clone / "start.pt").write_text("weights")
    facts = dict(data=[f"{clone}/text.txt=0.5"], init_from=str(clone / "start.pt"))
    names = [copy / "model.py", copy / "std.txt", clone / "text.txt", clone / "start.pt"]

    def hashes():
        return hash_inputs(map(str, names), copy, clone, facts)

    before = hashes()
    assert before["files"].keys() == {"std.txt", "start.pt"}  # data have a fingerprint
    (copy / "model.py").write_text("x = 1  # a comment")
    (clone / "text.txt").write_text("other data")
    assert hashes() == before
    for path in (copy / "model.py", copy / "std.txt", clone / "start.pt"):
        text = path.read_text()
        path.write_text("x = 2")
        assert hashes() != before, path
        path.write_text(text)
    names[1] = clone / "std.txt"  # opened by its relative path
    assert hashes() == before
    (clone / "std.txt").write_text("0.2")
    with pytest.raises(
        UserError, match="std.txt: both programs read the edited file of this clone"
    ):
        hashes()


def test_weights_in_a_directory_are_inputs(tmp_path):
    """transformers opens them without Python."""
    (tmp_path / "gpt2").mkdir()
    weights = tmp_path / "gpt2/model.safetensors"
    found = []
    for text in ("a", "b", "a"):
        weights.write_text(text)
        facts = dict(data=["x.txt"], init_from=str(tmp_path / "gpt2"))
        found.append(hash_inputs([], tmp_path / "copy", tmp_path / "clone", facts)["files"])
    assert found[0] == found[2] != found[1]


def test_which_loss_has_the_validation_data_of_the_base():
    base = {"validation split": "9 tokens with CRC-32 0a", "data": ["a"]}
    mixed = "2/3 of 7 tokens with CRC-32 0b + 1/3 of 9 tokens with CRC-32 0a"
    for text, data, stream in (
        (base["validation split"], ["other/a"], "val"),
        (mixed, ["b=2", "x/a=1"], "val_a"),
        ("9 tokens with CRC-32 0b", ["a"], None),
    ):
        assert find_stream(base, {"validation split": text, "data": data}) == stream
