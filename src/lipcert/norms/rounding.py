"""How far rounding can move computed products with B_ji, and the constants of floating-point error analysis.

Notation of Higham: u is the unit roundoff, γ_n = n·u/(1 − n·u). A sum of n products, in any order, is computed with an
error of at most γ_n times the sum of the absolute products.
"""

from __future__ import annotations

from collections import Counter
from math import inf, prod, sqrt

import torch
from torch import Tensor

from lipcert.errors import OptionError, UnsupportedError, UnsupportedNode
from lipcert.network.linear import Function, LinearOp
from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
UNDERFLOW = 1e-150
"""Added to every norm, for the squares of smaller numbers vanish in float64."""
_DENSE_ENTRIES = 1 << 24
_ITERATIONS = 4


def gamma(n: float, dtype: torch.dtype = torch.float64) -> float:
    """γ_n in the given precision; infinite where n·u ≥ 1."""
    if dtype not in UNIT_ROUNDOFF:
        raise OptionError(f"rounding errors are bounded for float32 and float64, not for {dtype}; convert the model")
    nu = n * UNIT_ROUNDOFF[dtype]
    return nu / (1 - nu) * (1 + 1e-12) if nu < 1 else inf


def round_up(value: float, operations: int = 1) -> float:
    """An upper bound on a non-negative result whose computation took this many roundings in float64."""
    return value * (1 + gamma(operations + 2)) if value < inf else inf


def magnitude_norm(op: LinearOp, like: Tensor) -> float:
    """An upper bound on ‖|A|‖₂, hence on ‖A‖₂.

    B = |A|ᵀ|A| has non-negative entries, so its largest eigenvalue is at most max_i (Bx)_i/x_i for every positive x
    (Collatz). Some power iterations from a vector of ones make that nearly tight.
    """
    x = torch.ones(1, *op.in_shape, dtype=like.dtype, device=like.device)
    if isinstance(op, Function) and not op.nonnegative:
        return _dense_magnitude_norm(op, x)
    smallest = inf
    for _ in range(_ITERATIONS):
        with torch.enable_grad():
            image = op.magnitude(x.requires_grad_())
            (product,) = torch.autograd.grad(image, x, image.detach())
        smallest = min(smallest, float((product / x.detach()).max()))
        x = product / product.max().clamp(min=1e-300) + 1e-6
    terms = 2 * (prod(op.in_shape) + prod(op.out_shape))
    return round_up(sqrt(smallest), terms) + UNDERFLOW


def _dense_magnitude_norm(op: Function, like: Tensor) -> float:
    if prod(op.in_shape) * prod(op.out_shape) > _DENSE_ENTRIES:
        remedy = "state terms= and nonnegative=True in its rule, so that its rounding errors can be bounded"
        raise UnsupportedError([UnsupportedNode("a registered linear function", "Function", remedy)])
    with torch.no_grad():
        matrix = op.as_matrix(like).abs()
    return round_up(sqrt(float(matrix.sum(0).max()) * float(matrix.sum(1).max())), sum(matrix.shape))


class ProductErrors:
    """Bounds on the error of a computed product B_ji x or B_jiᵀ y, per unit of the vector's norm, in float64.

    An error made at a node in between travels on through the exact map from there. Norms of these partial maps are
    bounded by products of ‖|A|‖ within a stage and, at the sites, by the norms of shorter pairs that are already
    bounded: so give the pairs by increasing distance, each followed by `know`.
    """

    def __init__(self, network: Network, centres: list[float]) -> None:
        self.network = network
        self.centres = centres
        self.known: dict[Pair, float] = {}
        like = torch.zeros((), dtype=network.dtype, device=network.device)
        norms: dict[int, float] = {}
        for node in network.nodes:
            for edge in node.edges:
                norms[id(edge.op)] = magnitude_norm(edge.op, like)
        self._norms = norms
        sources = Counter(edge.source for node in network.nodes for edge in node.edges)
        self._fan_out = max(sources.values(), default=0)  # additions at a node of an adjoint product

    def know(self, pair: Pair, norm: float) -> None:
        """Remember a guaranteed bound on ‖B_ji‖."""
        self.known[pair] = norm

    def error(self, pair: Pair) -> float:
        """The bound for one pair: Σ over nodes of (norm into the node)·γ·(norm from the node on)."""
        j, i = pair
        reach, reach_back = self._norms_from(i), self._norms_to(j)
        total = 0.0
        for v, node in enumerate(self.network.nodes):
            onward = reach_back.get(v, 0.0)
            if onward == 0.0:
                continue
            site = self.network.site_of_output.get(v)
            if site is None:
                terms = max((e.op.accumulations for e in node.edges), default=0)
                local = sum(self._norms[id(e.op)] * reach.get(e.source, 0.0) for e in node.edges)
                total += gamma(terms + len(node.edges) + self._fan_out + 2) * local * onward
            elif site > i:
                source = self.network.sites[site].source
                total += gamma(2) * abs(self.centres[site]) * reach.get(source, 0.0) * onward
        return total * (1 + 1e-6)  # errors of errors, and the rounding of this sum

    def _norms_from(self, i: int) -> dict[int, float]:
        """Bounds on the norms of the maps from the output of site i to every node."""
        reach = {self.network.sites[i].output: 1.0}
        ends: dict[int, list[int]] = {}
        for k, end in enumerate(self.network.sites[1:], start=1):
            ends.setdefault(end.source, []).append(k)
        for v, node in enumerate(self.network.nodes):
            site = self.network.site_of_output.get(v)
            if site is not None:
                source = self.network.sites[site].source
                if site > i and source in reach and self.centres[site] != 0:
                    reach[v] = abs(self.centres[site]) * reach[source]
            elif any(e.source in reach for e in node.edges):
                reach[v] = sum(self._norms[id(e.op)] * reach.get(e.source, 0.0) for e in node.edges)
            if v in reach:
                reach[v] = min([reach[v], *(self.known[k, i] for k in ends.get(v, []) if (k, i) in self.known)])
        return reach

    def _norms_to(self, j: int) -> dict[int, float]:
        """Bounds on the norms of the maps from every node to the input of site j."""
        back = {self.network.sites[j].source: 1.0}
        for v in reversed(range(len(self.network.nodes))):
            site = self.network.site_of_output.get(v)
            if v in back and site is not None and (j, site) in self.known:
                back[v] = min(back[v], self.known[j, site])
            if v not in back:
                continue
            if site is None:
                for e in self.network.nodes[v].edges:
                    back[e.source] = back.get(e.source, 0.0) + self._norms[id(e.op)] * back[v]
            elif site > 0 and self.centres[site] != 0:
                source = self.network.sites[site].source
                back[source] = back.get(source, 0.0) + abs(self.centres[site]) * back[v]
        return back
