"""Errors of the user, which become one sentence, and bugs, which keep their traceback.

Also what a program does when it is told to stop: it ends in good order, or at once.
"""

import contextlib
import importlib
import math
import os
import re
import signal
import sys
import time

from plaingpt.base.terminal import visible


class UserError(Exception):
    """A mistake that the user can correct. Its text is one sentence. The exit status is 2."""


def run_program(main):
    """Calls main(). Prints a UserError as one line; any other error keeps its traceback.

    A PermissionError is one line, too: it names the file, and the program cannot correct it.
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
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:  # the package is missing, or another one that it needs
        raise missing_package(error.name) from error
    package = sys.modules[module.partition(".")[0]]
    # Python also imports a folder that has the name of a missing package. It has no __file__.
    if getattr(package, "__file__", None) is None:
        raise missing_package(module)
    return imported


def missing_package(module):
    """Makes the UserError for a module whose package is missing."""
    name = module.partition(".")[0]
    return UserError(f"the package {name} is missing: pip install {name}")


@contextlib.contextmanager
def explaining(what, remedy, kinds=Exception):
    """Turns an error of these kinds in the block into the UserError "what (reason); remedy"."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(f"{what} ({first_line(error)}); {remedy}") from error


def first_line(error):
    """Returns the first line of an exception's text, or the name of its type if it has no text.

    If the first line only announces the second one, returns the second one.
    """
    text = str(error)
    if isinstance(error, KeyError):  # its text is only the key
        text = f"no field {text}"
    if getattr(error, "strerror", None):  # an OSError has its text also without its number
        text = error.strerror
    if getattr(error, "stderr", None):  # a CalledProcessError has what git has printed, as bytes
        text = error.stderr.decode(errors="replace")
    # Removes the escape codes of colors.
    text = re.sub(r"\x1b\[[\d;]*m", "", text).strip()
    lines = (text or type(error).__name__).splitlines()
    if lines[0].endswith(":") and len(lines) > 1:  # "Error(s) in loading state_dict for GPT:"
        return lines[1].strip()
    return lines[0]


class StopRequest:
    """Whether a run is told to stop, by a signal or because its time is over.

    In its `with` block, the first SIGTERM, SIGINT or SIGHUP only prints the message, which says
    what the program does before it ends. The second one ends the program at once. max_minutes: the
    time of the run, from now on, or None.
    """

    def __init__(self, message, max_minutes=None):
        self.message = message
        self.deadline = time.monotonic() + 60 * (max_minutes or math.inf)
        self.has_signal = False
        self.old_handlers = {}

    @property
    def requested(self):
        """Whether the run should end after this step."""
        return self.has_signal or time.monotonic() > self.deadline

    def handle(self, number, frame):
        """Is called by Python when a signal comes."""
        if self.has_signal:
            os._exit(128 + number)
        self.has_signal = True
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                # os.write is used because print is not reentrant.
                os.write(1, f"{self.message}; Ctrl-C again to quit now\n".encode())

    def __enter__(self):
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # as with nohup
                self.old_handlers[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, *error):
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)


def end_at_once_on_ctrl_c():
    """Lets Ctrl-C end the program at once, for programs that need not end in good order.

    Otherwise, a library answers Ctrl-C only when it returns, perhaps after minutes.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
