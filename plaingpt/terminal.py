"""Terminal output of a program: the lines that rank 0 prints, and a progress bar."""

import contextlib
import os
import re
import shutil
import sys


def visible(text, stream=None):
    """Returns the text. For a terminal, replaces control characters with escapes like \\x1b.

    Control characters could change the state of the terminal. stream: the stream to which the text
    is written; default: stdout.
    """
    if not (stream or sys.stdout).isatty():
        return text
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], text)


def print_result(text, end="\n"):
    """Prints a result of a program, on rank 0 only. Raises OSError if printing fails."""
    if os.environ.get("RANK", "0") == "0":
        clear = "\r\x1b[K" if sys.stdout.isatty() else ""  # removes the progress bar
        print(clear + visible(text), end=end, flush=True)


def print0(text, end="\n"):
    """Prints on rank 0 only. If the output cannot be written, the program continues without it.

    The results of a training run are in its files, so a closed terminal does not end the run.
    """
    with contextlib.suppress(OSError):
        print_result(text, end)


def shorten_line(line):
    """Removes the last parts of a line such as "a | b | c" until it fits into the terminal."""
    columns = shutil.get_terminal_size().columns - 1 if sys.stdout.isatty() else len(line)
    while len(line) > columns and " | " in line:
        line = line.rpartition(" | ")[0]
    return line[:columns]


def show_progress(done, total, text):
    """Shows a progress bar in the last line of a terminal, until the next print0."""
    if sys.stdout.isatty():
        bar = "#" * (20 * done // total)  # a full bar has 20 characters
        print0(shorten_line(f"{done}/{total} [{bar:<20}] {text}"), end="")
