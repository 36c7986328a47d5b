"""The rounding errors of one batch, input by input and node by node (running error analysis).

The network is cut at its nonlinearities. Within a stage, from the outputs of earlier
sites to the input of the next one, the error of a node that computes Σ A û + b is
bounded by a vector e and a number n together, entry by entry and in norm: it is at most
e plus a vector of norm n. Both are 0 at the outputs of sites. The node makes errors of
its own,

    e ← Σ |A| e + γ·(Σ |A||û| + |b|),      n ← Σ ‖A‖ n,

but a dense layer or a convolution turns e into a norm, for ‖A‖‖e‖ is far smaller than
‖|A|e‖:

    e ← γ·(Σ |A||û| + |b|),      n ← Σ ‖A‖(‖e‖ + n).

Where convolutions sum few products, what they make is added to n, too (see `stages`).
Across stages errors travel with the Lipschitz constants of the exact network (see
`propagation`), which are far smaller than products of |A|.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from math import prod
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from lipcert.certificate.stages import Stages
from lipcert.network.normal_form import Edge, Network
from lipcert.network.slopes import ABS
from lipcert.rounding import gamma


class NodeError(NamedTuple):
    """The error of a node is at most `entries`, entry by entry, plus a vector of norm `norm`, (B,)."""

    entries: Tensor | None = None
    norm: Tensor | float = 0.0

    def total_norm(self) -> Tensor | float:
        """(B,): a bound on the norm of the whole error; a plain 0 if there is none."""
        if self.entries is None:
            return self.norm
        return self.norm + _norms(self.entries)


class BatchErrors:
    """The values of one batch and the errors of its nodes, found one after the other."""

    def __init__(
        self,
        network: Network,
        stages: Stages,
        offsets: Mapping[int, Tensor],
        values: dict[int, Tensor],
        batch_size: int,
    ) -> None:
        """`offsets` and `values` are those of nodes, by their numbers."""
        self.network, self.stages = network, stages
        self.offsets, self.values = offsets, values
        self.dtype, device = network.dtype, network.device
        self.zeros = torch.zeros(batch_size, dtype=torch.float64, device=device)
        self.errors: dict[int, NodeError] = {0: NodeError()}
        self.sizes: dict[int, Tensor] = {}

    def errors_of(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The errors of all stages: at the sites and in the logits."""
        sites: list[Tensor] = []
        for v in range(1, len(self.network.nodes)):
            site = self.network.site_of_output.get(v)
            if site is None:
                self.errors[v] = self._node_error(v)
            else:
                sites.append(self._site_error(site))
                self.errors[v] = NodeError()
        if not sites:
            return self.zeros[:, None][:, :0], self._output_error(logits)
        return torch.stack(sites, dim=1), self._output_error(logits)

    def _output_error(self, logits: Tensor) -> Tensor:
        """(B, K): the error that the last stage makes in each logit."""
        last = self.network.sites[-1].source
        output = torch.zeros_like(logits, dtype=torch.float64)
        entries = self.errors[last].entries
        if entries is not None:
            output = entries.double()
        edges, flushed = self.network.nodes[last].edges, self.stages.nodes[last].flushed
        for edge, rows, small in zip(edges, self.stages.rows, flushed, strict=True):
            norm = self._arriving(last, edge)
            if isinstance(norm, Tensor):
                output = output + norm[:, None] * rows.to(norm.device)
            if small > 0:
                output = output + small * self.size(edge.source)[:, None]
        return output

    def _value(self, v: int) -> Tensor:
        """The value of a node; steps of the analysis that the program does not compute are computed here."""
        if v not in self.values:
            edges = self.network.nodes[v].edges
            if edges:
                parts = [edge.op.apply(self._value(edge.source)) for edge in edges]
                self.values[v] = reduce(add, parts)
            else:  # the absolute value of a difference, in a maximum of two branches
                site = self.network.sites[self.network.site_of_output[v]]
                assert site.slope == ABS
                self.values[v] = self._value(site.source).abs()
        return self.values[v]

    def _node_error(self, v: int) -> NodeError:
        """What arrives at a node, and what it makes itself."""
        node, bounds = self.network.nodes[v], self.stages.nodes[v]
        carried: list[Tensor] = []
        norm: Tensor | float = 0.0
        numbers = zip(node.edges, bounds.carried, bounds.flushed, strict=True)
        for edge, factor, small in numbers:
            norm = norm + factor * self._arriving(v, edge)
            if small > 0:
                norm = norm + small * self.size(edge.source)
            entries = self.errors[edge.source].entries
            if entries is not None and not self._becomes_norm(v, edge):
                carried.append(edge.op.magnitude(entries))
        # Errors of several edges are summed in the type of the program, which is
        # rounded.
        total = reduce(add, carried) if carried else None
        if bounds.roundoff == 0.0:
            if total is not None and len(carried) > 1:
                total = total * (1 + 4 * gamma(len(carried) + 2, self.dtype))
            return NodeError(total, norm)
        # Few products: γ·‖Σ|A||û| + |b|‖ is hardly larger than the norm of the entries.
        if bounds.coarse:
            lost = bounds.lost * prod(node.shape) ** 0.5
            made = bounds.roundoff * self._sum_of_norms(v)
            return NodeError(None, norm + made + lost)
        local = self._local_error(v, node.roundings)
        if total is not None:
            rounded = 4 * gamma(max(node.roundings, 1) + 2, self.dtype)
            local = (total + local) * (1 + rounded)
        return NodeError(local, norm)

    def _becomes_norm(self, v: int, edge: Edge) -> bool:
        """Whether errors that reach a node by this edge go on as a norm, instead of being followed entry by entry."""
        return self.stages.nodes[v].coarse or edge.op.weighted

    def _arriving(self, v: int, edge: Edge) -> Tensor | float:
        """(B,): what an edge of a node carries as a norm; a plain 0 if nothing."""
        error = self.errors[edge.source]
        if self._becomes_norm(v, edge):
            return error.total_norm()
        return error.norm

    def _local_error(self, v: int, roundings: int) -> Tensor:
        """The error that a node makes itself, entry by entry."""
        edges, lost = self.network.nodes[v].edges, self.stages.nodes[v].lost
        # One addition: half an ulp of the result.
        if roundings == 1 and all(edge.op.terms == 0 for edge in edges):
            return self._value(v).abs() * gamma(1, self.dtype) + lost
        sizes = [edge.op.magnitude(self._value(edge.source).abs()) for edge in edges]
        local = reduce(add, sizes)
        if v in self.offsets:
            local = local + self.offsets[v]
        # The sum of magnitudes is itself rounded; products may underflow.
        rounded = 4 * gamma(roundings + 2, self.dtype)
        local *= gamma(roundings + 1, self.dtype) * (1 + rounded)
        local += lost
        return local

    def _sum_of_norms(self, v: int) -> Tensor:
        """(B,): a bound on ‖Σ |A||û| + |b|‖."""
        bounds = self.stages.nodes[v]
        total = self.zeros + bounds.offset
        for edge, mu in zip(self.network.nodes[v].edges, bounds.sums, strict=True):
            total = total + mu * self.size(edge.source)
        return total

    def size(self, v: int) -> Tensor:
        """(B,): a bound on the norm of the value of a node."""
        if v not in self.sizes:
            bounds = self.stages.nodes[v]
            # What only moves entries may put constants beside them, as a padding does.
            moves_only = bounds.roundoff == 0.0
            if v in self.network.site_of_output or bounds.measured or moves_only:
                self.sizes[v] = _norms(self._value(v)) * (1 + 1e-6)
            else:
                lost = bounds.lost * prod(self.network.nodes[v].shape) ** 0.5
                self.sizes[v] = (1 + bounds.roundoff) * self._sum_of_norms(v) + lost
        return self.sizes[v]

    def _site_error(self, k: int) -> Tensor:
        """(B,): ‖error at the output of a nonlinearity‖ ≤ Lip·‖error at its input‖ + its own rounding."""
        site = self.network.sites[k]
        assert site.slope is not None
        lipschitz = float(site.slope.lipschitz())
        # Rules admit parameters of up to 2^20, which may multiply what underflows
        # inside a nonlinearity.
        flushed = (1 + lipschitz) * 2.0**21 * torch.finfo(self.dtype).tiny
        inputs = prod(self.network.nodes[site.source].shape)
        outputs = prod(self.network.nodes[site.output].shape)
        arriving = lipschitz * self.errors[site.source].total_norm()
        bound = arriving + flushed * (outputs + inputs) ** 0.5
        if site.slope.ulps:
            relative = 2 * site.slope.roundings(inputs) * gamma(1, self.dtype)
            before, behind = self._value(site.source), self._value(site.output)
            values = _norms(behind) + lipschitz * _norms(before)
            bound = bound + relative * values
        upper: Tensor = (self.zeros + bound) * (1 + 1e-9)
        return upper


def _norms(x: Tensor) -> Tensor:
    """(B,): l2 norm of every row in float64, from above."""
    x = x.reshape(len(x), -1) if x.dim() == 1 else x
    size = prod(x.shape[1:])
    # squares that underflow.
    lost = 1.01 * (size * torch.finfo(x.dtype).tiny) ** 0.5
    # In the order in which they lie in memory, which is several times faster.
    order = sorted(range(1, x.dim()), key=x.stride, reverse=True)
    rows = x.permute(0, *order).reshape(len(x), size)
    norms = torch.linalg.vector_norm(rows, dim=1).double()
    upper: Tensor = norms * (1 + gamma(size + 4, x.dtype)) + lost
    return upper
