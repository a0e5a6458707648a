"""Hashes of Python code, which tell whether a program has changed."""

import ast
import hashlib
import os
import sys
from pathlib import Path


def hash_of_code(paths):
    """Returns a hash of the code in Python files. Comments, docstrings and blanks do not count."""
    tree = ast.parse(b"\n".join(path.read_bytes() for path in paths))
    for node in ast.walk(tree):
        # Functions, classes and blocks have a body. Leaves out texts in it, such as docstrings,
        # because they do nothing.
        if isinstance(getattr(node, "body", None), list):
            node.body = [each for each in node.body if not is_text(each)]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def is_text(node):
    """Returns whether a statement is only a constant, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def hash_of_program():
    """Returns a hash of the files of this clone that the program has imported. See hash_of_code."""
    clone = Path(__file__).parents[2]
    library = Path(os.__file__).parent
    files = set()
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None) or "/"
        if not name.startswith(str(clone)):
            continue  # most modules are of torch; to make a Path of each would take 0.05 s
        file = Path(name)
        # Python itself and its packages may be in the clone, too.
        is_foreign = library in file.parents or "site-packages" in file.parts
        if clone in file.parents and file.suffix == ".py" and not is_foreign:
            files.add(file)
    return hash_of_code(sorted(files))
