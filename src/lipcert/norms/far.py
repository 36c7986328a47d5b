"""Maps across many sites, estimated by products of the norms of shorter ones.

If all paths from site i to site j lead through site k, then B_ji = B_jk S_k⁻¹C_k B_ki,
so that ‖B_ji‖ is at most ρ_k·‖B_jk‖·‖B_ki‖ with ρ_k = |C_k|/S_k. Norms of near pairs
are then enough, and their number grows with the depth of a network, not with its
square.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lipcert.network.normal_form import Network
from lipcert.network.rewrites import Line
from lipcert.network.sweep import Pair
from lipcert.norms.budget import passed_sites


def passing_ratios(base: Network, lines: Mapping[int, Line]) -> dict[int, float]:
    """ρ_k of the sites that all paths lead through, of a network before it is transformed; none that is learned."""
    ratios = {}
    for site in passed_sites(base):
        # Numbers are the same for ever. Slopes that are learned change while these
        # ratios are kept.
        centre, radius = lines[site]
        if isinstance(centre, float) and isinstance(radius, float) and radius > 0:
            ratios[site] = abs(centre) / radius
    return ratios


class FarPairs:
    """Which pairs are left to products: those across more than `span` sites, where a site k lies on all paths.

    Of such sites among the last `span` ones before j, the first is taken: N_ji =
    ρ_k·N_jk·N_ki for i < j − span.
    """

    def __init__(self, ratios: Mapping[int, float], count: int, span: int) -> None:
        self._span = span
        self._through: dict[int, int] = {}
        self._ratios = ratios
        for j in range(span + 1, count):
            # j − span ≤ k < j: the pair (j, k) is near, so its norm is estimated. The
            # first such site makes the longest near map, and so the product of the
            # fewest norms.
            between = [k for k in range(max(1, j - span), j) if k in ratios]
            if between:
                self._through[j] = between[0]

    def __contains__(self, pair: Pair) -> bool:
        j, i = pair
        return j - i > self._span and j in self._through

    def through(self, j: int) -> tuple[int, float]:
        """The site k that far maps to site j are taken through, and its ρ_k."""
        k = self._through[j]
        return k, self._ratios[k]

    def filled(self, norms: Tensor) -> Tensor:
        """The matrix N with the products in the places of far pairs; differentiable."""
        rows = [norms[0]]
        for j in range(1, len(norms)):
            row = norms[j]
            if j in self._through:
                k = self._through[j]
                # Row k has been filled already: for i < j − span ≤ k its entries are
                # norms or products of norms.
                product = self._ratios[k] * norms[j, k] * rows[k]
                # Not in place: autograd needs the matrix as it was.
                row = torch.cat([product[: j - self._span], row[j - self._span :]])
            rows.append(row)
        return torch.stack(rows)
