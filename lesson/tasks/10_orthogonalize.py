"""Muon's orthogonalization: the singular values of a matrix become about 1.

Check it with: python lesson/check.py 10
"""

import torch


def orthogonalize(x):
    """Returns a matrix with the singular vectors of x, and singular values between 0.6 and 1.3.

    x: (rows, columns), of any scale. The smallest singular value of x is at least a thirtieth of
    the largest singular value. Do not compute a singular value decomposition, which is slow on
    GPUs.

    Use five iterations. All singular values s must be at most 1 before the first iteration. Each
    iteration replaces each s by

      3.4445 s - 4.7750 s^3 + 2.0315 s^5

    without changing the singular vectors. After five iterations, all singular values are about 1.

    Two hints: if x = U S Vᵀ, then x xᵀ = U S² Uᵀ, so x xᵀ x = U S³ Vᵀ. The norm of a matrix, the
    square root of the sum of its squared numbers, is at least as large as its largest singular
    value.

    Lesson 13 then multiplies the matrix by the square root of its number of columns. Skip this
    multiplication here.

    Example: for x = [[3.0, 0.0], [0.0, 1.0]], the result is about [[1.0, 0.0], [0.0, 1.0]].
    """
    raise NotImplementedError


if __name__ == "__main__":
    print(__doc__)
