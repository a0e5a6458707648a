"""Runs generate.py as a user does."""

import itertools
import json
import subprocess
from types import SimpleNamespace

from plaingpt.errors import UserError
from plaingpt.pretrained import save_gpt2
from plaingpt.tokenizer import get_tokenizer

import pytest
import torch
from conftest import ROOT, program, randomise, train

import generate
from generate import GenerateConfig, write_texts
from model import GPT, GPTConfig


def generate_json(*flags, cwd):
    """Runs generate.py. Returns the content of the file of --json."""
    program("--device", "cpu", *flags, "--json", "out.json", cwd=cwd, program="generate.py")
    return json.loads((cwd / "out.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generate")
    train("--max_steps", 2, "--save_every", 1, "--vocab_size", 300, cwd=directory)  # 44 unused ids
    return directory


@pytest.mark.slow
def test_prompts_of_a_file_get_the_same_texts_as_alone(trained):
    """A prompt in a file of --prompts gets the same texts as the same prompt in --prompt.

    The texts are longer than the context of 32 bytes, so the window slides. The file begins with a
    byte order mark. The last prompt contains a Unicode line separator, which must not end the
    prompt.
    """
    prompts = ["MARLOW: ", "", "A longer prompt, 30 bytes long", "é\u2028b"]
    (trained / "many.txt").write_text("\n".join(prompts) + "\n", "utf-8-sig")
    for flags in (["--temperature", 0], ["--top_p", 0.9, "--num_samples", 3]):
        flags += ["--dtype", "float32", "--max_new_tokens", 40]
        together = generate_json("--prompts", "many.txt", *flags, cwd=trained)
        assert [result["prompt"] for result in together] == prompts
        for prompt, result in zip(prompts, together):
            assert [result] == generate_json("--prompt", prompt, *flags, cwd=trained)
            assert len(result["texts"]) == (1 if flags[0] == "--temperature" else 3)
            assert all(text.startswith(prompt) for text in result["texts"])
    assert together[1:2] == generate_json(*flags, cwd=trained)  # no prompt
    assert together[1:2] != generate_json(*flags, "--seed", 7, cwd=trained)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--prompts missing.txt", "--prompts missing.txt: cannot be read .No such file or direct"),
        ("--prompts latin.txt", "--prompts latin.txt: cannot be read .*; give a UTF-8 text file$"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used(flags, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(UserError, match=sentence):
        generate.main(flags.split())


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.csv"])
def test_prompts_are_a_field_of_records(name, tmp_path):
    texts = {
        "pairs.jsonl": '{"prompt": "1+1=", "response": "2"}\n\n{"prompt": "a, b"}\n',
        "pairs.csv": 'prompt,response\n1+1=,2\n"a, b",\n',
    }
    (tmp_path / name).write_text(texts[name])
    assert generate.read_prompts(str(tmp_path / name)) == ["1+1=", "a, b"]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit(143)])
def test_a_stopped_program_writes_the_texts_so_far(stop, trained, monkeypatch, tmp_path):
    real = generate.write_texts

    def write_texts(model, tokenizer, ids, *args):
        if len(ids) == 3:  # the third prompt, "cc"
            raise stop
        return real(model, tokenizer, ids, *args)

    monkeypatch.setattr(generate, "write_texts", write_texts)
    (tmp_path / "many.txt").write_text("a\nb\ncc\nd\n")
    flags = f"--prompts {tmp_path}/many.txt --json {tmp_path}/out.json --max_new_tokens 2"
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        generate.main([*flags.split(), "--checkpoint", str(trained / "log/baby")])
    results = json.loads((tmp_path / "out.json").read_text())
    assert [result["prompt"] for result in results] == ["a", "b"]


@pytest.mark.slow
def test_sigterm_ends_a_program_like_ctrl_c(trained, python):
    flags = "--checkpoint log/baby --device cpu --max_new_tokens 100000 --json stopped.json".split()
    command = [python, ROOT / "generate.py", *flags]
    with subprocess.Popen(command, cwd=trained, stdout=subprocess.PIPE) as running:
        while not running.stdout.readline().startswith(b"--- sample 0"):
            pass
        running.terminate()
        running.stdout.read()
    assert running.returncode == 143
    assert json.loads((trained / "stopped.json").read_text()) == []


@pytest.mark.parametrize("output", ["run/model_000001.pt", "run/run.json", "prompts.txt"])
def test_json_replaces_no_input(output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("run/model_000001.pt", "run/run.json", "prompts.txt"):
        (tmp_path / name).touch()
    flags = ["--checkpoint", "run", "--prompts", "prompts.txt", "--json", output]
    with pytest.raises(UserError, match=f"--json {output}: is also an input; give another file"):
        generate.main(flags)


def script(monkeypatch, *rows):
    """Makes generate.py generate the tokens in `rows`. Returns a stand-in for the model.

    rows: one list of token ids for each sample.
    """

    def tokens(model, idx, n, **options):
        # cuDNN would prepare a plan for each length, which is slow.
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        for column in list(zip(*rows))[:n]:
            yield torch.tensor(column)[:, None]

    monkeypatch.setattr(generate, "generate_tokens", tokens)
    return SimpleNamespace(lm_head=torch.nn.Linear(1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "ids, flags, parts, whole",
    [
        ("Aé中🙂B", {}, ["A", "é", "中", "🙂", "B"], "Aé中🙂B"),
        ("Aé中🙂B", dict(stop="🙂"), ["A", "é", "中"], "Aé中"),
        ("Aé中🙂B", dict(stop="中!"), ["A", "é", "中", "🙂B\n"], "Aé中🙂B"),
        ("Aé中🙂B", dict(stop="é"), ["A"], "A"),
        ("aaab", dict(stop="aab"), ["a\n"], "a"),
        ([0x41, 0xE4, 0xB8], {}, ["A", "\ufffd\n"], "A\ufffd"),  # the text ends within a character
    ],
)
def test_characters_appear_whole_and_stop_ends_a_text(ids, flags, parts, whole, monkeypatch):
    tokenizer, printed = get_tokenizer("bytes"), []
    monkeypatch.setattr("builtins.print", lambda text, **options: printed.append(text))
    model = script(monkeypatch, tokenizer.encode(ids) if isinstance(ids, str) else ids)
    prompt = [tokenizer.end_of_text, *tokenizer.encode("中!é")]
    result = write_texts(model, tokenizer, prompt, GenerateConfig(**flags), seed=1)
    assert result == dict(prompt="中!é", texts=["中!é" + whole])
    assert printed[0] == "--- sample 0 ---\n中!é"
    assert [part for part in printed[1:] if part.strip()] == parts


@pytest.mark.parametrize(
    "ignore, texts",
    [(False, ["Hello", ""]), (True, ["Hello<|endoftext|> world", "<|endoftext|> a b"])],
)
def test_end_of_text_ends_a_text(ignore, texts, monkeypatch):
    tokenizer = get_tokenizer("gpt2")
    model = script(
        monkeypatch,
        [*tokenizer.encode("Hello"), 50256, *tokenizer.encode(" world")],
        [50256, *tokenizer.encode(" a b")],
    )
    config = GenerateConfig(num_samples=2, ignore_end=ignore)
    result = write_texts(model, tokenizer, [50256], config, seed=1)
    assert result["texts"] == texts


def test_the_advice_for_too_little_memory_helps_with_one_sample(monkeypatch):
    def fail(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")

    model = script(monkeypatch, [])
    monkeypatch.setattr(generate, "generate_tokens", fail)
    with pytest.raises(UserError, match="^--num_samples 1: out of memory; .* or a smaller model$"):
        write_texts(model, get_tokenizer("bytes"), [10], GenerateConfig(), seed=1)


@pytest.mark.slow
def test_interactive_mode_reads_prompts_until_the_end(trained, python):
    flags = "--device cpu --interactive --max_new_tokens 5 --json chat.json".split()
    done = subprocess.run(
        [python, ROOT / "generate.py", *flags],
        cwd=trained,
        input="MARLOW: \n" + "x" * 40 + "\n你好\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    out = done.stdout
    results = json.loads((trained / "chat.json").read_text())
    assert [result["prompt"] for result in results] == ["MARLOW: ", "你好"]
    assert "...: contains 40 tokens; give at most 31\n" in out and out.count("> ") == 4


@pytest.mark.slow
def test_ctrl_c_ends_a_text_and_not_the_program(trained, monkeypatch, tmp_path):
    """Raises KeyboardInterrupt, as Ctrl-C does, while a text is generated and a prompt is read."""
    real, prompts = generate.generate_tokens, iter(["a", KeyboardInterrupt(), "a", EOFError()])

    def interrupted(*args, **options):
        yield from itertools.islice(real(*args, **options), 3)
        raise KeyboardInterrupt

    def read(_):
        prompt = next(prompts)
        if isinstance(prompt, str):
            return prompt
        raise prompt

    monkeypatch.setattr(generate, "generate_tokens", interrupted)
    monkeypatch.setattr("builtins.input", read)
    flags = "--interactive --temperature 2 --top_k 0 --device cpu --dtype float32".split()
    flags += ["--checkpoint", str(trained / "log/baby"), "--json", str(tmp_path / "chat.json")]
    generate.main(flags)
    texts = [result["texts"][0] for result in json.loads((tmp_path / "chat.json").read_text())]
    assert [text[0] for text in texts] == ["a", "a"] and len(texts[0]) > 1
    assert texts[0] != texts[1]  # each prompt uses a different seed


def test_the_first_token_in_bfloat16_equals_transformers(tmp_path):
    """Later bfloat16 tokens may differ by rounding. test_export.py compares whole float32 texts."""
    transformers = pytest.importorskip("transformers")
    model = randomise(GPT(GPTConfig(2, 2, 32, block_size=64, vocab_size=300)))
    save_gpt2(model, tmp_path, get_tokenizer("bytes"))
    peer = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    model.to(torch.bfloat16).eval()
    for T in (3, 11, 7):
        idx = torch.randint(300, (2, T))  # (B, T)
        expected = peer.generate(idx, max_new_tokens=1, do_sample=False, pad_token_id=0)
        assert model.generate(idx, 1, temperature=0).tolist() == expected.tolist()
