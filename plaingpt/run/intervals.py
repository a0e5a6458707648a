"""95 % intervals of Student's t for the difference between two groups of runs."""

import numpy as np

# The t of a 95 % interval with 1 to 10 degrees of freedom: the 0.975 quantile of Student's t.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def t95(df):
    """Returns the t of a 95 % interval with df degrees of freedom, above 0, to three digits."""
    # Beyond the table, this is the expansion for many degrees of freedom (Fisher & Cornish 1960).
    return T95[df - 1] if df <= len(T95) else 1.960 + 2.3723 / df + 2.8225 / df**2 + 2.556 / df**3


def unpaired_interval(base, changed):
    """Two lists of values -> (mean of changed - mean of base, half the width of its interval).

    Both are assumed to have the same variance. With one value in each list, the half is infinite.
    """
    n, n_base = len(changed), len(base)
    df = n + n_base - 2  # degrees of freedom
    half = np.inf
    if df:
        variance = (np.var(changed) * n + np.var(base) * n_base) / df
        half = t95(df) * (variance * (1 / n + 1 / n_base)) ** 0.5
    return float(np.mean(changed) - np.mean(base)), half


def compare_pairs(base, changed, delta):
    """The losses of n pairs, n above 1 -> the verdict on their differences, and its figures."""
    n = len(base)
    differences = np.subtract(changed, base)
    mean = float(differences.mean())
    sd = float(differences.std(ddof=1))
    half = t95(n - 1) * sd / n**0.5
    enough = find_pairs_needed(mean, sd, delta)
    if abs(mean) + half <= delta:
        verdict = "equal"
        reason = f"the interval is within ± {delta:g}"
    elif half < abs(mean):
        verdict = "better" if mean < 0 else "worse"
        reason = "the interval is on one side of 0"
    else:
        verdict = "undecided"
        reason = f"{enough or 'more than 1000'} pairs may decide"
    with np.errstate(invalid="ignore"):  # equal losses have no correlation
        correlation = float(np.nan_to_num(np.corrcoef(base, changed)[0, 1]))
    return dict(
        verdict=verdict,
        reason=reason,
        difference=mean,
        half=half,
        correlation=correlation,
        n=n,
        pairs_needed=enough,
        unpaired_half=unpaired_interval(base, changed)[1],
    )


def find_pairs_needed(mean, sd, delta):
    """Returns how many pairs may decide, or None if it is more than 1000.

    mean, sd: of the differences; those of more pairs are assumed to be the same.
    """
    goal = max(abs(mean), delta - abs(mean))  # a half width that decides
    for n in range(2, 1001):
        if t95(n - 1) * sd / n**0.5 <= goal:
            return n
    return None
