"""docs/measure.py reads figures from what programs write, and fills the page with its tables."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from test_readme import PAGES, prose, read

import bench

sys.path.append(str(ROOT / "docs"))
import measure
from measuring import calibration, commands, figures

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


def test_the_page_of_the_calibration_has_its_records(tmp_path, monkeypatch):
    """Each idea of the list has an experiment, and the figures are those of the records."""
    assert calibration.read_list().keys() == calibration.EXPERIMENTS.keys()
    page = read("docs/calibration.md")
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    monkeypatch.setattr(calibration, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(calibration, "LEDGER", tmp_path / "ledger.jsonl")
    calibration.write_page()
    calibration.write_ledger()
    assert (tmp_path / "ledger.jsonl").read_text() == read("log/records/ledger.jsonl")
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == page
    for path in calibration.RECORDS.glob("*.json"):
        assert "json" not in json.loads(path.read_text()), path  # a path of one machine


def test_what_the_calibration_says_of_its_rows():
    def row(number, published, size, verdict, difference):
        return number, published, size, dict(verdict=verdict, difference=difference)

    rows = [
        row(1, "helps", -0.03, "better", -0.3),
        row(2, "helps", -0.02, "worse", 0.2),
        row(3, "harms", 0.01, "worse", 0.1),
        row(5, "harms", 0.04, "undecided", 0.4),
        row(6, "neutral", None, "equal", 0.0),
        row(7, "neutral", None, "worse", 0.2),
    ]
    agrees, helps, harms, neutral, ranks, large = calibration.summarize(rows)
    # Dealt at random: 2 helps x 1 better, 2 harms x 3 worse and 2 neutral x 1 equal, each / 6.
    assert "with 3 of 6 ideas." in agrees and " 1.7 agree on average" in agrees
    assert helps.endswith("*better* of 1, and the opposite of 1.")
    assert harms.endswith("*worse* of 1, and the opposite of 0.")
    assert "Of 2 ideas" in neutral and neutral.endswith("*equal* of 1.")
    assert "(rows 1, 2, 3, 5)" in ranks and "is 0.80, with" in ranks  # 1 - 6 * 2 / (4 * 15)
    assert large.endswith("it agrees with 2 of 5 ideas.")


def test_equal_values_have_their_mean_rank():
    assert list(calibration.ranks_of(np.array([3.0, 1.0, 3.0, 9.0]))) == [2.0, 0.5, 2.0, 3.5]


def test_the_command_of_each_experiment_of_the_calibration():
    """With another setting, the flags of all runs come first. A ladder tries factors of rates."""
    assert calibration.arguments_of("5") == "experiments/rotary.patch"
    flags = f"--flags '{calibration.SETTINGS['long']}'"
    assert calibration.arguments_of("long-7") == f"{flags} -- --n_head 1"
    ladder = "--sizes 64 96 128 160 --flags '--data torch_py.txt' --rate_factors 0.25 0.5 1 "
    assert calibration.arguments_of("ladder-1") == ladder + "-- --optimizer adamw"
