"""Randomised upper bounds on ‖B_ji‖: Lanczos from fresh random starts.

For a symmetric positive semidefinite A of order n and a start drawn uniformly from the sphere, the largest Ritz value
θ_k after k steps satisfies P[θ_k < (1 − ε)·λ_max] ≤ 1.648·√n·exp(−√ε(2k − 1)) (Kuczyński & Woźniakowski 1992). So
√(θ_k/(1 − ε)) is an upper bound on the norm, except with that probability. The start must be independent of A: it is
drawn anew for every bound, never warm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, exp, inf, log, sqrt

from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair
from lipcert.norms.kept import Record
from lipcert.norms.lanczos import order, run_lanczos
from lipcert.progress import Report
from lipcert.rounding import UNDERFLOW, round_up

MOST_STEPS = 256
"""More would cost memory and time for orthogonalisation that few networks are worth."""


def failure_probability(n: int, steps: int, epsilon: float) -> float:
    """The Kuczyński–Woźniakowski bound on P[θ_k < (1 − ε)·λ_max] for order n; zero once the steps exhaust the space."""
    if steps >= n:
        return 0.0
    return min(1.0, 1.648 * sqrt(n) * exp(-sqrt(epsilon) * (2 * steps - 1)))


def required_steps(n: int, epsilon: float, probability: float) -> int:
    """The smallest number of steps whose failure probability is at most `probability`."""
    steps = ceil((log(1.648 * sqrt(n) / probability) / sqrt(epsilon) + 1) / 2)
    return max(1, min(n, steps))


def eigenvalue_gap(inflation: float) -> float:
    """ε for eigenvalues such that 1/√(1 − ε) = 1 + inflation for norms."""
    return 1 - (1 + inflation) ** -2


@dataclass(frozen=True)
class Ritz:
    """A value that a norm reaches, and a bound on it for exact products, after some steps of Lanczos."""

    value: float
    bound: float
    steps: int
    probability: float
    """With which the bound may fail."""

    @classmethod
    def of_record(cls, pair: Pair, record: Record, steps: Mapping[Pair, int], probability: float) -> Ritz | None:
        """What was kept, if it is as precise and as certain as wanted."""
        if "steps" not in record or record["steps"] < steps[pair] or record["probability"] > probability:
            return None
        return cls(record["value"], record["bound"], int(record["steps"]), record["probability"])

    def upper(self, error: float) -> float:
        """A bound on the norm of the exact matrix, if products have this error.

        With full reorthogonalisation, products that are inexact by a relative error η act like a matrix perturbed by
        √k·η; the Chebyshev polynomial behind the bound has derivative k², so the allowance is k²·√k·η.
        """
        if self.value == 0.0:
            return error + UNDERFLOW
        allowance = float(self.steps**2.5) * (2 * error / self.value) + 1e-12
        if not allowance < 1:
            return inf
        return round_up(self.bound * (1 + allowance) + UNDERFLOW)


def steps_within(network: Network, pair: Pair, inflation: float, probability: float) -> int:
    """Steps for a bound that exceeds the norm by this inflation, but no more than `MOST_STEPS`."""
    n = order(network, pair)
    return min(required_steps(n, eigenvalue_gap(inflation), probability), MOST_STEPS)


def gap_left(n: int, steps: int, probability: float) -> float:
    """The ε that this many steps leave with the given probability; 1e-3 for what a numerically early end can hide."""
    if steps >= n:
        return 1e-3
    return float((log(1.648 * sqrt(n) / probability) / (2 * steps - 1)) ** 2)


def bound_by_lanczos(
    network: Network, steps: Mapping[Pair, int], probability: float, seed: int, progress: Report
) -> dict[Pair, Ritz]:
    """Bounds after so many steps, each of which fails with at most this probability."""
    results: dict[Pair, Ritz] = {}
    for pair, process in run_lanczos(network, steps, seed, progress).items():
        theta, epsilon = process.ritz(), gap_left(order(network, pair), steps[pair], probability)
        bound = sqrt(theta / (1 - epsilon)) if epsilon < 1 else inf
        results[pair] = Ritz(sqrt(theta), bound, steps[pair], probability)
    return results
