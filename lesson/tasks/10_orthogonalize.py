"""Muon's orthogonalization: the singular values of a matrix become about 1.

Check it with: python lesson/check.py 10
"""

import torch


def orthogonalize(x):
    """Returns a matrix with the singular vectors of x, and singular values between 0.6 and 1.3.

    x: (rows, columns), of any size. Its smallest singular value is at least a thirtieth of its
    largest one. Do not compute a singular value decomposition: GPUs are slow at it.

    If the singular values s are at most 1, a round replaces each s by

      3.4445 s - 4.7750 s^3 + 2.0315 s^5

    and after five rounds, all are about 1. The singular vectors stay. A hint: if x = U S Vᵀ, then
    x xᵀ = U S² Uᵀ, so x xᵀ x = U S³ Vᵀ. The norm of a matrix, the root of the sum of its squared
    numbers, is at least its largest singular value.

    Lesson 13 also multiplies the result by the root of the number of columns. Do not do this here.

    Example: for x = [[3.0, 0.0], [0.0, 1.0]], the result is about [[1.0, 0.0], [0.0, 1.0]].
    """
    raise NotImplementedError
