"""CORE: 22 tasks, most with solved examples in the prompt.
(Li et al. 2024, arXiv:2406.11794)

  python core.py --bundle eval_bundle.zip              newest checkpoint in log/
  python core.py --bundle eval_bundle --tasks arc_easy,piqa --max_per_task 500
  python core.py --bundle mine.jsonl --num_fewshot 5 --delimiter " Answer: "

The bundle is a directory or a zip with core.yaml, eval_meta_data.csv and
eval_data/. Your own tasks have the same form (docs/benchmarks.md shows it), or
are one .jsonl file. Its lines have one of three forms:

  {"query": "A cat in a", "choices": ["hat", "box"], "gold": 0}
  {"context_options": ["Ada sang. She", "Ada sang. It"],
   "continuation": "smiled", "gold": 0}
  {"context": "One, two,", "continuation": "three"}

The metric is the mean accuracy of the tasks, centered: 0 is chance, 1 is
perfect. Prompts and rules follow nanochat; docs/benchmarks.md explains them.
"""

import csv
import itertools
import math
import random
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import yaml  # comes with the package datasets

from plaingpt.cli import UserError, print0, run
from plaingpt.corpus import explain, parse_json
from plaingpt.evaluation import Benchmark, Example, bad_record, main, score, take

FIELDS = dict(  # {kind: its fields}; the first field tells the kind
    multiple_choice=dict(choices=list, query=str, gold=int),
    schema=dict(context_options=list, continuation=str | int | float, gold=int),
    language_modeling=dict(context=str, continuation=str | int | float))


@dataclass
class Options:
    bundle: Annotated[str | None, "directory, .zip or .jsonl"] = None
    tasks: Annotated[str | None, "names with commas between them [all tasks]"] = None
    max_per_task: Annotated[int | None, "number of items of a task [all]", "at least 1"] = None
    num_fewshot: Annotated[int | None, "solved examples [bundle's; .jsonl: 0]", "at least 0"] = None
    delimiter: Annotated[str | None, "before an answer [of the bundle; .jsonl: a space]"] = None


def load(path, limit, bundle=None, tasks=None, max_per_task=None, num_fewshot=None,
         delimiter=None):
    """Bundle (or path) -> Examples, task by task. limit: as max_per_task. Raises UserError."""
    if not (bundle or path):
        raise UserError(BENCHMARK.no_data)
    if limit and max_per_task:
        raise UserError("--limit and --max_per_task mean the same; give one")
    found = []
    for task in read_tasks(Path(bundle or path), tasks):
        items, kind = read_items(task["file"]), task["icl_task_type"]
        if kind is None:
            kind = next((k for k, (name, *_) in FIELDS.items() if name in items[0]), None)
        if kind is None:
            raise bad_record(items[0], "has no field choices, context_options or context")
        if kind not in FIELDS:
            raise UserError(f"{task['where']}: icl_task_type must be one of {', '.join(FIELDS)}")
        random.Random(1337).shuffle(items)
        items = items[: max_per_task or limit or None]
        between = task["continuation_delimiter"] if delimiter is None else delimiter
        examples = [make_example(item, kind, between) for item in items]
        n = task["num_fewshot"] if num_fewshot is None else num_fewshot
        add_shots(examples, n, task["file"])
        chance = np.mean([1 / len(e) if len(e) > 1 else 0 for e in examples])
        for i, (example, item) in enumerate(zip(examples, items)):
            example.counts = dict(task=task["label"], kind=kind, item=i, where=item["where"],
                                  chance=float(task.get("chance", chance)))
        found += examples
    return found


def read_tasks(path, names):
    """Bundle or .jsonl -> dicts as in core.yaml, with their file, chance and where."""
    if path.suffix == ".jsonl":
        if names:
            raise UserError(f"--tasks: {path} is one task; leave out --tasks")
        return [dict(label=path.stem, file=path, where=path, icl_task_type=None, num_fewshot=0,
                     continuation_delimiter=" ")]
    if not path.exists():
        raise UserError(f"{path}: no such file; correct the path, or see docs/benchmarks.md where "
                        "the CORE tasks are")
    is_zip = zipfile.is_zipfile(path)
    if not is_zip and not path.is_dir():
        raise UserError(f"{path}: is not a directory, a complete zip file or a .jsonl file; "
                        "give one of these")
    root = zipfile.Path(path) if is_zip else path
    folders = [root, *root.iterdir()]  # the public zip has a folder
    root = next((folder for folder in folders if (folder / "core.yaml").is_file()), None)
    if root is None:
        raise UserError(f"{path}: has no core.yaml; {BENCHMARK.no_data}")
    file, meta = root / "core.yaml", root / "eval_meta_data.csv"
    try:
        tasks = yaml.safe_load("\n".join(read_lines(file)))["icl_tasks"]
        tasks = [dict(task, where=f"{file}, task {n}") for n, task in enumerate(tasks, start=1)]
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}, line {mark.line + 1}" if mark else file
        raise UserError(f"{where}: not YAML with a list icl_tasks; correct the file") from error
    known = {}
    for task in tasks:
        add_task(known, task)
    lines = csv.DictReader(read_lines(meta), skipinitialspace=True)
    rows = {line.get("Eval Task"): line for line in lines}
    chosen = [name.strip() for name in names.split(",")] if names else list(known)
    for name in chosen:
        if name not in known or chosen.count(name) > 1:
            raise UserError(f"--tasks {name}: give each task once, of {', '.join(known)}")
        try:
            chance = 0.01 * float(rows[name]["Random baseline"])
        except (KeyError, TypeError, ValueError):
            chance = math.nan
        if not 0 <= chance < 1:
            raise UserError(f"{meta}: task {name} has no Random baseline from 0 to 99 (percent); "
                            "docs/benchmarks.md shows the format")
        known[name].update(file=root / "eval_data" / known[name]["dataset_uri"], chance=chance)
    return [known[name] for name in chosen]


def add_task(known, task):
    """Checks and completes a task of core.yaml, and adds it to {label: task}. Raises UserError."""
    kinds = dict(label=str, dataset_uri=str, icl_task_type=str, num_fewshot=list | int)
    label, *_, shots = take(task, **kinds)
    n = shots[0] if isinstance(shots, list) and shots else shots
    if type(n) is not int or n < 0:
        raise bad_record(task, f"num_fewshot {shots}: must be a number from 0 on, or a list of it")
    if not isinstance(task.setdefault("continuation_delimiter", " "), str):
        raise bad_record(task, "continuation_delimiter: must be a text in quotes")
    if label in known:
        raise bad_record(task, f"another task has the label {label}, too")
    known[label] = dict(task, num_fewshot=n)


def read_lines(file):
    """Lines of a file in a directory or a zip. Raises UserError."""
    try:
        return file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else explain(error)
        raise UserError(f"{file}: cannot be read ({reason}); restore it") from error


def read_items(file):
    """Lines of JSON -> dicts. Raises UserError."""
    items = []
    for n, line in enumerate(read_lines(file), start=1):
        try:
            if line.strip():
                items.append(dict(parse_json(line), where=f"{file}, line {n}"))
        except ValueError as error:
            raise UserError(f"{file}, line {n}: {explain(error)}; correct the file") from error
    if not items:
        raise UserError(f"{file}: has no item; core.py --help shows the format")
    return items


def make_example(item, kind, delimiter):
    """Item -> Example. Contexts and endings together are prompts. Raises UserError."""
    first, second, *gold = take(item, **FIELDS[kind])
    if gold and not (type(gold[0]) is int and all(isinstance(x, str | int | float) for x in first)):
        raise bad_record(item, "gold must be a number, and every choice or context a text")
    if kind == "language_modeling":
        if not str(second).strip():
            raise bad_record(item, "the continuation is empty")
        return Example([first.strip() + delimiter], [str(second)])
    if kind == "schema":
        example = Example(list(map(str, first)), [f"{delimiter}{second}"], *gold)
    else:
        example = Example([second], [f"{delimiter}{choice}" for choice in first], *gold)
    if len(example) < 2:
        raise bad_record(item, "has fewer than two choices")
    if not 0 <= example.label < len(example):
        raise bad_record(item, f"gold {example.label}: must be from 0 to {len(example) - 1}")
    return example


def add_shots(examples, n, file):
    """Gives each example n other ones, solved. Raises UserError if there are too few."""
    if n >= len(examples):
        raise UserError(f"{file}: {n} solved examples in a prompt need {n + 1} items, but the task "
                        f"has {len(examples)}; lower --num_fewshot or raise --max_per_task")
    texts = [[context + ending for context in example.contexts for ending in example.endings]
             [example.label] + "\n\n" for example in examples]
    for i, example in enumerate(examples):
        picked = random.Random(1234 + i).sample(range(len(texts) - 1), n)
        example.shots = tuple(texts[j + (j >= i)] for j in picked)  # all but its own


def encode(example, tokenizer):
    """Yields (ids of a context, [ids of each of its endings]): splits the ids of whole prompts."""
    def ids(text):
        return [tokenizer.end_of_text, *tokenizer.encode(text)]

    shots = "".join(example.shots)
    prompts = [ids(shots + c + ending) for c in example.contexts for ending in example.endings]
    if example.counts["kind"] == "schema":
        n = n_shared([prompt[::-1] for prompt in prompts])
        for prompt in prompts:
            split = len(prompt) - n
            yield prompt[:split] or prompt[:1], [prompt[split:] if split else []]
        return
    same = prompts
    if example.counts["kind"] == "language_modeling":
        same = [*prompts, ids((shots + example.contexts[0]).rstrip())]
    n = n_shared(same)
    yield prompts[0][:n], [prompt[n:] for prompt in prompts]


def n_shared(sequences):
    """Number of ids that all sequences start with."""
    low, high = min(sequences), max(sequences)  # all share what these two share
    return next((i for i, (a, b) in enumerate(zip(low, high)) if a != b), len(low))


def score_tasks(model, examples, rows, *others):
    """score() of one task after another. Prints a line for each."""
    parts, first = [], 0
    print0(f"{'task':<34}accuracy  centered     items  seconds")
    for _, group in itertools.groupby(examples, key=lambda example: example.counts["task"]):
        own, start = list(group), time.monotonic()
        end = first + sum(map(len, own))
        own_rows = [
            row._replace(endings=[(ids, pair - first, last) for ids, pair, last in row.endings])
            for row in rows if first <= row.endings[0][1] < end]
        parts.append(score(model, own, own_rows, *others))
        for task, figures in task_figures(own, parts[-1]).items():
            print0("{:<34}{accuracy:8.4f}{centered:10.4f}{items:10,}{:9.1f}".format(
                task, time.monotonic() - start, **figures))
        first = end
    return SimpleNamespace(**{
        name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])})


def task_figures(examples, scores):
    """-> {task: its figures}."""
    ends = np.cumsum([len(example) for example in examples])[:-1]
    with np.errstate(invalid="ignore"):  # 0 / 0: an ending without tokens
        losses = np.split(-scores.log_likelihood / scores.tokens, ends)
    right = {}
    for example, loss, greedy in zip(examples, losses, np.split(scores.greedy, ends)):
        # min() as in nanochat, where NaN is the lowest loss only if it is the first.
        answer = min(range(len(loss)), key=loss.__getitem__)
        is_text = example.counts["kind"] == "language_modeling"
        correct = bool(greedy[0]) if is_text else answer == example.label
        task = example.counts["task"], example.counts["chance"]
        right.setdefault(task, []).append(correct)
    figures = {}
    for (task, chance), correct in right.items():
        accuracy = sum(correct) / len(correct)
        figures[task] = dict(accuracy=accuracy, centered=(accuracy - chance) / (1 - chance),
                             chance=chance, items=len(correct), correct=correct)
    return figures


def report(examples, scores):
    """The metric, and the figures of each task."""
    tasks = task_figures(examples, scores)
    return dict(core=float(np.mean([task["centered"] for task in tasks.values()])), tasks=tasks)


BENCHMARK = Benchmark(
    name="core", doc=__doc__, stream="core", hub=None, examples=None, load=load, encode=encode,
    spare=1, score=score_tasks, report=report, options=(Options,),
    no_data="the CORE tasks are not on the hub: fetch "
            "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip into this "
            "directory, then give --bundle eval_bundle.zip (in training: "
            "--evals core=eval_bundle.zip)",
    figures=dict(core="mean of the centered accuracies; the mean of all 22 tasks is CORE"))

if __name__ == "__main__":
    run(lambda: main(BENCHMARK))
