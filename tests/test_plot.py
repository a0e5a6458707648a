"""Plots and TensorBoard event files have the numbers of the log."""

import re
import signal
import sys
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT, TINY, program, read_log, spawn, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import plot
from plaingpt.cli import UserError
from plaingpt.runlog import RunLog
from train_gpt2 import TrainConfig

BABY = ROOT / "log/records/baby"


def lines_of(figure):
    """{axis title: {label: (x, y)}} of all lines except faint ones and reference scores."""
    return {axes.get_ylabel(): {line.get_label(): line.get_data() for line in axes.lines if not line.get_label().startswith("_")}
            for axes in figure.axes}


def test_the_plot_shows_the_log():
    lines, log = lines_of(plot.draw({"baby": plot.read_run(BABY)}, "steps")), read_log(BABY)
    assert list(lines) == ["loss (nats per token)", "bits per byte", "learning rate", "gradient norm before clipping", "tokens per second"]
    for title, label, stream in (("loss (nats per token)", "baby, validation", "val"), ("bits per byte", "baby", "bpb"), ("learning rate", "baby", "lr")):
        x, y = lines[title][label]
        assert {(int(a), stream): f"{b:.8g}" for a, b in zip(x, y)} == {k: v for k, v in log.items() if k[1] == stream}
    x, y = lines["loss (nats per token)"]["baby, training"]
    losses = [float(log[step, "train"]) for step in range(2700)]
    assert y[2000] == pytest.approx(np.mean(losses[1974:2001])) and y[3] == pytest.approx(np.mean(losses[:4]))


def test_the_token_axis_follows_the_batch_size(tmp_path):
    for name, flags in (("a", []), ("b", ["--rampup_steps", 4, "--rampup_batch_size", 128])):
        train("--log_dir", name, *flags, cwd=tmp_path)
    lines = lines_of(plot.draw({name: plot.read_run(tmp_path / name) for name in "ab"}, "tokens"))["loss (nats per token)"]
    assert lines["a, validation"][0].tolist() == [0, 5 * 512, 10 * 512]
    assert lines["b, validation"][0].tolist() == [0, 128 + 128 + 256 + 384 + 512, 128 + 128 + 256 + 384 + 6 * 512]


def test_reference_scores_are_drawn_as_lines(tmp_path):
    (tmp_path / "log.txt").write_text("0 val 10.9\n0 hella 0.25\n250 hella 0.27\n250 val 6\n250 lambada 0.1\n250 story 0.55\n")
    figure = plot.draw({"run": plot.read_run(tmp_path)}, "steps")
    notes = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert notes == ["GPT-2 124M: 0.2955", "GPT-3 125M: 0.337", "GPT-2 124M: 0.3256", "GPT-3 125M: 0.427", "GPT-3 125M: 0.633"]


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_writes_every_format(tmp_path, kind):
    out, _ = program(BABY, BABY, "--output", f"x.{kind}", cwd=tmp_path, program="plot.py")
    path = tmp_path / f"x.{kind}"
    assert out.startswith(f"x.{kind}: ") and path.stat().st_size > 9000
    if kind == "png":
        pixels = matplotlib.image.imread(path)[..., :3]
        assert pixels.shape[1] == 1200 and 0.7 < pixels.mean() < 1  # the background is white
    elif kind == "svg":
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


@pytest.mark.parametrize("flags, sentence", [
    ([], ".: no log.txt with numbers; give a run, such as log/baby"), (["nowhere"], "nowhere: no log.txt with numbers"),
    (["."], ".: no log.txt with numbers"),
    ([str(BABY), "--x", "hours"], "--x hours: must be one of steps, tokens"),
    ([str(BABY), "--output", "a.gif"], "--output a.gif: must be a .png"),
    ([str(BABY), "--output", "no/where.png"], "no/where.png: cannot write"), ([str(BABY), "--frob"], "unknown flag --frob")])
def test_each_mistake_gives_a_one_sentence_error(tmp_path, flags, sentence):
    (tmp_path / "log.txt").write_text("hello\n")
    _, err = program(*flags, cwd=tmp_path, program="plot.py", status=2)
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1, err


def test_x_tokens_needs_the_stream_tokens():
    streams, facts = plot.read_run(BABY)
    del streams["tokens"]
    with pytest.raises(UserError, match="^x: log.txt has no stream tokens; use --x steps$"):
        plot.draw({"x": (streams, facts)}, "tokens")


def test_without_matplotlib(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(UserError, match="^the package matplotlib is missing: pip install matplotlib$"):
        plot.main([str(BABY)])


def test_without_tensorboard(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    config = TrainConfig(tensorboard=True, log_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match="pip install tensorboard"):
        RunLog(config, None, 0, rank=0)
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_each_number_once_after_a_kill(tmp_path):
    """Kills a run between checkpoints and resumes it. Checks numbers, samples and configuration."""
    flags = [*TINY, "--log_dir", "run", "--tensorboard", "--save_every", 5, "--sample_every", 5, "--max_steps", 12]
    (process,) = spawn(*flags, cwd=tmp_path)
    for line in process.stdout:
        if line.startswith("step     7/"):
            process.send_signal(signal.SIGKILL)
    process.communicate()
    for more in ([], ["--max_steps", 14]):
        out, _ = program(*flags, "--resume", *more, cwd=tmp_path)
        assert "resumed from step " in out
    events = EventAccumulator(str(tmp_path / "run"), size_guidance=dict(scalars=0, tensors=0)).Reload()
    log = {key: float(value) for key, value in read_log(tmp_path / "run").items()}
    found = [(event.step, stream) for stream in events.Tags()["scalars"] for event in events.Scalars(stream)]
    assert len(found) == len(set(found)) and {key for key in found if key[1] != "tok_s"} == set(log)
    for stream in ("train", "val", "lr", "norm"):
        assert all(event.value == pytest.approx(log[event.step, stream], rel=1e-6) for event in events.Scalars(stream))
    samples = {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("sample 1/text_summary")}
    assert sorted(samples) == [5, 10, 12, 14] and all(re.fullmatch("<pre>.+</pre>", text, re.S) for text in samples.values())
    settings = events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]
    assert b"n_layer" in settings and b"max_lr" in settings
    program(*flags, cwd=tmp_path)  # a new run: the event files of the old run move with it
    assert len(list((tmp_path / "run").glob("events*"))) == 1 and len(list((tmp_path / "run.1").glob("events*"))) == 3
