"""Plots the logs of runs in one picture, and prints their final validation losses.

  python plot.py log/baby log/baby-wide           writes plot.png
  python plot.py log/base-? log/rms-?             draws two groups: base, rms
  python plot.py log/gpt2 --x tokens --output gpt2.svg

Runs form a group if their names differ only in the number after a last "-" or
"_", and their settings only in --seed, or in flags that do not change losses. A
line shows the mean of a group, and a band its mean ± standard deviation. The
table compares each group with the first one. The 95 % interval of the
difference is Student's, and uses the deviations of both groups. A group of one
run has no deviation of its own.

The training loss is a running mean. The axes of loss and norm fit the values
after the first tenth of the runs. Dotted lines show published scores.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from plaingpt import cli
from plaingpt.cli import require
from plaingpt.intervals import unpaired_interval
from train_gpt2 import TrainConfig

# These are the panels in their order, with their labels. Streams that are not here follow in panels
# of their own.
PANELS = dict(
    loss="loss (nats per token)",
    bpb="bits per byte",
    hella="HellaSwag, acc_norm_token",
    lambada="LAMBADA, accuracy",
    story="Story Cloze, accuracy",
    wikitext="WikiText-103, perplexity per word",
    lr="learning rate",
    norm="gradient norm before clipping",
    tok_s="tokens per second",
)
# These are published scores. build-nanogpt measured the loss on FineWeb-Edu.
SCORES = dict(loss={"GPT-2 124M": 3.2924}, hella={"GPT-2 124M": 0.2955, "GPT-3 125M": 0.337})
LOSSES = {"train": "training", "val": "validation"}  # streams in the first panel


@dataclass
class PlotConfig:
    output: Annotated[str, "picture to write: .png, .svg or .pdf"] = "plot.png"
    x: Annotated[Literal["steps", "tokens"], "horizontal axis"] = "steps"


def read_run(directory):
    """Reads a run directory -> ({stream: {step: value}}, run.json or {}). Raises UserError."""
    streams = cli.read_streams(Path(directory, "log.txt"))
    if not streams.keys() - {"tokens"}:
        raise cli.UserError(f"{directory}: no log.txt with numbers; give a run, such as log/baby")
    return streams, cli.read_json(Path(directory, "run.json"))  # build-nanogpt writes none


def group_runs(runs):
    """Groups {directory: (streams, facts)} -> {group: list of streams}. rms-1, rms-2 are in rms."""
    groups, named, ignored = {}, {}, cli.marked(TrainConfig, cli.FREE, cli.REPEAT)
    for name, (streams, facts) in runs.items():
        same = {k: v for k, v in facts.get("train_config", {}).items() if k not in ignored}
        stem = re.sub(r"(?<!\de-)(?<=[-_])\d+$", "", name)
        same.update(facts.get("model_config", {}), program=facts.get("program"))
        groups.setdefault((stem, repr(same)), {})[name] = streams
    for (stem, _), members in groups.items():
        name = stem.rstrip("-_")
        if len(members) == 1 or name in runs or name in named:
            name = ", ".join(members)
        named[name] = [*members.values()]
    return named


def compare(groups):
    """Returns the rows of a table: final validation losses, and differences to the first group.

    There are none if no run has a validation loss.
    """
    rows, first = [("group", "runs", "step", "val loss", "difference", "95 % interval")], None
    for name, runs in groups.items():
        ends = [[*run["val"].items()][-1] for run in runs if "val" in run]  # (step, loss)
        if not ends:
            continue
        losses = [loss for _, loss in ends]
        spread = f" ± {np.std(losses, ddof=1):.4f}" if len(losses) > 1 else ""
        difference, interval = "", ""
        if first:
            mean, half = unpaired_interval(first, losses)
            difference = f"{mean:+.4f}"
            interval = f"{mean - half:+.4f} to {mean + half:+.4f}" if half < np.inf else ""
        first = first or losses
        steps = ", ".join(map(str, sorted({step for step, _ in ends})))
        rows.append(
            (name, str(len(losses)), steps, f"{np.mean(losses):.4f}{spread}", difference, interval)
        )
    return rows if first else []


def running_mean(values):
    """Replaces each value by the mean of the hundredth of the run that ends with it.

    Ignores values that are not finite.
    """
    window = np.ones(max(1, len(values) // 100))
    finite = np.isfinite(values)
    sums = np.convolve(np.where(finite, values, 0), window)[: len(values)]
    counts = np.convolve(finite, window)[: len(values)]
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def panel_of(stream):
    """Returns the name of the panel for a stream. Streams like grad_0 and grad_1 share one."""
    return "loss" if stream in LOSSES else re.sub(r"_\d+$", "", stream)


def draw_group(panels, name, color, runs, x_kind):
    """Draws a group into {panel: Axes}. x_kind: "steps" or "tokens"."""
    # {step: tokens consumed before it}. The log has the count after a step.
    tokens = {step + 1: count for step, count in runs[0].get("tokens", {}).items()}
    for stream in runs[0]:
        panel = panels.get(panel_of(stream))
        # All runs have these steps.
        steps = sorted(set.intersection(*({*run.get(stream, ())} for run in runs)))
        if not (panel and steps):
            continue
        x = steps if x_kind == "steps" else [tokens.get(step, 0) for step in steps]
        values = np.array([[run[stream][step] for step in steps] for run in runs])  # (runs, steps)
        noisy = stream in ("train", "norm", "tok_s")
        if noisy:
            if len(runs) == 1:
                panel.plot(x, values[0], color=color, alpha=0.15, linewidth=0.6)
            values = np.array([running_mean(row) for row in values])
        mean = values.mean(axis=0)
        label = name if panel_of(stream) == stream else f"{name}, {LOSSES.get(stream, stream)}"
        number = re.search(r"_(\d+)$|$", stream)[1] or 0  # lines of higher numbers are lighter
        panel.plot(
            x,
            mean,
            color=color,
            linewidth=1.5 if noisy else 0.8,
            label=label,
            marker="" if noisy or stream == "lr" else ".",
            alpha=8 / (8 + int(number)),
        )
        if len(runs) > 1:
            sd = values.std(axis=0, ddof=1)
            panel.fill_between(x, mean - sd, mean + sd, color=color, alpha=0.2, linewidth=0)


def fit_to_the_end(panel):
    """Fits the y axis to the values after the first tenth of each line."""
    lines = [line.get_data() for line in panel.lines if not line.get_label().startswith("_")]
    values = np.concatenate([[np.nan], *(y[x >= 0.1 * x[-1]] for x, y in lines)])
    values = values[np.isfinite(values)]
    if values.size:
        margin = 0.05 * np.ptp(values) or 0.1
        panel.set_ylim(values.min() - margin, values.max() + margin)


def draw(runs, x):
    """Draws runs, {directory: (streams, facts)} -> a matplotlib Figure. Raises UserError."""
    found = {panel_of(stream) for streams, _ in runs.values() for stream in streams}
    names = [name for name in PANELS if name in found]
    names += sorted(found - PANELS.keys() - {"tokens"})
    rows = (len(names) + 1) // 2
    figure = require("matplotlib.figure").Figure((10, 3.2 * rows), dpi=120, layout="constrained")
    panels = {name: figure.add_subplot(rows, 2, i) for i, name in enumerate(names, start=1)}
    for i, (name, group) in enumerate(group_runs(runs).items()):
        if x == "tokens" and "tokens" not in group[0]:
            raise cli.UserError(f"{name}: log.txt has no stream tokens; use --x steps")
        # A legend leaves out names that begin with "_".
        draw_group(panels, re.sub("^_", "./_", name).replace("$", r"\$"), f"C{i}", group, x)
    fineweb = all(
        facts.get("tokenizer") == "gpt2" and "fineweb" in str(facts.get("train_config"))
        for _, facts in runs.values()
    )
    for name, panel in panels.items():
        if name in ("loss", "bpb", "norm", "wikitext"):
            fit_to_the_end(panel)
        for model, score in SCORES.get(name, {}).items() if name != "loss" or fineweb else []:
            panel.axhline(score, color="black", linestyle=":", linewidth=1)
            panel.text(
                1,
                score,
                f"{model}: {score:g}",
                ha="right",
                va="bottom",
                size=8,
                transform=panel.get_yaxis_transform(),
                clip_on=True,
            )
        panel.set(xlabel=x, ylabel=PANELS.get(name, name))
        panel.grid(alpha=0.25)
        panel.xaxis.set_major_formatter(require("matplotlib.ticker").EngFormatter(sep=""))  # 1.5M
        panel.yaxis.set_major_formatter("{x:,.9g}")  # writes 0.0006, not 6 and 1e-4
    handles = figure.axes[0].get_legend_handles_labels()  # all panels share one legend
    figure.legend(*handles, loc="outside upper center", ncols=3)
    return figure


def main(argv=None):
    given = cli.parse_flags(__doc__, PlotConfig, argv=argv, rest="LOG_DIR")
    directories = [str(Path(name)) for name in given.pop("LOG_DIR") or ["."]]  # drops a last /
    config = PlotConfig(**given)
    runs = {directory: read_run(directory) for directory in directories}
    figure = draw(runs, config.x)
    with cli.explaining(f"--output {config.output}: cannot write", "give another file"):
        figure.savefig(config.output)
    rows = compare(group_runs(runs))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cli.print0("  ".join(map(str.ljust, row, widths)).rstrip())
    cli.print0(f"{config.output}: {', '.join(directories)}")


if __name__ == "__main__":
    cli.run_program(main)
