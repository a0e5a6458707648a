"""Runs the commands that docs/measure.py measures, and reads figures from what they write."""

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "log/measure"  # of the tables, the data and the runs
BENCH_ROW = re.compile(
    r"^(?:(\w+) )?(?:eager|compiled) .* \| ([\d,]+) ms \(([\d,]+)-([\d,]+)\) \|"
    r".* \| ([\d.]+) GB \| first step ([\d.]+) s$",
    re.M,
)


class Finished(NamedTuple):
    """What is known about a command that has ended."""

    lines: list  # (seconds since the start, text) of each line of its output
    seconds: float  # from the start to the end
    memory: int  # the peak of its largest process, in bytes

    @property
    def output(self):
        return "".join(text for _, text in self.lines)


class RunFigures(NamedTuple):
    """The figures of a training run."""

    loss: float  # the last validation loss, in nats per token
    seconds: float  # of all steps, without validation and saving
    ms: float  # the median of a step, in milliseconds


class BenchFigures(NamedTuple):
    """A row of bench.py."""

    ms: float  # the median of a step, in milliseconds
    fastest: float
    slowest: float
    memory: float  # GB
    first: float  # the first step, in seconds


def environment():
    """Returns the environment of all commands: each has as many threads as there are cores."""
    env = dict(
        os.environ,
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        PYTHONUNBUFFERED="1",  # a line arrives when it is printed
        HF_HUB_OFFLINE="1",
    )
    env.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    return env


def run(command):
    """Runs a command line in the root of the repository -> Finished.

    Ends the program, with the output, if the command fails.
    """
    print(f"$ {command}", file=sys.stderr, flush=True)
    lines = []
    begin = time.perf_counter()
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    for line in process.stdout:
        lines.append((time.perf_counter() - begin, line))
    _, status, usage = os.wait4(process.pid, 0)
    finished = Finished(lines, time.perf_counter() - begin, usage.ru_maxrss * 1024)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{finished.output[-3000:]}\nfailed: {command}")
    return finished


def train(command):
    """Runs train_gpt2.py in a new run directory -> RunFigures."""
    directory = ROOT / re.search(r"--log_dir (\S+)", command)[1]
    shutil.rmtree(directory, ignore_errors=True)
    run(command)
    return read_log((directory / "log.txt").read_text())


def in_turn(commands, measure, n_rounds):
    """Measures commands in turn, so that other programs on the machine slow all of them.

    commands: {name: command line}. measure: takes a command line. Returns {name: what it has
    returned in each round}.
    """
    results = {name: [] for name in commands}
    for _ in range(n_rounds):
        for name, command in commands.items():
            results[name].append(measure(command))
    return results


def read_log(text):
    """Reads the text of a log.txt -> RunFigures."""
    numbers = {}  # {stream: its values}
    for line in text.splitlines():
        _, stream, value = line.split()
        numbers.setdefault(stream, []).append(float(value))
    tokens_of_step = numbers["tokens"][0]
    seconds = [tokens_of_step / rate for rate in numbers["tok_s"]]
    return RunFigures(numbers["val"][-1], sum(seconds), 1000 * statistics.median(seconds))


def read_bench(output):
    """Reads the output of bench.py -> {name: BenchFigures}. Without peers, the name is ""."""
    rows = {}
    for name, *figures in BENCH_ROW.findall(output):
        rows[name] = BenchFigures(*(float(figure.replace(",", "")) for figure in figures))
    return rows


def read_nanogpt(output):
    """Reads the output of nanoGPT's train.py -> RunFigures.

    The times of iterations that also measured the loss are left out of `seconds` and `ms`.
    """
    losses = dict(re.findall(r"^step (\d+): .*val loss ([\d.]+)", output, re.M))
    times = []
    for step, ms in re.findall(r"^iter (\d+): .*time ([\d.]+)ms", output, re.M):
        if step not in losses:
            times.append(float(ms))
    last = max(losses, key=int)
    return RunFigures(float(losses[last]), sum(times) / 1000, statistics.median(times))


def seconds_to(finished, pattern):
    """Returns the seconds from the start of a command to its first line with this pattern."""
    for seconds, text in finished.lines:
        if re.search(pattern, text):
            return seconds
    sys.exit(f"{finished.output[-3000:]}\nhas no line with {pattern}")


def show(value):
    """Writes a number with three digits, and all digits before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def median_and_range(values, unit):
    """Writes the median of the rounds, and the smallest and the largest value."""
    text = f"{show(statistics.median(values))} {unit}"
    if len(values) > 1:
        text += f" ({show(min(values))} to {show(max(values))})"
    return text
