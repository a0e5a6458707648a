"""Prepares the import of torch: how a CPU's threads wait."""

import os

# Waiting threads spin by default. When another program uses the cores, that makes a step several
# times slower, so let them sleep early. torch reads this when it is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
