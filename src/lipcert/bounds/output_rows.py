"""Rows of the maps from the sites to the logits, and the norms of what a target makes of them.

Where the last dense layer W (K × h) has more logits than it reads neurons, B_{n+1,i} =
W·M_i, and only the h rows of M_i travel back. In place of W·M_i stands W·L with a
factor L of the h × h Gram matrix: ‖xM‖ ≤ ‖xL‖ for every row x, and hardly more, so that
all pairs of a thousand classes cost what h rows cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod, sqrt

import torch
from torch import Tensor

from lipcert.bounds.targets import Target
from lipcert.errors import TooLargeError
from lipcert.network.linear import Dense
from lipcert.network.normal_form import Network
from lipcert.norms.product_errors import ProductErrors
from lipcert.norms.rows import flat_rows, row_norms
from lipcert.resources import share_of_memory, shown_bytes
from lipcert.rounding import UNDERFLOW, gamma

_COPIES = 4
"""Tensors with all rows at the widest node that are in memory at a time."""
_SMALLEST_SHIFT = 1e-290
"""More than what products lose where they underflow."""


def output_rows(
    network: Network, errors: ProductErrors
) -> Iterator[tuple[int, Tensor, float]]:
    """For the sites i that the output depends on, from the last one: i, the rows of B_{n+1,i}, and their errors."""
    classes, last = network.classes, network.depth + 1
    seed = torch.eye(classes, dtype=torch.float64, device=network.device)
    errors = errors.copy()
    for i, rows in network.pull_each(last, seed):
        error = errors.error((last, i))
        yield i, rows, error
        # ‖B‖ ≤ ‖B‖_F. Sites nearer to the input come later, and their errors travel
        # through this map.
        frobenius = float(row_norms(rows).square().sum().sqrt())
        errors.know((last, i), frobenius * (1 + 1e-9) + sqrt(classes) * error)


@torch.no_grad()
def check_rows_fit(network: Network) -> None:
    """Refuse a network whose rows do not fit into the memory, before any work."""
    head = narrow_head(network)
    # With a narrow head the rows of its h neurons travel, not those of the K logits.
    rows = (head.network if head is not None else network).classes
    widest = max(prod(node.shape) for node in network.nodes)
    needed, free = 8 * _COPIES * rows * widest, share_of_memory(network.device)
    if needed > free:
        raise TooLargeError(
            f"the rows of {rows} logits take about {shown_bytes(needed)}, "
            f"{shown_bytes(free)} may be used; bound the "
            "target network, or make room"
        )


@torch.no_grad()
def bound_rows(network: Network, target: Target, errors: ProductErrors) -> Tensor:
    """Norms of the functionals of B_{n+1,i} for all sites, with rounding allowances; 0 where no path leads."""
    norms = torch.zeros(
        network.depth + 1, *target.shape(network.classes), dtype=torch.float64
    )
    head = narrow_head(network)
    if head is None:
        for i, rows, error in output_rows(network, errors):
            # Sites that are not visited have no path to the output and keep 0.
            norms[i] = target.bound_row_norms(flat_rows(rows), error).cpu()
        return norms
    for i, rows, error in output_rows(head.network, errors.ending_at(head.network)):
        logits, logit_error = head.rows(flat_rows(rows), error)
        norms[i] = target.bound_row_norms(logits, logit_error).cpu()
    return norms


@dataclass(frozen=True, eq=False)
class Head:
    """A last layer with more logits than it reads neurons: its matrix W (K × h), and the network up to the neurons."""

    weight: Tensor
    network: Network

    def rows(self, hidden: Tensor, error: float) -> tuple[Tensor, float]:
        """Rows in place of W·M, no functional of which is shorter, and their errors, for h rows M with this error.

        An error of the rows of M, or of a product with L, counts Σ_k |W_ak| times at
        most in row a.
        """
        # ‖xM‖ ≤ ‖xL‖ for every x, hence for every row of W and every difference of two.
        factor = majorant(hidden)
        weight = self.weight.to(factor)
        largest = float(weight.abs().sum(1).max()) * (1 + gamma(weight.shape[1]))
        # Rounding of W·L: at most γ_h Σ_k |W_ak||L_k| in row a, by norms.
        product = gamma(weight.shape[1] + 4) * float(row_norms(factor).max())
        return weight @ factor, largest * (error + product + UNDERFLOW) * (
            1 + gamma(8)
        ) + UNDERFLOW


def narrow_head(network: Network) -> Head | None:
    """The last dense layer, if it has more outputs than inputs and nothing behind it computes."""
    v = network.sites[-1].source
    weight = torch.eye(network.classes, dtype=network.dtype, device=network.device)
    # Backwards along the only path, past what merely moves entries (terms = 0), up to
    # the first dense layer.
    while v not in network.site_of_output and len(network.nodes[v].edges) == 1:
        edge = network.nodes[v].edges[0]
        dense = isinstance(edge.op, Dense)
        if edge.op.terms != 0 and not dense:
            return None
        weight = edge.op.adjoint(
            weight
        )  # from the output towards the layer; exact: every entry is one of W
        v = edge.source
        if dense:
            shape = network.nodes[v].shape
            if len(shape) != 1 or prod(shape) >= network.classes:
                return None
            # The same nodes with the output moved to the neurons that the layer reads.
            output = replace(network.sites[-1], source=v)
            return Head(
                weight.detach(), replace(network, sites=(*network.sites[:-1], output))
            )
    return None


def majorant(rows: Tensor) -> Tensor:
    """L with MMᵀ ⪯ LLᵀ for the rows M (h × N), triangular; M itself if it is not wider than high or cannot be factored.

    The computed Gram matrix has an error of at most γ_N·‖M‖_F² in norm, and that of its
    Cholesky factors is at most γ_{h+1} times the trace: a shift by four times both
    covers them.
    """
    height, width = rows.shape
    if width <= height:
        return rows
    gram = rows @ rows.T
    trace = float(gram.diagonal().sum())
    # The trace of MMᵀ is ‖M‖_F².
    shift = 4 * gamma(width + height + 8) * trace + _SMALLEST_SHIFT
    gram.diagonal().add_(shift)
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(gram)
    if int(info) != 0 or not bool(torch.isfinite(factor).all()):
        return rows
    return factor
