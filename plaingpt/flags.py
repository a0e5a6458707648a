"""Command-line flags: the fields of dataclasses define the flags, and argparse reads the flags.

The type of a field is the type of its flag. The arguments of `flag` are the default, the help text
and the range of the flag:

  max_lr: float = flag(6e-4, "peak learning rate", above=0)
  batch_size: int = flag(64, "sequences per micro-batch", above=0)
  rope_base: float = 10000.0  # a flag without a help text
"""

import argparse
import dataclasses
import os
import re
from operator import ge, gt, le, lt
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

RANGES = dict(above=gt, at_least=ge, below=lt, at_most=le)
# If a flag defines no upper bound, its value must be below this number. Larger numbers could
# overflow when a program converts them to a float or to a time.
LARGEST = 10**12


def flag(default, help, **settings):
    """Returns a dataclass field that defines a flag.

    settings: the bounds of a number, named as in RANGES, and these options:

    - either=True: this flag and the previous flag are mutually exclusive.
    - empty=True: the value, a string, may be empty.
    - path=False: the value is not a path, so a ~ in the value does not mean the home directory.
    - line_breaks=True: a backslash and an n in the value mean a line break, which is difficult to
      type in a shell.
    """
    return dataclasses.field(default=default, metadata=dict(help=help, **settings))


def parse_flags(doc, *configs, argv=None, rest=None):
    """Returns {name: value} of the flags that argv contains. A missing flag is not in the result.

    doc: the description in --help. configs: dataclasses whose fields are the flags. argv: list of
    strings; default: the command line. rest: the name of the positional arguments, if the program
    has any. If an argument is wrong, argparse prints a message and exits.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags]",
        description=doc,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=30
        ),
    )
    version = f"plainGPT {read_version()}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    for config in configs:
        # Without localns={}, the field `list` of experiment.py would hide the type `list`.
        types = get_type_hints(config, localns={})
        for field in dataclasses.fields(config):
            if not field.metadata.get("either"):
                alternatives = parser.add_mutually_exclusive_group()
            alternatives.add_argument(f"--{field.name}", **make_options(field, types[field.name]))
    if rest:
        parser.add_argument(rest, nargs="*", default=[], type=expand_home)
    return vars(parser.parse_args(argv))


def make_options(field, kind):
    """Returns the arguments of argparse's add_argument for a field whose type is `kind`."""
    text = field.metadata.get("help", "")
    if field.default is not None and field.default is not False:
        text += f" [{field.default}]"
    options = dict(help=text.replace("%", "%%"))
    if type(None) in get_args(kind):  # "float | None" becomes "float"
        kind = get_args(kind)[0]
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
        options.update(nargs="+", action="extend")  # a repeated flag appends its values
    if kind is bool:
        return options | dict(action=argparse.BooleanOptionalAction)
    if choices := get_args(kind):  # a Literal has choices
        options["help"] += f"; one of {', '.join(choices)}"
        return options | dict(choices=choices, metavar="NAME")
    return options | dict(type=make_reader(kind, field.metadata), metavar=kind.__name__.upper())


def make_reader(kind, settings):
    """Returns a function that converts the text of an argument to a value whose type is `kind`.

    kind: int, float or str. settings: as in `flag`.
    """

    def read(text):
        if kind is str:
            if text == "" and not settings.get("empty"):
                raise argparse.ArgumentTypeError("is empty; give a value, or remove this flag")
            if settings.get("line_breaks"):
                return text.replace(r"\n", "\n")
            return expand_home(text) if settings.get("path", True) else text
        value = kind(text)
        bounds = settings
        if not ("below" in settings or "at_most" in settings):
            bounds = {**settings, "below": LARGEST}
        for name, compare in RANGES.items():
            bound = bounds.get(name)
            if bound is not None and not compare(value, bound):  # every comparison with NaN fails
                words = name.replace("_", " ")
                raise argparse.ArgumentTypeError(f"must be {words} {bound}, not {text}")
        return value

    read.__name__ = kind.__name__  # argparse's messages contain this name
    return read


def expand_home(text):
    """Replaces ~ at the start of each path with the home directory.

    A shell does not replace the ~ inside an argument such as NAME=~/x,NAME=~/y.
    """
    return re.sub(r"(?<![^=,])~[^/=,]*(?![^/=,])", lambda path: os.path.expanduser(path[0]), text)


def read_version():
    """Returns the version in pyproject.toml, such as "1.0", or "unknown" if the file is missing."""
    path = Path(__file__).parents[1] / "pyproject.toml"
    if not path.exists():  # possibly, the user has copied only the Python files
        return "unknown"
    return re.search(r'^version = "(.+)"$', path.read_text("utf-8"), re.M)[1]


def pick(kind, values):
    """Creates an instance of the dataclass `kind` from a dict. Ignores keys that are not fields."""
    names = {field.name for field in dataclasses.fields(kind)} & values.keys()
    return kind(**{name: values[name] for name in names})
