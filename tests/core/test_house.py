"""Checks the rules of layout and style in CONTRIBUTING.md that a program can check."""

import ast
import functools
import re
import sys
from pathlib import Path

from conftest import ROOT

# The components that have a folder in plaingpt/. The other files of plaingpt/ belong to the
# components core and data.
COMPONENTS = {"scoring", "large", "lab", "look"}
FOLDERS = ("*.py", "plaingpt/**/*.py", "experiments/*.py", "docs/*.py")
PRODUCT = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in ROOT.glob(folder))
DOCS = sorted(path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
PROGRAMS = {path.stem for path in PRODUCT if path.parent == Path(".")}


@functools.cache
def parsed(path):
    return ast.parse((ROOT / path).read_text("utf-8"))


def test_no_line_of_a_page_is_wider_than_100_columns():
    """Checks only the pages, because ruff checks the code.

    The test skips tables and addresses, which cannot be wrapped, and the Chinese pages.
    """
    for path in DOCS:
        if path.name.endswith(".zh.md"):
            continue
        for number, line in enumerate((ROOT / path).read_text("utf-8").splitlines(), start=1):
            if not (line.startswith("|") or "](" in line or "://" in line):
                assert len(line) <= 100, f"{path}:{number}"


def imports(path):
    """Returns the modules of this repository that a file imports: {"model", "plaingpt.flags"}.

    Imports inside functions count, too.
    """
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & {module_name(path) for path in PRODUCT}


def test_requirements_name_every_package_that_is_imported():
    """Imports inside functions count, too. `require` imports the optional packages instead."""
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


def components(names):
    """Returns the components to which modules belong: {"look"} for ["plaingpt.look.page"].

    A module such as "plaingpt.log", which is in no folder of plaingpt/, adds no component.
    """
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "plaingpt" and len(part) == 3}


def test_all_components_are_known():
    names = [module_name(path) for path in PRODUCT if path.parts[0] == "plaingpt"]
    assert components(names) == COMPONENTS


def test_the_package_imports_no_program_and_the_core_no_component():
    """No component imports another component. The only exception is look, which imports scoring."""
    for path in [p for p in PRODUCT if p.parts[0] == "plaingpt"]:
        found = imports(path)
        assert not found & PROGRAMS, path
        own = components([module_name(path)])
        allowed = own | {"scoring"} if own == {"look"} else own
        assert components(found) <= allowed, path


def test_a_training_run_imports_neither_large_nor_lab_nor_look():
    """Indirect imports and imports inside functions count, too."""
    paths = {module_name(path): path for path in PRODUCT}
    found = {"train_gpt2"}
    waiting = ["train_gpt2"]
    while waiting:
        new = imports(paths[waiting.pop()]) - found
        found |= new
        waiting += new
    assert "plaingpt.shards" in found
    assert components(found) == {"scoring"}


def test_no_import_cycles():
    waiting = {module_name(path): imports(path) for path in PRODUCT}
    while ready := [name for name, needed in waiting.items() if not needed & waiting.keys()]:
        for name in ready:
            del waiting[name]
    assert not waiting


def test_nothing_of_pytorch_is_replaced_or_intercepted():
    """Only look.py intercepts calls of PyTorch: it records calls of attention, but changes none."""
    for path in PRODUCT:
        of_torch = set()  # the names in this file that refer to torch, or to something in torch
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
    """Returns whether a statement at module level could do more than compute a constant."""
    if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
        return False
    # x = ... defines a name, but x[...] = ... and x.y = ... change an object.
    if isinstance(statement, ast.Assign):
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
    """Checks all functions at module level with more than eight lines, except main."""
    for path in PRODUCT:
        for node in parsed(path).body:
            long = isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 8
            if long and node.name != "main":
                assert ast.get_docstring(node), f"{path}:{node.lineno}: {node.name}"


def test_the_docstring_of_the_package_lists_each_file_once():
    """In the list, each line with a path begins with two spaces. No __init__.py is listed."""
    package = ROOT / "plaingpt"
    files = [path for path in package.rglob("[!._]*.*") if path.suffix != ".pyc"]
    docstring = ast.get_docstring(parsed("plaingpt/__init__.py"))
    listed = re.findall(r"^  (\S+)", docstring, re.M)
    assert sorted(listed) == sorted(path.relative_to(package).as_posix() for path in files)
