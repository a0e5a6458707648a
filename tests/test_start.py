"""What a program does not import, because it takes a second and helps nobody."""

import subprocess
import sys

import pytest
from conftest import ROOT


def imported_by(source):
    """Runs Python code in a new process -> the names of all modules that it has imported."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{source}\nprint(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.slow
@pytest.mark.parametrize("program", ["experiment", "fineweb", "tokenizer"])
def test_programs_that_compute_nothing_import_no_torch(program):
    assert "torch" not in imported_by(f"import {program}")
