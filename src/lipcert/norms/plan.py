"""Before long work: which norms are proved and which are iterated, how long that takes, and how much memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter

import torch

from lipcert.errors import TooLargeError
from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair
from lipcert.norms import gram, lanczos
from lipcert.norms.budget import Guide, estimated, inflations, path_costs, weigh
from lipcert.norms.chained import chained_norms, tight
from lipcert.norms.norm_options import NormOptions
from lipcert.norms.randomised import Goal, starts
from lipcert.resources import shown_bytes

_LOG = logging.getLogger(__name__)
_SPENT = 0.98
"""The part of the inflation that is planned for: norms are estimated from below."""
_LEFT_TO_PRODUCTS = 0.1
"""The part of the inflation that norms without a bound of their own may weigh, all together."""
_NEGLIGIBLE = 1e-10
"""The same where every norm is proved."""
_USUAL_STEPS = 50
_LITTLE_WORK = 5e9
"""Multiplications that take a second or so: not worth a forecast."""
_ROWS = 8
"""Rows that are sent through the network to measure its speed, after one that warms it up."""


@dataclass(frozen=True)
class Plan:
    """Which norms are proved, and which are bounded by Lanczos, how precisely, each with this failure probability.

    chained: proved bounds that are known already, as products of norms of operations.
    reached: values that these norms reach.
    work: multiplications for each.
    memory: bytes that the largest of them takes.
    """

    chained: dict[Pair, float]
    reached: dict[Pair, float]
    proved: list[Pair]
    goals: dict[Pair, Goal]
    probability: float
    work: dict[Pair, float]
    memory: int

    @property
    def total(self) -> float:
        return max(sum(self.work.values()), 1.0)


def make_plan(
    network: Network,
    pairs: Sequence[Pair],
    last: int,
    options: NormOptions,
    guide: Guide | None,
) -> Plan:
    """Proofs for all norms if all are small enough; otherwise what costs less, as precise as the constants need."""
    costs = path_costs(network, pairs)
    chained, reached = _chained(network, pairs, options, guide)
    left = [pair for pair in pairs if pair not in chained]
    proved, inflated = _divided(network, left, chained, last, options, guide, costs)
    # By the union bound all hold together if each fails with this part of the
    # probability.
    probability = options.failure_probability / max(len(inflated), 1)
    goals, work, memory = {}, {}, 0
    for pair in proved:
        work[pair] = gram.proof_cost(network, pair, costs[pair])
        memory = max(memory, gram.memory_of(network, pair))
    for pair, inflation in inflated.items():
        goals[pair] = Goal.of(network, pair, inflation, probability)
        steps = goals[pair].steps
        # As if all steps were needed; most processes end before.
        once = lanczos.cost(steps, costs[pair], lanczos.order(network, pair))
        work[pair] = starts(probability) * once
        memory = max(memory, lanczos.memory(network, pair, steps))
    return Plan(chained, reached, proved, goals, probability, work, memory)


def _chained(
    network: Network, pairs: Sequence[Pair], options: NormOptions, guide: Guide | None
) -> tuple[dict[Pair, float], dict[Pair, float]]:
    """Norms that products bound tightly enough, of maps too large for a proof of their own; and what they reach."""
    if guide is None:
        return {}, {}
    small = set(gram.provable(network, pairs, options.dense_limit, options.memory))
    large = [pair for pair in pairs if pair not in small]
    chained = chained_norms(network, large, options.dense_limit)
    reached = estimated(guide.rough, list(chained), options.memory)
    # All together add no more than the inflation to a constant.
    kept = tight(chained, reached, options.inflation / max(len(pairs), 1))
    return kept, {pair: min(reached[pair], kept[pair]) for pair in kept}


def _divided(
    network: Network,
    pairs: Sequence[Pair],
    known: Mapping[Pair, float],
    last: int,
    options: NormOptions,
    guide: Guide | None,
    costs: Mapping[Pair, float],
) -> tuple[list[Pair], dict[Pair, float]]:
    """The pairs to be proved, and the inflation of the others that have a bound of their own."""
    # Small enough for a proof, which does not mean that a proof is cheaper.
    provable = set(gram.provable(network, pairs, options.dense_limit, options.memory))
    if guide is None:
        return sorted(provable), {
            pair: options.inflation for pair in pairs if pair not in provable
        }
    everything = len(provable) == len(pairs)
    tolerance = _NEGLIGIBLE if everything else _LEFT_TO_PRODUCTS * options.inflation
    weights, left = weigh(guide, pairs, known, last, tolerance, options.memory)
    if everything:
        return list(weights), {}
    # If one norm is randomised, so is the bound, and there is nothing to lose by
    # iterating others that cost less so.
    proved, iterated = [], {}
    for pair in weights:
        usual = lanczos.cost(_USUAL_STEPS, costs[pair], lanczos.order(network, pair))
        if pair in provable and gram.proof_cost(network, pair, costs[pair]) <= usual:
            proved.append(pair)
        else:
            iterated[pair] = costs[pair]
    # Proved norms are not inflated, so that the iterated ones share what products leave.
    spent = _SPENT * options.inflation - left
    return proved, inflations(weights, iterated, spent)


@dataclass(frozen=True)
class Forecast:
    """What a plan is expected to take."""

    seconds: float
    memory: int

    def __str__(self) -> str:
        return (
            f"about {timedelta(seconds=max(1, round(self.seconds)))}, "
            f"{shown_bytes(self.memory)}"
        )


def forecast(
    network: Network, plan: Plan, options: NormOptions, processes: int = 1
) -> Forecast | None:
    """Time and memory of a plan, from a short measurement; None if it is done in no time.

    Refuses what does not fit into the memory.
    """
    if plan.memory <= options.memory and plan.total < _LITTLE_WORK:
        return None
    expected = Forecast(
        plan.total / _speed(network) / processes, max(plan.memory, options.memory)
    )
    # The forecast comes first: whoever is refused learns how long it would have taken,
    # too.
    if plan.memory > options.memory:
        raise TooLargeError(
            f"a norm of this network takes {shown_bytes(plan.memory)}, and "
            f"{shown_bytes(options.memory)} may be used "
            f"(all norms: {expected}); give more memory (NormOptions(memory=…), "
            "--max-memory), allow a larger "
            "inflation (NormOptions(inflation=0.05)), use the method naive, or "
            "look at an estimate"
        )
    _LOG.info(
        "norms: %d proved, %d by Lanczos, %s expected",
        len(plan.proved),
        len(plan.goals),
        expected,
    )
    return expected


@torch.no_grad()
def _speed(network: Network) -> float:
    """Multiplications per second, from a few rows that travel from the input to the output."""
    (work,) = path_costs(network, [(network.depth + 1, 0)]).values()
    # The first round loads kernels and fills caches; the time of the second one counts.
    x = torch.ones(
        _ROWS, *network.input_shape, dtype=network.dtype, device=network.device
    )
    for some in (x[:1], x):
        began = perf_counter()
        for rows in network.push(0, some):
            if rows is not None:
                # Devices work behind our back.
                rows.flatten()[0].item()
    return _ROWS * work / max(perf_counter() - began, 1e-9)
