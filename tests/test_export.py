"""Exported directories in transformers: bytes, GPT-2's tokenizer and one's own vocabulary."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY, names, program
from hypothesis import given, settings
from hypothesis import strategies as st

from plaingpt.checkpoint import load_model
from plaingpt.tokenizer_json import BYTE_OF

transformers = pytest.importorskip("transformers")
KINDS = ("bytes", "gpt2", "own")
PROMPTS = ["MARLOW: ", "the harbor  and\n\n", "中文 é", ""]
FILES = ["README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PIECES = st.lists(st.sampled_from(["a", " ", "\n", "\r", "'ll", "1", "!", " .", " n't", "中", "\u3000", "é", "<|endoftext|", "Ċ"])).map("".join)
# What a user of an exported directory runs. It imports nothing of plainGPT.
USE = """
import json, sys
from transformers import pipeline
found = {}
for kind in sys.argv[2:]:
    generate = pipeline("text-generation", model=f"{kind}-hf")
    generate("Once")  # the default length fits the context
    found[kind] = [generate(p, do_sample=False, max_new_tokens=12)[0]["generated_text"] for p in json.loads(sys.argv[1])]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A directory with the runs bytes/, gpt2/ and own/, and their exports bytes-hf/ ..."""
    d = tmp_path_factory.mktemp("export")
    (d / "t.txt").write_text((ROOT / "input.txt").read_text()[:60_000] + "中文 é 🙂 1234\n\n!" * 50)
    program("--input", "t.txt", "--vocab_size", 400, "--pattern", "gpt4", "--output", "own.json", cwd=d, program="tokenizer.py")
    own = json.loads((d / "own.json").read_text())
    own["added_tokens"][0]["content"] = own["end_of_text"] = "<|doc|>"  # a name that is not in END_NAMES
    (d / "own.json").write_text(json.dumps(own))
    for kind in KINDS:
        choice = [] if kind == "bytes" else ["--tokenizer", "own.json" if kind == "own" else "gpt2"]
        program(*TINY, "--data", "t.txt", *choice, "--max_steps", 8, "--val_every", 8, "--max_lr", 0.02, "--log_dir", kind, cwd=d)
        out, _ = program("--checkpoint", kind, "--output", f"{kind}-hf", cwd=d, program="export.py")
        assert all(f"{kind}-hf/{name}\n" in out for name in FILES) and names(d / f"{kind}-hf") == FILES
    return d


def load(directory, kind):
    """-> (GPT, Tokenizer) of a run, and what transformers makes of its export."""
    hf = directory / f"{kind}-hf"
    return (*load_model(directory / kind), transformers.GPT2LMHeadModel.from_pretrained(hf),
            transformers.AutoTokenizer.from_pretrained(hf))


def test_pipeline_equals_generate(exported):
    """The same greedy text in a fresh process, offline. config.prefix puts end_of_text before a prompt."""
    done = subprocess.run([sys.executable, "-c", USE, json.dumps(PROMPTS), *KINDS], cwd=exported, capture_output=True, text=True,
                          env={"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for kind in KINDS:
        model, tokenizer = load_model(exported / kind)
        for prompt, text in zip(PROMPTS, found[kind]):
            idx = torch.tensor([[tokenizer.end_of_text, *tokenizer.encode(prompt)]])
            ids = model.eval().generate(idx, 12, temperature=0)[0, 1:].tolist()
            if tokenizer.end_of_text in ids and tokenizer.special:  # transformers stops there
                ids = ids[: ids.index(tokenizer.end_of_text)]
            assert text == tokenizer.decode(ids), (kind, prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_is_the_same(exported, kind):
    """On arbitrary Unicode and arbitrary ids. Only the name of end_of_text is not plain text in transformers."""
    _, tokenizer, _, auto = load(exported, kind)
    end = tokenizer.decode([tokenizer.end_of_text])

    @settings(max_examples=150, deadline=None)
    @given(st.one_of(TEXT, PIECES), st.lists(st.integers(0, tokenizer.n_vocab - 1)))
    def check(text, ids):
        assert auto(text)["input_ids"] == tokenizer.encode(text)
        assert auto.decode(tokenizer.encode(text)) == text
        assert auto.decode(ids) == tokenizer.decode(ids)

    check()
    assert len(auto) == tokenizer.n_vocab and auto.model_max_length == 32
    if kind == "bytes":
        assert auto.eos_token is auto.bos_token is None and auto("\n")["input_ids"] == [10]
        assert auto.decode([10, 97], skip_special_tokens=True) == "\na"
    else:
        assert auto.eos_token == auto.bos_token == end == ("<|doc|>" if kind == "own" else "<|endoftext|>")
        assert auto(f"a{end}")["input_ids"] == [*tokenizer.encode("a"), tokenizer.end_of_text]
        assert tokenizer.end_of_text not in tokenizer.encode(f"a{end}")  # ours: plain text


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_the_harness(exported, kind):
    """EleutherAI's rules, written out for AutoTokenizer and GPT2LMHeadModel, give the scores of lambada.py."""
    _, tokenizer, hf, auto = load(exported, kind)
    texts = ["The quay is old", "a 中文", "Ada said it's  late"]
    (exported / "l.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    program("--checkpoint", kind, "--data", "l.jsonl", "--dtype", "float32", "--json", "s.json", cwd=exported, program="lambada.py")
    scores = json.loads((exported / "s.json").read_text())["examples"]
    for text, score in zip(texts, scores):
        whole, n = auto(text)["input_ids"], len(auto(text.rpartition(" ")[0].rstrip())["input_ids"])
        with torch.no_grad():
            log_probs = hf(torch.tensor([whole])).logits[0].log_softmax(-1)
        expected = sum(log_probs[i - 1, whole[i]].item() for i in range(n, len(whole)))
        assert score["log_likelihood"] == [pytest.approx(expected, abs=1e-4)]


@pytest.mark.parametrize("kind", KINDS)
def test_our_programs_read_an_export(exported, kind):
    """The same tokenizer and the same weights."""
    model, tokenizer = load_model(exported / kind)
    again, same = load_model(exported / f"{kind}-hf")
    assert same.name == tokenizer.name and same.end_of_text == tokenizer.end_of_text
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    flags = ["--prompt", "Ada ", "--temperature", 0, "--dtype", "float32", "--max_new_tokens", 5]
    texts = [program(flag, name, *flags, cwd=exported, program="generate.py")[0].partition("---")[2]
             for flag, name in (("--checkpoint", kind), ("--checkpoint", f"{kind}-hf"), ("--model", f"{kind}-hf"))]
    assert texts[0] == texts[1] == texts[2] and "--- sample" not in texts[0]  # one greedy text
    modes = {path.stat().st_mode for path in (exported / f"{kind}-hf").iterdir()}
    assert len(modes) == 1  # other people of the machine may read all files or none


def test_fields_for_llama_cpp(exported):
    """What conversion/gpt2.py and base.py of llama.cpp read, besides the tensors in OpenAI's layout."""
    config = json.loads((exported / "own-hf" / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["layer_norm_epsilon"] == 1e-5
    assert [config[key] for key in ("n_ctx", "n_embd", "n_head", "n_layer", "vocab_size")] == [32, 32, 2, 2, 400]
    tokens = json.loads((exported / "own-hf" / "tokenizer_config.json").read_text())
    assert tokens["tokenizer_class"] == "PreTrainedTokenizerFast"  # a name that old and new versions know
    model = json.loads((exported / "gpt2-hf" / "tokenizer.json").read_text())["model"]
    assert len(model["vocab"]) == 50256 and len(model["merges"]) == 50000 and model["merges"][0] == ["Ġ", "t"]
    assert json.loads((exported / "bytes-hf" / "tokenizer.json").read_text())["model"]["vocab"] == BYTE_OF


def test_bfloat16_model_card_and_a_second_export(exported):
    """Files of others stay, an earlier export is replaced."""
    (exported / "own-hf" / "notes.txt").write_text("mine")
    program("--checkpoint", "own/model_000008.pt", "--output", "own-hf", "--dtype", "bfloat16", cwd=exported, program="export.py")
    assert names(exported / "own-hf") == sorted([*FILES, "notes.txt"])
    model, _, hf, _ = load(exported, "own")
    assert hf.dtype == torch.bfloat16 and hf.lm_head.weight is hf.transformer.wte.weight
    torch.testing.assert_close(hf.float().transformer.wte.weight, model.transformer.wte.weight, rtol=2**-8, atol=0)
    card = (exported / "own-hf" / "README.md").read_text()
    run = json.loads((exported / "own" / "run.json").read_text())
    for fact in (run["git_commit"], run["started"], "| dtype of the weights | bfloat16 |", "model_000008.pt", run["tokenizer"], "| data | t.txt |",
                 f"| train_tokens | {run['train_tokens']} |", "| dtype of training | float32 |", "| max_steps | 8 |", "library_name: transformers"):
        assert str(fact) in card, fact
    (exported / "moved.pt").write_bytes((exported / "own" / "model_000008.pt").read_bytes())
    program("--checkpoint", "moved.pt", "--output", "new/moved", cwd=exported, program="export.py")  # without run.json
    assert "moved.pt" in (exported / "new" / "moved" / "README.md").read_text()


def test_each_mistake_gives_a_one_sentence_error(exported):
    for flags, sentence in (
            (["--output", "."], "--output .: is a file, or has other files; give a new directory"),
            (["--output", "t.txt"], "--output t.txt: is a file, or has other files; give a new directory"),
            (["--checkpoint", "no"], "no checkpoint in no;"),
            (["--output", "t.txt/a"], "t.txt/a: cannot write (Not a directory)"),
            (["--dtype", "float8"], "--dtype float8: must be one of float32, bfloat16")):
        _, err = program(*(["--checkpoint", "bytes"] if "--checkpoint" not in flags else []), *flags, cwd=exported, status=2,
                         program="export.py")
        assert err.startswith("error: ") and sentence in err and err.count("\n") == 1, err
    (exported / "moved.pt").write_bytes((exported / "own" / "model_000008.pt").read_bytes())
    facts = json.loads((ROOT / "log" / "records" / "baby" / "run.json").read_text())
    (exported / "run.json").write_text(json.dumps({**facts, "train_config": {"data": "/home/me/input.txt"}}))  # an older one
    program("--checkpoint", "moved.pt", "--output", "older", cwd=exported, program="export.py")
    assert "| data | input.txt |" in (exported / "older" / "README.md").read_text()
    (exported / "older" / "tokenizer_config.json").write_text("{")
    _, err = program("--checkpoint", "moved.pt", "--output", "older", cwd=exported, status=2, program="export.py")
    assert "older/tokenizer_config.json: is damaged (" in err and err.count("\n") == 1
    (exported / "run.json").write_text("[]")
    _, err = program("--checkpoint", "moved.pt", "--output", "x", cwd=exported, status=2, program="export.py")
    assert err.startswith("error: run.json: is damaged") and not (exported / "x").exists()
