"""Prepares the import of the other files: how a CPU's threads wait, and which model.py is ours."""

import os
import sys

# Waiting threads spin by default. When another program uses the cores, that makes a step several
# times slower, so let them sleep early. torch reads this when it is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Otherwise, Python would take a model.py or tokenizer.py that lies beside a notebook.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
