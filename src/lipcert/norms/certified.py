"""Upper bounds on all norms ‖B_ji‖ of a network that hold: proved, or with a stated probability of failure."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf, sqrt
from typing import TypeVar

import torch

from lipcert.errors import NonFiniteError
from lipcert.network.normal_form import Network
from lipcert.network.patches import constant_kernels
from lipcert.network.sweep import Pair, joined_pairs
from lipcert.norms import gram, lanczos
from lipcert.norms.budget import Guide, norm_matrix, with_products
from lipcert.norms.kept import KeptNorms, Record
from lipcert.norms.norm_options import NormOptions
from lipcert.norms.plan import Plan, forecast, make_plan
from lipcert.norms.product_errors import ProductErrors
from lipcert.norms.randomised import Ritz, bound_by_lanczos, starts_at_once
from lipcert.processes import gathered, of_first, own_share, process_count
from lipcert.progress import Progress, Work, no_progress, no_report
from lipcert.resources import groups_within
from lipcert.rounding import UNDERFLOW, round_up

E = TypeVar("E")


@dataclass
class CertifiedNorms:
    """Upper bounds on ‖B_ji‖, and what they rest on.

    lower: values that the norms reach, as far as they are known; where a bound is
    proved, the bound itself. errors: bounds the rounding of products with B_ji.
    failure_probability: 0 if every bound is proved.
    """

    bounds: dict[Pair, float]
    lower: dict[Pair, float]
    errors: ProductErrors
    failure_probability: float
    randomised: set[Pair] = field(default_factory=set)


@dataclass(frozen=True)
class Proof:
    """A proved bound on the norm of the computed matrix, which has this many rows."""

    norm: float
    rows: int

    @classmethod
    def of_record(cls, pair: Pair, record: Record) -> Proof | None:
        """What was kept, if it is a proof."""
        if "rows" not in record:
            return None
        return cls(record["norm"], int(record["rows"]))

    def upper(self, error: float) -> float:
        """A bound on the norm of the exact matrix, if products have this error."""
        # Each row is a computed product with a unit vector, so off by at most `error`
        # in norm; all rows together are off by √rows·error in the Frobenius norm, which
        # bounds the spectral one.
        return round_up(self.norm + sqrt(self.rows) * error + UNDERFLOW, 4)


@torch.no_grad()
@constant_kernels()
def bound_norms(
    network: Network,
    last: int,
    options: NormOptions | None = None,
    progress: Progress = no_progress,
    guide: Guide | None = None,
    kept: KeptNorms | None = None,
) -> CertifiedNorms:
    """Bound ‖B_ji‖ for all i < j ≤ last of a float64 network whose tensors do not change.

    With a guide, precision is spent where the constants need it; without one, every
    norm is inflated alike. Processes that share work divide the norms, and have all
    bounds in the end. What is kept already is not computed again.
    """
    options = options or NormOptions()
    pairs = joined_pairs(network, last)
    # Free memory and estimates may differ between processes: all follow one plan.
    plan = of_first(make_plan(network, pairs, last, options, guide))
    expected = forecast(network, plan, options, process_count())
    what = f"norms ({expected})" if expected else "norms"
    work = Work(what, plan.total / process_count(), progress)
    proofs = _prove(network, plan, options, work, kept)
    # Of the exact maps: no row of theirs was computed.
    proofs |= {pair: Proof(norm, 0) for pair, norm in plan.chained.items()}
    ritz = _iterate(network, plan, options, work, kept)
    work.part(0.0)(1.0)
    bounds, errors = _with_errors(network, proofs, ritz)
    lower = {pair: evidence.value for pair, evidence in ritz.items()}
    lower |= {pair: bounds[pair] for pair in proofs} | plan.reached
    if guide is not None:
        left = [pair for pair in pairs if pair not in bounds]
        bounds |= _products(bounds, left, guide, last)
    # The union bound: each of them may fail with its part (see `make_plan`).
    probability = options.failure_probability if ritz else 0.0
    return CertifiedNorms(bounds, lower, errors, probability, set(ritz))


def _with_errors(
    network: Network, proofs: Mapping[Pair, Proof], ritz: Mapping[Pair, Ritz]
) -> tuple[dict[Pair, float], ProductErrors]:
    """Bounds on the norms of the exact maps, and those on the rounding of products that they rest on."""
    errors = ProductErrors(network)
    bounds = {}
    # Errors of long pairs rest on short ones.
    for j, i in sorted([*proofs, *ritz], key=lambda pair: pair[0] - pair[1]):
        evidence = proofs.get((j, i)) or ritz[j, i]
        bounds[j, i] = min(evidence.upper(errors.error((j, i))), errors.product((j, i)))
        if not bounds[j, i] < inf:
            raise NonFiniteError(
                f"the norm between sites {i} and {j} cannot be bounded: its rounding errors are too large; "
                "the weights differ too much in magnitude"
            )
        errors.know((j, i), bounds[j, i])
    return bounds, errors


def _products(
    bounds: Mapping[Pair, float], pairs: Sequence[Pair], guide: Guide, last: int
) -> dict[Pair, float]:
    """Bounds on norms that are left, as products of others."""
    closed = with_products(norm_matrix(bounds, pairs, last), guide.passing)
    return {pair: float(closed[pair]) for pair in pairs}


def _prove(
    network: Network,
    plan: Plan,
    options: NormOptions,
    work: Work,
    kept: KeptNorms | None,
) -> dict[Pair, Proof]:
    """Proved bounds on the computed matrices of small maps."""
    proofs = _found(plan.proved, kept, Proof.of_record)
    left = [pair for pair in plan.proved if pair not in proofs]
    # Maps that share a side share the rows of the identity that travel from it: a side
    # is not divided among processes.
    sides = gram.gram_plan(network, left)
    shares = {}
    for side, members in sides.items():
        shares[side] = sum(plan.work[pair] for pair in members)
    for side in own_share(shares):
        sizes = {pair: gram.memory_of(network, pair) for pair in sides[side]}
        for chunk in groups_within(sizes, options.memory):
            report = work.part(sum(plan.work[pair] for pair in chunk))
            # The matrices take the memory; rows on their way get a quarter on top.
            room = options.memory // 4
            matrices = gram.dense_rows(network, side, chunk, no_report, room)
            made = {}
            for done, pair in enumerate(chunk, start=1):
                # Let go of each matrix before the next Gram matrix is formed.
                rows = matrices.pop(pair)
                made[pair] = Proof(gram.bound_spectral_norm(rows), rows.shape[0])
                report(done / len(chunk))
            _keep(made, kept)
            proofs |= made
    return _together(proofs)


def _iterate(
    network: Network,
    plan: Plan,
    options: NormOptions,
    work: Work,
    kept: KeptNorms | None,
) -> dict[Pair, Ritz]:
    """Lanczos, as precise as each norm has to be; each has the same part of the failure probability."""
    # The theorem needs starts that do not depend on the weights. Weights are fixed by
    # now, and nobody could have known these numbers while choosing them. One seed for
    # all: a start depends on it and its pair, not on the process.
    # The processes may not see the same files.
    seed = of_first(secrets.randbits(128) if options.seed is None else options.seed)
    if kept is not None:
        seed = of_first(kept.seed(seed))
    # A kept bound counts if it is precise enough for the present goals and fails no
    # more often.
    accepts = partial(Ritz.of_record, goals=plan.goals, probability=plan.probability)
    ritz = _found(list(plan.goals), kept, accepts)
    left = {pair: plan.work[pair] for pair in plan.goals if pair not in ritz}
    at_once = starts_at_once(network, plan.probability)
    sizes = {}
    # Those that end together travel together.
    for pair in sorted(own_share(left), key=lambda pair: plan.goals[pair].steps):
        steps = plan.goals[pair].steps
        sizes[pair] = at_once * lanczos.memory(network, pair, steps)
    for chunk in groups_within(sizes, options.memory):
        report = work.part(sum(plan.work[pair] for pair in chunk))
        goals = {pair: plan.goals[pair] for pair in chunk}
        # A single pair may be too large for all starts at a time.
        fits = sum(sizes[pair] for pair in chunk) <= options.memory
        made = bound_by_lanczos(
            network, goals, plan.probability, seed, report, at_once if fits else 1
        )
        _keep(made, kept)
        ritz |= made
    return _together(ritz)


def _found(
    pairs: Sequence[Pair],
    kept: KeptNorms | None,
    read: Callable[[Pair, Record], E | None],
) -> dict[Pair, E]:
    """What is kept of some pairs already, and will do; the same for all processes."""
    found: dict[Pair, E] = {}
    if kept is None:
        return found
    for pair in pairs:
        record = kept.find(pair)
        evidence = read(pair, record) if record is not None else None
        if evidence is not None:
            found[pair] = evidence
    return _together(found)


def _keep(made: Mapping[Pair, Proof | Ritz], kept: KeptNorms | None) -> None:
    if kept is not None:
        kept.add({pair: asdict(evidence) for pair, evidence in made.items()})


def _together(own: dict[Pair, E]) -> dict[Pair, E]:
    """What all processes have found."""
    everything: dict[Pair, E] = {}
    for some in gathered(own):
        everything |= some
    return everything
