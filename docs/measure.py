"""Repeats measurements, and writes the new results into docs/measurements.md.

  python docs/measure.py --list        shows the names of the measurements
  python docs/measure.py baby step     repeats the measurements with these names

First run: pip install -r requirements-dev.txt

Each row of the page contains the name and the command of a measurement. In each round, measure.py
runs the commands of all rows with the same name one after the other, so that another program on the
machine slows down all these commands equally. A result is the median over the rounds, followed by
the smallest and the largest value. measure.py also generates the data that the commands need. Run
measure.py on a machine that runs no other programs.
"""

import argparse
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measurements.md"
FOLDER = "log/measure"  # directory of the data and the runs; the commands also contain this path
# This pattern matches a row of docs/measurements.md. A cell with "`A`, less `FLAG N`" means:
# measure the memory of the command A, run A again with the value N for FLAG, and subtract the
# memory of the second run.
ROW = re.compile(r"^\| (?P<name>\w+) \| (?P<what>.+?) \| (?P<figure>.+?) \| `(?P<command>.+)` \|")
# This pattern matches a row that bench.py prints.
BENCH_ROW = re.compile(
    r"^(?:(\w+) )?(?:eager|compiled) .* \| ([\d,]+) ms \(([\d,]+)-([\d,]+)\) \|"
    r".* \| ([\d.]+) GB \| first step [\d.]+ s$",
    re.M,
)


class Finished(NamedTuple):
    """The output, time and memory of a command that has ended."""

    command: str
    output: str
    seconds: float  # from the start to the end
    memory: int  # peak memory of the largest process, in bytes


def run(command):
    """Runs a command line in the root of the repository. Returns a Finished.

    First deletes the directories that --log_dir and --output_dir name in the command. If the
    command fails, measure.py prints the end of the command's output and exits.
    """
    print(f"$ {command}", file=sys.stderr, flush=True)
    for place in re.findall(rf"--(?:log|output)_dir ({FOLDER}/\w+)", command):
        shutil.rmtree(ROOT / place, ignore_errors=True)
    env = dict(
        os.environ,
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        HF_HUB_OFFLINE="1",
    )
    env.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    begin = time.perf_counter()
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begin
    if process.returncode:
        sys.exit(f"{output[-3000:]}\nfailed: {command}")
    return Finished(command, output, seconds, usage.ru_maxrss * 1024)


# Each of the following functions extracts the results of a command from its Finished, and returns
# {unit: values}. The argument `what` is the second cell of the row: what the command measures.


def read_run(finished, what):
    """Returns a run's last validation loss, the time of all steps, and the median step time."""
    directory = re.search(r"--log_dir (\S+)", finished.command)[1]
    return read_log((ROOT / directory / "log.txt").read_text())


def read_log(text):
    """Extracts the results of a run from the text of its log.txt. Returns {unit: values}."""
    numbers = {}  # {name of a metric: its values}
    for line in text.splitlines():
        _, stream, value = line.split()
        numbers.setdefault(stream, []).append(float(value))
    seconds = [numbers["tokens"][0] / rate for rate in numbers["tok_s"]]
    return {
        "nats": numbers["val"][-1:],
        "s for all steps": [sum(seconds)],
        "ms per step": [1000 * statistics.median(seconds)],
    }


def read_step(finished, what):
    return {"ms per step": read_run(finished, what)["ms per step"]}


def read_shakespeare(finished, what):
    """Returns the same results as read_run, for a run of plainGPT or of nanoGPT's train.py.

    The times of nanoGPT do not include the steps in which nanoGPT also validates.
    """
    if "nanoGPT" not in what:
        return read_run(finished, what)
    losses = dict(re.findall(r"^step (\d+): .*val loss ([\d.]+)", finished.output, re.M))
    ms = []
    for step, each in re.findall(r"^iter (\d+): .*time ([\d.]+)ms", finished.output, re.M):
        if step not in losses:
            ms.append(float(each))
    return {
        "nats": [float(losses[max(losses, key=int)])],
        "s for all steps": [sum(ms) / 1000],
        "ms per step": [statistics.median(ms)],
    }


def read_bench(finished, what):
    """Returns the time and the memory from a row that bench.py has printed.

    If bench.py has printed several rows, `what` begins with the name of the model whose row is
    used.
    """
    rows = BENCH_ROW.findall(finished.output)
    for name, *figures in rows:
        if name == what.split(",")[0] or len(rows) == 1:
            ms, fastest, slowest, memory = (float(figure.replace(",", "")) for figure in figures)
            return {"ms": [fastest, ms, slowest], "GB": [memory]}
    sys.exit(f"{finished.output[-3000:]}\nthis output contains no row for {what}")


def read_memory(finished, what):
    return {"bytes": [finished.memory]}


def read_layout(finished, what):
    """Returns the memory of the largest process, from the output of tests/memory.py."""
    found = re.findall(r"MEMORY \S+ (\S+)$", finished.output, re.M)
    return {"bytes per parameter": [max(map(float, found))]}


def read_shards(finished, what):
    n_tokens = int(re.search(r"([\d,]+) tokens", finished.output)[1].replace(",", ""))
    rate = n_tokens / finished.seconds / 1e6
    return {"million tokens per second": [rate], "MB": [finished.memory / 1e6]}


def read_look(finished, what):
    page = re.search(r"--output (\S+)", finished.command)[1]
    return {"MB": [(ROOT / page).stat().st_size / 1e6]}


def read_pairs(finished, what):
    return {"percent right": [100 * float(re.search(r"^acc +(\S+)", finished.output, re.M)[1])]}


def read_limit(finished, what):
    ms, share = re.search(r"([\d.]+) ms a step.* (\d+)% of", finished.output).groups()
    return {"percent of the limit": [float(share)], "ms per step": [float(ms)]}


READ = dict(  # {name of a measurement: (function, number of rounds)}
    baby=(read_run, 2),
    limit=(read_limit, 3),
    pairs=(read_pairs, 1),
    step=(read_bench, 1),
    checkpointing=(read_bench, 3),
    busy=(read_step, 3),
    layouts=(read_layout, 1),
    tokenizer=(read_memory, 1),
    shards=(read_shards, 1),
    look=(read_look, 1),
    shakespeare=(read_shakespeare, 2),
)


def measure(row, read):
    """Runs the command of a row. Returns the results, {unit: values}.

    row: a match of ROW. read: the function in READ that extracts the results.
    """
    command, _, less = row["command"].partition("`, less `")
    figures = read(run(command), row["what"])
    if less:
        flag, value = less.split()
        n = int(re.search(rf"{flag} (\d+)", command)[1]) - int(value)
        other = read(run(re.sub(rf"{flag} \d+", less, command)), row["what"])
        growth = figures["bytes"][0] - other["bytes"][0]
        figures = {"bytes of memory per byte of text": [growth / n]}
    return figures


def show(value):
    """Formats a number with two decimals below 10, one decimal below 100, and none from 100 on."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def describe(figures, above=None):
    """Formats results, {unit: values}: the median per unit, with the smallest and largest value.

    above: the results of the row above, or None. With `above`, the text also contains the median of
    the first unit divided by the median in the row above.
    """
    parts = []
    for unit, values in figures.items():
        median = statistics.median(values)
        part = f"{median:.3f} {unit}" if unit == "nats" else f"{show(median)} {unit}"
        if min(values) < max(values) and unit != "nats":
            part += f" ({show(min(values))} to {show(max(values))})"
        if above and not parts:
            part += f", {median / statistics.median(above[unit]):.2f} times the row above"
        parts.append(part)
    return "; ".join(parts)


def measure_rows(name, page):
    """Repeats the measurements of all rows with this name, and prints the new rows.

    page: the text of docs/measurements.md. Returns this text with the new rows.
    """
    rows = [line for line in page.splitlines() if line.startswith(f"| {name} | ")]
    read, n_rounds = READ[name]
    results = [{} for _ in rows]
    for _ in range(n_rounds):
        for line, result in zip(rows, results):
            for unit, values in measure(ROW.match(line), read).items():
                result.setdefault(unit, []).extend(values)
    for i, line in enumerate(rows):
        row = ROW.match(line)
        is_peer = row["what"].startswith("plain,")
        figure = describe(results[i], results[i - 1] if is_peer else None)
        new = f"| {name} | {row['what']} | {figure} | `{row['command']}` | {machine()} |"
        print(new, flush=True)
        page = page.replace(line, new)
    return page


def machine():
    """Returns the last two cells of a row: processor, number of cores and commit; and the date."""
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    processor = platform.processor()
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        processor = found[1] if found else processor
    return f"{processor}, {os.cpu_count()} cores, {commit} | {date.today()}"


def write_data():
    """Generates the data that the commands need, with a fixed seed, and exports a GPT-2 124M.

    The exported GPT-2 was trained for one step. If the export already exists, this function does
    nothing.
    """
    folder = ROOT / FOLDER
    if (folder / "gpt2-hf/config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1)
    words = (ROOT / "input.txt").read_text().split()

    def some_words(least, most):
        return " ".join(rng.choices(words, k=rng.randint(least, most)))

    sums = []
    for a in range(10, 100):
        for b in range(10, 100):
            sums.append(dict(prompt=f"{a}+{b}=", response=str(a + b)))
    rng.shuffle(sums)
    write_lines(folder / "sums-train.jsonl", sums[:1800])
    write_lines(folder / "sums-test.jsonl", sums[1800:2000])
    documents = [json.dumps(dict(text=some_words(50, 1500))) + "\n" for _ in range(1000)]
    with open(folder / "english.jsonl", "w", encoding="utf-8") as file:
        while file.tell() < 700 * 10**6:  # 700 MB contain more tokens than one shard
            file.writelines(rng.choices(documents, k=1000))
    # As in a real Chinese text, a few characters are frequent, and no spaces separate words.
    characters = [chr(0x4E00 + i) for i in range(3000)]
    weights = [1 / (i + 1) for i in range(3000)]
    with open(folder / "chinese.txt", "w", encoding="utf-8") as file:
        while file.tell() < 11 * 10**6:
            file.write("".join(rng.choices(characters, weights, k=rng.randint(5, 25))) + "。\n")
    run(
        f"python train_gpt2.py --preset gpt2 --data input.txt --tokenizer gpt2 --sample_every 0 "
        f"--max_steps 1 --batch_size 1 --total_batch_size 1024 --val_tokens 1024 "
        f"--log_dir {FOLDER}/gpt2 && "
        f"python export.py --checkpoint {FOLDER}/gpt2 --output {FOLDER}/gpt2-hf"
    )


def write_lines(path, records):
    """Writes records into a .jsonl file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="show the names of the measurements")
    arguments = parser.parse_args()
    for name in {*arguments.names} - READ.keys():
        parser.error(f"{name}: must be one of {', '.join(READ)}")
    if arguments.list:
        print(*READ, sep="\n")
    if arguments.names:
        write_data()
    for name in arguments.names:
        page = measure_rows(name, PAGE.read_text(encoding="utf-8"))
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
