"""The rules of layout and style that a machine can check. CONTRIBUTING.md lists them."""

import ast
import functools
import re
import sys
from pathlib import Path

from conftest import ROOT

# The folders of plaingpt/. The files beside them are the core.
ROOMS = {"scoring", "large", "lab", "look"}
FOLDERS = ("*.py", "plaingpt/**/*.py", "experiments/*.py", "docs/*.py")
PRODUCT = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in ROOT.glob(folder))
DOCS = sorted(path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
PROGRAMS = {path.stem for path in PRODUCT if path.parent == Path(".")}


@functools.cache
def parsed(path):
    return ast.parse((ROOT / path).read_text("utf-8"))


def test_no_line_of_a_page_is_wider_than_100_columns():
    """ruff checks the programs. Tables and addresses cannot be wrapped, and Chinese is wider."""
    for path in DOCS:
        if path.name.endswith(".zh.md"):
            continue
        for number, line in enumerate((ROOT / path).read_text("utf-8").splitlines(), start=1):
            if not (line.startswith("|") or "](" in line or "://" in line):
                assert len(line) <= 100, f"{path}:{number}"


def imports(path):
    """Our modules that a file imports, also inside functions: "model", "plaingpt.flags"."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & {module_name(path) for path in PRODUCT}


def test_requirements_name_every_package_that_is_imported():
    """Also inside functions. A package that a program can do without is imported by `require`."""
    lines = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    declared = {re.split(r"\W", line)[0] for line in lines}
    ours = {path.parts[0].removesuffix(".py") for path in PRODUCT}
    imported = set()
    for path in PRODUCT:
        if path.parts[0] == "docs":  # these programs need requirements-dev.txt
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    others = imported - ours - set(sys.stdlib_module_names)
    assert others <= declared | {"pyarrow", "yaml"}  # these two come with datasets


def module_name(path):
    return ".".join(path.with_suffix("").parts)


def rooms(names):
    """The rooms of some modules: "look" for "plaingpt.look.page", none for "plaingpt.log"."""
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "plaingpt" and len(part) == 3}


def test_all_rooms_are_known():
    names = [module_name(path) for path in PRODUCT if path.parts[0] == "plaingpt"]
    assert rooms(names) == ROOMS


def test_the_package_imports_no_program_and_the_core_no_room():
    """look reads a text with the rows of scoring. No other room imports a room."""
    for path in [p for p in PRODUCT if p.parts[0] == "plaingpt"]:
        found = imports(path)
        assert not found & PROGRAMS, path
        own = rooms([module_name(path)])
        allowed = own | {"scoring"} if own == {"look"} else own
        assert rooms(found) <= allowed, path


def test_a_training_run_imports_neither_large_nor_lab_nor_look():
    """Also inside functions, and not through another file."""
    paths = {module_name(path): path for path in PRODUCT}
    found = {"train_gpt2"}
    waiting = ["train_gpt2"]
    while waiting:
        new = imports(paths[waiting.pop()]) - found
        found |= new
        waiting += new
    assert "plaingpt.shards" in found
    assert rooms(found) == {"scoring"}


def test_no_import_cycles():
    waiting = {module_name(path): imports(path) for path in PRODUCT}
    while ready := [name for name, needed in waiting.items() if not needed & waiting.keys()]:
        for name in ready:
            del waiting[name]
    assert not waiting


def test_nothing_of_pytorch_is_replaced_or_intercepted():
    """look.py watches the calls of attention, and changes none."""
    for path in PRODUCT:
        of_torch = set()  # what this file calls torch, and what it imports from there
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                names = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "torch":
                names = node.names
            else:
                continue
            of_torch |= {alias.asname or alias.name.split(".")[0] for alias in names}
        intercepts = set()
        for node in ast.walk(parsed(path)):
            root = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                is_setting = ast.unparse(node).startswith("torch.utils.deterministic.")
                assert is_setting or getattr(root, "id", None) not in of_torch, (
                    f"{path}:{node.lineno}"
                )
            if isinstance(node, ast.ClassDef):
                intercepts |= {ast.unparse(base) for base in node.bases} & {"TorchFunctionMode"}
        assert not intercepts or path.name == "record.py"


def runs_at_import(statement):
    """Whether a statement at module level could do more than compute a constant."""
    if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
        return False
    if isinstance(statement, ast.Assign):  # x = ... names something; x[...] = ... changes it
        return any(
            isinstance(target, (ast.Subscript, ast.Attribute)) for target in statement.targets
        )
    if isinstance(statement, (ast.Assert, ast.Raise)):
        return True
    kinds = (ast.Expr, ast.For, ast.While, ast.With, ast.Try, ast.If)
    return isinstance(statement, kinds) and any(
        isinstance(node, (ast.Call, ast.Subscript)) for node in ast.walk(statement)
    )


def test_importing_a_file_does_nothing():
    for path in PRODUCT:
        assert not [ast.unparse(each) for each in parsed(path).body if runs_at_import(each)], path


def test_public_functions_have_docstrings():
    """Functions at module level whose name does not say all: more than a few lines."""
    for path in PRODUCT:
        for node in parsed(path).body:
            long = isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 8
            if long and node.name != "main":
                assert ast.get_docstring(node), f"{path}:{node.lineno}: {node.name}"
