"""Errors: a user's mistake is printed as one sentence; a bug keeps its traceback."""

import contextlib
import errno
import importlib
import os
import re
import signal
import sys

from plaingpt.terminal import visible

# {error number of the operating system: what the user can do}
REMEDIES = {
    errno.EACCES: "change the permissions",
    errno.EPERM: "change the permissions",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
}


class UserError(Exception):
    """Raised for a mistake that the user can correct. The text of the error is one sentence.

    The program prints the text, and ends with the exit status 2.
    """


def run_program(main):
    """Calls main(). Prints a UserError as one line.

    An OSError whose number is in REMEDIES is also printed as one line, because only the user can
    remove the cause of such an error. A bug keeps its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # escapes characters that cannot be encoded
    try:
        main()
    except BrokenPipeError:
        sys.exit(128 + signal.SIGPIPE)
    except (UserError, OSError) as error:
        remedy = ""
        if isinstance(error, OSError):
            if error.errno not in REMEDIES:
                raise
            remedy = f"; {REMEDIES[error.errno]}"
        print(f"error: {visible(str(error), sys.stderr)}{remedy}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # otherwise, Python would flush again at exit, and change the exit status
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def require(module):
    """Imports a module of an optional package. Raises UserError with the command to install it."""
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:  # the package, or a package that it imports, is missing
        raise missing_package(error.name) from error
    package = sys.modules[module.partition(".")[0]]
    # Python also imports a folder with the name of a missing package. A folder has no __file__.
    if getattr(package, "__file__", None) is None:
        raise missing_package(module)
    return imported


def missing_package(module):
    """Returns the UserError for a module whose package is missing."""
    name = module.partition(".")[0]
    return UserError(f"the package {name} is missing: pip install {name}")


@contextlib.contextmanager
def explaining(what, remedy, kinds=Exception):
    """Context manager that turns an exception whose class is in `kinds` into a UserError.

    The text of the UserError is "what (reason); remedy". The reason is the first line of the
    exception's text. kinds: an exception class, or a tuple of exception classes.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(f"{what} ({first_line(error)}); {remedy}") from error


def first_line(error):
    """Returns the first line of an exception's text, or the exception's class if the text is empty.

    If the first line ends with a colon, returns the second line, which contains the reason.
    """
    text = str(error)
    if isinstance(error, KeyError):  # the text of a KeyError is only the key
        text = f"no field {text}"
    if getattr(error, "strerror", None):  # the text of an OSError, without the error number
        text = error.strerror
    if getattr(error, "stderr", None):  # a CalledProcessError contains git's output, as bytes
        text = error.stderr.decode(errors="replace")
    # Removes ANSI escape codes, which set colors.
    text = re.sub(r"\x1b\[[\d;]*m", "", text).strip()
    lines = (text or type(error).__name__).splitlines()
    if lines[0].endswith(":") and len(lines) > 1:  # "Error(s) in loading state_dict for GPT:"
        return lines[1].strip()
    return lines[0]
