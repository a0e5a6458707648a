"""Tests look.py: its page contains the numbers that the model computes."""

import base64
import codecs
import fcntl
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict

from plaingpt.data import encode_text
from plaingpt.errors import UserError
from plaingpt.log import prepare_run_directory
from plaingpt.look.live import LINES, find_lines, find_reason, gpt2_shapes
from plaingpt.look.page import build_page, fill_template, name_token, split_text
from plaingpt.look.record import attention_weights, record_text
from plaingpt.pretrained import load_model
from plaingpt.scoring.benchmark import load_examples
from plaingpt.scoring.score import make_rows, score
from plaingpt.tokenizer import get_tokenizer

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from browser import CHROMIUM, Browser
from conftest import ALONE, MODEL, ROOT, apply_patch, fresh, randomise, write_lines

import look
import model
import wikitext

TEXT = "MARLOW: The boats 船 came.\n"  # 28 bytes
BYTES = get_tokenizer("bytes")


def ids_of(text):
    return [BYTES.end_of_text, *BYTES.encode(text)]


def save_model(directory, step, gpt, tokenizer="bytes"):
    """Writes a checkpoint that contains what look.py reads. Returns the directory."""
    directory.mkdir(exist_ok=True)
    saved = dict(
        model=gpt.state_dict(),
        model_config=asdict(gpt.config),
        tokenizer=tokenizer,
    )
    torch.save(saved, directory / f"model_{step:06d}.pt")
    return directory


def model_of_line_breaks():
    """Returns a model that predicts a line break after every token."""
    gpt = fresh(MODEL)
    for p in gpt.parameters():
        torch.nn.init.zeros_(p)
    torch.nn.init.ones_(gpt.transformer.wte.weight[BYTES.end_of_text])
    torch.nn.init.ones_(gpt.transformer.ln_f.bias)
    return gpt


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Writes the three different checkpoints of a run. Returns the directory of the run."""
    directory = tmp_path_factory.mktemp("look") / "run"
    gpt = fresh(MODEL)
    for step in (5, 10, 20):
        randomise(gpt)
        gpt.load_state_dict({name: p * step / 40 for name, p in gpt.state_dict().items()})
        save_model(directory, step, gpt)
    return directory


def look_at(*flags):
    """Runs look.py in this process."""
    look.main([*map(str, flags), "--device", "cpu", "--sample_tokens", "4"])


@pytest.fixture(scope="module")
def page_of_text(run, tmp_path_factory):
    """Writes the page of the run for TEXT. Returns its path. Tests must not change the page."""
    path = tmp_path_factory.mktemp("page") / "a.html"
    look_at(run, "--text", TEXT, "--output", path)
    return path


def read_page(path):
    """Returns the data that a page contains."""
    (data,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8")
    )
    return json.loads(data, parse_constant=pytest.fail)  # JSON has no NaN, so a browser rejects it


def unpack(text, dtype):
    return np.frombuffer(base64.b64decode(text), dtype)


def losses_of(packed):
    return unpack(packed["prediction"]["losses"], "<f4")


def weights_of(call, head):
    """Returns the attention weights of a head, (T, T). call: from the data of a page."""
    stored = unpack(call["heads"][head], np.uint8)
    T = math.isqrt(2 * len(stored)) if call["causal"] else math.isqrt(len(stored))
    weights = np.zeros((T, T))
    weights[np.tril_indices(T) if call["causal"] else np.indices((T, T)).reshape(2, -1)] = stored
    return weights / 255


def test_losses_are_those_of_wikitext(run, tmp_path):
    (tmp_path / "held.txt").write_text(TEXT, encoding="utf-8")
    look_at(run, "--text", tmp_path / "held.txt", "--output", tmp_path / "a.html")
    data = read_page(tmp_path / "a.html")
    examples = load_examples(wikitext.BENCHMARK, tmp_path / "held.txt")
    for snapshot, step in zip(data["snapshots"], (5, 10, 20), strict=True):
        assert snapshot["name"] == f"step {step}"
        gpt, tokenizer = load_model(run / f"model_{step:06d}.pt", model.GPT)
        rows = make_rows(examples, tokenizer, gpt.config)
        scores = score(gpt.eval(), examples, rows, ALONE, 2048)
        (packed,) = snapshot["looks"]
        assert losses_of(packed).sum(dtype=float) == pytest.approx(
            -scores.log_likelihood.sum(), abs=1e-5
        )
        idx = torch.tensor([ids_of(TEXT)])
        logits = gpt(idx[:, :-1])[0][0].detach()  # (T, vocab_size)
        expected = F.cross_entropy(logits, idx[0, 1:], reduction="none")
        assert np.allclose(losses_of(packed), expected, atol=1e-5)
        prediction = packed["prediction"]
        order = logits.argsort(dim=-1, descending=True)
        assert (unpack(prediction["ids"], "<u4").reshape(-1, 5) == order[:, :5].numpy()).all()
        ranks = (order == idx[0, 1:, None]).nonzero()[:, 1] + 1
        assert (unpack(prediction["ranks"], "<u4") == ranks.numpy()).all()
        probs = logits.softmax(-1).sort(descending=True).values[:, :5]
        assert np.allclose(unpack(prediction["probs"], "<f4").reshape(-1, 5), probs, atol=1e-6)


def test_the_model_runs_once():
    gpt = randomise(fresh(MODEL)).eval()
    calls = []
    gpt.transformer.wte.register_forward_hook(lambda wte, args, x: calls.append(x.shape))
    record_text(gpt, ids_of(TEXT))
    assert calls == [(1, 28, 32)]


def attention_by_hand(gpt, idx):
    """Computes the attention weights with the formula of Vaswani et al.: (n_layer, nh, T, T)."""
    found = []

    def keep(attn, args):
        B, T, C = args[0].shape
        q, k, _ = attn.c_attn(args[0]).split(C, dim=2)
        q, k = (t.view(T, attn.n_head, -1).transpose(0, 1) for t in (q, k))  # (nh, T, hs) each
        scores = torch.einsum("hqc,hkc->hqk", q, k) / math.sqrt(C / attn.n_head)
        exps = scores.exp() * torch.ones(T, T).tril()
        found.append(exps / exps.sum(dim=-1, keepdim=True))

    hooks = [block.attn.register_forward_pre_hook(keep) for block in gpt.transformer.h]
    with torch.no_grad():
        gpt(idx)
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


def test_attention_is_that_of_the_model(run, page_of_text):
    (packed,) = read_page(page_of_text)["snapshots"][-1]["looks"]
    gpt, _ = load_model(run, model.GPT)
    expected = attention_by_hand(gpt, torch.tensor([ids_of(TEXT)[:-1]]))
    assert [call["block"] for call in packed["calls"]] == [1, 2]
    for layer, call in enumerate(packed["calls"]):
        for head in range(2):
            weights = weights_of(call, head)
            assert np.abs(weights - expected[layer, head].numpy()).max() < 0.5 / 255 + 1e-5
    for call, by_hand in zip(record_text(gpt.eval(), ids_of(TEXT)).calls, expected, strict=True):
        assert torch.allclose(call.weights, by_hand, atol=1e-5)
        assert torch.allclose(call.weights.sum(dim=-1), torch.ones(2, 28), atol=1e-5)
        assert call.error < 1e-5 and not call.fault


def patched_model(name, directory):
    """Applies a patch of experiments/ to a copy of model.py. Returns the copy as a module."""
    directory.mkdir()
    for file in ("model.py", "train_gpt2.py"):
        shutil.copy(ROOT / file, directory)
    apply_patch(name, directory)
    return load_module(directory / "model.py", f"model_{name}")


def load_module(path, name):
    spec = importlib.util.spec_from_file_location(name.replace("-", "_"), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["rotary", "qknorm", "value-residual", "rmsnorm"])
def test_attention_of_a_changed_model(name, tmp_path):
    """The recorded weights times v equal the output of attention, even in a changed model.

    With rotary positions and QK-norm, the weights differ from the weights of unchanged attention.
    """
    gpt = randomise(patched_model(name, tmp_path / "a").GPT(MODEL)).eval()
    record = record_text(gpt, ids_of(TEXT))
    assert [call.block for call in record.calls] == [0, 1]
    for call in record.calls:
        assert call.error < 1e-5 and not call.fault
        assert torch.allclose(call.weights.sum(dim=-1), torch.ones(2, 28), atol=1e-5)
    if name in ("rotary", "qknorm"):
        by_hand = attention_by_hand(gpt, torch.tensor([ids_of(TEXT)[:-1]]))
        assert (record.calls[0].weights - by_hand[0]).abs().max() > 0.01
    last = record.blocks[-1].prediction.losses
    assert np.allclose(last, record.prediction.losses, atol=1e-5)


class OtherAttention(torch.nn.Module):
    """A variant of attention that a reader may write. kind: the name of the variant."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.q = torch.nn.Linear(32, 32)
        self.kv = torch.nn.Linear(32, 16)

    def forward(self, x, pos, cache=None, mask=None):
        T = x.size(1)
        q = self.q(x).view(1, T, 4, 8).transpose(1, 2)
        k = self.kv(x).view(1, T, 2, 8).transpose(1, 2)
        places = torch.arange(T)
        distance = places[:, None] - places
        options = dict(enable_gqa=True)
        if self.kind == "window":
            options.update(attn_mask=(distance >= 0) & (distance < 4), scale=0.2)
        elif self.kind == "alibi":
            bias = (-0.5 * distance).masked_fill(distance < 0, -math.inf)
            options.update(attn_mask=bias)
        elif self.kind == "prefix":  # every token attends to the first five tokens
            options.update(attn_mask=(distance >= 0) | (places < 5))
        elif self.kind == "dropout":
            options.update(dropout_p=0.5, is_causal=True)
        elif self.kind == "keys":  # there is one more key than there are tokens
            k = torch.cat([k, k[:, :, :1]], dim=2)
        if self.kind == "hand":
            weights = (q @ k.repeat_interleave(2, dim=1).transpose(-2, -1)).softmax(-1)
            y = weights @ k.repeat_interleave(2, dim=1)
        else:
            y = F.scaled_dot_product_attention(query=q, key=k, value=k, **options)
        return y.transpose(1, 2).flatten(2)


def gpt_with(kind):
    gpt = fresh(MODEL)
    gpt.transformer.h[1].attn = OtherAttention(kind)
    return randomise(gpt).eval()


@pytest.mark.parametrize("kind", ["window", "alibi", "prefix"])
def test_attention_with_another_mask(kind):
    call = record_text(gpt_with(kind), ids_of(TEXT)).calls[1]
    assert call.error < 1e-5 and not call.fault
    weights = call.weights
    assert weights.shape == (4, 28, 28)
    assert torch.allclose(weights.sum(dim=-1), torch.ones(4, 28), atol=1e-5)
    sees = {"window": 4, "alibi": 28, "prefix": 28}[kind]
    assert (weights[:, 27] > 0).sum(dim=-1).tolist() == [sees] * 4
    assert bool(weights[:, 0, 4].min() > 0) == (kind == "prefix")


@pytest.mark.parametrize(
    "kind, fault",
    [
        ("hand", "it does not call F.scaled_dot_product_attention"),
        ("dropout", "softmax(qkᵀ)·v differs from the result of the call by "),
        ("keys", "its queries and keys have the shapes (1, 4, 28, 8) and (1, 2, 29, 8)"),
    ],
)
def test_what_cannot_be_shown_is_said(kind, fault):
    calls = record_text(gpt_with(kind), ids_of(TEXT)).calls
    assert calls[0].weights is not None and not calls[0].fault
    assert calls[1].weights is None and calls[1].fault.startswith(fault)


def reference_cases():
    T = 6
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return [
        dict(is_causal=True),
        dict(is_causal=True, scale=0.3),
        dict(attn_mask=(distance >= 0) & (distance < 3)),
        dict(attn_mask=(distance >= 0)[None, None].repeat(1, 4, 1, 1)),
        dict(attn_mask=torch.randn(T, T), scale=2.0),
        dict(attn_mask=(distance > 0)),  # the mask hides all keys from the first token
        dict(),
    ]


@pytest.mark.parametrize("options", reference_cases(), ids=lambda options: "-".join(options))
@pytest.mark.parametrize("n_kv", [4, 2, 1])
def test_the_weights_are_those_of_torch(options, n_kv):
    """If v is the identity matrix, F.scaled_dot_product_attention returns the attention weights."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, n_kv, 6, 8)
    options = dict(options, enable_gqa=n_kv < 4)
    unit = torch.eye(6).expand(1, n_kv, 6, 6)
    expected = F.scaled_dot_product_attention(q, k, unit, **options).nan_to_num()
    assert torch.allclose(attention_weights(q, k, **options), expected, atol=1e-6)


def test_what_each_block_adds():
    gpt = randomise(fresh(MODEL)).eval()
    record = record_text(gpt, ids_of(TEXT))
    idx = torch.tensor([ids_of(TEXT)[:-1]])
    t = gpt.transformer
    with torch.no_grad():
        x = t.wte(idx) + t.wpe(torch.arange(28))
        for i in range(3):
            logits = gpt.lm_head(t.ln_f(x))[0]
            probs, ids = logits.softmax(-1).topk(3)
            block = record.blocks[i]
            assert block.name == (f"block {i}" if i else "embedding")
            assert (block.prediction.ids == ids.numpy()).all()
            assert np.allclose(block.prediction.probs, probs, atol=1e-6)
            assert np.allclose(block.norms, x[0].norm(dim=-1), rtol=1e-5)
            x = t.h[i](x, None) if i < 2 else x
    assert np.allclose(record.blocks[2].prediction.losses, record.prediction.losses, atol=1e-5)


def test_a_block_that_is_given_its_input_by_name():
    class ByName(model.GPT):
        def hidden(self, idx, cache=None, pos=None, mask=None):
            t = self.transformer
            x = t.wte(idx) + t.wpe(torch.arange(idx.size(1)))
            for block in t.h:
                x = block(x=x, pos=pos)
            return t.ln_f(x)

    found = record_text(randomise(ByName(MODEL)).eval(), ids_of(TEXT)).blocks
    expected = record_text(randomise(model.GPT(MODEL)).eval(), ids_of(TEXT)).blocks
    for ours, theirs in zip(found, expected, strict=True):
        assert np.allclose(ours.norms, theirs.norms, rtol=1e-5)


def test_a_block_that_returns_no_stream():
    class Pair(torch.nn.Module):
        def forward(self, x, pos, cache=None, mask=None):
            return x[..., :16], x[..., 16:]

    gpt = randomise(fresh(MODEL)).eval()
    gpt.transformer.h.append(Pair())
    gpt.transformer.ln_f.register_forward_pre_hook(
        lambda norm, args: torch.cat(args[0], -1) if isinstance(args[0], tuple) else None
    )
    blocks = record_text(gpt, ids_of(TEXT)).blocks
    assert [bool(block.fault) for block in blocks] == [False, False, False, True]
    assert blocks[3].fault == "it does not return a tensor of shape (B, T, C)"


def test_a_block_that_is_used_twice_is_shown_twice():
    gpt = randomise(fresh(MODEL)).eval()
    gpt.transformer.h[1] = gpt.transformer.h[0]
    ids = ids_of(TEXT)
    record = record_text(gpt, ids)
    x = gpt.transformer.wte(torch.tensor([ids[:-1]]))
    x = x + gpt.transformer.wpe(torch.arange(len(ids) - 1))
    for i in range(3):
        assert np.allclose(record.blocks[i].norms, x[0].detach().norm(dim=-1), rtol=1e-5)
        x = gpt.transformer.h[0](x, None)
    assert [call.block for call in record.calls] == [0, 1] and not record.calls[1].fault


def test_bytes_of_a_character_are_shown_as_this_character():
    ids = [*"a é船".encode(), 0xE8, ord("b"), 0xFF, 0xE8]
    texts = split_text(ids, BYTES)
    assert texts == ["a", " ", "é", "", "船", "", "", "\ufffd", "b", "\ufffd", "\ufffd"]
    gpt2 = get_tokenizer("gpt2")
    text = "Hello 船, 港口 ünï 🚢!"
    ids = gpt2.encode(text)
    assert "".join(split_text(ids, gpt2)) == text
    assert split_text([gpt2.end_of_text, *ids], gpt2)[:2] == ["<|endoftext|>", "Hello"]
    assert [name_token(i, BYTES) for i in (65, 10, 0xE8)] == ["A", "\n", "<E8>"]
    assert name_token(gpt2.end_of_text, gpt2) == "<|endoftext|>"
    assert name_token(50300, gpt2) == "<50300>"  # a head with padded rows may predict this id


def test_no_text_ends_the_script():
    evil = "</script><script>alert(1)</script><!-- {{data}} \" ' & \0 \udc80 {{script}}"
    page = fill_template(evil, dict(text=evil)).decode()
    assert page.count("</script>") == 2 and "<!--" not in page.partition('id="data"')[2]
    (data,) = re.findall(r'id="data">(.*?)</script>', page)
    assert json.loads(data) == dict(text=evil)
    assert "<title>&lt;/script&gt;" in page


def test_two_runs(run, tmp_path, capsys):
    """The page shows the steps that both runs contain, and cuts the text to the smaller context."""
    other = randomise(fresh(model.GPTConfig(1, 2, 32, 16, 256)))
    for step in (10, 20, 30):
        save_model(tmp_path / "b", step, other)
    look_at(run, tmp_path / "b", "--text", TEXT, "--output", tmp_path / "a.html")
    data = read_page(tmp_path / "a.html")
    assert [snapshot["name"] for snapshot in data["snapshots"]] == ["step 10", "step 20"]
    assert data["runs"] == [str(run), str(tmp_path / "b")] and len(data["tokens"]) == 17
    assert data["note"] == "The text has 28 tokens. The page shows the first 16."
    assert "note: The text has 28 tokens." in capsys.readouterr().out
    first, second = data["snapshots"][1]["looks"]
    assert losses_of(second).mean() != pytest.approx(losses_of(first).mean(), abs=1e-3)
    assert first["facts"] == "step 20, 34,688 parameters, 2 blocks of 2 heads"


def test_numbers_that_are_not_finite(tmp_path, capsys):
    """The weights are finite, but a LayerNorm overflows, so the losses are NaN."""
    gpt = fresh(MODEL)
    torch.nn.init.constant_(gpt.transformer.wpe.weight, 3e38)
    save_model(tmp_path / "run", 20, gpt)
    look_at(tmp_path / "run", "--text", TEXT)
    (packed,) = read_page(tmp_path / "run/look.html")["snapshots"][0]["looks"]
    assert np.isnan(losses_of(packed)).all() and "mean loss nan" in capsys.readouterr().out


def test_pairs(run, tmp_path, capsys):
    pairs = [("12+3=", "15"), ("a:", " b"), ("too long to fit" * 3, "x")]
    records = [dict(prompt=prompt, response=response) for prompt, response in pairs]
    path = write_lines(tmp_path / "pairs.jsonl", records)
    look_at(run, "--text", path, "--output", tmp_path / "a.html")
    data = read_page(tmp_path / "a.html")
    # As in training, the mean loss on the page counts only the tokens of responses.
    (packed,) = data["snapshots"][-1]["looks"]
    mean = losses_of(packed)[np.array(data["counted"][1:])].mean()
    assert mean != pytest.approx(losses_of(packed).mean(), abs=1e-5)
    assert (
        f"step 20: mean loss {mean:.4f} nats per token of the responses" in capsys.readouterr().out
    )
    assert "".join(data["tokens"]) == "\n12+3=15\na: b\n"
    counted = "".join("x" if each else "." for each in data["counted"])
    assert counted == "......xxx..xxx"
    assert data["note"] == "The page shows the first 2 pairs."
    assert data["snapshots"][0]["looks"][0]["sample"].startswith("12+3=")
    with pytest.raises(UserError, match="pairs.jsonl: does not begin with a pair of at most 4 to"):
        look_at(run, "--text", path, "--max_tokens", 4)


def test_a_run_on_texts_and_a_run_on_pairs(tmp_path):
    """The tokens of both runs are bytes. Only in the run on pairs does a line break end a text."""
    for source in ("bytes", "lines"):
        save_model(tmp_path / source, 20, model_of_line_breaks(), source)
    path = write_lines(tmp_path / "pairs.jsonl", [dict(prompt="12+3=", response="15")])
    samples = []
    for runs in ("bytes", "lines"), ("lines", "bytes"):
        places = [tmp_path / name for name in runs]
        look_at(*places, "--text", path, "--output", tmp_path / "a.html")
        (snapshot,) = read_page(tmp_path / "a.html")["snapshots"]
        samples.append([packed["sample"] for packed in snapshot["looks"]])
    assert samples == [["12+3=\n\n\n\n", "12+3="], ["12+3=", "12+3=\n\n\n\n"]]


def test_a_mark_separates_documents_as_in_training(tmp_path):
    """In a file of --text, <|endoftext|> separates documents, as in training.

    If the value of --text is the text itself, <|endoftext|> is ordinary text.
    """
    path = tmp_path / "a.txt"
    path.write_bytes(codecs.BOM_UTF8 + b"a b<|endoftext|>\n<|endoftext|>c<|endoftext|>\n")
    gpt2 = get_tokenizer("gpt2")
    assert look.read_text(str(path), gpt2, 99).ids == encode_text(path, gpt2).tolist()
    assert look.read_text(str(path), BYTES, 99).ids == [10, *encode_text(path, BYTES)]
    assert look.read_text("a<|endoftext|>b", gpt2, 99).ids.count(gpt2.end_of_text) == 1


def test_checkpoints_are_chosen_evenly():
    first = look.Run("a", {str(step): None for step in range(20)}, None)
    assert look.choose_snapshots([first], 30) == [str(step) for step in range(20)]
    assert look.choose_snapshots([first], 3) == ["0", "10", "19"]
    assert look.choose_snapshots([first], 1) == ["19"]
    second = look.Run("b", {"7": None, "30": None}, None)
    assert look.choose_snapshots([first, second], 8) == ["7"]
    assert look.choose_snapshots([first, look.Run("c", {"x": None}, None)], 8) == [None]


def test_without_a_text_the_model_writes_one(run, tmp_path):
    look_at(run, "--output", tmp_path / "a.html")
    data = read_page(tmp_path / "a.html")
    assert len(data["ids"]) == 33  # the end-of-text token, and as many tokens as the context
    sample = data["snapshots"][-1]["looks"][0]["sample"]
    assert "".join(data["tokens"][1:]).startswith(sample[:2])


def test_a_model_that_writes_no_text(tmp_path):
    """After training on pairs, a line break ends a text. This model generates only line breaks."""
    save_model(tmp_path / "run", 20, model_of_line_breaks(), "lines")
    with pytest.raises(UserError, match="run: the model generates no text; give --text"):
        look_at(tmp_path / "run")


def test_a_large_page_has_the_attention_of_the_last_checkpoint(run, tmp_path, monkeypatch):
    monkeypatch.setattr("plaingpt.look.page.LIMIT", 1000)
    look_at(run, "--text", TEXT, "--output", tmp_path / "a.html")
    looks = [snapshot["looks"][0] for snapshot in read_page(tmp_path / "a.html")["snapshots"]]
    assert [look["calls"] is None for look in looks] == [True, True, False]


def test_own_code(run, tmp_path):
    """With --own_code, look.py loads the model of a run with the model.py of the run.

    This model.py comes from the commit of the run, and look.py applies the run's changes.patch.
    """
    rotary = patched_model("rotary", tmp_path / "code")
    gpt = randomise(rotary.GPT(MODEL))
    directory = save_model(tmp_path / "rotary", 20, gpt)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    facts = dict(git_commit=f"{commit.stdout.strip()}-dirty")
    (directory / "run.json").write_text(json.dumps(facts))
    shutil.copy(ROOT / "experiments/rotary.patch", directory / "changes.patch")
    with pytest.raises(UserError, match="restore the model.py of that run"):
        look_at(directory, "--text", TEXT)
    look_at(directory, "--text", TEXT, "--own_code")
    (packed,) = read_page(directory / "look.html")["snapshots"][0]["looks"]
    assert np.allclose(losses_of(packed), record_text(gpt.eval(), ids_of(TEXT)).prediction.losses)
    assert packed["facts"].endswith(" of 2 heads, trained with a changed model.py")
    with pytest.raises(UserError, match="run.json names no commit; remove --own_code"):
        look_at(run, "--text", TEXT, "--own_code")


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("nowhere --text a", "nowhere: contains no checkpoint; give a run, such as log/baby"),
        ("RUN RUN RUN --text a", "3 runs are too many; give one or two"),
        ("RUN --text held.txt", "--text held.txt: no such file; give an existing file"),
        ("RUN --text empty.txt", "--text: contains no tokens; give a longer text"),
        ("RUN --text utf16.txt", "--text utf16.txt: cannot be read"),
        (
            "RUN --text text.jsonl",
            "text.jsonl, record 1: needs strings in the fields prompt and response",
        ),
        ("RUN --text lines.jsonl", "lines.jsonl, record 1: contains a line break, which is the"),
        ("RUN --text empty.jsonl", "--text empty.jsonl: does not begin with a pair of at most 32"),
        ("RUN --text a --output no/a.html", "--output no/a.html: cannot write there"),
        ("RUN --text in.txt --output in.txt", "--output in.txt: is also an input"),
        ("cut --text a --output cut/run.json", "--output cut/run.json: is also an input"),
        ("RUN gpt2ids --text a", "RUN and gpt2ids: have different tokenizers; give"),
        ("cut --text a", "cut/model_000005.pt: not a readable checkpoint"),
    ],
)
def test_mistakes(run, tmp_path, monkeypatch, flags, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN").symlink_to(run)
    (tmp_path / "in.txt").write_text("a")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "utf16.txt").write_text("abc", encoding="utf-16")
    (tmp_path / "text.jsonl").write_text('{"text": "a"}')
    (tmp_path / "lines.jsonl").write_text('{"prompt": "a\\nb", "response": "c"}')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/run.json").write_text("{}")
    (tmp_path / "cut/model_000005.pt").write_bytes((run / "model_000005.pt").read_bytes()[:5000])
    if "gpt2ids" in flags:
        save_model(tmp_path / "gpt2ids", 5, fresh(model.GPTConfig(1, 1, 2, 32)), "gpt2")
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
        look_at(*flags.split())


def test_the_output_may_be_a_pipe(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)) as reader:
        # The test reads the pipe only after look.py has ended, so a whole page must fit into it.
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 2**20)
        look_at(run, "--text", "a", "--max_checkpoints", 1, "--output", tmp_path / "pipe")
        assert reader.read().startswith("<!doctype html>")


def test_names_and_texts_of_any_kind(run, tmp_path, monkeypatch):
    """Without --output, look.py writes the page of two runs into the directory of the first run.

    The file name of the page contains the name of the second run.
    """
    monkeypatch.chdir(tmp_path)
    name = "</script>'\"&\x07 é"
    shutil.copytree(run, tmp_path / "b")
    place = tmp_path / name.replace("/", "_")
    shutil.copytree(run, place)
    look_at(place, "b", "--text", name * 300, "--max_checkpoints", 1)
    data = read_page(place / "look-b.html")
    assert data["runs"] == [str(place), "b"]
    assert "".join(data["tokens"]) == "\n" + (name * 300).encode()[:32].decode(errors="replace")


def test_a_new_run_moves_the_page_of_the_old_one_aside(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/look-b.html").write_text("old")
    prepare_run_directory(tmp_path / "run", step=0)
    assert (tmp_path / "run/old-1/look-b.html").read_text() == "old"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def open_page(browser, path, fragment):
    """Opens a page in the browser. Returns the HTML of the page. The console must stay empty."""
    browser.open(path, fragment)
    assert browser.console == []
    return browser.run("document.documentElement.outerHTML")


needs_chromium = pytest.mark.skipif(
    not CHROMIUM, reason="needs chromium: apt-get install -y chromium"
)


def text_of(dom, name):
    """Returns the text of the element with the id `name`, up to the next element that has an id."""
    part = dom.partition(f'id="{name}"')[2]
    part = re.split(r'<[^>]* id="', part)[0].partition(">")[2]
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", part))


@pytest.mark.slow
@needs_chromium
def test_a_browser_shows_the_numbers(browser, run, tmp_path):
    """The fragment of the URL selects a token, a checkpoint and a head."""
    evil = "x</script><b>'\"&\x07\u202e" + "船"
    look_at(run, "--text", evil, "--output", tmp_path / "a.html")
    tokens = read_page(tmp_path / "a.html")["tokens"]
    seen = set()
    for snapshot, token in ((0, 3), (1, 7), (2, len(tokens) - 1)):
        fragment = f"token={token}&snapshot={snapshot}&head=0.1.0"
        dom = open_page(browser, tmp_path / "a.html", fragment)
        gpt, _ = load_model(run / f"model_{(5, 10, 20)[snapshot]:06d}.pt", model.GPT)
        record = record_text(gpt.eval(), ids_of(evil))
        prediction = record.prediction
        card = text_of(dom, "card")
        loss = prediction.losses[token - 1]
        assert f"token {token} " in card
        assert f"loss {loss:.4f}" in card and f"rank {prediction.ranks[token - 1]}" in card
        for p in prediction.probs[token - 1]:
            assert f"{100 * p:.1f}%" in card
        assert f"Mean loss {prediction.losses.mean():.4f}" in text_of(dom, "facts")
        blocks = text_of(dom, "blocks")
        for block in record.blocks:
            assert f"{block.prediction.losses[token - 1]:.4f}" in blocks
            assert f"{block.norms[token - 1]:.2f}" in blocks
        largest = record.calls[1].weights[0, token - 1].max().item()
        found = re.search(r"the largest weights are: ([\d.]+) token", text_of(dom, "head"))
        assert abs(float(found[1]) - largest) < 0.5 / 255 + 1e-3
        seen.add(card)
    assert len(seen) == 3
    # The page ignores values that do not exist.
    dom = open_page(browser, tmp_path / "a.html", "token=999&snapshot=-1&head=7.x")
    assert f"token {len(tokens) // 2} " in text_of(dom, "card") and "step 20" in dom


# This script acts like a user: it selects tokens with keys and a click, moves the slider, clicks a
# head, and points at a token.
ACTIONS = """
const text = document.querySelector(".text");
text.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
text.children[9].click();
text.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
byId("slider").value = 0;
byId("slider").dispatchEvent(new Event("input"));
document.querySelectorAll(".heads button")[3].click();
text.children[2].dispatchEvent(new Event("pointerover", { bubbles: true }));
"""


@pytest.mark.slow
@needs_chromium
def test_keys_and_clicks(browser, run, page_of_text):
    browser.open(page_of_text)
    browser.run(ACTIONS)
    assert browser.run("location.hash") == "#token=8&snapshot=0&head=0.1.1"
    dom = browser.run("document.documentElement.outerHTML")
    assert "token 2 A" in text_of(dom, "card")  # the token under the pointer
    gpt, _ = load_model(run / "model_000005.pt", model.GPT)
    losses = record_text(gpt.eval(), ids_of(TEXT)).prediction.losses
    assert f"Mean loss {losses.mean():.4f}" in text_of(dom, "facts")
    assert f"loss {losses[1]:.4f}" in text_of(dom, "card")
    assert f"{losses[7]:.4f}" in text_of(dom, "blocks")


@pytest.mark.slow
@needs_chromium
def test_a_browser_shows_pairs(browser, run, tmp_path):
    """At first, the page selects the first token of the response. It does not color the prompt."""
    path = write_lines(tmp_path / "pairs.jsonl", [dict(prompt="12+3=", response="15")])
    look_at(run, "--text", path, "--output", tmp_path / "a.html")
    dom = open_page(browser, tmp_path / "a.html", "")
    assert "token 6 1 " in text_of(dom, "card")
    gpt, _ = load_model(run / "model_000020.pt", model.GPT)
    mean = record_text(gpt.eval(), ids_of("12+3=15\n")).prediction.losses[-3:].mean()
    assert f"Mean loss {mean:.4f} nats per token over 3 tokens of the" in text_of(dom, "facts")
    text = dom.partition('aria-label="the text, losses of run"')[2].partition("</div>")[0]
    colours = [weight != "0" for weight in re.findall(r"--weight: (\d+)%", text)]
    assert colours == [False] * 6 + [True] * 3
    dom = open_page(browser, tmp_path / "a.html", "token=0")
    assert "No token precedes this token" in text_of(dom, "blocks")


@pytest.mark.slow
@needs_chromium
def test_a_browser_shows_the_difference_of_two_runs(browser, run, tmp_path):
    save_model(tmp_path / "b", 20, randomise(fresh(MODEL)))
    look_at(run, tmp_path / "b", "--text", TEXT, "--output", tmp_path / "a.html")
    (snapshot,) = read_page(tmp_path / "a.html")["snapshots"]
    a, b = (losses_of(packed).astype(float) for packed in snapshot["looks"])
    dom = open_page(browser, tmp_path / "a.html", "token=2")
    assert f"{b.sum() - a.sum():.4f} nats over the text" in text_of(dom, "sum")
    rows = re.findall(r"<tr>.*?</tr>", dom.partition('id="largest"')[2].partition("</table>")[0])
    shown = [float(re.sub("<[^>]*>", " ", row).split()[0]) for row in rows[1:]]
    order = np.argsort(-np.abs(b - a), kind="stable")[:20]
    assert shown == pytest.approx((b - a)[order], abs=1e-4)


def test_a_page_has_the_model_only_if_it_can_compute_it(run, tmp_path, page_of_text):
    gpt = fresh(MODEL)
    assert gpt2_shapes(MODEL) == {name: p.shape for name, p in gpt.state_dict().items()}
    assert find_reason(gpt, BYTES, 1) == ""
    assert find_reason(gpt, BYTES, 2) == "the page shows two runs"
    assert find_reason(gpt, get_tokenizer("gpt2"), 1) == "the tokens are not bytes"
    assert find_reason(gpt, get_tokenizer("lines"), 1) == "the model was trained on pairs"
    large = fresh(model.GPTConfig(1, 1, 8, 130_000, 256))
    reason = "the model has 1,042,936 parameters, more than 1,000,000"
    assert find_reason(large, BYTES, 1) == reason
    long = fresh(model.GPTConfig(1, 1, 8, 1025, 256))
    assert find_reason(long, BYTES, 1) == "the model's context has 1,025 tokens, more than 1,024"
    rotary = patched_model("rotary", tmp_path / "code").GPT(MODEL)
    reason = "model.py was changed: transformer.wpe.weight is missing; in GPT-2, it is (32, 32)"
    assert find_reason(rotary, BYTES, 1) == reason
    look_at(run, "--text", TEXT, "--no-live", "--output", tmp_path / "a.html")
    assert read_page(tmp_path / "a.html")["live"] == dict(why="--no-live was given")
    weights = read_page(page_of_text)["live"]["weights"]
    loaded, _ = load_model(run, model.GPT)
    # The weight of lm_head is tied to the embedding, so the page does not contain it.
    assert weights.keys() == loaded.state_dict().keys() - {"lm_head.weight"}
    for name, p in loaded.named_parameters():
        assert (unpack(weights[name], "<f4") == p.detach().numpy().ravel()).all()


def test_each_part_has_its_line_of_the_model():
    lines = (ROOT / "model.py").read_text().splitlines()
    found = find_lines(model.GPT)
    assert found.keys() == LINES.keys()
    for part, (number, line) in found.items():
        assert lines[number - 1].strip() == line
        assert [each.strip() for each in lines if LINES[part] in each] == [line]


def omit(gpt, name):
    """Registers a hook that switches off a part of the model. Returns the hook.

    name: the name of this part in gpt.js.
    """
    _, *place = name.split(".")
    if not place:
        return gpt.transformer.wpe.register_forward_hook(lambda wpe, args, x: torch.zeros_like(x))
    block = gpt.transformer.h[int(place[0])]
    if len(place) == 1:
        return block.register_forward_hook(lambda block, args, x: args[0])
    if place[1] == "mlp":
        return block.mlp.register_forward_hook(lambda mlp, args, x: torch.zeros_like(x))
    channels = torch.arange(32) // 16 == int(place[2])
    return block.attn.c_proj.register_forward_pre_hook(
        lambda c_proj, args: (args[0].masked_fill(channels, 0),)
    )


@torch.no_grad()
def logits_of(gpt, ids):
    return gpt(torch.tensor([ids]))[0][0].numpy()  # (T, vocab_size)


LOGITS = "play.part.logits.at(-1).map((row) => Array.from(row))"  # (T, vocab_size)


@pytest.mark.slow
@needs_chromium
def test_a_page_computes_the_model(browser, run, page_of_text):
    """Compares logits and generated tokens of the page with PyTorch.

    The test also compares the logits of a model of which one part is switched off.
    """
    dom = open_page(browser, page_of_text, "")
    found = re.search(r"differ from PyTorch's by at most (\S+)\.", text_of(dom, "live"))
    assert float(found[1]) < 1e-4
    gpt = load_model(run, model.GPT)[0].eval()
    rng = np.random.default_rng(1)
    texts = [rng.integers(256, size=n).tolist() for n in rng.integers(1, 33, size=20)]
    texts += [texts[-1][:n] for n in (3, 1)]  # the page computes these texts with its KV cache
    texts += [texts[0] + [65], texts[0][:-1] + [66, 67]]
    script = f"{json.dumps(texts)}.map((ids) => {{ play.set(ids); return {LOGITS}; }})"
    for ids, logits in zip(texts, browser.run(script), strict=True):
        assert np.allclose(logits, logits_of(gpt, ids[:32]), atol=1e-4)

    ids = ids_of(TEXT)
    targets = torch.tensor(ids[1:])
    browser.run("byId('restore').click()")
    whole = logits_of(gpt, ids)
    parts = browser.run(
        "Array.from(document.querySelectorAll('#path button'), (button) => button.dataset.part)"
    )
    assert len(parts) == 1 + 2 * 4
    for part in parts:
        click = f"document.querySelector('#path [data-part=\"{part}\"]').click();"
        logits = browser.run(click + LOGITS)
        hook = omit(gpt, part)
        expected = logits_of(gpt, ids)
        hook.remove()
        assert np.allclose(logits, expected, atol=1e-4)
        assert np.abs(expected - whole).max() > 0.01
        change = [F.cross_entropy(torch.tensor(x[:-1]), targets).item() for x in (whole, expected)]
        shown = browser.run("byId('mean').textContent").replace("−", "-")
        numbers = [float(x) for x in re.findall(r"[+-]?\d+\.\d+", shown)]
        assert numbers == pytest.approx([*change, change[1] - change[0]], abs=2e-4)
        browser.run(click)

    prompt = ids_of("MARLOW")
    expected = gpt.generate(torch.tensor([prompt]), 60, temperature=0)[0].tolist()
    written = browser.run(f"""
    byId("temperature").value = 0;
    play.set({prompt});
    for (let i = 0; i < 60; i++) appendToken(draw(nextProbabilities(play.next())));
    play.ids""")
    assert written == expected and browser.console == []


@pytest.mark.slow
@needs_chromium
def test_what_a_reader_does_with_a_live_page(browser, run, page_of_text):
    open_page(browser, page_of_text, "")
    gpt = load_model(run, model.GPT)[0].eval()
    text = "Boats 船"
    browser.run(f"typed.value = {json.dumps(text)}; typed.dispatchEvent(new Event('input'))")
    assert browser.run("document.querySelector('.text').textContent") == "⏎\nBoats 船··"
    probs = torch.tensor(logits_of(gpt, ids_of(text))[-1]).softmax(-1)
    bars = [
        button.split()[-1].rstrip("%")
        for button in browser.run(
            "Array.from(byId('next').children, (button) => button.textContent)"
        )
    ]
    expected = [f"{100 * p:.1f}" for p in probs.topk(8).values]
    assert [bar.lstrip("<")[-len(p) :] for bar, p in zip(bars, expected)] == expected
    browser.run("byId('top_k').value = 2; byId('top_k').dispatchEvent(new Event('change'))")
    assert (
        browser.run("Array.from(byId('next').children, (b) => b.disabled)")
        == [False] * 2 + [True] * 6
    )
    browser.run("byId('next').children[1].click()")
    assert browser.run("play.ids") == [*ids_of(text), probs.topk(2).indices[1].item()]
    looks = browser.run("byId('looks').textContent")
    assert looks.startswith("The model predicts token 10 ") and looks.count("head ") == 4
    browser.run("byId('write').click()")
    assert browser.run("byId('write').textContent") == "stop"
    browser.run("byId('write').click()")
    assert browser.run("byId('write').textContent") == "write" and browser.run("timer") is None
    parts = browser.run("""
    Array.from(byId("path").querySelectorAll("button, span"), (part) => {
      part.focus();
      return byId("part").textContent;
    })""")
    assert len(parts) == 2 + 2 * 11 + 3 and all(" model.py, line " in part for part in parts)
    # Focusing the text box does not change the chosen token.
    browser.run("choose({ token: 3 }); typed.focus()")
    assert browser.run("state.token") == 3
    # Riddle 2 accepts only letters, and riddle 4 accepts a temperature only without top-k.
    answer = """
    (i) => {
      const riddle = byId("riddles").children[i];
      riddle.querySelector("button").click();
      return riddle.querySelector("output").textContent;
    }"""
    browser.run("typed.value = textOf(data.ids).replace('R', '!'); type()")
    assert "one letter replaced by another letter" in browser.run(f"({answer})(1)")
    assert browser.run(f"({answer})(3)").startswith("Set top-k to “all”")
    # Except in riddle 4, exactly one answer is right. For riddle 2, the script changes the third
    # letter. For riddle 4, the script lowers the temperature.
    browser.run("""
    typed.value = textOf(data.ids).replace("R", "Q");
    type();
    byId("temperature").value = 0.05;
    byId("top_k").value = 0;""")
    for i in range(5):
        answers = browser.run(f"""
        (() => {{
          const riddle = byId("riddles").children[{i}];
          const select = riddle.querySelector("select");
          const options = select ? Array.from(select.options).slice(1) : [{{}}];
          return options.map((option) => {{
            if (select) select.value = option.value;
            riddle.querySelector("button").click();
            return riddle.querySelector("output").textContent;
          }});
        }})()""")
        if i == 3:  # no temperature of the slider solves riddle 4 for this random model
            logits = torch.tensor(logits_of(gpt, ids_of(TEXT.replace("R", "Q")))[-1])
            p = (logits / 0.05).softmax(-1).max()
            start = "At temperature 0.05, the likeliest token has a probability of"
            assert answers == [f"{start} {100 * p:.1f}%."]
            continue
        assert sum(answer.startswith("✓ Right.") for answer in answers) == 1, answers
    # If the text changes, a solved riddle stays solved, and quotes the text of its answer. A riddle
    # with choices asks for a choice.
    quoted = f"The text was “{TEXT.replace('R', 'Q').replace(chr(10), '⏎')}”."
    browser.run("typed.value = '1 2'; typed.dispatchEvent(new Event('input'))")
    answers = (
        "Array.from(byId('riddles').querySelectorAll('output'), (output) => output.textContent)"
    )
    for shown in browser.run(answers):
        assert shown == "" or shown.startswith("✓ Right.") and shown.endswith(quoted)
    assert browser.run(answers)[1] != "" and browser.run(answers)[3] == ""
    solved = "Array.from(byId('riddles').children, (riddle) => riddle.className)"
    assert browser.run(solved) == ["solved"] * 3 + ["", "solved"]
    assert "the letters of a word? Type a word" in browser.run("byId('riddles').textContent")
    select = "byId('riddles').querySelector('select')"
    browser.run(f"{select}.value = ''; {select}.closest('li').querySelector('button').click()")
    assert browser.run(answers)[0] == "Choose an answer first."
    # The page works with an empty text, and with a text of one long word on a small screen.
    browser.run("typed.value = ''; type()")
    assert "The text contains no tokens to score." in browser.run("byId('facts').textContent")
    assert "NaN" not in browser.run("document.querySelector('main').textContent")
    screen = dict(width=390, height=800, deviceScaleFactor=1, mobile=True)
    browser.send("Emulation.setDeviceMetricsOverride", **screen)
    browser.run("typed.value = 'a'.repeat(64); type()")
    assert browser.run("document.documentElement.scrollWidth") == 390
    browser.send("Emulation.clearDeviceMetricsOverride")
    browser.run("typed.value = '1 2'; type()")
    # For an earlier checkpoint, the page shows the stored text and its stored numbers.
    browser.run("byId('slider').value = 0; byId('slider').dispatchEvent(new Event('input'))")
    assert "can run only the model of step 20." in browser.run("byId('live').textContent")
    assert browser.run("byId('next').checkVisibility()") is False
    assert "your text again at step 20" in browser.run("byId('stored').textContent")
    browser.run("byId('slider').value = 2; byId('slider').dispatchEvent(new Event('input'))")
    assert browser.run("[typed.value, byId('stored').checkVisibility()]") == ["1 2", False]
    assert browser.console == []


ANSWERS = """
(i) => {
  const riddle = byId("riddles").children[i];
  const check = () => {
    riddle.querySelector("button").click();
    return riddle.querySelector("output").textContent;
  };
  const select = riddle.querySelector("select");
  if (!select) return { "": check() };
  const options = Array.from(select.options).slice(1);
  return Object.fromEntries(options.map((option) => {
    select.value = option.value;
    return [option.value, check()];
  }));
}"""  # {choice: what the page says about it}


@pytest.mark.slow
@needs_chromium
def test_riddles_accept_the_answer_to_their_question(browser, run, page_of_text):
    """Riddle 1 asks which head has the largest mean weight for the previous token.

    Riddle 5 asks which head or MLP changes the loss least if it is switched off.
    """
    open_page(browser, page_of_text, "")
    gpt = load_model(run, model.GPT)[0].eval()
    ids = ids_of(TEXT)
    attention = attention_by_hand(gpt, torch.tensor([ids[:-1]]))  # (n_layer, nh, T, T)
    means = attention.diagonal(-1, 2, 3).mean(dim=-1)  # (n_layer, nh)
    heads = {f"h.{i}.attn.{head}": means[i, head].item() for i in range(2) for head in range(2)}
    best = max(heads, key=heads.get)
    answers = browser.run(f"({ANSWERS})(0)")
    assert [name for name in answers if answers[name].startswith("✓ Right.")] == [best]
    for name, answer in answers.items():
        assert f"the mean weight of this head is {heads[name]:.2f}." in answer

    targets = torch.tensor(ids[1:])

    def mean_loss():
        return F.cross_entropy(torch.tensor(logits_of(gpt, ids)[:-1]), targets).item()

    whole = mean_loss()
    changes = {}
    for name in [*heads, "h.0.mlp", "h.1.mlp"]:
        hook = omit(gpt, name)
        changes[name] = mean_loss() - whole
        hook.remove()
    least = min(changes, key=lambda name: abs(changes[name]))
    # The riddle does not ask for the part without which the loss decreases most.
    assert least != min(changes, key=changes.get)
    answers = browser.run(f"({ANSWERS})(4)")
    assert [name for name in answers if answers[name].startswith("✓ Right.")] == [least]


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(
    "text, word",
    [
        ("😀😀 It is raining harbor", "raining"),
        ("船: ab", "船"),
        ("😀😀 ab", "ab"),  # the four bytes of a symbol are not a word
        ("a 𝒜b É", "𝒜b"),
        ("abc 😀 Él: x", "Él"),
        ("1 a 😀", ""),
        (f"12船 ab{' ' * 26}", "ab"),  # the context begins with the three bytes of a letter
    ],
)
def test_the_word_of_a_riddle(browser, page_of_text, text, word):
    """The page chooses the first speaker or, without a speaker, the longest word.

    A letter may have several bytes.
    """
    open_page(browser, page_of_text, "")
    browser.run(f"typed.value = {json.dumps(text)}; type()")
    assert browser.run("word()") == word


@pytest.mark.slow
@needs_chromium
def test_the_answer_of_riddle_2_is_a_sentence(browser, page_of_text):
    open_page(browser, page_of_text, "")
    browser.run("typed.value = textOf(data.ids).replace('R', 'Q'); type()")
    for losses, start in (("[0, 9]", "✓ Right. Token "), ("[0, 1]", "Not yet. Token ")):
        # This line replaces the losses: the loss of token 10 is 9 or 1. All other losses are 0.
        fake = (
            f"play.whole.losses = () => play.ids.slice(1).map((_, t) => {losses}[Number(t === 9)])"
        )
        browser.run(fake)
        assert browser.run(f"({ANSWERS})(1)")[""].startswith(f"{start}10 has the largest loss")


@pytest.mark.slow
@needs_chromium
def test_small_probabilities_look_the_same_everywhere(browser, page_of_text):
    open_page(browser, page_of_text, "")
    shown = browser.run("[0, 1e-9, 0.0004, 0.0006, 0.5].map(percent)")
    assert shown == ["< 0.1%", "< 0.1%", "< 0.1%", "0.1%", "50.0%"]
    for script in ("byId('temperature').value = 0; drawNext()", "byId('top_k').value = 2; type()"):
        browser.run(script)
        text = browser.run("document.querySelector('main').innerText")
        assert "< 0.1%" in text and not re.search(r"(?<!\d)0\.0%", text)


@pytest.mark.slow
@needs_chromium
def test_the_list_of_weights_says_its_order(browser, page_of_text):
    open_page(browser, page_of_text, "token=20")
    assert "The largest weight comes first:" in browser.run("byId('looks').textContent")
    lines = browser.run(
        "Array.from(byId('looks').querySelectorAll('button'), (line) => line.textContent)"
    )
    weights = [[float(x) for x in re.findall(r"\d\.\d\d", line)] for line in lines]
    assert len(weights) == 4 and all(each == sorted(each, reverse=True) for each in weights)
    assert [each[0] for each in weights] == sorted((each[0] for each in weights), reverse=True)


# This script returns three counts: the points of arcs that are inside a token, the arcs that have
# two pieces, and all points of arcs.
POINTS_IN_TOKENS = """
(() => {
  const { element, svg } = arcs[0];
  const box = svg.getBoundingClientRect();
  const rects = spansOf(element).flatMap((span) => Array.from(span.getClientRects()));
  const paths = Array.from(svg.querySelectorAll("path"));
  const points = paths.flatMap((path) => Array.from({ length: 200 }, (_, i) => {
    const { x, y } = path.getPointAtLength(i / 199 * path.getTotalLength());
    return { x: x + box.left, y: y + box.top };
  }));
  // An arc ends at the upper edge of a token.
  const isIn = ({ x, y }) => rects.some(({ left, right, top, bottom }) =>
    x > left && x < right && y > top + 0.5 && y < bottom);
  const broken = paths.filter((path) => path.getAttribute("d").split("M").length > 2);
  return [points.filter(isIn).length, broken.length, points.length];
})()"""


@pytest.mark.slow
@needs_chromium
def test_arcs_do_not_cross_letters(browser, page_of_text):
    """Even if the text wraps, as on a small screen, no arc crosses a token."""
    screen = dict(width=390, height=844, deviceScaleFactor=1, mobile=True)
    browser.send("Emulation.setDeviceMetricsOverride", **screen)
    open_page(browser, page_of_text, "")
    browser.run("typed.value = 'a b\\n' + 'Boats came '.repeat(5).slice(0, 28); type()")
    n_broken = 0
    for token in range(1, 32):
        browser.run(f"choose({{ token: {token} }})")
        inside, broken, points = browser.run(POINTS_IN_TOKENS)
        assert points > 0 and inside == 0
        n_broken += broken
    assert n_broken > 0
    browser.send("Emulation.clearDeviceMetricsOverride")


@pytest.mark.slow
@needs_chromium
def test_tokens_are_on_the_axes_of_a_head(browser, page_of_text):
    open_page(browser, page_of_text, "token=9")
    tokens = browser.run("shown.tokens.map((_, i) => inToken(nameOf(i)))")
    axes = browser.run("""
    Array.from(byId("head").querySelectorAll(".axis"), (axis) =>
      Array.from(axis.children, (label) => label.textContent))""")
    assert axes == [tokens, tokens] and tokens[7:9] == [":", "␣"]
    assert browser.run("byId('head').querySelector('.axis .here').textContent") == "␣"
    # Each label is at the middle of its row or column.
    distance = browser.run("""
    (() => {
      const box = byId("head").querySelector("canvas").getBoundingClientRect();
      const [rows, columns] = Array.from(byId("head").querySelectorAll(".axis"), (axis) =>
        Array.from(axis.children, (label) => label.getBoundingClientRect()));
      const n = rows.length;
      const far = (middle, i, start, size) => Math.abs(middle - start - size * (i + 0.5) / n);
      return Math.max(
        ...rows.map(({ y, height }, i) => far(y + height / 2, i, box.y, box.height)),
        ...columns.map(({ x, width }, i) => far(x + width / 2, i, box.x, box.width)),
      );
    })()""")
    assert distance < 2  # px
    # If a text is long, the axes show every fourth token. A long token is cut.
    found = browser.run("""
    shown.tokens = Array.from({ length: 256 }, (_, i) => `a long token ${i}`);
    Array.from(addAxes(make("canvas"), 256).querySelector(".below").children, (label) =>
      [label.textContent, label.style.left])""")
    assert len(found) == 64 and found[1] == ["a␣long␣t", f"{100 * 4.5 / 256:.5f}%"]


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width, height", [(1280, 800), (390, 844)])
def test_the_first_screen_shows_the_text_and_its_arcs(browser, page_of_text, width, height):
    """The first screen shows the text, its arcs and the predictions, before the explanations."""
    screen = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
    browser.send("Emulation.setDeviceMetricsOverride", **screen)
    for path in (page_of_text, ROOT / "log/records/look.html"):
        open_page(browser, path, "")
        assert browser.run("arcs[0].svg.children.length") > 0
        bottom = "Math.max(...Array.from({}, (each) => each.getBoundingClientRect().bottom))"
        for elements in ("[typed, byId('texts'), byId('card')]", "arcs[0].svg.children"):
            assert browser.run(bottom.format(elements)) <= height
        words = browser.run("""
        Array.from(document.querySelectorAll("p")).filter((p) => p.checkVisibility()
          && p.compareDocumentPosition(byId("card")) & Node.DOCUMENT_POSITION_FOLLOWING)
          .map((p) => p.innerText).join(" ")""").split()
        assert len(words) < 40
    browser.send("Emulation.clearDeviceMetricsOverride")


def test_the_page_of_the_readme_begins_with_its_sentence():
    """README.md names the command that generates log/records/look.html."""
    tokens = read_page(ROOT / "log/records/look.html")["tokens"]
    text = "".join(tokens[1:])  # the first token is the end of text
    assert f'python look.py log/baby --text "{text}"' in (ROOT / "README.md").read_text("utf-8")
    assert text[0].isupper() and text.endswith(".")


@pytest.mark.slow
@needs_chromium
def test_a_part_that_is_off_looks_nowhere(browser, page_of_text):
    open_page(browser, page_of_text, "")
    styles = """Object.fromEntries(Array.from(byId("looks").querySelectorAll("button"), (button) =>
      [button.textContent.match(/block ., head ./)[0],
       button.querySelector("path").getAttribute("class")]))"""
    before = browser.run(styles)
    assert len(set(before.values())) == 4
    block, head, inside = (
        f"document.querySelector('#path [data-part=\"{part}\"]')"
        for part in ("h.0", "h.1.attn.0", "h.0.attn.0")
    )
    assert browser.run(f"{head}.getAttribute('aria-label')") == "block 2, head 1"
    browser.run(f"{block}.click()")
    after = browser.run(styles)
    assert after == {name: before[name] for name in ("block 2, head 1", "block 2, head 2")}
    assert browser.run(f"{inside}.disabled") is True
    browser.run(f"{head}.click(); choose({{ head: [0, 1, 0] }})")
    assert list(browser.run(styles)) == ["block 2, head 2"]
    assert browser.run("document.querySelector('.heads button').textContent") == "head 1off"
    assert "This head is off." in browser.run("byId('head').textContent")


@pytest.mark.slow
@needs_chromium
def test_the_bars_of_a_full_context(browser, run, page_of_text):
    """The context has 32 tokens. Like generate.py, the page reads the last 32 tokens of a text."""
    open_page(browser, page_of_text, "")
    gpt = load_model(run, model.GPT)[0].eval()
    for n in (31, 32, 33):
        text = (TEXT * 2).replace("船", "s")[:n]
        browser.run(f"typed.value = {json.dumps(text)}; typed.dispatchEvent(new Event('input'))")
        logits = logits_of(gpt, ids_of(text)[-32:])[-1]
        assert np.allclose(browser.run("Array.from(play.next())"), logits, atol=1e-4)
        expected = logits.argsort()[::-1][:8].tolist()
        shown = "Array.from(byId('next').children, (b) => Number(b.dataset.id))"
        assert browser.run(shown) == expected
        assert browser.run("byId('next').checkVisibility()") is True
    assert "has 32 tokens" in browser.run("byId('context').textContent")
    assert browser.console == []


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("name", ["soft-cap", "sliding-window"])
def test_a_changed_model_is_not_computed(browser, tmp_path, name):
    """The weights have the names and shapes of GPT-2's weights, but the losses differ."""
    changed = patched_model(name, tmp_path / "code")
    directory = save_model(tmp_path / "run", 20, randomise(changed.GPT(MODEL)))
    changed_run = look.Run(
        "run", {"step 20": directory / "model_000020.pt"}, directory, changed.GPT
    )
    config = look.LookConfig(text="abc", sample_tokens=1)
    text, snapshots, newest = look.look_at_all([changed_run], config, ALONE)
    live = look.describe_live(config, newest, text)
    (tmp_path / "a.html").write_bytes(build_page(text, snapshots, ["run"], BYTES, live))
    dom = open_page(browser, tmp_path / "a.html", "")
    assert "does not run the model: its losses differ from PyTorch's by" in text_of(dom, "live")
    assert f"loss {snapshots[0].looks[0].record.prediction.losses[1]:.4f}" in text_of(dom, "card")
    assert browser.run("byId('typed').checkVisibility()") is False
