"""What an estimate consists of, and how it follows from norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from lipcert.bounds.ellipsoids import Ellipsoids
from lipcert.bounds.recursion import prefix_constants
from lipcert.bounds.targets import Target
from lipcert.errors import TooLargeError
from lipcert.network.normal_form import Network
from lipcert.norms.chunks import Chunk
from lipcert.norms.estimate import Vectors
from lipcert.norms.far import FarPairs
from lipcert.resources import share_of_memory, shown_bytes

_COPIES = 2
"""Tensors of the size of a value that a differentiable product keeps for each row."""


@dataclass(frozen=True)
class Estimate:
    """A Lipschitz estimate. It may lie below the true bound while the power iteration has not converged.

    value: () for the target network, (K,) per class, (K, K) for last-layer and
    pairwise.
    prefix: m_1..m_n, the constants of the maps from the input to the input of each
    nonlinearity.
    contributions: how much each site 0..n adds to the (mean) value; they sum to it.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> lipcert.Estimator(model, (4,)).estimate().contributions.shape
        torch.Size([2])
    """

    value: Tensor
    prefix: Tensor
    contributions: Tensor


def iterated_norms(
    chunks: Sequence[Chunk],
    vectors: Vectors,
    iterations: int,
    turn: int,
    accelerated: bool,
) -> tuple[Tensor, int]:
    """‖B_ji‖ of the pairs of all chunks, and how many iterations have moved the vectors, which are changed in place."""
    moved, norms = [], []
    for chunk in chunks:
        moved.append(chunk.iterated(vectors, iterations, turn, accelerated))
        norms.append(chunk.norms(moved[-1]))
    values = torch.cat(norms)
    # Vectors with NaN would spoil all later estimates, of good weights too.
    if iterations == 0 or not bool(torch.isfinite(values).all()):
        return values, 0
    for chunk, own in zip(chunks, moved, strict=True):
        chunk.write(own, vectors)
    return values, iterations


def estimate_of_norms(
    norms: Tensor,
    target: Target,
    network: Network,
    last_network: Network,
    far: FarPairs | None,
    memory: int | None,
) -> Estimate:
    """The recursion with the matrix N of norms, and with rows that are pulled back through `last_network`."""
    depth = network.depth
    # Without the row of the output, which other targets than the whole network do not
    # have.
    prefix = prefix_constants(norms[: depth + 1, : depth + 1])
    if target.whole_output:
        terms = norms[depth + 1, : depth + 1] * prefix
        return Estimate(terms.sum(), prefix[1:], terms)
    if not target.transforms_last:
        # Nothing passes the last nonlinearities.
        far = None
    check_room(last_network, far, memory)
    shares = _row_shares(norms, target, last_network, prefix, far)
    # (n+1,): the mean is linear, so the contributions sum to the mean of the value.
    contributions = torch.stack([target.mean(share) for share in shares])
    return Estimate(torch.stack(shares).sum(0), prefix[1:], contributions)


def _row_shares(
    norms: Tensor,
    target: Target,
    network: Network,
    prefix: Tensor,
    far: FarPairs | None,
) -> list[Tensor]:
    """What the sites add to the constants of a target: the norms of its rows there, times m_i.

    Rows travel to the last sites only, if others are far: behind site k, ‖rows at i‖ ≤
    ρ_k·‖rows at k‖·N_ki.
    """
    output, classes = network.depth + 1, network.classes
    # L_ab = Σ_i m_i ‖r_a^i − r_b^i‖, with the K rows of every B_{n+1,i} from one
    # adjoint pass.
    row_norms: dict[int, Tensor] = {}
    seed = torch.eye(classes, dtype=norms.dtype, device=norms.device)
    for i, rows in network.pull_each(output, seed):
        if far is not None and (output, i) in far:
            # Sites come from the last one: all others are far, too.
            break
        row_norms[i] = target.row_norms(rows)
    shares = []
    for i, constant in enumerate(prefix):
        if i in row_norms:
            shares.append(row_norms[i] * constant)
        elif far is not None and (output, i) in far:
            k, ratio = far.through(output)
            shares.append(row_norms[k] * (ratio * norms[k, i] * constant))
        else:
            shares.append(norms.new_zeros(target.shape(classes)))
    return shares


def check_room(network: Network, far: FarPairs | None, memory: int | None) -> None:
    """Refuse rows of logits that do not fit into the memory, before they are pulled back."""
    output, nearest = network.depth + 1, 0
    while far is not None and (output, nearest) in far:
        nearest += 1
    first = network.sites[nearest].output
    sizes = [prod(node.shape) for node in network.nodes[first:]]
    # A derivative keeps the rows at all nodes, otherwise those at a few nodes are there
    # at a time.
    entries = sum(sizes) if torch.is_grad_enabled() else 2 * max(sizes)
    needed = _COPIES * network.classes * entries * network.dtype.itemsize
    free = memory or share_of_memory(network.device)
    if needed > free:
        raise TooLargeError(
            f"the rows of {network.classes} logits take about {shown_bytes(needed)}, "
            f"{shown_bytes(free)} may be used; "
            "leave long maps to products (span=4), estimate the target network, "
            "or give more (memory=)"
        )


def estimate_of_ellipsoids(
    ellipsoids: Ellipsoids, target: Target, dtype: torch.dtype
) -> Estimate:
    """The constants that ellipsoids give; what the sites add to them is their part of the squares."""
    # K_ii bounds z_i z_iᵀ, so the root of its largest eigenvalue is a constant of the
    # map to site i.
    value, contributions = ellipsoids.values(target)
    return Estimate(value.to(dtype), ellipsoids.sizes.sqrt(), contributions)


def culprit(model: nn.Module) -> str:
    """What makes the estimate of a model infinite, and what to do."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} contains NaN or infinity; restore the last good weights"
    return "the weights are finite but their product overflows; scale them down"
