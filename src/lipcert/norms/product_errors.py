"""How far rounding can move computed products with B_ji."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import copy
from math import inf, prod, sqrt

import torch
from torch import Tensor

from lipcert.errors import UnsupportedError, UnsupportedNode
from lipcert.network.linear import LinearOp, Scale
from lipcert.network.normal_form import Network, Node
from lipcert.network.sweep import Pair
from lipcert.rounding import UNDERFLOW, gamma, round_up

_DENSE_ENTRIES = 1 << 24
_ITERATIONS = 4
_SMALLEST = 1e-140
"""Norms on the way count as no less: what underflows there may be enlarged by what follows."""


def magnitude_norm(op: LinearOp, like: Tensor) -> float:
    """An upper bound on ‖|A|‖₂, hence on ‖A‖₂.

    B = |A|ᵀ|A| has non-negative entries, so its largest eigenvalue is at most max_i
    (Bx)_i/x_i for every positive x (Collatz). Some power iterations from a vector of
    ones make that nearly tight.
    """
    if 0 in (*op.in_shape, *op.out_shape):  # a slice of nothing
        return UNDERFLOW
    x = torch.ones(1, *op.in_shape, dtype=like.dtype, device=like.device)
    if not op.covered:
        return _dense_magnitude_norm(op, x)
    # Every positive x gives a valid bound, so that the smallest of all rounds counts
    # and convergence does not matter.
    smallest = inf
    for _ in range(_ITERATIONS):
        with torch.enable_grad():
            image = op.magnitude(x.requires_grad_())
            # |A|ᵀ(|A|x): the derivative of ½‖|A|x‖².
            (product,) = torch.autograd.grad(image, x, image.detach())
        smallest = min(smallest, float((product / x.detach()).max()))
        # Divided, so that nothing overflows; lifted, so that no entry is zero, for
        # Collatz needs positive x.
        x = product / product.max().clamp(min=1e-300) + 1e-6
    # Each entry of Bx is a sum over the result, of sums over the input: all that can be
    # rounded.
    terms = 2 * (prod(op.in_shape) + prod(op.out_shape))
    return round_up(sqrt(smallest), terms) + UNDERFLOW


def _dense_magnitude_norm(op: LinearOp, like: Tensor) -> float:
    if prod(op.in_shape) * prod(op.out_shape) > _DENSE_ENTRIES:
        remedy = (
            "state terms= and nonnegative=True in its rule, so that its "
            "rounding errors can be bounded"
        )
        raise UnsupportedError(
            [UnsupportedNode("a registered linear function", "Function", remedy)]
        )
    with torch.no_grad():
        matrix = op.as_matrix(like).abs()
    # ‖M‖₂² ≤ ‖M‖₁·‖M‖_∞: the largest sums of columns and of rows.
    largest = float(matrix.sum(0).max()), float(matrix.sum(1).max())
    return round_up(sqrt(largest[0] * largest[1]), sum(matrix.shape))


class ProductErrors:
    """Bounds on the error of a computed product B_ji x or B_jiᵀ y, per unit of the vector's norm, in float64.

    An error made at a node in between travels on through the exact map from there.
    Norms of these partial maps are bounded by products of ‖|A|‖ within a stage and, at
    the sites, by the norms of shorter pairs that are already bounded: so give the pairs
    by increasing distance, each followed by `know`.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.known: dict[Pair, float] = {}
        self._errors: dict[Pair, float] = {}  # of the same pairs
        like = torch.zeros((), dtype=network.dtype, device=network.device)
        # Of every node: the sources and ‖|A|‖ of its edges.
        self._edges: list[list[tuple[int, float]]] = []
        self._readers: Counter[int] = Counter()
        for node in network.nodes:
            edges = []
            for edge in node.edges:
                edges.append((edge.source, magnitude_norm(edge.op, like)))
                self._readers[edge.source] += 1
            self._edges.append(edges)
        # Additions at a node of an adjoint product.
        self._fan_out = max(self._readers.values(), default=0)
        self._roundoff = [self._node_roundoff(node) for node in network.nodes]
        self._leaving = _scaled_outputs(network, self._readers)
        self._arriving = _scaled_inputs(network)

    def copy(self) -> ProductErrors:
        """The same, to be told of other pairs."""
        copied = copy(self)
        copied.known, copied._errors = dict(self.known), dict(self._errors)
        return copied

    def ending_at(self, network: Network) -> ProductErrors:
        """The same for a network with the same nodes whose output is another one of them."""
        other = self.copy()
        other.network = network
        last = network.depth + 1
        # Norms of maps to the former output say nothing about those to the new one.
        kept = [pair for pair in self.known if pair[0] != last]
        other.known = {pair: self.known[pair] for pair in kept}
        other._leaving = _scaled_outputs(network, self._readers)
        other._arriving = _scaled_inputs(network)
        return other

    def know(self, pair: Pair, norm: float) -> None:
        """Remember a guaranteed bound on ‖B_ji‖."""
        # Before the norm: it rests on shorter pairs, as it did when it was asked for.
        self._errors[pair] = self.error(pair)
        self.known[pair] = norm

    def error(self, pair: Pair) -> float:
        """The bound for one pair: Σ over nodes of (norm into the node)·γ·(norm from the node on)."""
        j, i = pair
        # Nodes are in topological order: all that lie on a path from site i to site j
        # are in this range.
        between = range(self.network.sites[i].output, self.network.sites[j].source + 1)
        reach, reach_back = self._norms_from(i, between), self._norms_to(j, between)
        total = 0.0
        for v in between:
            onward = reach_back.get(v, 0.0)
            # v errs by γ·Σ‖|A|‖‖v_u‖, per unit at site i; from there, its error travels
            # on to site j.
            if onward > 0.0:
                total += self._roundoff[v] * self._norm_into(v, reach) * onward
        # What underflows at a node, 1e-310 at most, counts less than γ·1e-140, here and,
        # for norms from 1e-150 on, in products with the transpose. The factor is for
        # relative errors of products within a stage, and the rounding of this sum.
        return total * (1 + 1e-6)

    def product(self, pair: Pair) -> float:
        """A bound on ‖B_ji‖ from products of ‖|A|‖: as good as any where a map only moves and scales entries."""
        j, i = pair
        end = self.network.sites[j].source
        reach = self._norms_from(i, range(self.network.sites[i].output, end + 1))
        # For the rounding of the products and sums.
        return reach.get(end, 0.0) * (1 + 1e-9)

    def _node_roundoff(self, node: Node) -> float:
        """γ for what is summed at a node, in products with the map or its transpose."""
        # In a product with the transpose, what several readers of a node send back is
        # added up: hence the fan-out.
        terms = max((edge.op.accumulations for edge in node.edges), default=0)
        return gamma(terms + len(node.edges) + self._fan_out + 2)

    def _norm_into(self, v: int, reach: Mapping[int, float]) -> float:
        """Σ ‖|A|‖·(norm up to the source) over the edges of a node."""
        total = 0.0
        for source, norm in self._edges[v]:
            total += norm * reach.get(source, 0.0)
        return total

    def _norms_from(self, i: int, between: range) -> dict[int, float]:
        """Bounds on the norms of what is computed at the nodes behind site i, per unit at its output."""
        # The identity from site i to itself.
        reach = {between.start: 1.0}
        for v in between:
            if v not in reach:
                norm = self._norm_into(v, reach)
                # No path from site i leads here.
                if norm == 0.0:
                    continue
                reach[v] = max(norm, _SMALLEST)
            # Products of ‖|A|‖ grow fast with the number of layers; at sites, known
            # norms take their place.
            for k, factor in self._arriving.get(v, []):
                if (k, i) in self.known:
                    # Where a map cancels, what is computed may be longer than its norm,
                    # by its error.
                    computed = self.known[k, i] + self._errors[k, i]
                    reach[v] = max(min(reach[v], computed * factor), _SMALLEST)
        return reach

    def _norms_to(self, j: int, between: range) -> dict[int, float]:
        """Bounds on the norms of the maps from the nodes before it to the input of site j."""
        # The same from the end: back[v] is complete when v is reached, for all its
        # readers come behind it.
        back = {between[-1]: 1.0}
        for v in reversed(between):
            if v not in back:
                continue
            for k, factor in self._leaving.get(v, []):
                if (j, k) in self.known:
                    back[v] = max(min(back[v], self.known[j, k] * factor), _SMALLEST)
            for source, norm in self._edges[v]:
                onward = max(norm * back[v], _SMALLEST)
                back[source] = back.get(source, 0.0) + onward
        return back


def _scaled_outputs(
    network: Network, readers: Counter[int]
) -> dict[int, list[tuple[int, float]]]:
    """Nodes v ↦ sites k with factors f: the map from v to anywhere has at most f times the norm of that from site k.

    So it is if the output of site k is only read by v, as a term S·φ_k with a diagonal
    S: then B_jk = M·S.
    """
    # A node that is the input of a site is read there, too: maps to that site would not
    # lead through v.
    ends = {site.source for site in network.sites}
    scaled = {site.output: [(k, 1.0)] for k, site in enumerate(network.sites[:-1])}
    for v, node in enumerate(network.nodes):
        for edge in node.edges:
            # B_jk = M·S, so M = B_jk·S⁻¹, and ‖M‖ ≤ ‖B_jk‖·‖S⁻¹‖.
            read_once = readers[edge.source] == 1 and edge.source not in ends
            if isinstance(edge.op, Scale) and read_once:
                inverse = _inverse_norm(edge.op)
                for k, factor in scaled.get(edge.source, []):
                    scaled.setdefault(v, []).append((k, round_up(factor * inverse)))
    return scaled


def _scaled_inputs(network: Network) -> dict[int, list[tuple[int, float]]]:
    """Nodes v ↦ sites k with factors f: the map from anywhere to v has at most f times the norm of that to site k.

    So it is if the input of site k is S·v with a diagonal S: then B_ki = S·M.
    """
    scaled: dict[int, list[tuple[int, float]]] = {}
    for k, site in enumerate(network.sites[1:], start=1):
        v, factor = site.source, 1.0
        scaled.setdefault(v, []).append((k, factor))
        # Step by step back through diagonals: B_ki = S·M, so ‖M‖ ≤ ‖S⁻¹‖·‖B_ki‖.
        while len(edges := network.nodes[v].edges) == 1 and isinstance(
            op := edges[0].op, Scale
        ):
            v, factor = edges[0].source, round_up(factor * _inverse_norm(op))
            scaled.setdefault(v, []).append((k, factor))
    return scaled


def _inverse_norm(op: Scale) -> float:
    """‖S⁻¹‖ of a diagonal, from above; infinite if it has zeros."""
    smallest = float(op.factor().detach().abs().min())
    if not smallest > 0:
        return inf
    return round_up(1 / smallest)
