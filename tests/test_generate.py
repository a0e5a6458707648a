"""Runs generate.py as a user does."""

import itertools
import json
import os

import pytest
import torch
from conftest import program, spawn, train

from generate import GenerateConfig, answer_prompts, store_by_columns, write_texts
from generate import main as generate_main
from model import GPT, GPTConfig
from plaingpt.checkpoint import load_model
from plaingpt.cli import UserError
from tokenizer import get_tokenizer


def generate(*flags, **options):
    return program("--device", "cpu", *flags, program="generate.py", **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generate")
    train("--max_steps", 2, "--save_every", 1, cwd=directory)
    return directory


def test_generates_from_the_newest_checkpoint(trained):
    os.utime(trained / "log" / "baby" / "model_000001.pt", (1, 1))
    out, _ = generate("--max_new_tokens", 20, "--num_samples", 3, cwd=trained)
    assert "log/baby/model_000002.pt, 34,688 parameters, " in out and out.count("--- sample ") == 3


def test_prompts_from_a_file_and_json(trained):
    (trained / "prompts.txt").write_text("MARLOW: \nWhere is café?\n", encoding="utf-8")
    out, _ = generate("--checkpoint", "log/baby", "--prompts", "prompts.txt", "--max_new_tokens", 8, "--json", "out.json",
                      "--temperature", 0, cwd=trained)
    results = json.loads((trained / "out.json").read_text(encoding="utf-8"))
    assert [r["prompt"] for r in results] == ["MARLOW: ", "Where is café?"]
    for r in results:
        assert len(r["texts"]) == 1  # greedy: a second text would be the same
        assert r["texts"][0].startswith(r["prompt"]) and r["texts"][0] in out


def test_the_seed_determines_the_samples(trained):
    def texts(*flags):
        generate("--max_new_tokens", 30, "--json", "out.json", *flags, cwd=trained)
        return json.loads((trained / "out.json").read_text(encoding="utf-8"))[0]["texts"]

    assert texts("--seed", 1) == texts("--seed", 1) != texts("--seed", 2)


def test_generates_from_hugging_face_weights(tmp_path):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=32)).to_hf(tmp_path / "hf")
    out, _ = generate("--model", "hf", "--prompt", "Hello, I'm a language model,", "--max_new_tokens", 40, cwd=tmp_path)
    assert "--- sample 1 ---\nHello, I'm a language model," in out


@pytest.mark.parametrize("flags, sentence", [
    (["--checkpoint", "nowhere.pt"], "no checkpoint in nowhere.pt"),
    (["--checkpoint", "a", "--model", "b"], "--model and --checkpoint exclude each other"),
    (["--prompt", "a", "--prompts", "b"], "--prompt and --prompts exclude each other"),
    (["--json", "nowhere/out.json"], "--json nowhere/out.json: cannot write there"),
    (["--prompts", "nowhere.txt"], "--prompts nowhere.txt: cannot be read (No such file or directory)"),
    (["--top_p", "0"], "--top_p 0.0: must be above 0 and at most 1"),
    (["--num_samples", "0"], "--num_samples 0: must be at least 1"),
    (["--model", "no/where"], "no/where: transformers cannot load a GPT-2 from it"),
    (["--prompt"], "--prompt: expected one argument"),
])
def test_each_mistake_gives_a_one_sentence_error(flags, sentence, trained):
    _, err = generate(*flags, cwd=trained, status=2)
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1, err


def test_an_empty_prompt_equals_no_prompt(trained):
    (trained / "blank.txt").write_text("\nROSE: \n")
    generate("--prompts", "blank.txt", "--max_new_tokens", 9, "--json", "out.json", cwd=trained)
    blank = json.loads((trained / "out.json").read_text(encoding="utf-8"))[0]
    generate("--max_new_tokens", 9, "--json", "out.json", cwd=trained)
    assert blank == json.loads((trained / "out.json").read_text(encoding="utf-8"))[0]


def test_invalid_utf8_in_a_prompt_is_replaced(trained):
    out, _ = generate("--prompt", "caf\udce9", "--max_new_tokens", 0, "--json", "out.json", cwd=trained)
    assert "--- sample 0 ---\ncaf\ufffd\n" in out and json.loads((trained / "out.json").read_text())[0]["prompt"] == "caf\ufffd"


def test_out_of_memory_gives_a_one_sentence_error(trained, monkeypatch):
    monkeypatch.setattr(GPT, "stream", lambda *args: torch.empty(2**60))
    monkeypatch.chdir(trained)
    with pytest.raises(UserError, match="^--num_samples 2: out of memory; give fewer$"):
        generate_main(["--device", "cpu"])


def test_a_missing_checkpoint_error_names_the_remedy(tmp_path):
    _, err = generate(cwd=tmp_path, status=2)
    assert err == "error: no checkpoint in log; python train_gpt2.py makes one, or give --checkpoint FILE\n"


def test_invalid_utf8_in_a_file_of_prompts_is_replaced(trained):
    (trained / "latin.txt").write_bytes(b"caf\xe9\n")
    out, _ = generate("--prompts", "latin.txt", "--max_new_tokens", 0, cwd=trained)
    assert "--- sample 0 ---\ncaf\ufffd\n" in out


def test_prompts_of_different_lengths_get_the_same_texts_as_alone(trained):
    """Also beyond the context of 32 bytes, where the window slides."""
    prompts = ["MARLOW: ", "", "A longer prompt, 30 bytes long", "é"]
    (trained / "many.txt").write_text("".join(f"{p}\n" for p in prompts))

    def texts(*flags):
        generate("--dtype", "float32", "--max_new_tokens", 40, "--json", "out.json", *flags, cwd=trained)
        return json.loads((trained / "out.json").read_text())

    for flags in (["--temperature", 0], ["--top_p", 0.9, "--num_samples", 3]):
        together = texts("--prompts", "many.txt", *flags)
        assert together == [result for prompt in prompts for result in texts("--prompt", prompt, *flags)]


class Script:
    """A model whose stream() is fixed: the tokens of each row, one after the other."""

    def __init__(self, *rows):
        self.rows, self.lm_head = rows, torch.nn.Linear(1, 1)

    def stream(self, idx, n, *args):
        for column in list(zip(*self.rows))[:n]:
            yield torch.tensor(column)[:, None]


class Screen:
    """Records what is written between two calls of flush()."""

    def __init__(self, parts):
        self.parts = parts

    def write(self, text):
        self.parts.append(text)

    def flush(self):
        pass


@pytest.mark.parametrize("flags, parts, whole", [
    ({}, ["A", "é", "中", "🙂", "B"], "Aé中🙂B"),
    (dict(stop="🙂"), ["A", "é", "中"], "Aé中"),
    (dict(stop="中!"), ["A", "é", "中🙂", "B"], "Aé中🙂B"),  # 中 may begin the stop text
    (dict(stop="é"), ["A"], "A"),
])
def test_characters_appear_whole_and_stop_ends_a_text(flags, parts, whole, monkeypatch):
    tokenizer, shown = get_tokenizer("bytes"), []
    config = GenerateConfig(num_samples=1, **flags)
    monkeypatch.setattr("sys.stdout", Screen(shown))
    texts = write_texts(Script(tokenizer.encode("Aé中🙂B")), tokenizer, [[10, *tokenizer.encode("中!é")]], config, ["title\n"])
    assert texts == [dict(prompt="中!é", texts=["中!é" + whole])] and shown[0] == "title\n中!é"
    assert [part for part in shown[1:] if part.strip()] == parts


def test_half_a_character_at_the_end_becomes_a_mark(monkeypatch):
    tokenizer, shown = get_tokenizer("bytes"), []
    monkeypatch.setattr("sys.stdout", Screen(shown))
    texts = write_texts(Script([0x41, 0xE4, 0xB8]), tokenizer, [[10]], GenerateConfig(num_samples=1), ["t\n"])
    assert texts[0]["texts"] == ["A\ufffd"] and "".join(shown) == "t\nA\ufffd\n\n"


@pytest.mark.parametrize("ignore", [False, True])
def test_end_of_text_ends_a_text(ignore, monkeypatch):
    tokenizer = get_tokenizer("gpt2")
    monkeypatch.setattr("sys.stdout", Screen([]))
    rows = [[*tokenizer.encode("Hello"), 50256, *tokenizer.encode(" world")], [50256, *tokenizer.encode(" a b")]]
    texts = write_texts(Script(*rows), tokenizer, [[50256]], GenerateConfig(ignore_end=ignore), ["0\n", "1\n"])
    assert texts[0]["texts"] == (["Hello<|endoftext|> world", "<|endoftext|> a b"] if ignore else ["Hello", ""])


def test_interactive_mode_reads_prompts_until_the_end(trained):
    (process,) = spawn("--device", "cpu", "--interactive", "--max_new_tokens", 5, "--checkpoint", "log/baby",
                       "--json", "chat.json", cwd=trained, program="generate.py", fresh=True)
    out, err = process.communicate("MARLOW: \n" + "x" * 40 + "\n你好\n", timeout=120)
    assert process.returncode == 0, err
    assert [r["prompt"] for r in json.loads((trained / "chat.json").read_text())] == ["MARLOW: ", "你好"]
    assert "error: the prompt: has 40 tokens; give at most 31" in out and out.count("> ") == 4
    assert "> MARLOW: \nMARLOW: " not in out and "> MARLOW: \n" in out  # echoed, because no terminal does it


def test_ctrl_c_ends_a_text_and_not_the_program(trained, monkeypatch, capsys):
    """As a signal would: in the middle of a text, and at the prompt."""
    model, tokenizer = load_model(str(trained / "log/baby"))
    real, prompts = GPT.stream, iter(["a", KeyboardInterrupt(), "b", EOFError()])

    def interrupted(*args):
        yield from itertools.islice(real(*args), 3)
        raise KeyboardInterrupt

    def read(_):
        prompt = next(prompts)
        if isinstance(prompt, str):
            return prompt
        raise prompt

    monkeypatch.setattr(GPT, "stream", interrupted)
    monkeypatch.setattr("builtins.input", read)
    results = answer_prompts(model.eval(), tokenizer, GenerateConfig(num_samples=1))
    assert [result["prompt"] for result in results] == ["a", "b"]
    assert all(len(result["texts"]) == 1 and len(result["texts"][0]) > 1 for result in results)


def test_weights_stored_by_columns_give_the_same_logits():
    model, idx = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=64, vocab_size=300)), torch.arange(12)[None]
    before = model(idx)[0]
    store_by_columns(model)
    torch.testing.assert_close(model(idx)[0], before)
    assert model.lm_head.weight is model.transformer.wte.weight and model.lm_head.weight.stride() == (1, 300)
    assert model.transformer.h[0].attn.c_attn.weight.stride() == (1, 96)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generation_equals_transformers(tmp_path, dtype):
    """Greedy tokens of the same weights, with padding and without."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=300))
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    model.to_hf(tmp_path)
    peer = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, dtype=getattr(torch, dtype)).eval()
    model.to(getattr(torch, dtype)).eval()
    rows = [torch.randint(300, (n,)).tolist() for n in (3, 11, 7)]
    n = 40 if dtype == "float32" else 1  # bfloat16 rounds away what decides between two tokens
    expected = [peer.generate(torch.tensor([row]), max_new_tokens=n, do_sample=False, pad_token_id=0)[0, len(row):].tolist() for row in rows]
    idx, padding = torch.tensor([[0] * (11 - len(row)) + row for row in rows]), torch.tensor([11 - len(row) for row in rows])
    found = model.generate(idx, n, temperature=0, padding=padding, n_prompts=3)[:, 11:].tolist()
    assert found == expected
    assert [model.generate(torch.tensor([row]), n, temperature=0)[0, len(row):].tolist() for row in rows] == expected
