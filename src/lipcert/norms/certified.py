"""Upper bounds on all norms ‖B_ji‖ of a network that hold: proved, or with a stated probability of failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, sqrt

import torch

from lipcert.errors import NonFiniteError, OptionError
from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair, Sweep
from lipcert.norms import gram, lanczos
from lipcert.norms.product_errors import ProductErrors
from lipcert.progress import Progress, no_progress
from lipcert.rounding import UNDERFLOW, round_up


@dataclass(frozen=True)
class NormOptions:
    """How norms are bounded.

    dense_limit: the largest side for which the Gram matrix is formed and the bound is proved.
    inflation: by how much a randomised bound may exceed the norm.
    failure_probability: of all randomised bounds together.
    memory: bytes that matrices and Lanczos bases may take at a time.
    seed: of the random starts; by default they come from the operating system's entropy, after the weights are fixed.
    """

    dense_limit: int = 4096
    inflation: float = 0.005
    failure_probability: float = 1e-9
    memory: int = 3 << 30
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

    `errors` bounds the rounding of products with B_ji; `failure_probability` is 0 if every bound is proved.
    """

    bounds: dict[Pair, float]
    errors: ProductErrors
    failure_probability: float
    inflation: float = 0.0
    randomised: set[Pair] = field(default_factory=set)


@dataclass(frozen=True)
class _Proof:
    """A proved bound on the norm of the computed matrix, which has this many rows."""

    norm: float
    rows: int

    def upper(self, error: float) -> float:
        """A bound on the norm of the exact matrix, if products have this error."""
        return round_up(self.norm + sqrt(self.rows) * error + UNDERFLOW, 4)


@dataclass(frozen=True)
class _Ritz:
    """√θ_k after k steps of Lanczos, and the ε that they leave."""

    value: float
    steps: int
    epsilon: float

    def upper(self, error: float) -> float:
        """A bound on the norm of the exact matrix, if products have this error."""
        if self.value == 0.0:
            return error + UNDERFLOW
        upper = lanczos.upper_bound(self.value, self.epsilon, 2 * error / self.value, self.steps)
        return round_up(upper + UNDERFLOW)


@torch.no_grad()
def bound_norms(
    network: Network, last: int, options: NormOptions | None = None, progress: Progress = no_progress
) -> CertifiedNorms:
    """Bound ‖B_ji‖ for all i < j ≤ last of a float64 network."""
    options = options or NormOptions()
    pairs = Sweep(network, last).pairs
    errors = ProductErrors(network)
    proofs = _prove(network, pairs, options, progress)
    ritz = _iterate(network, [pair for pair in pairs if pair not in proofs], options, progress)
    bounds: dict[Pair, float] = {}
    for j, i in sorted(pairs, key=lambda pair: pair[0] - pair[1]):  # the errors of long pairs rest on short ones
        evidence = proofs.get((j, i)) or ritz[j, i]
        bounds[j, i] = evidence.upper(errors.error((j, i)))
        if not bounds[j, i] < inf:
            raise NonFiniteError(
                f"the norm between sites {i} and {j} cannot be bounded: its rounding errors are too large; "
                "the weights differ too much in magnitude"
            )
        errors.know((j, i), bounds[j, i])
    norms = CertifiedNorms(bounds, errors, 0.0, randomised=set(ritz))
    if ritz:
        norms.failure_probability = options.failure_probability
    for pair, run in ritz.items():
        if run.value > 0:
            norms.inflation = max(norms.inflation, bounds[pair] / run.value - 1)
    return norms


def _prove(network: Network, pairs: Sequence[Pair], options: NormOptions, progress: Progress) -> dict[Pair, _Proof]:
    """Proved bounds on the computed matrices of those pairs that are small enough."""
    proofs: dict[Pair, _Proof] = {}
    plan = gram.gram_plan(network, pairs, options.dense_limit, options.memory)
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


def _iterate(network: Network, pairs: Sequence[Pair], options: NormOptions, progress: Progress) -> dict[Pair, _Ritz]:
    """Lanczos for the pairs that are too large for a proof; each has the same part of the failure probability."""
    epsilon = lanczos.eigenvalue_gap(options.inflation)
    steps, epsilons, sizes = {}, {}, {}
    for j, i in pairs:
        n = min(network.out_size(i), network.in_size(j))
        steps[j, i] = lanczos.required_steps(n, epsilon, options.failure_probability / len(pairs))
        epsilons[j, i] = lanczos.gap_after(n, steps[j, i], epsilon)
        sizes[j, i] = 8 * steps[j, i] * n  # bytes of the basis
    generator = torch.Generator()
    if options.seed is None:
        generator.seed()
    else:
        generator.manual_seed(options.seed)
    ritz = {}
    chunks = _chunks(sizes, options.memory)
    for count, chunk in enumerate(chunks):
        report = partial(progress, f"Lanczos {count + 1}/{len(chunks)}")
        values = lanczos.lanczos_values(network, {pair: steps[pair] for pair in chunk}, generator, report)
        for pair, value in values.items():
            ritz[pair] = _Ritz(value, steps[pair], epsilons[pair])
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
