"""Weighted sums of rows are off by no more than is said: against rational arithmetic."""

from fractions import Fraction
from math import sqrt

import numpy as np
import pytest

from lipcert.bounds.weighted_rows import weighted_rows

WEIGHTS = {
    "difference": [[1.0, -1.0, 0.0, 0.0]],
    "mean of others": [[1.0, -1 / 3, -1 / 3, -1 / 3]],
    "large": [[1e5, -1e5, 0.0, 0.0], [3.0, 0.1, -7.0, 0.1]],
}


def distance(found, weights, rows):
    """The largest norm of the errors of rows of a product."""
    worst = 0.0
    for row, w in zip(found, weights, strict=True):
        square = Fraction(0)
        for value, column in zip(row, rows.T, strict=True):
            exact = sum(
                Fraction(a) * Fraction(b) for a, b in zip(w, column, strict=True)
            )
            square += (Fraction(value) - exact) ** 2
        worst = max(worst, sqrt(square))
    return worst


@pytest.mark.parametrize("name", WEIGHTS)
def test_errors_of_the_rows_and_of_the_sums_are_covered(name):
    weights, rng = np.array(WEIGHTS[name]), np.random.default_rng(0)
    common = rng.standard_normal(50)
    exact = common + 1e-9 * rng.standard_normal((4, 50))  # which nearly cancels
    moved = rng.standard_normal((4, 50))
    moved *= 1e-12 / np.linalg.norm(moved, axis=1, keepdims=True)
    found, error = weighted_rows(weights, exact + moved, 1.001e-12)
    allowed = (
        error + 1e-15 * np.linalg.norm(found, axis=1).max()
    )  # one rounding, relative to the result
    assert distance(found, weights, exact) <= allowed
    assert error <= 3 * np.abs(weights).sum(1).max() * 1e-12


def test_rounding_alone():
    weights = np.array([[0.1, 0.2, -0.3, 1e-3]])
    rows = np.random.default_rng(1).standard_normal((4, 50)) + 1e6
    found, error = weighted_rows(weights, rows, 0.0)
    assert 0 < distance(found, weights, rows) <= error
