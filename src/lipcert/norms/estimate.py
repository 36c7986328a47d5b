"""Estimates of ‖B_ji‖ by warm-started power iteration (alg:multiLayerPower): they approach the norms from below.

One unit vector x_ji per pair travels through the network, all pairs in one batch
(`Sweep`):

    x_ji ← B_jiᵀB_ji x_ji / ‖B_jiᵀB_ji x_ji‖,    ‖B_ji x_ji‖ → ‖B_ji‖.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipcert.network.sweep import Sweep
from lipcert.norms.rows import row_norms, unit_rows

Vectors = dict[int, Tensor]
"""For each start site i, one row per pair of `sweep.starts[i]`."""


def random_vectors(sweep: Sweep, seed: int) -> Vectors:
    """Unit vectors in random directions, reproducible from the seed."""
    network = sweep.network
    # On the processor, in float32: the same vectors whatever the device and the type of
    # the network.
    generator = torch.Generator().manual_seed(seed)
    vectors = {}
    for i, pairs in sweep.starts.items():
        shape = network.nodes[network.sites[i].output].shape
        x = torch.randn(len(pairs), *shape, generator=generator)
        x = x.to(network.device, network.dtype)
        vectors[i] = x / row_norms(x, keepdim=True)
    return vectors


@torch.no_grad()
def power_step(sweep: Sweep, vectors: Vectors) -> Vectors:
    """x ← BᵀBx/‖BᵀBx‖ for all pairs of a sweep; rows that B maps to zero stay."""
    # Bᵀ(Bx): one pass forwards and one backwards for all pairs together.
    images = sweep.adjoint(sweep.forward(vectors))
    moved = {}
    for i, image in images.items():
        moved[i] = unit_rows(image, fallback=vectors[i])
    return moved


def estimate_norms(sweep: Sweep, vectors: Vectors) -> Tensor:
    """‖B_ji x_ji‖ for all pairs, in the order of `sweep.pairs`.

    Differentiable in the weights: at a top right singular vector v with left singular
    vector u, the derivative of ‖Bv‖ for fixed v is uᵀ(dB)v, which is the derivative of
    the norm.
    """
    images = sweep.forward(vectors)
    # Within a site j, rows are by i: one site after the other, they are in the order of
    # `sweep.pairs`.
    return torch.cat([row_norms(images[j]) for j in sorted(images)])
