"""The linear part of a network before its first nonlinearity, as one matrix.

If all that depends on the input goes through one node p that is linear in it, Δ_p =
BΔ_0 + noise, then a row y at p needs no pulling back: what counts is the norm ‖yB‖. In
l2 that is ‖yL‖ with LLᵀ = BBᵀ, and L is square.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod

import torch
from torch import Tensor

from lipcert.network.normal_form import Network
from lipcert.rounding import UNDERFLOW, gamma

_ENTRIES = 1 << 22
"""Maps with more entries are not formed: rows are pulled back through their operations."""
_VANISHED = 1e-30
"""More than 2⁻¹²⁶ times the entries of a matrix."""


@dataclass(frozen=True)
class Funnel:
    """The dual norm of y·matrix is at least that of yB for every row y at the node; None if there is none.

    rows: dual norms of the rows of the matrix. A computed y·matrix is off by at most
    γ·|y|·rows in the dual norm.
    """

    node: int | None
    matrix: Tensor
    rows: Tensor

    def steepness(self, y: Tensor, norm: float, quick: bool) -> Tensor:
        """(…): the dual norms of y·matrix for rows y, (…, n), rounded up; `quick` in float32.

        There, y and the matrix are rounded once each and n products are summed: off by
        γ_{n+2}·|y|·rows in the dual norm. What underflows, 2⁻¹²⁶ of an entry of y, of
        the matrix or of a product, is less than `_VANISHED` of what stands beside it.
        """
        if not quick:
            return dual_norms(y @ self.matrix, norm)
        product = y.float() @ self.matrix.float()
        off = gamma(len(self.rows) + 3, torch.float32) * self.rows + _VANISHED
        charged = (y.abs() @ off) * (1 + gamma(len(off) + 4))
        vanished = _VANISHED * (1 + self.rows.sum())
        total = dual_norms(product, norm) + charged + vanished
        # What float32 does not reach is infinite there, and may cancel: nothing is known.
        return total.nan_to_num(nan=inf, posinf=inf)

    def rounding(self, radius: Tensor) -> Tensor:
        """(B, n): γ·ρ·rows."""
        return gamma(len(self.rows) + 6) * radius[:, None] * self.rows


@torch.no_grad()
def make_funnel(network: Network, prefix: set[int], norm: float) -> Funnel:
    """The funnel of a network whose linear prefix are these nodes."""
    nothing = torch.zeros(0, dtype=torch.float64, device=network.device)
    none = Funnel(None, nothing, nothing)
    gates = _gates(network, prefix)
    if len(gates) != 1:
        return none
    (node,) = gates
    size, inputs = prod(network.nodes[node].shape), prod(network.input_shape)
    # A wider node would make rows longer than those at the input.
    if node == 0 or size > inputs or size * inputs > _ENTRIES:
        return none
    unit = torch.eye(size, dtype=torch.float64, device=network.device)
    matrix = flat(
        pulled_to_input(network, node, unit.reshape(size, *network.nodes[node].shape))
    )  # B
    # ‖yB‖² = y(BBᵀ)yᵀ, for which any factor of BBᵀ does. Sums of absolute values, for
    # l∞, need B itself.
    if norm == 2:
        factor = _triangle(matrix)
        if factor is None:
            return none
        matrix = factor
    return Funnel(node, matrix, dual_norms(matrix, norm))


def _gates(network: Network, prefix: set[int]) -> set[int]:
    """The nodes of the linear prefix that sites, or nodes outside of the prefix, read."""
    # The output is a site, too, so that a network that is linear has its own gate.
    gates = {site.source for site in network.sites[1:]} & prefix
    for v, node in enumerate(network.nodes):
        if v not in prefix:
            gates |= {edge.source for edge in node.edges} & prefix
    return gates


def _triangle(matrix: Tensor) -> Tensor | None:
    """L with LLᵀ ⪰ BBᵀ: the Cholesky factor of BBᵀ + sI; None if the factorisation fails.

    The computed BBᵀ is off by at most γ_n|B||B|ᵀ, the product of the computed factor
    with its transpose by γ_m|L||L|ᵀ; the norms of both are at most γ times the trace of
    BBᵀ, up to a per cent. So s is twice their sum.
    """
    rows, columns = matrix.shape
    gram = matrix @ matrix.T
    trace = float(gram.diagonal().sum())
    shift = 2.1 * (gamma(columns + 2) + gamma(rows + 4)) * trace + UNDERFLOW
    unit = torch.eye(rows, dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(gram + shift * unit)
    if bool(failed):
        return None
    lower: Tensor = factor
    return lower


def flat(x: Tensor, first: int = 1) -> Tensor:
    """The entries of every row in one axis, the last; a row may be a single number."""
    if x.dim() == first:
        return x[..., None]
    return x.flatten(first)


def dual_norms(rows: Tensor, norm: float) -> Tensor:
    """The largest product of each row with a vector of unit norm, rounded up: l2 norms for l2, l1 norms for l∞.

    Rows may be of float32; norms are computed in float64.
    """
    count = rows.shape[-1]
    if norm == inf:
        return rows.abs().sum(-1, dtype=torch.float64) * (1 + gamma(count + 2))
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return lengths * (1 + gamma(count + 4)) + UNDERFLOW * count


def pulled_to_input(network: Network, v: int, rows: Tensor) -> Tensor:
    """Rows at a node of the linear prefix, as rows at the input."""
    values = {v: rows}
    for w in range(v, 0, -1):
        y = values.pop(w, None)
        if y is None:
            continue
        for edge in network.nodes[w].edges:
            pulled = edge.op.adjoint(y)
            if edge.source in values:
                pulled = values[edge.source] + pulled
            values[edge.source] = pulled
    return values.get(0, rows.new_zeros(len(rows), *network.input_shape))
