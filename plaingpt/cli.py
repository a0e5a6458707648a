"""The command line of every program here: a dataclass field is a flag, its default the default, its comment the help."""

# Read next: tests/, which say what all of this promises.

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import json
import os
import re
import shutil
import signal
import sys
import textwrap
from pathlib import Path

# What PyTorch says when a program is ended from outside.
NO_MEMORY, NO_PROCESS = "out of memory|DefaultCPUAllocator", "gloo|NCCL|TCPStore|Connection (closed|reset|refused)|Broken pipe"


class UserError(Exception):
    """Something the user can mend. Its message is the one line that the program prints before it exits with status 2."""


def parse_flags(doc, *configs, argv=None, rest=None):
    """Reads `argv` (default: the process's) into a dict of the flags that were given, and only those.

    doc: the program's docstring, shown by --help. configs: dataclasses; the field `max_lr: float = 6e-4  # peak` becomes
    --max_lr, a bool becomes --flag/--no-flag, a list --flag FILE FILE. rest: what arguments without a flag are called, if
    there may be some; a list of them is in the dict by that name. Raises UserError for an unknown flag or a value of the
    wrong type.
    """
    doc = rewrap(doc, shutil.get_terminal_size().columns - 2)
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.error = wrong_value  # argparse would print the whole usage first
    for config in configs:
        group = parser.add_argument_group(config.__name__)
        comments = dict(re.findall(r"^    (\w+):.*?  # (.*)$", inspect.getsource(config), re.M))
        for field in dataclasses.fields(config):
            default = "" if field.default is None else f" [{field.default}]"
            help = (comments.get(field.name, "") + default).replace("%", "%%")
            kind = dict(action=argparse.BooleanOptionalAction) if field.type is bool else \
                dict(nargs="+", metavar="FILE") if field.type is list else \
                dict(nargs="+", metavar="INT", type=int) if field.type == list[int] else \
                dict(nargs="+", metavar="NAME") if field.type == list[str] else \
                dict(type=field.type, metavar=field.type.__name__.upper())
            group.add_argument(f"--{field.name}", help=help, **kind)
    if rest:
        parser.add_argument(rest, nargs="*", default=[])
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        close = difflib.get_close_matches(flag, parser._option_string_actions, n=1)
        raise UserError(f"unknown flag {flag}" + (f"; did you mean {close[0]}?" if close else "; --help lists them all"))
    return vars(given)


def rewrap(doc, width):
    """A docstring for a terminal of so many columns: paragraphs are filled anew, indented lines stay lines."""
    def fill(text, indent=0, first=0):
        return textwrap.fill(text, width, initial_indent=" " * first, subsequent_indent=" " * indent, break_on_hyphens=False)

    def line(text):
        left, gap, right = re.fullmatch(r"( *.*?)(?:( {3,})(\S.*))?", text).groups("")  # a command or a name, and what it is
        column = len(left + gap)
        if len(text) <= width or not right:
            return text if len(text) <= width else fill(text, 8)
        return fill(text, column) if column < 24 else left + "\n" + fill(right, 6, 6)

    def block(text):
        return "\n".join(map(line, text.split("\n"))) if re.search("^ ", text, re.M) else fill(text)

    return "\n\n".join(map(block, doc.strip().split("\n\n")))


def wrong_value(message):
    raise UserError(message.removeprefix("argument ") + "; --help says what it takes")  # "argument": argparse's word for a flag


def run(main):
    """Calls main(). What is not a bug of ours becomes one line on standard error.

    The exit status is 2 for a mistake (a UserError, a missing package, a file that cannot be used), 1 for want of memory or
    of another process.
    """
    for stream in (sys.stdout, sys.stderr):  # a character that a terminal has not is no reason to stop
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    except UserError as error:
        end(2, error)
    except ModuleNotFoundError as error:
        end(2, f"the package {error.name} is missing: pip install {error.name}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's last flush finds somebody
        sys.exit(128 + 13)  # as the shell counts SIGPIPE
    except OSError as error:
        end(2, f"{error.filename or 'a file'}: {error.strerror or first_line(error)}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or re.search(NO_MEMORY, str(error)):
            end(1, "there is not enough memory: take a smaller model, or less at a time")
        if not re.search(NO_PROCESS, str(error)):
            raise
        detail = re.sub(r"^\[.*?\] ", "", first_line(error)).split(". ")[0]  # without the line of C++
        end(1, "another process of this run has ended, and this one with it; see what that one says, and go on from the last "
            f"checkpoint with --resume ({detail})")
    except KeyboardInterrupt:
        sys.exit(130)  # as the shell counts it: 128 + SIGINT


def end(status, message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


def catch_stop_signals():
    """From now on SIGTERM, Ctrl-C and the loss of the terminal interrupt nothing, but add their numbers to the list returned.

    A loop looks at it. What is ignored already, as nohup has it, stays so.
    """
    received = []
    for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: received.append(number))
    return received


def print0(*args):
    """Rank 0 alone talks; if nobody is there to listen any more, a run need not end for that."""
    if os.environ.get("RANK", "0") == "0":
        try:
            print(*args, flush=True)
        except OSError:  # the terminal or the pipe is gone
            sys.stdout = open(os.devnull, "w")


def fit(fields, drop):
    """The fields in one line. On a terminal that is too narrow, without some of those numbered in `drop`, the first first."""
    fields, width = list(fields), shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for i in drop:
        if len(" | ".join(filter(None, fields))) > width:
            fields[i] = ""
    return " | ".join(filter(None, fields))


@contextlib.contextmanager
def writing(path, remedy="make room, or give another place"):
    """What goes wrong while something is written becomes a UserError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = error if isinstance(error, OSError) else error.__context__  # torch.save hides it behind one of its own
        if not isinstance(reason, OSError):
            raise
        raise UserError(f"{path}: cannot be written ({reason.strerror or first_line(reason)}); {remedy}") from error


@contextlib.contextmanager
def replacing(path, temporary):
    """What is written to a temporary name gets its own when it is whole: nobody finds half a file, and an old one lives on."""
    try:
        yield
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_json(path):
    """Raises UserError, before the work and not after it, if a --json FILE could not be written."""
    if path and Path(path).is_dir():
        raise UserError(f"--json {path}: that is a directory; give a file")
    if path and not Path(path).parent.is_dir():
        raise UserError(f"--json {path}: there is no directory {Path(path).parent}; make it first")
    if path and not os.access(Path(path).parent, os.W_OK):
        raise UserError(f"--json {path}: {Path(path).parent} cannot be written to; give another place")


def write_json(path, value):
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with writing(path):
        if Path(path).exists() and not Path(path).is_file():  # such as /dev/stdout: not to be replaced by a file
            Path(path).write_text(text, encoding="utf-8")
            return
        path = Path(path).resolve()  # a link stays one
        temporary = Path(f"{path}.tmp")
        with replacing(path, temporary):
            temporary.write_text(text, encoding="utf-8")


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def duration(seconds):
    """Seconds for a person: 45s, 3m20s, 2h05m."""
    m, s = divmod(round(seconds), 60)
    return f"{m // 60}h{m % 60:02d}m" if m >= 60 else f"{m}m{s:02d}s" if m else f"{s}s"
