"""Verdicts: confidence intervals, the compute that a change saves, and false discovery rates.

The ledger is the list of all experiments and their verdicts: a file with one JSON object per line.
"""

import json
import math
from pathlib import Path

from plaingpt.errors import UserError, require
from plaingpt.files import format_json, reading, writing
from plaingpt.terminal import print0

import numpy as np

GOOD = ("better", "helps")  # version 1.0 wrote "helps" instead of "better"


def welch(base, changed):
    """Computes Welch's t-test for two lists of losses.

    Returns the difference of the means, half the width of its 95% confidence interval, and the
    one-sided p-value for a lower mean of `changed`.
    """
    test = require("scipy.stats").ttest_ind
    low, high = test(changed, base, equal_var=False).confidence_interval(0.95)
    p_value = test(changed, base, equal_var=False, alternative="less").pvalue
    return float(np.mean(changed) - np.mean(base)), float(high - low) / 2, float(p_value)


def compare_losses(base, changed, delta):
    """Compares two lists of losses. Returns the facts of a verdict, as a dict.

    delta: differences in loss below this value do not matter.
    """
    difference, half, p_value = welch(base, changed)
    if abs(difference) + half <= delta:
        verdict, reason = "equal", f"the interval is within ± {delta:g}"
    elif half < abs(difference):
        verdict = "better" if difference < 0 else "worse"
        reason = "the interval is on one side of 0"
    else:
        verdict = "undecided"
        # If the difference and the variances stay the same, the experiment is decided as soon as
        # half the width of the interval is at most `goal`.
        goal = max(abs(difference), delta - abs(difference))
        n = np.arange(len(changed) + 1, 1001)  # possible numbers of runs per program
        error = np.sqrt((np.var(base, ddof=1) + np.var(changed, ddof=1)) / n)
        enough = n[require("scipy.stats").t.ppf(0.975, 2 * n - 2) * error <= goal]
        reason = f"about --seeds {[*enough, 'above 1000'][0]} may decide"
    found = dict(verdict=verdict, reason=reason, difference=difference, half=half)
    return dict(found, n=len(changed), base_n=len(base), p_value=p_value)


def worth(i, flops, losses, difference):
    """Returns how many times its compute the baseline would need to reach the loss of the change.

    The result 1.2 means 20% more compute. i: index of the model size. flops, losses: FLOPs and mean
    losses of the baseline at each size. difference: the loss of the change minus the loss of
    the baseline, at size i. The slope of the loss over the logarithm of compute is estimated
    from the neighboring sizes. Returns None if the loss does not fall with compute, or falls so
    little that the result is not a finite float.
    """
    n_ends = min(2, len(flops) - 1)  # neighbors that determine the slope at the first and last size
    slope = np.gradient(losses, np.log(flops), edge_order=n_ends)[i]
    try:
        return math.exp(difference / slope) if slope < 0 else None
    except OverflowError:
        return None


def entry_as_line(entry):
    """Returns the text of one line that describes an experiment. entry: its dict in the ledger."""
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
    """Returns the worth of the change in compute, with its interval, as text. See `worth`."""
    if None in entry["worth"]:
        return "worth in compute is unknown: the baseline's loss falls too little with the size"
    return "worth x{:.3g} [{:.3g}, {:.3g}] in compute".format(*entry["worth"])


def discoveries_as_lines(entries):
    """Returns lines of text: each change whose verdict is better, with a false discovery rate.

    entries: the dicts of all experiments.
    """
    # If all losses of an experiment are equal, its p-value is null.
    tested = [entry for entry in entries if entry.get("p_value") is not None]
    # If a change was tested several times, the change counts once, with the p-value of its
    # confirmation. If there is no confirmation, the change counts with its last p-value.
    tested.sort(key=lambda entry: bool(entry.get("confirm")))
    ideas = list({tuple(entry["keys"]): entry for entry in tested}.values())
    if not any(entry["verdict"] in GOOD for entry in ideas):
        return []
    # All changes share the runs of the baseline, so their p-values are not independent. The method
    # of Benjamini and Yekutieli does not need independence.
    p_values = [entry["p_value"] for entry in ideas]
    rates = require("scipy.stats").false_discovery_control(p_values, method="by")
    good = sorted((r, e["change"]) for r, e in zip(rates, ideas) if e["verdict"] in GOOD)
    head = f"changes tried: {len(ideas)}; better: {len(good)}; false discovery rate up to each:"
    return [head, *(f"{rate:6.1%}  {change}" for rate, change in good)]


def read_ledgers(paths):
    """Returns the experiments in the ledgers, as dicts. paths: missing files are skipped."""
    entries = []
    for path in filter(Path.exists, paths):
        with reading(path, "remove the line that is not JSON"):
            *lines, end = path.read_text("utf-8").split("\n")
            entries += map(json.loads, lines)
        if end:  # the program was killed, or the disk was full
            print0(f"note: {path}: skips an incomplete last line")
    return entries


def add_entry(path, entry):
    """Appends an experiment to a ledger. Removes an incomplete last line first."""
    with writing(path), open(path, "a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(format_json(entry).encode() + b"\n")


def choose_seeds(keys, config, ledger):
    """Returns the range of seeds of the baseline, and the range of seeds of the change.

    Both ranges begin at 1. With --confirm, they begin after the last seed that the ledger contains
    for either program. keys: the keys of the baseline and of the change. Raises UserError if the
    ledger contains no verdict to confirm.
    """
    first = 1
    if config.confirm:
        same = [entry for entry in ledger if {*keys} & {*entry.get("keys", ())}]
        if not any("p_value" in entry and {*keys} <= {*entry["keys"]} for entry in same):
            raise UserError(
                "--confirm: this change has no verdict; first run the experiment without --confirm"
            )
        first += max(entry.get("last_seed", 0) for entry in same)
    n_base = max(config.base_seeds, config.seeds)
    return range(first, first + n_base), range(first, first + config.seeds)
