"""One matrix inequality of LipSDP: multipliers from a solver are a proposal, which Cholesky turns into a proof."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from scipy.linalg import lapack, solve_triangular

from lipcert.rounding import gamma, round_up

# |a + b|² ≤ κ²|a|² + κ²/(κ²−1)·|b|² separates the maps from their errors b.
KAPPA = 1 + 2.0**-30
# κ²/(κ²−1), rounded up.
_YOUNG = 2.0**29 + 2


@dataclass(frozen=True)
class Problem:
    """P(ρ, t) = diag(ρ, …, t, …) − Zᵀ diag(t, …, 1, …) Z; the rows of Z are those of z_1, …, z_n and C.

    coordinate: which entry of (ρ, t) belongs to each column of P;
    row: which entry of (ρ, t, 1) to each row of Z.
    site_row, site_column: the sites of rows and columns; drift[j, i] bounds the norm of
    the error of their block of Z.
    start: (ρ, t) of LipLT, moved into the interior.
    """

    z: np.ndarray
    coordinate: np.ndarray
    row: np.ndarray
    site_row: np.ndarray
    site_column: np.ndarray
    drift: np.ndarray
    start: np.ndarray

    def matrix(self, x: np.ndarray, one: float = 1.0) -> np.ndarray:
        """P(ρ, t), rounded; its linear part with one = 0."""
        weighted = np.append(x, one)[self.row][:, None] * self.z
        return np.asarray(np.diag(x[self.coordinate]) - self.z.T @ weighted)


def prove(problem: Problem, proposal: np.ndarray, stretch: float) -> float:
    """A bound on |y|²/|x|² that the proposed multipliers prove, moved inwards as far as necessary; infinity if none."""
    proposal = np.nan_to_num(proposal, nan=0.0, posinf=0.0).clip(min=0.0)
    for share in (0.0, *10.0 ** np.arange(-14, 1)):
        x = (1 - share) * proposal + share * problem.start
        smallest = smallest_rho(problem, x)
        # A larger ρ often costs less than a larger share.
        x[0] = smallest * (1 + max(sqrt(share), 1e-9)) + 1e-30
        if smallest < inf and (rest := proved(problem, x)) < inf:
            return round_up(x[0] * stretch**2 + rest, 4)
    return inf


def smallest_rho(problem: Problem, x: np.ndarray) -> float:
    """The smallest ρ for these multipliers, by a Schur complement, rounded; infinity if there is none."""
    matrix = problem.matrix(np.append(0.0, x[1:]))
    r = int((problem.coordinate == 0).sum())
    half = matrix[r:, :r]
    if not np.isfinite(matrix).all():
        return inf
    # Without sites there are no multipliers.
    if r < len(matrix):
        inner, info = lapack.dpotrf(matrix[r:, r:], lower=1)
        if info != 0:
            return inf
        half = solve_triangular(inner, half, lower=True)
    return max(float(np.linalg.eigvalsh(half.T @ half - matrix[:r, :r])[-1]), 0.0)


def proved(problem: Problem, x: np.ndarray) -> float:
    """If P ⪰ 0 can be proved for the exact maps: the bound is ρ·|reduced x|² + (the result)·|x|². Otherwise infinity.

    Exact maps differ from Z by errors of norm e_ji. Their squares cost
    κ²/(κ²−1)·t_j·(Σ_i e_ji|v_i|)² per site, which (Σ_i e_ji)·Σ_i e_ji|v_i|² bounds; κ²
    is part of Z already. Columns are scaled by powers of two, so that the diagonal is
    near 1. Forming AᵀA costs γ_m|A|ᵀ|A|, whose row sums bound it as a diagonal matrix.
    Then Rump's theorem.
    """
    # Every allowance is taken from the diagonal: if what is left is positive definite,
    # P of the exact maps is.
    weights = np.append(x, 1.0)[problem.row]
    worst = np.zeros(len(problem.drift))
    np.maximum.at(worst, problem.site_row, weights)
    cost = _YOUNG * (worst * problem.drift.sum(1)) @ problem.drift * (1 + 1e-9)
    spread = cost[problem.site_column]
    # x itself, not its reduction, meets the error of its maps.
    spread[problem.coordinate == 0] = 0.0
    scale = np.exp2(-np.round(np.log2(x[problem.coordinate].clip(min=1e-200)) / 2))
    half = np.sqrt(weights)[:, None] * problem.z * scale
    m, n = half.shape
    diagonal = x[problem.coordinate] * scale**2
    size = np.abs(half)
    matrix = -(half.T @ half)
    allowance = gamma(m + 8) * (size.T @ size.sum(1)) + spread * scale**2
    allowance = allowance + gamma(8) * (diagonal - matrix.diagonal())
    allowance = allowance * (1 + 1e-6) + gamma(n + 4) * diagonal.sum()
    matrix[np.diag_indices(n)] += diagonal - allowance
    if not np.isfinite(matrix).all():
        return inf
    if lapack.dpotrf(matrix, lower=1, overwrite_a=1)[1] != 0:
        return inf
    return float(cost[0])
