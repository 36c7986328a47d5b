"""How the nodes of a stage follow each other, and which of them are bounded by norms (see `stages`)."""

from __future__ import annotations

from collections.abc import Sequence

from lipcert.network.linear import LinearOp
from lipcert.network.normal_form import Network

_FOLLOWED_TERMS = 300
"""Operations with weights that sum fewer products than this round so little that a bound by norms is good enough."""

Users = Sequence[Sequence[tuple[int, LinearOp]]]
"""The nodes that each node leads to without passing a site, and by which operation."""


def stage_users(network: Network) -> Users:
    users: list[list[tuple[int, LinearOp]]] = [[] for _ in network.nodes]
    for v, node in enumerate(network.nodes):
        for edge in node.edges:
            users[edge.source].append((v, edge.op))
    return users


def weighted_before(network: Network) -> list[bool]:
    """Whether a path of the stage leads through a weighted operation to each node."""
    weighted: list[bool] = []
    for node in network.nodes:
        # Nodes are in topological order, and outputs of sites have no edges: a stage
        # begins with False.
        weighted.append(any(e.op.weighted or weighted[e.source] for e in node.edges))
    return weighted


def weighted_after(network: Network, users: Users) -> list[bool]:
    """Whether a path of the stage leads from each node through a weighted operation."""
    weighted = [False] * len(network.nodes)
    for v in reversed(range(len(network.nodes))):
        weighted[v] = any(op.weighted or weighted[w] for w, op in users[v])
    return weighted


def coarse_nodes(network: Network, users: Users, by_norms: bool) -> set[int]:
    """Operations with weights and few products, what follows from them, and what leads to nothing else.

    What sums many products is followed, and so is what leads to the logits alone. If
    `by_norms`, only the latter is.
    """
    ends = {site.source for site in network.sites[1:-1]}
    few: set[int] = set()
    leading: set[int] = set()
    for v in reversed(range(len(network.nodes))):
        edges = network.nodes[v].edges
        # Backwards: `leading` is what reaches the input of a nonlinearity; the others
        # are wanted logit by logit.
        if v in ends or any(w in leading for w, _ in users[v]):
            leading.add(v)
        sums_few = edges and all(e.op.terms < _FOLLOWED_TERMS for e in edges)
        if v in leading and sums_few:
            few.add(v)
    if by_norms:
        return leading - {network.sites[-1].source}
    coarse: set[int] = set()
    # Forwards: convolutions of few products, and what follows from them, for behind a
    # norm there are no entries.
    for v in sorted(few):
        edges = network.nodes[v].edges
        if any(e.op.coarse or e.source in coarse for e in edges):
            coarse.add(v)
    # Backwards again: errors that all readers turn into norms need no entries either.
    for v in sorted(few - ends, reverse=True):
        if all(w in coarse for w, _ in users[v]):
            coarse.add(v)
    return coarse - {network.sites[-1].source}
