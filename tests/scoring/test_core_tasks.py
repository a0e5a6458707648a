"""Compares the results of core.py with nanochat's rules.

The function nanochats_rules implements these rules with Hugging Face's GPT-2, without batches.
"""

import contextlib
import io
import json
import math
import random

from plaingpt.errors import UserError, run_program
from plaingpt.pretrained import save_gpt2
from plaingpt.scoring.benchmark import load_examples
from plaingpt.scoring.score import make_rows
from plaingpt.tokenizer import get_tokenizer

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import WORDS, overfit, program, write_lines

import core
from model import GPT, GPTConfig

T = 96  # context of the tiny model, in tokens; some prompts below are longer
KINDS = dict(m="multiple_choice", s="schema", l="language_modeling")
# Some tasks of the public bundle. Each string contains the name of a task, the number of solved
# examples in a prompt, and the kind: a key of KINDS.
TASKS = [
    task.split()
    for task in (
        "hellaswag_zeroshot 0 m",
        "jeopardy 10 l",
        "arc_easy 10 m",
        "copa 0 m",
        "lambada_openai 0 l",
        "winograd 0 s",
        "winogrande 0 s",
        "agi_eval_lsat_ar 3 m",
        "coqa 0 l",
        "boolq 10 m",
    )
]


def some_words(rng, low, high):
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def make_item(rng, kind, i):
    if kind == "m":
        choices = [some_words(rng, 1, 5) for _ in range(3)]
        if i == 1:
            choices[2] = choices[1] + " more"  # the third choice begins with the second choice
        if i == 2:  # all choices begin with the first choice, whose ending then has no tokens
            choices[1], choices[2] = choices[0] + " gulls", choices[0] + " few"
        if i == 3:
            choices = ["yes", "no", " maybe"]
        query = some_words(rng, 1, 20) + rng.choice(["", " ", "\n"])
        return dict(query=query, choices=choices, gold=rng.randrange(3))
    if kind == "s":
        options = [some_words(rng, 1, 3), some_words(rng, 1, 12)]
        options = options * 2 if i == 1 else options
        return dict(context_options=options, continuation=some_words(rng, 1, 6), gold=i % 2)
    context = " " + some_words(rng, 1, 20) + rng.choice(["", "  \n"])
    return dict(context=context, continuation=some_words(rng, 1, 2))


def read_items(bundle, name):
    lines = (bundle / f"eval_data/area/{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def write_bundle(root, n=12):
    rng, tasks = random.Random(0), "max_seq_len: 2048\nicl_tasks:\n"
    (root / "eval_data/area").mkdir(parents=True)
    rows = "Eval Task,Task Category,#shots,Random baseline,Centered Metric?,Description\n"
    for i, (name, shots, kind) in enumerate(TASKS):
        items = [make_item(rng, kind, k) for k in range(n)]
        write_lines(root / f"eval_data/area/{name}.jsonl", items)
        tasks += (
            f"-\n  label: {name}\n  dataset_uri: area/{name}.jsonl\n"
            f"  num_fewshot: [{shots}]\n  icl_task_type: {KINDS[kind]}\n"
        )
        tasks += '  continuation_delimiter: "\\nAnswer: "  # a comment\n' if i % 3 == 0 else ""
        rows += f'{name},area,{shots},{0 if kind == "l" else 9.1 + i},,"a, b"\n'
    (root / "core.yaml").write_text(tasks)
    (root / "eval_meta_data.csv").write_text(rows)
    return root


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("core") / "eval_bundle")


@pytest.fixture(scope="module")
def tiny(bundle):
    """Returns the directory of a tiny GPT-2 in Hugging Face format, and the bundle.

    The model is overfitted to the short items of the task coqa.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=T))
    encode = get_tokenizer("gpt2").encode
    ids = [
        [50256, *encode(item["context"].strip() + " " + item["continuation"])]
        for item in read_items(bundle, "coqa")
    ]
    ids = [row for row in ids if len(row) <= 24]
    assert 3 <= len(ids) <= 10
    overfit(model, ids, last=3)
    save_gpt2(model, bundle.parent / "model", get_tokenizer("gpt2"))
    return bundle.parent / "model", bundle


def nanochats_rules(hf, items, kind, n_shots, delimiter):
    """Yields (bool, losses) for each item: whether the answer is right, and a loss per prompt.

    The loss of a prompt is the mean loss of the tokens of its ending. hf: Hugging Face's GPT-2.
    kind: a key of KINDS. n_shots: the number of solved examples in a prompt. delimiter: the string
    between a context and its ending.
    """
    encode = get_tokenizer("gpt2").encode

    def texts(item):
        if kind == "m":
            return [item["query"] + delimiter + choice for choice in item["choices"]]
        if kind == "s":
            return [option + delimiter + item["continuation"] for option in item["context_options"]]
        before = item["context"].strip() + delimiter
        return [before + item["continuation"], before]

    for i, item in enumerate(items):
        others = items[:i] + items[i + 1 :]
        shots = random.Random(1234 + i).sample(others, n_shots)
        before = "".join(texts(shot)[shot.get("gold", 0)] + "\n\n" for shot in shots)
        prompts = [before + text for text in texts(item)]
        if kind == "l":
            prompts[1] = prompts[1].strip()
        ids = [[50256, *encode(prompt)] for prompt in prompts]
        compared = [row[::-1] for row in ids] if kind == "s" else ids
        differ = [k for k, column in enumerate(zip(*compared)) if len(set(column)) > 1]
        n = [*differ, min(map(len, ids))][0]
        losses, greedy = [], []
        for row in ids[:1] if kind == "l" else ids:
            scored = n if kind == "s" else len(row) - n
            row = row[-T:]
            # The first token of a prompt has no context, so the model cannot score it.
            scored = scored if scored < len(row) else 0
            with torch.no_grad():
                x = hf.transformer(torch.tensor([row[:-1]]))[0][0, len(row) - 1 - scored :]
                logits = hf.lm_head(x)
            target = torch.tensor(row[len(row) - scored :], dtype=torch.long)
            losses.append(F.cross_entropy(logits, target, reduction="none").mean().item())
            greedy.append((logits.argmax(-1) == target).all().item())
        yield greedy[0] if kind == "l" else losses.index(min(losses)) == item["gold"], losses


def run_core(tmp_path, tiny, *flags, processes=1):
    """Runs core.py in float32. Returns (metrics, mean loss of each prompt's ending, output)."""
    path = tmp_path / "out.json"
    flags = ["--model", tiny[0], "--bundle", tiny[1], "--json", path, "--dtype", "float32", *flags]
    if processes > 1:
        out, _ = program(*flags, cwd=tmp_path, processes=processes, program="core.py")
    else:
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            core.main(list(map(str, flags)))
        out = stdout.getvalue()
    result = json.loads(path.read_text(encoding="utf-8"))
    losses = [
        -x / n if n else math.nan
        for example in result["examples"]
        for x, n in zip(example["log_likelihood"], example["tokens"])
    ]
    return result["figures"], losses, out


@pytest.mark.slow
def test_every_item_and_figure_follow_nanochats_rules(tiny, tmp_path):
    hf = transformers.GPT2LMHeadModel.from_pretrained(tiny[0])
    centered, losses, expected = [], [], {}
    for i, (name, shots, kind) in enumerate(TASKS):
        items = read_items(tiny[1], name)
        random.Random(1337).shuffle(items)
        delimiter = "\nAnswer: " if i % 3 == 0 else " "
        found = list(nanochats_rules(hf, items, kind, int(shots), delimiter))
        expected[name] = [solved for solved, _ in found]
        losses += sum((loss for _, loss in found), [])
        chance = 0.01 * (0 if kind == "l" else 9.1 + i)
        centered.append((np.mean(expected[name]) - chance) / (1 - chance))
    assert any(map(math.isnan, losses)) and 0 < sum(expected["coqa"]) < 12
    for size, processes in ((1, 1), (5000, 1), (300, 2)):
        figures, found, out = run_core(
            tmp_path, tiny, "--tokens_per_forward", size, processes=processes
        )
        tasks = figures["tasks"]
        assert {name: task["correct"] for name, task in tasks.items()} == expected
        assert [task["centered"] for task in tasks.values()] == pytest.approx(centered)
        assert figures["core"] == pytest.approx(np.mean(centered))
        assert found == pytest.approx(losses, abs=1e-4, nan_ok=True)
        assert " were cut to 96 tokens" in out
        assert f"core               {figures['core']:,.4f}" in out
        for name, task in tasks.items():
            assert f"{name:<34}  {task['accuracy']:.4f}" in out


@pytest.mark.slow
def test_the_shuffled_items_are_cut_before_examples_are_drawn(tiny, tmp_path):
    items = read_items(tiny[1], "copa")
    random.Random(1337).shuffle(items)
    hf = transformers.GPT2LMHeadModel.from_pretrained(tiny[0])
    expected = sum((loss for _, loss in nanochats_rules(hf, items[:5], "m", 2, "\nAnswer: ")), [])
    figures, losses, _ = run_core(
        tmp_path,
        tiny,
        "--tasks",
        "winograd, copa,winograd",
        "--max_per_task",
        5,
        "--num_fewshot",
        2,
    )
    assert [task["items"] for task in figures["tasks"].values()] == [5, 5]
    assert losses[-15:] == pytest.approx(expected, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("n_shots", [0, 1, 3, 10, 21])
@pytest.mark.parametrize("n_items", [22, 100])
def test_solved_examples_are_drawn_as_by_nanochat(tmp_path, n_items, n_shots):
    """core.py draws the same examples as nanochat.

    Depending on its arguments, Python's random.sample uses one of two algorithms. The numbers of
    items and examples in this test cover both algorithms.
    """
    items = [dict(context=f"{i} is", continuation="it", where="") for i in range(n_items)]
    path = write_lines(tmp_path / "a.jsonl", items)
    examples = core.load(path, num_fewshot=n_shots)
    random.Random(1337).shuffle(items)
    solved = [f"{item['context']} it\n\n" for item in items]
    for i, example in enumerate(examples):
        others = solved[:i] + solved[i + 1 :]
        assert list(example.shots) == random.Random(1234 + i).sample(others, n_shots)


def test_a_file_of_items_is_a_task(tmp_path):
    """A single .jsonl file is a task, with --delimiter before each answer.

    The chance accuracy is the mean of 1 / (number of choices).
    """
    items = [
        dict(query=f"q{i}", choices=["a", "b", "c", "d"][: 2 + 2 * (i % 2)], gold=1)
        for i in range(4)
    ]
    path = str(write_lines(tmp_path / "mc.jsonl", items))
    examples = load_examples(core.BENCHMARK, path, limit=3, num_fewshot=1, delimiter=" A: ")
    for e in examples:
        assert e.endings[:2] == [" A: a", " A: b"] and 0.25 < e.facts["chance"] < 0.5
        assert len(e.shots) == 1 and e.shots[0].endswith(" A: b\n\n")
        assert e.contexts[0] not in e.shots[0]
    config = GPTConfig(block_size=24, vocab_size=256)
    rows = make_rows(examples, get_tokenizer("bytes"), config, core.prompt_ids, spare=1)
    assert len(rows) == len(examples) == 3  # one row per item, because all choices share a context
    path = str(write_lines(tmp_path / "t.jsonl", [dict(context=" one,\n", continuation="two")]))
    (example,) = load_examples(core.BENCHMARK, path)
    assert example.contexts == ["one, "] and example.endings == ["two"]
    assert example.facts["chance"] == 0


@pytest.mark.parametrize("kind", [None, *core.KINDS])
def test_the_kind_of_a_task_is_chosen_by_its_name(kind, tmp_path):
    """An item may contain the fields of all kinds.

    If core.yaml does not name the kind, core.py infers the kind from the fields of the item.
    """
    item = dict(
        query="A cat",
        choices=["sits", "sat"],
        context_options=["A hat", "A cat", "A bat"],
        context="One",
        continuation="two",
        gold=1,
    )
    (tmp_path / "eval_data").mkdir()
    write_lines(tmp_path / "eval_data/a.jsonl", [item])
    (tmp_path / "eval_meta_data.csv").touch()
    task = dict(label="a", dataset_uri="a.jsonl", num_fewshot=[0], icl_task_type=kind)
    if kind is None:
        del task["icl_task_type"]
    # A JSON document is also a YAML document.
    (tmp_path / "core.yaml").write_text(json.dumps(dict(icl_tasks=[task])))
    (example,) = load_examples(core.BENCHMARK, tmp_path)
    pairs, chance = {
        None: ((["A cat"], [" sits", " sat"]), 1 / 2),
        "multiple_choice": ((["A cat"], [" sits", " sat"]), 1 / 2),
        "schema": ((["A hat", "A cat", "A bat"], [" two"]), 1 / 3),
        "language_modeling": ((["One "], ["two"]), 0),
    }[kind]
    assert (example.contexts, example.endings) == pairs
    assert example.facts["chance"] == chance
    ids = list(core.prompt_ids(example, get_tokenizer("bytes")))
    assert [(bytes(c[1:]), [bytes(e) for e in endings]) for c, endings in ids] == {
        "multiple_choice": [(b"A cat s", [b"its", b"at"])],
        "schema": [(b"A h", [b"at two"]), (b"A c", [b"at two"]), (b"A b", [b"at two"])],
        "language_modeling": [(b"One", [b" two"])],
    }[kind or "multiple_choice"]


def test_an_item_with_one_choice_is_right_if_the_model_would_write_it():
    """A single choice cannot be compared, so greedy decoding must generate this choice."""
    item = dict(query="A cat", choices=["sits"], gold=0, where="")
    example = core.make_example(item, " ", "multiple_choice")
    ((context, (ending,)),) = core.prompt_ids(example, get_tokenizer("bytes"))
    assert (bytes(context[1:]), bytes(ending)) == (b"A cat", b" sits")
    assert core.is_correct(example, [1.0], [True]) and not core.is_correct(example, [1.0], [False])
    assert core.mean_chance([example]) == 0


def test_json_lines_have_several_names(tmp_path):
    item = dict(query="A cat in a", choices=["hat", "box"], gold=0)
    for name in ("quiz.jsonl", "quiz.ndjson", "quiz.JSONL"):
        (example,) = core.load(write_lines(tmp_path / name, [item]), tasks=["quiz"])
        assert example.endings == [" hat", " box"]


def test_a_continuation_that_joins_the_tokens_before_it():
    """The tokens of "the harbour" do not begin with the tokens of "the har".

    In this case, nanochat raises an error. core.py scores all tokens after the common prefix.
    """
    tokenizer = get_tokenizer("gpt2")
    item = dict(context="the har", continuation="bour", where="")
    example = core.make_example(item, "")
    ((context, (ending,)),) = core.prompt_ids(example, tokenizer)
    assert context + ending == [50256, *tokenizer.encode("the harbour")]
    assert context == [50256, *tokenizer.encode("the")] and len(ending) >= 1


@pytest.mark.parametrize(
    "flags, message",
    [
        ("", "error: .: contains no core.yaml; give the directory eval_bundle, or a .jsonl file"),
        ("--bundle other.jsonl --json other.jsonl", "--json other.jsonl: is also an input"),
        ("--bundle typed --json typed/core.yaml", "--json typed/core.yaml: is also an input"),
        ("--bundle typed --json MODEL/config.json", "/config.json: is also an input; give another"),
        (
            "--bundle typed",
            "core.yaml: field 'continuation_delimiter' is missing or has a wrong type",
        ),
        (
            "--bundle unknown",
            "core.yaml: icl_task_type 'generation': must be one of multiple_choice, schema, "
            "language_modeling;",
        ),
        ("--bundle contradicts", "a.jsonl, record 1: field 'context_options' is missing or has a"),
        ("--bundle other.jsonl", "other.jsonl, record 1: field 'context' is missing"),
        ("--bundle gold.jsonl", "gold.jsonl, record 1: gold 2: must be from 0 to 1"),
        ("--bundle BUNDLE --tasks arc", "--tasks arc: must be one of hellaswag_zeroshot, jeopardy"),
        ("--bundle gold.jsonl --tasks arc", "--tasks arc: must be one of gold"),
        (
            "--bundle BUNDLE --max_per_task 5",
            "too few items for --num_fewshot 10; choose a smaller number",
        ),
        (
            "--bundle BUNDLE --data other.jsonl",
            "error: --bundle means the same as --data, and --max_per_task ",
        ),
        (
            "--bundle BUNDLE --max_per_task 5 --limit 9",
            "--max_per_task the same as --limit; give only one",
        ),
    ],
)
def test_a_mistake_is_one_sentence(flags, message, bundle, tmp_path, monkeypatch, capsys):
    """core.py reports a mistake before it reads the model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    write_lines(tmp_path / "other.jsonl", [dict(text="a")])
    write_lines(tmp_path / "gold.jsonl", [dict(query="a", choices=["b", "c"], gold=2)])
    (tmp_path / "typed").mkdir()
    (tmp_path / "typed/eval_meta_data.csv").touch()
    (tmp_path / "typed/core.yaml").write_text(
        "icl_tasks: [{label: a, num_fewshot: [0], dataset_uri: a, continuation_delimiter: 7}]"
    )
    for name, kind in (("unknown", "generation"), ("contradicts", "schema")):
        (tmp_path / name / "eval_data").mkdir(parents=True)
        (tmp_path / name / "eval_meta_data.csv").touch()
        task = f"label: a, num_fewshot: [0], dataset_uri: a.jsonl, icl_task_type: {kind}"
        (tmp_path / name / "core.yaml").write_text(f"icl_tasks: [{{{task}}}]")
        item = dict(query="a", choices=["b", "c"], gold=0)
        write_lines(tmp_path / name / "eval_data/a.jsonl", [item])
    monkeypatch.chdir(tmp_path)
    flags = flags.replace("BUNDLE", str(bundle)).replace("MODEL", "model").split()
    with pytest.raises(SystemExit):
        run_program(lambda: core.main(["--model", "model", *flags]))
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1, err


TASK = "{label: a, num_fewshot: [0], dataset_uri: a.jsonl}"
TASK_YAML = f"icl_tasks: [{TASK}]"
GOOD = {
    "core.yaml": TASK_YAML,
    "eval_meta_data.csv": "Eval Task,Random baseline\na,50\n",
    "eval_data/a.jsonl": '{"context_options": [1, 2], "continuation": "x", "gold": 0}',
}


@pytest.mark.parametrize(
    "name, contents",
    [
        ("core.yaml", "hello"),
        ("core.yaml", "a: [1"),
        ("core.yaml", "a: 1"),
        ("core.yaml", "\xff\x00"),
        ("core.yaml", "icl_tasks: []"),
        ("core.yaml", "icl_tasks: 7"),
        ("core.yaml", "icl_tasks: [7]"),
        ("core.yaml", TASK_YAML.replace("[0]", "[]")),
        ("core.yaml", TASK_YAML.replace("[0]", "[x]")),
        ("core.yaml", TASK_YAML.replace("[0]", "[-1]")),
        ("core.yaml", TASK_YAML.replace("[0]", "[0, 1]")),
        ("core.yaml", TASK_YAML.replace("[0]", "[1.5]")),
        ("core.yaml", f"icl_tasks: [{TASK}, {TASK}]"),
        ("eval_meta_data.csv", "task,chance\na,50\n"),
        ("eval_meta_data.csv", "Eval Task,Random baseline\na,fifty\n"),
        ("eval_meta_data.csv", "Eval Task,Random baseline\na,100\n"),
        ("eval_meta_data.csv", "Eval Task,Random baseline\na,nan\n"),
    ],
)
def test_a_damaged_file_of_a_bundle_is_named(name, contents, tmp_path):
    (tmp_path / "eval_data").mkdir()
    for path, text in GOOD.items():
        (tmp_path / path).write_text(text)
    (example,) = load_examples(core.BENCHMARK, tmp_path)
    assert core.prompts(example) == ["1 x", "2 x"]  # core.py converts numbers to strings
    (tmp_path / name).write_text(contents, "latin-1")
    with pytest.raises(UserError, match=rf"{name}: is damaged \(.+\); correct it"):
        load_examples(core.BENCHMARK, tmp_path)
