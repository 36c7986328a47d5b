"""‖B_ji‖ in l1 and l∞ by forming the matrices: exact, differentiable, for small networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lipcert.errors import TooLargeError
from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair

DENSE_LIMIT = 1 << 30  # bytes of dense matrices


def dense_norms(network: Network, pairs: Sequence[Pair], centres: Sequence[float | Tensor], norm: float) -> Tensor:
    """The lp operator norms of all pairs, for p = 1 (largest column sum) or ∞ (largest row sum)."""
    size = sum(network.out_size(i) * network.in_size(j) for j, i in pairs) * network.dtype.itemsize
    if size > DENSE_LIMIT:
        raise TooLargeError(
            f"the l1 and l∞ norms need dense matrices of {size / 2**30:.1f} GiB for this network, "
            f"the limit is {DENSE_LIMIT / 2**30:.0f} GiB; use norm=2"
        )
    values: dict[Pair, Tensor] = {}
    for i in sorted({i for _, i in pairs}):
        n = network.out_size(i)
        eye = torch.eye(n, dtype=network.dtype, device=network.device).reshape(
            n, *network.nodes[network.sites[i].output].shape
        )
        for j, columns in enumerate(network.push(i, eye, centres), start=1):
            if columns is not None and (j, i) in pairs:
                magnitude = columns.reshape(n, -1).abs()
                values[j, i] = magnitude.sum(1).amax() if norm == 1.0 else magnitude.sum(0).amax()
    return (
        torch.stack([values[pair] for pair in pairs])
        if pairs
        else torch.zeros(0, dtype=network.dtype, device=network.device)
    )
