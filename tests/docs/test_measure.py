"""Tests docs/measure.py, and the numbers that other pages quote from docs/measurements.md."""

import re

import pytest
from conftest import ROOT
from test_readme import PAGES, prose, read

import bench
import look

measure = look.import_file(ROOT / "docs/measure.py", "measure")
CPU_TABLE, _, GPU_TABLE = read("docs/measurements.md").partition("\n## On one H100")
ROWS = [line for line in CPU_TABLE.splitlines() if measure.ROW.match(line)]
GPU_ROWS = [line for line in GPU_TABLE.partition("\n## ")[0].splitlines() if line.startswith("| ")]
LINK = re.compile(r"\[([^][]*)\]\((?:docs/)?measurements\.md\)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def finished(*lines, command=""):
    return measure.Finished(command, "".join(lines), 1.0, 10**6)


def test_figures_of_the_pages_are_in_the_table():
    """docs/measurements.md contains each number that a page quotes. A page may round the number."""
    figures = [measure.ROW.match(row)["figure"] for row in ROWS]
    figures += [row.split(" | ")[1] for row in GPU_ROWS]
    measured = []
    for figure in figures:
        measured += [float(number.replace(",", "")) for number in NUMBER.findall(figure)]
    quoted = []
    for page in PAGES:
        for text in LINK.findall(prose(page)):
            quoted += [(page, number) for number in NUMBER.findall(text)]
    assert len(quoted) > 20
    for page, number in quoted:
        digits = len(number.partition(".")[2])
        rounded = [round(each, digits) for each in measured]
        assert float(number.replace(",", "")) in rounded, (page, number)


def test_each_row_can_be_measured_again():
    assert len(ROWS) == CPU_TABLE.count("\n| ") - 1  # excludes the header of the table
    assert list(dict.fromkeys(measure.ROW.match(row)["name"] for row in ROWS)) == [*measure.READ]


def test_figures_of_a_log():
    """The log contains three steps of 1,024 tokens, which take 1, 2 and 4 seconds."""
    log = "0 val 5.5\n0 tokens 1024\n0 tok_s 1024\n1 tokens 2048\n1 tok_s 512\n"
    log += "2 tokens 3072\n2 tok_s 256\n3 val 1.25\n"
    assert [*measure.read_log(log).values()] == [[1.25], [7.0], [2000.0]]


def test_figures_of_bench():
    """measure.py reads the rows that bench.py prints, with and without --peer."""
    subject = bench.make_subject(bench.OURS, dict(preset="baby", batch_size=1, device="cpu"))
    row = bench.describe(subject, 2.0, [1.0, 3.0, 2.0])
    found = measure.read_bench(finished(f"{row}\n"), "the only one")
    assert found["ms"] == [1000, 2000, 3000]
    peers = finished(f"plaingpt {row}\n", "a note\n", f"transformers {row}\n".replace("2,", "9,"))
    assert measure.read_bench(peers, "transformers, eager")["ms"] == [1000, 9000, 3000]


def test_figures_of_nanogpt():
    """The iterations 0 and 2 include a validation, so measure.py ignores their times."""
    output = "step 0: train loss 4.1667, val loss 4.1817\niter 0: loss 4.1, time 900.00ms, mfu 1%\n"
    output += "iter 1: loss 4.0, time 50.00ms, mfu 1%\nstep 2: train loss 3.7, val loss 3.5\n"
    output += "iter 2: loss 3.7, time 800.00ms, mfu 1%\n"
    found = measure.read_shakespeare(finished(output), "nanoGPT's recipe")
    assert [*found.values()] == [[3.5], [0.05], [50]]


def test_rows_are_measured_in_turn_and_written(monkeypatch):
    """If the command of a row contains "less", its result is a difference per byte of text.

    The rows of "busy" contain medians of three rounds. The row "plain, alone" also contains a
    ratio: the result of this row, divided by the result of the row above.
    """
    page = "| tokenizer | English | old | `a --bytes 101`, less `--bytes 1` | x | y |\n"
    page += "| tokenizer | Chinese | old | `b --bytes 101`, less `--bytes 1` | x | y |\n"
    page += "| busy | alone | old | `a --bytes 10` | x | y |\n"
    page += "| busy | plain, alone | old | `b --bytes 10` | x | y |\n"
    ran = []

    def run(command):
        ran.append(command)
        name, _, n = command.split()
        return measure.Finished(command, "", 0, int(n) * (1 + (name == "b")) + len(ran))

    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(measure, "machine", lambda: "here | today")
    monkeypatch.setitem(measure.READ, "busy", (measure.read_memory, 3))
    first, second, *_ = measure.measure_rows("tokenizer", page).splitlines()
    assert ran == ["a --bytes 101", "a --bytes 1", "b --bytes 101", "b --bytes 1"]
    assert first == (
        "| tokenizer | English | 0.99 bytes of memory per byte of text | "
        "`a --bytes 101`, less `--bytes 1` | here | today |"
    )
    assert "| Chinese | 1.99 bytes of memory per byte of text |" in second
    ran.clear()
    *_, first, second = measure.measure_rows("busy", page).splitlines()
    assert ran == 3 * ["a --bytes 10", "b --bytes 10"]
    assert "| alone | 13.0 bytes (11.0 to 15.0) |" in first
    assert "| plain, alone | 24.0 bytes (22.0 to 26.0), 1.85 times the row above |" in second


@pytest.mark.slow
def test_a_command_that_fails_ends_the_program():
    with pytest.raises(SystemExit, match="two\n\nfailed: echo two; false"):
        measure.run("echo two; false")
    done = measure.run("GREETING=hello; echo $GREETING")
    assert done.output == "hello\n" and done.memory > 10**6 and done.seconds < 60
