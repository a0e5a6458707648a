"""Plots the log of a run, or several runs in one picture.

  python plot.py log/baby log/baby.1              writes plot.png
  python plot.py log/gpt2 --x tokens --output gpt2.svg

The training loss is a running mean. Dotted lines show published scores.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from plaingpt.cli import UserError, parse_flags, read_json, require, run_program, writing
from plaingpt.runlog import read_log

# Panels in order: (label, {model: score}). The loss was measured by build-nanogpt on FineWeb-Edu.
PANELS = {
    "loss": ("loss (nats per token)", {"GPT-2 124M": 3.2924}),
    "bpb": ("bits per byte", {}),
    "hella": ("HellaSwag, acc_norm_token", {"GPT-2 124M": 0.2955, "GPT-3 125M": 0.337}),
    "lambada": ("LAMBADA, accuracy", {"GPT-2 124M": 0.3256, "GPT-3 125M": 0.427}),
    "story": ("Story Cloze, accuracy", {"GPT-3 125M": 0.633}),
    "wikitext": ("WikiText-103, perplexity per word", {"GPT-2 124M": 37.37}),
    "lr": ("learning rate", {}),
    "norm": ("gradient norm before clipping", {}),
    "tok_s": ("tokens per second", {})}
LOSSES = {"train": "training", "val": "validation"}  # streams in the first panel


@dataclass
class PlotConfig:
    output: Annotated[str, "picture to write: .png, .svg or .pdf"] = "plot.png"
    x: Annotated[Literal["steps", "tokens"], "horizontal axis"] = "steps"


def read_run(directory):
    """Reads a run directory -> ({stream: array of (steps, values)}, run.json or {})."""
    streams = {}
    for step, stream, value in read_log(Path(directory, "log.txt")):
        streams.setdefault(stream, []).append((step, float(value)))
    if not streams.keys() & {*PANELS, *LOSSES}:
        raise UserError(f"{directory}: no log.txt with numbers; give a run, such as log/baby")
    facts = read_json(Path(directory, "run.json"))  # build-nanogpt writes none
    return {stream: np.array(pairs).T for stream, pairs in streams.items()}, facts


def draw_run(panels, name, color, streams, position):
    """Draws one run into {panel: Axes}. position[step]: the step's place on the x axis."""
    for stream, (steps, values) in streams.items():
        panel = panels.get("loss" if stream in LOSSES else stream)
        label = f"{name}, {LOSSES[stream]}" if stream in LOSSES else name
        x = position[steps.astype(int)]
        if panel and stream in ("train", "norm", "tok_s"):
            panel.plot(x, values, color=color, alpha=0.15, linewidth=0.6)
            window = np.ones(max(1, len(values) // 100))
            finite = np.isfinite(values)
            sums = np.convolve(np.where(finite, values, 0), window)[: len(x)]
            counts = np.convolve(finite, window)[: len(x)]
            means = np.divide(sums, counts, out=np.full(len(x), np.nan), where=counts > 0)
            panel.plot(x, means, color=color, label=label)
        elif panel:
            marker = "" if stream == "lr" else "."
            panel.plot(x, values, color=color, linewidth=0.8, marker=marker, label=label)


def draw(runs, x):
    """{name: (streams, facts)} -> a matplotlib Figure. Raises UserError."""
    found = {"loss" if s in LOSSES else s for streams, _ in runs.values() for s in streams}
    names = [name for name in PANELS if name in found]
    rows = (len(names) + 1) // 2
    figure = require("matplotlib.figure").Figure((10, 3.2 * rows), dpi=120, layout="constrained")
    panels = {name: figure.add_subplot(rows, 2, i) for i, name in enumerate(names, start=1)}
    for i, (name, (streams, _)) in enumerate(runs.items()):
        last = int(max(steps[-1] for steps, _ in streams.values()))
        position = np.arange(last + 1)
        if x == "tokens":
            if "tokens" not in streams:
                raise UserError(f"{name}: log.txt has no stream tokens; use --x steps")
            steps, consumed = streams["tokens"]
            position = np.zeros(last + 2)
            position[steps.astype(int) + 1] = consumed  # after the step
        draw_run(panels, name.replace("$", r"\$"), f"C{i}", streams, position)
    fineweb = all(facts.get("tokenizer") == "gpt2" and "fineweb" in str(facts.get("train_config"))
                  for _, facts in runs.values())
    for name, panel in panels.items():
        label, scores = PANELS[name]
        for model, score in scores.items() if name != "loss" or fineweb else []:
            panel.axhline(score, color="black", linestyle=":", linewidth=1)
            panel.text(1, score, f"{model}: {score:g}", ha="right", va="bottom", size=8,
                       transform=panel.get_yaxis_transform())
        yscale = "log" if name in ("norm", "wikitext") else "linear"
        panel.set(xlabel=x, ylabel=label, yscale=yscale)
        panel.grid(alpha=0.25)
        panel.legend(fontsize=8)
        panel.xaxis.set_major_formatter(require("matplotlib.ticker").EngFormatter(sep=""))  # 1.5M
    return figure


def main(argv=None):
    given = parse_flags(__doc__, PlotConfig, argv=argv, rest="LOG_DIR")
    directories = given.pop("LOG_DIR") or ["."]
    config = PlotConfig(**given)
    if Path(config.output).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--output {config.output}: must be a .png, .svg or .pdf")
    figure = draw({directory: read_run(directory) for directory in directories}, config.x)
    with writing(config.output):
        figure.savefig(config.output)
    print(f"{config.output}: {', '.join(directories)}")


if __name__ == "__main__":
    run_program(main)
