"""docs/measure.py reads figures from what programs write, and fills the page with its tables."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT
from test_readme import PAGES, prose, read

import bench

sys.path.append(str(ROOT / "docs"))
import measure
from measuring import commands, figures

LINK = re.compile(r"\[([^][]*)\]\((?:docs/)?measurements\.md\)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def to_float(text):
    return float(text.replace(",", ""))


def linked_figures():
    """The numbers in the text of a link to measurements.md: (page, number as it is written)."""
    found = []
    for page in PAGES:
        for text in LINK.findall(prose(page)):
            found += [(page, number) for number in NUMBER.findall(text)]
    return found


def test_figures_of_the_pages_are_in_the_tables():
    """A page may round a figure."""
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|", read("docs/measurements.md"), re.M)
    measured = [to_float(number) for row in rows for number in NUMBER.findall(row)]
    found = linked_figures()
    assert len(found) > 20
    for page, number in found:
        digits = len(number.partition(".")[2])
        assert to_float(number) in [round(each, digits) for each in measured], (page, number)


def test_each_name_has_a_place_on_the_page():
    places = re.findall(
        r"^`python docs/measure\.py (\w+)[^`]*`$", read("docs/measurements.md"), re.M
    )
    assert sorted(places) == sorted(figures.ALL)
    assert not re.search(r"\| — |not recorded", read("docs/measurements.md"))


def test_figures_of_a_log():
    """Three steps of 1,024 tokens, in 1, 2 and 4 seconds."""
    log = "0 val 5.5\n0 tokens 1024\n0 tok_s 1024\n1 tokens 2048\n1 tok_s 512\n"
    log += "2 tokens 3072\n2 tok_s 256\n3 val 1.25\n"
    assert commands.read_log(log) == (1.25, 7.0, 2000.0)


def test_figures_of_bench():
    """The rows that bench.py prints, alone and with a peer."""
    row = "eager bfloat16 muon | baby B=4 T=64 | 1,234 ms (900-2,345) | 6,048 tok/s | "
    row += "0.02 TFLOP/s | 0.36 GB | first step 12.5 s\n"
    expected = (1234, 900, 2345, 0.36, 12.5)
    assert commands.read_bench(row) == {"": expected}
    both = f"plaingpt {row}a note\ntransformers {row.replace('eager', 'compiled')}"
    assert commands.read_bench(both) == {"plaingpt": expected, "transformers": expected}


def test_bench_still_prints_such_a_row():
    subject = bench.make_subject(bench.OURS, dict(preset="baby", batch_size=1, device="cpu"))
    (found,) = commands.read_bench(bench.describe(subject, 2.0, [1.0, 3.0, 2.0])).items()
    assert found[0] == "" and found[1][:3] == (2000, 1000, 3000) and found[1].first == 2


def test_figures_of_nanogpt():
    """The iterations 0 and 2 include a validation, so their times do not count."""
    output = "step 0: train loss 4.1667, val loss 4.1817\niter 0: loss 4.1, time 900.00ms, mfu 1%\n"
    output += "iter 1: loss 4.0, time 50.00ms, mfu 1%\nstep 2: train loss 3.7, val loss 3.5\n"
    output += "iter 2: loss 3.7, time 800.00ms, mfu 1%\n"
    assert commands.read_nanogpt(output) == (3.5, 0.05, 50)


def test_a_command_that_fails_ends_the_program():
    with pytest.raises(SystemExit, match="two\n\nfailed: echo two; false"):
        commands.run("echo two; false")
    finished = commands.run("GREETING=hello; echo $GREETING")
    assert finished.output == "hello\n" and finished.memory > 10**6
    assert commands.seconds_to(finished, "^hel") <= finished.seconds


def test_a_table_is_put_below_its_command():
    rows = [("a", "1 ms", "x.py"), ("b", "2 ms", "x.py")]
    table = measure.make_table(rows)
    assert table == "| what | figure | command\n|---|---|---\n| a | 1 ms | `x.py`\n| b | 2 ms |\n"
    page = "Measured: long ago.\n\n`python docs/measure.py step`\n\n| old |\n\nText\n\n"
    page += "`python docs/measure.py step_float32`\n\nEnd\n"
    filled = measure.fill_page(page, {"step": f"here\n{table}", "step_float32": f"here\n{table}"})
    assert filled.startswith("Measured: here.\n\n`python docs/measure.py step`\n\n| what ")
    assert filled.endswith(f"step_float32`\n\n{table}\nEnd\n") and "old" not in filled
    assert measure.fill_page(filled, {"step": f"here\n{table}"}) == filled
    assert "Measured: step: there; look: here.\n" in measure.fill_page(
        filled, {"step": f"there\n{table}", "look": f"here\n{table}"}
    )


@pytest.mark.slow
def test_the_names_are_listed():
    done = subprocess.run(
        [sys.executable, "docs/measure.py", "--list"], cwd=ROOT, capture_output=True, text=True
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(figures.ALL)
