"""Command-line flags: the fields of dataclasses.

A field has a type. The arguments of `flag` are the field's default, help text and range:

  max_lr: float = flag(6e-4, "peak learning rate", above=0)
  batch_size: int = flag(64, "sequences per micro-batch", above=0)
"""

import argparse
import dataclasses
import difflib
import re
from operator import ge, gt, le, lt
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

from plaingpt.base.errors import UserError

# {our flag: its names in nanoGPT, build-nanogpt, llm.c or Hugging Face's Trainer}
OTHER_NAMES = {
    "train_large.py": ["parallel", "tp", "pp"],  # of version 2.1
    "--batch_size": ["per_device_train_batch_size"],
    "--total_batch_size": ["gradient_accumulation_steps"],
    "--max_steps": ["max_iters", "lr_decay_iters", "num_iterations", "num_train_epochs", "epochs"],
    "--max_lr": ["learning_rate", "lr"],
    "--min_lr": ["learning_rate_decay_frac"],
    "--schedule": ["decay_lr"],
    "--grad_clip": ["max_grad_norm"],
    "--block_size": ["sequence_length"],
    "--val_every": ["eval_interval", "eval_steps"],
    "--val_tokens": ["eval_iters", "val_max_steps"],
    "--save_every": ["save_steps"],
    "--log_every": ["log_interval", "logging_steps"],
    "--wandb": ["wandb_log", "wandb_project"],
    "--data": ["dataset", "input_bin"],
    "--preset": ["config", "model_type", "model"],
    "--model": ["init_from", "model_type", "m"],
    "--checkpoint": ["out_dir", "log_dir"],
    "--log_dir": ["out_dir"],
    "--prompt": ["start"],
    "code in model.py": ["beta1", "beta2", "bias"],
}
# No program needs larger numbers, and larger numbers may overflow as a float or as a time.
LARGEST = 1e12


@dataclasses.dataclass(frozen=True)
class Flag:
    """The help text of a flag, and the values that the flag accepts.

    If a flag has only a lower bound, its value must also be below LARGEST.
    """

    help: str
    above: float | None = None
    below: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    empty: bool = False  # whether an empty string is a valid value
    either: bool = False  # whether this flag and the previous flag are mutually exclusive
    line_breaks: bool = False  # whether a backslash and an n in the value mean a line break

    def allows(self, value):
        """Returns whether a number is in the range."""
        return all(compare(value, bound) for _, compare, bound in self.bounds(value))

    def range(self, value):
        """Returns the range in words, such as "at least 0 and at most 1"."""
        bounds = self.bounds(value)
        return " and ".join(f"{words} {write_bound(bound)}" for words, _, bound in bounds)

    def bounds(self, value):
        """Returns [(words, comparison, bound)], with LARGEST only if the value exceeds it."""
        bounds = [
            ("above", gt, self.above),
            ("at least", ge, self.at_least),
            ("below", lt, self.below),
            ("at most", le, self.at_most),
        ]
        given = [each for each in bounds if each[2] is not None]
        if given and self.below is None and self.at_most is None and not value < LARGEST:
            given.append(("below", lt, LARGEST))
        return given


def flag(default, help, **settings):
    """Returns a dataclass field that defines a flag. help, settings: the fields of Flag."""
    return dataclasses.field(default=default, metadata={"flag": Flag(help, **settings)})


def write_bound(bound):
    """Formats a bound: an integer with all its digits, and a float such as 1e6 as 1e6."""
    if isinstance(bound, int):
        return str(bound)
    return re.sub(r"e\+0*", "e", f"{bound:g}")


def parse_flags(doc, *configs, argv=None, rest=None, groups=None):
    """Returns {name: value} of the flags in argv (default: sys.argv). Does not add defaults.

    doc: the description in --help. configs: dataclasses whose fields are the flags. rest: the name
    of the positional arguments, if the program has any. groups: {first flag of a group: title of
    the group}, in the order of --help. Raises one UserError that lists all problems. If
    argparse cannot read an argument, the list ends there.
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
    version = f"plainGPT {read_version()}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    add_flags(parser, configs, groups)
    if rest:
        parser.add_argument(rest, nargs="*", default=[])
    given = argparse.Namespace()
    unreadable = []
    try:
        _, unknown = parser.parse_known_args(argv, given)
        if unknown:
            # Omits the values of unknown flags, but not a file such as nanoGPT's
            # config/train_gpt2.py.
            named = [text for text in unknown if text.startswith("-") or text.endswith(".py")]
            hints = [advise(text, parser._option_string_actions) for text in named or unknown]
            unreadable.append(f"unknown flags: {', '.join(hints)}; see --help")
    except argparse.ArgumentError as error:  # `given` contains the flags before this error
        text = str(error).removeprefix("argument ").replace("ignored explicit", "takes no")
        if "expected" in text:
            text += f" (write {error.argument_name}=VALUE if it begins with a dash)"
        unreadable.append(f"{text}; see --help")
    problems = [*problems_of_values(configs, vars(given)), *unreadable]
    if problems:
        raise UserError("; ".join(problems))
    return vars(given)


def read_version():
    """Returns the version in pyproject.toml, such as "1.0"."""
    path = Path(__file__).parents[2] / "pyproject.toml"
    if not path.exists():  # a user has copied only the Python files
        return "unknown"
    return re.search(r'^version = "(.+)"$', path.read_text("utf-8"), re.M)[1]


def advise(text, flags):
    """Returns an unknown argument, with a hint about what to use instead.

    flags: the flags of this program.
    """
    if not text.startswith("-"):
        return f"{text} (settings are flags; quote a value that contains spaces)"
    known = {name.lstrip("-"): name for name in flags}  # {name without dashes: what to use}
    for ours, names in OTHER_NAMES.items():
        if ours in flags or not ours.startswith("--"):
            known = dict.fromkeys(names, ours) | known
    name = text.split("=")[0]
    close = difflib.get_close_matches(name.lstrip("-"), known, n=1, cutoff=0.7)
    return f"{name} (use {known[close[0]]})" if close else f"{name} (no such flag)"


def add_flags(parser, configs, groups):
    """Adds a flag to the parser for each field of the dataclasses. See parse_flags."""
    made = {}  # argparse prints the groups in the order of their creation
    for name, title in (groups or {}).items():
        made[name] = parser.add_argument_group(title)
    group = parser
    for config in configs:
        types = types_of(config)
        for field in dataclasses.fields(config):
            flag = field.metadata["flag"]
            group = made.get(field.name, group)
            # A flag with `either` joins the mutually exclusive group of the previous flag. Any
            # other flag begins a new mutually exclusive group.
            if not flag.either:
                alternatives = group.add_mutually_exclusive_group()
            options = make_options(types[field.name], flag, field.default)
            alternatives.add_argument(f"--{field.name}", **options)


def problems_of_values(configs, given):
    """Returns a sentence for each value that its flag rejects. given: {name: value}."""
    problems = []
    for config in configs:
        for name, flag in flags_of(config).items():
            values = given.get(name, [])
            if not isinstance(values, list):
                values = [values]
            for value in values:
                if value == "" and not flag.empty:
                    problems.append(f"--{name}: is empty; give a value, or remove this flag")
                elif not flag.allows(value):
                    problems.append(f"--{name} {value}: must be {flag.range(value)}")
    return problems


def pick(kind, values):
    """Creates an instance of the dataclass `kind` from a dict. Ignores all other keys."""
    names = {field.name for field in dataclasses.fields(kind)} & values.keys()
    return kind(**{name: values[name] for name in names})


def flags_of(config):
    """Returns the Flag of each field of a dataclass: {name: Flag}."""
    return {field.name: field.metadata["flag"] for field in dataclasses.fields(config)}


def types_of(config):
    """Returns {name: type} of the fields of a dataclass, even if their types are still strings.

    `from __future__ import annotations` postpones the evaluation of annotations. The types that
    dataclasses.fields returns are then strings.
    """
    # Without localns={}, the field `list` of experiment.py would hide the type `list`.
    return get_type_hints(config, localns={})


def make_options(kind, flag, default):
    """Returns the arguments of add_argument for the type, the Flag and the default of a field."""
    text = flag.help
    if default is not None and default is not False:
        text += f" [{default}]"
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
    options["metavar"] = kind.__name__.upper()
    if flag.line_breaks:
        kind = read_line_breaks
    return options | dict(type=kind)


def read_line_breaks(text):
    r"""Replaces a backslash and an n (\n) with a line break, which is hard to type in a shell."""
    return text.replace(r"\n", "\n")
