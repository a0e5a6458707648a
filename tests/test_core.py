"""Compares CORE with nanochat's rules, computed with transformers one prompt at a time."""

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import overfit, program, read_log, train

import core
from model import GPT, GPTConfig
from plaingpt.cli import UserError, run
from plaingpt.evaluation import load_examples, make_rows, score
from tokenizer import get_tokenizer

T = 96  # context of the tiny model; some prompts below are longer
WORDS = "the old harbour bell rang twice and few in Wrenmouth's café had ever counted the antidisestablishmentarian gulls".split()
# The tasks of the public bundle: name, number of solved examples in a prompt, kind.
TASKS = [line.split() for line in """hellaswag_zeroshot 0 m\njeopardy 10 l\nbigbench_qa_wikidata 10 l\narc_easy 10 m
arc_challenge 10 m\ncopa 0 m\ncommonsense_qa 10 m\npiqa 10 m\nopenbook_qa 0 m\nlambada_openai 0 l\nhellaswag 10 m\nwinograd 0 s
winogrande 0 s\nbigbench_dyck_languages 10 l\nagi_eval_lsat_ar 3 m\nbigbench_cs_algorithms 10 l\nbigbench_operators 10 l
bigbench_repeat_copy_logic 10 l\nsquad 10 l\ncoqa 0 l\nboolq 10 m\nbigbench_language_identification 10 m""".splitlines()]
KINDS = dict(m="multiple_choice", s="schema", l="language_modeling")
HEADER = "Eval Task,Task Category,Task Type,#shots,#datapoints,Random baseline,Centered Metric?,Description\n"
CPU, FULL = torch.device("cpu"), torch.autocast("cpu", enabled=False)


def some_words(rng, low, high):
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def make_item(rng, kind, i):
    if kind == "m":
        choices = [some_words(rng, 1, 5) for _ in range(3)]
        if i == 1:
            choices[2] = choices[1] + " more"  # no prompt has tokens of its own
        if i == 2:
            choices[1], choices[2] = choices[0] + " gulls", choices[0] + " few"  # the first one has none
        if i == 3:
            choices = ["yes", "no", " maybe"]
        query = some_words(rng, 1, 20) + rng.choice(["", " ", "\n"])
        return dict(query=query, choices=choices, gold=rng.randrange(3))
    if kind == "s":
        options = [some_words(rng, 1, 3), some_words(rng, 1, 12)]
        return dict(context_options=options * 2 if i == 1 else options, continuation=some_words(rng, 1, 6), gold=i % 2)
    return dict(context=" " + some_words(rng, 1, 20) + rng.choice(["", "  \n"]), continuation=some_words(rng, 1, 2))


def write_bundle(root, n=12):
    rng, tasks, rows = random.Random(0), "max_seq_len: 2048\nicl_tasks:\n", HEADER
    for i, (name, shots, kind) in enumerate(TASKS):
        path = root / "eval_data" / "area" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(make_item(rng, kind, k)) + "\n" for k in range(n)))
        tasks += f"-\n  label: {name}\n  dataset_uri: area/{name}.jsonl\n  num_fewshot: [{shots}]\n  icl_task_type: {KINDS[kind]}\n"
        tasks += '  continuation_delimiter: "\\nAnswer: "  # a comment\n' if i % 3 == 0 else ""
        rows += f'{name},area,x,{shots},{n},{0 if kind == "l" else 9.1 + i},,"a, b"\n'
    (root / "core.yaml").write_text(tasks)
    (root / "eval_meta_data.csv").write_text(rows)
    return root


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny GPT-2 in Hugging Face format, overfitted to some items, and a bundle."""
    directory = tmp_path_factory.mktemp("core")
    bundle = write_bundle(directory / "eval_bundle")
    torch.manual_seed(0)
    model, tokenizer = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=T)), get_tokenizer("gpt2")
    items = [json.loads(line) for line in open(bundle / "eval_data/area/coqa.jsonl")]
    ids = [[50256, *tokenizer.encode(item["context"].strip() + " " + item["continuation"])] for item in items]
    ids = [row for row in ids if len(row) <= 24]
    assert 3 <= len(ids) <= 10
    overfit(model, ids, last=3)
    model.to_hf(directory / "model")
    return directory / "model", bundle


def nanochats_rules(hf, items, kind, n_shots, delimiter):
    """Yields, for each item, whether it is solved, and the mean loss of each of its prompts."""
    encode = get_tokenizer("gpt2").encode

    def texts(item):
        if kind == "m":
            return [item["query"] + delimiter + choice for choice in item["choices"]]
        if kind == "s":
            return [option + delimiter + item["continuation"] for option in item["context_options"]]
        return [item["context"].strip() + delimiter + item["continuation"], item["context"].strip() + delimiter]

    for i, item in enumerate(items):
        others = items[:i] + items[i + 1:]
        shots = random.Random(1234 + i).sample(others, n_shots)
        before = "".join(texts(shot)[shot.get("gold", 0)] + "\n\n" for shot in shots)
        prompts = [before + text for text in texts(item)]
        if kind == "l":
            prompts[1] = prompts[1].strip()
        ids = [[50256, *encode(prompt)] for prompt in prompts]
        compared = [row[::-1] for row in ids] if kind == "s" else ids
        n = next((k for k, column in enumerate(zip(*compared)) if len(set(column)) > 1), min(map(len, ids)))
        losses, greedy = [], []
        for row in ids[:1] if kind == "l" else ids:
            scored = n if kind == "s" else len(row) - n
            row = row[-T:]
            scored = scored if scored < len(row) else 0  # nothing comes before a prompt
            with torch.no_grad():
                logits = hf.lm_head(hf.transformer(torch.tensor([row[:-1]]))[0][0, len(row) - 1 - scored:])
            target = torch.tensor(row[len(row) - scored:], dtype=torch.long)
            losses.append(torch.nn.functional.cross_entropy(logits, target, reduction="none").mean().item())
            greedy.append((logits.argmax(-1) == target).all().item())
        yield greedy[0] if kind == "l" else losses.index(min(losses)) == item["gold"], losses


def run_core(tmp_path, *flags, processes=1):
    out, _ = program("--json", "out.json", "--dtype", "float32", *flags, cwd=tmp_path, processes=processes, program="core.py")
    return json.loads((tmp_path / "out.json").read_text(encoding="utf-8")), out


def test_every_item_and_figure_follow_nanochats_rules(tiny, tmp_path):
    hf, centered, losses, expected = transformers.GPT2LMHeadModel.from_pretrained(tiny[0]), [], [], {}
    for i, (name, shots, kind) in enumerate(TASKS):
        items = [json.loads(line) for line in open(tiny[1] / f"eval_data/area/{name}.jsonl")]
        random.Random(1337).shuffle(items)
        found = list(nanochats_rules(hf, items, kind, int(shots), "\nAnswer: " if i % 3 == 0 else " "))
        expected[name] = [solved for solved, _ in found]
        losses += [loss for _, loss in found]
        chance = 0.01 * (0 if kind == "l" else 9.1 + i)
        centered.append((sum(expected[name]) / len(items) - chance) / (1 - chance))
    assert any(map(math.isnan, sum(losses, []))) and 0 < sum(expected["coqa"]) < 12
    shutil.make_archive(tmp_path / "bundle", "zip", tiny[1].parent, "eval_bundle")
    for size, processes, bundle in ((1, 1, tiny[1]), (5000, 1, tmp_path / "bundle.zip"), (300, 2, tiny[1].parent)):
        result, out = run_core(tmp_path, "--model", tiny[0], "--bundle", bundle, "--tokens_per_forward", size, processes=processes)
        tasks = result["figures"]["tasks"]
        assert {name: task["correct"] for name, task in tasks.items()} == expected
        assert [task["centered"] for task in tasks.values()] == pytest.approx(centered)
        assert result["figures"]["core"] == pytest.approx(sum(centered) / 22)
        for example, loss in zip(result["examples"], losses, strict=True):
            means = [-x / n if n else math.nan for x, n in zip(example["log_likelihood"], example["tokens"])]
            assert means == pytest.approx(loss, abs=1e-4, nan_ok=True)
        assert "note: " in out and " were cut to 96 tokens" in out
        assert len([line for line in out.splitlines() if line.split()[:1] and line.split()[0] in expected]) == 22
        assert f"core               {sum(centered) / 22:,.4f}" in out


def test_the_shuffled_items_are_cut_before_examples_are_drawn(tiny, tmp_path):
    items = [json.loads(line) for line in open(tiny[1] / "eval_data/area/arc_easy.jsonl")]
    random.Random(1337).shuffle(items)
    hf = transformers.GPT2LMHeadModel.from_pretrained(tiny[0])
    expected = [loss for _, loss in nanochats_rules(hf, items[:5], "m", 2, "\nAnswer: ")]
    for flag in ("--max_per_task", "--limit"):
        result, _ = run_core(tmp_path, "--model", tiny[0], "--bundle", tiny[1], "--tasks", "winograd,arc_easy", flag, 5, "--num_fewshot", 2)
        assert [task["items"] for task in result["figures"]["tasks"].values()] == [5, 5]
        means = [[-x / n if n else math.nan for x, n in zip(e["log_likelihood"], e["tokens"])] for e in result["examples"][5:]]
        assert sum(means, []) == pytest.approx(sum(expected, []), abs=1e-4, nan_ok=True)


def write_items(path, *items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_a_file_of_items_is_a_task(tmp_path):
    """Chance is one through the number of answers. The delimiter comes before an answer."""
    mc = write_items(tmp_path / "mc.jsonl", *[dict(query=f"q{i}", choices=["a", "b", "c", "d"][: 2 + 2 * (i % 2)], gold=1) for i in range(4)])
    examples = load_examples(core.BENCHMARK, str(mc), num_fewshot=1, delimiter=" A: ")
    assert sorted(example.contexts[0] for example in examples) == ["q0", "q1", "q2", "q3"]
    assert examples[0].endings[:2] == [" A: a", " A: b"] and examples[0].counts["chance"] == pytest.approx(0.375)
    assert all(len(e.shots) == 1 and e.shots[0].endswith(" A: b\n\n") and e.contexts[0] not in e.shots[0] for e in examples)
    schema = write_items(tmp_path / "s.jsonl", dict(context_options=["a", "b"], continuation=5, gold=1))
    example, = load_examples(core.BENCHMARK, str(schema))
    assert example.contexts == ["a", "b"] and example.endings == [" 5"] and example.counts["chance"] == 0.5
    text = write_items(tmp_path / "t.jsonl", dict(context=" one,\n", continuation="two"))
    example, = load_examples(core.BENCHMARK, str(text))
    assert example.contexts == ["one, "] and example.endings == ["two"] and example.counts["chance"] == 0


def rows_of(tmp_path, block_size, *items, **options):
    examples = load_examples(core.BENCHMARK, str(write_items(tmp_path / "i.jsonl", *items)), **options)
    config = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=block_size, vocab_size=256)
    return examples, config, make_rows(examples, get_tokenizer("bytes"), config, core.encode, spare=1)


def test_choices_share_their_context_also_if_it_is_cut(tmp_path):
    item = dict(query="abcdef", choices=["1xx", "2xx", "3xxx", "4xxx"], gold=0)
    _, _, (row,) = rows_of(tmp_path, 20, item)
    assert bytes(row.context.astype("u1")) == b"\nabcdef "
    _, _, rows = rows_of(tmp_path, 9, item)  # 9 tokens of each prompt stay
    assert [bytes(row.context.astype("u1")) for row in rows] == [b"bcdef ", b"cdef "]
    assert [[pair for _, pair, _ in row.endings] for row in rows] == [[0, 1], [2, 3]]


def test_a_continuation_that_joins_the_tokens_before_it_is_scored_from_the_first_difference():
    """nanochat stops here. "harbourbell" has other tokens than "harbour" and "bell"."""
    tokenizer = get_tokenizer("gpt2")
    example = core.make_example(dict(context="the har", continuation="bour", where=""), "language_modeling", "")
    example.counts = dict(kind="language_modeling")
    (context, (ending,)), = core.encode(example, tokenizer)
    assert context + ending == [50256, *tokenizer.encode("the harbour")]
    assert context == [50256, *tokenizer.encode("the")] and len(ending) >= 1


def test_prompts_without_tokens_of_their_own_have_no_loss(tmp_path):
    """NaN is the lowest loss only if it comes first."""
    items = [dict(query="q", choices=choices, gold=0) for choices in (["a", "ab"], ["ab", "a"], ["a", "a"])]
    items.append(dict(context_options=["c", "c"], continuation="d", gold=1))
    for item, tokens, correct in zip(items, ([0, 1], [1, 0], [0, 0], [0, 0]), (True, True, True, False)):
        examples, config, rows = rows_of(tmp_path, 20, item)
        scores = score(GPT(config).eval(), examples, rows, CPU, FULL, 100)
        assert scores.tokens.tolist() == tokens
        assert core.report(examples, scores)["tasks"]["i"]["correct"] == [correct]


def test_training_logs_core(tmp_path):
    write_items(tmp_path / "i.jsonl", *[dict(query="q", choices=["a", "b"], gold=k) for k in (0, 1, 1)])
    logs = []
    for n in (1, 2):
        out, _ = train("--eval_every", 5, "--evals", "core=i.jsonl", "--log_dir", f"run{n}", cwd=tmp_path, processes=n)
        logs.append({key: value for key, value in read_log(tmp_path / f"run{n}").items() if key[1] == "core"})
        assert "step 10 | core " in out
    assert logs[0] == logs[1] and set(logs[0]) == {(5, "core"), (10, "core")}
    out, _ = train("--eval_every", 5, "--evals", "core", "--max_steps", 1, cwd=tmp_path)
    assert "note: core is skipped: the CORE tasks are not on the hub: fetch https://" in out


def edit(path, old, new):
    path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.parametrize("name, old, new, message", [
    ("core.yaml", "icl_tasks:", "tasks:", "core.yaml: not YAML with a list icl_tasks; correct the file"),
    ("core.yaml", "  label: jeopardy", "  label: [", "core.yaml, line 12: not YAML"),
    ("core.yaml", "label: jeopardy", "name: jeopardy", "core.yaml, task 2: field 'label' is missing or has a wrong type"),
    ("core.yaml", "icl_task_type: schema", "icl_task_type: chat", "core.yaml, task 12: icl_task_type must be one of multiple_choice, schema"),
    ("core.yaml", "area/copa.jsonl", "area/cupa.jsonl", "eval_data/area/cupa.jsonl: cannot be read (no such file); restore it"),
    ("core.yaml", "[10]", "[12]", "jeopardy.jsonl: 12 solved examples in a prompt need 13 items, but the task has 12; lower --num_fewshot"),
    ("eval_meta_data.csv", "copa,", "cupa,", "eval_meta_data.csv: task copa has no Random baseline from 0 to 99 (percent); docs/benchmarks.md shows the format"),
    ("eval_meta_data.csv", ",0,12,14.1,", ",0,12,100,", "eval_meta_data.csv: task copa has no Random baseline"),
    ("core.yaml", "[10]", "[]", "core.yaml, task 2: num_fewshot []: must be a number from 0 on, or a list of it"),
    ("core.yaml", "[10]", "['a']", "core.yaml, task 2: num_fewshot ['a']: must be"),
    ("core.yaml", "[10]", "-1", "core.yaml, task 2: num_fewshot -1: must be"),
    ("core.yaml", "label: jeopardy", "label: jeopardy\n  continuation_delimiter:", "core.yaml, task 2: continuation_delimiter: must be a text"),
    ("core.yaml", "label: jeopardy", "label: hellaswag_zeroshot", "core.yaml, task 2: another task has the label hellaswag_zeroshot, too"),
    ("eval_data/area/copa.jsonl", '"gold": ', '"gold": true, "old": ', "copa.jsonl, line 1: gold must be a number"),
    ("eval_data/area/copa.jsonl", '"query"', "query", "copa.jsonl, line 1: not JSON"),
    ("eval_data/area/copa.jsonl", '"query"', '"q"', "copa.jsonl, line 1: field 'query' is missing"),
    ("eval_data/area/copa.jsonl", '"gold": ', '"gold": 1', "copa.jsonl, line 1: gold 1"),
])
def test_a_mistake_in_a_bundle_is_one_sentence(name, old, new, message, tiny, tmp_path):
    bundle = shutil.copytree(tiny[1], tmp_path / "b")
    edit(bundle / name, old, new)
    sources = [bundle]
    if name.startswith("core.yaml"):
        sources.append(Path(shutil.make_archive(tmp_path / "z", "zip", bundle)))
    for source in sources:
        with pytest.raises(UserError) as error:
            load_examples(core.BENCHMARK, str(source))
        assert message in str(error.value) and "\n" not in str(error.value)


def test_other_mistakes_are_one_sentence(tiny, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.zip").write_bytes(b"PK\x03\x04")
    whole = Path(shutil.make_archive(tmp_path / "damaged", "zip", tiny[1])).read_bytes()
    (tmp_path / "damaged.zip").write_bytes(whole[:100] + bytes(1000) + whole[1100:])
    write_items(tmp_path / "text.jsonl", dict(context="a", continuation=" "))
    write_items(tmp_path / "none.jsonl")
    write_items(tmp_path / "null.jsonl", dict(query="a", choices=["b", None], gold=0))
    write_items(tmp_path / "other.jsonl", dict(text="a"))
    for flags, message in (
        ([], "error: the CORE tasks are not on the hub: fetch https://karpathy-public"),
        (["--bundle", tmp_path / "empty"], "empty: has no core.yaml; "),
        (["--bundle", tmp_path / "missing"], "missing: no such file; correct the path, or see docs/benchmarks.md"),
        (["--bundle", tmp_path / "cut.zip"], "cut.zip: is not a directory, a complete zip file"),
        (["--bundle", tmp_path / "damaged.zip"], ": cannot be read ("),
        (["--bundle", tmp_path / "missing.jsonl"], "missing.jsonl: cannot be read (no such file)"),
        (["--bundle", tmp_path / "text.jsonl"], "text.jsonl, line 1: the continuation is empty"),
        (["--bundle", tmp_path / "none.jsonl"], "none.jsonl: has no item"),
        (["--bundle", tmp_path / "other.jsonl"], "other.jsonl, line 1: has no field choices, context_options or context; the program's --help"),
        (["--bundle", tiny[1], "--tasks", "arc"], "--tasks arc: give each task once, of hellaswag_zeroshot, jeopardy"),
        (["--bundle", tiny[1], "--max_per_task", 5], "10 solved examples in a prompt need 11 items, but the task has 5"),
        (["--bundle", tiny[1], "--max_per_task", 50, "--limit", 50], "--limit and --max_per_task mean the same; give one"),
        (["--bundle", tiny[1], "--tasks", "copa, copa"], "--tasks copa: give each task once"),
        (["--bundle", tmp_path / "null.jsonl"], "null.jsonl, line 1: gold must be a number, and every choice or context a text"),
        (["--bundle", tmp_path / "text.jsonl", "--tasks", "arc"], "text.jsonl is one task; leave out --tasks"),
    ):
        with pytest.raises(SystemExit):
            run(lambda flags=flags: core.main(core.BENCHMARK, ["--model", str(tiny[0]), *map(str, flags)]))
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1, err
