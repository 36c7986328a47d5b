"""Upper bounds on all norms ‖B_ji‖ of a network that hold: proved, or with a stated probability of failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt

import torch

from lipcert.errors import NonFiniteError, OptionError
from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair, Sweep
from lipcert.norms import gram, lanczos
from lipcert.norms.product_errors import ProductErrors
from lipcert.rounding import UNDERFLOW, round_up

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is done."""


def no_progress(what: str, fraction: float) -> None:
    """Reports nothing."""


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

    def share(self, parts: int) -> NormOptions:
        """The same with this part of the failure probability."""
        return replace(self, failure_probability=self.failure_probability / parts)


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


@torch.no_grad()
def bound_norms(
    network: Network,
    last: int,
    options: NormOptions | None = None,
    progress: Progress = no_progress,
) -> CertifiedNorms:
    """Bound ‖B_ji‖ for all i < j ≤ last of a float64 network."""
    options = options or NormOptions()
    pairs = Sweep(network, last).pairs
    errors = ProductErrors(network)
    plan = gram.gram_plan(network, pairs, options.dense_limit, options.memory)
    raw: dict[Pair, tuple[float, float]] = {}  # bound on the computed matrix, factor of the product error
    for count, (side, members) in enumerate(plan.items()):
        for chunk in _chunks(
            members, {(j, i): 8 * network.in_size(j) * network.out_size(i) for j, i in members}, options
        ):
            report = partial(progress, f"proving norms {count + 1}/{len(plan)}")
            matrices = gram.dense_rows(network, side, chunk, report)
            for pair in chunk:
                rows = matrices.pop(pair)
                raw[pair] = gram.bound_spectral_norm(rows), sqrt(rows.shape[0])
    large = [pair for pair in pairs if pair not in raw]
    epsilon = lanczos.eigenvalue_gap(options.inflation)
    sides = {(j, i): min(network.out_size(i), network.in_size(j)) for j, i in large}
    steps = {
        pair: lanczos.required_steps(side, epsilon, options.failure_probability / len(large))
        for pair, side in sides.items()
    }
    generator = torch.Generator()
    generator.manual_seed(options.seed) if options.seed is not None else generator.seed()
    ritz: dict[Pair, float] = {}
    groups = _chunks(large, {pair: lanczos.basis_bytes(network, pair, steps[pair]) for pair in large}, options)
    for count, group in enumerate(groups):
        report = partial(progress, f"Lanczos {count + 1}/{len(groups)}")
        chosen = {pair: steps[pair] for pair in group}
        ritz |= lanczos.lanczos_values(network, chosen, generator, report)
    gaps = {(j, i): lanczos.gap_after(sides[j, i], steps[j, i], epsilon) for j, i in large}
    bounds = _finish(pairs, raw, ritz, steps, gaps, errors)
    return CertifiedNorms(
        bounds,
        errors,
        failure_probability=options.failure_probability if large else 0.0,
        inflation=max((bounds[pair] / ritz[pair] - 1 for pair in large if ritz[pair] > 0), default=0.0),
        randomised=set(large),
    )


def _finish(
    pairs: Sequence[Pair],
    raw: dict[Pair, tuple[float, float]],
    ritz: dict[Pair, float],
    steps: dict[Pair, int],
    epsilon: dict[Pair, float],
    errors: ProductErrors,
) -> dict[Pair, float]:
    """Add the rounding allowances, from short pairs to long ones, because the long ones rest on the short ones."""
    bounds: dict[Pair, float] = {}
    for pair in sorted(pairs, key=lambda p: p[0] - p[1]):
        error = errors.error(pair)
        if pair in raw:
            norm, factor = raw[pair]
            bounds[pair] = round_up(norm + factor * error + UNDERFLOW, 4)
        elif ritz[pair] == 0.0:
            bounds[pair] = error + UNDERFLOW
        else:
            upper = lanczos.upper_bound(ritz[pair], epsilon[pair], 2 * error / ritz[pair], steps[pair])
            bounds[pair] = round_up(upper + UNDERFLOW)
        if not bounds[pair] < float("inf"):
            raise NonFiniteError(
                f"the norm between sites {pair[1]} and {pair[0]} cannot be bounded: its rounding errors are too large; "
                "the weights differ too much in magnitude"
            )
        errors.know(pair, bounds[pair])
    return bounds


def _chunks(pairs: Sequence[Pair], sizes: dict[Pair, int], options: NormOptions) -> list[list[Pair]]:
    """Consecutive groups of pairs whose sizes stay within the memory, at least one pair each."""
    groups: list[list[Pair]] = []
    room = 0
    for pair in pairs:
        if not groups or sizes[pair] > room:
            groups.append([])
            room = options.memory
        groups[-1].append(pair)
        room -= sizes[pair]
    return groups
