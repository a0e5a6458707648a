"""The rules of layout and style that a machine can check. CONTRIBUTING.md lists them."""

import ast
from pathlib import Path

import pytest
from conftest import ROOT

PRODUCT = sorted(
    path.relative_to(ROOT) for folder in (ROOT, ROOT / "plaingpt") for path in folder.glob("*.py")
)
TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").glob("*.py"))
DOCS = sorted(path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
PROGRAMS = {path.stem for path in PRODUCT if path.parent == Path(".")} - {"model", "tokenizer"}
parsed = {path: ast.parse((ROOT / path).read_text("utf-8")) for path in (*PRODUCT, *TESTS)}


@pytest.mark.parametrize("path", [*PRODUCT, *TESTS, *DOCS], ids=str)
def test_no_line_is_wider_than_100_columns(path):
    """In docs, tables and addresses cannot be wrapped. Chinese has no spaces to wrap at."""
    if path.name.endswith(".zh.md"):
        return
    for number, line in enumerate((ROOT / path).read_text("utf-8").splitlines(), start=1):
        if path.suffix == ".py" or not (line.startswith("|") or "](" in line or "://" in line):
            assert len(line) <= 100, f"{path}:{number}"


@pytest.mark.parametrize("path", PRODUCT, ids=str)
def test_functions_are_short_and_have_few_parameters(path):
    for node in ast.walk(parsed[path]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            limit = 80 if node.name == "main" else 45
            assert length <= limit, f"{path}: {node.name}, {length} lines"
            args = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            names = [arg.arg for arg in args]
            is_method = names[:1] in (["self"], ["cls"], ["ctx"])
            assert len(names) - is_method <= 6, f"{path}: {node.name}({', '.join(names)})"


def imports(path):
    """Our modules that a file imports, also inside functions: "model", "plaingpt.cli"."""
    names = set()
    for node in ast.walk(parsed[path]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & {module_name(path) for path in PRODUCT}


def module_name(path):
    return ".".join(path.with_suffix("").parts)


@pytest.mark.parametrize("path", PRODUCT, ids=str)
def test_dependencies_point_one_way(path):
    """Programs -> plaingpt/* -> model.py -> plaingpt/loss.py, muon.py and sampling.py."""
    found = imports(path)
    if path.parent == Path("plaingpt"):
        assert not found & PROGRAMS, found
    if path == Path("model.py"):
        assert found <= {"plaingpt.loss", "plaingpt.muon", "plaingpt.sampling"}
    if path.name in ("loss.py", "muon.py", "sampling.py"):
        assert not found


def test_no_import_cycles():
    waiting = {module_name(path): imports(path) for path in PRODUCT}
    while ready := [name for name, needed in waiting.items() if not needed & waiting.keys()]:
        for name in ready:
            del waiting[name]
    assert not waiting


def runs_at_import(statement):
    """Whether a statement at module level could do more than compute a constant."""
    if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
        return False
    if isinstance(statement, ast.Assign):  # x = ... names something; x[...] = ... changes it
        return any(
            isinstance(target, (ast.Subscript, ast.Attribute)) for target in statement.targets
        )
    kinds = (ast.Expr, ast.For, ast.While, ast.With, ast.Try, ast.If)
    return isinstance(statement, kinds) and any(
        isinstance(node, (ast.Call, ast.Subscript)) for node in ast.walk(statement)
    )


@pytest.mark.parametrize("path", PRODUCT, ids=str)
def test_importing_a_file_does_nothing(path):
    """Except for plaingpt/__init__.py, which everything imports first: it sets OpenMP's environment
    before torch is imported, and puts this clone's model.py before that of a notebook."""
    found = [ast.unparse(statement) for statement in parsed[path].body if runs_at_import(statement)]
    if path == Path("plaingpt/__init__.py"):
        assert found.pop(0) == "os.environ.setdefault('GOMP_SPINCOUNT', '10000')"
        assert found.pop().startswith("sys.path.insert(0, ")
    assert not found


@pytest.mark.parametrize("path", PRODUCT, ids=str)
def test_public_functions_have_docstrings(path):
    """Functions at module level whose name does not say all: more than a few lines."""
    for node in parsed[path].body:
        long = isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 8
        if long and node.name != "main":
            assert ast.get_docstring(node), f"{path}:{node.lineno}: {node.name}"
