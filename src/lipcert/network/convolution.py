"""Convolutions and transposed convolutions as linear operations."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.network.linear import LinearOp, Live, Shape

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class _Kernel(LinearOp):
    """What both kinds of convolution have in common: a kernel, and the number of products it sums."""

    weight: Live
    groups: int

    @property
    def accumulations(self) -> int:
        shape = self.weight().shape
        return max(shape[0] // self.groups, shape[1]) * prod(shape[2:])

    def _apply(self, x: Tensor) -> Tensor:
        return self._convolve(x, self.weight())

    def _magnitude(self, x: Tensor) -> Tensor:
        return self._convolve(x, self.weight().abs())

    @abstractmethod
    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Convolution(_Kernel):
    """Zero-padded cross-correlation in one, two or three dimensions, as torch computes it.

    The adjoint is the transposed convolution with the output padding that restores the input size exactly, so sizes
    that leave a remainder under the stride need no special treatment.
    """

    weight: Live
    in_shape: Shape
    out_shape: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int

    @property
    def terms(self) -> int:  # type: ignore[override]
        return prod(self.weight().shape[1:])

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        convolve = _CONV[len(self.stride)]
        return convolve(_channels_last(x), weight, None, self.stride, self.padding, self.dilation, self.groups)

    def _adjoint(self, y: Tensor) -> Tensor:
        weight = self.weight()
        remainder = tuple(
            size - ((out - 1) * s - 2 * p + d * (k - 1) + 1)
            for size, out, s, p, d, k in zip(
                self.in_shape[1:],
                self.out_shape[1:],
                self.stride,
                self.padding,
                self.dilation,
                weight.shape[2:],
                strict=True,
            )
        )
        transpose = _CONV_TRANSPOSE[len(self.stride)]
        y = _channels_last(y)
        return transpose(y, weight, None, self.stride, self.padding, remainder, self.groups, self.dilation)


def _channels_last(x: Tensor) -> Tensor:
    """The memory format in which two-dimensional convolutions are fastest."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


@dataclass(frozen=True)
class TransposedConvolution(_Kernel):
    """Transposed convolution; its adjoint is the convolution with the same weight, cropped to the input size."""

    weight: Live
    in_shape: Shape
    out_shape: Shape
    stride: Shape
    padding: Shape
    output_padding: Shape
    dilation: Shape
    groups: int

    @property
    def terms(self) -> int:  # type: ignore[override]
        shape = self.weight().shape
        return shape[0] // self.groups * prod(shape[2:])

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        transpose = _CONV_TRANSPOSE[len(self.stride)]
        return transpose(x, weight, None, self.stride, self.padding, self.output_padding, self.groups, self.dilation)

    def _adjoint(self, y: Tensor) -> Tensor:
        convolve = _CONV[len(self.stride)]
        x = convolve(y, self.weight(), None, self.stride, self.padding, self.dilation, self.groups)
        crop = (slice(None), slice(None), *(slice(size) for size in self.in_shape[1:]))
        return x[crop]
