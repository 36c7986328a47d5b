"""What a stage of the network, from the outputs of sites to the input of the next one, does to rounding errors.

A node computes v_w = Σ_e A_e v_u + b, an edge e leading from u to w, and makes an error of at most γ(Σ|A_e||v̂_u| + |b|)
in each entry. So |A| belongs to errors that are made. Errors that are there already travel by A itself, whose norm is
far smaller where a convolution or a dense layer follows another one. With σ_e ≥ ‖A_e‖ and μ_e ≥ ‖|A_e|‖, the norm of
the error that a stage makes up to the node w is at most

    n_w = Σ_e (σ_e + 2γμ_e)·n_u + γ·‖Σ_e |A_e||v̂_u| + |b|‖,      n = 0 at the outputs of sites.

The term 2γμ_e makes the same numbers serve at any other point, where the outputs of the sites differ by δ. There v̂_u
differs by at most m_u·δ + n_u + n′_u, where m_w = Σ_e σ_e m_u is the norm of the map from the sites' outputs to w. By
induction, the errors n′ at the other point satisfy

    n′_w ≤ Σ_e σ_e n′_u + γ·‖Σ_e |A_e||v̂_u| + |b|‖ + γ·Σ_e μ_e(m_u δ + n_u + n′_u) ≤ n_w + q_w·δ,
    q_w = Σ_e (σ_e + 2γμ_e)·q_u + γ·Σ_e μ_e m_u.

For one logit, the norms of its rows take the place of both σ and μ: those of A and of |A| are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lipcert.errors import UnsupportedError, UnsupportedNode
from lipcert.network.convolution import Convolution, TransposedConvolution
from lipcert.network.linear import Dense, Identity, LinearOp, Scale
from lipcert.network.normal_form import Network, Node
from lipcert.norms.operations import operation_norm
from lipcert.norms.rounding import gamma, magnitude_norm

_FOLLOWED_TERMS = 300
"""Convolutions that sum fewer products than this round so little that a bound by norms is good enough."""


@dataclass(frozen=True)
class NodeBounds:
    """The numbers of one node; `carried` and `sums` have one for every edge.

    carried: σ + 2γμ. sums: μ. offset: ‖b‖. roundoff: γ, 0 if the node only moves entries.
    underflow: norm of what is lost where products underflow.
    coarse: the errors that the node makes are bounded by norms at a point, too, instead of being followed.
    measured: the norm of the node's value is taken from the value itself, instead of being bounded by those before it.
    """

    carried: tuple[float, ...]
    sums: tuple[float, ...]
    offset: float
    roundoff: float
    underflow: float
    coarse: bool
    measured: bool


@dataclass(frozen=True)
class Stages:
    """The numbers of all nodes and what follows from them for stages; float64.

    rows: for every edge of the last node, (K,): the factor of an error for each logit.
    errors: (n, n+1), q_ki, by how much the error at the input of site k = 1..n grows with ‖û_i‖ of site i = 0..n.
    logits: (K, n+1), q_ai, the same for the error of each logit.
    norms: (nodes, n+1), norm of the sums of absolute products at each node per unit of ‖û_i‖.
    """

    nodes: tuple[NodeBounds, ...]
    rows: tuple[Tensor, ...]
    errors: Tensor
    logits: Tensor
    norms: Tensor


def local_terms(node: Node) -> int:
    """How many roundings an entry of the node's sum can see; 0 if the node only moves entries."""
    edges = node.edges
    count = max((edge.op.terms for edge in edges), default=0) + len(edges) - 1
    exact = all(edge.op.terms == 0 and not isinstance(edge.op, Identity) for edge in edges)
    return count if node.offset is None or exact else count + 1


def underflow(dtype: torch.dtype) -> float:
    """Error of an operation that underflows, also of operands flushed to zero, times weights of up to 2^20."""
    return torch.finfo(dtype).tiny * 2.0**20


def is_weighted(op: LinearOp) -> bool:
    """Whether |A| may have a larger norm than A; that of other operations is the same."""
    return isinstance(op, Dense | Convolution | TransposedConvolution)


@torch.no_grad()
def stage_bounds(network: Network, exact: Network) -> Stages:
    """The bounds for `network` as executed in its dtype; `exact` is its float64 copy."""
    like = torch.zeros((), dtype=torch.float64, device=exact.device)
    users = _users(exact)
    before, after = _weighted_before(exact), _weighted_after(exact, users)
    coarse = _coarse_nodes(exact, users)
    nodes: list[NodeBounds] = []
    maps, grown, norms = torch.zeros(3, len(exact.nodes), exact.depth + 1, dtype=torch.float64)
    for v, (node, executed) in enumerate(zip(exact.nodes, network.nodes, strict=True)):
        terms = local_terms(executed) if node.edges else 0
        roundoff = gamma(terms + 1, network.dtype) if terms else 0.0
        _check_weights(node, executed, network.dtype)
        carried, sums = [], []
        if v in exact.site_of_output:
            maps[v, exact.site_of_output[v]] = 1.0
        for u, op in ((edge.source, edge.op) for edge in node.edges):
            mu = sigma = magnitude_norm(op, like)
            if is_weighted(op) and (before[u] or after[v]):
                sigma = min(mu, operation_norm(op))
            carried.append(sigma + 2 * roundoff * mu)
            sums.append(mu)
            maps[v] += sigma * maps[u]
            norms[v] += mu * maps[u]
            grown[v] += carried[-1] * grown[u] + roundoff * mu * maps[u]
        offset = 0.0
        if node.offset is not None:
            offset = 1.001 * float(torch.linalg.vector_norm(node.offset().double().expand(node.shape)))
        lost = terms * underflow(network.dtype) * prod(node.shape) ** 0.5
        measured = before[v] and any(is_weighted(op) for _, op in users[v])
        nodes.append(NodeBounds(tuple(carried), tuple(sums), offset, roundoff, lost, v in coarse, measured))
    last = exact.sites[-1].source
    roundoff = nodes[last].roundoff
    rows = [_row_norms(edge.op, like) for edge in exact.nodes[last].edges]
    logits = torch.zeros(exact.classes, exact.depth + 1, dtype=torch.float64)
    for edge, row in zip(exact.nodes[last].edges, rows, strict=True):
        logits += row[:, None] * ((1 + 2 * roundoff) * grown[edge.source] + roundoff * maps[edge.source])
    errors = grown[[site.source for site in exact.sites[1:-1]]]
    rounded = 1 + 1e-6  # the sums above
    factors = tuple(row * (1 + 2 * roundoff) for row in rows)
    return Stages(tuple(nodes), factors, errors * rounded, logits * rounded, norms * rounded)


def _check_weights(node: Node, executed: Node, dtype: torch.dtype) -> None:
    """Refuse weights and factors that the model computes with more roundings than are counted: exact ones differ."""
    for edge, own in zip(node.edges, executed.edges, strict=True):
        (exact, roundings), (found, _) = _weights(edge.op), _weights(own.op)
        allowed = 1.01 * gamma(roundings, dtype) * exact.abs() + torch.finfo(dtype).tiny
        if bool(((found - exact).abs() > allowed).any()):
            remedy = "its weights are computed in forward with rounding errors; compute them once, or use float64"
            raise UnsupportedError([UnsupportedNode(node.name, "weights", remedy)])


def _weights(op: LinearOp) -> tuple[Tensor, int]:
    """What an operation multiplies by, and how many roundings of it are counted; empty if it has no weights."""
    if isinstance(op, Dense | Convolution | TransposedConvolution):
        return op.weight().double(), 1
    return (op.factor().double(), op.terms) if isinstance(op, Scale) else (torch.zeros(0), 1)


def _row_norms(op: LinearOp, like: Tensor) -> Tensor:
    """(K,): norms of the rows of A, from above."""
    unit = torch.eye(prod(op.out_shape), dtype=like.dtype, device=like.device)
    rows = op.adjoint(unit.reshape(-1, *op.out_shape)).flatten(1)
    upper: Tensor = torch.linalg.vector_norm(rows, dim=1).cpu() * (1 + 1e-6)
    return upper


Users = Sequence[Sequence[tuple[int, LinearOp]]]
"""The nodes that each node leads to without passing a site, and by which operation."""


def _users(network: Network) -> Users:
    users: list[list[tuple[int, LinearOp]]] = [[] for _ in network.nodes]
    for v, node in enumerate(network.nodes):
        for edge in node.edges:
            users[edge.source].append((v, edge.op))
    return users


def _weighted_before(network: Network) -> list[bool]:
    """Whether a path of the stage leads through a weighted operation to each node."""
    found: list[bool] = []
    for node in network.nodes:
        found.append(any(is_weighted(edge.op) or found[edge.source] for edge in node.edges))
    return found


def _weighted_after(network: Network, users: Users) -> list[bool]:
    """Whether a path of the stage leads from each node through a weighted operation."""
    found = [False] * len(network.nodes)
    for v in reversed(range(len(network.nodes))):
        found[v] = any(is_weighted(op) or found[w] for w, op in users[v])
    return found


def _coarse_nodes(network: Network, users: Users) -> set[int]:
    """Convolutions of few products, what follows from them, and what leads to nothing else.

    What sums many products is followed, and so is what leads to the logits alone.
    """
    ends = {site.source for site in network.sites[1:-1]}
    few: set[int] = set()
    leading: set[int] = set()
    for v in reversed(range(len(network.nodes))):
        edges = network.nodes[v].edges
        if v in ends or any(w in leading for w, _ in users[v]):
            leading.add(v)
        if v in leading and edges and all(edge.op.terms < _FOLLOWED_TERMS for edge in edges):
            few.add(v)
    coarse: set[int] = set()
    for v in sorted(few):
        edges = network.nodes[v].edges
        if any(isinstance(e.op, Convolution | TransposedConvolution) or e.source in coarse for e in edges):
            coarse.add(v)
    for v in sorted(few - ends, reverse=True):
        if all(w in coarse for w, _ in users[v]):
            coarse.add(v)
    return coarse - {network.sites[-1].source}
