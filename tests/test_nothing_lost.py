"""Surroundings and files of real users: closed outputs, odd names, a second process, Windows."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, names, program, read_log, train
from hypothesis import given, settings
from hypothesis import strategies as st

import fineweb
import hellaswag
import plot
import wikitext
from plaingpt import cli, runlog
from plaingpt.cli import UserError
from plaingpt.evaluation import perplexity
from plaingpt.sampling import sample
from plaingpt.text import check_spaces, make_document
from tokenizer import get_tokenizer

TEXT = "".join(f"Sentence {i} of a text that is long enough.\n" for i in range(4000))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with a checkpoint of step 10."""
    cwd = tmp_path_factory.mktemp("run")
    train("--log_dir", "run", cwd=cwd)
    return cwd / "run"


@pytest.fixture
def copy(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def shell(command, cwd):
    """Runs a program of this project with redirections. It must end with status 0."""
    subprocess.run(["bash", "-c", f"{sys.executable} {ROOT}/{command}"], cwd=cwd, check=True,
                   capture_output=True, timeout=120)


# Runs


def test_a_second_fineweb_in_a_directory(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "out").mkdir()
    for name in ("left.npy.1.tmp", "notes.2024.1.tmp"):  # of a killed process; the user's own
        (tmp_path / "out" / name).write_bytes(b"")
    flags = ["--input", str(tmp_path / "a.txt"), "--output_dir", str(tmp_path / "out")]
    descriptor = cli.lock(tmp_path / "out", "--output_dir")
    with pytest.raises(UserError, match="--output_dir .*out: another process writes there"):
        fineweb.main(flags)
    os.close(descriptor)
    fineweb.main(flags)
    assert names(tmp_path / "out", "*.tmp") == ["notes.2024.1.tmp"]


@pytest.mark.parametrize("redirection", [">/dev/full 2>/dev/full", "| head -1"])
def test_a_closed_output_does_not_end_a_run(tmp_path, redirection):
    shell(f"train_gpt2.py {' '.join(TINY)} --log_dir run {redirection}", tmp_path)
    assert names(tmp_path / "run", "model_*") == ["model_000010.pt"]


TWICE = f"""
import signal, sys
sys.path.insert(0, {str(ROOT)!r})
import train_gpt2
from plaingpt.cli import UserError
flags = {TINY + ["--log_dir", "run", "--max_steps", "2"]!r}
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
train_gpt2.main(flags)
try:
    train_gpt2.main(flags + ["--resume", "--data", "nowhere"])
except UserError:
    pass
train_gpt2.main(flags + ["--resume", "--max_steps", "4"])
assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
"""


def test_main_twice_in_one_process(tmp_path):
    """As in a notebook: the lock is free again, and the signal handlers are the old ones."""
    (tmp_path / "twice.py").write_text(TWICE)
    out, _ = program(cwd=tmp_path, program=tmp_path / "twice.py")
    assert "resumed from step 2" in out


def test_names_that_are_not_utf8(tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_text(TEXT)
    _, err = train("--data", name, "--log_dir", os.fsdecode(b"r\xe9n"), cwd=tmp_path)
    assert err == ""
    program("--input", name, "--output_dir", os.fsdecode(b"sh\xe9"), cwd=tmp_path,
            program="fineweb.py", fresh=True)


def test_a_resumed_run_keeps_the_shape_of_its_weights(copy, tmp_path):
    """A run that began with --init_from is resumed without that flag, and without its shape."""
    flags = ("--total_batch_size 512 --val_tokens 1024 --device cpu --sample_tokens 1 "
             "--optimizer adamw --log_dir new --max_steps").split()
    program(*flags, 2, "--init_from", "run", cwd=tmp_path)
    out, _ = program(*flags, 3, "--resume", cwd=tmp_path)
    assert "resumed from step 2" in out and "34,688 parameters" in out


# Texts


def test_prompts_with_a_byte_order_mark_and_unicode_line_separators(run, tmp_path):
    (tmp_path / "p.txt").write_bytes("\ufeffone\u2028still one\ntwo\n".encode())
    program("--checkpoint", run, "--prompts", "p.txt", "--max_new_tokens", 1, "--json", "o.json",
            cwd=tmp_path, program="generate.py")
    results = json.loads((tmp_path / "o.json").read_text())
    assert [result["prompt"] for result in results] == ["one\u2028still one", "two"]


def test_a_million_spaces():
    """tiktoken's regex would overflow its stack."""
    text = "a" + " " * 1_000_000
    with pytest.raises(UserError, match="500,000 or more white spaces in a row; remove") as error:
        get_tokenizer("gpt2").encode(text)
    assert make_document("a.txt, line 1", {"text": text}, "text").problem == str(error.value)


# Benchmarks


def test_text_without_spaces_has_an_infinite_perplexity_per_word(copy, tmp_path):
    assert perplexity(1.0) == pytest.approx(np.e) and perplexity(10000.0) == np.inf
    (tmp_path / "zh.txt").write_text("海" * 3000)
    out, _ = program("--checkpoint", "run", "--data", "zh.txt", cwd=tmp_path, program="wikitext.py")
    assert re.search("word_perplexity +inf", out) and re.search(r"bits_per_byte +\d", out)
    train("--log_dir", "run", "--resume", "--max_steps", 12, "--evals", "wikitext=zh.txt",
          cwd=tmp_path)
    assert read_log(copy)[12, "wikitext"] == "inf"


def test_windows_line_ends_do_not_change_wikitext(run, tmp_path):
    text = " = Title = \n \n Some words of an article . \n = Other = \n More words . \n"
    figures = []
    for name, data in (("a.txt", text), ("b.txt", text.replace("\n", "\r\n"))):
        (tmp_path / name).write_bytes(data.encode())
        out, _ = program("--checkpoint", run, "--data", name, cwd=tmp_path, program="wikitext.py")
        figures.append(re.findall(r"(?:perplexity|per_byte) +\S+", out))
    assert figures[0] == figures[1] and len(figures[0]) == 3


# Plots


def test_plot_by_tokens_after_a_resume_with_another_batch(copy, tmp_path):
    train("--log_dir", "run", "--resume", "--max_steps", 14, "--total_batch_size", 1024,
          cwd=tmp_path)
    consumed = {step: int(value) for step, stream, value in runlog.read_log(copy / "log.txt")
                if stream == "tokens"}
    assert consumed == {step: 512 * min(step + 1, 10) + 1024 * max(0, step - 9)
                        for step in range(14)}
    line = plot.draw({"run": plot.read_run(copy)}, "tokens").axes[0].lines[1]
    assert line.get_xdata()[-1] == consumed[12] and line.get_xdata()[0] == 0


def test_plot_keeps_the_curve_after_a_loss_that_is_not_a_number():
    streams = {"train": dict.fromkeys(range(300), 1.0) | {50: np.inf, 60: np.nan}}
    line = plot.draw({"run": (streams, {})}, "steps").axes[0].lines[1]
    assert np.isfinite(line.get_ydata()).all()


@pytest.mark.parametrize("log, facts, message", [
    ("1 train x\n", "{}", "no log.txt with numbers; give a run, such as log/baby"),
    ("1 tokens 2\n", "{}", "no log.txt with numbers; give a run, such as log/baby"),
    ("1 train 2\n", "[1]", "run.json: is damaged (not an object"),
    ("1 train 2\n", "{", "run.json: is damaged (Expecting")])
def test_plot_of_a_strange_run(tmp_path, log, facts, message):
    (tmp_path / "log.txt").write_text(log)
    (tmp_path / "run.json").write_text(facts)
    with pytest.raises(UserError, match=re.escape(message)):
        plot.main([str(tmp_path), "--output", str(tmp_path / "a.png")])


def test_plot_of_a_diverged_run():
    plot.draw({"run": ({"val": {0: np.nan, 1: np.inf}, "norm": {0: np.inf}}, {})}, "steps")


def test_plot_of_a_run_with_a_dollar_in_its_name(tmp_path):
    (tmp_path / "$a_$b^{").mkdir()
    (tmp_path / "$a_$b^{" / "log.txt").write_text("1 train 2\n2 train 2\n")
    plot.main([str(tmp_path / "$a_$b^{"), "--output", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").exists()


# Inputs


def test_an_input_is_not_replaced_by_the_output(tmp_path):
    (tmp_path / "b.txt").write_text("some text")
    _, err = program("--input", "*.txt", "--output", "./b.txt", program="tokenizer.py",
                     cwd=tmp_path, status=2)
    assert err == "error: --output ./b.txt: is also an input; give another file\n"
    assert (tmp_path / "b.txt").read_text() == "some text"


def test_processes_with_different_data_flags_or_checkpoints(tmp_path):
    """The second process has another text, rate, or log_dir, without the checkpoint."""
    train("--max_steps", 2, "--log_dir", "run", cwd=tmp_path)
    (tmp_path / "my.txt").write_text(TEXT * 9)
    (tmp_path / "train.py").write_text(
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import train_gpt2\nfrom plaingpt.cli import run_program\n"
        "i = 2 + 2 * int(os.environ['RANK'])\n"
        "run_program(lambda: train_gpt2.main([*sys.argv[5:], *sys.argv[i - 1:i + 1]]))\n")
    for flag, message in (
            (["--data", "my.txt"], "--data: the processes have different data; copy"),
            (["--max_lr", 1.0], "the processes have different flags or checkpoints; give all"),
            (["--log_dir", "other"], "the processes have different flags or checkpoints; give")):
        _, err = program("--log_dir", "run", *flag, *TINY, "--resume", "--log_dir", "run",
                         cwd=tmp_path, processes=2, status=2, program=tmp_path / "train.py")
        assert message in err


@pytest.mark.parametrize("text", ["foo :( bar\n" * 100_000, "foo(" + " " * 100_000 + "x",
                                  "[" * 100_000])
def test_unclosed_brackets_take_linear_time(text):
    """A quadratic rule would need hours."""
    check_spaces(text + "\n" * 400_000 + text)
    assert "foo" in wikitext.detokenize("foo" + text)
    assert hellaswag.clean(text).count("[") == text.count("[")


@settings(max_examples=300)
@given(st.text("()[]\"' \n\u3000ab"))
def test_inside_of_brackets_as_in_the_harness(text):
    for left, right in ("()", "[]", '""'):
        expected = re.sub(rf"\{left}\s*([^\{right}]*?)\s*\{right}", rf"{left}\1{right}", text)
        assert wikitext.strip_inside(text, left, right) == expected
    assert hellaswag.clean(text) == re.sub(r"\[.*?\]", "", text.strip()).replace("  ", " ")


def test_a_tokenizer_json_that_the_package_refuses(tmp_path):
    (tmp_path / "t.txt").write_text("some text " * 500)
    program("--input", "t.txt", "--vocab_size", 300, cwd=tmp_path, program="tokenizer.py")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": 5}))
    _, err = program("--input", "t.txt", "--tokenizer", path, "--output_dir", "out", cwd=tmp_path,
                     program="fineweb.py", status=2)
    assert err.splitlines()[-1].startswith("error: tokenizer.json: data did not match any")


def test_a_temperature_near_zero_is_greedy():
    logits = torch.randn(4, 50)
    ids = sample(logits, torch.Generator().manual_seed(0), 1e-38)
    assert torch.equal(ids, logits.argmax(-1, keepdim=True))


def test_a_changed_file_that_is_not_utf8(tmp_path, monkeypatch):
    for command in (["init"], ["add", "-A"]):
        (tmp_path / "a.txt").write_bytes(b"caf\xe9 1\n" if command == ["init"] else b"caf\xe9 2\n")
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setattr(runlog, "__file__", str(tmp_path / "runlog.py"))
    assert b"+caf\xe9 2\n" in runlog.ask_git("diff", "--cached")
