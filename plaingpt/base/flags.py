"""Command-line flags, which are the fields of dataclasses.

A field has a type, and a default, a help text and a range, which `flag` takes:

  max_lr: float = flag(6e-4, "peak learning rate", above=0)
  tp: int = flag(1, "tensor parallel processes", above=0)
"""

import argparse
import dataclasses
import difflib
import re
from operator import ge, gt, le, lt
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

from plaingpt.base.errors import UserError

# Our flags, each with what nanoGPT, build-nanogpt, llm.c and Hugging Face's Trainer call it.
OTHER_NAMES = {
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
# No program needs a larger number, which may overflow as a float or as a time.
LARGEST = 1e12


@dataclasses.dataclass(frozen=True)
class Flag:
    """What a flag means, and which values it takes.

    A number that has a lower bound and no upper one must be below LARGEST.
    """

    help: str
    above: float | None = None
    below: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    empty: bool = False  # an empty value means something; for other flags, it is a mistake
    either: bool = False  # either this flag can be given, or the one before it
    line_breaks: bool = False  # in a text, a backslash and an n are a line break

    def allows(self, value):
        """Returns whether a number is in the range."""
        return all(compare(value, bound) for _, compare, bound in self.bounds(value))

    def range(self, value):
        """Returns the range in words, such as "at least 0 and at most 1"."""
        bounds = self.bounds(value)
        return " and ".join(f"{words} {write_bound(bound)}" for words, _, bound in bounds)

    def bounds(self, value):
        """Returns the bounds: (words, comparison, bound) of each. LARGEST only if it matters."""
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
    """Makes a field of a dataclass that is a flag. help, settings: the fields of Flag."""
    return dataclasses.field(default=default, metadata={"flag": Flag(help, **settings)})


def write_bound(bound):
    """Writes a bound: 4294967295 with all digits, and the float 1e6 as 1e6."""
    if isinstance(bound, int):
        return str(bound)
    return re.sub(r"e\+0*", "e", f"{bound:g}")


def parse_flags(doc, *configs, argv=None, rest=None, groups=None):
    """Parses argv (default: sys.argv) into a dict of the flags that are given.

    doc: text for --help. configs: dataclasses. rest: name for the list of arguments without a flag.
    groups: {first flag of a group: its title}, in the order of --help. Raises a UserError that has
    all problems, up to the first argument that cannot be read.
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
            # Values of unknown flags are left out, but not nanoGPT's config/train_gpt2.py.
            named = [text for text in unknown if text.startswith("-") or text.endswith(".py")]
            hints = [advise(text, parser._option_string_actions) for text in named or unknown]
            unreadable.append(f"unknown flags: {', '.join(hints)}; see --help")
    except argparse.ArgumentError as error:  # argparse stops, and `given` has what it read before
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
    if not path.exists():  # only the Python files were copied
        return "unknown"
    return re.search(r'^version = "(.+)"$', path.read_text("utf-8"), re.M)[1]


def advise(text, flags):
    """Returns an unknown argument with what to use instead. flags: those of this program."""
    if not text.startswith("-"):
        return f"{text} (settings are flags; quote a value with spaces)"
    known = {name.lstrip("-"): name for name in flags}  # {name without dashes: what to use}
    for ours, names in OTHER_NAMES.items():
        if ours in flags or not ours.startswith("--"):
            known = dict.fromkeys(names, ours) | known
    name = text.split("=")[0]
    close = difflib.get_close_matches(name.lstrip("-"), known, n=1, cutoff=0.7)
    return f"{name} (use {known[close[0]]})" if close else f"{name} (not here)"


def add_flags(parser, configs, groups):
    """Adds a flag to the parser for each field of the dataclasses. See parse_flags."""
    made = {}  # argparse prints the groups in the order in which they are made
    for name, title in (groups or {}).items():
        made[name] = parser.add_argument_group(title)
    group = parser
    for config in configs:
        types = types_of(config)
        for field in dataclasses.fields(config):
            flag = field.metadata["flag"]
            group = made.get(field.name, group)
            # Each flag begins a set of flags of which only one can be given. A flag with `either`
            # joins the set of the flag before it.
            if not flag.either:
                alternatives = group.add_mutually_exclusive_group()
            options = make_options(types[field.name], flag, field.default)
            alternatives.add_argument(f"--{field.name}", **options)


def problems_of_values(configs, given):
    """Returns a sentence for each value that its flag does not take. given: {name: value}."""
    problems = []
    for config in configs:
        for name, flag in flags_of(config).items():
            values = given.get(name, [])
            if not isinstance(values, list):
                values = [values]
            for value in values:
                if value == "" and not flag.empty:
                    problems.append(f"--{name}: is empty; give a value, or leave out this flag")
                elif not flag.allows(value):
                    problems.append(f"--{name} {value}: must be {flag.range(value)}")
    return problems


def pick(kind, values):
    """Makes a dataclass from a dict, which may have other keys, too."""
    names = {field.name for field in dataclasses.fields(kind)} & values.keys()
    return kind(**{name: values[name] for name in names})


def flags_of(config):
    """Returns the Flag of each field of a dataclass: {name: Flag}."""
    return {field.name: field.metadata["flag"] for field in dataclasses.fields(config)}


def types_of(config):
    """Returns {name: type} of a dataclass's fields, also if its file postpones annotations.

    With `from __future__ import annotations`, dataclasses.fields has the text of an annotation.
    """
    # Without localns, the field `list` of experiment.py would hide the type.
    return get_type_hints(config, localns={})


def make_options(kind, flag, default):
    """Turns the type, the Flag and the default of a field into options for add_argument."""
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
    """Turns each backslash with an n into a line break, which is hard to type in a shell."""
    return text.replace(r"\n", "\n")
