"""LipSDP (Fazlyab et al. 2019) for any DAG: the best constant that multipliers of the slope restrictions prove.

In the loop-transformed network a difference x of inputs causes differences w_i = ψ_i(z_i), |w_i| ≤ s_i|z_i|, with
z_j = B_j0 x + Σ_{i<j} B_ji w_i, and y = z_{n+1} at the output. With multipliers t ≥ 0,
one per coordinate or one per site, |y|² ≤ ρ|x|² holds if

    P(ρ, t)  =  ρ E_0ᵀE_0 + Σ_i (E_iᵀT_iE_i − s_i² Z_iᵀT_iZ_i) − CᵀC  ⪰  0,

where E_i, Z_i and C pick w_i, z_i and y from v = (x, w_1, …, w_n). One choice of t gives LipLT, the best is no worse.
Multipliers from a solver are only a proposal: ρ is derived from them, and P ⪰ 0 is proved by Cholesky.

In the code s_i is part of the maps, and w_i and z_i are scaled by LipLT's constants m_i, so that all are about |x|.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import combinations
from math import frexp, inf, ldexp, sqrt
from typing import Any

import numpy as np
import torch
from scipy.linalg import cho_factor, cho_solve, lapack, solve_triangular
from scipy.sparse import csr_matrix
from torch import Tensor

from lipcert.errors import NonFiniteError, OptionError, TooLargeError, check_choice
from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair, Sweep
from lipcert.norms.certified import Progress, no_progress
from lipcert.norms.gram import bound_spectral_norm, dense_rows
from lipcert.norms.rounding import UNDERFLOW, ProductErrors, gamma, round_up

TARGETS = ("network", "per-class", "pairwise")
VARIANTS = ("neuron", "layer")
_GAP = 1e-7  # relative accuracy of ρ
_RANK = 1e-12  # directions of the input that count less than this are left to the error bound
_KAPPA = 1 + 2.0**-30  # |a + b|² ≤ κ²|a|² + κ²/(κ²−1)·|b|² separates the maps from their errors b
_YOUNG = 2.0**29 + 2
_DEAD = 1e-12  # the least multiplier to begin with, of sites that do not count
_STEPS = 300
_CENTRED = 0.25  # Newton decrement, squared


@torch.no_grad()
def lipsdp_constants(
    network: Network,
    target: str = "network",
    variant: str = "neuron",
    *,
    pairs: Sequence[tuple[int, int]] | None = None,
    limit: int = 2000,
    solver: str = "barrier",
    progress: Progress = no_progress,
) -> Tensor:
    """Guaranteed upper bounds on l2 Lipschitz constants by LipSDP, for a float64 network in eval mode.

    Args:
        network: the trace of a model in float64.
        target: "network" gives (), "per-class" (K,), "pairwise" (K, K).
        variant: "neuron", a multiplier per coordinate, or "layer", a multiplier per site. Sites that mix coordinates
            have one in either case.
        pairs: the pairs of classes to solve for, of the target pairwise; the others get infinity.
        limit: the largest order of the matrix inequality. Time grows with its cube, memory with its square.
        solver: "barrier", our own, or "cvxpy" (Clarabel), to check it: minutes for order 80.
        progress: called with what is being done and the fraction done.
    """
    check_choice("target", target, TARGETS)
    check_choice("variant", variant, VARIANTS)
    check_choice("solver", solver, tuple(SOLVERS))
    if pairs is not None and target != "pairwise":
        raise OptionError(f"pairs= belongs to target='pairwise', not to {target!r}")
    if network.dtype != torch.float64:
        raise OptionError(f"the network is in {network.dtype}; trace model.double()")
    classes = 1 if target == "network" else network.classes
    wanted = list(combinations(range(classes), 2)) if pairs is None else [(min(p), max(p)) for p in pairs]
    if any(not 0 <= a < b < classes for a, b in wanted):
        raise OptionError(f"pairs= must name two different classes of 0..{classes - 1} each")
    system = _System(network, variant, limit, progress)
    if target == "network":
        return torch.tensor(_constant(system, None, solver), dtype=torch.float64)
    unit = np.eye(classes)
    if target == "per-class":
        values = torch.empty(classes, dtype=torch.float64)
    else:
        values = torch.full((classes, classes), inf, dtype=torch.float64).fill_diagonal_(0.0)
    jobs = [(a, a) for a in range(classes)] if target == "per-class" else list(dict.fromkeys(wanted))
    for count, (a, b) in enumerate(jobs):
        progress("semidefinite programs", count / len(jobs))
        if target == "per-class":
            values[a] = _constant(system, unit[a : a + 1], solver)
        else:
            values[a, b] = values[b, a] = _constant(system, unit[a : a + 1] - unit[b : b + 1], solver)
    progress("semidefinite programs", 1.0)
    return values


@dataclass(frozen=True)
class _Problem:
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


class _System:
    """The maps B_ji in reduced and scaled coordinates, and everything else that all targets share."""

    def __init__(self, network: Network, variant: str, limit: int, progress: Progress) -> None:
        self.last = last = network.depth + 1
        self.sizes = [network.out_size(i) for i in range(last)]
        self.heights = [network.in_size(j) for j in range(1, last)]
        self.single = [variant == "layer" or not (s.slope and s.slope.elementwise) for s in network.sites[1:-1]]
        _check_size(sum(self.sizes[1:]) + 1, limit)
        sectors = [(float(c), float(s)) for c, s in network.sectors()]
        centres = [c for c, _ in sectors]
        self.radii = [s + gamma(2) * (abs(c) + s) if c else s for c, s in sectors]  # c and s are rounded
        joined = Sweep(network, [c != 0.0 for c in centres], last).pairs
        transposed: dict[Pair, np.ndarray] = {}
        for i in range(last):
            members = [pair for pair in joined if pair[1] == i]
            report = partial(progress, f"matrices {i + 1}/{last}")
            transposed |= dense_rows(network, ("push", i), members, centres, report)
        errors = ProductErrors(network, centres)
        self.maps: dict[Pair, np.ndarray] = {}
        self.errors: dict[Pair, float] = {}  # bounds on the Frobenius norms of the errors of the maps
        for pair in sorted(joined, key=lambda p: p[0] - p[1]):
            rows = transposed.pop(pair)
            self.maps[pair], self.errors[pair] = rows.T, round_up(sqrt(rows.shape[0]) * errors.error(pair))
            errors.know(pair, _norm(rows) + self.errors[pair])
            if not errors.known[pair] < inf:
                raise NonFiniteError(f"the map between sites {pair[1]} and {pair[0]} is too large or not a number")
        self.norms = errors.known
        self._reduce_input()
        _check_size(sum(self.sizes), limit)
        self.prefix = [1.0]
        for j in range(1, last):
            terms = (self.radii[i] * self.norms.get((j, i), 0.0) * self.prefix[i] for i in range(j))
            self.prefix.append(round_up(sum(terms) + UNDERFLOW, 4 * last))
        self.scales = [1.0, *(_power_of_two(m) for m in self.prefix[1:])]
        self.blocks = {(j, i): self._scale(i, self.maps[j, i], self.errors[j, i]) for j, i in joined if j < last}

    def _reduce_input(self) -> None:
        """An orthonormal basis of the directions of the input that count; `stretch` bounds its norm."""
        self.basis: np.ndarray | None = None
        self.stretch = 1.0
        parts = [self.maps[j, 0] / (self.norms[j, 0] + UNDERFLOW) for j, i in self.maps if i == 0]
        if not parts:
            parts = [np.zeros((1, self.sizes[0]))]
        _, weights, directions = np.linalg.svd(np.concatenate(parts), full_matrices=False)
        rank = max(1, int((weights > _RANK * weights[0]).sum()))
        if rank < self.sizes[0]:
            self.basis = directions[:rank].T
            self.stretch = bound_spectral_norm(directions[:rank])
            self.sizes[0] = rank

    def _scale(self, i: int, block: np.ndarray, error: float) -> tuple[np.ndarray, float]:
        """κ·s_i·B_ji in the coordinates of v, before z_j is scaled, and a bound on its error."""
        if i == 0 and self.basis is not None:
            reduced = block @ self.basis
            roundoff = gamma(self.basis.shape[1] + 4) * float(np.linalg.norm(reduced) * np.linalg.norm(self.basis))
            error += 2 * roundoff + float(np.linalg.norm(block - reduced @ self.basis.T)) * (1 + 1e-9)
            block = reduced
        scaled = block * (self.radii[i] * _KAPPA * self.scales[i])
        error = self.radii[i] * self.scales[i] * error + gamma(8) * float(np.linalg.norm(scaled))
        return scaled, error * (1 + 1e-8)

    def problem(self, weights: np.ndarray | None) -> tuple[_Problem, float, float]:
        """The problem for the output, or for a weighted sum of its entries; the scale of its result; LipLT."""
        last, blocks, norms = self.last, dict(self.blocks), dict(self.norms)
        for i in range(last):
            if (last, i) not in self.maps:
                continue
            block, error = self.maps[last, i], self.errors[last, i]
            if weights is not None:
                block, error = weights @ block, 2 * error
                norms[last, i] = _norm(block) * (1 + gamma(4)) + error
            blocks[last, i] = self._scale(i, block, error)
        constant = sum(self.radii[i] * norms.get((last, i), 0.0) * self.prefix[i] for i in range(last)) + UNDERFLOW
        scales = [*self.scales, _power_of_two(constant)]
        heights = [*self.heights, next(block.shape[0] for (j, _), (block, _) in blocks.items() if j == last)]
        columns, rows = np.cumsum([0, *self.sizes]), np.cumsum([0, 0, *heights])
        z = np.zeros((rows[-1], columns[-1]))
        drift, sizes = np.zeros((last + 1, last + 1)), np.zeros((last + 1, last + 1))
        for (j, i), (block, error) in blocks.items():
            z[rows[j] : rows[j + 1], columns[i] : columns[i + 1]] = block / scales[j]
            drift[j, i] = error / scales[j]
            sizes[j, i] = self.radii[i] * scales[i] / scales[j] * norms[j, i]
        start = _liplt(sizes)
        coordinate, row, values = [np.zeros(self.sizes[0], dtype=int)], [], [start[:1]]
        for i, single in enumerate(self.single, start=1):
            groups = sum(map(len, values)) + np.arange(1 if single else self.sizes[i])
            coordinate.append(np.broadcast_to(groups, self.sizes[i]))
            row.append(np.broadcast_to(groups, self.heights[i - 1]))
            values.append(np.full(len(groups), start[i]))
        row.append(np.full(heights[-1], sum(map(len, values))))
        sites = np.repeat(np.arange(1, last + 1), heights), np.repeat(np.arange(last), self.sizes)
        whole = [np.concatenate(parts) for parts in (coordinate, row, values)]
        return _Problem(z, whole[0], whole[1], *sites, drift, whole[2]), scales[last], constant * (1 + 1e-9)


def _constant(system: _System, weights: np.ndarray | None, solver: str) -> float:
    """The bound for one output: LipSDP, or LipLT where that is smaller or no multipliers could be found."""
    problem, scale, liplt = system.problem(weights)
    try:
        rho = _prove(problem, SOLVERS[solver](problem), system.stretch)
    except np.linalg.LinAlgError:
        rho = inf
    return min(liplt, round_up(scale * sqrt(rho), 4) + UNDERFLOW)


def _liplt(norms: np.ndarray) -> np.ndarray:
    """(ρ, t_1, …, t_n) of LipLT with strict inequalities: t_i = m_{n+1}·T_i/m_i, larger by a factor from site to site.

    They are feasible, for (Σ_i ‖B_ji‖|w_i|)² ≤ m_j Σ_i ‖B_ji‖|w_i|²/m_i.
    """
    last = len(norms) - 1
    prefix, tails = np.ones(last + 1), np.ones(last + 1)
    for j in range(1, last + 1):
        prefix[j] = max(float(norms[j, :j] @ prefix[:j]), _DEAD)
    for i in reversed(range(last)):
        tails[i] = max(float(norms[i + 1 :, i] @ tails[i + 1 :]), _DEAD)
    growth = (1 + 1 / last) ** np.arange(last, 0, -1)
    return np.asarray(prefix[last] * tails[:last] / prefix[:last] * growth)


def _barrier(problem: _Problem) -> np.ndarray:
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


def _cvxpy(problem: _Problem) -> np.ndarray:
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


SOLVERS: dict[str, Callable[[_Problem], np.ndarray]] = {"barrier": _barrier, "cvxpy": _cvxpy}


def _prove(problem: _Problem, proposal: np.ndarray, stretch: float) -> float:
    """A bound on |y|²/|x|² that the proposed multipliers prove, moved inwards as far as necessary; infinity if none."""
    proposal = np.nan_to_num(proposal, nan=0.0, posinf=0.0).clip(min=0.0)
    for share in (0.0, *10.0 ** np.arange(-10, 1)):
        x = (1 - share) * proposal + share * problem.start
        smallest = _smallest_rho(problem, x)
        x[0] = smallest * (1 + max(share, 1e-9)) + 1e-30
        if smallest < inf and (rest := _proved(problem, x)) < inf:
            return round_up(x[0] * stretch**2 + rest, 4)
    return inf


def _smallest_rho(problem: _Problem, x: np.ndarray) -> float:
    """The smallest ρ for these multipliers, by a Schur complement, rounded; infinity if there is none."""
    matrix = problem.matrix(np.append(0.0, x[1:]))
    r = int((problem.coordinate == 0).sum())
    inner, info = lapack.dpotrf(matrix[r:, r:], lower=1) if r < len(matrix) else (matrix[r:, r:], 0)
    if info != 0 or not np.isfinite(matrix).all():
        return inf
    half = solve_triangular(inner, matrix[r:, :r], lower=True) if r < len(matrix) else matrix[r:, :r]
    return max(float(np.linalg.eigvalsh(half.T @ half - matrix[:r, :r])[-1]), 0.0)


def _proved(problem: _Problem, x: np.ndarray) -> float:
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


def _norm(matrix: np.ndarray) -> float:
    """A proved bound on the spectral norm."""
    return bound_spectral_norm(matrix if matrix.shape[0] <= matrix.shape[1] else np.ascontiguousarray(matrix.T))


def _power_of_two(value: float) -> float:
    return ldexp(1.0, frexp(value)[1])


def _check_size(order: int, limit: int) -> None:
    if order > limit:
        raise TooLargeError(
            f"LipSDP needs a matrix inequality of order {order} or more for this network, the limit is {limit}; "
            "use method='rescaled', or a larger limit="
        )
