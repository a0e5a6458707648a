"""95 % intervals for the difference between two groups of runs."""

import math

import numpy as np

# The t of a 95 % interval with 1 to 10 degrees of freedom: the 0.975 quantile of Student's t.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def t95(df):
    """Returns the t of a 95 % interval with df degrees of freedom, 1 or more.

    df need not be a whole number: between two of them, this is a straight line.
    """
    below = math.floor(df)
    fraction = df - below
    if fraction == 0:
        return t95_of_whole(below)
    return (1 - fraction) * t95_of_whole(below) + fraction * t95_of_whole(below + 1)


def t95_of_whole(df):
    """Returns t95 of a whole number of degrees of freedom, to three digits."""
    # Beyond the table, this is the expansion for many degrees of freedom (Fisher & Cornish 1960).
    return T95[df - 1] if df <= len(T95) else 1.960 + 2.3723 / df + 2.8225 / df**2 + 2.556 / df**3


def welch_interval(base, changed):
    """Two lists of values -> (mean of changed - mean of base, half the width of its interval).

    The two groups may have different variances (Welch 1947). So a change whose runs differ more
    than those of the base gets an honest interval. With one value in a list, nothing is known of
    its variance, and the half is infinite.
    """
    difference = float(np.mean(changed) - np.mean(base))
    if min(len(base), len(changed)) < 2:
        return difference, np.inf
    variances = (np.var(base, ddof=1), np.var(changed, ddof=1))
    return difference, welch_half(variances, (len(base), len(changed)))


def welch_half(variances, sizes):
    """Returns half the width of the interval of a difference of two means.

    variances: of a single value, in each group. sizes: the number of values, 2 or more. There may
    be more groups: it is then the interval of a sum of means, and of their differences.
    """
    parts = [variance / n for variance, n in zip(variances, sizes)]  # variances of the means
    total = sum(parts)
    if total == 0:
        return 0.0
    # The degrees of freedom by Satterthwaite (1946). They are between those of the smallest group
    # and the sum of all.
    df = total**2 / sum(part**2 / (n - 1) for part, n in zip(parts, sizes))
    return float(t95(df) * total**0.5)


def compare_losses(base, changed, delta):
    """The losses of the base's runs and of the change's -> the verdict, and its figures.

    base, changed: 2 losses or more each. The first of both are those of the same seeds. delta: a
    smaller difference does not matter.
    """
    difference, half = welch_interval(base, changed)
    needed = find_runs_needed(base, changed, delta)
    if abs(difference) + half <= delta:
        verdict = "equal"
        reason = f"the interval is within ± {delta:g}"
    elif half < abs(difference):
        verdict = "better" if difference < 0 else "worse"
        reason = "the interval is on one side of 0"
    else:
        verdict = "undecided"
        reason = f"--seeds {needed} may decide" if needed else "even --seeds 1000 would not decide"
    return dict(
        verdict=verdict,
        reason=reason,
        difference=difference,
        half=half,
        n=len(changed),
        base_n=len(base),
        runs_needed=needed,
        **compare_pairs(base, changed),
    )


def compare_pairs(base, changed):
    """Returns what pairs of the same seed say: their correlation, and the half of Student's t.

    If runs of the same seed are alike, paired_half is smaller than the half of Welch. But few pairs
    cannot show whether they are. The arguments are those of compare_losses.
    """
    n = min(len(base), len(changed))
    base, changed = np.array(base[:n]), np.array(changed[:n])
    sd = np.std(changed - base, ddof=1)
    with np.errstate(invalid="ignore"):  # equal losses have no correlation
        correlation = float(np.nan_to_num(np.corrcoef(base, changed)[0, 1]))
    return dict(correlation=correlation, paired_half=float(t95(n - 1) * sd / n**0.5))


def find_runs_needed(base, changed, delta):
    """Returns how many runs of the change may decide, or None if it is more than 1000.

    Mean and variances are assumed to stay the same. The base then has as many runs, or those that
    it has. The arguments are those of compare_losses.
    """
    mean = abs(np.mean(changed) - np.mean(base))
    goal = max(mean, delta - mean)  # a half width that decides
    variances = (np.var(base, ddof=1), np.var(changed, ddof=1))
    for n in range(2, 1001):
        if welch_half(variances, (max(n, len(base)), n)) <= goal:
            return n
    return None
