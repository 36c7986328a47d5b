"""One matrix inequality of LipSDP: multipliers from a solver are a proposal, which Cholesky turns into a proof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import inf
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve, lapack, solve_triangular
from scipy.sparse import csr_matrix

from lipcert.errors import OptionError
from lipcert.norms.rounding import gamma, round_up

_GAP = 1e-7  # relative accuracy of ρ
KAPPA = 1 + 2.0**-30  # |a + b|² ≤ κ²|a|² + κ²/(κ²−1)·|b|² separates the maps from their errors b
_YOUNG = 2.0**29 + 2  # κ²/(κ²−1), rounded up
_STEPS = 300
_CENTRED = 0.25  # Newton decrement, squared


@dataclass(frozen=True)
class Problem:
    """P(ρ, t) = diag(ρ, …, t, …) − Zᵀ diag(t, …, 1, …) Z; the rows of Z are those of z_1, …, z_n and C.

    coordinate: which entry of (ρ, t) belongs to each column of P; row: which entry of (ρ, t, 1) to each row of Z.
    site_row, site_column: the sites of rows and columns; drift[j, i] bounds the norm of the error of their block of Z.
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


def barrier(problem: Problem) -> np.ndarray:
    """Minimise ρ/μ − log det P for decreasing μ by Newton's method.

    With F the unit vectors of v above the rows of Z, every derivative of P is a signed sum of fᵀf over rows f of F. So
    gradient and Hessian are signed sums of the diagonal and of the squared entries of F P⁻¹ Fᵀ.
    """
    x, n = problem.start.copy(), problem.z.shape[1]
    free = problem.row < len(x)
    vectors = np.concatenate([np.eye(n), problem.z[free]]).T
    index = np.concatenate([problem.coordinate, problem.row[free]])
    signs = csr_matrix((np.where(np.arange(len(index)) < n, 1.0, -1.0), (np.arange(len(index)), index)))
    price = np.where(np.arange(len(x)) == 0, 1.0, 1e-5 * _GAP * x[0] / x.sum())  # keeps free multipliers finite
    mu = x[0] / n
    for _ in range(_STEPS):
        try:
            factor = np.linalg.cholesky(problem.matrix(x))
            half = solve_triangular(factor, vectors, lower=True)
            gram = half.T @ half
            gradient = signs.T @ gram.diagonal()
            hessian = signs.T @ (signs.T @ np.square(gram)).T
            scale = 1 / np.sqrt(hessian.diagonal())
            scaled = hessian * scale * scale[:, None] + 1e-15 * np.eye(len(x))
            solved = cho_solve(cho_factor(scaled), np.stack([price, gradient], 1) * scale[:, None]) * scale[:, None]
        except (np.linalg.LinAlgError, ValueError):
            break  # as far as float64 goes
        while True:
            step = solved[:, 1] - solved[:, 0] / mu
            decrement = step @ (gradient - price / mu)
            if not decrement < _CENTRED or mu * n <= _GAP * max(x[0], 1e-8):
                break
            mu *= 0.5  # faster decrease leaves the centre and costs more steps
        if not decrement >= _CENTRED:
            break
        half = solve_triangular(factor, problem.matrix(step, 0.0), lower=True)
        curve = np.linalg.eigvalsh(solve_triangular(factor, half.T, lower=True))
        x = x + _line_search(curve, price @ step / mu) * step
    return x


def _line_search(curve: np.ndarray, slope: float) -> float:
    """The minimum over a of a·slope − Σ log(1 + a·curve), by bisection of the derivative."""
    low, high = 0.0, min(0.99 / max(-curve[0], 1e-3), 1e3)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if slope < (curve / (1 + middle * curve)).sum() else (low, middle)
    return low


def _cvxpy(problem: Problem) -> np.ndarray:
    """The same by cvxpy with Clarabel, or SCS if Clarabel fails."""
    try:
        cvxpy: Any = import_module("cvxpy")
    except ImportError as error:
        raise OptionError("solver='cvxpy' needs cvxpy; pip install 'lipcert[sdp]', or use solver='barrier'") from error
    x = cvxpy.Variable(len(problem.start), nonneg=True)
    weights = cvxpy.hstack([x, np.ones(1)])[problem.row]
    matrix = cvxpy.diag(x[problem.coordinate]) - problem.z.T @ cvxpy.diag(weights) @ problem.z
    program = cvxpy.Problem(cvxpy.Minimize(x[0]), [matrix >> 0])
    for solver in ("CLARABEL", "SCS"):
        try:
            program.solve(solver=solver)
        except cvxpy.SolverError:
            continue
        if x.value is not None:
            return np.asarray(x.value, dtype=float)
    raise np.linalg.LinAlgError("no solver of cvxpy found multipliers")


SOLVERS: dict[str, Callable[[Problem], np.ndarray]] = {"barrier": barrier, "cvxpy": _cvxpy}


def prove(problem: Problem, proposal: np.ndarray, stretch: float) -> float:
    """A bound on |y|²/|x|² that the proposed multipliers prove, moved inwards as far as necessary; infinity if none."""
    proposal = np.nan_to_num(proposal, nan=0.0, posinf=0.0).clip(min=0.0)
    for share in (0.0, *10.0 ** np.arange(-10, 1)):
        x = (1 - share) * proposal + share * problem.start
        smallest = smallest_rho(problem, x)
        x[0] = smallest * (1 + max(share, 1e-9)) + 1e-30
        if smallest < inf and (rest := proved(problem, x)) < inf:
            return round_up(x[0] * stretch**2 + rest, 4)
    return inf


def smallest_rho(problem: Problem, x: np.ndarray) -> float:
    """The smallest ρ for these multipliers, by a Schur complement, rounded; infinity if there is none."""
    matrix = problem.matrix(np.append(0.0, x[1:]))
    r = int((problem.coordinate == 0).sum())
    inner, info = lapack.dpotrf(matrix[r:, r:], lower=1) if r < len(matrix) else (matrix[r:, r:], 0)
    if info != 0 or not np.isfinite(matrix).all():
        return inf
    half = solve_triangular(inner, matrix[r:, :r], lower=True) if r < len(matrix) else matrix[r:, :r]
    return max(float(np.linalg.eigvalsh(half.T @ half - matrix[:r, :r])[-1]), 0.0)


def proved(problem: Problem, x: np.ndarray) -> float:
    """If P ⪰ 0 can be proved for the exact maps: the bound is ρ·|reduced x|² + (the result)·|x|². Otherwise infinity.

    Exact maps differ from Z by errors of norm e_ji. Their squares cost κ²/(κ²−1)·t_j·(Σ_i e_ji|v_i|)² per site, which
    (Σ_i e_ji)·Σ_i e_ji|v_i|² bounds; κ² is part of Z already. Columns are scaled by powers of two, so that the diagonal
    is near 1. Forming AᵀA costs γ_m|A|ᵀ|A|, whose row sums bound it as a diagonal matrix. Then Rump's theorem.
    """
    weights = np.append(x, 1.0)[problem.row]
    worst = np.zeros(len(problem.drift))
    np.maximum.at(worst, problem.site_row, weights)
    cost = _YOUNG * (worst * problem.drift.sum(1)) @ problem.drift * (1 + 1e-9)
    spread = cost[problem.site_column]
    spread[problem.coordinate == 0] = 0.0  # x itself, not its reduction, meets the error of its maps
    scale = np.exp2(-np.round(np.log2(x[problem.coordinate].clip(min=1e-200)) / 2))
    half = np.sqrt(weights)[:, None] * problem.z * scale
    m, n = half.shape
    diagonal = x[problem.coordinate] * scale**2
    size = np.abs(half)
    matrix = -(half.T @ half)
    allowance = gamma(m + 8) * (size.T @ size.sum(1)) + spread * scale**2 + gamma(8) * (diagonal - matrix.diagonal())
    allowance = allowance * (1 + 1e-6) + gamma(n + 4) * diagonal.sum()
    matrix[np.diag_indices(n)] += diagonal - allowance
    if not np.isfinite(matrix).all() or lapack.dpotrf(matrix, lower=1, overwrite_a=1)[1] != 0:
        return inf
    return float(cost[0])
