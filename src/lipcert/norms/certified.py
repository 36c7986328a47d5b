"""Upper bounds on all norms ‖B_ji‖ of a network that hold: proved, or with a stated probability of failure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, sqrt

import torch

from lipcert.errors import NonFiniteError, OptionError
from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair, joined_pairs
from lipcert.norms import gram, lanczos
from lipcert.norms.budget import Guide, inflations, path_costs, weigh, with_products
from lipcert.norms.product_errors import ProductErrors
from lipcert.norms.randomised import Ritz, bound_by_lanczos, steps_within
from lipcert.progress import Progress, no_progress
from lipcert.resources import usable_memory
from lipcert.rounding import UNDERFLOW, round_up

_SPENT = 0.8
"""The part of the inflation that is planned for: norms are estimated from below."""
_LEFT_TO_PRODUCTS = 0.1
"""The part of the inflation that norms without a bound of their own may weigh, all together."""
_NEGLIGIBLE = 1e-10
"""The same where every norm is proved."""
_USUAL_STEPS = 50


@dataclass(frozen=True)
class NormOptions:
    """How norms are bounded.

    dense_limit: the largest side for which the Gram matrix is formed and the bound is proved.
    inflation: by how much randomised bounds on norms may enlarge the constants.
    failure_probability: of all randomised bounds together.
    memory: bytes that matrices and Lanczos bases may take at a time; 60 % of what is free, at most 2 GiB, by default.
    seed: of the random starts; by default they come from the operating system's entropy, after the weights are fixed.
    """

    dense_limit: int = 4096
    inflation: float = 0.01
    failure_probability: float = 1e-9
    memory: int = field(default_factory=usable_memory)
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.inflation < 1:
            raise OptionError(f"inflation is {self.inflation}, expected a number between 0 and 1, such as 0.005")
        if not 0 < self.failure_probability < 1:
            raise OptionError(f"failure_probability is {self.failure_probability}, expected a number between 0 and 1")
        if self.dense_limit < 0 or self.memory <= 0:
            raise OptionError("dense_limit and memory must not be negative")


@dataclass
class CertifiedNorms:
    """Upper bounds on ‖B_ji‖, and what they rest on.

    lower: values that the norms reach, as far as they are known; where a bound is proved, the bound itself.
    errors: bounds the rounding of products with B_ji.
    failure_probability: 0 if every bound is proved.
    """

    bounds: dict[Pair, float]
    lower: dict[Pair, float]
    errors: ProductErrors
    failure_probability: float
    randomised: set[Pair] = field(default_factory=set)


@dataclass(frozen=True)
class _Proof:
    """A proved bound on the norm of the computed matrix, which has this many rows."""

    norm: float
    rows: int

    def upper(self, error: float) -> float:
        """A bound on the norm of the exact matrix, if products have this error."""
        return round_up(self.norm + sqrt(self.rows) * error + UNDERFLOW, 4)


@torch.no_grad()
def bound_norms(
    network: Network,
    last: int,
    options: NormOptions | None = None,
    progress: Progress = no_progress,
    guide: Guide | None = None,
) -> CertifiedNorms:
    """Bound ‖B_ji‖ for all i < j ≤ last of a float64 network.

    With a guide, precision is spent where the constants need it; without one, every norm is inflated alike.
    """
    options = options or NormOptions()
    pairs = joined_pairs(network, last)
    plan = _plan(network, pairs, last, options, guide)
    proofs = _prove(network, plan.proved, options, progress)
    ritz = _iterate(network, plan.iterated, options, progress)
    errors = ProductErrors(network)
    bounds, lower = {}, {}
    for j, i in sorted([*proofs, *ritz], key=lambda pair: pair[0] - pair[1]):  # errors of long pairs rest on short ones
        evidence = proofs.get((j, i)) or ritz[j, i]
        bounds[j, i] = evidence.upper(errors.error((j, i)))
        if not bounds[j, i] < inf:
            raise NonFiniteError(
                f"the norm between sites {i} and {j} cannot be bounded: its rounding errors are too large; "
                "the weights differ too much in magnitude"
            )
        lower[j, i] = bounds[j, i] if (j, i) in proofs else ritz[j, i].value
        errors.know((j, i), bounds[j, i])
    if guide is not None:
        bounds |= _products(bounds, [pair for pair in pairs if pair not in bounds], guide, last)
    probability = options.failure_probability if ritz else 0.0
    return CertifiedNorms(bounds, lower, errors, probability, set(ritz))


@dataclass(frozen=True)
class _Plan:
    """Which norms are proved, and which are bounded by Lanczos, with the inflation of each."""

    proved: list[Pair]
    iterated: dict[Pair, float]


def _plan(network: Network, pairs: Sequence[Pair], last: int, options: NormOptions, guide: Guide | None) -> _Plan:
    """Proofs for all norms if all are small enough; otherwise what costs less, as precise as the constants need."""
    provable = set(gram.provable(network, pairs, options.dense_limit, options.memory))
    if guide is None:
        return _Plan(list(provable), {pair: options.inflation for pair in pairs if pair not in provable})
    everything = len(provable) == len(pairs)
    tolerance = _NEGLIGIBLE if everything else _LEFT_TO_PRODUCTS * options.inflation
    weights = weigh(guide, pairs, last, tolerance, options.memory)
    if everything:
        return _Plan(list(weights), {})
    costs = path_costs(network, list(weights))
    proved, iterated = [], {}
    for pair in weights:
        if pair in provable and gram.proof_cost(network, pair, costs[pair]) <= lanczos.cost(_USUAL_STEPS, costs[pair]):
            proved.append(pair)
        else:
            iterated[pair] = costs[pair]
    return _Plan(proved, inflations(weights, iterated, _SPENT * options.inflation))


def _products(bounds: Mapping[Pair, float], pairs: Sequence[Pair], guide: Guide, last: int) -> dict[Pair, float]:
    """Bounds on norms that are left, as products of others."""
    norms = torch.zeros(last + 1, last + 1, dtype=torch.float64)
    for pair in pairs:
        norms[pair] = inf
    for pair, bound in bounds.items():
        norms[pair] = bound
    closed = with_products(norms, guide.passing)
    return {pair: float(closed[pair]) for pair in pairs}


def _prove(network: Network, pairs: Sequence[Pair], options: NormOptions, progress: Progress) -> dict[Pair, _Proof]:
    """Proved bounds on the computed matrices of small maps."""
    proofs: dict[Pair, _Proof] = {}
    plan = gram.gram_plan(network, pairs)
    for count, (side, members) in enumerate(plan.items()):
        sizes = {}
        for j, i in members:
            sizes[j, i] = 8 * network.in_size(j) * network.out_size(i)
        for chunk in _chunks(sizes, options.memory):
            report = partial(progress, f"proving norms {count + 1}/{len(plan)}")
            matrices = gram.dense_rows(network, side, chunk, report)
            for pair in chunk:
                rows = matrices.pop(pair)
                proofs[pair] = _Proof(gram.bound_spectral_norm(rows), rows.shape[0])
    return proofs


def _iterate(
    network: Network, inflation: Mapping[Pair, float], options: NormOptions, progress: Progress
) -> dict[Pair, Ritz]:
    """Lanczos, with the given inflation of each norm; each has the same part of the failure probability."""
    seed = secrets.randbits(62) if options.seed is None else options.seed
    probability = options.failure_probability / max(len(inflation), 1)
    steps = {pair: steps_within(network, pair, inflation[pair], probability) for pair in inflation}
    sizes = {}
    for pair in sorted(steps, key=lambda pair: steps[pair]):  # those that end together travel together
        sizes[pair] = lanczos.memory(network, pair, steps[pair])
    ritz: dict[Pair, Ritz] = {}
    chunks = _chunks(sizes, options.memory)
    for count, chunk in enumerate(chunks):
        report = partial(progress, f"Lanczos {count + 1}/{len(chunks)}")
        ritz |= bound_by_lanczos(network, {pair: steps[pair] for pair in chunk}, probability, seed, report)
    return ritz


def _chunks(sizes: Mapping[Pair, int], memory: int) -> list[list[Pair]]:
    """Consecutive groups of pairs whose sizes stay within the memory, at least one pair each."""
    groups: list[list[Pair]] = []
    room = 0
    for pair, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = memory
        groups[-1].append(pair)
        room -= size
    return groups
