"""The command line: one-sentence errors, tracebacks, flags, --help, output, and file names."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plaingpt.errors import run_program
from plaingpt.flags import flag, parse_flags
from plaingpt.terminal import print0, show_progress

import pytest
from conftest import ROOT, TEXT, TINY, names, program, train

import fineweb
import plot
import tokenizer


@dataclass
class Config:
    n: int = flag(1, "a number", above=0, at_most=9)
    m: int = flag(1, "a number", above=0)
    p: float | None = flag(None, "a share of 100%", at_least=0)
    kind: Literal["adamw", "muon"] = flag("adamw", "a choice")
    other: Literal["a", "b"] | None = flag(None, "a choice or none")
    files: list[str] | None = flag(None, "files")
    shuffle: bool = flag(True, "a switch")
    compile: bool | None = flag(None, "a switch or none")
    name: str = flag("auto", "a text")
    start: str | None = flag(None, "a text that may be empty", empty=True, either=True)


def run_source(source, cwd, status):
    """Runs `source` as the body of a program's main(). Returns stderr."""
    lines = "\n    ".join(source.splitlines())
    (cwd / "prog.py").write_text(
        "from plaingpt.errors import UserError, explaining, require, run_program\n"
        "from plaingpt.files import replacing, write_json, writing\n"
        f"\n\ndef main():\n    {lines}\n\n\nrun_program(main)\n"
    )
    return program(cwd=cwd, program=cwd / "prog.py", status=status)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "source, last_line",
    [
        (
            'raise RuntimeError("ProcessGroupNCCL is mentioned here")',
            "RuntimeError: ProcessGroupNCCL is mentioned here",
        ),
        (
            'raise RuntimeError("Connection closed by peer, says gloo")',
            "RuntimeError: Connection closed by peer, says gloo",
        ),
        ("import jsn", "ModuleNotFoundError: No module named 'jsn'"),
        ("from json import dump_all", "ImportError: cannot import name 'dump_all' from 'json'"),
        ('open("missing.txt")', "FileNotFoundError: [Errno 2] No such file or directory"),
        ('with writing("x"):\n    raise RuntimeError("a bug")', "RuntimeError: a bug"),
    ],
    ids=["nccl", "gloo", "module", "name", "file", "writing"],
)
def test_a_bug_keeps_its_traceback(source, last_line, tmp_path):
    err = run_source(source, tmp_path, status=1)
    assert "\nTraceback (most" in f"\n{err}" and "prog.py" in err
    assert err.splitlines()[-1].startswith(last_line), err
    assert "pip install" not in err and "another process" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "source, status, line",
    [
        ('raise UserError("--n 0: must be above 0")', 2, "error: --n 0: must be above 0\n"),
        (
            'require("no_such_package.part")',
            2,
            "error: the package no_such_package is missing: pip install no_such_package\n",
        ),
        (
            'import os, sys\nos.mkdir("wandb_")\nsys.path.append(".")\nrequire("wandb_")',
            2,
            "error: the package wandb_ is missing: pip install wandb_\n",
        ),
        (
            'with writing("a/b"):\n    open("a/b", "w")',
            2,
            "error: a/b: cannot write (No such file "
            "or directory); choose another place, or free some space\n",
        ),
        ("print(1)\nraise BrokenPipeError", 141, ""),
        ("pass", 0, ""),
    ],
    ids=["user", "package", "folder", "writing", "pipe", "none"],
)
def test_other_exits(source, status, line, tmp_path):
    assert run_source(source, tmp_path, status) == line


def test_a_name_that_is_too_long_for_the_system(capsys):
    name = "x" * 300
    with pytest.raises(SystemExit) as stop:
        run_program(lambda: open(name))
    expected = f"error: [Errno {errno.ENAMETOOLONG}] File name too long: '{name}'; give a shorter"
    assert stop.value.code == 2 and capsys.readouterr().err == f"{expected} name\n"


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("", {}),
        ("--n 9 --p 0.5", dict(n=9, p=0.5)),
        ("--kind muon --other b", dict(kind="muon", other="b")),
        ("--files a b", dict(files=["a", "b"])),
        ("--no-shuffle --compile", dict(shuffle=False, compile=True)),
        ("--start=", dict(start="")),
        ("--shuffle --no-compile --name x", dict(shuffle=True, compile=False, name="x")),
    ],
)
def test_flags(flags, expected):
    """parse_flags returns only flags that the user has given, so a preset can set the others."""
    assert parse_flags("", Config, argv=flags.split()) == expected


def test_arguments_without_a_flag():
    argv = ["a.txt", "--n", "2", "b.txt"]
    assert parse_flags("", Config, argv=argv[1:], rest="runs") == dict(n=2, runs=["b.txt"])
    assert parse_flags("", Config, argv=[], rest="runs") == dict(runs=[])


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--n 0", "argument --n: must be above 0, not 0"),
        ("--n 10", "argument --n: must be at most 9, not 10"),
        ("--p -1", "argument --p: must be at least 0, not -1"),
        ("--p nan", "argument --p: must be at least 0, not nan"),
        ("--p inf", "argument --p: must be below 1000000000000, not inf"),
        ("--m 1" + 400 * "0", "argument --m: must be below 1000000000000, not 1" + 400 * "0"),
        ("--kind sgd", "argument --kind: invalid choice: 'sgd' (choose from adamw, muon)"),
        ("--other c", "argument --other: invalid choice: 'c' (choose from a, b)"),
        ("--n many", "argument --n: invalid int value: 'many'"),
        ("--name -a", "argument --name: expected one argument"),
        ("--name=", "argument --name: is empty; give a value, or remove this flag"),
        ("--start a --name b", "argument --name: not allowed with argument --start"),
        ("--shuf", "unrecognized arguments: --shuf"),
        ("--zzz=1 extra", "unrecognized arguments: --zzz=1 extra"),
        ("--no-compile=1", "argument --compile/--no-compile: ignored explicit argument '1'"),
    ],
)
def test_wrong_flags(flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_flags("", Config, argv=flags.split())
    # Some versions of Python print the choices in quotation marks.
    err = capsys.readouterr().err.replace("'adamw', 'muon'", "adamw, muon")
    err = err.replace("from 'a', 'b'", "from a, b")
    assert stop.value.code == 2 and err.endswith(f": error: {message}\n"), err


def test_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        parse_flags("What it does.", Config, argv=["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "What it does." in out
    for line in (
        "--n INT a number [1] --m INT a number [1]",
        "--p FLOAT a share of 100%",
        "--kind NAME a choice [adamw]; one of adamw, muon",
        "--other NAME a choice or none; one of a, b",
        "--files STR [STR ...] files --shuffle, --no-shuffle a switch [True] --compile, "
        "--no-compile a switch or none",
        "--name STR a text [auto] --start STR a text that may be empty",
    ):
        assert line in " ".join(out.split()), out


PROGRAMS = sorted(path.name for path in ROOT.glob("*.py") if "__main__" in path.read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_help_fits_80_columns(name, tmp_path):
    out, err = program("--help", cwd=tmp_path, program=name, env=dict(COLUMNS="80"))
    assert not err and out.startswith("usage: ") and "  --" in out
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert not list(tmp_path.iterdir())  # --help writes no file


# Output and names


@pytest.mark.slow
@pytest.mark.parametrize("redirection", [">/dev/full 2>/dev/full", "| head -1"])
def test_a_closed_output_does_not_end_a_run(tmp_path, python, redirection):
    if redirection != "| head -1":
        python = sys.executable  # only a new process also flushes its output when it exits
    command = f"{python} {ROOT}/train_gpt2.py {' '.join(TINY)} --log_dir run {redirection}"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, capture_output=True)
    assert names(tmp_path / "run", "model_*") == ["model_000010.pt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "generate.py --max_new_tokens 5",
        "wikitext.py --data text.txt --json scores.json",
        "bench.py --preset baby --batch_size 1 --steps 1 --device cpu",
        "fineweb.py --input text.txt --tokenizer bytes --output_dir shards",
    ],
)
def test_a_full_disk_under_the_output_is_an_error(command, whole, tmp_path, python):
    """The results of these programs are the printed lines, so a full disk must be an error.

    The file of --json must still be complete.
    """
    (tmp_path / "text.txt").write_text(TEXT)
    name, *flags = command.split()
    if name in ("generate.py", "wikitext.py"):
        flags += ["--checkpoint", str(whole)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [python, ROOT / name, *flags], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 2
    assert done.stderr.decode().endswith("No space left on device; free some space\n")
    assert name != "wikitext.py" or json.loads((tmp_path / "scores.json").read_text())["figures"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [">", ">>"])
def test_the_output_of_a_run_must_not_be_its_log(how, tmp_path, python):
    command = f"{python} {ROOT}/train_gpt2.py {' '.join(TINY)} --log_dir run"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, capture_output=True)
    before = (tmp_path / "run/log.txt").read_text()
    command += f" --resume --max_steps 20 {how} run/log.txt"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "error: standard output is run/log.txt" in done.stderr
    assert (tmp_path / "run/log.txt").read_text() == (before if how == ">>" else "")


@pytest.mark.slow
def test_text_for_a_terminal_of_ascii(whole, tmp_path):
    out, _ = program(
        "--checkpoint",
        whole,
        "--prompt",
        "caf\xe9",
        cwd=tmp_path,
        program="generate.py",
        env=dict(PYTHONIOENCODING="ascii"),
    )
    assert "caf\\xe9" in out


@pytest.mark.slow
def test_names_that_are_not_utf8(tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_text(TEXT)
    _, err = train("--data", name, "--log_dir", os.fsdecode(b"r\xe9n"), cwd=tmp_path)
    assert err == ""
    program(
        "--input",
        name,
        "--output_dir",
        os.fsdecode(b"sh\xe9"),
        cwd=tmp_path,
        program="fineweb.py",
        fresh=True,
    )


def test_progress_bar_on_a_terminal(monkeypatch, capsys):
    """After the progress bar, the line contains only those parts that fit into the terminal."""
    monkeypatch.setenv("COLUMNS", "60")
    show_progress(5, 10, "loss 1.2345 | 1m05s to go")
    assert capsys.readouterr().out == ""  # stdout is not a terminal, so no progress bar is shown
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show_progress(5, 10, "loss 1.2345 | 1m05s to go | " + "x" * 99)
    print0("a\tl\x1b[2Jine\x9b")
    bar, line = capsys.readouterr().out.removeprefix("\r\x1b[K").split("\r\x1b[K")
    assert bar == "5/10 [##########          ] loss 1.2345 | 1m05s to go"
    assert line == "a\tl\\x1b[2Jine\\x9b\n"


def test_names_cannot_change_a_terminal(tmp_path, monkeypatch, capsys):
    """Control characters are escaped separately for stdout and stderr.

    Only one of the two streams may be a terminal.
    """
    monkeypatch.chdir(tmp_path)
    Path("\x1b[2J.jsonl").write_text('{"text": "a"}\n{"\\u001b[2J": 1}\n')
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    fineweb.main(["--input", "\x1b[2J.jsonl", "--output_dir", "out"])
    with pytest.raises(SystemExit):
        run_program(lambda: plot.main(["\x1b[2J"]))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    tokenizer.main(["--input", "\x1b[2J.jsonl", "--vocab_size", "257"])
    found = capsys.readouterr()
    assert found.err.count("\\x1b[2J") == 3 and found.out.count("\\x1b[2J") == 2, found
    assert "\x1b[2J" not in found.err + found.out
