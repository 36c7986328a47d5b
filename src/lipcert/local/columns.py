"""Columns of linear maps between images, kept inside the rectangles outside of which they are zero.

What one pixel, or one entry of an inner image, does to later images is zero outside of
a rectangle that grows by the kernels on the way. Columns of neighbouring entries are
kept together, in float32; their users count the rounding.

Along one axis, a rectangle [a, b), a kernel that reaches r = dilation·(k − 1) further,
stride s, padding p: outputs from ⌈(a + p − r)/s⌉ to ⌊(b − 1 + p)/s⌋ can differ from
zero.

    entries 8..11 of 32, a 3×3 kernel of stride 2, padding 1:  outputs 4..6, which read entries 7..13
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.network.convolution import Convolution
from lipcert.network.linear import Identity, LinearOp, Scale
from lipcert.network.normal_form import Network

PerAxis = tuple[int, int]
"""Along the height, along the width."""


@dataclass(frozen=True)
class Bundle:
    """Some columns at a node: (n, C, h, w) in float32, inside the rectangle [start, stop) of its images.

    ball: whether they belong to entries of the input, else to numbers in [−1, 1].
    """

    start: PerAxis
    stop: PerAxis
    values: Tensor
    ball: bool

    def seen(self) -> tuple[slice, slice, slice]:
        """The rectangle in an image (C, H, W)."""
        return (
            slice(None),
            slice(self.start[0], self.stop[0]),
            slice(self.start[1], self.stop[1]),
        )

    def times(self, slopes: Tensor) -> Bundle:
        """The columns behind a nonlinearity of these slopes, (C, H, W)."""
        return Bundle(
            self.start, self.stop, self.values * slopes[self.seen()], self.ball
        )

    def plus(self, other: Bundle) -> Bundle:
        """The sum, inside the smallest rectangle around both."""
        # The branches of a sum may have led columns through kernels of different sizes.
        start = (min(self.start[0], other.start[0]), min(self.start[1], other.start[1]))
        stop = (max(self.stop[0], other.stop[0]), max(self.stop[1], other.stop[1]))
        values = _reframed(self, start, stop) + _reframed(other, start, stop)
        return Bundle(start, stop, values, self.ball)


def single_columns(
    channel: Tensor, y: Tensor, x: Tensor, sizes: Tensor, channels: int, ball: bool
) -> Bundle:
    """Columns that are `sizes` at one entry each, (n,), in the smallest rectangle around these entries."""
    start = (int(y.min()), int(x.min()))
    stop = (int(y.max()) + 1, int(x.max()) + 1)
    shape = (len(sizes), channels, stop[0] - start[0], stop[1] - start[1])
    values = torch.zeros(shape, dtype=torch.float32, device=sizes.device)
    values = values.contiguous(memory_format=torch.channels_last)
    values[
        torch.arange(len(sizes), device=sizes.device),
        channel,
        y - start[0],
        x - start[1],
    ] = sizes.float()
    return Bundle(start, stop, values, ball)


def pushed(bundle: Bundle, op: LinearOp) -> Bundle | None:
    """A times the columns; None if nothing is left of them."""
    if isinstance(op, Convolution):
        return _convolved(bundle, op)
    if isinstance(op, Identity):
        return (
            bundle
            if op.sign > 0
            else Bundle(bundle.start, bundle.stop, -bundle.values, bundle.ball)
        )
    assert isinstance(op, Scale)
    factor = op.factor().float().reshape(-1, 1, 1)
    return Bundle(bundle.start, bundle.stop, bundle.values * factor, bundle.ball)


def _convolved(bundle: Bundle, op: Convolution) -> Bundle | None:
    weight = op.weight().float().contiguous(memory_format=torch.channels_last)
    start, stop, first, last = [], [], [], []
    for axis in range(2):
        stride, padding = op.stride[axis], op.padding[axis]
        reach = op.dilation[axis] * (weight.shape[2 + axis] - 1)
        # ⌈(a + p − r)/s⌉, as the negative of a quotient that is rounded down.
        low = max(0, -((reach - padding - bundle.start[axis]) // stride))
        high = min(
            op.out_shape[1 + axis], (bundle.stop[axis] - 1 + padding) // stride + 1
        )
        if low >= high:
            return None
        start.append(low)
        stop.append(high)
        # What the outputs low … high − 1 read of the padded image.
        first.append(low * stride - padding)
        last.append((high - 1) * stride - padding + reach + 1)
    read = _reframed(bundle, (first[0], first[1]), (last[0], last[1]))
    values = F.conv2d(read, weight, None, op.stride, 0, op.dilation, op.groups)
    return Bundle((start[0], start[1]), (stop[0], stop[1]), values, bundle.ball)


def _reframed(bundle: Bundle, start: PerAxis, stop: PerAxis) -> Tensor:
    """The columns inside another rectangle; entries outside of their own are zero."""
    pads: list[int] = []
    for axis in (
        1,
        0,
    ):  # `F.pad` wants the last axis first, and crops where it is given less than nothing
        pads += [bundle.start[axis] - start[axis], stop[axis] - bundle.stop[axis]]
    if not any(pads):
        return bundle.values
    return F.pad(bundle.values, pads)


def columned_nodes(network: Network) -> set[int]:
    """The nodes to which columns can be followed: by convolutions, scales and sums, and piecewise linear sites.

    None at all if they would not lead beyond a single nonlinearity.
    """
    if len(network.input_shape) != 3:
        return set()
    nodes, sites = {0}, 0
    for v, node in enumerate(network.nodes):
        index = network.site_of_output.get(v)
        if index:
            site = network.sites[index]
            assert site.slope is not None
            if (
                site.source in nodes
                and site.slope.elementwise
                and site.slope.curvature == 0.0
            ):
                nodes.add(v)
                sites += 1
        elif node.edges and all(
            edge.source in nodes and _keeps_rectangles(edge.op) for edge in node.edges
        ):
            nodes.add(v)
    # Up to the first nonlinearity, rows from the input are exact already
    # (`Prepared.prefix_norms`), and shared by all inputs.
    if sites < 2:
        return set()
    return nodes


def _keeps_rectangles(op: LinearOp) -> bool:
    if isinstance(op, Convolution):
        return len(op.stride) == 2
    if isinstance(op, Scale):
        return op.factor().numel() == 1 or op.factor().shape == (op.in_shape[0], 1, 1)
    return isinstance(op, Identity)
