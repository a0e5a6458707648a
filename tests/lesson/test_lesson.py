"""Tests the programs of lesson/: each program runs, and its docstring lists what is new.

Lessons 11 to 14 have the same losses as train_gpt2.py.
"""

import ast
import contextlib
import difflib
import functools
import io
import json
import math
import re
import sys

from plaingpt.scoring.program import run_benchmark
from plaingpt.tokenizer import get_tokenizer

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, program
from safetensors.torch import save_file
from stand_in_hub import stand_in_hub

import hellaswag
import train_gpt2
from model import GPT, GPTConfig

LESSONS = sorted((ROOT / "lesson").glob("[0-9]*.py"))  # omits check.py, which is not a lesson
TRAINING = LESSONS[:14]  # the other lessons write tokens, or load weights
RESUME, TOKENS, OPENAI = 14, 15, 16
BABY = GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=64, vocab_size=256)


@pytest.fixture(autouse=True)
def beside_the_text(monkeypatch):
    """Runs each test in the root of the repository, where the programs of the lesson read files."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module", autouse=True)
def checkpoint(tmp_path_factory):
    """Sets the path of lesson 14's checkpoint, and writes the text that lessons 1 to 14 read.

    The text is short, because each program computes the loss on the whole validation split.
    """
    global CHECKPOINT, TEXT
    CHECKPOINT = tmp_path_factory.mktemp("lesson") / "lesson.pt"
    TEXT = CHECKPOINT.with_name("input.txt")
    TEXT.write_bytes((ROOT / "input.txt").read_bytes()[:50_000])


def lesson(number):
    text = LESSONS[number - 1].read_text().replace('"log/lesson.pt"', repr(str(CHECKPOINT)))
    return text if number > RESUME else text.replace('"input.txt"', repr(str(TEXT)))


def edit(text, old, new):
    assert text.count(old) == 1, old
    return text.replace(old, new)


def with_constants(text, **constants):
    for name, value in constants.items():
        text, n = re.subn(rf"^{name} = [^#\n]+", f"{name} = {value}  ", text, flags=re.M)
        assert n == 1, name
    return text


def for_losses(text):
    """Edits a program, so that it prints the loss of each step with more digits.

    The edited program also prints shorter samples, to save time.
    """
    text = edit(text, "step % 50 == 0", "True").replace(".4f", ".9f")
    return edit(edit(text, "sample(300)", "sample(10)"), "sample(40)", "sample(5)")


def losses_of(out):
    """Reads the output of a program. Returns (losses of the steps, last validation loss)."""
    train = [float(loss) for loss in re.findall(r"^step +\d+ \| loss (\S+)", out, re.M)]
    return train, float(re.findall(r" \| val loss (\S+)", out)[-1])


def run(text, *flags, names=None):
    """Runs a program in this process. Returns the output of the program.

    names: a dict in which the program stores its global variables.
    """
    out = io.StringIO()
    names = {} if names is None else names
    names["__name__"] = "lesson"
    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lesson.py", *map(str, flags)])
        exec(compile(text, "lesson.py", "exec"), names)
    return out.getvalue()


@functools.cache
def losses(number, *flags, **constants):
    return losses_of(run(for_losses(with_constants(lesson(number), **constants)), *flags))


def rows_of_page():
    """Returns the table of docs/lesson.md: {name of a lesson's file: the row's other cells}."""
    page = (ROOT / "docs" / "lesson.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `lesson/(\d\d_\w+)\.py` \|(.*)\|$", page, re.M))


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_each_file_runs_alone(path):
    out = run(for_losses(with_constants(lesson(TRAINING.index(path) + 1), max_steps=2)))
    train, val = losses_of(out)
    assert len(train) == 2 and abs(train[0] - math.log(256)) < 0.6 and 3 < val < train[0]
    assert out.split("parameters\n")[1].startswith("MARLOW: ")
    *_, parameters, val_loss, _ = rows_of_page()[path.stem].split("|")
    assert f"\n{parameters.strip()} parameters" in out
    assert f"\nAfter 300 steps, the validation loss is {val_loss.strip()}.\n" in path.read_text()


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_what_each_file_imports(path):
    tree = ast.parse(path.read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
    allowed = {"glob", "math", "numpy", "os", "sys", "time", "torch"}
    if path not in TRAINING:
        allowed |= {"argparse", "base64", "json", "tiktoken", "safetensors.torch"}
    assert imported <= allowed


def parts(text):
    """Splits a program into pieces of code: {name: code}.

    The names are "imports", "constants", "the loop", the functions and classes, and the methods of
    GPT.
    """
    lines = text.splitlines()
    found = {"imports": "", "constants": "", "the loop": ""}
    place = "imports"
    for node in ast.parse(text).body[1:]:  # the first node is the docstring
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        code = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, ast.ClassDef) and node.name == "GPT":
            for method in node.body[1:]:
                code = "\n".join(lines[method.lineno - 1 : method.end_lineno])
                found[f"GPT.{method.name}"] = code
            place = "the loop"
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = code
        else:
            if isinstance(node, ast.Assign) and place == "imports":
                place = "constants"
            found[place] += code + "\n"
    return found


def difference(number):
    """Returns the lines of a lesson and of the previous lesson, with the marks of difflib.ndiff."""
    return list(difflib.ndiff(lesson(number - 1).splitlines(), lesson(number).splitlines()))


def count_changed_lines(number):
    return sum(line.startswith(("+ ", "- ")) for line in difference(number))


def constants_of(text):
    return set(re.findall(r"^(\w+) = ", parts(text)["constants"], re.M))


def listed(text, word):
    """Returns the names that the docstring of a program lists after "New:" or "Changed:".

    word: "New" or "Changed".
    """
    doc = " ".join(ast.get_docstring(ast.parse(text)).split())
    found = re.search(rf"{word}: (.*?)\.( |$)", doc)
    if not found or found[1].startswith("nothing"):
        return set()
    names = re.sub(r";.*", "", found[1])  # omits a remark, such as "; random_batch is gone"
    return set(re.sub(r" \(.*?\)", "", names).split(", "))


@pytest.mark.parametrize("number", range(2, 15))
def test_the_docstring_says_what_is_new(number):
    """The docstring of each lesson names exactly what is new or changed since the previous lesson.

    The names are functions, classes, methods of GPT, and the loop. "New" may also list constants.
    If you change a function in one lesson, make the same change in all lessons that contain it.
    """
    before, after = lesson(number - 1), lesson(number)
    old, new = parts(before), parts(after)
    added = new.keys() - old.keys()
    constants = constants_of(after) - constants_of(before)
    changed = {name for name in new.keys() & old.keys() if new[name] != old[name]}
    changed -= {"imports", "constants"}
    assert listed(after, "New") - constants == added
    for name in sorted(changed - listed(after, "Changed")):
        pytest.fail(
            f"lessons {number - 1} and {number} differ in {name}:\n"
            + "\n".join(difflib.ndiff(old[name].splitlines(), new[name].splitlines()))
        )
    assert listed(after, "Changed") == changed
    assert count_changed_lines(number) <= 105


def test_the_model_of_the_last_file_is_that_of_the_lesson():
    old, new = parts(lesson(RESUME)), parts(lesson(OPENAI))
    for name in ("CausalSelfAttention", "MLP", "Block"):
        assert new[name] == old[name]
    functions = {name for name in new if "." not in name} - {"imports", "constants", "the loop"}
    own = functions - {"CausalSelfAttention", "MLP", "Block", "encode", "decode"}
    assert own == listed(lesson(OPENAI), "New")


@pytest.mark.parametrize("number", range(7, 15))
def test_the_model_is_that_of_model_py(number):
    names = {}
    exec(lesson(number).rpartition("model = GPT()")[0].rpartition("\n")[0], names)
    ours = names["GPT"]()
    theirs = GPT(BABY)
    theirs.init_weights(1337)
    pairs = list(zip(ours.named_parameters(), theirs.named_parameters(), strict=True))
    assert sum(p.numel() for p in ours.parameters()) == 437_760
    for (name, p), (full_name, q) in pairs:
        assert full_name == f"transformer.{name}" and torch.equal(p, q), name
        p.data += 0.1 * torch.randn(p.shape)  # a bias that is still 0 would hide an error
        q.data.copy_(p.data)
    idx = torch.randint(256, (2, 64))
    torch.testing.assert_close(ours(idx)[0], theirs(idx)[0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(ours(idx, idx)[1], theirs(idx, idx)[1])


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Runs train_gpt2.py for 4 steps with each optimizer.

    Returns {optimizer: (losses of the steps, last validation loss)}.
    """
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        # Without this patch, Muon would compute in bfloat16 on some CPUs.
        patch.setattr("plaingpt.muon.has_bfloat16", lambda device: False)
        for optimizer in ("adamw", "muon"):
            directory = tmp_path_factory.mktemp(optimizer)
            flags = (
                "--preset baby --no-shuffle --device cpu --dtype float32 --max_steps 4 "
                "--warmup_steps 2 --max_lr 2e-3 --val_every 0 --sample_tokens 1 --schedule linear "
                f"--min_lr 0 --optimizer {optimizer} --log_dir {directory} --data {TEXT}"
            )
            train_gpt2.main(flags.split())
            log = [line.split() for line in (directory / "log.txt").read_text().splitlines()]
            train = [float(value) for _, stream, value in log if stream == "train"]
            val = [float(value) for _, stream, value in log if stream == "val"]
            found[optimizer] = (train, val[-1])
    return found


def in_processes(text, processes, tmp_path, *flags):
    """Runs a program in this process, or in several processes. Returns the result of losses_of."""
    if processes == 1:
        return losses_of(run(text, *flags))
    (tmp_path / "lesson.py").write_text(text)
    place = dict(cwd=ROOT, program=tmp_path / "lesson.py", processes=processes)
    return losses_of(program(*flags, **place)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, processes, batch_size",
    [(11, 1, 16), (11, 1, 4), (12, 1, 4), (12, 2, 8), (12, 2, 2), (13, 1, 4), (14, 2, 4)],
)
def test_the_last_lessons_have_the_losses_of_train_gpt2(
    real, tmp_path, number, processes, batch_size
):
    """At a high learning rate, rounding errors would grow fast, so the learning rate is low."""
    text = with_constants(
        lesson(number), max_steps=4, warmup_steps=2, max_lr=2e-3, batch_size=batch_size
    )
    text = for_losses(edit(text, "shuffle=True", "shuffle=False"))
    train, val = in_processes(text, processes, tmp_path)
    expected_train, expected_val = real["muon" if number >= 13 else "adamw"]
    assert train == pytest.approx(expected_train, abs=1e-5) and len(train) == 4
    assert val == pytest.approx(expected_val, abs=1e-5)


def test_fast_kernels_and_a_device_change_nothing():
    assert losses(9, max_steps=4)[0] == pytest.approx(losses(8, max_steps=4)[0], abs=1e-5)
    assert losses(10, max_steps=4) == losses(9, max_steps=4)


@pytest.mark.parametrize("number", range(11, 15))
def test_a_batch_size_that_does_not_divide_a_step_is_refused(number):
    # A step of 32 tokens is smaller than one sequence.
    for settings in (dict(batch_size=5), dict(total_batch_size=32)):
        with pytest.raises(SystemExit, match="^total_batch_size is not a multiple of .* x 64$"):
            losses(number, max_steps=1, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_was_stopped_goes_on_with_the_same_losses(tmp_path, processes):
    """A run saves a checkpoint after 2, 4 and 6 steps.

    A second run stops after 5 steps, and then resumes from the checkpoint after 4 steps.
    """
    small = SHORT | dict(max_steps=6, warmup_steps=2)
    text = for_losses(with_constants(lesson(RESUME), **small))
    text = edit(text, "done % 100", "done % 2")
    whole, val = in_processes(text, processes, tmp_path)
    stopped = edit(text, "    began = ", "    if step == 5: raise SystemExit\n    began = ")
    if processes == 1:
        with pytest.raises(SystemExit):
            run(stopped)
    else:
        (tmp_path / "stopped.py").write_text(stopped)
        program(cwd=ROOT, program=tmp_path / "stopped.py", processes=processes)
    rest, val_of_rest = in_processes(text, processes, tmp_path, "--resume")
    if processes == 1:  # a finished run takes no further step
        assert "| loss" not in run(text, "--resume")
    assert len(whole) == 6 and rest == whole[4:] and val_of_rest == val
    # An exercise of docs/lesson.md: without the state of the optimizers, the first loss of a
    # resumed run is the same, but the second loss differs.
    if processes == 1:
        with pytest.raises(SystemExit):
            run(stopped)
        forgetful = edit(text, "        optimizer.load_state_dict(state)", "        pass")
        other, _ = losses_of(run(forgetful, "--resume"))
        assert other[0] == whole[4] and other[1] != whole[5]


def test_gpt2s_tokens_in_shards(tmp_path, monkeypatch):
    """Lesson 15 writes shards with the ids of plainGPT's tokenizer. Lesson 12 reads the shards."""
    text = "It's 12 o'clock.  \u00fcber\r\n" * 30 + "<|endoftext|> is a text here."
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_text("Two", encoding="utf-8")
    folder = repr(str(tmp_path / "tokens"))
    source = with_constants(lesson(TOKENS), folder=folder, shard_size=200)
    out = run(source, tmp_path / "a.txt", tmp_path / "b.txt")
    encode = get_tokenizer("gpt2").encode
    expected = [50256, *encode(text), 50256, *encode("Two")]
    shards = [np.load(path) for path in sorted((tmp_path / "tokens").glob("*.npy"))]
    assert {shard.dtype for shard in shards} == {np.dtype("uint16")}
    # Sorted by name, the validation shard is the last shard. It contains the last ids.
    assert np.concatenate(shards).tolist() == expected
    assert [len(shard) for shard in shards] == [200, 5, 200]
    assert "text_val_000000.npy: 200 ids" in out
    settings = dict(data=folder, vocab_size=50257, n_embd=8, block_size=16, total_batch_size=64)
    train, val = losses(12, max_steps=2, **settings)
    assert len(train) == 2 and abs(train[0] - math.log(50257)) < 0.1 and val < train[0]
    with pytest.raises(SystemExit, match="2 ids fill at most one shard, but two are needed"):
        run(source, tmp_path / "b.txt")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(SystemExit, match="needs tiktoken: pip install tiktoken"):
        run(source)


def test_shards_are_the_same_tokens_as_a_text(tmp_path):
    tokens = np.fromfile(TEXT, dtype=np.uint8).astype(np.uint16)
    cut = len(tokens) * 9 // 10
    np.save(tmp_path / "a_val_000000.npy", tokens[cut:])
    np.save(tmp_path / "a_train_000001.npy", tokens[:1000])
    np.save(tmp_path / "a_train_000002.npy", tokens[1000:cut])
    assert losses(12, max_steps=2, data=repr(str(tmp_path))) == losses(12, max_steps=2)


@pytest.fixture(scope="module")
def random_gpt2(tmp_path_factory):
    """Returns (model, folder). model: a randomly initialized GPT2LMHeadModel of Hugging Face.

    The folder contains the files of the model, and a file with 20 questions.
    """
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    shape = dict(n_layer=2, n_head=2, n_embd=128, n_positions=64)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape)  # so that scores differ by more than rounding errors
    model.save_pretrained(folder)
    words = "the a boat bell river man woman bread soup rain sings eats; turns, runs".split(" ")
    random = np.random.default_rng(0)
    with open(folder / "hs.jsonl", "w") as file:
        for i in range(20):
            context, *endings = [" ".join(random.choice(words, n)) for n in (9, 2, 4, 7, 80)]
            record = dict(ctx=f"{context} {i}.", endings=endings, label=int(random.integers(4)))
            file.write(json.dumps(record) + "\n")
    return model, folder


@pytest.mark.slow
def test_openais_weights_have_the_logits_of_transformers_and_the_scores_of_hellaswag(random_gpt2):
    hf, folder = random_gpt2
    names = {}
    flags = ["--weights", folder / "model.safetensors", "--hellaswag", folder / "hs.jsonl"]
    text = edit(lesson(OPENAI), "generate(idx, 200)", "generate(idx, 20)")
    out = run(text, *flags, names=names)
    assert out.startswith("Hello, I'm a language model,")
    idx = torch.randint(50257, (2, 64))
    with torch.no_grad():
        torch.testing.assert_close(names["model"](idx), hf(idx).logits, atol=1e-3, rtol=1e-4)
    result = folder / "result.json"
    flags = ["--model", folder, "--data", folder / "hs.jsonl", "--json", result]
    flags += ["--dtype", "float32", "--device", "cpu"]
    run_benchmark(hellaswag.BENCHMARK, GPT, list(map(str, flags)))
    found = json.loads(result.read_text())
    expected = []
    for example in found["examples"]:
        answer = np.argmax(np.divide(example["log_likelihood"], example["tokens"]))
        expected.append(answer == example["label"])
    assert names["right"] == expected and 0 < sum(expected) < 20
    score = found["figures"]["acc_norm_token"]
    error = math.sqrt(score * (1 - score) / 20)
    assert f"score {score:.3f} +- {error:.3f}; guessing would score 0.250" in out


def test_openais_weights_come_from_the_hub_once(random_gpt2, tmp_path, monkeypatch):
    _, folder = random_gpt2
    monkeypatch.chdir(tmp_path)
    text = lesson(OPENAI).rpartition("model = GPT()")[0]
    text = text.replace('"plaingpt/', f'"{ROOT}/plaingpt/')
    content = (folder / "model.safetensors").read_bytes()
    with stand_in_hub({"openai-community/gpt2": {"model.safetensors": content}}) as (url, requests):
        monkeypatch.setenv("HF_ENDPOINT", url)
        for _ in range(2):
            names = {}
            run(text, "--weights", "gpt2", names=names)
            assert names["weights"]["h.1.mlp.c_fc.weight"].shape == (512, 128)
        assert len(requests) == 1
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(SystemExit, match="need safetensors: pip install safetensors"):
        run(text, "--weights", "gpt2")
    with pytest.raises(SystemExit, match="no log/x.pt: first run lesson/14_resume.py"):
        run(text, "--weights", "log/x.pt")


@pytest.mark.slow
def test_openais_own_files_have_other_names(random_gpt2, tmp_path):
    """In OpenAI's files on the hub, no name begins with "transformer.".

    The files also contain the masks of attention.
    """
    hf, folder = random_gpt2
    weights = {name.removeprefix("transformer."): p for name, p in hf.state_dict().items()}
    del weights["lm_head.weight"]
    for i in range(2):
        weights[f"h.{i}.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file({name: p.clone() for name, p in weights.items()}, tmp_path / "own.safetensors")
    names = {}
    text = edit(lesson(OPENAI), "questions_from_text(300)", "questions_from_text(3)")
    text = edit(text, "generate(idx, 200)", "generate(idx, 20)")
    run(text, "--weights", tmp_path / "own.safetensors", names=names)
    idx = torch.randint(50257, (1, 64))
    with torch.no_grad():
        torch.testing.assert_close(names["model"](idx), hf(idx).logits, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
def test_a_checkpoint_of_the_lesson_is_scored():
    """After 60 steps, the model chooses the true ending more often than by chance."""
    few = dict(max_steps=60, max_lr=2e-2, batch_size=16, **SHORT)
    run(for_losses(with_constants(lesson(RESUME), **few)))
    text = edit(lesson(OPENAI), "questions_from_text(300)", "questions_from_text(200)")
    out = run(text, "--weights", CHECKPOINT)
    assert out.startswith("MARLOW: ")
    score, error = map(float, re.search(r"score (\S+) \+- (\S+);", out).groups())
    assert score - 3 * error > 0.25


SMALL = dict(n_embd=64, block_size=32)
SHORT = dict(warmup_steps=10, total_batch_size=512, **SMALL)
FEW = dict(max_steps=30, batch_size=4)
MORE = dict(FEW, max_steps=60)
# The exercises of docs/lesson.md. {name: (number of the lesson, old text, new text, change,
# constants of a small model)}. The exercise replaces the old text by the new text. If `change` is
# positive, this raises the validation loss by more than `change`. If `change` is negative, this
# lowers the validation loss by more than the size of `change`. If `change` is None, the validation
# loss stays the same.
EXERCISES = {
    "lr": (1, "lr = 0.03 ", "lr = 0.1 ", -1.0, dict(max_steps=20, batch_size=4)),
    "no mask": (
        2,
        "        scores = scores.masked_fill(is_later, -math.inf)",
        "#",
        -2.0,
        dict(MORE, lr=0.01, n_embd=64, block_size=16),
    ),
    "no positions": (2, " + self.wpe(pos)", "", 0.02, dict(MORE, lr=2e-3, **SMALL)),
    "no stream": (
        4,
        "        x = x + self.attn(self.ln_1(x))\n        return x + self.mlp(self.ln_2(x))",
        "        x = self.attn(self.ln_1(x))\n        return self.mlp(self.ln_2(x))",
        0.05,
        dict(FEW, lr=0.01, **SMALL),
    ),
    "std": (7, "std=0.02)", "std=0.06)", -0.3, dict(MORE, lr=2e-3, n_layer=1, **SMALL)),
    "no warm-up": (8, "warmup_steps = 50", "warmup_steps = 0", 0.1, FEW),
    "no clipping": (8, "parameters(), 1.0)", "parameters(), 1e9)", 0.1, FEW),
    "batch_size": (11, "batch_size = 4 ", "batch_size = 16 ", None, dict(max_steps=15, **SHORT)),
    "no division": (11, "loss = loss / len(starts)", "#", None, dict(max_steps=15, **SHORT)),
    "not orthogonal": (
        13,
        "    x = x / x.norm().clamp(min=1e-7)",
        "    return x / x.norm() * math.sqrt(x.numel())",
        0.2,
        dict(max_steps=60, max_lr=0.02, n_layer=1, **dict(SHORT, total_batch_size=128)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_has_the_result_that_the_page_says(name):
    number, old, new, change, constants = EXERCISES[name]
    text = edit(with_constants(lesson(number), **constants), old, new)
    train, val = losses_of(run(for_losses(text)))
    before, val_before = losses(number, **constants)
    if change is None:
        assert val == pytest.approx(val_before, abs=0.02)
    elif change < 0:
        assert val < val_before + change
    else:
        assert val > val_before + change
    if name == "batch_size":
        assert train == pytest.approx(before, abs=1e-3)
    if name == "no division":
        assert train[0] == pytest.approx(4 * before[0], abs=1e-3)


@pytest.mark.slow
def test_processes_that_take_the_same_sequences_show_no_error(tmp_path):
    """In an exercise of lesson 12, all processes read the same sequences.

    The edited program raises no error, but its losses differ from the losses of the lesson.
    """
    text = for_losses(with_constants(lesson(12), max_steps=10, **SHORT))
    wrong = edit(text, "position + rank * batch_size, position", "position, position")
    found, _ = in_processes(wrong, 2, tmp_path)
    differences = np.subtract(found, losses_of(run(text))[0])
    assert np.abs(differences).max() > 0.01


GAP = "@@ … @@"  # on the page, this line separates two hunks of a diff


def find_lines(lines, wanted, start):
    """Finds consecutive lines, `wanted`, in `lines`. Returns the index of the next line.

    start: the index at which the search begins.
    """
    for i in range(start, len(lines) - len(wanted) + 1):
        if lines[i : i + len(wanted)] == wanted:
            return i + len(wanted)
    pytest.fail("not next to each other in the file:\n" + "\n".join(wanted))


@pytest.mark.parametrize("page", ["docs/lesson.md", "docs/lesson.zh.md"])
def test_each_diff_of_the_page_shows_neighbouring_lines_of_the_files(page):
    """The lines of a hunk are adjacent in the file. The hunks are in the order of the file."""
    sections = re.split(r"^## ", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)[1:]
    n_blocks = 0
    for section in sections:
        for block in re.findall(r"^```diff\n(.*?)^```", section, re.M | re.S):
            number = int(section.split(".")[0])
            changed = difference(number)
            before, after = lesson(number - 1).splitlines(), lesson(number).splitlines()
            old_end = new_end = 0
            for hunk in block.removesuffix("\n").split(f"\n{GAP}\n"):
                lines = hunk.splitlines()
                assert all(f"{line[0]} {line[1:]}" in changed for line in lines), lines
                old = [line[1:] for line in lines if line[0] in " -"]
                new = [line[1:] for line in lines if line[0] in " +"]
                old_end = find_lines(before, old, old_end)
                new_end = find_lines(after, new, new_end)
            n_blocks += 1
    assert n_blocks == 13


def test_the_page_has_the_numbers_of_changed_lines():
    rows = rows_of_page()
    assert [*rows] == [path.stem for path in LESSONS]
    for number in range(2, len(TRAINING) + 1):
        changed = rows[LESSONS[number - 1].stem].split("|")[1]
        assert count_changed_lines(number) == int(changed), number


@pytest.mark.parametrize("page", ["docs/lesson.md", "docs/lesson.zh.md"])
def test_the_two_columns_of_the_bridge_are_lines_of_the_two_programs(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    table = text[text.index("| `block_size = 64` |") :].partition("\n\n")[0].splitlines()
    assert len(table) > 15
    trainer = (ROOT / "train_gpt2.py").read_text()
    for row in table:
        ours, theirs, _ = re.match(r"\| `(.*?)` \| `(.*?)` \| (.*) \|$", row).groups()
        assert ours in LESSONS[RESUME - 1].read_text() and theirs in trainer, row
