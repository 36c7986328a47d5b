"""Convolutions and transposed convolutions as linear operations."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import chain, combinations
from math import ceil, gcd, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.network.linear import LinearOp, has_denormals
from lipcert.network.program import Live, Shape

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class _Kernel(LinearOp):
    """What both kinds of convolution have in common: a kernel, and the number of products it sums."""

    weight: Live
    groups: int
    stride: Shape
    dilation: Shape
    weighted = True
    coarse = True

    def denormal(self) -> bool:
        return has_denormals(self.weight())

    def norm_proofs(self) -> list[tuple[float, list[Tensor]]]:
        """The kernel as a matrix, for every way to divide its axes of taps.

        Let y_o(w) = Σ_{c,t} K[o,c,t]·x_c(ws + td − p), and put the taps t_R of some axes R with the output channel: the
        matrix M has rows (o, t_R) and columns (c, t_S), S being the other axes. Apply M to all patches of x that extend
        along S; each entry of x lies in at most Π_S ⌈k·gcd(s,d)/s⌉ of them. An output is a sum of Π_R k entries of the
        results, none of which is used twice, so by the inequality of Cauchy and Schwarz

            ‖A‖² ≤ ‖M‖²·Π_R k·Π_S ⌈k·gcd(s,d)/s⌉.

        Zeros around the image only remove terms. Groups act on different channels, so the largest of their bounds
        holds. A transposed convolution is part of the transpose of the convolution with the same kernel.
        """
        weight = self.weight()
        axes = range(weight.dim() - 2)
        size = weight.shape[2:]
        repeats = [ceil(k * gcd(s, d) / s) for k, s, d in zip(size, self.stride, self.dilation, strict=True)]
        proofs = []
        for rows in chain.from_iterable(combinations(axes, count) for count in range(len(axes) + 1)):
            columns = [axis for axis in axes if axis not in rows]
            order = (0, *(2 + axis for axis in rows), 1, *(2 + axis for axis in columns))
            factor = prod(size[axis] for axis in rows) * prod(repeats[axis] for axis in columns)
            height = prod(size[axis] for axis in rows)
            kernels = [k.permute(order).reshape(len(k) * height, -1) for k in weight.chunk(self.groups)]
            proofs.append((float(factor), kernels))
        return proofs

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
