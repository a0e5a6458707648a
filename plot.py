"""Draws the logs of one run, or of several laid over each other.

  python plot.py log/baby                                     into plot.png
  python plot.py log/baby log/baby.1 --output both.svg        two runs, to compare
  python plot.py log/gpt2 --x tokens                          over tokens, for runs whose batches differ

Training loss is a running mean over a hundredth of the run; validation, on top of it, has dots. Horizontal lines are what
others reached. A run is a directory with a log.txt and a run.json, as train_gpt2.py leaves it; one still going on will do.
"""

# Read next: checkpoint.py.

import json
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path

import numpy as np

from plaingpt.checkpoint import read_log
from plaingpt.cli import UserError, parse_flags, run, writing
from train_gpt2 import TrainConfig, get_batch_tokens

# Streams of the log, in the order of their panels: title of the axis, and {who: what they reached}.
STREAMS = {
    "loss": ("loss (nats a token)", {}),
    "hella": ("HellaSwag, accuracy per token", {"GPT-2 124M": 0.2955, "GPT-3 124M": 0.337}),
    "lambada": ("LAMBADA, accuracy", {"GPT-2 124M": 0.3256, "GPT-3 124M": 0.427}),
    "story": ("Story Cloze, accuracy", {"GPT-3 124M": 0.633}),
    "wikitext": ("WikiText-103, perplexity a word", {"GPT-2 124M": 37.37}),
    "lr": ("learning rate", {}),
    "norm": ("gradient norm, before clipping", {}),
    "tok_s": ("tokens a second", {}),
}
PANEL = {"train": "loss", "val": "loss"}
FINEWEB_LOSS = {"GPT-2 124M": 3.2924}  # on FineWeb-Edu's validation shard, OpenAI's weights; build-nanogpt
COLORS, STYLES = ("#0b5394", "#b45f06", "#38761d", "#741b47", "#444444"), ("-", "--", "-.", ":")  # told apart in grey, too


@dataclass
class PlotConfig:
    output: str = "plot.png"  # the picture: .png, .svg or .pdf
    x: str = "steps"  # or tokens


def read_run(directory):
    """A run directory -> ({stream: (steps, values)}, its run.json or {}). Raises UserError if there is no log in it."""
    directory, streams = Path(directory), {}
    if not (directory / "log.txt").is_file():
        raise UserError(f"{directory}: holds no log.txt; give the directory of a run, such as log/baby")
    for step, stream, value in read_log(directory / "log.txt"):
        streams.setdefault(stream, []).append((step, float(value)))
    if not streams:
        raise UserError(f"{directory}: its log.txt has no line of step, stream and value; give the directory of another run")
    try:
        facts = json.loads((directory / "run.json").read_text())
    except (OSError, ValueError):
        facts = {}  # a log of build-nanogpt has none
    return {stream: np.array(pairs).T for stream, pairs in streams.items()}, facts


def tokens_until(facts, last):
    """(last + 1) numbers: the tokens that a run had seen before each step. Raises KeyError without a configuration."""
    known = {f.name for f in fields(TrainConfig)}
    config = TrainConfig(**{k: v for k, v in facts["train_config"].items() if k in known})
    return np.array([0, *accumulate(get_batch_tokens(step, config) for step in range(last))])


def running_mean(values, n):
    """Each value with up to n - 1 before it, averaged: (N) -> (N)."""
    sums, ends = np.insert(np.cumsum(values), 0, 0), np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - n)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw(runs, x):
    """{name: (streams, facts)} -> a matplotlib Figure. Raises UserError if a run does not say how many tokens a step has."""
    from matplotlib.figure import Figure  # without pyplot no window is ever asked for
    from matplotlib.ticker import EngFormatter

    found = {PANEL.get(stream, stream) for streams, _ in runs.values() for stream in streams}
    names = [name for name in STREAMS if name in found]
    rows = -(-len(names) // 2)
    figure = Figure(figsize=(10, 3.2 * rows), layout="constrained", dpi=120)
    panels = dict(zip(names, figure.subplots(rows, 2, squeeze=False).flat))
    for panel in figure.axes[len(names):]:
        panel.remove()
    for number, (label, (streams, facts)) in enumerate(runs.items()):
        look = dict(color=COLORS[number % len(COLORS)], linestyle=STYLES[number % len(STYLES)])
        if x == "tokens":
            try:
                position = tokens_until(facts, int(max(steps[-1] for steps, _ in streams.values())))
            except KeyError as error:
                raise UserError(f"{label}: no run.json says how many tokens its steps have; draw it with --x steps") from error
        for stream, (steps, values) in streams.items():
            at = position[steps.astype(int)] if x == "tokens" else steps
            panel = panels.get(PANEL.get(stream, stream))  # None for a stream of somebody else's
            if panel and stream in ("train", "norm", "tok_s"):
                panel.plot(at, values, color=look["color"], alpha=0.15, linewidth=0.6)
                panel.plot(at, running_mean(values, max(1, len(values) // 100)), **look, linewidth=1.2,
                           label=f"{label}, training" if stream == "train" else label)
            elif panel:
                panel.plot(at, values, **look, linewidth=0.8, marker="o" if stream != "lr" else None, markersize=3.5,
                           label=f"{label}, validation" if stream == "val" else label)
    shards = all(facts.get("tokenizer") == "gpt2" and "fineweb" in facts["train_config"]["data"] for _, facts in runs.values())
    for name, panel in panels.items():
        title, others = STREAMS[name]
        for who, value in (FINEWEB_LOSS if name == "loss" and shards else others).items():
            panel.axhline(value, color="black", linestyle=(0, (1, 2)), linewidth=1)
            panel.annotate(f"{who}: {value:g}", (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", size=8)
        panel.set(xlabel=x, ylabel=title)
        panel.grid(alpha=0.25)
        panel.legend(fontsize=8)
        if name in ("norm", "wikitext"):
            panel.set_yscale("log")
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))  # 500k, 1.5M
        panel.yaxis.set_major_formatter("{x:,g}")
        panel.yaxis.set_minor_formatter("{x:,g}")
    return figure


def main(argv=None):
    given = parse_flags(__doc__, PlotConfig, argv=argv, rest="LOG_DIR")
    directories = given.pop("LOG_DIR")
    config = PlotConfig(**given)
    if not directories:
        raise UserError("no run is named; give its directory, such as log/baby")
    if config.x not in ("steps", "tokens"):
        raise UserError(f"--x {config.x} is none of steps, tokens")
    if Path(config.output).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--output {config.output}: not a .png, .svg or .pdf")
    figure = draw({directory: read_run(directory) for directory in directories}, config.x)
    with writing(config.output):
        figure.savefig(config.output)
    print(f"{config.output}: {', '.join(directories)}")


if __name__ == "__main__":
    run(main)
