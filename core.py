"""CORE: 22 tasks, most of them few-shot (with solved examples in the prompt).
(Li et al. 2024, arXiv:2406.11794)

  python core.py --bundle eval_bundle      scores the newest checkpoint in log/
  python core.py --bundle eval_bundle --tasks arc_easy,piqa --max_per_task 500
  python core.py --bundle mine.jsonl --num_fewshot 5 --delimiter " Answer: "

The bundle is a directory with core.yaml, eval_meta_data.csv and eval_data/. To
get it, download and unzip
https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip.
To measure CORE during training, use train_gpt2.py --evals core=eval_bundle.
You can also write a bundle with your own tasks (see docs/benchmarks.md), or a
single .jsonl file. Each line of the file is an item in one of three forms:

  {"query": "A cat in a", "choices": ["hat", "box"], "gold": 0}
  {"context_options": ["Ada sang. She", "Ada sang. It"],
   "continuation": "smiled", "gold": 0}
  {"context": "One, two,", "continuation": "three"}

The metric is the mean centered accuracy of the tasks: 0 is chance accuracy, and
1 is a perfect score. Prompts and scoring rules follow nanochat;
docs/benchmarks.md explains the rules.
"""

import os
import random
from dataclasses import dataclass, replace
from pathlib import Path

from plaingpt.documents import kind_of, read_records
from plaingpt.errors import UserError, run_program
from plaingpt.files import reading
from plaingpt.flags import flag
from plaingpt.scoring.benchmark import (
    Benchmark,
    Example,
    bad_record,
    check_ending,
    get_fields,
    split_by_example,
)
from plaingpt.scoring.program import run_benchmark
from plaingpt.terminal import print_result

import numpy as np
import yaml  # comes with the package datasets

from model import GPT

# The fields that an item may contain.
COLUMNS = ("query", "choices", "context_options", "context", "continuation", "gold")


@dataclass
class Options:
    bundle: str | None = flag(None, "bundle directory or .jsonl file [current directory]")
    tasks: list[str] | None = flag(None, "names of tasks, separated by spaces or commas [all]")
    max_per_task: int | None = flag(None, "maximum number of items per task [all]", at_least=1)
    num_fewshot: int | None = flag(
        None, "number of solved examples per prompt [from the bundle; .jsonl file: 0]", at_least=0
    )
    delimiter: str | None = flag(
        None,
        r"string before each answer, such as \n [from the bundle; .jsonl file: a space]",
        empty=True,
        line_breaks=True,
    )


@dataclass
class Task:
    """A file of items, and the settings that turn these items into prompts."""

    label: str
    file: Path
    num_fewshot: int = 0
    delimiter: str = " "  # between a context and its answer
    kind: str | None = None  # one of KINDS; None: inferred from the fields of each item
    chance: float | None = None  # chance accuracy; None: computed from the items


def load(path, limit=0, **options):
    """Loads a bundle. Returns the Examples of the chosen tasks, in order.

    path, limit: the values of --data and --limit, which mean the same as --bundle and
    --max_per_task. options: the fields of Options.
    """
    given = Options(**options)
    if (path and given.bundle) or (limit and given.max_per_task):
        raise UserError(
            "--bundle means the same as --data, and --max_per_task the same as --limit; "
            "give only one flag of each pair"
        )
    given.max_per_task = given.max_per_task or limit
    directory = Path(given.bundle or path or ".")
    examples = []
    for task in find_tasks(directory, given.tasks):
        examples += load_task(task, given)
    return examples


def find_tasks(path, names):
    """Returns a list of the Tasks in a bundle.

    path: a directory with core.yaml, or a .jsonl file. names: the value of --tasks, or None for all
    tasks.
    """
    if kind_of(path) == ".jsonl":
        tasks = {path.stem: Task(path.stem, path)}
    elif (path / "core.yaml").is_file():
        tasks = read_tasks(path / "core.yaml", read_chances(path / "eval_meta_data.csv"))
    else:
        raise UserError(
            f"{path}: contains no core.yaml; give the directory eval_bundle, or a .jsonl file"
        )
    if not names:
        return list(tasks.values())
    chosen = []
    for name in dict.fromkeys(map(str.strip, ",".join(names).split(","))):  # removes duplicates
        if name not in tasks:
            raise UserError(f"--tasks {name}: must be one of {', '.join(tasks)}")
        chosen.append(tasks[name])
    return chosen


def read_chances(path):
    """Returns the chance accuracies in eval_meta_data.csv: {label of a task: accuracy, 0 to 1}."""
    chances = {}
    with reading(path):
        for row in read_records([path], ("Eval Task", "Random baseline")):
            chance = 0.01 * float(row["Random baseline"])
            if not 0 <= chance < 1:
                raise ValueError(f"{row['where']}: the baseline must be at least 0 and below 100")
            chances[row["Eval Task"]] = chance
    return chances


def read_tasks(path, chances):
    """Returns the Tasks in core.yaml: {label: Task}. chances: the result of read_chances."""
    tasks = {}
    with reading(path):
        for task in yaml.safe_load(path.read_text("utf-8"))["icl_tasks"]:
            record = {"continuation_delimiter": " ", "icl_task_type": None, **task, "where": path}
            label, uri, shots, delimiter, kind = get_fields(
                record,
                label=str,
                dataset_uri=str,
                num_fewshot=list,
                continuation_delimiter=str,
                icl_task_type=str | None,
            )
            if kind not in (None, *KINDS):
                kinds = ", ".join(KINDS)
                raise bad_record(record, f"icl_task_type {kind!r}: must be one of {kinds}")
            if label in tasks:
                raise ValueError(f"two tasks are named {label!r}")
            is_count = [type(n) is int and n >= 0 for n in shots]
            if is_count != [True]:
                raise ValueError(
                    f"num_fewshot {shots} of {label} must contain one number, such as [0]"
                )
            file = path.parent / "eval_data" / uri
            tasks[label] = Task(label, file, shots[0], delimiter, kind, chances.get(label))
        if not tasks:
            raise ValueError("it contains no tasks")
    return tasks


def load_task(task, options):
    """Returns the Examples of a Task's items. options: an Options."""
    items = list(read_records([task.file], COLUMNS))
    random.Random(1337).shuffle(items)
    items = items[: options.max_per_task or None]
    n_shots = task.num_fewshot if options.num_fewshot is None else options.num_fewshot
    delimiter = task.delimiter if options.delimiter is None else options.delimiter
    if len(items) <= n_shots:
        raise UserError(
            f"{task.file}: too few items for --num_fewshot {n_shots}; choose a smaller number"
        )
    examples = [make_example(item, delimiter, task.kind) for item in items]
    chance = mean_chance(examples) if task.chance is None else task.chance
    solved = [prompts(example)[example.label] + "\n\n" for example in examples]
    complete = []
    for i, (example, item) in enumerate(zip(examples, items)):
        # nanochat samples from a list of all other items. This line samples indices of that list,
        # so it selects the same items.
        drawn = random.Random(1234 + i).sample(range(len(items) - 1), n_shots)
        shots = tuple(solved[j if j < i else j + 1] for j in drawn)
        facts = dict(task=task.label, item=i, where=item["where"], chance=chance)
        complete.append(replace(example, shots=shots, facts=facts))
    return complete


def mean_chance(examples):
    """Returns the mean chance accuracy of items. An item of language_modeling counts as 0."""
    chances = []
    for example in examples:
        is_choice = example.kind != "language_modeling"
        chances.append(1 / len(example) if is_choice else 0)
    return float(np.mean(chances))


def make_example(item, delimiter, kind=None):
    """Turns an item into an Example.

    kind: one of KINDS. If None, the kind is inferred from the fields of the item.
    """
    kind = kind or find_kind(item)
    make, _ = KINDS[kind]
    example = make(item, delimiter)
    if not 0 <= example.label < len(example):
        raise bad_record(item, f"gold {example.label}: must be from 0 to {len(example) - 1}")
    # A single choice cannot be compared with other choices, so the model must generate this choice.
    return replace(example, kind=kind if len(example) > 1 else "language_modeling")


def find_kind(item):
    """Infers the kind of an item from its fields, because a .jsonl file does not name the kind."""
    if "choices" in item:
        return "multiple_choice"
    if "context_options" in item:
        return "schema"
    return "language_modeling"


def prompts(example):
    """Returns all prompts of an Example: its solved examples, one context and one ending each."""
    shots = "".join(example.shots)
    return [shots + context + ending for context in example.contexts for ending in example.endings]


def prompt_ids(example, tokenizer):
    """Encodes whole prompts. Yields (ids of a context, [ids of each of its endings])."""

    def encode(text):
        return [tokenizer.end_of_text, *tokenizer.encode(text)]

    _, split = KINDS[example.kind]
    yield from split(example, encode)


def make_multiple_choice(item, delimiter):
    """Builds an Example with one context and several endings."""
    query, choices, gold = get_fields(item, query=str, choices=list, gold=int)
    return Example([query], [f"{delimiter}{choice}" for choice in choices], gold)


def split_multiple_choice(example, encode):
    """Yields (ids of the context, [ids of each ending]) once.

    The context is the common prefix of all encoded prompts.
    """
    ids = [encode(prompt) for prompt in prompts(example)]
    n = len(os.path.commonprefix(ids))  # commonprefix also accepts lists
    yield ids[0][:n], [prompt[n:] for prompt in ids]


def make_schema(item, delimiter):
    """Builds an Example with several contexts and one ending."""
    contexts, continuation, gold = get_fields(
        item,
        context_options=list,
        continuation=str | int | float,
        gold=int,
    )
    return Example(list(map(str, contexts)), [f"{delimiter}{continuation}"], gold)


def split_schema(example, encode):
    """Yields (ids of a context, [ids of the ending]) for each prompt.

    The ending is the common suffix of all encoded prompts.
    """
    ids = [encode(prompt) for prompt in prompts(example)]
    n = len(os.path.commonprefix([prompt[::-1] for prompt in ids]))
    for prompt in ids:
        split = len(prompt) - n
        if split > 0:
            yield prompt[:split], [prompt[split:]]
        else:  # the common suffix is the whole prompt
            yield prompt[:1], [[]]


def make_language_modeling(item, delimiter):
    """Builds an Example with one context and one ending."""
    context, continuation = get_fields(item, context=str, continuation=str | int | float)
    return Example([context.strip() + delimiter], [str(continuation)])


def split_language_modeling(example, encode):
    """Yields (ids of the context, [ids of the ending]) once.

    The context is the common prefix of two encoded texts: the whole prompt, and the prompt without
    its ending. Raises UserError if no ids are left for the ending. nanochat also stops with an
    error in this case.
    """
    (prompt,) = prompts(example)
    before = prompt.removesuffix(example.endings[0]).rstrip()
    ids = encode(prompt)
    n = len(os.path.commonprefix([ids, encode(before)]))
    check_ending(ids[n:], before, example.endings[0])
    yield ids[:n], [ids[n:]]


# For each icl_task_type, this table contains a function that builds an Example from an item, and a
# function that splits the prompts of an Example into contexts and endings.
KINDS = dict(
    multiple_choice=(make_multiple_choice, split_multiple_choice),
    schema=(make_schema, split_schema),
    language_modeling=(make_language_modeling, split_language_modeling),
)


def report(examples, scores):
    """Computes the mean centered accuracy, and the accuracies of each task."""
    with np.errstate(invalid="ignore"):  # an ending without tokens yields 0 / 0
        losses = split_by_example(examples, -scores.log_likelihood / scores.tokens)
    greedy = split_by_example(examples, scores.greedy)
    chances = {}  # {task: chance accuracy}
    answers = {}  # {task: for each item, whether the answer is right}
    for example, loss, is_greedy in zip(examples, losses, greedy):
        task = example.facts["task"]
        chances[task] = example.facts["chance"]
        answers.setdefault(task, []).append(is_correct(example, loss, is_greedy))
    tasks = {}
    for task, correct in answers.items():
        chance = chances[task]
        accuracy = sum(correct) / len(correct)
        tasks[task] = dict(
            accuracy=accuracy,
            centered=(accuracy - chance) / (1 - chance),
            chance=chance,
            items=len(correct),
            correct=correct,
        )
    centered = [figures["centered"] for figures in tasks.values()]
    return dict(core=float(np.mean(centered)), tasks=tasks)


def is_correct(example, losses, is_greedy):
    """Returns whether the answer to an item is right.

    losses: for each prompt, the mean loss per token of the ending. is_greedy: for each prompt,
    whether greedy decoding generates the ending.
    """
    if example.kind == "language_modeling":
        return bool(is_greedy[0])
    # As in nanochat, min() compares the losses: if the first loss is NaN, the answer is the first
    # prompt; any other NaN is ignored.
    answer = min(range(len(losses)), key=lambda i: losses[i])
    return answer == example.label


def main(argv=None):
    """Runs the program. Prints the metric, and then one line per task."""
    figures = run_benchmark(BENCHMARK, GPT, argv)
    print_result(f"\n{'task':<34}accuracy  centered     items")
    for name, task in figures["tasks"].items():
        print_result(
            f"{name:<34}{task['accuracy']:8.4f}{task['centered']:10.4f}{task['items']:10,}"
        )


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
    input_options=("bundle",),
    figures=dict(core="mean of the centered accuracies; the mean of all 22 tasks is CORE"),
    logged="core",
)

if __name__ == "__main__":
    run_program(main)
