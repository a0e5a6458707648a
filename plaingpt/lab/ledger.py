"""The ledgers of experiment.py: files with a line of JSON for each experiment."""

import json

from plaingpt.base.errors import UserError
from plaingpt.base.files import writing
from plaingpt.base.terminal import print0
from plaingpt.lab.intervals import false_discovery_rates

GOOD = ("better", "helps")  # verdicts


def entry_as_line(entry):
    """Returns an experiment of the ledger as one line, for a person."""
    figures = ""
    if "multipliers" in entry:
        figures = ladder_as_text(entry)
    elif "difference" in entry:
        runs = f"{entry['n']} runs against {entry['base_n']}"
        figures = f"{entry['difference']:+.4f} ± {entry['half']:.4f} in {runs}; "
    if figures and entry.get("confirm"):
        figures = f"confirmation with new seeds; {figures}"
    trend = f", {entry['trend']}" if "trend" in entry else ""
    why = f" (tried because: {entry['why']})" if entry.get("why") else ""
    verdict = f"{entry['verdict']}{trend}"
    return f"{entry['date']}  {entry['change']}: {verdict}; {figures}{entry['reason']}{why}"


def ladder_as_text(entry):
    """Returns the figures of a ladder: what the change is worth in compute at each size."""
    found = []
    for i, (m, low, high) in enumerate(entry["multipliers"]):
        interval = ""
        if i in (0, len(entry["multipliers"]) - 1):
            interval = f" [{low:.2f}, {high:.2f}]"
        found.append(f"x{m:.2f}{interval}")
    sizes = ", ".join(map(str, entry["sizes"]))
    slope = f"{entry['slope']:+.2f} ± {entry['slope_half']:.2f} a decade; "
    text = f"{', '.join(found)} in compute at {sizes} channels; {slope}"
    if entry.get("time_ratio"):
        text += f"time x{entry['time_ratio']:.2f}; "
    return text


def luck_as_lines(entries):
    """Says how many of the ideas that look good may be luck, as lines for a person.

    An idea that was tried again counts once, with its last p-value, or that of its confirmation.
    """
    ideas = {}
    for entry in entries:
        if "p_value" in entry:
            idea = tuple(entry["keys"])
            is_confirmed = idea in ideas and ideas[idea].get("confirm")
            if entry.get("confirm") or not is_confirmed:
                ideas[idea] = entry
    tried = list(ideas.values())
    rates = false_discovery_rates([entry["p_value"] for entry in tried])
    good = []
    for rate, entry in zip(rates, tried):
        if entry["verdict"] in GOOD:
            good.append((rate, entry["change"]))
    if not good:
        return []
    good.sort()
    lines = [f"ideas tried: {len(tried)}; good ones: {len(good)}; the share of luck up to each:"]
    return lines + [f"{rate:6.1%}  {change}" for rate, change in good]


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
                luck_as_lines([entry])
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


def count_comparisons(keys, ledger):
    """Returns how many times these programs were compared so far. A failure has no verdict."""
    return sum(entry.get("keys") == keys and "p_value" in entry for entry in ledger)


def choose_seeds(keys, config, ledger):
    """Returns the seeds of the runs: (those of the base, those of the change), both as ranges.

    They begin at 1, and with --confirm behind the last seed that the ledger has for one of the
    programs. Seeds of an experiment that was stopped are not in the ledger, so the same command
    continues it. keys: those of all programs. Raises UserError if there is nothing to confirm.
    """
    first = 1
    if config.confirm:
        if not count_comparisons(keys, ledger):
            raise UserError(
                "--confirm: the ledger has no verdict on this change, which may have been edited "
                "since; first run the same command without --confirm"
            )
        for entry in ledger:
            if set(keys) & set(entry.get("keys", [])):
                first = max(first, entry.get("last_seed", 0) + 1)
    n_base = max(config.base_seeds, config.seeds)
    return range(first, first + n_base), range(first, first + config.seeds)
