"""A solution of task 10: Muon's orthogonalization."""


def orthogonalize(x):
    """Returns a matrix with the singular vectors of x, and singular values between 0.6 and 1.3."""
    if x.size(0) > x.size(1):
        return orthogonalize(x.T).T  # for x.T, gram has fewer rows and columns than for x
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T  # (rows, rows)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x  # (rows, columns)
    return x
