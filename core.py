"""CORE: 22 tasks, most with solved examples in the prompt.
(Li et al. 2024, arXiv:2406.11794)

  python core.py --bundle eval_bundle      scores the newest checkpoint in log/
  python core.py --bundle eval_bundle --tasks arc_easy,piqa --max_per_task 500
  python core.py --bundle mine.jsonl --num_fewshot 5 --delimiter " Answer: "

The bundle is a directory with core.yaml, eval_meta_data.csv and eval_data/. Get
https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip and unzip it.
In training, it is --evals core=eval_bundle. Your own tasks have the same form
(docs/benchmarks.md shows it), or are one .jsonl file. Its lines have one of
three forms:

  {"query": "A cat in a", "choices": ["hat", "box"], "gold": 0}
  {"context_options": ["Ada sang. She", "Ada sang. It"],
   "continuation": "smiled", "gold": 0}
  {"context": "One, two,", "continuation": "three"}

The metric is the mean accuracy of the tasks, centered: 0 is chance, 1 is
perfect. Prompts and rules follow nanochat; docs/benchmarks.md explains them.
"""

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import yaml  # comes with the package datasets

import plaingpt.evaluation as evaluation
from plaingpt.cli import EMPTY, UserError, print0, run_program
from plaingpt.evaluation import Benchmark, Example, bad_record, get_fields
from plaingpt.text import read_records


@dataclass
class Options:
    bundle: Annotated[str | None, "directory or .jsonl file [.]"] = None
    tasks: Annotated[str | None, "names with commas between them [all tasks]"] = None
    max_per_task: Annotated[int | None, "number of items of a task [all]", "at least 1"] = None
    num_fewshot: Annotated[int | None, "solved examples [bundle's; .jsonl: 0]", "at least 0"] = None
    delimiter: Annotated[str | None, "before an answer [bundle's; .jsonl: a space]", EMPTY] = None


@dataclass
class Task:
    """A task has a file of items, and knows how to ask them."""

    label: str
    file: Path
    num_fewshot: int = 0
    delimiter: str = " "  # stands between a context and its answer
    chance: float | None = None  # accuracy by chance; if it is None, load_task computes it


def load(path, limit=0, **options):
    """Loads a bundle (or path) -> Examples, task by task. Raises UserError.

    limit: items of a task, if max_per_task is not given. options: fields of Options.
    """
    options = Options(**options)
    path = options.bundle or path or "."
    options.max_per_task = options.max_per_task or limit
    return sum((load_task(task, options) for task in find_tasks(Path(path), options.tasks)), [])


def find_tasks(path, names):
    """Finds the Tasks of a directory with core.yaml, or of a file. Raises UserError.

    names: as in --tasks.
    """
    if path.suffix == ".jsonl":
        return [Task(path.stem, path)]
    if not (path / "core.yaml").is_file():
        raise UserError(f"{path}: has no core.yaml; give the eval_bundle, or a .jsonl file")
    chance = {
        row["Eval Task"]: 0.01 * float(row["Random baseline"])
        for row in read_records([path / "eval_meta_data.csv"])
    }
    tasks = {}
    for task in yaml.safe_load((path / "core.yaml").read_text("utf-8"))["icl_tasks"]:
        record = {"continuation_delimiter": " ", **task, "where": path / "core.yaml"}
        label, uri, shots, delimiter = get_fields(
            record, label=str, dataset_uri=str, num_fewshot=list, continuation_delimiter=str
        )
        tasks[label] = Task(label, path / "eval_data" / uri, shots[0], delimiter, chance.get(label))
    chosen = [name.strip() for name in names.split(",")] if names else tasks
    if unknown := [name for name in chosen if name not in tasks]:
        raise UserError(f"--tasks {unknown[0]}: must be one of {', '.join(tasks)}")
    return [tasks[name] for name in chosen]


def load_task(task, options):
    """Loads a Task -> Examples of its items. Raises UserError."""
    items = list(read_records([task.file]))
    random.Random(1337).shuffle(items)
    items = items[: options.max_per_task or None]
    n = task.num_fewshot if options.num_fewshot is None else options.num_fewshot
    delimiter = task.delimiter if options.delimiter is None else options.delimiter
    if len(items) <= n:
        raise UserError(f"{task.file}: has too few items for --num_fewshot {n}; give fewer")
    examples = [make_example(item, delimiter) for item in items]
    solved = [texts(example)[example.label] + "\n\n" for example in examples]
    if task.chance is None:
        task.chance = float(np.mean([1 / len(e) if len(e) > 1 else 0 for e in examples]))
    for i, (example, item) in enumerate(zip(examples, items)):
        example.shots = tuple(random.Random(1234 + i).sample(solved[:i] + solved[i + 1 :], n))
        example.counts = dict(task=task.label, item=i, where=item["where"], chance=task.chance)
    return examples


def make_example(item, delimiter):
    """Turns an item into an Example. A context and an ending make a prompt. Raises UserError.

    An item of multiple_choice has several endings, one of schema has several contexts, and one of
    language_modeling has one of each.
    """
    if "choices" in item:
        query, choices, gold = get_fields(item, query=str, choices=list, gold=int)
        example = Example([query], [f"{delimiter}{choice}" for choice in choices], gold)
    elif "context_options" in item:
        contexts, continuation, gold = get_fields(
            item, context_options=list, continuation=str | int | float, gold=int
        )
        example = Example(contexts, [f"{delimiter}{continuation}"], gold)
    else:
        context, continuation = get_fields(item, context=str, continuation=str | int | float)
        example = Example([context.strip() + delimiter], [str(continuation)])
    if not 0 <= example.label < len(example):
        raise bad_record(item, f"gold {example.label}: must be from 0 to {len(example) - 1}")
    return example


def texts(example):
    """Returns the texts of the pairs, each a context with an ending."""
    return [context + ending for context in example.contexts for ending in example.endings]


def prompt_ids(example, tokenizer):
    """Yields (ids of a context, [ids of each of its endings]). Splits the ids of whole prompts."""

    def ids(text):
        return [tokenizer.end_of_text, *tokenizer.encode(text)]

    shots = "".join(example.shots)
    prompts = [ids(shots + text) for text in texts(example)]
    if len(example.contexts) > 1:  # in a schema, the end of all prompts is the same
        n = len(os.path.commonprefix([prompt[::-1] for prompt in prompts]))
        for prompt in prompts:
            split = len(prompt) - n
            yield prompt[:split] or prompt[:1], [prompt[split:] if split else []]
        return
    # Otherwise, the start is the same. It is the context.
    same = prompts
    if len(example) == 1:  # language_modeling
        same = [*prompts, ids((shots + example.contexts[0]).rstrip())]
    n = len(os.path.commonprefix(same))  # works with lists, too
    yield prompts[0][:n], [prompt[n:] for prompt in prompts]


def report(examples, scores):
    """The metric, and the figures of each task."""
    with np.errstate(invalid="ignore"):  # an ending without tokens has 0 / 0
        losses = evaluation.split(examples, -scores.log_likelihood / scores.tokens)
    greedy = evaluation.split(examples, scores.greedy)
    solved = {}  # {(task, chance): whether the answer to each item is right}
    for example, loss, is_greedy in zip(examples, losses, greedy):
        # min() as in nanochat, where NaN is the lowest loss only if it is the first.
        correct = min(range(len(loss)), key=loss.__getitem__) == example.label
        if len(loss) == 1:  # language_modeling
            correct = bool(is_greedy[0])
        solved.setdefault((example.counts["task"], example.counts["chance"]), []).append(correct)
    tasks = {}
    for (task, chance), correct in solved.items():
        accuracy = sum(correct) / len(correct)
        tasks[task] = dict(
            accuracy=accuracy,
            centered=(accuracy - chance) / (1 - chance),
            chance=chance,
            items=len(correct),
            correct=correct,
        )
    return dict(core=float(np.mean([task["centered"] for task in tasks.values()])), tasks=tasks)


def main(argv=None):
    """Runs the program. Prints the figures, then a line for each task."""
    figures = evaluation.main(BENCHMARK, argv)
    print0(f"\n{'task':<34}accuracy  centered     items")
    for name, task in figures["tasks"].items():
        print0(f"{name:<34}{task['accuracy']:8.4f}{task['centered']:10.4f}{task['items']:10,}")


BENCHMARK = Benchmark(
    name="core",
    doc=__doc__,
    stream="core",
    hub=None,
    examples=None,
    load=load,
    prompt_ids=prompt_ids,
    spare=1,
    report=report,
    options=(Options,),
    figures=dict(core="mean of the centered accuracies; the mean of all 22 tasks is CORE"),
)

if __name__ == "__main__":
    run_program(main)
