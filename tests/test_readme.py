"""What the README shows can be done: every block of code is run, in its order, but for those that need a GPU or the network."""

import contextlib
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md")}
BLOCK = re.compile(r"^```(\w+) ?(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(page, language, mark=""):
    return [code for kind, of, code in BLOCK.findall(page) if (kind, of) == (language, mark)]


def without_comments(code):
    return re.sub(r"\s*#.*", "", code)


def test_every_block_says_what_becomes_of_it():
    kinds = {(kind, mark) for kind, mark, _ in BLOCK.findall(PAGES["README.md"])}
    assert kinds == {("sh", mark) for mark in ("", "gpu", "hub", "install", "slurm")} | {("python", ""), ("text", "")}
    for page in PAGES.values():
        assert page.count("```") == 2 * len(BLOCK.findall(page)) and not re.search(r"^ {4}(python|torchrun|pip) ", page, re.M)


def test_both_languages_have_the_same_code_tables_and_pictures():
    one, other = ([(kind, mark, without_comments(code)) for kind, mark, code in BLOCK.findall(page) if kind != "text"]
                  for page in PAGES.values())
    assert one == other
    for pattern in (r"^\|[-|]+\|$", r"!\[.*?\]\((.*?)\)", r"^#+ ", r"`python [^`]+`", r"--\w+", r"arXiv:[\d.]+"):
        one, other = (re.findall(pattern, page, re.M) for page in PAGES.values())
        assert sorted(set(one)) == sorted(set(other)) and (len(one) == len(other) or pattern == r"--\w+"), pattern


def test_every_picture_and_page_is_there():
    for page in PAGES.values():
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page):
            assert (ROOT / target).is_file(), target


def commands(page):
    """Every command of one of our programs, in blocks of any kind and in the text: (program, flags)."""
    code = "\n".join(code for kind, _, code in BLOCK.findall(page) if kind == "sh").replace("\\\n", " ")
    for line in [*code.splitlines(), *re.findall(r"`((?:python|torchrun) [^`]+)`", page)]:
        if (found := re.search(r"\b(\w+)\.py(.*)", line)) and re.match(r"\s*(srun|python|torchrun)\b", line):
            yield found[1], shlex.split(found[2], comments=True)


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_of_every_command_is_known(page, monkeypatch, tmp_path):
    """Also of those that a test cannot run."""
    monkeypatch.chdir(tmp_path)
    seen = set()
    for name, flags in commands(PAGES[page]):
        module = importlib.import_module(name)
        where = module.evaluation if hasattr(module, "evaluation") else module
        real = where.parse_flags

        def parse_only(*args, **kwargs):
            real(*args, **kwargs)  # noqa: B023
            raise StopIteration

        monkeypatch.setattr(where, "parse_flags", parse_only)
        with contextlib.suppress(StopIteration, SystemExit):  # --help ends it
            module.evaluation.main(module, flags) if where is not module else module.main(flags)
            pytest.fail("read no flags")
        monkeypatch.setattr(where, "parse_flags", real)
        seen.add(name)
    assert seen == {"train_gpt2", "fineweb", "hellaswag", "lambada", "storycloze", "wikitext", "generate", "bench", "plot"}


def test_what_is_installed_and_what_slurm_is_given():
    lines = "".join(blocks(PAGES["README.md"], "sh", "install")).splitlines()
    assert lines == ["pip install -r requirements.txt", "pip install -r requirements-dev.txt", "pytest"]  # .ci/run does it
    assert all((ROOT / line.split()[-1]).is_file() for line in lines[:2])
    (script,) = blocks(PAGES["README.md"], "sh", "slurm")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.slow
def test_the_readme_from_top_to_bottom(tmp_path):
    """In a copy of the repository: the commands in their order, then all of the Python as one session."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.rstrip("\0").split("\0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "",
           "HF_HUB_OFFLINE": "1"}

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    out = "".join(run("bash", "-euo", "pipefail", "-c", code) for code in blocks(PAGES["README.md"], "sh"))
    assert "step  2699/2700" in out and out.count("done: steps skipped: 0") == 8, out
    assert {"baby.png", "compare.png"} <= {path.name for path in tmp_path.iterdir()}
    out = run(sys.executable, "-c", "\n".join(blocks(PAGES["README.md"], "python")))
    assert out == "10.82\n" and (tmp_path / "my-gpt2" / "config.json").is_file()
