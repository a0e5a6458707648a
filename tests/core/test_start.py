"""Checks that programs import only what they need, and that a run needs no docstrings."""

import subprocess
import sys

import pytest
from conftest import ROOT, TINY, program


def imported_by(source, **options):
    """Runs Python code in a new process. Returns the names of all modules that it has imported."""
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
    """The test compiles our files without docstrings and asserts, as python -OO does.

    The option -OO itself would also compile all of PyTorch again.
    """
    (tmp_path / "run.py").write_text(
        "import sys\nfrom importlib.machinery import SourceFileLoader\n"
        f"sys.path.insert(0, {str(ROOT)!r})\nsys.pycache_prefix = 'compiled'\n"
        "def source_to_code(self, data, path, **_):\n"
        "    return compile(data, path, 'exec', dont_inherit=True, optimize=2)\n"
        "SourceFileLoader.source_to_code = source_to_code\n"
        "import train_gpt2\nprint(train_gpt2.__doc__)\ntrain_gpt2.main()\n"
    )
    flags = [*TINY, "--max_steps", "1", "--log_dir", "run"]
    out, _ = program(*flags, cwd=tmp_path, program=tmp_path / "run.py")
    assert out.startswith("None\n") and (tmp_path / "run/model_000001.pt").is_file()


@pytest.mark.slow
def test_train_gpt2_loads_nothing_of_train_large(tmp_path):
    flags = [*TINY, "--max_steps", "1"]
    names = imported_by(f"import train_gpt2; train_gpt2.main({flags!r})", cwd=tmp_path)
    assert "train_gpt2" in names and "plaingpt.process" in names
    large = ("train_large", "plaingpt.large", "torch.distributed.pipelining")
    assert not [name for name in names if name.startswith(large)]
