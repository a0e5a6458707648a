"""Runs generate.py as a user does."""

import json
import os

import pytest
import torch
from conftest import program, train

from generate import main as generate_main
from model import GPT, GPTConfig
from plaingpt.cli import UserError


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
    assert "log/baby/model_000002.pt, 34,688 parameters, on cpu" in out and out.count("--- sample ") == 3


def test_prompts_from_a_file_and_json(trained):
    (trained / "prompts.txt").write_text("MARLOW: \nWhere is café?\n", encoding="utf-8")
    out, _ = generate("--checkpoint", "log/baby", "--prompts", "prompts.txt", "--max_new_tokens", 8, "--json", "out.json",
                      "--temperature", 0, cwd=trained)
    results = json.loads((trained / "out.json").read_text(encoding="utf-8"))
    assert [r["prompt"] for r in results] == ["MARLOW: ", "Where is café?"]
    for r in results:
        assert len(r["texts"]) == 2 and r["texts"][0] == r["texts"][1]  # greedy
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
    monkeypatch.setattr(GPT, "generate", lambda *args: torch.empty(2**60))
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
