"""Plots and TensorBoard event files have the numbers of the log."""

import re
import signal

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT, TINY, program, read_log, spawn, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import plot

BABY = ROOT / "log/records/baby"


def lines_of(*directories, x="steps"):
    """{axis title: {label: (x, y)}} of all lines except faint ones and reference scores."""
    figure = plot.draw({path.name: plot.read_run(path) for path in directories}, x)
    return {axes.get_ylabel(): {line.get_label(): line.get_data() for line in axes.lines
                                if not line.get_label().startswith("_")}
            for axes in figure.axes}


def test_the_plot_shows_the_log():
    lines, log = lines_of(BABY), read_log(BABY)
    for title, label, stream in (("loss (nats per token)", "baby, validation", "val"),
                                 ("learning rate", "baby", "lr")):
        drawn = {int(step): f"{value:.8g}" for step, value in zip(*lines[title][label])}
        assert drawn == {step: value for (step, name), value in log.items() if name == stream}
    x, y = lines["loss (nats per token)"]["baby, training"]
    losses = [float(log[step, "train"]) for step in range(2700)]
    assert y[2000] == pytest.approx(np.mean(losses[1974:2001]))  # 27 steps
    assert y[3] == pytest.approx(np.mean(losses[:4]))


def test_the_token_axis_follows_the_batch_size(tmp_path):
    train("--log_dir", "a", cwd=tmp_path)
    train("--log_dir", "b", "--rampup_steps", 4, "--rampup_batch_size", 128, cwd=tmp_path)
    lines = lines_of(tmp_path / "a", tmp_path / "b", x="tokens")["loss (nats per token)"]
    assert lines["a, validation"][0].tolist() == [0, 5 * 512, 10 * 512]
    ramp = 128 + 128 + 256 + 384
    assert lines["b, validation"][0].tolist() == [0, ramp + 512, ramp + 6 * 512]


def test_runs_that_differ_in_their_last_number_are_a_group(tmp_path):
    """The interval by hand: 0.2 ± t(4) x 0.1 x sqrt(2/3), with t(4) = 2.776."""
    for name, final in (("base-1", 1.0), ("base-2", 1.1), ("base-3", 1.2), ("new-1", 0.8),
                        ("new-2", 0.9), ("new-3", 1.0), ("new.3", 0.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.txt").write_text(
            f"0 val 5.5\n50 val 2\n50 mine 7\n100 val {final}\n100 mine {final}\n")
    paths = sorted(tmp_path.iterdir())
    out, _ = program(*paths, cwd=tmp_path, program="plot.py")
    rows = [re.split(r"  +", line) for line in out.replace(f"{tmp_path}/", "").splitlines()[1:4]]
    assert rows == [["base", "3", "100", "1.1000 ± 0.1000"],
                    ["new", "3", "100", "0.9000 ± 0.1000", "-0.2000", "-0.4270 to +0.0270"],
                    ["new.3", "1", "100", "0.5000", "-0.6000", "-1.0965 to -0.1035"]]
    assert len(plot.group_runs(dict.fromkeys(["lr-1e-3", "lr-1e-2"], ({}, {})))) == 2  # a sweep
    widths = {f"w-{n}": ({}, {"model_config": {"n_embd": n}}) for n in (64, 128)}
    seeds = {f"w-{n}": ({}, {"train_config": {"seed": n, "log_dir": n}}) for n in (1, 2)}
    assert [*plot.group_runs(widths | seeds)] == ["w-64", "w-128", "w"]
    assert [*plot.group_runs(seeds | {"w": ({}, {})})] == ["w-1, w-2", "w"]
    plot.draw({"a-1": ({"val": {0: 1.0}}, {}), "a-2": ({"val": {9: 1.0}}, {})}, "steps")  # no line
    figure = plot.draw({path.name: plot.read_run(path) for path in paths}, "steps")
    loss, mine = figure.axes
    assert mine.get_ylabel() == "mine"
    assert [line.get_ydata()[-1] for line in loss.lines] == pytest.approx([1.1, 0.9, 0.5])
    spread = mine.collections[0].get_paths()[0].vertices[:, 1]  # the band of "base"
    assert spread.min() == pytest.approx(1.0) and spread.max() == 7
    assert loss.get_ylim()[0] < 0.5 and 2 < loss.get_ylim()[1] < 2.2  # without step 0


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_writes_every_format(tmp_path, kind):
    program(BABY, BABY, "--output", f"x.{kind}", cwd=tmp_path, program="plot.py")
    path = tmp_path / f"x.{kind}"
    assert path.stat().st_size > 9000
    if kind == "png":
        pixels = matplotlib.image.imread(path)[..., :3]
        assert pixels.shape[1] == 1200 and 0.7 < pixels.mean() < 1  # the background is white


@pytest.mark.parametrize("flags, sentence", [
    ([], ".: no log.txt with numbers; give a run, such as log/baby"),
    (["nowhere"], "nowhere: no log.txt with numbers"),
    (["plain", "--x", "tokens"], "plain: log.txt has no stream tokens; use --x steps"),
    ([BABY, "--output", "a.gif"], "--output a.gif: must be a .png"),
    ([BABY, "--output", "no/where.png"], "no/where.png: cannot write")])
def test_each_mistake_gives_a_one_sentence_error(tmp_path, flags, sentence):
    (tmp_path / "log.txt").write_text("hello\n")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "log.txt").write_text("0 train 10.9\n")  # as build-nanogpt writes it
    _, err = program(*flags, cwd=tmp_path, program="plot.py", status=2)
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1, err


def test_tensorboard_has_each_number_once_after_a_kill(tmp_path):
    """Kills a run between checkpoints and resumes it. Checks numbers, samples, configuration."""
    flags = [*TINY, *"--log_dir run --tensorboard --save_every 5 --sample_every 5".split()]
    (process,) = spawn(*flags, "--max_steps", 12, cwd=tmp_path)
    for line in process.stdout:
        if line.startswith("step     7/"):
            process.send_signal(signal.SIGKILL)
    process.communicate()
    for steps in (12, 14):
        out, _ = program(*flags, "--resume", "--max_steps", steps, cwd=tmp_path)
        assert "resumed from step " in out
    events = EventAccumulator(str(tmp_path / "run"), size_guidance=dict(scalars=0, tensors=0))
    tags = events.Reload().Tags()["scalars"]
    found = [((e.step, name), e.value) for name in tags for e in events.Scalars(name)
             if name != "tok_s"]
    log = {key: float(value) for key, value in read_log(tmp_path / "run").items()}
    assert len(found) == len(log) and dict(found) == pytest.approx(log, rel=1e-6)
    samples = {e.step: e.tensor_proto.string_val[0].decode()
               for e in events.Tensors("sample 1/text_summary")}
    assert sorted(samples) == [5, 10, 12, 14]
    assert all(re.fullmatch("<pre>.+</pre>", text, re.S) for text in samples.values())
