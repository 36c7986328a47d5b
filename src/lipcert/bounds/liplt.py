"""The LipLT recursion (thm:multiLayerLipschitz), for any DAG, and only it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lipcert.network.sweep import Pair


def prefix_constants(pairs: Sequence[Pair], norms: Tensor, radii: Tensor) -> Tensor:
    """m_0 = 1 and m_j = Σ_{i<j} s_i ‖B_ji‖ m_i: Lipschitz constants of the maps from the input to each site's input.

    `norms[k]` is ‖B_ji‖ of `pairs[k]`, `radii[i]` is s_i with s_0 = 1. The recursion is the forward substitution of
    the unit triangular system (I − N S) m = e_0.
    """
    last = max((j for j, _ in pairs), default=0)
    system = torch.eye(last + 1, dtype=norms.dtype, device=norms.device)
    if pairs:
        ends, starts = (torch.tensor(index, device=norms.device) for index in zip(*pairs, strict=True))
        system = system.index_put((ends, starts), -norms * radii[starts])
    first = torch.zeros(last + 1, 1, dtype=norms.dtype, device=norms.device)
    first[0] = 1
    constants: Tensor = torch.linalg.solve_triangular(system, first, upper=False, unitriangular=True)
    return constants.squeeze(1)
