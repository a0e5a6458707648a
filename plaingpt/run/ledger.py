"""The ledgers of experiment.py: files with a line of JSON for each experiment."""

import json

from plaingpt.base.errors import UserError
from plaingpt.base.files import writing
from plaingpt.base.terminal import print0


def entry_as_line(entry):
    """Returns an experiment of the ledger as one line, for a person."""
    figures = ""
    if "multipliers" in entry:
        figures = ladder_as_text(entry)
    elif "n" in entry:
        runs = f"{entry['n']} pairs"  # of an older version
        if "base_n" in entry:
            runs = f"{entry['n']} runs against {entry['base_n']}"
        figures = f"{entry['difference']:+.4f} ± {entry['half']:.4f} in {runs}; "
    if figures and entry.get("confirm"):
        figures = f"confirmation with new seeds; {figures}"
    why = f" (tried because: {entry['why']})" if entry.get("why") else ""
    return (
        f"{entry['date']}  {entry['change']}: {entry['verdict']}; {figures}{entry['reason']}{why}"
    )


def ladder_as_text(entry):
    """Returns the figures of a ladder: what the change is worth in compute at each size."""
    found = []
    for i, (m, low, high) in enumerate(entry["multipliers"]):
        interval = ""
        if i in (0, len(entry["multipliers"]) - 1):
            interval = f" [{low:.2f}, {high:.2f}]"
        found.append(f"x{m:.2f}{interval}")
    sizes = ", ".join(map(str, entry["sizes"]))
    trend = f"{entry['trend']:+.2f} ± {entry['trend_half']:.2f} a decade; "
    text = f"{', '.join(found)} in compute at {sizes} channels; {trend}"
    if entry["verdict"] != "undecided":  # such a wide interval would be read as a promise
        m, low, high = entry["far"]
        ahead = f"{entry['ahead']:g} times the largest, if the trend goes on"
        text += f"x{m:.2f} [{low:.2f}, {high:.2f}] at {ahead}; "
    if entry["time_ratio"]:
        text += f"time x{entry['time_ratio']:.2f}; "
    return text


def read_ledgers(paths):
    """Returns the experiments so far, as dicts. paths: of files that may be missing.

    Prints a note for each line that is not an experiment, and leaves it out. If a program was
    killed, or the disk was full, a ledger may have half a line.
    """
    entries = []
    for path in paths:
        lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
        for n, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                entry_as_line(entry)  # so that it has what --list prints
            except (ValueError, LookupError, TypeError, RecursionError):
                print0(f"note: {path}, line {n}: is no experiment, and is left out")
                continue
            entries.append(entry)
    return entries


def add_entry(path, entry):
    """Adds an experiment, a dict, to a ledger. Half a line at its end gets a line break first."""
    with writing(path), open(path, "a+b") as file:
        file.seek(0)
        if file.read()[-1:] not in (b"", b"\n"):
            file.write(b"\n")
        file.write(json.dumps(entry).encode() + b"\n")


def choose_seeds(keys, config, ledger):
    """Returns the seeds of the runs: (those of the base, those of the change), both as ranges.

    They begin at 1, and with --confirm behind the last seed that the ledger has for one of the
    programs. Seeds of an experiment that was stopped are not in the ledger, so the same command
    continues it. keys: those of all sides. Raises UserError if there is nothing to confirm.
    """
    first = 1
    if config.confirm:
        if not any(entry.get("keys") == keys for entry in ledger):
            raise UserError(
                "--confirm: the ledger has no verdict on this change, which may have been edited "
                "since; first run the same command without --confirm"
            )
        for entry in ledger:
            if set(keys) & set(entry.get("keys", [])):
                # The entries of older versions have pairs, and no last_seed.
                first = max(first, entry.get("last_seed", entry.get("n", 0)) + 1)
    n_base = max(config.base_seeds, config.seeds)
    return range(first, first + n_base), range(first, first + config.seeds)
