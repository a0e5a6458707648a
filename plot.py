"""Plots the logs of runs in one picture, and prints their final validation losses.

  python plot.py log/baby log/baby-wide           writes plot.png
  python plot.py log/base-? log/rms-?             draws two groups, base and rms
  python plot.py log/gpt2 --x tokens --output gpt2.svg
  python plot.py log/baby --panels loss bpb       draws only these panels
  python plot.py verdict.json                     loss over compute, from
                                                  experiment.py --sizes --json

Runs form a group if their names differ only in a number after a final "-" or
"_", and if their settings differ only in --seed or in flags that do not change
the losses. A line shows the mean of a group, and a band shows the mean ± one
standard deviation. The table shows the validation loss of each group at the
last step at which all its runs were validated. The table compares each group
with the first group, or says why their losses are not comparable. The 95%
confidence interval of the difference is from Welch's t-test, which needs two
runs in each group.

The training loss is drawn as a running mean. The y axes of the panels loss and
norm are scaled to the values after the first 10% of the steps. Dotted lines
show published scores.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plaingpt.checkpoint import list_model_files
from plaingpt.errors import UserError, explaining, require, run_program
from plaingpt.files import check_output, read_facts, read_json, read_streams
from plaingpt.flags import flag, parse_flags
from plaingpt.lab.verdict import welch
from plaingpt.settings import CHANGE_NO_LOSS
from plaingpt.terminal import print0, print_result

import numpy as np

# {panel: label of its y axis}, in the order of the picture. A stream that belongs to none of these
# panels gets its own panel after these panels.
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
# Published scores. build-nanogpt measured the loss on FineWeb-Edu. docs/benchmarks.md names the
# sources of the other scores.
SCORES = dict(
    loss={"GPT-2 124M": 3.2924},
    hella={"GPT-2 124M": 0.2955, "GPT-3 125M": 0.337},
    lambada={"GPT-2 124M": 0.3256, "GPT-3 125M": 0.427},
    story={"GPT-3 125M, per token": 0.633},
    wikitext={"GPT-2 124M": 37.37},
)
LARGEST = 1e100  # matplotlib's axis limits would overflow for values near 1e308
LOSSES = {"train": "training", "val": "validation"}  # {stream of the panel loss: label of its line}


@dataclass
class PlotConfig:
    output: str = flag("plot.png", "picture to write: .png, .svg or .pdf")
    x: Literal["steps", "tokens"] = flag("steps", "unit of the horizontal axis")
    panels: list[str] | None = flag(None, "panels to draw, such as loss, norm or hella [all]")


def read_run(directory):
    """Reads a run directory. Returns ({stream: {step: value}}, contents of run.json)."""
    streams = read_streams(Path(directory, "log.txt"))
    if not streams.keys() - {"tokens"}:
        raise UserError(f"{directory}: has no log.txt with values; give a run, such as log/baby")
    return streams, read_facts(Path(directory, "run.json"))


def group_runs(runs):
    """Groups runs by their names and settings. For example, rms-1 and rms-2 form the group rms.

    runs: {directory: run}. A run is (streams, facts), as read_run returns it. Returns {name of the
    group: list of runs}.
    """
    ignored = {"seed", *CHANGE_NO_LOSS}  # settings that may differ within a group
    groups = {}  # {(stem of the names, settings): {directory: run}}
    for directory, (streams, facts) in runs.items():
        settings = {}
        for name, value in facts.get("train_config", {}).items():
            if name not in ignored:
                settings[name] = value
        settings.update(facts.get("model_config", {}), fingerprints=facts.get("fingerprints"))
        settings.update(program=facts.get("program"))
        stem = re.sub(r"(?<!\de-)(?<=[-_])\d+$", "", directory)  # keeps the 3 of lr-1e-3
        groups.setdefault((stem, repr(settings)), {})[directory] = (streams, facts)
    named = {}
    for (stem, _), members in groups.items():
        name = stem.rstrip("-_")
        if len(members) == 1 or name in runs or name in named:
            name = ", ".join(members)
        named[name] = list(members.values())
    return named


def validation_of(facts):
    """Returns settings that must be equal in two runs, {name: value}.

    If one of these settings differs, the validation losses of the runs are not comparable. facts:
    the result of read_facts. Settings that are missing in `facts` are omitted.
    """
    known = {**facts["train_config"], **facts["model_config"], **facts["fingerprints"]}
    # train_config contains only the value of --tokenizer.
    known["tokenizer"] = facts.get("tokenizer")
    names = ("tokenizer", "block_size", "validation split", "val_tokens", "val_spread")
    return {name: known[name] for name in names if known.get(name) is not None}


def compare_groups(groups):
    """Returns the rows of a table: final validation losses, and differences from the first group.

    The losses of a group are from the last step at which all its runs were validated. If no run has
    a validation loss, returns []. groups: the result of group_runs.
    """
    rows = [("group", "runs", "step", "val loss", "difference", "95% interval")]
    first_losses = []  # losses of the first group
    first_validation = {}
    for name, runs in groups.items():
        validated = [streams for streams, _ in runs if "val" in streams]
        if not validated:
            continue
        steps = common_steps(validated, "val")
        if not steps:
            ends = sorted({max(streams["val"]) for streams in validated})
            steps_of_runs = ", ".join(map(str, ends))
            rows.append((name, str(len(validated)), steps_of_runs, "", "different steps", ""))
            continue
        losses = [streams["val"][steps[-1]] for streams in validated]
        validation = validation_of(runs[0][1])
        spread = f" ± {np.std(losses, ddof=1):.4f}" if len(losses) > 1 else ""
        difference = ""
        interval = ""
        differ = []
        for key, value in first_validation.items():
            if validation.get(key, value) != value:
                differ.append(key)
        if differ:
            difference = f"different {differ[0]}"
        elif first_losses:
            difference = f"{np.mean(losses) - np.mean(first_losses):+.4f}"
            if min(len(losses), len(first_losses)) > 1:
                mean, half, _ = welch(first_losses, losses)
                interval = f"{mean - half:+.4f} to {mean + half:+.4f}"
        else:
            first_losses = losses
            first_validation = validation
        rows.append(
            (
                name,
                str(len(losses)),
                str(steps[-1]),
                f"{np.mean(losses):.4f}{spread}",
                difference,
                interval,
            )
        )
    return rows if len(rows) > 1 else []


def legend_label(name):
    """Returns a name in a form that matplotlib's legend shows unchanged.

    A legend omits names that begin with "_", and "$" starts a formula.
    """
    return re.sub("^_", "./_", name).replace("$", r"\$")


def running_mean(values):
    """Returns, for each value, the mean of the values in a window that ends with this value.

    The length of the window is 1% of the number of values. Values that are not finite are ignored.
    """
    window = np.ones(max(1, len(values) // 100))
    finite = np.isfinite(values)
    sums = np.convolve(np.where(finite, values, 0), window)[: len(values)]
    counts = np.convolve(finite, window)[: len(values)]
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def split_stream(stream):
    """Splits the name of a stream that belongs to a layer, such as grad_11, into ("grad", 11).

    Returns (stream, None) for any other stream. A stream that begins with val_ or bpb_ ends with
    the name of a data set, which may end with any number. A number with four digits is not a layer,
    because models have at most 1000 layers.
    """
    found = re.fullmatch(r"(.+)_(\d{1,3})", stream)
    if found is None or stream.startswith(("val_", "bpb_")):
        return stream, None
    return found[1], int(found[2])


def panel_of(stream):
    """Returns the name of a stream's panel. Streams like grad_0 and grad_1 share a panel."""
    return "loss" if stream in LOSSES else split_stream(stream)[0]


def draw_group(panels, name, color, runs, x_kind):
    """Draws the streams of a group into panels.

    panels: {name: matplotlib Axes}. name, color: the label and the color of the group. runs: the
    streams of each run. x_kind: "steps" or "tokens".
    """
    # {step: number of tokens before this step}. log.txt contains the number of tokens after each
    # step.
    tokens = {step + 1: count for step, count in runs[0].get("tokens", {}).items()}
    for stream in runs[0]:
        panel = panels.get(panel_of(stream))  # the stream "tokens" has no panel
        steps = common_steps(runs, stream)
        if panel and steps:
            x = steps
            if x_kind == "tokens":
                x = [tokens.get(step, 0) for step in steps]
            values = np.array([[run[stream][step] for step in steps] for run in runs], float)
            values[np.abs(values) > LARGEST] = np.inf
            draw_stream(panel, stream, name, color, x, values)


def common_steps(runs, stream):
    """Returns, in order, the steps at which all runs have a value of the stream."""
    steps_of_runs = [set(run.get(stream, {})) for run in runs]
    return sorted(set.intersection(*steps_of_runs))


def draw_stream(panel, stream, name, color, x, values):
    """Draws the mean of a group's values, and a band if the group contains several runs.

    name: the name of the group. x: (n_steps). values: (n_runs, n_steps).
    """
    is_noisy = stream in ("train", "norm", "tok_s")
    if is_noisy:
        if len(values) == 1:
            panel.plot(x, values[0], color=color, alpha=0.15, linewidth=0.6)
        values = np.array([running_mean(row) for row in values])
    mean = values.mean(axis=0)
    label = name if panel_of(stream) == stream else f"{name}, {LOSSES.get(stream, stream)}"
    alpha = 1.0
    _, layer = split_stream(stream)
    if layer is not None:  # lines of later layers are lighter
        alpha = 8 / (8 + layer)
    panel.plot(
        x,
        mean,
        color=color,
        linewidth=1.5 if is_noisy else 0.8,
        label=label,
        marker="" if is_noisy or stream == "lr" else ".",
        alpha=alpha,
    )
    if len(values) > 1:
        sd = values.std(axis=0, ddof=1)
        panel.fill_between(x, mean - sd, mean + sd, color=color, alpha=0.2, linewidth=0)


def fit_to_the_end(panel):
    """Scales the y axis to the values after the first 10% of each line."""
    values = []
    for line in panel.lines:
        if not line.get_label().startswith("_"):  # a faint line without a label is "_child0"
            x, y = line.get_data()
            end = y[x >= 0.1 * x[-1]]
            values += end[np.isfinite(end)].tolist()
    if values:
        margin = 0.05 * (max(values) - min(values)) or 0.1
        panel.set_ylim(min(values) - margin, max(values) + margin)


def draw(runs, x, wanted=None):
    """Draws runs. Returns a matplotlib Figure.

    runs: {directory: run}, as in group_runs. x: "steps" or "tokens". wanted: names of the panels to
    draw, or None for all panels.
    """
    names = find_panels(runs)
    if missing := [name for name in wanted or [] if name not in names]:
        raise UserError(f"--panels {missing[0]}: the runs contain only {', '.join(names)}")
    names = wanted or names
    n_columns = min(2, len(names))
    n_rows = -(-len(names) // n_columns)  # rounded up
    size = (10, 3.2 * n_rows) if n_columns == 2 else (8, 4)
    figure = require("matplotlib.figure").Figure(size, dpi=120, layout="constrained")
    panels = {}
    for i, name in enumerate(names, start=1):
        panels[name] = figure.add_subplot(n_rows, n_columns, i)
    for i, (name, members) in enumerate(group_runs(runs).items()):
        group = [streams for streams, _ in members]
        if x == "tokens" and "tokens" not in group[0]:
            raise UserError(f"{name}: log.txt contains no token counts; use --x steps")
        draw_group(panels, legend_label(name), f"C{i}", group, x)
    # The published losses are for FineWeb-Edu.
    is_fineweb = all(reads_fineweb(facts) for _, facts in runs.values())
    for name, panel in panels.items():
        if name in ("loss", "bpb", "norm", "wikitext"):
            fit_to_the_end(panel)
        if name != "loss" or is_fineweb:
            for model, score in SCORES.get(name, {}).items():
                draw_score(panel, model, score)
        panel.set(xlabel=x, ylabel=PANELS.get(name, name))
        panel.grid(alpha=0.25)
        panel.xaxis.set_major_formatter(require("matplotlib.ticker").EngFormatter(sep=""))  # 1.5M
        panel.yaxis.set_major_formatter("{x:,.9g}")  # prints 0.0006, not 6 with a factor of 1e-4
    figure.legend(handles=find_legend(panels), loc="outside upper center", ncols=3)
    return figure


def find_legend(panels):
    """Returns the lines of the legend that all panels share. panels: {name: Axes}.

    For each group, the legend contains its lines in the panel loss. If this panel does not contain
    the group, the legend contains its lines in the first panel that does.
    """
    lines = []
    for name in sorted(panels, key=lambda name: name != "loss"):
        shown = {line.get_color() for line in lines}  # each group has its own color
        drawn, _ = panels[name].get_legend_handles_labels()
        lines += [line for line in drawn if line.get_color() not in shown]
    return lines


def find_panels(runs):
    """Returns the names of the panels that `runs` need, in the order of the figure."""
    found = set()
    for streams, _ in runs.values():
        found.update(map(panel_of, streams))
    known = [name for name in PANELS if name in found]
    return known + sorted(found - PANELS.keys() - {"tokens"})


def reads_fineweb(facts):
    """Returns whether a run trains on FineWeb-Edu with GPT-2's tokenizer. facts: from run.json."""
    return facts.get("tokenizer") == "gpt2" and "fineweb" in str(facts.get("train_config"))


def draw_score(panel, model, score):
    """Draws the published score of a model as a dotted line."""
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


def draw_sizes(entry, place):
    """Draws a verdict of experiment.py --sizes. Returns a matplotlib Figure.

    The figure shows the losses of the baseline and of the change over the compute of the baseline:
    the mean and the standard deviation of the runs at each size. entry: the verdict. place: the
    path of the file with the verdict, for error messages.
    """
    if "worth" not in entry:
        raise UserError(
            f"{place}: is not a verdict of experiment.py --sizes; give the file that --json wrote"
        )
    figure = require("matplotlib.figure").Figure((7, 4), dpi=120, layout="constrained")
    panel = figure.subplots()
    flops = [own["flops"] for own in entry["by_size"]]
    for key, name in (("base_losses", "base"), ("losses", entry["change"])):
        groups = [own[key] for own in entry["by_size"]]
        means = [np.mean(losses) for losses in groups]
        errors = [np.std(losses, ddof=1) for losses in groups]
        panel.errorbar(flops, means, errors, marker=".", capsize=4, label=legend_label(name))
    channels = ", ".join(str(own["size"]) for own in entry["by_size"])
    panel.set(xscale="log", xlabel=f"FLOPs of a run of the baseline, at {channels} channels")
    panel.set(ylabel="loss (nats per token): mean, standard deviation", title=entry["verdict"])
    panel.grid(alpha=0.25)
    panel.legend()
    return figure


def main(argv=None):
    given = parse_flags(__doc__, PlotConfig, argv=argv, rest="LOG_DIR")
    directories = [str(Path(name)) for name in given.pop("LOG_DIR") or ["."]]  # drops a final "/"
    config = PlotConfig(**given)
    if Path(config.output).suffix not in (".png", ".svg", ".pdf"):  # matplotlib would add a suffix
        raise UserError(f"--output {config.output}: give a name that ends with .png, .svg or .pdf")
    inputs = [path for name in directories for path in list_model_files(name)]
    check_output("--output", config.output, inputs)
    rows = []
    verdicts = [name for name in directories if name.endswith(".json")]
    if verdicts and len(directories) > 1:
        raise UserError(
            f"{verdicts[0]}: a verdict needs its own picture; give only this file, without runs"
        )
    if verdicts:
        place = Path(directories[0])
        figure = draw_sizes(read_json(place), place)
    else:
        runs = {directory: read_run(directory) for directory in directories}
        figure = draw(runs, config.x, config.panels)
        rows = compare_groups(group_runs(runs))
    with explaining(f"--output {config.output}: cannot write", "give another file"):
        figure.savefig(config.output)
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print_result("  ".join(map(str.ljust, row, widths)).rstrip())
    print0(f"{config.output}: {', '.join(directories)}")


if __name__ == "__main__":
    run_program(main)
