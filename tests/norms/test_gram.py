"""Proved bounds on eigenvalues and norms: above the exact value, and close to it."""

from math import inf

import mpmath
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from helpers import examples
from lipcert.norms import gram
from lipcert.norms.gram import bound_largest_eigenvalue, bound_spectral_norm


def exact_eigenvalue(matrix: np.ndarray) -> mpmath.mpf:
    """The largest eigenvalue in 60 digits."""
    with mpmath.workdps(60):
        return max(mpmath.eigsy(mpmath.matrix(matrix.tolist()), eigvals_only=True))


def exact_norm(matrix: np.ndarray) -> mpmath.mpf:
    with mpmath.workdps(60):
        a = mpmath.matrix(matrix.tolist())
        return mpmath.sqrt(max(mpmath.eigsy(a * a.T, eigvals_only=True)))


def random_matrix(rows, columns, seed):
    return np.random.default_rng(seed).standard_normal((rows, columns))


LOW_RANK = random_matrix(6, 2, 1)
SYMMETRIC = {
    "1 by 1": np.array([[3.0]]),
    "zero": np.zeros((4, 4)),
    "identity": np.eye(5),
    "hilbert": scipy.linalg.hilbert(6),
    "rank 2 of 6": LOW_RANK @ LOW_RANK.T,
    "graded": np.diag([1e-12, 1e-6, 1.0, 1e6]) + 1e-13,
    "zero diagonal": np.array([[0.0, 1.0], [1.0, 0.0]]),
    "large": 1e100 * scipy.linalg.hilbert(4),
    "small": 1e-100 * scipy.linalg.hilbert(4),
}


@pytest.mark.parametrize("name", SYMMETRIC)
def test_eigenvalue_is_bounded_closely(name):
    matrix = SYMMETRIC[name]
    matrix = (matrix + matrix.T) / 2
    bound, exact = bound_largest_eigenvalue(matrix.copy()), exact_eigenvalue(matrix)
    assert exact <= bound <= exact * (1 + 1e-6) + mpmath.mpf(1e-290)


@examples(2)
@given(
    n=st.integers(1, 6),
    rank=st.integers(1, 6),
    seed=st.integers(0, 9999),
    spread=st.integers(0, 8),
)
def test_eigenvalue_of_random_gram_matrices(n, rank, seed, spread):
    rows = random_matrix(n, rank, seed) * np.logspace(0, -spread, n)[:, None]
    matrix = rows @ rows.T
    matrix = (matrix + matrix.T) / 2
    bound, exact = bound_largest_eigenvalue(matrix.copy()), exact_eigenvalue(matrix)
    assert exact <= bound <= exact * (1 + 1e-6)


@pytest.mark.parametrize("n", [100, 400])
@pytest.mark.parametrize("kind", ["random", "identity", "clustered"])
def test_eigenvalue_of_larger_matrices_found_by_arpack(n, kind):
    """Q diag(λ) Qᵀ with a known largest eigenvalue, up to the rounding of its construction."""
    values = {
        "random": np.linspace(0, 2, n),
        "identity": np.ones(n),
        "clustered": np.r_[1 - 1e-9 * np.arange(n)],
    }[kind]
    q = np.linalg.qr(random_matrix(n, n, 0))[0]
    matrix = (q * values) @ q.T
    bound = bound_largest_eigenvalue((matrix + matrix.T) / 2)
    assert values.max() * (1 - 1e-13) <= bound <= values.max() * (1 + 1e-6)


@pytest.mark.parametrize("factor", [0.0, 0.5, 1 - 1e-6])
def test_a_guess_that_is_too_low_still_ends_in_a_proof(monkeypatch, factor):
    matrix = random_matrix(8, 8, 3)
    matrix = matrix @ matrix.T
    exact = np.linalg.eigvalsh(matrix)[-1]
    monkeypatch.setattr(
        gram, "_largest_eigenvalue", lambda g: max(factor, 1e-3) * exact
    )
    bound = bound_largest_eigenvalue(matrix.copy())
    assert exact <= bound
    assert (
        bound <= exact * (1 + 1e-4) or factor < 0.9
    )  # a bad guess costs tightness, never truth


@examples(1)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 8),
    seed=st.integers(0, 9999),
    exponent=st.sampled_from([-40, 0, 40]),
)
def test_spectral_norm_of_rows_of_different_magnitude(rows, columns, seed, exponent):
    matrix = (
        random_matrix(rows, columns, seed)
        * np.logspace(0, 6, rows)[:, None]
        * 10.0**exponent
    )
    bound, exact = bound_spectral_norm(matrix), exact_norm(matrix)
    assert exact <= bound <= exact * (1 + 1e-6)


def test_nearly_parallel_rows_do_not_hide_behind_cancellation():
    base = random_matrix(1, 40, 0)
    matrix = np.concatenate([base, base * (1 + 1e-15), base + 1e-16])
    assert (
        exact_norm(matrix)
        <= bound_spectral_norm(matrix)
        <= exact_norm(matrix) * (1 + 1e-6)
    )


@pytest.mark.parametrize("value", [1e160, np.inf, np.nan])
def test_rows_whose_squares_overflow_have_no_bound(value):
    assert bound_spectral_norm(np.full((2, 3), value)) == inf
