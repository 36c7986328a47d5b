"""Where the rows of a convolutional node are not zero: windows that grow on the way to the input.

A unit row at place (c, y, x) of a node v, pulled back to a node u, lives in a window of
u whose corner is at step·(y, x) + corner: convolutions multiply the step by their
stride and widen the window by their kernel.

    v: 1×1, then a 3×3 convolution of stride 2, padding 1:  step 2, corner −1, size 3
       then a 3×3 convolution of stride 1, padding 1:       step 2, corner −2, size 5

Once a window is as large as the image, rows have the shape of the image: step 0, corner
0.
"""

from __future__ import annotations

from dataclasses import dataclass

from lipcert.network.convolution import Convolution
from lipcert.network.linear import Identity, LinearOp, Scale
from lipcert.network.normal_form import Network
from lipcert.network.program import Shape

PerAxis = tuple[int, int]
"""Along the height, along the width."""


@dataclass(frozen=True)
class Frame:
    """The windows of one node, along both axes of its images."""

    step: PerAxis
    corner: PerAxis
    size: PerAxis

    def through(self, op: LinearOp) -> Frame:
        """The frame before an operation whose result has this one."""
        if not isinstance(op, Convolution):
            return self
        step, corner, size = [], [], []
        # Place i of a window reads the places stride·i + dilation·t − padding of the
        # node before, for all taps t of the kernel.
        kernel = op.weight().shape[2:]
        for axis in range(2):
            stride, reach = op.stride[axis], op.dilation[axis] * (kernel[axis] - 1)
            step.append(self.step[axis] * stride)
            corner.append(self.corner[axis] * stride - op.padding[axis])
            size.append((self.size[axis] - 1) * stride + reach + 1)
        return Frame((step[0], step[1]), (corner[0], corner[1]), (size[0], size[1]))

    def union(self, other: Frame) -> Frame:
        """The smallest frame around two of the same step."""
        corner, size = [], []
        for axis in range(2):
            # Windows −1..1 and −2..0 are inside of −2..1: corner −2, size 4.
            first = min(self.corner[axis], other.corner[axis])
            ends = [frame.corner[axis] + frame.size[axis] for frame in (self, other)]
            corner.append(first)
            size.append(max(ends) - first)
        return Frame(self.step, (corner[0], corner[1]), (size[0], size[1]))

    def whole(self, shape: Shape) -> bool:
        """Whether windows are no smaller than images."""
        return self.size[0] >= shape[1] and self.size[1] >= shape[2]


def image_frame(shape: Shape) -> Frame:
    """Rows that have the shape of images."""
    return Frame((0, 0), (0, 0), (shape[1], shape[2]))


def frames_of(network: Network, v: int) -> dict[int, Frame] | None:
    """The frames of all nodes that a node depends on; None if they depend on it by anything but convolutions.

    Sums, scales and elementwise nonlinearities keep frames as they are.
    """
    if len(network.nodes[v].shape) != 3:
        return None
    frames = {v: Frame((1, 1), (0, 0), (1, 1))}
    for w in range(v, 0, -1):
        if w not in frames:
            continue
        # Windows would only grow from here on; images have the same shape for all
        # places.
        if frames[w].whole(network.nodes[w].shape):
            frames[w] = image_frame(network.nodes[w].shape)
        index = network.site_of_output.get(w)
        if index is not None:
            site = network.sites[index]
            assert site.slope is not None
            if not site.slope.elementwise or not _join(
                frames, site.source, frames[w], network
            ):
                return None
            continue
        for edge in network.nodes[w].edges:
            if not _keeps_windows(edge.op) or not _join(
                frames, edge.source, frames[w].through(edge.op), network
            ):
                return None
    if 0 in frames and frames[0].whole(network.input_shape):
        frames[0] = image_frame(network.input_shape)
    return frames


def _join(frames: dict[int, Frame], node: int, frame: Frame, network: Network) -> bool:
    """Note the frame of a node; whether all that is known of it fits together."""
    if len(network.nodes[node].shape) != 3:
        return False
    if frame.step == (0, 0):
        frame = image_frame(network.nodes[node].shape)
    known = frames.get(node, frame)
    # One of them is the image itself, in which every window is.
    if (0, 0) in (known.step, frame.step):
        frames[node] = image_frame(network.nodes[node].shape)
        return True
    # With other steps, the windows of two branches drift apart from place to place.
    frames[node] = known.union(frame)
    return known.step == frame.step


def _keeps_windows(op: LinearOp) -> bool:
    if isinstance(op, Convolution):
        return len(op.stride) == 2 and op.groups == 1
    if isinstance(op, Scale):
        return op.factor().numel() == 1 or op.factor().shape == (op.in_shape[0], 1, 1)
    return isinstance(op, Identity)
