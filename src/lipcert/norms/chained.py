"""Norms of maps that are chains of operations, as products: proofs that are tight where operations are orthogonal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import torch
from torch import Tensor

from lipcert.network.linear import LinearOp
from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair
from lipcert.norms.operations import exact_operation_norm
from lipcert.norms.product_errors import magnitude_norm
from lipcert.rounding import UNDERFLOW, round_up


def chained_norms(
    network: Network, pairs: Sequence[Pair], limit: int
) -> dict[Pair, float]:
    """Proved bounds on ‖B_ji‖ ≤ Π‖A‖ of those maps that are one operation A after the other.

    limit: on the smaller side of the matrices of operations.
    """
    like = torch.zeros((), dtype=network.dtype, device=network.device)
    # Pairs share operations.
    known: dict[int, float] = {}
    bounds = {}
    for pair in pairs:
        operations = _chain(network, pair)
        if operations is None:
            continue
        product = 1.0
        for op in operations:
            if id(op) not in known:
                known[id(op)] = _operation_norm(op, like, limit)
            product = round_up(product * known[id(op)]) + UNDERFLOW
        if product < inf:
            bounds[pair] = product
    return bounds


def tight(
    chained: Mapping[Pair, float], reached: Mapping[Pair, float], inflation: float
) -> dict[Pair, float]:
    """The products that exceed what the norms reach by no more than the inflation."""
    kept = {}
    for pair, bound in chained.items():
        if bound <= reached[pair] * (1 + inflation):
            kept[pair] = bound
    return kept


def _chain(network: Network, pair: Pair) -> list[LinearOp] | None:
    """The operations from site i to site j, from the last to the first; None if they branch."""
    j, i = pair
    v, start = network.sites[j].source, network.sites[i].output
    operations = []
    while v != start:
        edges = network.nodes[v].edges
        # A sum, or the output of another site.
        if len(edges) != 1:
            return None
        operations.append(edges[0].op)
        v = edges[0].source
    return operations


def _operation_norm(op: LinearOp, like: Tensor, limit: int) -> float:
    """A proved bound on ‖A‖ that is the norm itself, but for rounding; infinite if there is none."""
    if op.covered and not op.weighted:
        return magnitude_norm(op, like)
    exact = exact_operation_norm(op, limit)
    # ‖|A|‖ is the norm of kernels without negative entries, such as those of shifts.
    return exact if exact < inf else magnitude_norm(op, like)
