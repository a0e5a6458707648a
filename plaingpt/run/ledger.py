"""The ledgers of experiment.py: files with a line of JSON for each experiment."""

import json


def entry_as_line(entry):
    """Returns an experiment of the ledger as one line, for a person."""
    figures = ""
    if "n" in entry:
        figures = f"{entry['difference']:+.4f} ± {entry['half']:.4f} in {entry['n']} pairs; "
    return f"{entry['date']}  {entry['change']}: {entry['verdict']}; {figures}{entry['reason']}"


def read_ledgers(paths):
    """Returns the experiments so far, as dicts. paths: of files that may be missing."""
    entries = []
    for path in paths:
        if path.exists():
            with open(path) as file:
                entries += map(json.loads, file)
    return entries
