"""Runs a model and bounds, input by input, the rounding errors that it makes (running error analysis).

The network is cut at its nonlinearities. Within a stage, from the outputs of earlier sites to the input of the next
one, the error of a node that computes Σ A û + b is bounded by a vector e and a number n together, entry by entry and in
norm: it is at most e plus a vector of norm n. Both are 0 at the outputs of sites. The node makes errors of its own,

    e ← Σ |A| e + γ·(Σ |A||û| + |b|),      n ← Σ ‖A‖ n,

but a dense layer or a convolution turns e into a norm, for ‖A‖‖e‖ is far smaller than ‖|A|e‖:

    e ← γ·(Σ |A||û| + |b|),      n ← Σ ‖A‖(‖e‖ + n).

Where convolutions sum few products, what they make is added to n, too (see `stages`).

Across stages errors travel with the Lipschitz constants of the exact network (see `rounding`), which are far smaller
than products of |A|.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lipcert.certificate.stages import Stages, is_weighted, local_terms, underflow
from lipcert.errors import UnsupportedError, UnsupportedNode
from lipcert.network.linear import Function
from lipcert.network.normal_form import Edge, Network
from lipcert.network.probe import OutOfPlace
from lipcert.norms.rounding import gamma


@dataclass(frozen=True)
class Execution:
    """One batch as the model executed it, with bounds on the rounding errors made in each stage.

    logits: (B, K), as the model returned them.
    sites: (B, n), l2 norm of the error made at the output of each nonlinearity, float64.
    output: (B, K), error made in the last stage, per logit, float64.
    """

    logits: Tensor
    sites: Tensor
    output: Tensor


def check_covered(network: Network) -> None:
    """Refuse networks with an operation whose rounding errors are not known."""
    linear = "its rounding errors are unknown: state terms= and nonnegative=True in its rule"
    nonlinear = "its rounding errors are unknown: state ulps= in the Slope of its rule"
    unknown = {
        node.name: linear
        for node in network.nodes
        for op in (edge.op for edge in node.edges)
        if op.terms < 0 or (isinstance(op, Function) and not op.nonnegative)
    }
    unknown |= {site.name: nonlinear for site in network.sites if site.slope and site.slope.ulps is None}
    if unknown:
        raise UnsupportedError([UnsupportedNode(name, "rule", remedy) for name, remedy in unknown.items()])


class _Error(NamedTuple):
    """The error of a node is at most `entries`, entry by entry, plus a vector of norm `norm`, (B,)."""

    entries: Tensor | None = None
    norm: Tensor | float = 0.0


class ErrorPass(OutOfPlace):
    """Executes the traced model and follows the errors alongside."""

    def __init__(self, network: Network, stages: Stages) -> None:
        super().__init__(network.graph)
        self.network, self.stages = network, stages
        self._lock = Lock()
        self.tiny = underflow(network.dtype)
        with torch.no_grad():
            self.offsets = [
                node.offset().to(network.device, network.dtype) if node.offset else None for node in network.nodes
            ]
        self.site_at = {site.output: k for k, site in enumerate(network.sites[1:-1], start=1)}

    @torch.no_grad()
    def execute(self, x: Tensor) -> Execution:
        """Run one batch; other threads wait."""
        with self._lock:
            return self._execute(x)

    def _execute(self, x: Tensor) -> Execution:
        self._values: dict[int, Tensor] = {}
        self._errors: dict[int, _Error] = {0: _Error()}
        self._site_errors: dict[int, Tensor] = {}
        self._sizes: dict[int, Tensor] = {}
        logits = self.run(x)
        last = self.network.sites[-1].source
        self._reach(last)
        entries = self._errors[last].entries
        output = torch.zeros_like(logits, dtype=torch.float64) if entries is None else entries.double()
        for edge, rows in zip(self.network.nodes[last].edges, self.stages.rows, strict=True):
            norm = self._arriving(last, edge)
            if isinstance(norm, Tensor):
                output = output + norm[:, None] * rows.to(norm.device)
        norms = [self._site_errors[k] for k in range(1, self.network.depth + 1)]
        sites = torch.stack(norms, dim=1) if norms else torch.zeros(len(x), 0, dtype=torch.float64, device=x.device)
        return Execution(logits, sites, output)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        v = self.network.produced.get(n)
        if v is not None and result.dtype != self.network.dtype:
            remedy = f"it computes in {result.dtype} inside a model in {self.network.dtype}; use one type throughout"
            raise UnsupportedError([UnsupportedNode(n.name, str(n.target), remedy)])
        if v is not None and v not in self._values:
            self._values[v] = result
            if v in self.site_at:
                self._reach(v)
        return result

    def _reach(self, v: int) -> None:
        """Compute the error of a node, and first of those before it that the model does not materialise."""
        if v in self._errors:
            return
        if v in self.site_at:
            self._site_errors[self.site_at[v]] = self._site_error(v)
            self._errors[v] = _Error()
            return
        for edge in self.network.nodes[v].edges:
            self._reach(edge.source)
        self._errors[v] = self._node_error(v)

    def _value(self, v: int) -> Tensor:
        """The value of a node; those that the model does not materialise (an explicit padding) are computed."""
        if v not in self._values:
            (edge,) = self.network.nodes[v].edges
            self._values[v] = edge.op.apply(self._value(edge.source))
        return self._values[v]

    def _node_error(self, v: int) -> _Error:
        """What arrives at a node, and what it makes itself."""
        node, bounds = self.network.nodes[v], self.stages.nodes[v]
        carried: list[Tensor] = []
        norm: Tensor | float = 0.0
        for edge, factor in zip(node.edges, bounds.carried, strict=True):
            norm = norm + factor * self._arriving(v, edge)
            entries = self._errors[edge.source].entries
            if entries is not None and not self._cuts(v, edge):
                carried.append(edge.op.magnitude(entries))
        total = sum(carried[1:], start=carried[0]) if carried else None
        if bounds.roundoff == 0.0:
            return _Error(total, norm)
        if bounds.coarse:
            return _Error(None, norm + bounds.roundoff * self._sum_of_norms(v) + bounds.underflow)
        terms = local_terms(node)
        local = self._made(v, terms)
        if total is not None:
            local = (total + local) * (1 + 4 * gamma(max(terms, 1) + 2, self.network.dtype))
        return _Error(local, norm)

    def _cuts(self, v: int, edge: Edge) -> bool:
        """Whether errors that reach a node by this edge go on as a norm, instead of being followed entry by entry."""
        return self.stages.nodes[v].coarse or is_weighted(edge.op)

    def _arriving(self, v: int, edge: Edge) -> Tensor | float:
        """(B,): what an edge of a node carries as a norm; a plain 0 if nothing."""
        entries, norm = self._errors[edge.source]
        return norm + _norms(entries) if entries is not None and self._cuts(v, edge) else norm

    def _made(self, v: int, terms: int) -> Tensor:
        """The error that a node makes itself, entry by entry."""
        edges = self.network.nodes[v].edges
        if terms == 1 and all(edge.op.terms == 0 for edge in edges):  # one addition: half an ulp of the result
            return self._value(v).abs() * gamma(1, self.network.dtype) + self.tiny
        first, *others = (edge.op.magnitude(self._value(edge.source).abs()) for edge in edges)
        local = sum(others, start=first)
        offset = self.offsets[v]
        if offset is not None:
            local = local + offset
        # The sum of magnitudes is itself rounded; products may underflow.
        local *= gamma(terms + 1, self.network.dtype) * (1 + 4 * gamma(terms + 2, self.network.dtype))
        local += terms * self.tiny
        return local

    def _sum_of_norms(self, v: int) -> Tensor:
        """(B,): a bound on ‖Σ |A||û| + |b|‖."""
        bounds = self.stages.nodes[v]
        sums = [mu * self._size(edge.source) for edge, mu in zip(self.network.nodes[v].edges, bounds.sums, strict=True)]
        return sum(sums[1:], start=sums[0]) + bounds.offset

    def _size(self, v: int) -> Tensor:
        """(B,): a bound on the norm of the value of a node."""
        if v not in self._sizes:
            bounds = self.stages.nodes[v]
            # What only moves entries may put constants beside them, as a padding does.
            if v in self.network.site_of_output or bounds.measured or bounds.roundoff == 0.0:
                self._sizes[v] = _norms(self._value(v))
            else:
                self._sizes[v] = (1 + bounds.roundoff) * self._sum_of_norms(v) + bounds.underflow
        return self._sizes[v]

    def _site_error(self, v: int) -> Tensor:
        """(B,): ‖error at the output of a nonlinearity‖ ≤ Lip·‖error at its input‖ + its own rounding."""
        site = self.network.sites[self.site_at[v]]
        assert site.slope is not None
        lipschitz = float(site.slope.lipschitz())
        result = self._values[v]
        bound = lipschitz * self._input_error(self.site_at[v])
        if site.slope.ulps or site.slope.absolute:
            relative = 2 * site.slope.roundings(result[0].numel()) * gamma(1, self.network.dtype)
            entry = site.slope.absolute + self.tiny
            scale = _norms(result) + lipschitz * _norms(self._values[site.source])
            bound = bound + relative * scale + entry * result[0].numel() ** 0.5
        return bound * (1 + 1e-9)

    def _input_error(self, k: int) -> Tensor:
        """(B,): ‖error at the input of site k‖."""
        source = self.network.sites[k].source
        self._reach(source)
        entries, norm = self._errors[source]
        if entries is not None:
            norm = norm + _norms(entries)
        return norm if isinstance(norm, Tensor) else torch.zeros_like(self._size(0))


def _norms(x: Tensor) -> Tensor:
    """(B,): l2 norm of every row in float64, from above."""
    size = x[0].numel()
    lost = 1.01 * (size * torch.finfo(x.dtype).tiny) ** 0.5  # squares that underflow
    norms = torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim()))).double()
    upper: Tensor = norms * (1 + gamma(size + 4, x.dtype)) + lost
    return upper
