"""What an estimate consists of, and how it follows from norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipcert.bounds.ellipsoids import Ellipsoids
from lipcert.bounds.recursion import prefix_constants
from lipcert.bounds.targets import Target
from lipcert.network.normal_form import Network


@dataclass(frozen=True)
class Estimate:
    """A Lipschitz estimate. It may lie below the true bound while the power iteration has not converged.

    value: () for the target network, (K,) per class, (K, K) for last-layer and pairwise.
    prefix: m_1..m_n, the constants of the maps from the input to the input of each nonlinearity.
    contributions: how much each site 0..n adds to the (mean) value; they sum to it.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> lipcert.Estimator(model, (4,)).estimate().contributions.shape
        torch.Size([2])
    """

    value: Tensor
    prefix: Tensor
    contributions: Tensor


def estimate_of_norms(norms: Tensor, target: Target, network: Network, last_network: Network) -> Estimate:
    """The recursion with the matrix N of norms, and with rows that are pulled back through `last_network`."""
    depth = network.depth
    # Without the row of the output, which other targets than the whole network do not have.
    prefix = prefix_constants(norms[: depth + 1, : depth + 1])
    if target.whole_output:
        terms = norms[depth + 1, : depth + 1] * prefix
        return Estimate(terms.sum(), prefix[1:], terms)
    classes = network.classes
    seed = torch.eye(classes, dtype=norms.dtype, device=norms.device)
    # L_ab = Σ_i m_i ‖r_a^i − r_b^i‖, with the K rows of every B_{n+1,i} from one adjoint pass.
    shares = []
    for rows, constant in zip(last_network.pull(depth + 1, seed), prefix, strict=True):
        if rows is None:
            shares.append(norms.new_zeros(target.shape(classes)))
        else:
            shares.append(target.row_norms(rows) * constant)
    # (n+1,): the mean is linear, so the contributions sum to the mean of the value.
    contributions = torch.stack([target.mean(share) for share in shares])
    return Estimate(torch.stack(shares).sum(0), prefix[1:], contributions)


def estimate_of_ellipsoids(ellipsoids: Ellipsoids, target: Target, dtype: torch.dtype) -> Estimate:
    """The constants that ellipsoids give; what the sites add to them is their part of the squares."""
    # K_ii bounds z_i z_iᵀ, so the root of its largest eigenvalue is a constant of the map to site i.
    value, contributions = ellipsoids.values(target)
    return Estimate(value.to(dtype), ellipsoids.sizes.sqrt(), contributions)


def culprit(model: nn.Module) -> str:
    """What makes the estimate of a model infinite, and what to do."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} contains NaN or infinity; restore the last good weights"
    return "the weights are finite but their product overflows; scale them down"
