"""LipSDP (Fazlyab et al. 2019) for any DAG: the best constant that multipliers of the slope restrictions prove.

In the loop-transformed network a difference x of inputs causes differences w_i = ψ_i(z_i), |w_i| ≤ |z_i|, with
z_j = B_j0 x + Σ_{i<j} B_ji w_i, and y = z_{n+1} at the output. With multipliers t ≥ 0,
one per coordinate, or one per site that mixes coordinates, |y|² ≤ ρ|x|² holds if

    P(ρ, t)  =  ρ E_0ᵀE_0 + Σ_i (E_iᵀT_iE_i − Z_iᵀT_iZ_i) − CᵀC  ⪰  0,

where E_i, Z_i and C pick w_i, z_i and y from v = (x, w_1, …, w_n). One choice of t gives LipLT, the best is no worse.
Multipliers from a solver are only a proposal: ρ is derived from them, and P ⪰ 0 is proved by Cholesky. In the code w_i
and z_i are scaled by LipLT's constants m_i, so that all are about |x|.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import frexp, inf, ldexp, sqrt

import numpy as np
import torch
from torch import Tensor

from lipcert.bounds.inequality import KAPPA, SOLVERS, TINY, Problem, Unsolved, prove
from lipcert.bounds.recursion import bound_between, bound_prefix, norm_matrix
from lipcert.bounds.targets import find_target
from lipcert.errors import NonFiniteError, OptionError, SolverError, TooLargeError, check_choice
from lipcert.network.normal_form import Network
from lipcert.network.rewrites import liplt_lines, loop_transform
from lipcert.network.sweep import Pair, Sweep
from lipcert.norms.gram import all_matrices, bound_matrix_norm, bound_spectral_norm
from lipcert.norms.product_errors import ProductErrors
from lipcert.progress import Progress, no_progress
from lipcert.rounding import UNDERFLOW, gamma, round_up

TARGETS = ("network", "per-class", "pairwise")
_RANK = 1e-12  # directions of the input that count less than this are left to the error bound
_ACCURACY = 1e-4  # of what is called LipSDP, relative to ρ
_NOTHING = 1e20 * UNDERFLOW  # LipLT of an output that does not depend on the input
_ROUNDOFF = 1e-3  # if errors are a larger part of the maps to an output, it is zero but for rounding
_DEAD = 1e-12  # the least multiplier to begin with, of sites that do not count


@torch.no_grad()
def lipsdp_constants(
    network: Network,
    target: str = "network",
    *,
    pairs: Sequence[Pair] | None = None,
    limit: int = 2000,
    solver: str = "barrier",
    progress: Progress = no_progress,
) -> Tensor:
    """Guaranteed upper bounds on l2 Lipschitz constants by LipSDP, for a float64 network in eval mode.

    Args:
        network: the trace of a model in float64.
        target: "network" gives (), "per-class" (K,), "pairwise" (K, K).
        pairs: the pairs of classes to solve for, of the target pairwise; the others get infinity.
        limit: the largest order of the matrix inequality. Time grows with its cube, memory with its square.
        solver: "barrier", our own, or "cvxpy" (Clarabel), to check it: minutes for order 80.
        progress: called with what is being done and the fraction done.

    Raises:
        SolverError: the solver stopped before the optimum, so that its value is not LipSDP.
    """
    check_choice("target", target, TARGETS)
    check_choice("solver", solver, tuple(SOLVERS))
    if network.dtype != torch.float64:
        raise OptionError(f"the network is in {network.dtype}; trace model.double()")
    wanted = _wanted_pairs(pairs, target, network)
    system = _System(loop_transform(network, liplt_lines(network, up=True)), limit, progress)
    if target == "network":
        return torch.tensor(_constant(system, None, solver), dtype=torch.float64)
    jobs = find_target(target).functionals(network.classes)
    if wanted is not None:
        jobs = [job for job in jobs if tuple(job[0][0]) in wanted]
    values = torch.full(find_target(target).shape(network.classes), inf, dtype=torch.float64)
    if values.dim() == 2:
        values.fill_diagonal_(0.0)
    for count, (place, weights) in enumerate(jobs):
        values[place] = _constant(system, weights.numpy(), solver)
        progress("semidefinite programs", (count + 1) / len(jobs))
    return values


def _wanted_pairs(pairs: Sequence[Pair] | None, target: str, network: Network) -> set[Pair] | None:
    """The pairs of classes a < b to solve for; None for all."""
    if pairs is None:
        return None
    if target != "pairwise":
        raise OptionError(f"pairs= belongs to target='pairwise', not to {target!r}")
    wanted = set()
    for pair in pairs:
        a, b = sorted(pair)
        if not 0 <= a < b < network.classes:
            raise OptionError(f"pairs= must name two different classes of 0..{network.classes - 1} each")
        wanted.add((a, b))
    return wanted


class _System:
    """The maps B_ji in reduced and scaled coordinates, and everything else that all targets share."""

    def __init__(self, network: Network, limit: int, progress: Progress) -> None:
        self.last = last = network.depth + 1
        self.sizes = [network.out_size(i) for i in range(last)]
        self.heights = [network.in_size(j) for j in range(1, last)]
        self.single = [not (site.slope and site.slope.elementwise) for site in network.sites[1:-1]]
        _check_size(sum(self.sizes[1:]) + 1, limit)
        self._read_maps(network, progress)
        self._reduce_input()
        _check_size(sum(self.sizes), limit)
        pairs = [pair for pair in self.norms if pair[0] < last]
        values = torch.tensor([self.norms[pair] for pair in pairs], dtype=torch.float64)
        self.prefix = (bound_prefix(norm_matrix(pairs, values, last)) + UNDERFLOW).tolist()
        self.scales = [1.0, *map(_power_of_two, self.prefix[1:])]
        self.blocks = {(j, i): self._scale(i, self.maps[j, i], self.errors[j, i]) for j, i in pairs}

    def _read_maps(self, network: Network, progress: Progress) -> None:
        """All maps as matrices, bounds on the Frobenius norms of their errors, and on their norms."""
        joined = Sweep(network, self.last).pairs
        self.maps = all_matrices(network, joined, progress)
        self.errors: dict[Pair, float] = {}
        errors = ProductErrors(network)
        for j, i in sorted(joined, key=lambda pair: pair[0] - pair[1]):
            self.errors[j, i] = round_up(sqrt(self.sizes[i]) * errors.error((j, i)))
            norm = bound_matrix_norm(self.maps[j, i].T) + self.errors[j, i]
            if not norm < inf:
                raise NonFiniteError(f"the map between sites {i} and {j} is too large or not a number")
            errors.know((j, i), norm)
        self.norms = errors.known

    def _reduce_input(self) -> None:
        """An orthonormal basis of the directions of the input that count; `stretch` bounds its norm."""
        self.basis: np.ndarray | None = None
        self.stretch = 1.0
        rows = [self.maps[j, 0] / (self.norms[j, 0] + UNDERFLOW) for j, i in self.maps if i == 0]
        if not rows:
            rows = [np.zeros((1, self.sizes[0]))]
        _, weights, directions = np.linalg.svd(np.concatenate(rows), full_matrices=False)
        rank = max(1, int((weights > _RANK * weights[0]).sum()))
        if rank < self.sizes[0]:
            self.basis = directions[:rank].T
            self.stretch = bound_spectral_norm(directions[:rank])
            self.sizes[0] = rank

    def _scale(self, i: int, block: np.ndarray, error: float) -> tuple[np.ndarray, float]:
        """κ·B_ji in the coordinates of v, before z_j is scaled, and a bound on its error."""
        if i == 0 and self.basis is not None:
            reduced = block @ self.basis
            roundoff = gamma(self.basis.shape[1] + 4) * float(np.linalg.norm(reduced) * np.linalg.norm(self.basis))
            error += 2 * roundoff + float(np.linalg.norm(block - reduced @ self.basis.T)) * (1 + 1e-9)
            block = reduced
        scaled = block * (KAPPA * self.scales[i])
        error = self.scales[i] * error + gamma(8) * float(np.linalg.norm(scaled))
        return scaled, error * (1 + 1e-8)

    def problem(self, weights: np.ndarray | None) -> tuple[Problem, float, float]:
        """The problem for the output, or for a weighted sum of its entries; the scale of its result; LipLT."""
        last, blocks, norms = self.last, dict(self.blocks), dict(self.norms)
        height, constant = 0, 0.0
        for i in range(last):
            if (last, i) not in self.maps:
                continue
            block, error = self.maps[last, i], self.errors[last, i]
            if weights is not None:
                block, error = weights @ block, 2 * error
                norms[last, i] = bound_matrix_norm(block) * (1 + gamma(4)) + error
            blocks[last, i] = self._scale(i, block, error)
            height = block.shape[0]
            constant += norms[last, i] * self.prefix[i]
        constant += UNDERFLOW
        scales = [*self.scales, _power_of_two(constant)]
        heights = [*self.heights, height]
        columns, rows = np.cumsum([0, *self.sizes]), np.cumsum([0, 0, *heights])
        z = np.zeros((rows[-1], columns[-1]))
        drift, sizes = np.zeros((last + 1, last + 1)), np.zeros((last + 1, last + 1))
        for (j, i), (block, error) in blocks.items():
            z[rows[j] : rows[j + 1], columns[i] : columns[i + 1]] = block / scales[j]
            drift[j, i] = error / scales[j]
            sizes[j, i] = scales[i] / scales[j] * norms[j, i]
        coordinate, row, start = self._multipliers(_liplt(sizes), height)
        sites = np.repeat(np.arange(1, last + 1), heights), np.repeat(np.arange(last), self.sizes)
        return Problem(z, coordinate, row, *sites, drift, start), scales[last], constant * (1 + 1e-9)

    def _multipliers(self, liplt: np.ndarray, height: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The entry of (ρ, t, 1) of each column of P and of each row of Z, and the first values of (ρ, t).

        For two inputs, a site of two coordinates, one of three that it mixes, and one output: columns 0 0 1 2 3 3 3,
        rows 1 2 3 3 3 4.
        """
        columns, rows, start = [0] * self.sizes[0], [], [liplt[0]]
        for i, single in enumerate(self.single, start=1):
            first, size = len(start), self.sizes[i]
            if single:
                columns += [first] * size
                rows += [first] * self.heights[i - 1]
                start.append(liplt[i])
            else:
                columns += range(first, first + size)
                rows += range(first, first + size)
                start += [liplt[i]] * size
        rows += [len(start)] * height
        return np.array(columns), np.array(rows), np.array(start)


def _constant(system: _System, weights: np.ndarray | None, solver: str) -> float:
    """The bound for one output: LipSDP, or LipLT if rounding leaves that smaller. An error if LipSDP is not reached."""
    problem, scale, liplt = system.problem(weights)
    if liplt < _NOTHING or problem.drift[-1].sum() > _ROUNDOFF:
        return liplt
    try:
        proposal = SOLVERS[solver](problem)
        lower = proposal[0]
    except Unsolved as stopped:
        proposal, lower = stopped.proposal, stopped.lower
    rho = prove(problem, proposal, system.stretch)
    value = min(liplt, round_up(scale * sqrt(rho), 4) + UNDERFLOW)
    if rho * (1 - _ACCURACY) <= lower + TINY * problem.start[0]:
        return value
    excess = 1 - scale * sqrt(max(lower, 0.0)) / value
    other = "cvxpy" if solver == "barrier" else "barrier"
    raise SolverError(
        f"LipSDP was not reached: the solver's multipliers and LipLT prove {value:.6g}, LipSDP may be up to "
        f"{excess:.2%} smaller; use method='rescaled' or method='best', or lipsdp_constants(…, solver={other!r})"
    )


def _liplt(norms: np.ndarray) -> np.ndarray:
    """(ρ, t_1, …, t_n) of LipLT with strict inequalities: t_i = m_{n+1}·T_i/m_i, larger by a factor from site to site.

    They are feasible, for (Σ_i ‖B_ji‖|w_i|)² ≤ m_j Σ_i ‖B_ji‖|w_i|²/m_i.
    """
    last = len(norms) - 1
    resolvent = bound_between(torch.from_numpy(norms)).numpy()
    prefix, tails = np.maximum(resolvent[:, 0], _DEAD), np.maximum(resolvent[last], _DEAD)
    growth = (1 + 1 / last) ** np.arange(last, 0, -1)
    return np.asarray(prefix[last] * tails[:last] / prefix[:last] * growth)


def _power_of_two(value: float) -> float:
    return ldexp(1.0, frexp(value)[1])


def _check_size(order: int, limit: int) -> None:
    if order > limit:
        raise TooLargeError(
            f"LipSDP needs a matrix inequality of order {order} or more for this network, the limit is {limit}; "
            "use method='rescaled', or a larger limit="
        )
