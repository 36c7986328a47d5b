"""What a stage of the network, from the outputs of sites to the input of the next one, does to rounding errors.

A node computes v_w = Σ_e A_e v_u + b, an edge e leading from u to w, and makes an error
of at most γ(Σ|A_e||v̂_u| + |b|) in each entry. So |A| belongs to errors that are made.
Errors that are there already travel by A itself, whose norm is far smaller where a
convolution or a dense layer follows another one. With σ_e ≥ ‖A_e‖ and μ_e ≥ ‖|A_e|‖,
the norm of the error that a stage makes up to the node w is at most

    n_w = Σ_e (σ_e + 2γμ_e)·n_u + γ·‖Σ_e |A_e||v̂_u| + |b|‖,      n = 0 at the outputs of sites.

The term 2γμ_e makes the same numbers serve at any other point, where the outputs of the
sites differ by δ. There v̂_u differs by at most m_u·δ + n_u + n′_u, where m_w = Σ_e σ_e
m_u is the norm of the map from the sites' outputs to w. By induction, the errors n′ at
the other point satisfy

    n′_w ≤ Σ_e σ_e n′_u + γ·‖Σ_e |A_e||v̂_u| + |b|‖ + γ·Σ_e μ_e(m_u δ + n_u + n′_u) ≤ n_w + q_w·δ,
    q_w = Σ_e (σ_e + 2γμ_e)·q_u + γ·Σ_e μ_e m_u.

For one logit, the norms of its rows take the place of both σ and μ: those of A and of
|A| are the same.

Processors may take numbers below the smallest normal one, `tiny`, for zero. An entry
then loses up to tiny in every product and in every operand: tiny·(2·terms + Σ|A|).
Weights that small change A itself, by entries of up to tiny.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor

from lipcert.certificate.stage_paths import (
    coarse_nodes,
    stage_users,
    weighted_after,
    weighted_before,
)
from lipcert.network.linear import LinearOp
from lipcert.network.normal_form import Network, Node
from lipcert.norms.operations import operation_norm
from lipcert.norms.product_errors import magnitude_norm
from lipcert.norms.rows import row_norms
from lipcert.rounding import gamma


@dataclass(frozen=True)
class NodeBounds:
    """The numbers of one node; `carried`, `sums` and `flushed` have one for every edge.

    carried: σ + 2γμ.
    sums: μ.
    flushed: norm of what is lost of a weight matrix.
    offset: ‖b‖.
    roundoff: γ, 0 if the node only moves entries.
    lost: what an entry loses where products and operands underflow.
    coarse: the errors that the node makes are bounded by norms at a point, too, instead
    of being followed.
    measured: the norm of the node's value is taken from the value itself, instead of
    being bounded by those before it.
    """

    carried: tuple[float, ...]
    sums: tuple[float, ...]
    flushed: tuple[float, ...]
    offset: float
    roundoff: float
    lost: float
    coarse: bool
    measured: bool


@dataclass(frozen=True)
class Stages:
    """The numbers of all nodes and what follows from them for stages; float64.

    rows: for every edge of the last node, (K,): the factor of an error for each logit.
    errors: (n, n+1), q_ki, by how much the error at the input of site k = 1..n grows
    with ‖û_i‖ of site i = 0..n.
    logits: (K, n+1), q_ai, the same for the error of each logit.
    norms: (nodes, n+1), norm of the sums of absolute products at each node per unit of
    ‖û_i‖.
    """

    nodes: tuple[NodeBounds, ...]
    rows: tuple[Tensor, ...]
    errors: Tensor
    logits: Tensor
    norms: Tensor


@torch.no_grad()
def stage_bounds(network: Network, exact: Network, by_norms: bool = False) -> Stages:
    """The bounds for `network` as executed in its dtype; `exact` is its float64 copy; `by_norms` of `coarse_nodes`."""
    like = torch.zeros((), dtype=torch.float64, device=exact.device)
    users = stage_users(exact)
    before, after = weighted_before(exact), weighted_after(exact, users)
    coarse = coarse_nodes(exact, users, by_norms)
    nodes: list[NodeBounds] = []
    # m_w, q_w and Σ μ_e m_u of all nodes, by the site i = 0..n whose output changes.
    shape = (len(exact.nodes), exact.depth + 1)
    maps, grown, norms = torch.zeros(3, *shape, dtype=torch.float64)
    for v, node in enumerate(exact.nodes):
        roundings = network.nodes[v].roundings
        roundoff = gamma(roundings + 1, network.dtype) if roundings else 0.0
        carried, sums, flushed = [], [], []
        # A stage begins: m = 1 here, q = 0.
        if v in exact.site_of_output:
            maps[v, exact.site_of_output[v]] = 1.0
        for edge in node.edges:
            u, op = edge.source, edge.op
            mu = sigma = magnitude_norm(op, like)
            # ‖A‖ ≤ ‖|A|‖. A proof of ‖A‖ takes time, and pays where weighted operations
            # follow each other.
            if op.weighted and (before[u] or after[v]):
                sigma = min(mu, operation_norm(op))
            small = _flushed(op, network.dtype)
            carried.append(sigma + 2 * (roundoff * mu + small))
            sums.append(mu)
            flushed.append(small)
            maps[v] += sigma * maps[u]
            norms[v] += mu * maps[u]
            # q_w = Σ_e (σ_e + 2γμ_e)·q_u + γ·Σ_e μ_e m_u; weights that are flushed to
            # zero count like roundings.
            grown[v] += carried[-1] * grown[u] + (roundoff * mu + small) * maps[u]
        measured = before[v] and any(op.weighted for _, op in users[v])
        lost = underflow_loss(node, roundings, network.dtype)
        of_edges = tuple(carried), tuple(sums), tuple(flushed)
        offset, is_coarse = _offset_norm(node), v in coarse
        nodes.append(NodeBounds(*of_edges, offset, roundoff, lost, is_coarse, measured))
    return _collect(exact, nodes, maps, grown, norms)


def _collect(
    exact: Network, nodes: list[NodeBounds], maps: Tensor, grown: Tensor, norms: Tensor
) -> Stages:
    """What the numbers of the nodes mean for stages and logits."""
    like = torch.zeros((), dtype=torch.float64, device=exact.device)
    last = exact.sites[-1].source
    roundoff = nodes[last].roundoff
    factors = []
    logits = torch.zeros(exact.classes, exact.depth + 1, dtype=torch.float64)
    for edge, small in zip(exact.nodes[last].edges, nodes[last].flushed, strict=True):
        # One logit is one row a of A: ‖A_a‖ = ‖|A_a|‖ is its σ and its μ.
        row = _row_norms(edge.op, like)
        factors.append(row * (1 + 2 * roundoff) + 2 * small)
        q, m = grown[edge.source], maps[edge.source]
        logits += row[:, None] * ((1 + 2 * roundoff) * q + roundoff * m)
        logits += small * (2 * q + m)
    # (n, n+1): the rows of the nodes that sites 1..n read.
    errors = grown[[site.source for site in exact.sites[1:-1]]]
    rounded = 1 + 1e-6  # the sums above
    sums = errors * rounded, logits * rounded, norms * rounded
    return Stages(tuple(nodes), tuple(factors), *sums)


def _flushed(op: LinearOp, dtype: torch.dtype) -> float:
    """The norm of what a matrix loses if entries below the smallest normal number are taken for zero."""
    if not op.denormal():
        return 0.0
    # A matrix of entries of at most tiny: its norm is at most tiny·√(rows·columns).
    return torch.finfo(dtype).tiny * sqrt(prod(op.in_shape) * prod(op.out_shape))


def underflow_loss(node: Node, roundings: int, dtype: torch.dtype) -> float:
    """What an entry loses where products and operands underflow; in products of three, times a factor of up to 16."""
    if roundings == 0:
        return 0.0
    # 2·terms for the products, Σ|A| of the heaviest entry for the operands.
    total = 2.0 * roundings + 2.0
    for edge in node.edges:
        if 0 in (*edge.op.in_shape, *edge.op.out_shape):
            continue
        ones = torch.ones(1, *edge.op.in_shape, dtype=torch.float64)
        total += 16.0 * float(edge.op.magnitude(ones).max())
    return 1.01 * total * torch.finfo(dtype).tiny


def _offset_norm(node: Node) -> float:
    if node.offset is None:
        return 0.0
    offset = node.offset().double().expand(node.shape)
    return 1.001 * float(torch.linalg.vector_norm(offset))


def _row_norms(op: LinearOp, like: Tensor) -> Tensor:
    """(K,): norms of the rows of A, from above."""
    # Aᵀe_a is row a of A.
    unit = torch.eye(prod(op.out_shape), dtype=like.dtype, device=like.device)
    rows = op.adjoint(unit.reshape(-1, *op.out_shape)).reshape(len(unit), -1)
    return row_norms(rows).cpu() * (1 + 1e-6)
