"""Runs the code blocks of README.md and docs/ that contain shell commands or Python.

A code block has a mark if it needs a GPU, the hub, an installation, slurm or several minutes. The
tests do not run such a code block, but check its commands.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
import unicodedata
from pathlib import Path

from plaingpt.flags import parse_flags

import pytest
from conftest import ROOT, program

BLOCK = re.compile(r"^```(\w+) ?(\w*)\n(.*?)^```$", re.M | re.S)
ENGLISH = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(
        f"docs/{name}.md"
        for name in (
            "lesson",
            "first-run",
            "hardware",
            "troubleshooting",
            "experiments",
            "look",
            "data",
            "benchmarks",
            "parallel",
            "resume",
            "measurements",
        )
    ),
)
CHINESE = {"README.md": "README.zh.md", "docs/lesson.md": "docs/lesson.zh.md"}
PAGES = (*ENGLISH, *CHINESE.values())
INSTALL = [
    "pip install -r requirements.txt && python train_gpt2.py\n",  # .ci/run runs both commands
    "pip install -r requirements-dev.txt && pytest\n",
]
PROGRAMS = {path.stem for path in ROOT.glob("*.py")} - {"model"}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name, language, mark=""):
    return [code for *kind, code in BLOCK.findall(read(name)) if kind == [language, mark]]


def prose(name):
    """Returns a page without its code blocks."""
    return BLOCK.sub("", read(name))


def anchors(name):
    """Returns the anchors that GitHub generates from the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(name), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(name):
    """Yields (program, flags) for each command on a page that starts one of our programs."""
    code = "\n".join(code for kind, _, code in BLOCK.findall(read(name)) if kind == "sh")
    # Sets the variables of shell loops to 1.
    code = code.replace("\\\n", " ").replace("$seed", "1").replace("$lr", "1")
    for text in re.findall(r"`((?:python|torchrun) [^`]+)`", prose(name)):
        code += text.replace("\n", " ") + "\n"
    for line in re.split(r"\n| && | & |; ", code):
        found = re.search(r"\b(\w+)\.py(.*)", line)
        if "lesson/" in line or "docs/" in line:  # these programs do not use parse_flags
            continue
        if found and re.match(r"\s*(srun|python|torchrun)\b", line):
            yield found[1], shlex.split(found[2], comments=True)


def test_all_pages_are_known():
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    assert {path.relative_to(ROOT).as_posix() for path in found} == set(PAGES)


def columns(line):
    """Returns the width of a line on a terminal, where a Chinese character takes two columns."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)


@pytest.mark.parametrize("name", PAGES)
def test_format_of_a_page(name):
    """A line outside tables has at most 100 columns. Code blocks have known languages and marks."""
    lines = read(name).splitlines()
    assert [line for line in lines if columns(line) > 100 and not line.startswith("|")] == []
    assert read(name).count("```") == 2 * len(BLOCK.findall(read(name)))
    assert not re.search(r"^ {4}(python|torchrun|pip) ", prose(name), re.M)
    known = {
        "python",
        "text",
        "diff",
        "sh",
        "sh gpu",
        "sh hub",
        "sh install",
        "sh long",
        "sh slurm",
    }
    assert {f"{kind} {mark}".strip() for kind, mark, _ in BLOCK.findall(read(name))} <= known


@pytest.mark.parametrize("name", PAGES)
def test_every_link_picture_and_file_exists(name):
    for page, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", read(name)):
        target = (ROOT / name).parent / page if page else ROOT / name
        assert target.is_file(), page
        assert not anchor or anchor in anchors(os.path.relpath(target, ROOT)), anchor
    for path in re.findall(r"`((?:\w+/)*\w+\.py)`", prose(name)):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("name", CHINESE)
def test_both_languages_agree(name):
    """The English and the Chinese page contain the same code, commands, flags and pictures.

    The headings of both pages have the same levels, and the tables contain the same numbers. Each
    page links to the other page.
    """

    def code(page):
        return [
            (kind, mark, re.sub(r"\s*#.*", "", text))  # ignores comments, which are translated
            for kind, mark, text in BLOCK.findall(read(page))
        ]

    other = CHINESE[name]
    assert code(name) == code(other)
    for pattern in (r"^#+ ", r"!\[.*?\]\((.*?)\)", r"`(?:python|torchrun) [^`]+`", r"arXiv:[\d.]+"):
        here, there = (re.findall(pattern, read(page), re.M) for page in (name, other))
        assert here == there, pattern
    here, there = (re.findall(r"^\|.*", read(page), re.M) for page in (name, other))
    figures = re.compile(r"\||\d[\d.,]*")  # the cells and the numbers of a row of a table
    assert [*map(figures.findall, here)] == [*map(figures.findall, there)]
    here, there = (set(re.findall(r"--\w+", read(page))) for page in (name, other))
    assert here == there
    for page, link in ((name, other), (other, name)):
        assert f"]({Path(link).name})" in read(page).partition("\n## ")[0], page


def test_every_flag_of_every_command_is_known(monkeypatch, tmp_path, capsys):
    """Checks the flags of all commands on the pages, even of commands that no test can run."""
    monkeypatch.chdir(tmp_path)
    real = parse_flags

    def parse_only(*args, **kwargs):
        real(*args, **kwargs)
        sys.exit("flags are right")

    found = []
    for name in ENGLISH:
        for command in commands(name):
            # rhymes.py exists only on docs/benchmarks.md, and write_torch_text.py has no flags.
            if command[0] not in ("rhymes", "write_torch_text"):
                found.append((name, *command))
    for name in PROGRAMS:
        runpy.run_path(str(ROOT / f"{name}.py"))  # imports the modules that are patched next
    for module in list(sys.modules.values()):
        if getattr(module, "parse_flags", None) is real:
            monkeypatch.setattr(module, "parse_flags", parse_only)
    for _, name, flags in found:
        monkeypatch.setattr(sys, "argv", [name, *flags])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
        if "--help" not in flags:
            assert stop.value.code == "flags are right", (name, flags, capsys.readouterr().err)
    assert {name for _, name, _ in found} == PROGRAMS


def test_install_commands_and_the_slurm_script():
    assert blocks("README.md", "sh", "install") == INSTALL
    for command in INSTALL:
        assert (ROOT / command.split()[3]).is_file()
    for script in blocks("docs/resume.md", "sh", "slurm"):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.slow
def test_run_the_code_of_all_pages(tmp_path):
    """Runs the sh blocks of each page, then its Python blocks as one script.

    The code runs in a copy of the repository. To save time, the training runs take two short steps,
    validate on few tokens and write short samples. The first run trains log/baby, which the pages
    use. .ci/run runs all 2,700 steps of this run.
    """
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in files.rstrip("\0").split("\0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }

    def run(code):
        """Runs python and torchrun commands with `program`, and other commands with bash."""
        output, code = "", re.sub(r"--max_steps \d+", "--max_steps 2", code.replace("\\\n", ""))
        small = "--total_batch_size 256 --batch_size 2 --val_tokens 1024 --sample_tokens 20"
        code = re.sub(r"train_(gpt2|large)\.py", rf"\g<0> {small}", code)
        for command in re.split(r"^((?:python|torchrun) .*)\n", code, flags=re.M):
            if command.startswith(("python ", "torchrun ")):
                first, path, *flags = shlex.split(command.removeprefix("torchrun "), comments=True)
                processes = 1 if first == "python" else int(first[-1])  # --nproc_per_node=2
                output += program(
                    *flags, cwd=tmp_path, program=tmp_path / path, processes=processes
                )[0]
            else:
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", command],
                    cwd=tmp_path,
                    env=env,
                    capture_output=True,
                    text=True,
                    timeout=600,
                )
                assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
                output += done.stdout
        return output

    out = run(INSTALL[0].partition(" && ")[2].strip() + " --max_steps 2\n")
    printed, runs = {}, 1
    for name in ENGLISH:
        for code in blocks(name, "sh"):
            runs += len(re.findall(r"train_(?:gpt2|large)\.py", code))
            out += run(code)
        if code := "\n".join(blocks(name, "python")):
            (tmp_path / "page.py").write_text(code)
            printed[name] = run("python page.py\n")
    assert "step     1/2" in out and out.count("done: python generate.py") == runs, out
    assert (tmp_path / "baby.png").is_file()
    assert printed.pop("docs/benchmarks.md").endswith("True 1 10 128\n")
    assert printed == {"docs/lesson.md": ""}
    assert (tmp_path / "my-gpt2" / "config.json").is_file()
