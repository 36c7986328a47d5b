"""Models with one logit, whose sign is the class: the same as two logits, the first of which is 0."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lipcert.bounds.bound import Bound
from lipcert.bounds.fingerprint import fingerprint
from lipcert.errors import BoundError
from lipcert.network.build import trace
from lipcert.network.normal_form import Network


class TwoLogits(nn.Module):
    """x ↦ (0, z(x)): class 1 where z > 0, class 0 elsewhere; the margin is |z|."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.model(x)
        # A padding only moves entries: z is as it was computed, and the added 0 is
        # exact.
        return F.pad(z.reshape(z.shape[0], 1), (1, 0))


def has_one_logit(network: Network) -> bool:
    return network.output_shape in ((), (1,))


def two_logits(network: Network) -> nn.Module:
    """The network as a module with two logits."""
    return TwoLogits(network.program.frozen().module()).eval()


def with_two_logits(network: Network, bound: Bound) -> tuple[Network, Bound]:
    """The network as one of two logits, and its bound as one of their difference, which is z itself."""
    if bound.target not in ("network", "per-class"):
        raise BoundError(
            f"the bound has the target {bound.target}, which says nothing about a "
            "model with one logit; use "
            "lipcert.bound(…, target='network')"
        )
    # Traced anew: rounding errors are followed to two logits, with rules of their own
    # for the padding.
    wide = trace(two_logits(network), network.input_shape)
    # The tails are those of the bound, site by site: with other sites they would be
    # those of other maps.
    if wide.depth != network.depth:
        raise BoundError(
            "the model with a second logit has other sites than the bound; give "
            "it two logits yourself"
        )
    constants = bound.tails.reshape(len(bound.tails), 1, 1)  # (n+1, 1, 1)
    # The difference of the two is ±z, so that L_01 = L_10 is the constant of z.
    between_the_two = 1 - torch.eye(2, dtype=constants.dtype, device=constants.device)
    facts = replace(bound.facts, target="pairwise", fingerprint=fingerprint(wide))
    # The constants between sites stay: nothing before the logit has changed.
    return wide, replace(bound, facts=facts, tails=constants * between_the_two)
