"""Runs a model and bounds, input by input, the rounding errors that it makes (running error analysis).

The network is cut at its nonlinearities. Within a stage, from the outputs of earlier sites to the input of the next
one, errors are followed entry by entry with |A|: at a node that computes Σ A û + b,

    e ← Σ |A| e + γ·(Σ |A||û| + |b|),      e = 0 at the outputs of sites.

Across stages errors travel with the Lipschitz constants of the exact network (see `rounding`), which are far smaller
than products of |A|.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lipcert.certificate.stages import Stages, local_terms, underflow
from lipcert.errors import UnsupportedError, UnsupportedNode
from lipcert.network.normal_form import Network, Node
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
    unknown = {node.name: linear for node in network.nodes for edge in node.edges if edge.op.terms < 0}
    unknown |= {site.name: nonlinear for site in network.sites if site.slope and site.slope.ulps is None}
    if unknown:
        raise UnsupportedError([UnsupportedNode(name, "rule", remedy) for name, remedy in unknown.items()])


class ErrorPass(OutOfPlace):
    """Executes the traced model and follows the errors alongside."""

    def __init__(self, network: Network, stages: Stages) -> None:
        super().__init__(network.graph)
        self.network, self.stages = network, stages
        self.tiny = underflow(network.dtype)
        with torch.no_grad():
            self.offsets = [
                node.offset().to(network.device, network.dtype) if node.offset else None for node in network.nodes
            ]
        self.site_at = {site.output: k for k, site in enumerate(network.sites[1:-1], start=1)}

    @torch.no_grad()
    def execute(self, x: Tensor) -> Execution:
        """Run one batch."""
        self._values: dict[int, Tensor] = {}
        self._errors: dict[int, Tensor] = {0: None}  # type: ignore[dict-item]
        self._site_errors: dict[int, Tensor] = {}
        self._site_norms: dict[int, Tensor] = {}
        logits = self.run(x)
        last = self.network.sites[-1].source
        self._reach(last)
        error = self._errors[last]
        output = error.double() if error is not None else torch.zeros(logits.shape, dtype=torch.float64)
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
        node = self.network.nodes[v]
        if v in self.site_at:
            self._site_errors[self.site_at[v]] = self._site_error(v)
            self._errors[v] = None  # type: ignore[assignment]
            return
        for edge in node.edges:
            self._reach(edge.source)
        self._errors[v] = self._node_error(v, node)

    def _value(self, v: int) -> Tensor:
        """The value of a node; those that the model does not materialise (an explicit padding) are computed."""
        if v not in self._values:
            (edge,) = self.network.nodes[v].edges
            self._values[v] = edge.op.apply(self._value(edge.source))
        return self._values[v]

    def _node_error(self, v: int, node: Node) -> Tensor:
        carried = [
            edge.op.magnitude(self._errors[edge.source]) for edge in node.edges if self._errors[edge.source] is not None
        ]
        terms = local_terms(node)
        total = sum(carried) if carried else None
        if terms == 1 and all(edge.op.terms == 0 for edge in node.edges):  # one addition: half an ulp of the result
            local = self._value(v).abs() * gamma(1, self.network.dtype) + self.tiny
        elif terms > 0:
            first, *others = (edge.op.magnitude(self._value(edge.source).abs()) for edge in node.edges)
            local = sum(others, start=first)
            offset = self.offsets[v]
            if offset is not None:
                local = local + offset
            # The sum of magnitudes is itself rounded; products may underflow.
            local *= gamma(terms + 1, self.network.dtype) * (1 + 4 * gamma(terms + 2, self.network.dtype))
            local += terms * self.tiny
        else:
            return total  # type: ignore[return-value]
        if total is None:
            return local
        return (total + local) * (1 + 4 * gamma(max(terms, 1) + 2, self.network.dtype))

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
        """(B,): ‖error at the input of site k‖, followed entry by entry or bounded by norms."""
        if k not in self.stages.coarse:
            source = self.network.sites[k].source
            self._reach(source)
            error = self._errors[source]
            return _norms(error) if error is not None else torch.zeros_like(self._norm_at(0))
        total = self.stages.constants[k - 1].to(self.network.device)
        for i, factor in enumerate(self.stages.errors[k - 1].tolist()):
            if factor:
                total = total + factor * self._norm_at(i)
        return total

    def _norm_at(self, i: int) -> Tensor:
        """(B,): ‖û_i‖ at the output of site i."""
        if i not in self._site_norms:
            self._site_norms[i] = _norms(self._values[self.network.sites[i].output])
        return self._site_norms[i]


def _norms(x: Tensor) -> Tensor:
    """(B,): l2 norm of every row in float64, from above."""
    size = x[0].numel()
    lost = 1.01 * (size * torch.finfo(x.dtype).tiny) ** 0.5  # squares that underflow
    norms = torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim()))).double()
    upper: Tensor = norms * (1 + gamma(size + 4, x.dtype)) + lost
    return upper
