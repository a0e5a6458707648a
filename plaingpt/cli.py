"""The command line of every program, its errors, and small helpers for terminals and files.

A field of a configuration dataclass is a flag. Its annotation carries type, help and range:

  max_lr: Annotated[float, "peak learning rate", "above 0"] = 6e-4
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib
import json
import math
import operator
import os
import shutil
import signal
import sys
import threading
import typing
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

COMPARE = {"above": operator.gt, "at least": operator.ge, "at most": operator.le}


class UserError(Exception):
    """A mistake that the user can correct: one sentence, and the exit status of the program."""

    def __init__(self, message, status=2):
        super().__init__(message)
        self.status = status


def parse_flags(doc, *configs, argv=None, rest=None):
    """Parses argv (default: sys.argv) into a dict of the flags given. Raises UserError.

    doc: text for --help. configs: dataclasses. rest: name for the list of arguments without a flag.
    """
    width = max(40, shutil.get_terminal_size().columns) - 2  # argparse fails if it is narrower
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags]", description=doc, allow_abbrev=False,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, width=width),
        argument_default=argparse.SUPPRESS, exit_on_error=False)
    for config in configs:
        group = parser.add_argument_group(config.__name__)
        hints = typing.get_type_hints(config, include_extras=True)
        for field in dataclasses.fields(config):
            options = read_annotation(field.name, hints[field.name], field.default)
            group.add_argument(f"--{field.name}", **options)
    if rest:
        parser.add_argument(rest, nargs="*", default=[])
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{str(error).removeprefix('argument ')}; see --help") from error
    if unknown:
        flag = unknown[0].split("=")[0]
        if not flag.startswith("-"):
            raise UserError(f"unexpected {flag}; give --FLAG before it; quote a value with spaces")
        known = list(parser._option_string_actions)
        close = [name for name in known if name.endswith(flag.replace("--", "_"))]  # --lr: --max_lr
        close += difflib.get_close_matches(flag, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "--help lists all flags"
        raise UserError(f"unknown flag {flag}; {hint}")
    return vars(given)


def read_annotation(name, hint, default):
    """Annotation of a field -> options for add_argument."""
    kind, text, *limits = typing.get_args(hint)
    text += "" if default is None else f" [{default}]"
    options = dict(help=text.replace("%", "%%"))
    if type(None) in typing.get_args(kind):
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is list:
        kind = typing.get_args(kind)[0]
        options["nargs"] = "+"
    if kind is bool:
        return options | dict(action=argparse.BooleanOptionalAction)
    choices = typing.get_args(kind)  # of a Literal
    kind = str if choices else kind

    def convert(text):
        value = kind(text)
        if choices and value not in choices:
            raise UserError(f"--{name} {value}: must be one of {', '.join(choices)}")
        for limit in limits[0].split(" and ") if limits else []:
            words, bound = limit.rsplit(" ", 1)
            if not (math.isfinite(value) and COMPARE[words](value, float(bound))):
                raise UserError(f"--{name} {value}: must be {limits[0]}")
        return value

    convert.__name__ = kind.__name__  # for argparse's message
    metavar = "|".join(choices) or kind.__name__.upper()
    if len(metavar) > 60:
        options["help"] += f"; one of {', '.join(choices)}"
        metavar = "NAME"
    return options | dict(type=convert, metavar=metavar)


def run(main):
    """Calls main(). A UserError is printed as one line; any other error keeps its traceback."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None if the shell closed it
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # escape what the terminal's encoding cannot print
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)
    except BrokenPipeError:  # redirect stdout: else the flush at interpreter exit fails again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def require(module):
    """Imports a module of an optional package. Raises UserError with the command to install it."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UserError(f"the package {package} is missing: pip install {package}") from error


STOP_SIGNALS = [getattr(signal, n) for n in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, n)]


def catch_stop_signals(message, max_minutes=None):
    """From now on SIGTERM, SIGINT and SIGHUP append their number to the returned list.

    The first one prints the message: what the program does before it ends. The second one ends it.
    After max_minutes a 0 is appended.
    """
    received = []
    if max_minutes:
        timer = threading.Timer(60 * max_minutes, received.append, [0])
        timer.daemon = True  # does not keep the program alive
        timer.start()

    def handle(number, frame):
        if any(received):
            os._exit(128 + number)
        received.append(number)
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                text = f"{message}; Ctrl-C again to quit now\n"
                os.write(1, text.encode())  # print is not reentrant

    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, handle)
    return received


@contextlib.contextmanager
def restoring_signals():
    """Restores the signal handlers at the end. Also a decorator: @restoring_signals()."""
    handlers = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    try:
        yield
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)


def print0(text, end="\n"):
    """Prints on rank 0. A closed output does not end the run."""
    if os.environ.get("RANK", "0") == "0":
        try:
            clear = "\r\x1b[K" if sys.stdout.isatty() else ""  # removes the progress bar
            print(clear + text, end=end, flush=True)
        except OSError:
            sys.stdout = open(os.devnull, "w")


def fit(line):
    """Removes the last parts of "a | b | c" until the line fits the terminal."""
    columns = shutil.get_terminal_size().columns - 1 if sys.stdout.isatty() else len(line)
    while len(line) > columns and " | " in line:
        line = line.rpartition(" | ")[0]
    return line[:columns]


def show_progress(done, total, text):
    """Shows a progress bar in the last line of a terminal, until the next print0."""
    if sys.stdout.isatty():
        print0(fit(f"{done}/{total} [{'#' * (20 * done // total):<20}] {text}"), end="")


@contextlib.contextmanager
def writing(path, remedy="choose another place, or free some space"):
    """If writing `path` raises an OSError, raises a UserError that ends with `remedy` instead."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot write ({error.strerror or error}); {remedy}") from error


@contextlib.contextmanager
def replacing(path):
    """Yields a temporary path; renames it to `path` after the block, or deletes it on failure."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def lock(directory, flag):
    """Locks a directory until the returned file descriptor is closed. Raises UserError."""
    # On the directory itself, so that no lock file stays behind.
    descriptor = os.open(directory if fcntl else os.devnull, os.O_RDONLY)
    try:
        if fcntl:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UserError(f"{flag} {directory}: another process is writing there; stop it, or choose "
                        "another directory") from error
    except OSError as error:  # some network file systems have no locks
        print0(f"note: {directory} cannot be locked ({error.strerror}); start no second run there")
    return descriptor


def check_output(flag, path):
    """Raises UserError if a file cannot be written. Called before the work starts."""
    if path and (Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK)):
        raise UserError(f"{flag} {path}: cannot write there; give a file in a writable directory")


def write_json(path, value):
    """Writes a value as JSON. A regular file is replaced atomically; a device is written to."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with writing(path):
        if Path(path).exists() and not Path(path).is_file():  # such as /dev/stdout
            Path(path).write_text(text, "utf-8", "backslashreplace")
            return
        with replacing(Path(path).resolve()) as temporary:  # a symbolic link stays one
            temporary.write_text(text, "utf-8", "backslashreplace")  # paths may be invalid UTF-8


def read_json(path):
    """The object in a JSON file -> dict; {} without the file. Raises UserError."""
    try:
        value = json.loads(path.read_text("utf-8")) if path.exists() else {}
        if not isinstance(value, dict):
            raise ValueError("no object with fields")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is damaged ({first_line(error)}); restore it") from error
    return value


def first_line(error):
    """First line of an exception's text, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
