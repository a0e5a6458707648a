"""The rules of layout and style that a machine can check, for every file of the product."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT

FILES = sorted(path.relative_to(ROOT) for folder in (ROOT, ROOT / "plaingpt")
               for path in folder.glob("*.py"))
DOCS = sorted(path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
PROGRAMS = {path.stem for path in FILES if path.parent == Path(".")} - {"model", "tokenizer"}
LIBRARY = {path.stem for path in FILES if path.parent == Path("plaingpt")}
LEARNERS_PATH = {"model.py", "train_gpt2.py"}
WORDS = (
    r"mend(s|ed|ing)?\b", r"foretell|foretold", r"turn and turn about", r"not to be had",
    r"takes? leave", r"from 0 up", r"nobody", r"somebody", r"cannot be:", r"is none of",
    r"so long as", r"borrow(s|ed|ing)?\b", r"who has none", r"tells? .* from others",
)

parsed = {path: ast.parse((ROOT / path).read_text("utf-8")) for path in FILES}


def count_lines(paths):
    return sum((ROOT / path).read_bytes().count(b"\n") for path in paths)


def imports(nodes):
    """Names of our modules that import statements name: "model", "plaingpt.cli"."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    ours = PROGRAMS | {"model", "tokenizer"} | {f"plaingpt.{name}" for name in LIBRARY}
    return names & ours


def module_name(path):
    return ".".join(path.with_suffix("").parts)


@pytest.mark.parametrize("path", [*FILES, *DOCS], ids=str)
def test_no_line_is_wider_than_100_columns(path):
    """In docs, tables and addresses cannot be wrapped. Chinese has no spaces to wrap at."""
    if path.name.endswith(".zh.md"):
        return
    for number, line in enumerate((ROOT / path).read_text("utf-8").splitlines(), start=1):
        if path.suffix == ".py" or not (line.startswith("|") or "](" in line or "://" in line):
            assert len(line) <= 100, f"{path}:{number}"


def test_number_of_lines():
    assert count_lines(LEARNERS_PATH) < 670
    assert count_lines(FILES) < 5680  # lower it whenever lines are deleted


@pytest.mark.parametrize("path", FILES, ids=str)
def test_length_of_functions(path):
    for node in ast.walk(parsed[path]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            limit = 80 if node.name == "main" else 45
            assert length <= limit, f"{path}: {node.name}, {length} lines"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_dependencies_point_one_way(path):
    """Programs -> plaingpt/* -> model.py -> plaingpt/loss.py, plaingpt/sampling.py. Counts imports in functions, too."""
    found = imports(ast.walk(parsed[path]))
    if path.parent == Path("plaingpt"):
        assert not found & PROGRAMS, found
    if path == Path("model.py"):
        # from_pretrained and to_hf call plaingpt/huggingface.py and import it when they are called.
        assert imports(parsed[path].body) <= {"plaingpt.loss", "plaingpt.sampling"}
        assert found <= {"plaingpt.loss", "plaingpt.sampling", "plaingpt.huggingface"}
    if path == Path("tokenizer.py"):
        assert found <= {"plaingpt.cli", "plaingpt.corpus", "plaingpt.tokenizer_json", "plaingpt"}
    if path in (Path("plaingpt/loss.py"), Path("plaingpt/sampling.py")):
        assert not found


def test_no_import_cycles():
    waiting = {module_name(path): imports(tree.body) for path, tree in parsed.items()}
    while ready := [name for name, needed in waiting.items() if not needed & waiting.keys()]:
        for name in ready:
            del waiting[name]
    assert not waiting


def runs_at_import(statement):
    """Calls in a statement at module level that could do more than compute a constant."""
    if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
        return []
    if isinstance(statement, (ast.Expr, ast.For, ast.While, ast.With, ast.Try, ast.If)):
        return [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return []


@pytest.mark.parametrize("path", FILES, ids=str)
def test_importing_a_file_does_nothing(path):
    for statement in parsed[path].body:
        assert not runs_at_import(statement), f"{path}:{statement.lineno}"


@pytest.mark.parametrize("path", [*FILES, *DOCS], ids=str)
def test_plain_words(path):
    for number, line in enumerate((ROOT / path).read_text("utf-8").splitlines(), start=1):
        for word in WORDS:
            assert not re.search(rf"\b{word}", line, re.I), f"{path}:{number}: {word}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_public_functions_have_docstrings(path):
    """Functions at module level whose name does not say all: more than a few lines."""
    for node in parsed[path].body:
        long = isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 8
        if long and node.name not in ("main", "run"):
            assert ast.get_docstring(node), f"{path}:{node.lineno}: {node.name}"
