"""LipSDP (Fazlyab et al. 2019) for any DAG: the best constant that multipliers of the slope restrictions prove.

In the loop-transformed network a difference x of inputs causes differences w_i =
ψ_i(z_i), |w_i| ≤ |z_i|, with z_j = B_j0 x + Σ_{i<j} B_ji w_i, and y = z_{n+1} at the
output. With multipliers t ≥ 0, one per coordinate, or one per site that mixes
coordinates, |y|² ≤ ρ|x|² holds if

    P(ρ, t)  =  ρ E_0ᵀE_0 + Σ_i (E_iᵀT_iE_i − Z_iᵀT_iZ_i) − CᵀC  ⪰  0,

where E_i, Z_i and C pick w_i, z_i and y from v = (x, w_1, …, w_n). One choice of t
gives LipLT, the best is no worse. Multipliers from a solver are only a proposal: ρ is
derived from them, and P ⪰ 0 is proved by Cholesky. In the code w_i and z_i are scaled
by LipLT's constants m_i, so that all are about |x|.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, sqrt

import numpy as np
import torch
from torch import Tensor

from lipcert.bounds.ellipsoids import Ellipsoids, Maps, sharpened
from lipcert.bounds.inequality import prove
from lipcert.bounds.semidefinite_solvers import SOLVERS, TINY, Unsolved
from lipcert.bounds.semidefinite_system import System
from lipcert.bounds.targets import TARGETS, Target, find_target
from lipcert.errors import OptionError, SolverError, check_choice
from lipcert.network.normal_form import Network
from lipcert.network.rewrites import liplt_lines, loop_transform
from lipcert.network.sweep import Pair
from lipcert.progress import Progress, Report, no_progress
from lipcert.rounding import UNDERFLOW, round_up

_ACCURACY = 1e-4  # of what is called LipSDP, relative to ρ
_NOTHING = 1e20 * UNDERFLOW  # LipLT of an output that does not depend on the input
_ROUNDOFF = 1e-3  # if errors are a larger part of the maps to an output, it is zero but for rounding


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
        target: "network" gives (), "per-class" (K,), "pairwise" (K, K); any other one that the loop transformation may
            cross the last layer for has values where its functionals are, and infinity elsewhere.
        pairs: the pairs of classes to solve for, of the target pairwise; the others get infinity.
        limit: the largest order of the matrix inequality. Time grows with its cube, memory with its square.
        solver: "barrier", our own, or "cvxpy" (Clarabel), to check it: minutes for order 80.
        progress: called with what is being done and the fraction done.

    Raises:
        SolverError: the solver stopped before the optimum, so that its value is not LipSDP.
    """
    check_choice("solver", solver, tuple(SOLVERS))
    _check_options(network, target)
    wanted = _wanted_pairs(pairs, target, network)
    system = System(
        loop_transform(network, liplt_lines(network, up=True)), limit, progress
    )
    # The maps are the same for all functionals: only the rows of the output differ.
    solve = partial(_constant, system, solver=solver)
    return _each_functional(
        network,
        find_target(target),
        solve,
        wanted,
        partial(progress, "semidefinite programs"),
    )


@torch.no_grad()
def constants_of_ellipsoids(
    network: Network,
    target: str,
    shared: Ellipsoids,
    *,
    steps: int = 0,
    lr: float = 0.05,
    limit: int = 8192,
    progress: Progress = no_progress,
) -> Tensor:
    """Guaranteed upper bounds on l2 Lipschitz constants that the multipliers of ellipsoids prove; see `ellipsoids`.

    Each functional begins with the shared ones and has so many steps of its own;
    `network` is in float64, with sorted pairs apart.
    """
    _check_options(network, target)
    # To search in, rounded. What is proved is the inequality of the system, whose radii
    # are rounded up.
    maps = Maps.of(loop_transform(network, liplt_lines(network)))
    system = System(
        loop_transform(network, liplt_lines(network, up=True)), limit, progress
    )

    def solve(weights: np.ndarray | None) -> float:
        if weights is None:
            return _proved_constant(system, None, shared)
        own = maps.weighted(torch.from_numpy(weights).to(maps.gram))
        return _proved_constant(system, weights, sharpened(own, shared, steps, lr))

    return _each_functional(
        network, find_target(target), solve, None, partial(progress, "proofs")
    )


def _each_functional(
    network: Network,
    target: Target,
    solve: Callable[[np.ndarray | None], float],
    wanted: set[Pair] | None,
    report: Report,
) -> Tensor:
    """The values of a target: `solve` for the weights of each functional, or for the whole output."""
    if target.whole_output:
        return torch.tensor(solve(None), dtype=torch.float64)
    jobs = target.functionals(network.classes)
    if wanted is not None:
        # job[0] is the place ([a, b], [b, a]), so its first half is the pair.
        jobs = [job for job in jobs if tuple(job[0][0]) in wanted]
    # Infinity is a valid bound of what was not asked for, and loses every minimum.
    values = torch.full(target.shape(network.classes), inf, dtype=torch.float64)
    if target.name == "pairwise":
        # f_a − f_a, which is no functional of the target.
        values.fill_diagonal_(0.0)
    for count, (place, weights) in enumerate(jobs):
        values[place] = solve(weights.numpy())
        report((count + 1) / len(jobs))
    return values


def _check_options(network: Network, target: str) -> None:
    check_choice(
        "target",
        target,
        [name for name, known in TARGETS.items() if known.transforms_last],
    )
    if network.dtype != torch.float64:
        raise OptionError(f"the network is in {network.dtype}; trace model.double()")


def _wanted_pairs(
    pairs: Sequence[Pair] | None, target: str, network: Network
) -> set[Pair] | None:
    """The pairs of classes a < b to solve for; None for all."""
    if pairs is None:
        return None
    if target != "pairwise":
        raise OptionError(f"pairs= belongs to target='pairwise', not to {target!r}")
    wanted = set()
    for pair in pairs:
        a, b = sorted(pair)
        if not 0 <= a < b < network.classes:
            raise OptionError(
                "pairs= must name two different classes of "
                f"0..{network.classes - 1} each"
            )
        wanted.add((a, b))
    return wanted


def _proved_constant(
    system: System, weights: np.ndarray | None, ellipsoids: Ellipsoids
) -> float:
    """The bound for one output that ρ = K and T_i = ρ·U_i⁻¹ prove, or LipLT, in the units of the system."""
    problem, scale, liplt = system.problem(weights)
    # Units of an output that is zero but for rounding would blow its errors up to the
    # size of the maps.
    if liplt < _NOTHING or problem.drift[-1].sum() > _ROUNDOFF:
        return liplt
    # In the units of the system: the output is divided by `scale`, z_i and w_i by
    # `unit`.
    rho = float(torch.linalg.eigvalsh(ellipsoids.output)[-1]) / scale**2
    proposal = [np.array([rho])]
    for u, unit in zip(ellipsoids.multipliers, system.units[1:], strict=True):
        proposal.append(rho * unit**2 / u.cpu().numpy())
    # U_i may be too small for P ⪰ 0 by a rounding: `prove` moves it inwards. Whatever
    # is proved holds, LipLT as well.
    proved = prove(problem, np.concatenate(proposal), system.stretch)
    return min(liplt, round_up(scale * sqrt(proved), 4) + UNDERFLOW)


def _constant(system: System, weights: np.ndarray | None, solver: str) -> float:
    """The bound for one output: LipSDP, or LipLT if rounding leaves that smaller. An error if LipSDP is not reached."""
    problem, scale, liplt = system.problem(weights)
    if liplt < _NOTHING or problem.drift[-1].sum() > _ROUNDOFF:
        return liplt
    try:
        proposal = SOLVERS[solver](problem)
        # A solver that converged has nearly the optimal ρ; one that stopped says how
        # far down that may be.
        lower = proposal[0]
    except Unsolved as stopped:
        proposal, lower = stopped.proposal, stopped.lower
    rho = prove(problem, proposal, system.stretch)
    value = min(liplt, round_up(scale * sqrt(rho), 4) + UNDERFLOW)
    # The value is valid in any case. It is called LipSDP only if it is the optimum.
    if rho * (1 - _ACCURACY) <= lower + TINY * problem.start[0]:
        return value
    excess = 1 - scale * sqrt(max(lower, 0.0)) / value
    other = "cvxpy" if solver == "barrier" else "barrier"
    raise SolverError(
        "LipSDP was not reached: the solver's multipliers and LipLT prove "
        f"{value:.6g}, LipSDP may be up to "
        f"{excess:.2%} smaller; use method='rescaled' or method='best', or "
        f"lipsdp_constants(…, solver={other!r})"
    )
