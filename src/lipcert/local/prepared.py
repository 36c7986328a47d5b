"""What local bounds need to know of a network before they see an input: rounding, norms of rows, the linear prefix."""

from __future__ import annotations

from collections import Counter
from math import inf, prod

import torch
from torch import Tensor

from lipcert.certificate.stages import underflow_loss
from lipcert.local.columns import columned_nodes
from lipcert.local.funnels import Funnel, dual_norms, flat, make_funnel, pulled_to_input
from lipcert.local.receptive_fields import Frame, frames_of
from lipcert.network.convolution import Convolution
from lipcert.network.linear import Dense, Identity, LinearOp, Scale
from lipcert.network.normal_form import Network
from lipcert.norms.operations import operation_norm
from lipcert.norms.product_errors import magnitude_norm
from lipcert.rounding import UNIT_ROUNDOFF, gamma

_PREFIX_ENTRIES = 1 << 28
"""The rows of maps from the input to a node are formed, a chunk at a time, if they have fewer entries than this."""
_CHUNK_ENTRIES = 1 << 24
_ROW_ENTRIES = 1 << 24
"""If the rows of all nonlinearities have fewer entries, they are quicker than columns."""


class Prepared:
    """A captured network in its own type and in float64, with numbers for every node v and every edge.

    executed[v]: γ of the program's type for the roundings of a node; 0 if it only moves
    entries. proof[v]: γ of float64, for every sum that a row goes through at a node.
    lost[v]: what an entry loses where products underflow. denormal[v]: whether weights
    may be taken for zero. offsets[v]: magnitude of the constants that a node adds.
    added[v]: the constants themselves, of a node that is one sum of products.
    norms[v], rows[v]: for every edge ‖A‖ and the norms of the rows of A (a number or a
    tensor), from above.
    """

    @torch.no_grad()
    def __init__(self, network: Network, exact: Network) -> None:
        self.network, self.exact = network, exact
        self.unit = UNIT_ROUNDOFF[network.dtype]
        self.sites_of_source: dict[int, list[int]] = {}
        for k, site in enumerate(exact.sites[1:-1], start=1):
            self.sites_of_source.setdefault(site.source, []).append(k)
        self.executed: list[float] = []
        self.proof: list[float] = []
        self.lost: list[float] = []
        self.denormal: list[bool] = []
        self.offsets: dict[int, Tensor] = {}
        self.added: dict[int, Tensor] = {}
        self.norms: list[list[float]] = []
        self.rows: list[list[Tensor | float]] = []
        # Rows that meet at a node are added.
        self.fan_out = max(_use_counts(exact).values())
        self._measure_nodes()
        self.prefix = _prefix_nodes(exact)
        self.folding = _folding_nodes(exact)
        self.passing = _passing_nodes(exact)
        self.columned: set[int] = set()
        if (
            network.dtype == torch.float32
            and _entries_of_rows(exact, self.prefix) > _ROW_ENTRIES
        ):
            self.columned = columned_nodes(exact)
        self.last_reader = _last_readers(exact)
        self._funnels: dict[float, Funnel] = {}
        self._prefix_norms: dict[tuple[int, float], Tensor | None] = {}
        self._frames: dict[int, dict[int, Frame] | None] = {}

    def _measure_nodes(self) -> None:
        like = torch.zeros((), dtype=torch.float64, device=self.exact.device)
        for v, node in enumerate(self.exact.nodes):
            roundings = self.network.nodes[v].roundings
            self.executed.append(
                gamma(roundings + 1, self.network.dtype) if roundings else 0.0
            )
            counts = [edge.op.accumulations for edge in node.edges]
            self.proof.append(
                gamma(max(counts, default=0) + len(counts) + self.fan_out + 4)
            )
            self.lost.append(underflow_loss(node, roundings, self.network.dtype))
            self.denormal.append(
                any(edge.op.denormal() for edge in self.network.nodes[v].edges)
            )
            if node.offset is not None:
                self.offsets[v] = node.offset().double().expand(node.shape)
            if node.added is not None:
                self.added[v] = node.added().double().expand(node.shape)
            self.norms.append([_norm(edge.op, like) for edge in node.edges])
            self.rows.append([_row_norms(edge.op) for edge in node.edges])

    def frames(self, v: int) -> dict[int, Frame] | None:
        """The windows of rows of a node; see `frames_of`."""
        if v not in self._frames:
            self._frames[v] = frames_of(self.exact, v)
        return self._frames[v]

    def funnel(self, norm: float) -> Funnel:
        """Where rows need not be pulled back any further; see `Funnel`."""
        if norm not in self._funnels:
            self._funnels[norm] = make_funnel(self.exact, self.prefix, norm)
        return self._funnels[norm]

    def prefix_norms(self, v: int, norm: float) -> Tensor | None:
        """Dual norms of the rows of the linear map from the input to a node.

        None if they are too many to form, or if columns show them.
        """
        key = (v, norm)
        if key not in self._prefix_norms:
            self._prefix_norms[key] = self._form_prefix_norms(v, norm)
        return self._prefix_norms[key]

    @torch.no_grad()
    def _form_prefix_norms(self, v: int, norm: float) -> Tensor | None:
        shape, inputs = self.exact.nodes[v].shape, prod(self.exact.input_shape)
        count = prod(shape)
        if v in self.columned or count * inputs > _PREFIX_ENTRIES:
            return None
        norms = []
        chunk = max(1, _CHUNK_ENTRIES // max(inputs, count))
        for first in range(0, count, chunk):
            places = torch.arange(first, min(first + chunk, count))
            seed = torch.zeros(
                len(places), count, dtype=torch.float64, device=self.exact.device
            )
            seed[torch.arange(len(places)), places] = 1.0
            rows = pulled_to_input(self.exact, v, seed.reshape(-1, *shape))
            norms.append(dual_norms(flat(rows), norm))
        return torch.cat(norms).reshape(shape)


def _use_counts(network: Network) -> Counter[int]:
    """How many edges and sites read each node."""
    counts: Counter[int] = Counter()
    for node in network.nodes:
        counts.update(edge.source for edge in node.edges)
    counts.update(site.source for site in network.sites[1:])
    return counts


def _entries_of_rows(network: Network, prefix: set[int]) -> int:
    """Of the rows of all inputs of nonlinearities, but for those that are linear in the input: at most so many."""
    total, largest = 0, 0
    sources = {site.source for site in network.sites[1:-1]}
    for v, node in enumerate(network.nodes):
        largest = max(largest, prod(node.shape))
        if v in sources and v not in prefix:
            total += prod(node.shape) * largest
    return total


def _last_readers(network: Network) -> list[int]:
    """The last node that reads each node; itself if there is none."""
    last = list(range(len(network.nodes)))
    for v, node in enumerate(network.nodes):
        for edge in node.edges:
            last[edge.source] = v
    for site in network.sites[1:-1]:
        last[site.source] = max(last[site.source], site.output)
    return last


def _prefix_nodes(network: Network) -> set[int]:
    """The nodes that depend on the input by linear operations only."""
    nodes = {0}
    for v, node in enumerate(network.nodes):
        if node.edges and all(edge.source in nodes for edge in node.edges):
            nodes.add(v)
    return nodes


def _folding_nodes(network: Network) -> set[int]:
    """Linear nodes that are read by one elementwise nonlinearity and by nothing else."""
    counts = _use_counts(network)
    nodes = set()
    for site in network.sites[1:-1]:
        assert site.slope is not None
        if (
            counts[site.source] == 1
            and site.slope.elementwise
            and network.nodes[site.source].edges
        ):
            nodes.add(site.source)
    return nodes


def _passing_nodes(network: Network) -> set[int]:
    """Linear nodes that are read by one scale or one term of a sum and by nothing else."""
    counts = _use_counts(network)
    nodes = set()
    for node in network.nodes:
        for edge in node.edges:
            if (
                counts[edge.source] == 1
                and isinstance(edge.op, Identity | Scale)
                and network.nodes[edge.source].edges
            ):
                nodes.add(edge.source)
    return nodes


def _norm(op: LinearOp, like: Tensor) -> float:
    norm = magnitude_norm(op, like)
    if op.weighted:
        norm = min(norm, operation_norm(op))
    return norm


def _row_norms(op: LinearOp) -> Tensor | float:
    """Norms of the rows of an operation in a shape that broadcasts over its result; infinite if nothing is known."""
    if isinstance(op, Dense):
        return dual_norms(op.weight(), 2)
    if isinstance(op, Convolution):
        lengths = dual_norms(
            op.weight().flatten(1), 2
        )  # zeros around the image only remove terms
        return lengths.reshape(-1, *(1,) * (len(op.out_shape) - 1))
    if isinstance(op, Scale):
        return op.factor().double().abs() * (1 + gamma(4))
    if op.terms == 0:
        return 1.0
    return inf
