"""Exports models, and loads the exports with transformers.

The tokens of the models are bytes, GPT-2's tokens, or a vocabulary of tokenizer.py.
"""

import importlib
import json
import shutil

from plaingpt.errors import UserError
from plaingpt.pretrained import load_model, save_gpt2
from plaingpt.tokenizer import get_tokenizer

import pytest
import torch
from conftest import ROOT, TINY, names, program, randomise
from hypothesis import given, settings
from hypothesis import strategies as st

from model import GPT, GPTConfig

pytestmark = pytest.mark.slow  # most tests in this file use programs that a fixture starts

transformers = pytest.importorskip("transformers")
KINDS = ("bytes", "gpt2", "own")
PROMPTS = ["MARLOW: ", "the harbor  and\n\n", "中文 é", ""]
FILES = [
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
PIECES = ["a", " ", "\n", "\r", "'ll", "1", "!", " .", " n't", "中", "\u3000", "é", "<|endoftext|"]
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))
TEXTS = UNICODE | st.lists(st.sampled_from(PIECES)).map("".join)
# A user of an export may run this program, which imports nothing from plainGPT.
USE = """
import json, sys
from transformers import pipeline
found = {}
for kind in sys.argv[2:]:
    generate = pipeline("text-generation", model=f"{kind}-hf")
    generate("Once")  # the default length fits the context
    found[kind] = [generate(prompt, do_sample=False, max_new_tokens=12)[0]["generated_text"]
                   for prompt in json.loads(sys.argv[1])]
print(json.dumps(found))
"""


def export(*flags, **options):
    return program(*flags, program="export.py", **options)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A directory with the three runs `bytes`, `gpt2` and `own`.

    The directory also contains the exports of these runs: `bytes-hf`, `gpt2-hf` and `own-hf`.
    """
    d = tmp_path_factory.mktemp("export")
    plays = (ROOT / "input.txt").read_text()[:60_000]
    (d / "t.txt").write_text(plays + "中文 é 🙂 1234\n\n!" * 50)
    vocabulary = ["--input", "t.txt", "--vocab_size", 400, "--output", "own.json"]
    program(*vocabulary, cwd=d, program="tokenizer.py")
    for kind in KINDS:
        flags = f"--data t.txt --max_steps 8 --batch_size 16 --max_lr 0.02 --log_dir {kind}".split()
        flags += "--val_every 0 --val_tokens 128 --sample_tokens 1".split()
        choice = {"bytes": [], "gpt2": ["--tokenizer", "gpt2"], "own": ["--tokenizer", "own.json"]}
        program(*TINY, *flags, *choice[kind], cwd=d)
        export("--checkpoint", kind, "--output", f"{kind}-hf", cwd=d)
        assert names(d / f"{kind}-hf") == FILES
    return d


def test_pipeline_equals_generate(exported):
    """With greedy decoding, a pipeline of transformers generates the same text as our model.

    The pipeline runs in a different process, without a network. Like generate.py, the pipeline must
    put end_of_text before a prompt.
    """
    (exported / "use.py").write_text(USE)
    out, _ = program(json.dumps(PROMPTS), *KINDS, cwd=exported, program=exported / "use.py")
    found = json.loads(out)
    for kind in KINDS:
        model, tokenizer = load_model(exported / kind, GPT)
        for prompt, text in zip(PROMPTS, found[kind]):
            idx = torch.tensor([[tokenizer.end_of_text, *tokenizer.encode(prompt)]])
            ids = model.eval().generate(idx, 12, temperature=0)[0, 1:].tolist()
            # The pipeline of transformers stops at end_of_text. model.generate does not.
            if tokenizer.end_of_text in ids and tokenizer.special:
                ids = ids[: ids.index(tokenizer.end_of_text)]
            assert text == tokenizer.decode(ids), (kind, prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_is_the_same(exported, kind):
    """Both tokenizers encode any Unicode text and decode any ids in the same way.

    The only exception is a text that contains the string of end_of_text.
    """
    _, tokenizer = load_model(exported / kind, GPT)
    auto = transformers.AutoTokenizer.from_pretrained(exported / f"{kind}-hf")
    end = tokenizer.decode([tokenizer.end_of_text])

    @settings(max_examples=150, deadline=None)
    @given(TEXTS, st.lists(st.integers(0, tokenizer.n_vocab - 1)))
    def compare(text, ids):
        assert auto(text)["input_ids"] == tokenizer.encode(text)
        assert auto.decode(tokenizer.encode(text)) == text
        assert auto.decode(ids) == tokenizer.decode(ids)

    compare()
    assert len(auto) == tokenizer.n_vocab and auto.model_max_length == 32
    if kind == "bytes":
        assert auto.eos_token is auto.bos_token is None and auto("\n")["input_ids"] == [10]
    else:
        assert auto.eos_token == auto.bos_token == end
        assert auto(f"a{end}")["input_ids"] == [*tokenizer.encode("a"), tokenizer.end_of_text]


@pytest.mark.parametrize("kind", KINDS)
def test_our_programs_read_an_export(exported, kind):
    """An export has the same tokenizer and weights as its checkpoint.

    Therefore, generate.py also generates the same text. The test checks this only for the run
    `own`.
    """
    model, tokenizer = load_model(exported / kind, GPT)
    again, same = load_model(exported / f"{kind}-hf", GPT)
    assert same.name == tokenizer.name and same.end_of_text == tokenizer.end_of_text
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    # All files have the same permissions, so other users can read all of them, or none.
    assert len({path.stat().st_mode for path in (exported / f"{kind}-hf").iterdir()}) == 1
    if kind != "own":
        return
    flags = ["--prompt", "Ada ", "--temperature", 0, "--dtype", "float32", "--max_new_tokens", 5]
    sources = [("--checkpoint", kind), ("--checkpoint", f"{kind}-hf"), ("--model", f"{kind}-hf")]
    a, b, c = (
        program(*source, *flags, cwd=exported, program="generate.py")[0].partition("---")[2]
        for source in sources
    )
    assert a == b == c and " sample 0 ---\nAda " in a and "sample 1" not in a


def test_bfloat16_model_card_and_a_second_export(exported):
    """A second export replaces the first one, but keeps files that export.py did not write."""
    (exported / "own-hf" / "notes.txt").write_text("mine")
    export(
        "--checkpoint",
        "own/model_000008.pt",
        "--output",
        "own-hf",
        "--dtype",
        "bfloat16",
        cwd=exported,
    )
    assert names(exported / "own-hf") == sorted([*FILES, "notes.txt"])
    model, _ = load_model(exported / "own", GPT)
    hf = transformers.GPT2LMHeadModel.from_pretrained(exported / "own-hf")
    assert hf.dtype == torch.bfloat16 and hf.lm_head.weight is hf.transformer.wte.weight
    assert torch.equal(hf.transformer.wte.weight, model.transformer.wte.weight.bfloat16())
    card = (exported / "own-hf" / "README.md").read_text()
    run = json.loads((exported / "own" / "run.json").read_text())
    for fact in (
        "# own-hf\n",
        "| checkpoint | model_000008.pt |",
        "| dtype | float32 |",
        "weights | bfloat16 |",
        "| max_steps | 8 |",
        run["started"],
    ):
        assert fact in card, fact


class Window(GPT):
    """A GPT in which each position attends only to itself and to the 99 previous positions."""

    def hidden(self, idx, *more):
        near = torch.ones(idx.size(1), idx.size(1), dtype=torch.bool).tril().triu(-99)
        return super().hidden(idx, mask=near[None, None])


def test_a_window_of_attention_is_refused(tmp_path):
    model = randomise(Window(GPTConfig(1, 1, 16, 128, 256))).eval()
    with pytest.raises(UserError, match="model.py no longer computes the logits of"):
        save_gpt2(model, tmp_path, get_tokenizer("bytes"))


@pytest.mark.parametrize("change", ["activation", "norm"])
def test_a_model_that_is_not_gpt2_is_refused(exported, change, tmp_path):
    model, tokenizer = load_model(exported / "bytes", GPT)
    block = model.transformer.h[0]
    if change == "norm":
        block.ln_1 = torch.nn.RMSNorm(model.config.n_embd)
    else:
        block.mlp.gelu = torch.nn.ReLU()
    with pytest.raises(UserError, match="model.py no longer computes the logits of"):
        save_gpt2(model, tmp_path / "out", tokenizer)
    assert names(tmp_path) == []


def test_a_checkpoint_without_run_json(exported):
    (exported / "moved.pt").write_bytes((exported / "own" / "model_000008.pt").read_bytes())
    export("--checkpoint", "moved.pt", "--output", "new/moved", cwd=exported)
    assert "| checkpoint | moved.pt |" in (exported / "new" / "moved" / "README.md").read_text()


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(n_inner=50), "size mismatch"),
        (dict(n_positions=9), r"wpe.weight has the shape \(8, 8\), but config.json needs \(9, 8\)"),
        (dict(n_head=0), ""),
    ],
)
def test_another_directory_of_hugging_face_is_refused(tmp_path, settings, message):
    """n_inner is the width of the MLP, which is 4 n_embd in GPT-2."""
    shape = dict(n_layer=1, n_head=2, n_embd=8, n_positions=8, vocab_size=50257)
    # The weights have valid shapes. Only config.json, below, contains the values of `settings`.
    saved = settings | dict(n_head=2, n_positions=8)
    hf = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape | saved))
    hf.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(
        UserError, match=f"transformers cannot load it .*{message}.*; use gpt2, "
    ) as e:
        load_model(str(tmp_path), GPT)
    assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="model.safetensors: give the directory of this file, "):
        load_model(str(tmp_path / "model.safetensors"), GPT)


def test_an_edited_model_card_stays(exported, tmp_path):
    main = importlib.import_module("export").main
    card = shutil.copytree(exported / "bytes-hf", tmp_path / "hf") / "README.md"
    flags = ["--checkpoint", str(exported / "bytes"), "--output", str(card.parent)]
    main(flags)
    edited = card.read_text().replace("# hf\n", "# My model\n")
    card.write_text(edited)
    with pytest.raises(UserError, match="hf: its README.md was edited; move this file away first"):
        main(flags)
    assert card.read_text() == edited and "# My model" in edited


@pytest.mark.parametrize("name, is_own", [("model_best.pt", True), ("a.pt", False), ("hf", False)])
def test_the_card_names_no_facts_of_another_run(tmp_path, name, is_own):
    """A run.json next to a model describes the model only if the model is a checkpoint of a run.

    is_own: whether `name` is the name of such a checkpoint.
    """
    export = importlib.import_module("export")
    (tmp_path / "run.json").write_text('{"device": "NVIDIA H100", "train_config": {"max_lr": 3}}')
    model = GPT(GPTConfig(1, 1, 8, 8, 256))
    config = export.ExportConfig()
    card = export.make_card(tmp_path / name, model, get_tokenizer("bytes"), config)
    assert ("| device | NVIDIA H100 |" in card) == ("| max_lr | 3 |" in card) == is_own


def test_a_damaged_run_json_is_named(tmp_path):
    make_card = importlib.import_module("export").make_card
    model = GPT(GPTConfig(1, 1, 8, 8, 256))
    for damaged in ('{"train_config": [1]}', '{"train_config": null}', "7"):
        (tmp_path / "run.json").write_text(damaged)
        with pytest.raises(UserError, match=r"run\.json: is damaged \(.*\); restore it"):
            make_card(tmp_path / "model_000008.pt", model, None, None)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--output .", "--output .: exists and is not an export; give a new directory"),
        ("--output t.txt", "--output t.txt: exists and is not an export; give a new directory"),
        ("--checkpoint bytes-hf --output bytes-hf", "--output bytes-hf: is also an input; give an"),
        ("--output t.txt/a", "t.txt/a: cannot write (Not a directory)"),
    ],
)
def test_each_mistake_gives_a_one_sentence_error(exported, flags, sentence):
    _, err = export("--checkpoint", "bytes", *flags.split(), cwd=exported, status=2)
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1, err
