"""Flag: ranges in words, and annotations that `from __future__ import annotations` makes texts."""

from __future__ import annotations

import dataclasses
import re
import shutil
from dataclasses import dataclass
from typing import Literal

from plaingpt.base.errors import UserError, run_program
from plaingpt.base.flags import Flag, flag, flags_of, parse_flags, types_of
from plaingpt.run.config import RunConfig

import pytest
from conftest import ROOT, program

from generate import GenerateConfig
from train_gpt2 import TrainConfig


@dataclass
class Postponed:
    n: int = flag(1, "a number", above=0)
    rates: list[float] | None = flag(None, "numbers", at_least=0)
    kind: Literal["adamw", "muon"] = flag("adamw", "a choice")
    # It has the name of a type, as in experiment.py.
    list: bool = flag(False, "a switch", either=True)
    name: str | None = flag(None, "a text", empty=True)
    stop: str | None = flag(None, "a text", line_breaks=True)


def test_postponed_annotations(capsys):
    assert isinstance(dataclasses.fields(Postponed)[0].type, str)
    argv = "--n 2 --rates 0 1 --list --name=".split()
    found = parse_flags("", Postponed, argv=argv)
    assert found == dict(n=2, rates=[0.0, 1.0], list=True, name="")
    for flags, message in (
        ("--n 0", "--n 0: must be above 0"),
        ("--rates 1 -1", "--rates -1.0: must be at least 0"),
        ("--kind sgd", "--kind: invalid choice: 'sgd'"),
        ("--kind muon --list", "--list/--no-list: not allowed with argument --kind; see --help"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            parse_flags("", Postponed, argv=flags.split())
    with pytest.raises(SystemExit):
        parse_flags("", Postponed, argv=["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "--rates FLOAT [FLOAT ...] numbers --kind NAME a choice [adamw]; one of adamw" in out


def test_a_backslash_and_an_n_are_a_line_break():
    found = parse_flags("", Postponed, argv=["--stop", r"\n\nA:", "--name", r"\n"])
    assert found == dict(stop="\n\nA:", name=r"\n")
    found = parse_flags("", GenerateConfig, argv=["--prompt", r"a\nabla", r"--stop=\n"])
    assert found == dict(prompt=r"a\nabla", stop="\n")


@pytest.mark.slow
def test_a_class_of_fields_of_another_file():
    """bench.py makes such a class."""
    (field, *_) = dataclasses.fields(Postponed)
    copy = dataclasses.field(default=field.default, metadata=field.metadata)
    kind = dataclasses.make_dataclass("Made", [("n", types_of(Postponed)["n"], copy)])
    assert flags_of(kind) == dict(n=Flag("a number", above=0))
    assert parse_flags("", kind, argv=["--n", "3"]) == dict(n=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bench.py", "experiment.py", "hellaswag.py"])
def test_programs_may_postpone_annotations(name, tmp_path):
    expected, _ = program("--help", cwd=tmp_path, program=name, env=dict(COLUMNS="80"))
    shutil.copytree(ROOT / "plaingpt", tmp_path / "plaingpt")
    for path in (*ROOT.glob("*.py"), ROOT / "plaingpt/scoring/program.py"):
        text = path.read_text("utf-8")
        first = re.search("^(import|from) ", text, re.MULTILINE).start()
        text = text[:first] + "from __future__ import annotations\n\n" + text[first:]
        (tmp_path / path.relative_to(ROOT)).write_text(text, "utf-8")
    out, err = program("--help", cwd=tmp_path, program=tmp_path / name, env=dict(COLUMNS="80"))
    assert (out, err) == (expected, "")


def test_ranges_in_words():
    for each, words in (
        (Flag("a text"), ""),
        (Flag("", above=0), "above 0"),
        (Flag("", above=0, below=1), "above 0 and below 1"),
        (Flag("", at_least=0, at_most=2**63 - 1), "at least 0 and at most 9223372036854775807"),
        (Flag("", above=0, at_most=1e6), "above 0 and at most 1e6"),
        (Flag("", at_least=0.5), "at least 0.5"),
    ):
        assert each.range(0) == words
    each = Flag("", above=0, at_most=2)
    allowed = [value for value in (-1, 0, 1, 2, 3, float("nan")) if each.allows(value)]
    assert allowed == [1, 2]
    assert not Flag("", above=0).allows(float("inf"))
    assert Flag("", above=0).range(float("inf")) == "above 0 and below 1e12"
    assert not Flag("", above=0).allows(10**400)  # which is too large for a float


@pytest.mark.parametrize("value", ["9" * 400, "-" + "9" * 400, "9" * 400 + ".x"])
def test_a_number_of_400_digits_does_not_fill_the_screen(value, capsys):
    with pytest.raises(SystemExit):
        run_program(lambda: parse_flags("", Postponed, argv=[f"--n={value}"]))
    assert len(capsys.readouterr().err) < 100


def test_groups_of_help_have_an_order_of_their_own(capsys):
    with pytest.raises(SystemExit):
        parse_flags("", Postponed, argv=["--help"], groups=dict(kind="second", n="first"))
    out = capsys.readouterr().out
    order = [out.index(word) for word in ("second:", "--kind", "--name", "first:", "--n ")]
    assert order == sorted(order)


def test_losses_do_not_depend_on_the_fields_of_run_config():
    assert "log_dir" not in TrainConfig().settings_of_losses()
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    names -= {field.name for field in dataclasses.fields(RunConfig)}
    assert TrainConfig().settings_of_losses().keys() == names
    assert {"seed", "dtype", "max_lr", "val_tokens"} < names


def test_every_program_says_its_version(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_flags("", Postponed, argv=["--version"])
    assert stop.value.code == 0
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert capsys.readouterr().out == f"plainGPT {version}\n"
