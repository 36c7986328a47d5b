"""Sorting and normalisation, as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipcert.errors import OptionError


class GroupSort(nn.Module):
    """Sorts the channels (axis 1) within groups of `size`: 1-Lipschitz in every lp norm, and gradient-preserving."""

    def __init__(self, size: int) -> None:
        super().__init__()
        if size < 1:
            raise OptionError(f"size is {size}, expected 1 or more")
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        # (B, C, …) → (B, C/size, size, …)
        groups = torch.unflatten(x, 1, (-1, self.size))
        return torch.sort(groups, dim=2).values.flatten(1, 2)

    def extra_repr(self) -> str:
        return f"size={self.size}"


class MaxMin(GroupSort):
    """Sorts the channels in pairs: GroupSort(2)."""

    def __init__(self) -> None:
        super().__init__(2)


class Abs(nn.Module):
    """|x|: like MaxMin it keeps the length of gradients, at a tenth of the cost.

    MaxMin is |·| on half of the channels in rotated coordinates, and a bias moves a
    channel to where |·| is linear.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


class Normalize(nn.Module):
    """(x − mean)/std per channel, as the first layer of a certified model: radii stay in the units of its input."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: list[float], std: list[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or min(std, default=0.0) <= 0:
            raise OptionError(
                f"mean {mean} and std {std} must have one entry per channel, "
                "and std be positive"
            )
        # Broadcast over (B, C, H, W).
        self.register_buffer("mean", torch.tensor(mean).reshape(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).reshape(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std
