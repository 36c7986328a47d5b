"""Randomised upper bounds on ‖B_ji‖: Lanczos from fresh random starts.

Let A be symmetric, positive semidefinite and of order n, and b a start drawn uniformly
from the sphere. After k steps the polynomial χ(x) = (x − θ_1)⋯(x − θ_k) of the Ritz
values satisfies ‖χ(A) b‖ = β_1⋯β_k. Let u be an eigenvector of the largest eigenvalue
λ. Its part of χ(A) b is χ(λ)·⟨u, b⟩, so

    χ(λ) ≤ β_1⋯β_k / |⟨u, b⟩|,    P[|⟨u, b⟩| ≤ τ] ≤ √(2n/π)·τ.

χ grows beyond θ_k, so the x > θ_k with χ(x) = β_1⋯β_k/τ is a bound on λ, except with
that probability. Chance is in the start alone, which must not depend on A: it is drawn
anew for every bound, never warm. The inequality then holds after every step, so that
steps may end as soon as it is precise enough.

How many steps that takes at most is known before: P[θ_k < (1 − ε)·λ] ≤
1.648·√n·exp(−√ε(2k − 1)) (Kuczyński and Woźniakowski 1992).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, exp, inf, log, pi, sqrt

import numpy as np

from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair
from lipcert.norms.kept import Record
from lipcert.norms.lanczos import Process, order, run_lanczos
from lipcert.progress import Report
from lipcert.rounding import UNDERFLOW, round_up

MOST_STEPS = 256
"""More would cost memory and time for orthogonalisation that few networks are worth."""
_BISECTIONS = 100
_SMALLEST = 1e-300
_HIDDEN = 1e-3
"""The part of the largest eigenvalue that a numerically early end can hide."""


def failure_probability(n: int, steps: int, epsilon: float) -> float:
    """The Kuczyński–Woźniakowski bound on P[θ_k < (1 − ε)·λ_max] for order n; zero once the steps exhaust the space."""
    if steps >= n:
        return 0.0
    return min(1.0, 1.648 * sqrt(n) * exp(-sqrt(epsilon) * (2 * steps - 1)))


def required_steps(n: int, epsilon: float, probability: float) -> int:
    """The smallest number of steps whose failure probability is at most `probability`."""
    # 1.648·√n·exp(−√ε(2k − 1)) ≤ probability, solved for k.
    steps = ceil((log(1.648 * sqrt(n) / probability) / sqrt(epsilon) + 1) / 2)
    return max(1, min(n, steps))


def eigenvalue_gap(inflation: float) -> float:
    """ε for eigenvalues such that 1/√(1 − ε) = 1 + inflation for norms."""
    return 1 - (1 + inflation) ** -2


@dataclass(frozen=True)
class Goal:
    """A bound that exceeds the norm by this inflation is precise enough; so are this many steps."""

    inflation: float
    steps: int

    @classmethod
    def of(
        cls, network: Network, pair: Pair, inflation: float, probability: float
    ) -> Goal:
        """Steps that reach an inflation with this failure probability, but no more than `MOST_STEPS`."""
        # By theory; what is seen while iterating mostly ends before. See
        # `Ritz.reaches`.
        steps = required_steps(
            order(network, pair), eigenvalue_gap(inflation), probability
        )
        return cls(inflation, min(steps, MOST_STEPS))


@dataclass(frozen=True)
class Ritz:
    """A value that a norm reaches, and a bound on it for exact products, after some steps of Lanczos."""

    value: float
    bound: float
    steps: int
    probability: float
    """With which the bound may fail."""
    component: float
    """τ: unless it fails, the start has more than this along the eigenvector."""

    @classmethod
    def of_record(
        cls, pair: Pair, record: Record, goals: Mapping[Pair, Goal], probability: float
    ) -> Ritz | None:
        """What was kept, if it is as precise and as certain as wanted."""
        # Records of proofs are in the same files, and have other figures.
        if "component" not in record or record["probability"] > probability:
            return None
        kept = cls(
            record["value"],
            record["bound"],
            int(record["steps"]),
            record["probability"],
            record["component"],
        )
        return kept if kept.reaches(goals[pair]) else None

    def reaches(self, goal: Goal) -> bool:
        return (
            self.bound <= (1 + goal.inflation) * self.value or self.steps >= goal.steps
        )

    def upper(self, error: float) -> float:
        """A bound on the norm of the exact matrix, if products have this error.

        With full reorthogonalisation, products that are inexact by a relative error η
        act like a matrix perturbed by √k·η; the Chebyshev polynomial behind the bound
        has derivative k², so the allowance is k²·√k·η.
        """
        if self.value == 0.0:
            # A b vanishes, but for errors and for what underflows: ‖B‖²τ ≤ ‖A b‖ ≤
            # 2‖B‖·error + 1e-300.
            return round_up(
                4 * error / self.component + sqrt(2e-300 / self.component), 8
            )
        allowance = float(self.steps**2.5) * (2 * error / self.value) + 1e-12
        # Also NaN. Beyond first order, the perturbation argument says nothing.
        if not allowance < 1:
            return inf
        return round_up(self.bound * (1 + allowance) + UNDERFLOW)


def largest_eigenvalue(process: Process, component: float) -> float:
    """The x with χ(x) = β_1⋯β_k/τ: a bound on λ if the start has this component τ along its eigenvector, or more.

    Where the basis is one of the whole space, chance plays no part. A process that ends
    before, because what is left is rounding, may have missed what is below its
    resolution; see `_HIDDEN`.
    """
    if process.overflows():
        return inf
    values = process.ritz_values()
    top = float(values[-1])
    if top <= 0.0:
        return 0.0
    if process.complete:  # T is A in another basis, whatever the start was
        return process.unit * top * (1 + _HIDDEN)
    # log(β_1⋯β_k/τ): logarithms, for products of hundreds of β under- and overflow.
    allowed = process.log_residual() - log(component)
    # χ(x) ≥ (x − θ_k)^k, so the solution lies within exp(allowed/k) of θ_k.
    low, high = top, top + exp(allowed / process.steps)
    for _ in range(_BISECTIONS):
        # log χ grows beyond θ_k, and `high` stays where it is at least what is allowed:
        # never below the root.
        middle = (low + high) / 2
        if np.log(np.maximum(middle - values, _SMALLEST)).sum() < allowed:
            low = middle
        else:
            high = middle
    if process.exhausted:
        high = max(high, top * (1 + _HIDDEN))
    return process.unit * high


def bound_by_lanczos(
    network: Network,
    goals: Mapping[Pair, Goal],
    probability: float,
    seed: int,
    progress: Report,
) -> dict[Pair, Ritz]:
    """Bounds that reach their goals, each of which fails with at most this probability."""

    def bounded(pair: Pair, process: Process) -> Ritz:
        # τ such that √(2n/π)·τ is the probability.
        component = probability / sqrt(2 / pi * order(network, pair))
        # Eigenvalues are those of BᵀB or BBᵀ: their roots are norms of B.
        bound = sqrt(largest_eigenvalue(process, component))
        return Ritz(sqrt(process.ritz()), bound, process.steps, probability, component)

    def enough(pair: Pair, process: Process) -> bool:
        return bounded(pair, process).reaches(goals[pair])

    steps = {pair: goal.steps for pair, goal in goals.items()}
    processes = run_lanczos(network, steps, seed, progress, enough)
    return {pair: bounded(pair, process) for pair, process in processes.items()}
