"""Draws the ladder of an experiment: the losses of both sides, and what the change is worth."""

import re

from plaingpt.base.errors import UserError, require
from plaingpt.run.ladder import make_curve

import numpy as np


def legend_label(name):
    """Returns a name as matplotlib's legend shows it.

    A legend leaves out names that begin with "_", and reads "$" as the start of a formula.
    """
    return re.sub("^_", "./_", name).replace("$", r"\$")


def draw_ladder(entry, place):
    """Draws the JSON of experiment.py --sizes -> a matplotlib Figure.

    On the left, the loss of each run over the compute of the base, and the curve of each side. On
    the right, the compute multiplier of each size with its 95 % interval. place: the file, for
    messages. Raises UserError if the JSON has no ladder.
    """
    if "multipliers" not in entry:
        raise UserError(
            f"{place}: has no curves, as its verdict is not that of a finished ladder; "
            "give the --json of experiment.py --sizes"
        )
    figure = require("matplotlib.figure").Figure((10, 4), dpi=120, layout="constrained")
    losses, multipliers = figure.subplots(1, 2)
    x = np.log(entry["flops"])
    for i, (side, name) in enumerate((("base_losses", "base"), ("losses", entry["change"]))):
        for flops, values in zip(entry["flops"], entry[side]):
            losses.plot([flops] * len(values), values, ".", color=f"C{i}", alpha=0.5)
        grid, curve = make_curve(x, [np.mean(values) for values in entry[side]])
        losses.plot(np.exp(grid), curve, color=f"C{i}", label=legend_label(name))
    losses.set(xscale="log", xlabel="FLOPs of the training", ylabel="loss (nats per token)")
    losses.legend()
    m, low, high = np.transpose(entry["multipliers"])
    multipliers.errorbar(entry["sizes"], m, (m - low, high - m), fmt="o", capsize=4, color="C1")
    multipliers.axhline(1, color="black", linestyle=":", linewidth=1)
    multipliers.set(xlabel="channels", ylabel="compute multiplier", title=entry["verdict"])
    multipliers.set_xticks(entry["sizes"])
    for panel in (losses, multipliers):
        panel.grid(alpha=0.25)
    return figure
