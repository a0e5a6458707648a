"""Computes benchmarks in a training run."""

from plaingpt.base.errors import UserError
from plaingpt.base.terminal import print0
from plaingpt.distributed.process import on_rank0
from plaingpt.scoring.benchmark import check_logged, load_examples
from plaingpt.scoring.rows import make_rows
from plaingpt.scoring.score import TOKENS, score


def load_evals(benchmarks, tokenizer, gpt_config):
    """Loads the data of benchmarks -> [(Benchmark, its examples, its rows)].

    benchmarks: [(Benchmark, path of its file, or "" for the data of the hub)]. Without a path, a
    benchmark that has no data is skipped with a note. With a path, this raises UserError. It also
    does so if a benchmark does not say which figure is logged.
    """
    evals = []
    for benchmark, path in benchmarks:
        check_logged(benchmark)
        try:
            examples = on_rank0(load_examples, benchmark, path)
            rows = make_rows(examples, tokenizer, gpt_config, benchmark.prompt_ids, benchmark.spare)
            evals.append((benchmark, examples, rows))
        except UserError as error:
            if path:
                raise
            print0(f"note: {benchmark.name} is skipped: {error}")
    return evals


def run_evals(evals, model, process, config, step):
    """Scores all benchmarks. Prints and returns {stream: figure}, equal on all processes.

    evals: from load_evals. model: a GPT or a Pipeline. config: TrainConfig.
    """
    figures = {}
    tokens = min(config.batch_size * model.config.block_size, TOKENS[process.device.type])
    model.eval()
    for benchmark, examples, rows in evals:
        scores = score(model, examples, rows, process, tokens)
        report = benchmark.report(examples, scores)
        figures[benchmark.stream] = report[benchmark.logged]
    model.train()
    texts = [f"{stream} {value:.4f}" for stream, value in figures.items()]
    print0(" | ".join([f"step {step}", *texts]))
    return figures
