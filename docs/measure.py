"""Measures the figures of the pages, with commands that you can type, too.

  python docs/measure.py               measures what is not measured yet; in
                                       all, about an hour on two cores
  python docs/measure.py baby step     measures these, also again
  python docs/measure.py --list        shows the names, with their minutes
  python docs/measure.py --page        puts the tables into measurements.md

First: pip install -r requirements-dev.txt

Use a machine that does nothing else. Commands that are compared take turns; the
figure is the median of the rounds, and behind it stand the smallest and the
largest one. docs/measuring/made_up.py makes the data. Each table is kept in
log/measure/NAME.md, so the first command goes on after an interruption.
shakespeare and start need a clone of github.com/karpathy/nanoGPT:

  python docs/measure.py shakespeare start --nanogpt ../nanoGPT
"""

import argparse
import os
import platform
import re
import subprocess
import textwrap
from datetime import date
from importlib.metadata import version
from pathlib import Path

from measuring.commands import FOLDER, ROOT, environment
from measuring.figures import ALL, BESIDE_NANOGPT, USUAL

PAGE = ROOT / "docs" / "measurements.md"


def read_arguments():
    """Reads the command line. Ends the program if it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="show the names")
    parser.add_argument("--page", action="store_true", help="write docs/measurements.md")
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="a clone of nanoGPT")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in ALL:
            parser.error(f"{name}: must be one of {', '.join(ALL)}")
        if name in BESIDE_NANOGPT and not arguments.nanogpt:
            parser.error(f"{name}: needs --nanogpt DIR, a clone of github.com/karpathy/nanoGPT")
    return arguments


def choose_names(arguments):
    """Returns the names on the command line, or else those that are not measured yet."""
    if arguments.names:
        return arguments.names
    names = [*USUAL]
    if arguments.nanogpt:
        names += BESIDE_NANOGPT
    return [name for name in names if not path_of(name).exists()]


def path_of(name):
    """Returns where the table of a name is kept."""
    return ROOT / FOLDER / f"{name}.md"


def describe_machine():
    """Returns commit, processor, cores, torch and date, as one line."""
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    processor = platform.processor()
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        processor = found[1] if found else processor
    threads = environment()["OMP_NUM_THREADS"]
    return (
        f"commit {commit}, {processor}, {os.cpu_count()} cores, {threads} threads, "
        f"torch {version('torch')}, {date.today()}"
    )


def measure(name, nanogpt):
    """Measures a table, prints it and keeps it. nanogpt: the Path of a clone, or None."""
    function, _ = ALL[name]
    rows = function(nanogpt.resolve()) if name in BESIDE_NANOGPT else function()
    table = make_table(rows)
    if nanogpt:
        table = table.replace(str(nanogpt.resolve()), "nanoGPT")
    machine = describe_machine()
    print(f"\n{name}, {machine}\n\n{table}", flush=True)
    path_of(name).write_text(f"{machine}\n{table}", encoding="utf-8")


def make_table(rows):
    """Makes a table of Markdown. A command that repeats the one above it is left out."""
    table = "| what | figure | command\n|---|---|---\n"
    above = ""
    for what, figure, command in rows:
        cell = "" if command == above else f" `{command}`"
        table += f"| {what} | {figure} |{cell}\n"
        above = command
    return table


def fill_page(page, tables):
    """Puts tables into a page -> the new page.

    A table stands below the line with its command. The line "Measured: ..." gets the machines.

    page: the text of measurements.md. tables: {name: text of its file}.
    """
    names_of = {}  # {machine: names of its tables}
    for name, text in tables.items():
        machine, _, table = text.partition("\n")
        names_of.setdefault(machine, []).append(name)
        place = re.compile(rf"^(`python docs/measure\.py {name}\b[^\n]*\n)(?:\n(?:\|.*\n)+)?", re.M)
        page = place.sub(lambda found, table=table: f"{found[1]}\n{table}", page)
    machines = [*names_of]
    if len(machines) > 1:
        machines = [f"{', '.join(names)}: {machine}" for machine, names in names_of.items()]
    lines = textwrap.fill("Measured: " + "; ".join(machines) + ".", 100)
    return re.sub(r"^Measured: (?:.+\n?)+", lambda _: f"{lines}\n", page, flags=re.M)


def main():
    arguments = read_arguments()
    (ROOT / FOLDER).mkdir(parents=True, exist_ok=True)
    if arguments.list:
        for name, (_, minutes) in ALL.items():
            print(f"{name:<16} {minutes:>3} minutes")
    elif arguments.page:
        names = [name for name in ALL if path_of(name).exists()]
        tables = {name: path_of(name).read_text(encoding="utf-8") for name in names}
        page = fill_page(PAGE.read_text(encoding="utf-8"), tables)
        PAGE.write_text(page, encoding="utf-8")
    else:
        for name in choose_names(arguments):
            measure(name, arguments.nanogpt)


if __name__ == "__main__":
    main()
