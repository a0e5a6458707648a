"""What a program does not import, because it takes seconds and helps nobody."""

import subprocess
import sys

import pytest
from conftest import ROOT, TINY


def imported_by(source, **options):
    """Runs Python code in a new process -> the names of all modules that it has imported."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{source}\nprint(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, **options)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.slow
@pytest.mark.parametrize("program", ["experiment", "fineweb", "tokenizer"])
def test_programs_that_compute_nothing_import_no_torch(program):
    assert "torch" not in imported_by(f"import {program}")


@pytest.mark.slow
def test_a_run_needs_no_docstrings_and_no_asserts(tmp_path):
    flags = [*TINY, "--max_steps", "1", "--log_dir", "run"]
    command = [sys.executable, "-OO", ROOT / "train_gpt2.py", *flags]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [None, [*TINY, "--max_steps", "1"]], ids=["import", "run"])
def test_train_gpt2_loads_nothing_of_train_large(tmp_path, flags):
    source = "import train_gpt2" + (f"; train_gpt2.main({flags!r})" if flags else "")
    names = imported_by(source, cwd=tmp_path)
    assert "train_gpt2" in names and "plaingpt.process" in names
    large = ("train_large", "plaingpt.large", "torch.distributed.pipelining")
    assert not [name for name in names if name.startswith(large)]
