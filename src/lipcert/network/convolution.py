"""Convolutions and transposed convolutions as linear operations."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import product
from math import ceil, gcd, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.network import patches
from lipcert.network.linear import LinearOp
from lipcert.network.program import Live, Shape
from lipcert.rounding import has_denormals

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class _Kernel(LinearOp):
    """What both kinds of convolution have in common: a kernel, and how it moves over the larger tensor."""

    weight: Live
    in_shape: Shape
    out_shape: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int
    weighted = True
    coarse = True

    def denormal(self) -> bool:
        return has_denormals(self.weight())

    def norm_proofs(self) -> list[tuple[float, list[Tensor]]]:
        """The kernel as a matrix, for every way to divide its axes of taps.

        Let y_o(w) = Σ_{c,t} K[o,c,t]·x_c(ws + td − p), and put the taps t_R of some
        axes R with the output channel: the matrix M has rows (o, t_R) and columns (c,
        t_S), S being the other axes. Apply M to all patches of x that extend along S;
        each entry of x lies in at most Π_S ⌈k·gcd(s,d)/s⌉ of them. An output is a sum
        of Π_R k entries of the results, none of which is used twice, so by the
        inequality of Cauchy and Schwarz

            ‖A‖² ≤ ‖M‖²·Π_R k·Π_S ⌈k·gcd(s,d)/s⌉.

        Zeros around the image only remove terms. Groups act on different channels, so
        the largest of their bounds holds. A transposed convolution is part of the
        transpose of the convolution with the same kernel.
        """
        weight = self.weight()
        size = weight.shape[2:]
        axes = range(len(size))
        # An entry q = ws + td − p of x fixes the tap t modulo s/gcd(s, d), so that it
        # lies in at most so many patches.
        repeats = []
        for k, s, d in zip(size, self.stride, self.dilation, strict=True):
            repeats.append(ceil(k * gcd(s, d) / s))
        # A 3×3 kernel from c to o channels with stride 2: the matrices are (o, 9c),
        # (3o, 3c), (3o, 3c) and (9o, c), with the factors 4, 6, 6 and 9.
        proofs = []
        for in_rows in product((False, True), repeat=len(size)):
            rows = [axis for axis in axes if in_rows[axis]]
            columns = [axis for axis in axes if not in_rows[axis]]
            height = prod(size[axis] for axis in rows)
            factor = height * prod(repeats[axis] for axis in columns)
            proofs.append((float(factor), self._as_matrices(weight, rows, columns)))
        return proofs

    def _as_matrices(
        self, weight: Tensor, rows: list[int], columns: list[int]
    ) -> list[Tensor]:
        """The kernel of every group, with the taps of some axes in its rows and the others in its columns."""
        # (o, c, taps) → (o, taps in rows, c, taps in columns).
        order = [0, *(2 + axis for axis in rows), 1, *(2 + axis for axis in columns)]
        height = prod(weight.shape[2 + axis] for axis in rows)
        matrices = []
        # The first axis of the weight has the groups one after the other, for both
        # kinds of convolution.
        for kernel in weight.chunk(self.groups):
            matrices.append(kernel.permute(order).reshape(len(kernel) * height, -1))
        return matrices

    @property
    def accumulations(self) -> int:
        shape = self.weight().shape
        # A product sums over one of the two axes of channels of a group, a product with
        # the transpose over the other.
        return max(shape[0] // self.groups, shape[1]) * prod(shape[2:])

    def _apply(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.weight())

    def _magnitude(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.weight().abs())

    @abstractmethod
    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def _convolve(self, large: Tensor, weight: Tensor) -> Tensor:
        # The buffer of patches is overwritten by the next tile, so that nothing can be
        # differentiated through it.
        axes, moved = len(self.stride), (self.stride, self.padding, self.dilation)
        if patches.applies(large, self.groups, axes) and not weight.requires_grad:
            return patches.convolve(large, weight, *moved)
        return _CONV[axes](large, weight, None, *moved, self.groups)

    def _transpose(self, small: Tensor, weight: Tensor, shape: Shape) -> Tensor:
        """The transposed convolution with the output padding that gives a row this shape."""
        options = zip(
            self.stride, self.padding, self.dilation, weight.shape[2:], strict=True
        )
        # A convolution with a stride may leave up to s − 1 entries at the end unread.
        # The transposed one does not know how many there were, and has to be told: they
        # get zeros.
        remainder = []
        for size, out, (s, p, d, k) in zip(
            shape[1:], small.shape[2:], options, strict=True
        ):
            remainder.append(size - ((out - 1) * s - 2 * p + d * (k - 1) + 1))
        if self._transposes(small, weight):
            return patches.transpose(
                small, weight, self.stride, self.padding, shape[1:]
            )
        transpose = _CONV_TRANSPOSE[len(self.stride)]
        return transpose(
            small,
            weight,
            None,
            self.stride,
            self.padding,
            remainder,
            self.groups,
            self.dilation,
        )

    def _transposes(self, small: Tensor, weight: Tensor) -> bool:
        """Whether the transpose is computed by products of patches."""
        plain = patches.applies(small, self.groups, len(self.stride))
        return plain and not weight.requires_grad and max(self.dilation) == 1


class Convolution(_Kernel):
    """Zero-padded cross-correlation in one, two or three dimensions, as torch computes it.

    The adjoint is the transposed convolution with the output padding that restores the
    input size exactly, so sizes that leave a remainder under the stride need no special
    treatment.
    """

    @property
    def terms(self) -> int:  # type: ignore[override]
        return prod(self.weight().shape[1:])

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._convolve(_channels_last(x), weight)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self._transpose(_channels_last(y), self.weight(), self.in_shape)


class TransposedConvolution(_Kernel):
    """Transposed convolution; its adjoint is the convolution with the same weight, cropped to the input size."""

    @property
    def terms(self) -> int:  # type: ignore[override]
        shape = self.weight().shape
        return shape[0] // self.groups * prod(shape[2:])

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._transpose(x, weight, self.out_shape)

    def _adjoint(self, y: Tensor) -> Tensor:
        x = self._convolve(y, self.weight())
        # An output padding of the stride or more (dilation allows it) adds entries that
        # the input does not have.
        crop = (slice(None), slice(None), *map(slice, self.in_shape[1:]))
        return x[crop]


def _channels_last(x: Tensor) -> Tensor:
    """The memory format in which two-dimensional convolutions are fastest."""
    if x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x
