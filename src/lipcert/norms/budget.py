"""How precisely every norm has to be known: an error budget for the constants, not for each norm.

The constants m_j = Σ_i N_ji m_i enter L = Σ_j o_j m_j. If N_ji grows by one per cent, L
grows by w_ji per cent, where

    w_ji = t_j N_ji m_i / L,    t_j = o_j + Σ_k t_k N_kj.

A map across many sites has a small w: a bound on it that is 20 % too large costs
nothing, and needs a sixth of the steps. Where w is negligible, the product of known
norms will do: if all paths from site i to site j lead through site k, then B_ji = B_jk
S_k⁻¹C_k B_ki, so N_ji ≤ ρ_k·N_jk·N_ki with ρ_k = ‖S_k⁻¹C_k‖.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod

import torch
from torch import Tensor

from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair, Sweep
from lipcert.norms.estimate import estimate_norms, power_step, random_vectors
from lipcert.norms.rows import row_norms
from lipcert.rounding import up_product

# `passed_sites` and `with_products` are part of proofs. Everything else here only says
# how much work goes where.
_FIRST_SPAN = 4
_ITERATIONS = 6
_PROBES = 4
_SMALLEST_INFLATION = 1e-5
_LARGEST_INFLATION = 1.0
"""A bound on a norm that hardly counts may be twice the norm, not more."""
_COPIES = 8
"""Tensors of the size of a row that an estimate keeps for each pair."""


@dataclass(frozen=True, eq=False)
class Guide:
    """What tells where precision is needed.

    rough: the same network in the model's own precision, in which estimates are cheap.
    passing: ρ_k of the sites k that all paths lead through.
    """

    rough: Network
    passing: Mapping[int, float]


def passed_sites(base: Network) -> list[int]:
    """Nonlinearities of a network, before its transformation, that every path across leads through.

    Nodes are in topological order, so such a node is one that no edge leads around:
    none that starts before it and ends behind it. Nonlinearities count as edges here.
    """
    # Where the longest edge out of each node ends.
    ends = [0] * len(base.nodes)
    for v, node in enumerate(base.nodes):
        for edge in node.edges:
            ends[edge.source] = max(ends[edge.source], v)
    # Without these, the input of a later site could come before v, and its path around
    # v would not be seen.
    for site in base.sites[1:-1]:
        ends[site.source] = max(ends[site.source], site.output)
    passed = []
    site_of_output = base.site_of_output
    # The farthest end of any edge out of the nodes before v: if it is not behind v, no
    # edge leads around v. For a chain 0 → 1 → 2 with a skip 0 → 2, the ends are 2, 2,
    # 0, and node 1 is not passed.
    farthest = 0
    for v, end in enumerate(ends):
        if farthest <= v and site_of_output.get(v, 0) > 0:
            passed.append(site_of_output[v])
        farthest = max(farthest, end)
    return passed


def shares(norms: Tensor, output: Tensor) -> Tensor:
    """w_ji of all maps, from the matrix N and the weights o of the constants."""
    count = len(norms)
    # m = e_0 + N m and t = o + Nᵀt. N is strictly lower triangular, so both are solved
    # without a factorisation.
    system = torch.eye(count, dtype=norms.dtype) - norms
    first = torch.zeros(count, 1, dtype=norms.dtype)
    first[0] = 1.0
    constants = torch.linalg.solve_triangular(system, first, upper=False)  # m
    tails = torch.linalg.solve_triangular(system.T, output[:, None], upper=True)  # t
    # Entry [j, i] is t_j N_ji m_i / L with L = o·m.
    weights: Tensor = tails * norms * constants.T / (output @ constants)
    return weights


def norm_matrix(
    known: Mapping[Pair, float], unknown: Sequence[Pair], last: int
) -> Tensor:
    """N, (last + 1, last + 1): infinite where a norm is not known, and zero where no path leads, as B_ji is there."""
    norms = torch.zeros(last + 1, last + 1, dtype=torch.float64)
    for pair in unknown:
        norms[pair] = inf
    for pair, norm in known.items():
        norms[pair] = norm
    return norms


def with_products(norms: Tensor, passing: Mapping[int, float]) -> Tensor:
    """The smallest of each bound N_ji and all products of others that bound it, rounded up; infinite means unknown."""
    closed = norms.clone()
    # Sites in order: a row that site k has closed may be a factor of the products
    # through later ones.
    for k, ratio in passing.items():
        if k < len(norms):
            # Rows behind k times columns before it: the matrix is lower triangular.
            through = up_product(closed[k + 1 :, k, None], closed[None, k, :k], ratio)
            # 0·∞ is NaN where one factor is not known, which says nothing about the
            # product.
            closed[k + 1 :, :k] = torch.minimum(
                closed[k + 1 :, :k], through.nan_to_num(nan=inf)
            )
    return closed


def weigh(
    guide: Guide,
    pairs: Sequence[Pair],
    known: Mapping[Pair, float],
    last: int,
    tolerance: float,
    memory: int,
) -> tuple[dict[Pair, float], float]:
    """w_ji of the pairs that have to be bounded, and the total weight of what is left to products, at most `tolerance`.

    Norms are estimated from the near pairs on, until products of those are enough for
    all others. `known` are the norms of further pairs.
    """
    output = _output_weights(guide.rough, last)
    norms = norm_matrix(known, pairs, last)
    span, left = _FIRST_SPAN, list(pairs)
    while True:
        closed = with_products(norms, guide.passing)
        # What no product bounds has to be estimated, however far it spans.
        near = [(j, i) for j, i in left if j - i <= span or closed[j, i] == inf]
        for (j, i), value in estimated(guide.rough, near, memory).items():
            norms[j, i] = value
        left = sorted(set(left) - set(near))
        # Everything that is left has a product now, so that w is known, if roughly, for
        # all pairs.
        closed = with_products(norms, guide.passing).nan_to_num(posinf=0.0)
        weight = shares(closed, output)
        if not bool(torch.isfinite(weight).all()):
            # Beyond the range of numbers: all count.
            weight = (closed > 0).double()
        total_left = sum(float(weight[pair]) for pair in left)
        if total_left <= tolerance:
            break
        # Spans of 4, 6, 9, 13, … sites: at the latest, the span of the whole network
        # leaves no pair.
        span += span // 2
    chosen = sorted(set(pairs).difference(left))
    return {pair: float(weight[pair]) for pair in chosen}, total_left


def inflations(
    weights: Mapping[Pair, float], costs: Mapping[Pair, float], total: float
) -> dict[Pair, float]:
    """By how much each bound may exceed its norm, so that Σ w·e is the total and the work Σ cost/√e the least.

    The derivatives of both sums are proportional at the optimum: e = λ·(cost/w)^⅔,
    capped.
    """
    shape = {}
    for pair, cost in costs.items():
        shape[pair] = (cost / max(weights[pair], 1e-12)) ** (2 / 3)
    # What is spent grows with λ. At `high` every pair is at its cap; `low` is always
    # within the total.
    low, high = 0.0, _LARGEST_INFLATION / max(min(shape.values(), default=1.0), 1e-300)
    for _ in range(100):
        middle = (low + high) / 2
        spent = sum(
            weights[pair] * min(middle * shape[pair], _LARGEST_INFLATION)
            for pair in shape
        )
        low, high = (middle, high) if spent <= total else (low, middle)
    return {
        pair: min(max(low * shape[pair], _SMALLEST_INFLATION), _LARGEST_INFLATION)
        for pair in shape
    }


def path_costs(network: Network, pairs: Sequence[Pair]) -> dict[Pair, float]:
    """Multiplications for one row of each map, over all nodes between its sites."""
    # Sums of costs: before[v + 1] − before[u + 1] is that of the nodes u + 1, …, v.
    before = [0.0]  # over the nodes before each
    for node in network.nodes:
        cost = 0.0
        for edge in node.edges:
            cost += prod(edge.op.out_shape) * max(edge.op.terms, 1)
        before.append(before[-1] + cost)
    costs = {}
    for j, i in pairs:
        start, end = network.sites[i].output, network.sites[j].source
        costs[j, i] = max(before[end + 1] - before[start + 1], 1.0)
    return costs


@torch.no_grad()
def estimated(
    network: Network, pairs: Sequence[Pair], memory: int
) -> dict[Pair, float]:
    """Norms of some maps by a few power iterations, as many maps at a time as fit into the memory."""
    # Every row may have to be as long as the widest node that it passes.
    widest = max(prod(node.shape) for node in network.nodes)
    together = max(1, memory // (_COPIES * 8 * widest))
    values: dict[Pair, float] = {}
    for first in range(0, len(pairs), together):
        some = pairs[first : first + together]
        sweep = Sweep(network, max(j for j, _ in some), only=set(some))
        vectors = random_vectors(sweep, seed=0)
        for _ in range(_ITERATIONS):
            vectors = power_step(sweep, vectors)
        found = estimate_norms(sweep, vectors).double().tolist()
        values |= dict(zip(sweep.pairs, found, strict=True))
    return values


@torch.no_grad()
def _output_weights(network: Network, last: int) -> Tensor:
    """o_0..o_last: how much each constant counts in the differences of logits, or in the whole output."""
    weights = torch.zeros(last + 1, dtype=torch.float64)
    # The output is the last site: L is its constant m_last itself.
    if last > network.depth:
        weights[last] = 1.0
        return weights
    shape = network.nodes[network.sites[-1].source].shape
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(_PROBES, *shape, generator=generator).to(
        network.device, network.dtype
    )
    # e_a − e_b, the difference of two logits, has entries whose sum is zero: so have
    # the probes.
    if prod(shape) > 1:
        probes = probes - probes.flatten(1).mean(1).reshape(-1, *(1,) * len(shape))
    for i, rows in enumerate(network.pull(network.depth + 1, probes)):
        if rows is not None:
            # o_i stands for the norms of the rows r_a − r_b of B_{n+1,i}
            # (docs/method.md), by a mean of squares.
            weights[i] = float(row_norms(rows).double().square().mean().sqrt())
    return weights
