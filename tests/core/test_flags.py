"""Flags: postponed annotations, repeated lists, line breaks, and ~ in paths."""

from __future__ import annotations

import dataclasses
import re
import shutil
from dataclasses import dataclass
from typing import Literal

from plaingpt.flags import flag, parse_flags
from plaingpt.settings import CHANGE_NO_LOSS

import pytest
from conftest import ROOT, program

from generate import GenerateConfig
from model import GPTConfig
from train_gpt2 import TrainConfig
from train_large import LargeConfig


@dataclass
class Postponed:
    n: int = flag(1, "a number", above=0)
    rates: list[float] | None = flag(None, "numbers", at_least=0)
    kind: Literal["adamw", "muon"] = flag("adamw", "a choice")
    # This field has the name of a type, as the field `list` of experiment.py does.
    list: bool = flag(False, "a switch", either=True)
    name: str | None = flag(None, "a text", empty=True)
    stop: str | None = flag(None, "a text", line_breaks=True)


def test_postponed_annotations(capsys):
    assert isinstance(dataclasses.fields(Postponed)[0].type, str)
    argv = "--n 2 --rates 0 1 --list --name=".split()
    found = parse_flags("", Postponed, argv=argv)
    assert found == dict(n=2, rates=[0.0, 1.0], list=True, name="")
    for flags, message in (
        ("--n 0", "--n: must be above 0, not 0"),
        ("--rates 1 -1", "--rates: must be at least 0, not -1"),
        ("--kind sgd", "--kind: invalid choice: 'sgd'"),
        ("--kind muon --list", "--list/--no-list: not allowed with argument --kind"),
    ):
        with pytest.raises(SystemExit):
            parse_flags("", Postponed, argv=flags.split())
        assert f": error: argument {message}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_flags("", Postponed, argv=["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "--rates FLOAT [FLOAT ...] numbers --kind NAME a choice [adamw]; one of adamw" in out


@dataclass
class Plain:
    rope_base: float = 10000.0
    name: str | None = None


def test_a_field_without_a_help_text(capsys):
    assert parse_flags("", Plain, argv=["--rope_base", "5e5"]) == dict(rope_base=5e5)
    with pytest.raises(SystemExit):
        parse_flags("", Plain, argv=["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "--rope_base FLOAT [10000.0] --name STR" in out


def test_a_backslash_and_an_n_are_a_line_break():
    found = parse_flags("", Postponed, argv=["--stop", r"\n\nA:", "--name", r"\n"])
    assert found == dict(stop="\n\nA:", name=r"\n")
    found = parse_flags("", GenerateConfig, argv=["--prompt", r"a\nabla", r"--stop=\n"])
    assert found == dict(prompt=r"a\nabla", stop="\n")


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


def test_values_of_a_repeated_list_add_up():
    argv = ["--rates", "1", "2", "--n", "3", "--rates", "4", "--n", "5"]
    assert parse_flags("", Postponed, argv=argv) == dict(rates=[1.0, 2.0, 4.0], n=5)
    found = parse_flags("", GPTConfig, TrainConfig, argv="--data a --evals x,y --data b=2".split())
    assert found == dict(data=["a", "b=2"], evals=["x,y"])


def test_a_tilde_at_the_start_of_a_path_is_the_home_directory(monkeypatch):
    """parse_flags must expand the tilde, because a shell does not expand it in --data=~/a.

    In NAME=~/a,NAME=~/b, bash expands only the first tilde.
    """
    monkeypatch.setenv("HOME", "/home/ann")
    for text, expected in (
        ("~/a.txt", "/home/ann/a.txt"),
        ("~/a=0.7", "/home/ann/a=0.7"),
        (
            "hellaswag=~/h.jsonl,lambada=~/l.jsonl",
            "hellaswag=/home/ann/h.jsonl,lambada=/home/ann/l.jsonl",
        ),
        ("~", "/home/ann"),
        ("a~/b", "a~/b"),
        ("notes~", "notes~"),
        ("~no-such-user/a", "~no-such-user/a"),
    ):
        assert parse_flags("", Postponed, argv=[f"--name={text}"]) == dict(name=expected)
        assert parse_flags("", Postponed, argv=[text], rest="RUN") == dict(RUN=[expected])
    found = parse_flags("", GenerateConfig, argv=["--prompt", "~/ is", "--stop", "~/"])
    assert found == dict(prompt="~/ is", stop="~/")


def test_settings_that_change_no_loss_are_flags():
    names = {field.name for field in dataclasses.fields(LargeConfig)}
    assert CHANGE_NO_LOSS < names
    assert {"seed", "dtype", "max_lr", "val_tokens"} < names - CHANGE_NO_LOSS


def test_every_program_says_its_version(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_flags("", Postponed, argv=["--version"])
    assert stop.value.code == 0
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert capsys.readouterr().out == f"plainGPT {version}\n"
