"""95 % intervals of Student's t for the difference between two groups of runs."""

import math

import numpy as np

# The t of a 95 % interval with 1 to 30 degrees of freedom: the 0.975 quantile of Student's t.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
       2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
       2.052, 2.048, 2.045, 2.042)


def t95(df):
    """Returns the t of a 95 % interval with df degrees of freedom, above 0, to three digits."""
    # Beyond the table, this is the expansion for many degrees of freedom (Fisher & Cornish 1960).
    return T95[df - 1] if df <= len(T95) else 1.960 + 2.372 / df + 2.82 / df**2


def paired_interval(differences):
    """Differences of n pairs, n above 1 -> (their mean, half the width of its interval)."""
    n = len(differences)
    return float(np.mean(differences)), t95(n - 1) * float(np.std(differences, ddof=1)) / n**0.5


def pairs_needed(differences, half):
    """Returns how many pairs give an interval of this half width, if their spread stays."""
    sd = float(np.std(differences, ddof=1))
    return next((n for n in range(2, 1001) if t95(n - 1) * sd / n**0.5 <= half), None)


def unpaired_interval(base, changed):
    """Two lists of values -> (mean of changed - mean of base, half the width of its interval).

    Both are assumed to have the same variance. With one value in each list, the half is infinite.
    """
    n, n_base = len(changed), len(base)
    df = n + n_base - 2  # degrees of freedom
    half = math.inf
    if df:
        variance = (np.var(changed) * n + np.var(base) * n_base) / df
        half = t95(df) * math.sqrt(variance * (1 / n + 1 / n_base))
    return float(np.mean(changed) - np.mean(base)), half
