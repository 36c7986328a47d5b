"""Weighted sums of the rows of a matrix that is known up to an error."""

from __future__ import annotations

import numpy as np

from lipcert.rounding import gamma


def weighted_rows(
    weights: np.ndarray, rows: np.ndarray, error: float
) -> tuple[np.ndarray, float]:
    """W·R for functionals W, (F, K), of rows R, (K, n), and a bound on the norm of the error of each of its rows.

    `error` bounds that of each row of R, or of all of them together. A row w of W makes
    at most ‖w‖₁ of it. A logit or a difference of two makes it twice as large at most
    and rounds once, relative to the result, for which callers allow anyway. Other
    weights round in every product and sum: |fl(wR) − wR| ≤ γ_K Σ_a |w_a||r_a|.
    """
    product = weights @ rows
    heaviest = float(np.abs(weights).sum(1).max())
    # Products with 0 and ±1 are exact.
    if heaviest <= 2 and bool(np.isin(weights, (-1.0, 0.0, 1.0)).all()):
        return product, 2 * error
    # ‖Σ_a |w_a||r_a|‖ ≤ ‖w‖₁·max_a ‖r_a‖.
    longest = float(np.linalg.norm(rows, axis=1).max())
    roundoff = gamma(len(rows) + 4) * longest
    return product, heaviest * (error + roundoff) * (1 + 1e-8)
