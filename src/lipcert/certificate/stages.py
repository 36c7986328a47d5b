"""What a stage of the network, from the outputs of sites to the input of the next one, does to rounding errors.

These are bounds by norms, the same for all inputs. They serve for the growth of errors over a ball, and for the errors
at a point in stages where following every entry would cost more than it gains.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lipcert.network.convolution import Convolution, TransposedConvolution
from lipcert.network.linear import Identity
from lipcert.network.normal_form import Network, Node
from lipcert.norms.rounding import gamma, magnitude_norm

_FOLLOWED_TERMS = 300
"""Stages of convolutions that sum fewer products than this round so little that a bound by norms is good enough."""


@dataclass(frozen=True)
class Stages:
    """Bounds by norms for the stages that end at sites 1..n+1; float64.

    errors: (n+1, n+1), p_ki, error norm at the input of site k per unit of ‖û_i‖ at the output of site i = 0..n.
    constants: (n+1,), the part of it that does not depend on û: the rounding of what is added.
    norms: (nodes, n+1), ν_vi, norm of the sums of absolute products at node v per unit of ‖û_i‖.
    coarse: the sites whose stage is bounded by norms at a point, too.
    """

    errors: Tensor
    constants: Tensor
    norms: Tensor
    coarse: frozenset[int]


def local_terms(node: Node) -> int:
    """How many roundings an entry of the node's sum can see; 0 if the node only moves entries."""
    edges = node.edges
    count = max((edge.op.terms for edge in edges), default=0) + len(edges) - 1
    exact = all(edge.op.terms == 0 and not isinstance(edge.op, Identity) for edge in edges)
    return count if node.offset is None or exact else count + 1


def underflow(dtype: torch.dtype) -> float:
    """Error of an operation that underflows, also of operands flushed to zero, times weights of up to 2^20."""
    return torch.finfo(dtype).tiny * 2.0**20


@torch.no_grad()
def stage_bounds(network: Network, exact: Network) -> Stages:
    """The bounds for `network` as executed in its dtype; `exact` is its float64 copy."""
    like = torch.zeros((), dtype=torch.float64, device=exact.device)
    starts = {site.output: i for i, site in enumerate(exact.sites[:-1])}
    size = exact.depth + 2  # the sites 0..n, and a column for constants
    norms: list[Tensor] = []
    errors: list[Tensor] = []
    for v, (node, executed) in enumerate(zip(exact.nodes, network.nodes, strict=True)):
        norm, error = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
        if v in starts:
            norm[starts[v]] = 1.0
        else:
            for edge in node.edges:
                factor = magnitude_norm(edge.op, like)
                norm, error = norm + factor * norms[edge.source], error + factor * errors[edge.source]
            if node.offset is not None:
                offset = node.offset().double().expand(node.shape)
                norm[-1] += 1.001 * float(torch.linalg.vector_norm(offset))
            if terms := local_terms(executed):
                error = error + gamma(terms + 1, network.dtype) * 1.01 * norm
                error[-1] += terms * underflow(network.dtype) * prod(node.shape) ** 0.5
        norms.append(norm)
        errors.append(error)
    ends = torch.stack([errors[site.source] for site in exact.sites[1:]]) * 1.01
    coarse = frozenset(k for k in range(1, exact.depth + 1) if _is_coarse(exact, exact.sites[k].source))
    return Stages(ends[:, :-1], ends[:, -1], torch.stack(norms)[:, :-1], coarse)


def _is_coarse(network: Network, source: int) -> bool:
    operations = [edge.op for v in stage_nodes(network, source) for edge in network.nodes[v].edges]
    convolves = any(isinstance(op, Convolution | TransposedConvolution) for op in operations)
    return convolves and all(op.terms < _FOLLOWED_TERMS for op in operations)


def logit_errors(network: Network, exact: Network) -> Tensor:
    """(K, n+1): the error of each logit made in the last stage, per unit of ‖û_i‖ at the output of each site i.

    The error is a linear function of the magnitudes |û_i| with non-negative coefficients, followed here as in the error
    pass; its gradient is the row of coefficients, and the row's norm is what is wanted.
    """
    leaves = {}
    sums: dict[int, Tensor] = {}
    errors: dict[int, Tensor] = {}
    last = exact.sites[-1].source
    needed = stage_nodes(exact, last)
    with torch.enable_grad():
        for v in sorted(needed):
            node = exact.nodes[v]
            if v in exact.site_of_output:
                shape = (1, *node.shape)
                sums[v] = leaves[v] = torch.zeros(shape, dtype=torch.float64, device=exact.device, requires_grad=True)
                errors[v] = torch.zeros_like(sums[v])
                continue
            terms = local_terms(network.nodes[v])
            sums[v] = torch.stack([edge.op.magnitude(sums[edge.source]) for edge in node.edges]).sum(0)
            carried = torch.stack([edge.op.magnitude(errors[edge.source]) for edge in node.edges]).sum(0)
            errors[v] = carried + (gamma(terms + 1, network.dtype) if terms else 0.0) * sums[v]
        result = torch.zeros(exact.classes, exact.depth + 1, dtype=torch.float64)
        for a in range(exact.classes):
            if errors[last].requires_grad:
                rows = torch.autograd.grad(
                    errors[last][0, a], list(leaves.values()), retain_graph=True, allow_unused=True
                )
                for v, row in zip(leaves, rows, strict=True):
                    result[a, exact.site_of_output[v]] = float(row.norm()) if row is not None else 0.0
    return result * 1.02  # second order, and the rounding of this computation


def stage_nodes(network: Network, last: int) -> set[int]:
    """The nodes from which a node is reached without passing a site, and the outputs of the sites before them."""
    found: set[int] = set()
    waiting = [last]
    while waiting:
        v = waiting.pop()
        if v not in found:
            found.add(v)
            waiting += [edge.source for edge in network.nodes[v].edges]
    return found
