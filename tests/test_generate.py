"""generate.py, run as a user runs it."""

import json
import os

import pytest
import torch
from conftest import program, train

from model import GPT, GPTConfig


def generate(*flags, **options):
    return program("--device", "cpu", *flags, program="generate.py", **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generate")
    train("--max_steps", 2, "--save_every", 1, cwd=directory)
    return directory


def test_writes_from_the_newest_checkpoint(trained):
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


def test_seed_decides(trained):
    def texts(*flags):
        generate("--max_new_tokens", 30, "--json", "out.json", *flags, cwd=trained)
        return json.loads((trained / "out.json").read_text(encoding="utf-8"))[0]["texts"]

    assert texts("--seed", 1) == texts("--seed", 1) != texts("--seed", 2)


def test_writes_from_hugging_face_weights(tmp_path):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=32)).to_hf(tmp_path / "hf")
    out, _ = generate("--model", "hf", "--prompt", "Hello, I'm a language model,", "--max_new_tokens", 40, cwd=tmp_path)
    assert "--- sample 1 ---\nHello, I'm a language model," in out


@pytest.mark.parametrize("flags, sentence", [
    (["--checkpoint", "nowhere.pt"], "no checkpoint in nowhere.pt"),
    (["--checkpoint", "a", "--model", "b"], "exclude each other"),
    (["--prompt", "a", "--prompts", "b"], "exclude each other"),
    (["--json", "nowhere/out.json"], "there is no directory nowhere"),
    (["--prompts", "nowhere.txt"], "--prompts nowhere.txt: cannot be read"),
    (["--top_p", "0"], "--top_p 0.0 cannot be"),
    (["--num_samples", "0"], "--num_samples 0 cannot be: it is a number from 1 up"),
    (["--model", "no/where"], "no/where: neither a checkpoint nor a GPT-2"),
    (["--prompt"], "--prompt: expected one argument"),
])
def test_mistakes_are_answered_by_one_sentence(flags, sentence, trained):
    _, err = generate(*flags, cwd=trained, status=2)
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1, err


def test_without_a_checkpoint_says_how_to_get_one(tmp_path):
    _, err = generate(cwd=tmp_path, status=2)
    assert err == "error: no checkpoint in log: python train_gpt2.py makes one, or give --checkpoint FILE or --model gpt2\n"
