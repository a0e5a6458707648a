"""Verdicts and their ledger: confidence intervals, worth in compute, false discovery rates."""

import json
import math
from pathlib import Path

from plaingpt.base.errors import UserError, require
from plaingpt.base.files import reading, writing
from plaingpt.base.terminal import print0

import numpy as np

GOOD = ("better", "helps")  # ledgers of version 1.0 contain "helps"


def welch(base, changed):
    """Welch's t-test of two lists of losses.

    Returns the difference of the means, half the width of its 95 % confidence interval, and the
    one-sided p-value of a lower loss.
    """
    test = require("scipy.stats").ttest_ind
    low, high = test(changed, base, equal_var=False).confidence_interval(0.95)
    p_value = test(changed, base, equal_var=False, alternative="less").pvalue
    return float(np.mean(changed) - np.mean(base)), float(high - low) / 2, float(p_value)


def compare_losses(base, changed, delta):
    """Compares two groups of losses -> the facts of a verdict.

    delta: a difference below this does not matter.
    """
    difference, half, p_value = welch(base, changed)
    if abs(difference) + half <= delta:
        verdict, reason = "equal", f"the interval is within ± {delta:g}"
    elif half < abs(difference):
        verdict = "better" if difference < 0 else "worse"
        reason = "the interval is on one side of 0"
    else:
        verdict = "undecided"
        goal = max(abs(difference), delta - abs(difference))  # half the width that decides
        n = np.arange(len(changed) + 1, 1001)  # runs per program, with these means and variances
        error = np.sqrt((np.var(base, ddof=1) + np.var(changed, ddof=1)) / n)
        enough = n[require("scipy.stats").t.ppf(0.975, 2 * n - 2) * error <= goal]
        reason = f"about --seeds {[*enough, 'above 1000'][0]} may decide"
    found = dict(verdict=verdict, reason=reason, difference=difference, half=half)
    return dict(found, n=len(changed), base_n=len(base), p_value=p_value)


def worth(i, flops, losses, difference):
    """Returns what a difference in loss at size i is worth in compute: 1.2 means 20 % more.

    flops, losses: of the base at each size. The slope of this loss over the logarithm of compute at
    size i follows from the neighboring sizes. Returns None if the loss does not fall there.
    """
    n_ends = min(2, len(flops) - 1)  # neighbors that determine the slope at an end
    slope = np.gradient(losses, np.log(flops), edge_order=n_ends)[i]
    return math.exp(difference / slope) if slope < 0 else None


def entry_as_line(entry):
    """Returns an experiment of the ledger as one readable line."""
    line = f"{entry['date']}  {entry['change']}: {entry['verdict']}; "
    if "difference" in entry:
        line += "confirmation with new seeds; " if entry.get("confirm") else ""
        line += f"{entry['difference']:+.4f} ± {entry['half']:.4f} in {entry['n']} runs "
        line += f"against {entry['base_n']}; "
    if "worth" in entry:
        line += f"at {entry['size']} channels, {worth_as_text(entry)}; "
    why = f" (tried because: {entry['why']})" if entry.get("why") else ""
    return f"{line}{entry['reason']}{why}"


def worth_as_text(entry):
    """Returns what the difference of an entry is worth in compute, in words."""
    if None in entry["worth"]:
        return "worth an unknown compute: the loss of the base does not fall with the size"
    return "worth x{:.2f} [{:.2f}, {:.2f}] in compute".format(*entry["worth"])


def discoveries_as_lines(entries):
    """Returns readable lines: the changes that look better, with false discovery rates."""
    tested = [entry for entry in entries if "p_value" in entry]
    # A repeated change counts once: by its last p-value, or by its confirmation.
    tested.sort(key=lambda entry: bool(entry.get("confirm")))
    ideas = list({tuple(entry["keys"]): entry for entry in tested}.values())
    if not any(entry["verdict"] in GOOD for entry in ideas):
        return []
    # Benjamini and Yekutieli allow that all ideas share the runs of the base.
    p_values = [entry["p_value"] for entry in ideas]
    rates = require("scipy.stats").false_discovery_control(p_values, method="by")
    good = sorted((r, e["change"]) for r, e in zip(rates, ideas) if e["verdict"] in GOOD)
    head = f"changes tried: {len(ideas)}; better: {len(good)}; false discovery rate up to each:"
    return [head, *(f"{rate:6.1%}  {change}" for rate, change in good)]


def read_ledgers(paths):
    """Returns the experiments so far, as dicts. paths: ledgers, which may be missing."""
    entries = []
    for path in filter(Path.exists, paths):
        with reading(path, "remove the line that is not JSON"):
            *lines, end = path.read_text("utf-8").split("\n")
            entries += map(json.loads, lines)
        if end:  # the program was killed, or the disk was full
            print0(f"note: {path}: skips half a line at its end")
    return entries


def add_entry(path, entry):
    """Adds an experiment to a ledger. The new line replaces an incomplete line at the end."""
    with writing(path), open(path, "a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(entry).encode() + b"\n")


def choose_seeds(keys, config, ledger):
    """Returns the seeds of the base's runs and of the change's. Both are ranges from 1 on.

    With --confirm, the ranges begin after the last seed in the ledger of either program. keys: of
    both programs. Raises UserError if the ledger contains no verdict to confirm.
    """
    first = 1
    if config.confirm:
        same = [entry for entry in ledger if {*keys} & {*entry.get("keys", ())}]
        if not any("p_value" in entry and {*keys} <= {*entry["keys"]} for entry in same):
            raise UserError("--confirm: no verdict on this change as it is; first run it without")
        first += max(entry.get("last_seed", 0) for entry in same)
    n_base = max(config.base_seeds, config.seeds)
    return range(first, first + n_base), range(first, first + config.seeds)
