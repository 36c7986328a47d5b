"""Sorting, |·|, shifts, patches, mirror images and normalisation, as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


class Shift(nn.Module):
    """Every other channel moves by a pixel, in turn down, up, right and left, and zeros come in; the others stay.

    Before a 1×1 convolution it lets every pixel see its neighbours. Its norm is at most 1,
    so both together are as orthogonal as the matrix of the convolution is.
    """

    kernel: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        kernel = torch.zeros(channels, 1, 3, 3)
        # Where each channel looks, as a row and a column of a 3×3 window: channel 1 at
        # the pixel above, 3 at the one below, 5 and 7 to the sides, 9 above again.
        kernel[0::2, 0, 1, 1] = 1.0
        kernel[1::8, 0, 0, 1] = 1.0
        kernel[3::8, 0, 2, 1] = 1.0
        kernel[5::8, 0, 1, 0] = 1.0
        kernel[7::8, 0, 1, 2] = 1.0
        # It follows from the number of channels, so files need not have it.
        self.register_buffer("kernel", kernel, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, padding=1, groups=len(self.kernel))

    def extra_repr(self) -> str:
        return f"channels={len(self.kernel)}"


class Patches(nn.Module):
    """Every patch of size × size pixels becomes one pixel: (C, H, W) → (size²·C, H/size, W/size).

    With a 1×1 convolution behind it, this is a convolution with a stride as large as its
    kernel. Unlike `nn.PixelUnshuffle` it keeps the channels of a pixel together, so that
    tensors with channels last stay so, which makes training faster.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        if size < 1:
            raise OptionError(f"size is {size}, expected 1 or more")
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        # (B, C, H, W) → (B, H/s, s, W/s, s, C) → (B, s·s·C, H/s, W/s)
        rows = torch.unflatten(x.permute(0, 2, 3, 1), 1, (-1, self.size))
        tiles = torch.unflatten(rows, 3, (-1, self.size)).transpose(2, 3)
        return tiles.flatten(3).permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return f"size={self.size}"


class Mirrored(nn.Module):
    """The mean of what a model says of an image and of its mirror image, which is as Lipschitz as the model.

    In training mode it is the model alone: flips among the augmentations teach it both.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        if self.training:
            return logits
        mirrored: Tensor = self.model(x.flip(-1))
        return (logits + mirrored) / 2


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
