"""Differences between two groups of runs: 95 % intervals, p-values, and how many are luck."""

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
    be more groups: it is then the interval of a sum of means, and of their differences. If a
    variance is not finite, nothing is known, and the half is infinite.
    """
    error, df = error_of_means(variances, sizes)
    if not math.isfinite(error):
        return math.inf
    return float(t95(df) * error) if error else 0.0


def error_of_means(variances, sizes):
    """Returns (standard error of a difference of means, its degrees of freedom). See welch_half."""
    parts = [variance / n for variance, n in zip(variances, sizes)]  # variances of the means
    total = sum(parts)
    if not 0 < total < math.inf:
        return total, 1.0
    # The degrees of freedom by Satterthwaite (1946). They are between those of the smallest group
    # and the sum of all.
    df = total**2 / sum(part**2 / (n - 1) for part, n in zip(parts, sizes))
    return total**0.5, df


def p_value(base, changed):
    """Returns how likely so low a mean of `changed` is by luck alone: Welch's one-sided p-value.

    base, changed: 2 values or more each.
    """
    difference = float(np.mean(changed) - np.mean(base))
    variances = (np.var(base, ddof=1), np.var(changed, ddof=1))
    error, df = error_of_means(variances, (len(base), len(changed)))
    if error == 0:
        return 0.5 if difference == 0 else float(difference > 0)
    return float(probability_below(difference / error, df))


def probability_below(t, df):
    """Returns the probability that Student's t is below t. Both may be arrays (n,).

    With t = sqrt(df) tan(angle), the density is cos(angle) ** (df - 1), up to a factor. This sums
    it at 500 places below t, and at as many places everywhere.
    """

    def integral(end):
        places = (np.arange(500) + 0.5) / 500
        width = end + math.pi / 2
        angles = np.multiply.outer(width, places) - math.pi / 2  # (..., 500)
        powers = np.asarray(df)[..., None] - 1
        return (np.cos(angles) ** powers).mean(-1) * width

    return integral(np.arctan(t / np.sqrt(df))) / integral(np.full(np.shape(df), math.pi / 2))


def false_discovery_rates(p_values):
    """For each idea, returns the expected share of luck among it and all ideas that are surer.

    This is the adjusted p-value of Benjamini and Yekutieli (2001). It is right although the ideas
    depend on each other: they share the runs of the base. p_values: those of all ideas that were
    tried, also of those that did nothing.
    """
    n = len(p_values)
    harmonic = sum(1 / i for i in range(1, n + 1))
    rates = np.ones(n)
    lowest = 1.0
    # The least sure idea comes first, because a list is not less lucky than a longer one.
    for rank, i in zip(range(n, 0, -1), np.argsort(p_values)[::-1]):
        lowest = min(lowest, p_values[i] * n * harmonic / rank)
        rates[i] = lowest
    return rates.tolist()


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
        p_value=p_value(base, changed),
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
