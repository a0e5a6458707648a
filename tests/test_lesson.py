"""The nine programs of lesson/: each runs, adds one idea, and leads to train_gpt2.py."""

import ast
import contextlib
import difflib
import io
import math
import re

import numpy as np
import pytest
import torch
from conftest import ROOT, program

import train_gpt2
from model import GPT, GPTConfig

LESSONS = sorted((ROOT / "lesson").glob("*.py"))
BABY = GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=64, vocab_size=256)
# What each lesson changes in the one before. "constants" are the numbers at the top, "loop" is all
# that follows the last definition.
IDEAS = {
    "02_attention": "CausalSelfAttention constants GPT.__init__ GPT.forward imports",
    "03_block": "CausalSelfAttention Block MLP constants GPT.__init__ GPT.forward",
    "04_gpt2": "constants GPT.__init__ GPT.init_weights GPT.forward",
    "05_recipe": "constants GPT.configure_optimizers get_lr loop",
    "06_fast": "imports constants random_batch cross_entropy CausalSelfAttention "
    "GPT.configure_optimizers GPT.forward estimate_loss loop",
    "07_accumulate": "constants random_batch DataLoaderLite estimate_loss loop",
    "08_ddp": "imports constants load_tokens DataLoaderLite estimate_loss loop",
    "09_muon": "constants Muon orthogonalize GPT.configure_optimizers get_lr loop",
}


@pytest.fixture(autouse=True)
def beside_the_text(monkeypatch):
    """The programs read input.txt in the current folder, and use torch's global seed."""
    monkeypatch.chdir(ROOT)


def lesson(number):
    return LESSONS[number - 1].read_text()


def edit(text, old, new):
    assert text.count(old) == 1, old
    return text.replace(old, new)


def with_constants(text, **constants):
    for name, value in constants.items():
        text, n = re.subn(rf"^{name} = [^#\n]+", f"{name} = {value}  ", text, flags=re.M)
        assert n == 1, name
    return text


def for_losses(text):
    """Prints the loss of every step, with more digits, and a sample of ten bytes."""
    return edit(text, "step % 50 == 0", "True").replace(".4f", ".9f").replace(", 300)", ", 10)")


def losses_of(out):
    """What a program has printed -> (losses of the steps, validation loss)."""
    train = [float(loss) for loss in re.findall(r"^step +\d+ \| loss (\S+)", out, re.M)]
    return train, float(re.search(r"^val loss (\S+)", out, re.M)[1])


def run(text):
    """Runs a program in this process -> its output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "lesson.py", "exec"), {"__name__": "lesson"})
    return out.getvalue()


def losses(number, **constants):
    return losses_of(run(for_losses(with_constants(lesson(number), **constants))))


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_each_file_runs_alone(path):
    out = run(for_losses(with_constants(path.read_text(), max_steps=2)))
    train, val = losses_of(out)
    assert len(train) == 2 and abs(train[0] - math.log(256)) < 0.5 and 3 < val < train[0]
    assert len(out.split("parameters\n")[1]) > 5  # the sample
    tree = ast.parse(path.read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
    assert imported <= {"glob", "math", "numpy", "os", "time", "torch"}


def parts(text):
    """Cuts a program into {name: text}: imports, constants, each function and method, loop."""
    lines = text.splitlines()
    found = {"imports": "", "constants": "", "loop": ""}
    place = "imports"
    for node in ast.parse(text).body[1:]:  # the first one is the docstring
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        code = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, ast.ClassDef) and node.name == "GPT":
            for method in node.body[1:]:
                code = "\n".join(lines[method.lineno - 1 : method.end_lineno])
                found[f"GPT.{method.name}"] = code
            place = "loop"
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = code
        else:
            if isinstance(node, ast.Assign) and place == "imports":
                place = "constants"
            found[place] += code + "\n"
    return found


@pytest.mark.parametrize("number", range(2, 10))
def test_a_lesson_differs_from_the_one_before_by_one_idea(number):
    """If you change a part in one file, change it in all files that have the same part."""
    before = parts(lesson(number - 1))
    after = parts(lesson(number))
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    expected = set(IDEAS[LESSONS[number - 1].stem].split())
    for name in sorted(changed - expected):
        pytest.fail(
            f"lessons {number - 1} and {number} differ in {name}:\n"
            + "\n".join(difflib.ndiff(before[name].splitlines(), after[name].splitlines()))
        )
    assert changed == expected
    diff = difflib.ndiff(lesson(number - 1).splitlines(), lesson(number).splitlines())
    assert sum(line.startswith(("+ ", "- ")) for line in diff) <= 75


@pytest.mark.parametrize("number", range(4, 10))
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
        p.data += 0.1 * torch.randn(p.shape)  # the first weights would hide an error
        q.data.copy_(p.data)
    idx = torch.randint(256, (2, 64))
    torch.testing.assert_close(ours(idx)[0], theirs(idx)[0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(ours(idx, idx)[1], theirs(idx, idx)[1])


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Runs train_gpt2.py for 20 steps -> {optimizer: (losses of the steps, validation loss)}."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        # Otherwise, Muon would compute in bfloat16 on some CPUs.
        patch.setattr("plaingpt.ops.muon.has_bfloat16", lambda device: False)
        for optimizer, rest in (
            ("adamw", "--schedule cosine --min_lr 1e-4"),
            ("muon", "--schedule linear --min_lr 0"),
        ):
            directory = tmp_path_factory.mktemp(optimizer)
            flags = (
                "--preset baby --no-shuffle --device cpu --dtype float32 --max_steps 20 "
                "--warmup_steps 4 --max_lr 1e-3 --val_every 0 --sample_tokens 1"
            )
            flags = [*flags.split(), "--optimizer", optimizer, *rest.split()]
            train_gpt2.main([*flags, "--log_dir", str(directory)])
            log = [line.split() for line in (directory / "log.txt").read_text().splitlines()]
            train = [float(value) for _, stream, value in log if stream == "train"]
            val = [float(value) for _, stream, value in log if stream == "val"]
            found[optimizer] = (train, val[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, processes, batch_size",
    [(7, 1, 16), (7, 1, 4), (8, 1, 16), (8, 1, 4), (8, 2, 8), (8, 2, 2), (9, 1, 4), (9, 2, 4)],
)
def test_the_last_lessons_have_the_losses_of_train_gpt2(
    real, tmp_path, number, processes, batch_size
):
    """The rate is mild: at a high one, differences of rounding would grow too fast."""
    text = with_constants(
        lesson(number), max_steps=20, warmup_steps=4, max_lr=1e-3, batch_size=batch_size
    )
    text = for_losses(edit(text, "shuffle=True", "shuffle=False"))
    if processes == 1:
        out = run(text)
    else:
        (tmp_path / "lesson.py").write_text(text)
        out, _ = program(cwd=ROOT, program=tmp_path / "lesson.py", processes=processes)
    train, val = losses_of(out)
    expected_train, expected_val = real["muon" if number == 9 else "adamw"]
    assert train == pytest.approx(expected_train, abs=1e-5) and len(train) == 20
    assert val == pytest.approx(expected_val, abs=1e-5)


def test_shards_are_the_same_tokens_as_a_text(tmp_path):
    tokens = np.fromfile("input.txt", dtype=np.uint8).astype(np.uint16)
    cut = len(tokens) * 9 // 10
    np.save(tmp_path / "a_val_000000.npy", tokens[cut:])
    np.save(tmp_path / "a_train_000001.npy", tokens[:1000])
    np.save(tmp_path / "a_train_000002.npy", tokens[1000:cut])
    assert losses(8, max_steps=2, data=repr(str(tmp_path))) == losses(8, max_steps=2)


def test_fast_attention_and_loss_change_nothing():
    assert losses(6, max_steps=4)[0] == pytest.approx(losses(5, max_steps=4)[0], abs=1e-5)


@pytest.mark.parametrize("number", [7, 8, 9])
def test_a_batch_size_that_does_not_divide_a_step_is_refused(number):
    with pytest.raises(AssertionError):
        losses(number, max_steps=1, batch_size=5)


SMALL = dict(n_embd=64, block_size=32)
SHORT = dict(warmup_steps=10, total_batch_size=512, **SMALL)
# The exercises of docs/lesson.md: lesson, old text, new text, the change of the validation loss at
# a small size. A change of None means equal.
EXERCISES = {
    "lr": (1, "lr = 0.03 ", "lr = 0.1 ", -0.1, dict(max_steps=100)),
    "no mask": (
        2,
        "        scores = scores.masked_fill(is_later, -math.inf)",
        "#",
        -2.0,
        dict(max_steps=100, **SMALL),
    ),
    "no positions": (2, " + self.wpe(pos)", "", 0.01, dict(max_steps=100, **SMALL)),
    "no stream": (
        3,
        "        x = x + self.attn(self.ln_1(x))\n        return x + self.mlp(self.ln_2(x))",
        "        x = self.attn(self.ln_1(x))\n        return self.mlp(self.ln_2(x))",
        0.05,
        dict(max_steps=100, **SMALL),
    ),
    "std": (4, "std=0.02)", "std=0.06)", -0.3, dict(max_steps=80, **SMALL)),
    "no warm-up": (5, "warmup_steps = 50", "warmup_steps = 0", 0.1, dict(max_steps=80, **SMALL)),
    "no clipping": (5, "parameters(), 1.0)", "parameters(), 1e9)", 0.3, dict(max_steps=60)),
    "batch_size": (7, "batch_size = 4 ", "batch_size = 16 ", None, dict(max_steps=20, **SHORT)),
    "no division": (7, "loss = loss / len(starts)", "#", None, dict(max_steps=40, **SHORT)),
    "not orthogonal": (
        9,
        "    x = x / x.norm().clamp(min=1e-7)",
        "    return x / x.norm() * math.sqrt(x.numel())",
        0.2,
        dict(max_steps=60, **SHORT),
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
    """The exercise of lesson 8. Only the losses differ."""
    text = for_losses(with_constants(lesson(8), max_steps=20, **SHORT))
    wrong = edit(text, "position + rank * batch_size, position", "position, position")
    (tmp_path / "lesson.py").write_text(wrong)
    out, _ = program(cwd=ROOT, program=tmp_path / "lesson.py", processes=2)
    differences = np.subtract(losses_of(out)[0], losses_of(run(text))[0])
    assert np.abs(differences).max() > 0.01


@pytest.mark.parametrize("page", ["docs/lesson.md", "docs/lesson.zh.md"])
def test_the_page_shows_lines_that_changed(page):
    """Each block with + and - has lines of the difference that its section is about."""
    sections = re.split(r"^## ", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)[1:]
    n_blocks = 0
    for section in sections:
        for block in re.findall(r"^```diff\n(.*?)^```", section, re.M | re.S):
            number = int(section[0])
            before = lesson(number - 1).splitlines()
            after = lesson(number).splitlines()
            difference = list(difflib.ndiff(before, after))
            for line in block.splitlines():
                assert f"{line[0]} {line[1:]}" in difference, f"section {number}: {line}"
            n_blocks += 1
    assert n_blocks >= 8


def test_the_page_has_the_numbers_of_the_files():
    page = (ROOT / "docs" / "lesson.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `lesson/(\d\d_\w+)\.py` \|(.*)\|$", page, re.M)
    assert [name for name, _ in rows] == [path.stem for path in LESSONS]
    for number, (_, row) in enumerate(rows, start=1):
        _, changed, parameters, _, _ = row.split("|")
        out = run(for_losses(with_constants(lesson(number), max_steps=1)))
        assert f"\n{parameters.strip()} parameters" in out
        if number > 1:
            before = lesson(number - 1).splitlines()
            diff = difflib.ndiff(before, lesson(number).splitlines())
            assert sum(line.startswith(("+ ", "- ")) for line in diff) == int(changed)
