"""Draws the pictures of lesson.md into docs/pictures/. First: pip install matplotlib

  python docs/pictures.py            draws all of them
  python docs/pictures.py stages     draws one; all others take a second each,
                                     but attention trains lesson/14_resume.py

The pictures have no words, so that both languages share them: only names of the code.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

ROOT = Path(__file__).resolve().parent.parent
BLUE = "#0072b2"
ORANGE = "#d55e00"
GREEN = "#009e73"
PALE = {BLUE: "#cfe4f2", ORANGE: "#f9dccb", GREEN: "#cdebe2", "grey": "#ececec"}
INK = "#222222"
COLORS = (BLUE, ORANGE)  # of rank 0 and rank 1


def blank(width, height, right, top):
    """Returns a figure without axes, and its Axes, from (0, 0) to (right, top)."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    ax = figure.subplots()
    ax.set(xlim=(0, right), ylim=(0, top))
    ax.axis("off")
    return figure, ax


def box(ax, corner, extent, text, color, size=11):
    """Draws a filled rectangle with a text in its middle.

    corner: (x, y) of its lower left corner. extent: (width, height).
    """
    x, y = corner
    width, height = extent
    face = PALE[color]
    ax.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=INK, linewidth=0.8))
    label(ax, x + width / 2, y + height / 2, text, size)


def label(ax, x, y, text, size=11, **options):
    ax.text(x, y, text, size=size, color=INK, ha="center", va="center", **options)


def arrow(ax, start, end, color=INK):
    style = dict(arrowstyle="-|>", color=color, linewidth=1.2, shrinkA=1, shrinkB=1)
    ax.annotate("", end, start, arrowprops=style)


def draw_shift():
    """x above y: each target is the input one place further on."""
    figure, ax = blank(7.5, 2.2, 11.2, 3.6)
    text = "the boats"
    n = len(text) - 1
    label(ax, 0.6, 2.5, "x", 14, family="monospace")
    label(ax, 0.6, 0.6, "y", 14, family="monospace")
    for i in range(n):
        place = 1.2 + i * 1.2
        label(ax, place + 0.5, 3.35, str(i), 9)
        box(ax, (place, 2), (1, 1), text[i].replace(" ", "␣"), BLUE, 14)
        box(ax, (place, 0.1), (1, 1), text[i + 1].replace(" ", "␣"), ORANGE, 14)
        arrow(ax, (place + 0.5, 2), (place + 0.5, 1.1))
        if i > 0:
            ax.plot([place + 0.25, place - 0.45], [2, 1.1], ":", color="#888888", linewidth=1)
    return figure


def draw_attention():
    """The scores of four positions with the mask, their softmax, and a head that has learned."""
    figure = Figure(figsize=(10, 3.6), layout="constrained", facecolor="white")
    axes = figure.subplots(1, 3, width_ratios=[1, 1, 1.25])
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(4, 4)).round(1)
    scores[np.triu_indices(4, 1)] = -np.inf
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    for ax, table, title in ((axes[0], scores, "q·k / √hs"), (axes[1], weights, "softmax")):
        ax.imshow(np.where(np.isinf(scores), np.nan, weights), cmap="Blues", vmin=0, vmax=1.4)
        for row in range(4):
            for column in range(4):
                number = table[row, column]
                text = "−∞" if np.isinf(number) else f"{number:.2g}".replace("-", "−")
                label(ax, column, row, text)
        ax.set_title(title, color=INK, size=11)
        ax.set(xticks=range(4), yticks=range(4), xticklabels=list("the␣"), xlabel="k")
        ax.set(yticklabels=list("the␣"), ylabel="q")
    text = "the boats came home on the "
    ax = axes[2]
    ax.imshow(learned_weights(text), cmap="Blues", vmin=0, vmax=0.6)
    names = list(text.replace(" ", "␣"))
    ax.set(xticks=range(len(names)), yticks=range(len(names)), xlabel="k", ylabel="q")
    ax.set_xticklabels(names, size=7)
    ax.set_yticklabels(names, size=7)
    ax.set_title("lesson/14_resume.py", color=INK, size=11)
    return figure


def learned_weights(text):
    """Trains lesson 14 -> the weights of one head of its first block, (T, T)."""
    names = {}
    program = (ROOT / "lesson" / "14_resume.py").read_text()
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as place:
        # Its checkpoint must not replace one of the reader's.
        exec(program.replace("log/lesson.pt", f"{place}/lesson.pt"), names)
    model = names["raw_model"].cpu()
    idx = torch.tensor([list(text.encode())])  # (1, T)
    T = idx.size(1)
    with torch.no_grad():
        x = model.wte(idx) + model.wpe.weight[:T]  # (1, T, C)
        block = model.h[0]
        q, k, _ = block.attn.c_attn(block.ln_1(x)).chunk(3, dim=2)  # (1, T, C) each
        q = q.unflatten(2, (names["n_head"], -1))[0, :, 0]  # (T, hs): of head 0
        k = k.unflatten(2, (names["n_head"], -1))[0, :, 0]  # (T, hs)
        scores = q @ k.T / k.size(1) ** 0.5  # (T, T)
        later = torch.ones(T, T, dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf).softmax(dim=1).numpy()


def draw_block():
    """The residual stream from the embedding to the head, and the block that adds to it."""
    figure, ax = blank(9, 2.9, 18, 5.6)
    ax.plot([2.2, 15.2], [1.2, 1.2], color=BLUE, linewidth=5, solid_capstyle="butt", zorder=0)
    box(ax, (0.2, 0.6), (2, 1.2), "wte\n+ wpe", BLUE)
    ax.add_patch(
        FancyBboxPatch((3.1, 0.3), 8.6, 5, boxstyle="round,pad=0.1", fill=False, linestyle="--")
    )
    label(ax, 11.0, 4.9, "× n_layer", 10)
    for left, norm, name, color in (
        (3.5, "ln_1", "attn", ORANGE),
        (7.7, "ln_2", "mlp", GREEN),
    ):
        arrow(ax, (left + 0.6, 1.3), (left + 0.6, 2.2))
        box(ax, (left, 2.2), (1.2, 0.8), norm, "grey", 10)
        ax.plot([left + 0.6, left + 0.6, left + 1.4], [3.0, 3.9, 3.9], color=INK, linewidth=1.2)
        box(ax, (left + 1.4, 3.4), (1.4, 1.0), name, color)
        ax.plot([left + 2.8, left + 3.2], [3.9, 3.9], color=INK, linewidth=1.2)
        arrow(ax, (left + 3.2, 3.9), (left + 3.2, 1.5))
        ax.plot([left + 3.2], [1.2], "o", markersize=15, color="white", markeredgecolor=INK)
        label(ax, left + 3.2, 1.2, "+", 13)
    box(ax, (13.0, 0.8), (1.2, 0.8), "ln_f", "grey", 10)
    box(ax, (15.2, 0.6), (1.8, 1.2), "lm_head", BLUE, 10)
    label(ax, 12.35, 1.6, "x", 11, family="monospace")
    label(ax, 12.35, 0.7, "(B, T, C)", 8)
    return figure


def draw_lr():
    """The learning rate over the steps of lessons 7 and 8."""
    figure = Figure(figsize=(7.5, 2.8), layout="constrained", facecolor="white")
    ax = figure.subplots()
    steps = range(300)
    ax.plot(steps, [4e-3] * 300, color="#888888", label="07_gpt2.py")
    names = {}
    program = (ROOT / "lesson" / "08_recipe.py").read_text()
    exec(program.rpartition("model = GPT()")[0].rpartition("\n")[0], names)
    ax.plot(steps, [names["get_lr"](step) for step in steps], color=BLUE, label="08_recipe.py")
    ax.axvline(50, color="#888888", linestyle=":", linewidth=1)
    ax.set(xlabel="step", ylabel="lr", xlim=(0, 300), ylim=(0, 4.5e-3))
    ax.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    ax.annotate("warmup_steps", (50, 4.2e-3), (58, 4.15e-3), size=9, color=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return figure


def draw_batches():
    """Which process takes which sequences of a step, in which micro-batch."""
    figure, ax = blank(9, 2.4, 19.2, 4.8)
    for i in range(16):
        label(ax, 3.3 + i, 4.5, str(i), 9)
    for world_size, bottom in ((1, 2.9), (2, 0.6)):
        label(ax, 1.3, bottom + 0.5, f"world_size\n= {world_size}", 10)
        for i in range(16):
            rank = i // 4 % world_size
            box(ax, (2.8 + i, bottom), (1, 1), "", COLORS[rank])
        for k in range(4):
            left = 2.8 + 4 * k
            rank = k % world_size
            ax.add_patch(Rectangle((left, bottom), 4, 1, fill=False, linewidth=2.2))
            label(ax, left + 2, bottom - 0.35, f"rank {rank}, micro-batch {k}", 9)
    return figure


def draw_parallel():
    """What each of two processes has of the model and of the data, in four kinds of training."""
    figure = Figure(figsize=(10, 3.6), layout="constrained", facecolor="white")
    for ax, kind in zip(figure.subplots(1, 4), ("DDP", "FSDP", "TP", "PP")):
        ax.set(xlim=(0, 10), ylim=(-1.2, 11.5))
        ax.axis("off")
        ax.set_title(kind, color=INK, size=12)
        for rank in (0, 1):
            left = 0.4 + 5 * rank
            label(ax, left + 2, 10.6, f"rank {rank}", 9)
            for layer in range(4):
                draw_part(ax, kind, rank, layer, left, 1.6 + 2.1 * layer)
            if kind in ("DDP", "FSDP"):
                box(ax, (left, -0.9), (4, 1.5), f"{4 * rank} … {4 * rank + 3}", COLORS[rank], 9)
            else:
                box(ax, (left, -0.9), (4, 1.5), "0 … 7", GREEN, 9)
        if kind == "PP":
            arrow(ax, (4.4, 4.5), (5.4, 6.6))
        else:
            arrow(ax, (4.9, 5.6), (5.5, 5.6))
            arrow(ax, (4.9, 5.6), (4.3, 5.6))
    return figure


def draw_part(ax, kind, rank, layer, left, bottom):
    """Draws a layer of the model, and in colour the part of it that a process has."""
    x, y, width, height = dict(
        DDP=(0, 0, 4, 1.6),
        FSDP=(0, 0.8 - 0.8 * rank, 4, 0.8),
        TP=(2 * rank, 0, 2, 1.6),
        PP=(0, 0, 4, 1.6 * (layer // 2 == rank)),
    )[kind]
    ax.add_patch(Rectangle((left + x, bottom + y), width, height, facecolor=COLORS[rank]))
    ax.add_patch(Rectangle((left, bottom), 4, 1.6, fill=False, edgecolor=INK))


def draw_stages():
    """The loss and the time of the programs that train, from the table of lesson.md."""
    page = (ROOT / "docs" / "lesson.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `lesson/(\d\d_\w+)\.py` \|.*\| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    names = [name for name, _, _ in rows]
    figure = Figure(figsize=(9, 4.4), layout="constrained", facecolor="white")
    for ax, k, unit, color in zip(figure.subplots(1, 2), (1, 2), ("loss", "ms"), (BLUE, ORANGE)):
        values = [float(row[k]) for row in rows]
        ax.barh(names, values, color=color)
        for i, value in enumerate(values):
            ax.text(value, i, f" {rows[i][k]}", va="center", size=9, color=INK)
        ax.set_xlabel(unit)
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
        ax.margins(x=0.12)
    return figure


PICTURES = dict(
    shift=draw_shift,
    attention=draw_attention,
    block=draw_block,
    lr=draw_lr,
    batches=draw_batches,
    parallel=draw_parallel,
    stages=draw_stages,
)


def main():
    os.chdir(ROOT)  # the programs of the lesson read input.txt there
    for name in sys.argv[1:] or PICTURES:
        figure = PICTURES[name]()
        path = ROOT / "docs" / "pictures" / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
