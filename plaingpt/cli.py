"""The command line of every program, its errors, and small helpers for terminals and files.

A field of a configuration dataclass is a flag. Its annotation has the type, the help text and the
range. After them, FREE or REPEAT may say what a change of the flag means, EMPTY that an empty value
means something, and OR that the flag cannot be given together with the one before it:

  max_lr: Annotated[float, "peak learning rate", "above 0"] = 6e-4
  tp: Annotated[int, "tensor parallel processes", "above 0", FREE] = 1
"""

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from operator import ge, gt, le, lt
from pathlib import Path
from typing import get_args, get_origin

# {our flag: the flags of nanoGPT, build-nanogpt, llm.c and Hugging Face's Trainer that mean it}.
# A program suggests only flags that it has. A name that is almost ours needs no entry.
OTHER_NAMES = {
    "--max_steps": "max_iters lr_decay_iters num_iterations num_train_epochs epochs",
    "--total_batch_size, in tokens": "gradient_accumulation_steps",
    "--max_lr": "learning_rate lr",
    "--val_tokens, in tokens": "eval_iters val_max_steps",
    "--min_lr": "learning_rate_decay_frac",
    "--val_every": "eval_interval eval_steps",
    "--wandb, with a project": "wandb_log wandb_project",
    "--log_every": "log_interval logging_steps",
    "--batch_size": "per_device_train_batch_size",
    "--model, or --checkpoint": "init_from model_type m",
    "--preset": "config model_type model",
    "--checkpoint": "out_dir log_dir",
    "--prompt": "start",
    "code in model.py": "beta1 beta2 bias",
    "--block_size": "sequence_length",
    "--grad_clip": "max_grad_norm",
    "--save_every": "save_steps",
    "--log_dir": "out_dir",
    "--data": "dataset input_bin",
    "--schedule": "decay_lr",
}
# FREE means that losses and scores do not depend on the flag (except for rounding and the masks of
# dropout), so a resume may change it without a note. REPEAT means that runs which differ in the
# flag repeat one experiment. A change of any other flag makes another experiment.
FREE, REPEAT, EMPTY, OR = "free", "repeat", "empty", "or"
COMPARE = {"above": gt, "below": lt, "at least": ge, "at most": le}


# A line of log.txt: step, stream, value.
LINE = re.compile(r"^(\d+) (\S+) ([-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|inf|nan))\n", re.M)


class UserError(Exception):
    """A mistake that the user can correct. Its text is one sentence. The exit status is 2."""


def parse_flags(doc, *configs, argv=None, rest=None, groups=()):
    """Parses argv (default: sys.argv) into a dict of the flags that are given. Raises UserError.

    doc: text for --help. configs: dataclasses. rest: name for the list of arguments without a flag.
    groups: {first flag of a group: its title in --help}.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags]",
        description=doc,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=30
        ),
    )
    group = parser
    for field in sum(map(dataclasses.fields, configs), ()):
        if field.name in groups:
            group = parser.add_argument_group(groups[field.name])
        if OR not in get_args(field.type):
            either = group.add_mutually_exclusive_group()
        either.add_argument(f"--{field.name}", **read_annotation(field))
    if rest:
        parser.add_argument(rest, nargs="*", default=[])
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        text = str(error).removeprefix("argument ").replace("ignored explicit", "takes no")
        raise UserError(f"{text}; see --help") from error
    if unknown:
        # Values of unknown flags are left out, but not nanoGPT's config/train_gpt2.py.
        named = [text for text in unknown if text.startswith("-") or text.endswith(".py")]
        hints = [advise(text, parser._option_string_actions) for text in named or unknown]
        raise UserError(f"unknown flags: {', '.join(hints)}; see --help")
    return vars(given)


def pick(kind, values):
    """Makes a dataclass from a dict, which may have other keys, too."""
    return kind(**{f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values})


def advise(text, flags):
    """An unknown argument -> the same with what to use instead. flags: those of this program."""
    flag = text.split("=")[0]
    if not text.startswith("-"):
        return f"{text} (settings are flags; quote a value with spaces)"
    known = {
        name: ours
        for ours, names in OTHER_NAMES.items()
        for name in names.split()
        if ours.split(",")[0] in flags or not ours.startswith("--")
    }
    known |= {name.lstrip("-"): name for name in flags}
    close = difflib.get_close_matches(flag.lstrip("-"), known, 1, 0.7)
    return f"{flag} (use {known[close[0]]})" if close else f"{flag} (not here)"


def marked(config, *marks):
    """Names of the fields of a dataclass whose annotation has one of the marks."""
    return {
        field.name for field in dataclasses.fields(config) if {*marks} & {*get_args(field.type)[1:]}
    }


def read_annotation(field):
    """Turns the annotation of a dataclass's field into options for add_argument."""
    kind, text, *limits = [p for p in get_args(field.type) if p not in (FREE, REPEAT, EMPTY, OR)]
    text += "" if field.default is None or field.default is False else f" [{field.default}]"
    options = dict(help=text.replace("%", "%%"))
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
        options["nargs"] = "+"
    if kind is bool:
        return options | dict(action=argparse.BooleanOptionalAction)
    if choices := get_args(kind):  # a Literal has choices
        options["help"] += f"; one of {', '.join(choices)}"
        return options | dict(choices=choices, metavar="NAME")

    def convert(text):
        value = kind(text)
        if value == "" and EMPTY not in get_args(field.type):
            raise UserError(f"--{field.name}: is empty; give a value, or leave out this flag")
        for limit in limits[0].split(" and ") if limits else []:
            words, bound = limit.rsplit(" ", 1)
            if not (math.isfinite(value) and COMPARE[words](value, float(bound))):
                raise UserError(f"--{field.name} {value}: must be {limits[0]}")
        return value

    convert.__name__ = kind.__name__  # argparse shows it in its message
    return options | dict(type=convert, metavar=kind.__name__.upper())


def run_program(main):
    """Calls main(). A UserError is printed as one line; any other error keeps its traceback.

    Only a PermissionError is one line, too. It names the file, and the program cannot correct it.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # escapes what the encoding cannot print
    try:
        main()
    except (UserError, PermissionError) as error:
        remedy = "" if isinstance(error, UserError) else "; change the permissions"
        print(f"error: {visible(str(error), sys.stderr)}{remedy}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # Redirects stdout. Otherwise, the flush at interpreter exit fails again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def require(module):
    """Imports a module of an optional package. Raises UserError with the command to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:  # the package is missing, or another one that it needs
        name = error.name.partition(".")[0]
        raise UserError(f"the package {name} is missing: pip install {name}") from error


@contextlib.contextmanager
def catch_stop_signals(message):
    """In the block, SIGTERM, SIGINT and SIGHUP only append their number to the yielded list.

    The first signal prints the message, which says what the program does before it ends. The second
    signal ends the program at once.
    """
    received = []

    def handle(number, frame):
        if any(received):
            os._exit(128 + number)
        received.append(number)
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                # os.write is used because print is not reentrant.
                os.write(1, f"{message}; Ctrl-C again to quit now\n".encode())

    numbers = [getattr(signal, n) for n in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, n)]
    with contextlib.ExitStack() as restore:
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                # signal.signal returns the handler before it.
                restore.callback(signal.signal, number, signal.signal(number, handle))
        yield received


def visible(text, stream=None):
    """Replaces control characters with escapes like \\x1b if the text goes to a terminal.

    They could change the state of the terminal. stream: where the text goes; by default to stdout.
    """
    if not (stream or sys.stdout).isatty():
        return text
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], text)


def print0(text, end="\n"):
    """Prints on rank 0. A closed output does not end the run."""
    if os.environ.get("RANK", "0") == "0":
        try:
            clear = "\r\x1b[K" if sys.stdout.isatty() else ""  # removes the progress bar
            print(clear + visible(text), end=end, flush=True)
        except OSError:
            sys.stdout = open(os.devnull, "w", encoding="utf-8", errors="replace")


def shorten_line(line):
    """Removes the last parts of "a | b | c" until the line fits the terminal."""
    columns = shutil.get_terminal_size().columns - 1 if sys.stdout.isatty() else len(line)
    while len(line) > columns and " | " in line:
        line = line.rpartition(" | ")[0]
    return line[:columns]


def show_progress(done, total, text):
    """Shows a progress bar in the last line of a terminal, until the next print0."""
    if sys.stdout.isatty():
        print0(shorten_line(f"{done}/{total} [{'#' * (20 * done // total):<20}] {text}"), end="")


@contextlib.contextmanager
def explaining(what, remedy, kinds=Exception):
    """Turns an error of these kinds in the block into the UserError "what (reason); remedy"."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(f"{what} ({first_line(error)}); {remedy}") from error


def writing(path, remedy="choose another place, or free some space"):
    """If writing `path` raises an OSError, raises a UserError that ends with `remedy` instead."""
    return explaining(f"{path}: cannot write", remedy, OSError)


@contextlib.contextmanager
def replacing(path):
    """Yields a new binary file. It replaces `path` after the block, and is deleted on failure."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def lock(directory, flag):
    """Locks a directory until the returned file descriptor is closed. Raises UserError.

    Removes the temporary files of a process that was killed.
    """
    # Locks the directory itself, so that no lock file stays behind.
    descriptor = os.open(directory if os.name == "posix" else os.devnull, os.O_RDONLY)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{flag} {directory}: another process uses it; wait for it") from error
    except (ImportError, OSError) as error:  # Windows and some network disks have no locks
        print0(f"note: {directory} cannot be locked ({error}); start no second run there")
    for temporary in Path(directory).glob("*.tmp"):
        if re.search(r"\.(npy|pt|json|txt)\.\d+\.tmp$", temporary.name):  # `replacing` named it
            temporary.unlink()
    return descriptor


def count_cores():
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def check_output(flag, path, inputs=()):
    """Raises UserError if a file cannot be written, or is an input. Call it before the work."""
    if path and any(Path(path).resolve() == Path(each).resolve() for each in inputs if each):
        raise UserError(f"{flag} {path}: is also an input; give another file")
    if path and (Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK)):
        raise UserError(f"{flag} {path}: cannot write there; give a file in a writable directory")


def write_json(path, value):
    """Writes a value as JSON. The file is replaced atomically; a symbolic link stays one."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with writing(path), replacing(Path(path).resolve()) as file:
        file.write(text.encode("utf-8", "backslashreplace"))  # paths may be invalid UTF-8


def read_json(path):
    """Reads the object in a JSON file -> dict, or {} without the file. Raises UserError."""
    with explaining(f"{path}: is damaged", "restore it", (OSError, ValueError, RecursionError)):
        value = json.loads(path.read_text("utf-8")) if path.exists() else {}
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return value


def first_line(error):
    """The first line of an exception's text, without escape codes, or its type if it is empty."""
    text = getattr(error, "strerror", None) or str(error)  # that of an OSError without its number
    text = (getattr(error, "stderr", None) or b"").decode(errors="replace") or text  # of git
    text = re.sub(r"\x1b\[[\d;]*m", "", text).strip()
    return (text or type(error).__name__).splitlines()[0]


def read_log(path):
    """Reads log.txt -> [(step, stream, value as text)], or []. Ignores an incomplete last line."""
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    return [(int(step), stream, value) for step, stream, value in LINE.findall(text)]


def read_streams(path):
    """Reads log.txt -> {stream: {step: number}}; {} without the file."""
    streams = {}
    for step, stream, value in read_log(path):
        streams.setdefault(stream, {})[step] = float(value)
    return streams


def run_git(*command, place=None, data=None):
    """Runs a command of git in a directory -> its output, as bytes. Raises UserError.

    place: the directory; by default this clone. data: the input of the command.
    """
    with explaining(f"git {command[0]}", "see --help", (OSError, subprocess.CalledProcessError)):
        return subprocess.run(
            ["git", *command],
            cwd=place or Path(__file__).parent,
            input=data,
            capture_output=True,
            check=True,
        ).stdout
