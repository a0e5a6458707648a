"""plot.py: the lines of a plot, groups of runs, published scores, and unusual runs."""

import re
from xml.etree import ElementTree

from plaingpt import files
from plaingpt.errors import UserError

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT, program, read_log, train

import plot

BABY = ROOT / "log/records/baby"


def lines_of(*directories, x="steps"):
    """Returns the lines of a plot: {axis title: {label: (x, y)}}.

    Omits faint lines and published scores.
    """
    figure = plot.draw({path.name: plot.read_run(path) for path in directories}, x)
    return {
        axes.get_ylabel(): {
            line.get_label(): line.get_data()
            for line in axes.lines
            if not line.get_label().startswith("_")
        }
        for axes in figure.axes
    }


def test_the_plot_shows_the_log():
    lines, log = lines_of(BABY), read_log(BABY)
    for title, label, stream in (
        ("loss (nats per token)", "baby, validation", "val"),
        ("learning rate", "baby", "lr"),
    ):
        drawn = {int(step): f"{value:.8g}" for step, value in zip(*lines[title][label])}
        assert drawn == {step: value for (step, name), value in log.items() if name == stream}
    x, y = lines["loss (nats per token)"]["baby, training"]
    losses = [float(log[step, "train"]) for step in range(2700)]
    assert y[2000] == pytest.approx(np.mean(losses[1974:2001]))  # a mean of 27 steps
    assert y[3] == pytest.approx(np.mean(losses[:4]))


def test_only_the_wanted_panels_are_drawn():
    runs = {"baby": plot.read_run(BABY)}
    figure = plot.draw(runs, "steps", ["norm", "loss"])
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["gradient norm before clipping", "loss (nats per token)"]
    with pytest.raises(UserError, match=r"--panels hella: the runs contain only loss, bpb, lr, "):
        plot.draw(runs, "steps", ["hella"])


def legend_of(runs, panels=None):
    """Returns the texts in the legend of a plot. runs: {name: streams}."""
    figure = plot.draw({name: (streams, {}) for name, streams in runs.items()}, "steps", panels)
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_every_group_is_in_the_legend():
    """The legend lists the lines of a group in the panel "loss".

    For a group without a line in this panel, the legend lists the lines in the group's first panel.
    """
    streams = {name: {0: 1.0, 1: 1.0} for name in ("lr", "train", "val")}
    runs = {"log/a": streams, "log/b": streams, "log/c": {"lr": streams["lr"], "mine": {0: 1.0}}}
    losses = [f"log/{run}, {kind}" for run in "ab" for kind in ("training", "validation")]
    assert legend_of(runs) == [*losses, "log/c"]
    assert legend_of(runs, ["lr", "loss"]) == [*losses, "log/c"]
    assert legend_of(runs, ["lr", "mine"]) == ["log/a", "log/b", "log/c"]


@pytest.mark.slow
def test_runs_that_differ_in_their_last_number_are_a_group(tmp_path):
    """The interval, calculated by hand, is -0.2 ± t(4) x 0.1 x sqrt(2/3), with t(4) = 2.776."""
    for name, final in (
        ("base-1", 1.0),
        ("base-2", 1.1),
        ("base-3", 1.2),
        ("new-1", 0.8),
        ("new-2", 0.9),
        ("new-3", 1.0),
        ("new.3", 0.5),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.txt").write_text(
            f"0 val 5.5\n50 val 2\n50 mine 7\n100 val {final}\n100 mine {final}\n"
        )
    paths = sorted(tmp_path.iterdir())
    out, _ = program(*paths, cwd=tmp_path, program="plot.py")
    rows = [re.split(r"  +", line) for line in out.replace(f"{tmp_path}/", "").splitlines()[1:4]]
    assert rows == [
        ["base", "3", "100", "1.1000 ± 0.1000"],
        ["new", "3", "100", "0.9000 ± 0.1000", "-0.2000", "-0.4267 to +0.0267"],
        ["new.3", "1", "100", "0.5000", "-0.6000"],  # one run has no variance
    ]
    # Runs with different learning rates are not a group.
    assert len(plot.group_runs(dict.fromkeys(["lr-1e-3", "lr-1e-2"], ({}, {})))) == 2
    widths = {f"w-{n}": ({}, {"model_config": {"n_embd": n}}) for n in (64, 128)}
    seeds = {f"w-{n}": ({}, {"train_config": {"seed": n, "log_dir": n}}) for n in (1, 2)}
    assert [*plot.group_runs(widths | seeds)] == ["w-64", "w-128", "w"]
    assert [*plot.group_runs(seeds | {"w": ({}, {})})] == ["w-1, w-2", "w"]
    programs = {f"w-{n}": ({}, {"program": n // 2}) for n in (1, 2, 3)}
    assert [*plot.group_runs(programs)] == ["w-1", "w"]  # a mean over two programs would be wrong
    # These two runs have no common step, so there is no line to draw.
    plot.draw({"a-1": ({"val": {0: 1.0}}, {}), "a-2": ({"val": {9: 1.0}}, {})}, "steps")
    figure = plot.draw({path.name: plot.read_run(path) for path in paths}, "steps")
    loss, mine = figure.axes
    assert mine.get_ylabel() == "mine"
    assert [line.get_ydata()[-1] for line in loss.lines] == pytest.approx([1.1, 0.9, 0.5])
    spread = mine.collections[0].get_paths()[0].vertices[:, 1]  # the band of "base"
    assert spread.min() == pytest.approx(1.0) and spread.max() == 7
    # The loss in step 0 does not affect the limits of the axis.
    assert loss.get_ylim()[0] < 0.5 and 2 < loss.get_ylim()[1] < 2.2


def run_with(loss, tokenizer="bytes", split="9 tokens", **settings):
    """Returns what read_run would return for a run with a single validation loss."""
    facts = dict(
        tokenizer=tokenizer,
        model_config=dict(block_size=settings.pop("block_size", 64)),
        train_config=dict(val_tokens=100, val_spread=True, max_lr=0.1) | settings,
        fingerprints={"training split": "81 tokens", "validation split": split},
    )
    return {"val": {5: loss}}, facts


@pytest.mark.parametrize(
    "settings, difference",
    [
        (dict(max_lr=0.2), "+1.0000"),
        (dict(tokenizer="gpt2"), "different tokenizer"),
        (dict(block_size=32), "different block_size"),
        (dict(split="8 tokens"), "different validation split"),
        (dict(val_tokens=50), "different val_tokens"),
        (dict(val_spread=False), "different val_spread"),
    ],
)
def test_losses_are_compared_if_the_validation_is_the_same(settings, difference):
    runs = {f"a-{i}": run_with(2 + i) for i in range(2)}
    runs |= {f"b-{i}": run_with(3 + i, **settings) for i in range(2)}
    _, first, second = plot.compare_groups(plot.group_runs(runs))
    assert (first[4], second[4], second[5] > "") == ("", difference, difference == "+1.0000")
    build_nanogpt = {"val": {5: 9.5}}, dict(train_config={}, model_config={}, fingerprints={})
    *_, row = plot.compare_groups(plot.group_runs(runs | {"log": build_nanogpt}))
    assert row[:5] == ("log", "1", "5", "9.5000", "+7.0000")


def test_a_mean_is_of_losses_of_the_same_step():
    """A run of a group may have fewer steps than the other runs, because it has stopped early."""
    curves = {
        "a-1": {0: 5.5, 100: 2.0, 1000: 1.0},
        "a-2": {0: 5.5, 100: 4.0},
        "b-1": {50: 2.0},
        "b-2": {60: 2.0},
        "c": {100: 2.5},
    }
    facts = dict(train_config={}, model_config={}, fingerprints={})
    groups = plot.group_runs({name: ({"val": val}, facts) for name, val in curves.items()})
    assert [tuple(filter(None, row)) for row in plot.compare_groups(groups)[1:]] == [
        ("a", "2", "100", "3.0000 ± 1.4142"),
        ("b", "2", "50, 60", "different steps"),
        ("c", "1", "100", "2.5000", "-0.5000"),
    ]
    for name in "ac":
        del groups[name]
    assert plot.compare_groups(groups)[1:] == [("b", "2", "50, 60", "", "different steps", "")]


def test_runs_of_other_data_are_no_group():
    """The file of --data may have changed between the runs."""
    runs = {"a-1": run_with(1.0), "a-2": run_with(1.5), "a-3": run_with(2.0, split="8 tokens")}
    assert [*plot.group_runs(runs)] == ["a", "a-3"]


def test_streams_that_differ_in_their_last_number_share_a_panel():
    streams = {f"grad_{i}": {0: i, 1: i} for i in range(12)} | {"b": {0: 1, 1: 1}, "val": {0: 2}}
    figure = plot.draw({"run": (streams, {})}, "steps")
    assert [axes.get_ylabel() for axes in figure.axes][1:] == ["b", "grad"]
    labels = [line.get_label() for line in figure.axes[2].lines]
    assert labels == [f"run, grad_{i}" for i in range(12)]


def test_published_scores_are_drawn():
    """The run does not train on FineWeb-Edu, so no published loss is drawn, only other scores."""
    streams = {name: {0: 1.0, 1: 1.0} for name in ("val", "hella", "lambada", "story", "wikitext")}
    figure = plot.draw({"run": (streams, {})}, "steps")
    assert [[text.get_text() for text in axes.texts] for axes in figure.axes] == [
        [],
        ["GPT-2 124M: 0.2955", "GPT-3 125M: 0.337"],
        ["GPT-2 124M: 0.3256", "GPT-3 125M: 0.427"],
        ["GPT-3 125M, per token: 0.633"],
        ["GPT-2 124M: 37.37"],
    ]
    assert [line.get_ydata()[0] for line in figure.axes[2].lines[1:]] == [0.3256, 0.427]


def test_published_scores_are_those_of_the_page():
    page = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    for i, stream in enumerate(("hella", "lambada", "story", "wikitext"), start=2):
        for label, score in plot.SCORES[stream].items():
            model = label.removesuffix(", per token")
            (row,) = re.findall(rf"^\| {model} \|.*", page, re.M)
            assert f"{score:g}" in row.split("|")[i]


def test_a_year_is_no_layer():
    """Each data set has its own panel, even if its name ends with a number."""
    names = ["val_wiki_2023", "val_wiki_2024", "bpb_part_1", "bpb_part_900", "score_2024"]
    streams = {name: {0: 2.0, 1: 1.0} for name in names}
    panels = plot.draw({"run": (streams | {"val": {0: 2}}, {})}, "steps").axes
    assert [axes.get_ylabel() for axes in panels][1:] == sorted(names)
    for axes in panels[1:]:
        (line,) = axes.lines
        assert line.get_label() == "run" and line.get_alpha() == 1


@pytest.mark.parametrize("output", ["curve", "r-2", ".png", "x.txt"])
def test_the_kind_of_the_picture_must_be_known(output):
    with pytest.raises(UserError, match=f"--output {output}: give a name that ends with .png"):
        plot.main([str(BABY), "--output", output])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_writes_every_format(tmp_path, kind):
    program(BABY, BABY, "--output", f"x.{kind}", cwd=tmp_path, program="plot.py")
    path = tmp_path / f"x.{kind}"
    if kind == "png":
        pixels = matplotlib.image.imread(path)[..., :3]
        assert pixels.shape[1] == 1200 and 0.7 < pixels.mean() < 1  # the background is white
    elif kind == "svg":  # in an .svg file, a comment contains each text of the plot
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "<!-- loss (nats per token) -->" in path.read_text("utf-8")
    else:
        data = path.read_bytes()
        assert data.startswith(b"%PDF-") and data.rstrip().endswith(b"%%EOF")
        assert b"/Count 1 " in data  # the file has one page


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, sentence",
    [
        ([], ".: has no log.txt with values; give a run, such as log/baby"),
        (["nowhere"], "nowhere: has no log.txt with values"),
        (["plain", "--x", "tokens"], "plain: log.txt contains no token counts; use --x steps"),
        (
            [BABY, "--output", "a.xyz"],
            "--output a.xyz: give a name that ends with .png",
        ),
        ([BABY, "--output", "no/where.png"], "--output no/where.png: cannot write there; give"),
    ],
)
def test_each_mistake_gives_a_one_sentence_error(tmp_path, flags, sentence):
    (tmp_path / "log.txt").write_text("hello\n")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "log.txt").write_text("0 train 10.9\n")  # as build-nanogpt writes it
    _, err = program(*flags, cwd=tmp_path, program="plot.py", status=2)
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1, err


def test_the_picture_replaces_no_file_of_a_run(tmp_path):
    (tmp_path / "log.txt").write_text("0 train 10.9\n")
    (tmp_path / "a.png").symlink_to("log.txt")
    with pytest.raises(UserError, match="a.png: is also an input; give another file"):
        plot.main([str(tmp_path), "--output", str(tmp_path / "a.png")])


# Runs that are resumed, damaged or have diverged


@pytest.mark.slow
def test_plot_by_tokens_after_a_resume_with_another_batch(copy, tmp_path):
    train(
        "--log_dir", "run", "--resume", "--max_steps", 14, "--total_batch_size", 1024, cwd=tmp_path
    )
    consumed = {
        step: int(value)
        for step, stream, value in files.read_log(copy / "log.txt")
        if stream == "tokens"
    }
    assert consumed == {
        step: 512 * min(step + 1, 10) + 1024 * max(0, step - 9) for step in range(14)
    }
    lines = lines_of(copy, x="tokens")["loss (nats per token)"]
    assert lines["run, training"][0].tolist() == [0, *(consumed[step] for step in range(13))]
    assert lines["run, validation"][0].tolist() == [0, 5 * 512, 5120, 5120 + 4096]


def test_plot_keeps_the_curve_after_a_loss_that_is_not_a_number():
    streams = {"train": dict.fromkeys(range(300), 1.0) | {50: np.inf, 60: np.nan}}
    line = plot.draw({"run": (streams, {})}, "steps").axes[0].lines[1]
    assert np.isfinite(line.get_ydata()).all()


@pytest.mark.parametrize(
    "log, facts, message",
    [
        ("1 train x\n", "{}", "has no log.txt with values; give a run, such as log/baby"),
        ("1 tokens 2\n", "{}", "has no log.txt with values; give a run, such as log/baby"),
        ("1 train 2\n", "[1]", "run.json: is damaged (not an object"),
        ("1 train 2\n", "{", "run.json: is damaged (Expecting"),
        ("1 train 2\n", '{"train_config": [1]}', "run.json: is damaged ("),
        ("1 train 2\n", '{"model_config": 7}', "run.json: is damaged ("),
    ],
)
def test_plot_of_a_strange_run(tmp_path, log, facts, message):
    (tmp_path / "log.txt").write_text(log)
    (tmp_path / "run.json").write_text(facts)
    with pytest.raises(UserError, match=re.escape(message)):
        plot.main([str(tmp_path), "--output", str(tmp_path / "a.png")])


def test_plot_of_a_diverged_run(tmp_path):
    """plot.py does not draw NaN and infinity. These values do not change the limits of the axes."""
    streams = {"val": {0: 3.0, 1: 2.0, 2: np.nan, 3: np.inf}, "norm": {0: np.inf}}
    figure = plot.draw({"run": (streams, {})}, "steps")
    figure.savefig(tmp_path / "a.png")
    loss, norm = figure.axes
    assert loss.get_ylim() == pytest.approx((1.9, 2.1))
    assert np.isfinite(norm.get_ylim()).all()


@pytest.mark.parametrize("stream", ["val", "train", "hella", "lr", "mine"])
def test_plot_of_the_largest_numbers(tmp_path, stream):
    runs = {"run": ({stream: {0: 1e308, 1: -1e308, 2: 2.0}}, {})}
    figure = plot.draw(runs, "steps")
    figure.savefig(tmp_path / "a.png")
    top = max(abs(limit) for limit in figure.axes[0].get_ylim())
    assert top < 1e3


def test_a_step_of_a_thousand_digits_is_no_step(tmp_path):
    (tmp_path / "log.txt").write_text(f"{'9' * 5000} val 1.5\n1 val 2.5\n")
    assert files.read_streams(tmp_path / "log.txt") == {"val": {1: 2.5}}


def test_names_that_begin_with_an_underscore_are_in_the_legend():
    runs = {name: {"val": {0: 1.0}} for name in ("_a", "b")}
    assert legend_of(runs) == ["./_a, validation", "b, validation"]


def test_plot_of_a_run_with_a_dollar_in_its_name(tmp_path):
    (tmp_path / "$a_$b^{").mkdir()
    (tmp_path / "$a_$b^{" / "log.txt").write_text("1 train 2\n2 train 2\n")
    plot.main([str(tmp_path / "$a_$b^{"), "--output", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").exists()
