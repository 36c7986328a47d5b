"""Randomised upper bounds on ‖B_ji‖: Lanczos from fresh random starts.

Let A be BᵀB or BBᵀ, of order n, u an eigenvector of its largest eigenvalue λ, and b a
start drawn uniformly from the sphere. The steps from b prove λ ≤ x, rounding included
(`recurrence.py`), unless b has hardly any part along u, and

    P[|⟨u, b⟩| ≤ τ] ≤ √(2n/π)·τ.

Chance is in the start alone, which must not depend on A: it is drawn anew for every
bound, never warm. What the steps prove holds after each of them, so that they may end as
soon as it is precise enough.

Rounding hides parts that are smaller than some 1e-9, so that one start cannot be as
certain as wanted. Several starts fail independently of each other: with s of them, each
may fail with the s-th root of the probability, and the largest of their bounds holds.

How many steps that takes at most is known before: P[θ_k < (1 − ε)·λ] ≤
1.648·√n·exp(−√ε(2k − 1)) for the largest Ritz value θ_k (Kuczyński and Woźniakowski
1992).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil, exp, inf, log, pi, sqrt
from typing import Any

from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair
from lipcert.norms.lanczos import order, run_lanczos
from lipcert.norms.lanczos_process import Process
from lipcert.norms.recurrence import Recurrence
from lipcert.progress import Report
from lipcert.rounding import UNDERFLOW, round_up
from lipcert.threads import own_threads, side_by_side

MOST_STEPS = 256
"""More would cost memory and time for orthogonalisation that few networks are worth."""
_SMALLEST_PROBABILITY = 1e-7
"""With which a single start may fail; less could not be told from rounding."""
_LARGEST_PART = 0.99
"""In one dimension, the part of a start along any vector is 1."""


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


def starts(probability: float) -> int:
    """How many starts together fail with this probability, if each may with `_SMALLEST_PROBABILITY` at least."""
    return max(1, ceil(log(probability) / log(_SMALLEST_PROBABILITY)))


@dataclass(frozen=True)
class Goal:
    """A bound that exceeds the norm by this inflation is precise enough; so are this many steps from every start."""

    inflation: float
    steps: int

    @classmethod
    def of(
        cls, network: Network, pair: Pair, inflation: float, probability: float
    ) -> Goal:
        """Steps that reach an inflation with this failure probability, but no more than `MOST_STEPS`."""
        # By theory; what is seen while iterating mostly ends before. See
        # `Ritz.reaches`.
        single = probability ** (1 / starts(probability))
        steps = required_steps(order(network, pair), eigenvalue_gap(inflation), single)
        return cls(inflation, min(steps, MOST_STEPS))


@dataclass(frozen=True)
class Ritz:
    """A value that a norm reaches, and what Lanczos steps from one or more starts prove about it."""

    value: float
    recurrences: tuple[Recurrence, ...]
    probability: float
    """With which the bound may fail."""
    component: float
    """τ: unless it fails, one of the starts has more than this along the eigenvector."""

    @classmethod
    def of_record(
        cls,
        pair: Pair,
        record: Mapping[str, Any],
        goals: Mapping[Pair, Goal],
        probability: float,
    ) -> Ritz | None:
        """What was kept, if it is as precise and as certain as wanted."""
        # Records of proofs are in the same files, and have other figures.
        if "component" not in record or record["probability"] > probability:
            return None
        # Fewer starts fail in other events than more do: to take one or the other would
        # be a choice that chance can spoil.
        if len(record["recurrences"]) != starts(probability):
            return None
        recurrences = []
        for kept in record["recurrences"]:
            alpha, beta, lost = (
                tuple(kept[name]) for name in ("alpha", "beta", "lost")
            )
            recurrences.append(Recurrence(alpha, beta, lost, kept["unit"]))
        ritz = cls(
            record["value"],
            tuple(recurrences),
            record["probability"],
            record["component"],
        )
        return ritz if ritz.reaches(goals[pair]) else None

    def reaches(self, goal: Goal) -> bool:
        """Whether every start is precise enough, or has made all of its steps."""
        wanted = (1 + goal.inflation) * self.value
        wanted *= wanted
        for recurrence in self.recurrences:
            # How large the errors of products are turns out when all norms are there.
            # They hardly count.
            hidden = recurrence.hidden(wanted / recurrence.unit, 0.0)
            enough_steps = len(recurrence.alpha) >= goal.steps
            if not (hidden <= self.component or enough_steps):
                return False
        return True

    def upper(self, error: float) -> float:
        """A bound on the norm of the exact matrix, if products have this error."""
        if not self.value < inf:
            return inf
        largest = 0.0
        for recurrence in self.recurrences:
            eigenvalue = recurrence.largest_eigenvalue(
                self.component, error, self.value * self.value
            )
            largest = max(largest, eigenvalue)
        # Eigenvalues are those of BᵀB or BBᵀ: their roots are norms of B.
        return round_up(sqrt(largest) + UNDERFLOW)


def bound_by_lanczos(
    network: Network,
    goals: Mapping[Pair, Goal],
    probability: float,
    seed: int,
    progress: Report,
    at_once: int = 1,
) -> dict[Pair, Ritz]:
    """Bounds that reach their goals, each of which fails with at most this probability.

    So many starts run side by side; the bounds do not depend on it.
    """
    count = starts(probability)
    steps = {pair: goal.steps for pair, goal in goals.items()}

    def evidence(pair: Pair, process: Process) -> Ritz:
        component = _component(order(network, pair), probability ** (1 / count))
        value = sqrt(process.ritz())
        return Ritz(value, (process.recurrence(),), probability, component)

    def enough(pair: Pair, process: Process) -> bool:
        return evidence(pair, process).reaches(goals[pair])

    def run(start: int, report: Report) -> dict[Pair, Ritz]:
        # The bases of the processes are gone when it returns.
        processes = run_lanczos(network, steps, (seed, start), report, enough)
        return {pair: evidence(pair, process) for pair, process in processes.items()}

    found: dict[Pair, Ritz] = {}
    for first in range(0, count, at_once):
        some = range(first, min(first + at_once, count))

        def report(done: float, before: int = first, here: int = len(some)) -> None:
            progress((before + here * done) / count)

        for made in side_by_side([partial(run, start) for start in some], report):
            for pair, ritz in made.items():
                found[pair] = _both(found[pair], ritz) if pair in found else ritz
    return found


def _component(size: int, probability: float) -> float:
    """τ such that a start of this size has less of one direction with at most this probability: √(2n/π)·τ."""
    return min(probability / sqrt(2 / pi * size), _LARGEST_PART)


def starts_at_once(network: Network, probability: float) -> int:
    """How many of the starts run side by side: as many as there are threads for them."""
    threads = own_threads() if network.device.type == "cpu" else 1
    return min(starts(probability), threads)


def _both(first: Ritz, second: Ritz) -> Ritz:
    """What the starts of both prove: the norm reaches the larger value."""
    recurrences = first.recurrences + second.recurrences
    value = max(first.value, second.value)
    return Ritz(value, recurrences, first.probability, first.component)
