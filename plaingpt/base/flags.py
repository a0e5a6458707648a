"""Command-line flags, which are the fields of dataclasses.

The annotation of a field has the type, the help text and the range. The marks below may follow:

  max_lr: Annotated[float, "peak learning rate", "above 0"] = 6e-4
  tp: Annotated[int, "tensor parallel processes", "above 0", FREE] = 1
"""

import argparse
import dataclasses
import math
from operator import ge, gt, le, lt
from typing import get_args, get_origin

from plaingpt.base.errors import UserError
from plaingpt.base.other_flags import advise

# A flag may be changed at --resume without a note: losses and scores do not depend on it, except
# for rounding and the masks of dropout.
FREE = "free"
# Runs that differ only in this flag, such as the seed, repeat one experiment.
REPEAT = "repeat"
EMPTY = "empty"  # an empty value means something
OR = "or"  # the flag cannot be given together with the one before it
MARKS = (FREE, REPEAT, EMPTY, OR)
COMPARE = {"above": gt, "below": lt, "at least": ge, "at most": le}


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
    add_flags(parser, configs, groups)
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


def add_flags(parser, configs, groups):
    """Adds a flag to the parser for each field of the dataclasses. See parse_flags."""
    group = parser
    for config in configs:
        for field in dataclasses.fields(config):
            if field.name in groups:
                group = parser.add_argument_group(groups[field.name])
            # Each flag begins a set of flags of which only one can be given. A flag with OR joins
            # the set of the flag before it.
            if OR not in get_args(field.type):
                alternatives = group.add_mutually_exclusive_group()
            alternatives.add_argument(f"--{field.name}", **read_annotation(field))


def pick(kind, values):
    """Makes a dataclass from a dict, which may have other keys, too."""
    names = {field.name for field in dataclasses.fields(kind)} & values.keys()
    return kind(**{name: values[name] for name in names})


def marked(config, *marks):
    """Returns the names of the fields of a dataclass whose annotation has one of the marks."""
    found = set()
    for field in dataclasses.fields(config):
        annotations = get_args(field.type)[1:]  # help text, range and marks; [0] is the type
        if any(mark in annotations for mark in marks):
            found.add(field.name)
    return found


def read_annotation(field):
    """Turns the annotation of a dataclass's field into options for add_argument."""
    kind, text, *others = get_args(field.type)
    ranges = [other for other in others if other not in MARKS]  # one, or none
    if field.default is not None and field.default is not False:
        text += f" [{field.default}]"
    options = dict(help=text.replace("%", "%%"))
    if type(None) in get_args(kind):  # "float | None" becomes "float"
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
        if value == "" and EMPTY not in others:
            raise UserError(f"--{field.name}: is empty; give a value, or leave out this flag")
        if ranges and not is_in_range(value, ranges[0]):
            raise UserError(f"--{field.name} {value}: must be {ranges[0]}")
        return value

    convert.__name__ = kind.__name__  # argparse shows it in its message
    return options | dict(type=convert, metavar=kind.__name__.upper())


def is_in_range(value, limits):
    """Returns whether a number is in a range, such as "at least 0 and at most 1", and is finite."""
    for limit in limits.split(" and "):
        words, bound = limit.rsplit(" ", 1)
        if not (math.isfinite(value) and COMPARE[words](value, float(bound))):
            return False
    return True
