"""Runs a program and bounds, input by input, the rounding errors that it makes (running error analysis).

The network is cut at its nonlinearities. Within a stage, from the outputs of earlier sites to the input of the next
one, the error of a node that computes Σ A û + b is bounded by a vector e and a number n together, entry by entry and in
norm: it is at most e plus a vector of norm n. Both are 0 at the outputs of sites. The node makes errors of its own,

    e ← Σ |A| e + γ·(Σ |A||û| + |b|),      n ← Σ ‖A‖ n,

but a dense layer or a convolution turns e into a norm, for ‖A‖‖e‖ is far smaller than ‖|A|e‖:

    e ← γ·(Σ |A||û| + |b|),      n ← Σ ‖A‖(‖e‖ + n).

Where convolutions sum few products, what they make is added to n, too (see `stages`).

Across stages errors travel with the Lipschitz constants of the exact network (see `propagation`), which are far smaller
than products of |A|.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lipcert.certificate.stages import Stages
from lipcert.errors import UnsupportedError, UnsupportedNode
from lipcert.network.normal_form import Edge, Network
from lipcert.rounding import gamma


@dataclass(frozen=True)
class Execution:
    """One batch as the program executed it, with bounds on the rounding errors made in each stage.

    logits: (B, K), as the program returned them.
    sites: (B, n), l2 norm of the error made at the output of each nonlinearity, float64.
    output: (B, K), error made in the last stage, per logit, float64.
    """

    logits: Tensor
    sites: Tensor
    output: Tensor


def check_covered(network: Network) -> None:
    """Refuse networks with an operation whose rounding errors are not known."""
    unknown_errors = (
        "its rounding errors are unknown: it is bounded, but not certified in this form; if the rule is yours, "
    )
    linear = f"{unknown_errors}state terms= and nonnegative=True in its rule"
    nonlinear = f"{unknown_errors}state ulps= in the Slope of its rule"
    unknown: dict[str, str] = {}
    for node in network.nodes:
        if not all(edge.op.covered for edge in node.edges):
            unknown[node.name] = linear
    for site in network.sites:
        if site.slope is not None and site.slope.ulps is None:
            unknown[site.name] = nonlinear
    if unknown:
        raise UnsupportedError([UnsupportedNode(name, "rule", remedy) for name, remedy in unknown.items()])


class ErrorPass:
    """Executes the program of a network and follows the errors alongside."""

    def __init__(self, network: Network, stages: Stages) -> None:
        self.network, self.stages = network, stages
        with torch.no_grad():
            self.offsets = [
                node.offset().to(network.device, network.dtype) if node.offset else None for node in network.nodes
            ]

    @torch.no_grad()
    def execute(self, x: Tensor) -> Execution:
        """Run one batch."""
        values: dict[int, Tensor] = {}
        produced = self.network.produced

        def observe(node: fx.Node, value: Any) -> Any:
            if node in produced:
                values.setdefault(produced[node], value)
            return value

        logits = self.network.program.run(x, observe)
        return _Batch(self, values, len(x)).errors(logits)


class _Error(NamedTuple):
    """The error of a node is at most `entries`, entry by entry, plus a vector of norm `norm`, (B,)."""

    entries: Tensor | None = None
    norm: Tensor | float = 0.0


class _Batch:
    """The values of one batch and the errors of its nodes, found one after the other."""

    def __init__(self, analysis: ErrorPass, values: dict[int, Tensor], size: int) -> None:
        self.network, self.stages, self.offsets = analysis.network, analysis.stages, analysis.offsets
        self.values, self.size = values, size
        self.made: dict[int, _Error] = {0: _Error()}
        self.sizes: dict[int, Tensor] = {}

    def errors(self, logits: Tensor) -> Execution:
        site_errors: list[Tensor] = []
        for v in range(1, len(self.network.nodes)):
            site = self.network.site_of_output.get(v)
            if site is None:
                self.made[v] = self._node_error(v)
            else:
                site_errors.append(self._site_error(site))
                self.made[v] = _Error()
        last = self.network.sites[-1].source
        entries = self.made[last].entries
        output = torch.zeros_like(logits, dtype=torch.float64) if entries is None else entries.double()
        flushed = self.stages.nodes[last].flushed
        for edge, rows, small in zip(self.network.nodes[last].edges, self.stages.rows, flushed, strict=True):
            norm = self._arriving(last, edge)
            if isinstance(norm, Tensor):
                output = output + norm[:, None] * rows.to(norm.device)
            if small > 0:
                output = output + small * self._size(edge.source)[:, None]
        none = torch.zeros(self.size, 0, dtype=torch.float64, device=logits.device)
        return Execution(logits, torch.stack(site_errors, dim=1) if site_errors else none, output)

    def _value(self, v: int) -> Tensor:
        """The value of a node; steps of the analysis that the program does not compute are computed here."""
        if v not in self.values:
            edges = self.network.nodes[v].edges
            if edges:
                first, *others = (edge.op.apply(self._value(edge.source)) for edge in edges)
                self.values[v] = sum(others, start=first)
            else:  # the absolute value of a difference, in a maximum of two branches
                site = self.network.sites[self.network.site_of_output[v]]
                self.values[v] = self._value(site.source).abs()
        return self.values[v]

    def _node_error(self, v: int) -> _Error:
        """What arrives at a node, and what it makes itself."""
        node, bounds = self.network.nodes[v], self.stages.nodes[v]
        carried: list[Tensor] = []
        norm: Tensor | float = 0.0
        for edge, factor, small in zip(node.edges, bounds.carried, bounds.flushed, strict=True):
            norm = norm + factor * self._arriving(v, edge)
            if small > 0:
                norm = norm + small * self._size(edge.source)
            entries = self.made[edge.source].entries
            if entries is not None and not self._cuts(v, edge):
                carried.append(edge.op.magnitude(entries))
        total = sum(carried[1:], start=carried[0]) if carried else None
        if bounds.roundoff == 0.0:
            slack = 1 + 4 * gamma(len(carried) + 2, self.network.dtype)
            return _Error(total * slack if total is not None and len(carried) > 1 else total, norm)
        if bounds.coarse:
            lost = bounds.lost * prod(node.shape) ** 0.5
            return _Error(None, norm + bounds.roundoff * self._sum_of_norms(v) + lost)
        local = self._made(v, node.roundings)
        if total is not None:
            local = (total + local) * (1 + 4 * gamma(max(node.roundings, 1) + 2, self.network.dtype))
        return _Error(local, norm)

    def _cuts(self, v: int, edge: Edge) -> bool:
        """Whether errors that reach a node by this edge go on as a norm, instead of being followed entry by entry."""
        return self.stages.nodes[v].coarse or edge.op.weighted

    def _arriving(self, v: int, edge: Edge) -> Tensor | float:
        """(B,): what an edge of a node carries as a norm; a plain 0 if nothing."""
        entries, norm = self.made[edge.source]
        return norm + _norms(entries) if entries is not None and self._cuts(v, edge) else norm

    def _made(self, v: int, roundings: int) -> Tensor:
        """The error that a node makes itself, entry by entry."""
        edges, dtype, lost = self.network.nodes[v].edges, self.network.dtype, self.stages.nodes[v].lost
        if roundings == 1 and all(edge.op.terms == 0 for edge in edges):  # one addition: half an ulp of the result
            return self._value(v).abs() * gamma(1, dtype) + lost
        first, *others = (edge.op.magnitude(self._value(edge.source).abs()) for edge in edges)
        local = sum(others, start=first)
        offset = self.offsets[v]
        if offset is not None:
            local = local + offset
        # The sum of magnitudes is itself rounded; products may underflow.
        local *= gamma(roundings + 1, dtype) * (1 + 4 * gamma(roundings + 2, dtype))
        local += lost
        return local

    def _sum_of_norms(self, v: int) -> Tensor:
        """(B,): a bound on ‖Σ |A||û| + |b|‖."""
        bounds = self.stages.nodes[v]
        total = torch.full((self.size,), bounds.offset, dtype=torch.float64, device=self.network.device)
        for edge, mu in zip(self.network.nodes[v].edges, bounds.sums, strict=True):
            total = total + mu * self._size(edge.source)
        return total

    def _size(self, v: int) -> Tensor:
        """(B,): a bound on the norm of the value of a node."""
        if v not in self.sizes:
            bounds = self.stages.nodes[v]
            # What only moves entries may put constants beside them, as a padding does.
            if v in self.network.site_of_output or bounds.measured or bounds.roundoff == 0.0:
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
        entries, norm = self.made[site.source]
        if entries is not None:
            norm = norm + _norms(entries)
        flushed = (1 + lipschitz) * torch.finfo(self.network.dtype).tiny
        outputs, inputs = self.network.nodes[site.output].shape, self.network.nodes[site.source].shape
        bound = lipschitz * norm + flushed * (prod(outputs) + prod(inputs)) ** 0.5
        if site.slope.ulps:
            result = self._value(site.output)
            relative = 2 * site.slope.roundings(prod(inputs)) * gamma(1, self.network.dtype)
            bound = bound + relative * (_norms(result) + lipschitz * _norms(self._value(site.source)))
        if not isinstance(bound, Tensor):
            bound = torch.full((self.size,), bound, dtype=torch.float64, device=self.network.device)
        return bound * (1 + 1e-9)


def _norms(x: Tensor) -> Tensor:
    """(B,): l2 norm of every row in float64, from above."""
    x = x.reshape(len(x), 1) if x.dim() == 1 else x
    size = prod(tuple(x.shape[1:]))
    lost = 1.01 * (size * torch.finfo(x.dtype).tiny) ** 0.5  # squares that underflow
    norms = torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim()))).double()
    upper: Tensor = norms * (1 + gamma(size + 4, x.dtype)) + lost
    return upper
