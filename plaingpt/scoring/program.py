"""Runs a benchmark as a program: reads the flags, scores a model, and prints the metrics."""

import math
from dataclasses import dataclass, fields

from plaingpt.checkpoint import find_newest_model, list_model_files
from plaingpt.device import Dtype
from plaingpt.errors import run_program
from plaingpt.files import check_output, write_json
from plaingpt.flags import flag, parse_flags
from plaingpt.memory import memory_advice
from plaingpt.pretrained import load_model
from plaingpt.process import on_rank0, setup
from plaingpt.scoring.benchmark import load_examples, split_by_example
from plaingpt.scoring.score import TOKENS, make_rows, score
from plaingpt.terminal import print_result


@dataclass
class EvalConfig:
    checkpoint: str | None = flag(None, "checkpoint or run directory [newest checkpoint in log/]")
    model: str | None = flag(
        None, "instead of --checkpoint: name or directory of a Hugging Face GPT-2", either=True
    )
    data: str | None = flag(
        None, ".jsonl, .csv, .parquet or text file [data set on Hugging Face's hub, if any]"
    )
    limit: int = flag(0, "number of examples to score (core.py: per task); 0 means all", at_least=0)
    tokens_per_forward: int | None = flag(
        None, "number of tokens per forward pass [16384; CPU: 2048]", at_least=1
    )
    device: str = flag("auto", "cuda, cuda:1, mps or cpu")
    dtype: Dtype = flag("auto", "dtype of matrix multiplications; float32 is the most precise")
    json: str | None = flag(None, "also write metrics, examples and scores to this file")


def run_benchmark(benchmark, GPT, argv=None):
    """Runs a benchmark as a program. Returns {metric: value}, the same on every process.

    benchmark: a Benchmark. GPT: the class in model.py. argv: list of flags; default: the command
    line.
    """
    given = parse_flags(benchmark.doc, EvalConfig, *benchmark.options, argv=argv)
    options = take_options(benchmark, given)
    config = EvalConfig(**given)
    source = config.model or find_newest_model(config.checkpoint)
    inputs = [config.data, *map(options.get, benchmark.input_options), *list_model_files(source)]
    check_output("--json", config.json, inputs)
    process = setup(config.device, config.dtype)
    examples = on_rank0(load_examples, benchmark, config.data, config.limit, **options)
    model, tokenizer = load_model(source, GPT)
    model.to(process.device)
    rows = make_rows(examples, tokenizer, model.config, benchmark.prompt_ids, benchmark.spare)
    tokens = config.tokens_per_forward or TOKENS[process.device.type]
    with memory_advice(f"--tokens_per_forward {tokens}: out of memory; give a smaller number"):
        scores = score(model, examples, rows, process, tokens)
    figures = benchmark.report(examples, scores)
    data = config.data
    if not data and benchmark.hub:
        data = benchmark.hub.get("dataset")
    facts = dict(
        benchmark=benchmark.name,
        data=data,
        **options,
        limit=config.limit or None,
        model=str(source),
        n_examples=len(examples),
        tokenizer=tokenizer.name,
        dtype=process.dtype_name,
        device=f"{process.world_size} x {process.device.type}",
    )
    facts = {name: value for name, value in facts.items() if value is not None}
    if config.json and process.is_main:
        results = results_of_examples(examples, scores)
        write_json(config.json, dict(**facts, figures=figures, examples=results))
    for name, value in facts.items():
        print_result(f"{name:<18} {value}")
    print_figures(benchmark, figures, len(examples))
    process.barrier()
    return figures


def take_options(benchmark, given):
    """Removes the benchmark's own flags from `given`, and returns their values: {name: value}.

    A flag that is not in `given` has its default value. given: {name: value} of all flags on the
    command line.
    """
    options = {}
    for kind in benchmark.options:
        for field in fields(kind):
            options[field.name] = given.pop(field.name, field.default)
    return options


def print_figures(benchmark, figures, n_examples):
    """Prints the metrics, {name: value}, each with its meaning."""
    for name, meaning in benchmark.figures.items():
        value = figures[name]
        text = f"{value:,.4f}" if value < 1e9 else f"{value:.4g}"
        if name in benchmark.proportions:  # adds the standard error
            text += f" ± {math.sqrt(value * (1 - value) / n_examples):.4f}"
        print_result(f"{name:<18} {text:<18} {meaning}")


def results_of_examples(examples, scores):
    """Returns a list with a dict for each example: its label, and the scores of its pairs."""
    results = [dict(label=example.label, **example.facts) for example in examples]
    for name, values in vars(scores).items():
        for result, own in zip(results, split_by_example(examples, values)):
            result[name] = own.tolist()
    return results


def launch(benchmark, GPT):
    """Runs a benchmark as a program. Prints a UserError as one line. GPT: as in run_benchmark."""
    run_program(lambda: run_benchmark(benchmark, GPT))
