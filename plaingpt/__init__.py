"""Prepares the import of the other files: how a CPU's threads wait, and which model.py is ours."""

import os
from importlib.util import find_spec
from pathlib import Path

# Waiting threads spin by default. When another program uses the cores, that makes a step several
# times slower, so let them sleep early. torch reads this when it is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Python would take a model.py or tokenizer.py that lies beside a notebook.
for name in ("model", "tokenizer"):
    found, ours = find_spec(name), Path(__file__).parents[1] / f"{name}.py"
    if found and found.origin and not ours.samefile(found.origin):
        raise ImportError(f"{found.origin} hides {ours}; rename it, or put ours first in sys.path")
