"""Solvers of the matrix inequality of LipSDP: they propose multipliers, which `inequality` proves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve, eigvalsh, solve_triangular
from scipy.sparse import csr_matrix

from lipcert.bounds.inequality import Problem
from lipcert.errors import OptionError

_GAP = 1e-7  # relative accuracy of ρ
TINY = 1e-16  # of the start, what counts as ρ = 0
_PRICE = 1e-13
_STEPS = 150


class Unsolved(Exception):
    """A solver stopped before the optimum: multipliers that it has found, and a lower bound on the best ρ."""

    def __init__(self, proposal: np.ndarray, lower: float) -> None:
        self.proposal, self.lower = proposal, lower


def barrier(problem: Problem) -> np.ndarray:
    """Minimise c·(ρ, t), which is ρ but for tiny prices of t, by a primal-dual interior-point method.

    With D_i the derivatives of P, the dual problem is to maximise tr(X CᵀC) over X ⪰ 0
    with tr(X D_i) = c_i. Both sides begin in the interior, and every step solves PX =
    σμI linearised (the HKM direction, with Mehrotra's corrector). tr(XP) and what is
    left of c_i − tr(X D_i) bound the distance from the optimum.
    """
    scaled = _equilibrated(problem)
    derivatives = _Derivatives(scaled)
    x = best = scaled.start
    # Keeps multipliers finite that cost nothing.
    price = np.where(np.arange(len(x)) == 0, 1.0, _PRICE / len(x))
    dual = np.diag(_independent_signs(scaled, price))
    lower = 0.0
    for _ in range(_STEPS):
        try:
            point = _Point(scaled, derivatives, x, dual)
            # tr(XP), what X lacks to be feasible, and what the prices of t add to ρ.
            gap = point.gap + np.abs(price - point.traces) @ x + price[1:] @ x[1:]
            lower = max(lower, x[0] - gap)
            if gap <= _GAP * max(x[0], TINY):
                return np.asarray(x * problem.start)
            step, dual_step = point.direction(price)
            x = x + _to_boundary(point.factor, scaled.matrix(step, 0.0)) * step
            dual = dual + _to_boundary(point.dual_factor, dual_step) * dual_step
        except (np.linalg.LinAlgError, ValueError):
            # As far as float64 goes.
            break
        best = x if x[0] < best[0] else best
    raise Unsolved(best * problem.start, lower * problem.start[0])


def _equilibrated(problem: Problem) -> Problem:
    """The problem in units of its start: there (ρ, t) = (1, …, 1), and the entries of P are about 1."""
    unit = np.sqrt(np.append(problem.start, 1.0))
    z = unit[problem.row][:, None] * problem.z / unit[problem.coordinate]
    return replace(problem, z=z, start=np.ones_like(problem.start))


def _independent_signs(problem: Problem, price: np.ndarray) -> np.ndarray:
    """The diagonal of a feasible X: second moments of v if |w_i| = |z_i| with independent random signs.

    Site by site, E w_i² = c_i + E z_i², and E z_i² = Σ_k Z_ik² E v_k² is known from the
    sites before.
    """
    moments, members = np.zeros(problem.z.shape[1]), np.bincount(problem.coordinate)
    total, squares = price.copy(), np.square(problem.z)
    for site in range(problem.site_column.max() + 1):
        rows, columns = problem.site_row == site, problem.site_column == site
        # Before E w_i² of a site: it needs E z_i² of the same one.
        np.add.at(total, problem.row[rows], squares[rows] @ moments)
        moments[columns] = (total / members)[problem.coordinate[columns]]
    return moments


class _Derivatives:
    """D_i = ∂P/∂x_i. With F the unit vectors of v above the rows of Z, each is a signed sum of fᵀf over rows f of F:
    for one input x and one neuron, F = (e_x, e_w, z_1), D_ρ = e_xᵀe_x and D_t = e_wᵀe_w
    − z_1ᵀz_1."""

    def __init__(self, problem: Problem) -> None:
        n, free = problem.z.shape[1], problem.row < len(problem.start)
        self.vectors = np.concatenate([np.eye(n), problem.z[free]])
        index = np.concatenate([problem.coordinate, problem.row[free]])
        count = np.arange(len(index))
        self.signs = csr_matrix((np.where(count < n, 1.0, -1.0), (count, index)))

    def traces(self, matrix: np.ndarray) -> np.ndarray:
        """tr(D_i Y), from the diagonal of F Y Fᵀ."""
        images = self.vectors @ matrix
        squares = np.einsum("ij,ij->i", images, self.vectors)
        return np.asarray(self.signs.T @ squares)


class _Point:
    """P and X at one step, their Cholesky factors, and the equations for the next step."""

    def __init__(
        self,
        problem: Problem,
        derivatives: _Derivatives,
        x: np.ndarray,
        dual: np.ndarray,
    ) -> None:
        self.problem, self.derivatives, self.dual = problem, derivatives, dual
        self.matrix = problem.matrix(x)
        self.factor = np.linalg.cholesky(self.matrix)
        self.dual_factor = np.linalg.cholesky(dual)
        half = solve_triangular(self.factor, derivatives.vectors.T, lower=True)
        gram, dual_half = half.T @ half, derivatives.vectors @ self.dual_factor
        dual_gram = dual_half @ dual_half.T
        self.inverse = gram[: len(dual), : len(dual)]
        # Of log det P.
        self.gradient = derivatives.signs.T @ gram.diagonal()
        self.traces = derivatives.signs.T @ dual_gram.diagonal()
        self.gap = float((dual * self.matrix).sum())
        # tr(D_i P⁻¹ D_j X).
        signs = derivatives.signs.T
        self.equations = signs @ (signs @ (gram * dual_gram)).T

    def direction(self, price: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The step of x and that of X: first towards the optimum, then corrected by what that step neglects."""
        predicted = self.problem.matrix(_solve(self.equations, -price), 0.0)
        dual_predicted = -self.dual - _symmetric(self.dual @ predicted @ self.inverse)
        ahead = self.matrix + _to_boundary(self.factor, predicted) * predicted
        part = _to_boundary(self.dual_factor, dual_predicted)
        dual_ahead = self.dual + part * dual_predicted
        centring = min(1.0, float((ahead * dual_ahead).sum()) / self.gap) ** 2
        target = centring * self.gap / len(self.dual)
        neglected = _symmetric(dual_predicted @ predicted @ self.inverse)
        traces = self.derivatives.traces(neglected)
        step = _solve(self.equations, target * self.gradient - price - traces)
        change = _symmetric(self.dual @ self.problem.matrix(step, 0.0) @ self.inverse)
        return step, target * self.inverse - self.dual - change - neglected


def _solve(equations: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The solution of symmetric equations, scaled to a unit diagonal, with the smallest ridge that Cholesky needs."""
    scale = 1 / np.sqrt(equations.diagonal())
    # Near the optimum the equations are nearly singular, and their entries differ by
    # many orders of magnitude.
    scaled = equations * scale * scale[:, None]
    for ridge in 10.0 ** np.arange(-16, -5):
        try:
            factor = cho_factor(scaled + ridge * np.eye(len(scale)))
        except np.linalg.LinAlgError:
            continue
        solution = np.zeros_like(right)
        # Refinement takes back most of what the ridge and roundoff cost.
        for _ in range(3):
            left = scale * (right - equations @ solution)
            solution = solution + scale * cho_solve(factor, left)
        return solution
    raise np.linalg.LinAlgError("the equations of the step are not positive definite")


def _to_boundary(factor: np.ndarray, step: np.ndarray) -> float:
    """The part of a step that leaves the matrix of this Cholesky factor positive definite, at most all of it."""
    half = solve_triangular(factor, step, lower=True)
    relative = solve_triangular(factor, half.T, lower=True)
    # I + s·(this matrix) stays positive definite for s < −1/lowest.
    lowest = eigvalsh(relative, subset_by_index=[0, 0])[0]
    # Not all of the way: on the boundary the matrix would be singular.
    return float(min(1.0, 0.95 / max(-lowest, 1e-9)))


def _symmetric(matrix: np.ndarray) -> np.ndarray:
    return np.asarray(matrix + matrix.T) / 2


def _cvxpy(problem: Problem) -> np.ndarray:
    """The same by cvxpy with Clarabel, or SCS if Clarabel fails."""
    try:
        cvxpy: Any = import_module("cvxpy")
    except ImportError as error:
        raise OptionError(
            "solver='cvxpy' needs cvxpy; pip install 'lipcert[sdp]', or "
            "use solver='barrier'"
        ) from error
    x = cvxpy.Variable(len(problem.start), nonneg=True)
    weights = cvxpy.hstack([x, np.ones(1)])[problem.row]
    weighted = problem.z.T @ cvxpy.diag(weights) @ problem.z
    matrix = cvxpy.diag(x[problem.coordinate]) - weighted
    program = cvxpy.Problem(cvxpy.Minimize(x[0]), [matrix >> 0])
    for solver in ("CLARABEL", "SCS"):
        try:
            program.solve(solver=solver)
        except cvxpy.SolverError:
            continue
        if x.value is not None:
            return np.asarray(x.value, dtype=float)
    raise Unsolved(problem.start, 0.0)


SOLVERS: dict[str, Callable[[Problem], np.ndarray]] = {
    "barrier": barrier,
    "cvxpy": _cvxpy,
}
