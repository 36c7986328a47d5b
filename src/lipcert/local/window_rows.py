"""Rows of convolutional nodes, pulled back inside their windows: as `pulling` does, without the zeros around them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.local.funnels import dual_norms
from lipcert.local.pulling import VANISHED, Pulled, Walls
from lipcert.local.relaxations import Lines, dot
from lipcert.local.windows import Places, Scene
from lipcert.network import patches
from lipcert.network.convolution import Convolution
from lipcert.network.linear import Identity, LinearOp, Scale
from lipcert.rounding import gamma

_LARGE = 16
"""Windows of this size are convolved; kernels are spread over smaller ones, which takes fewer products."""


def pull_windows(
    scene: Scene, walls: Walls, norm: float, places: Places, signs: Tensor
) -> Pulled:
    """Unit rows of places of a node, times signs, as rows at the input: constants and steepnesses, (P,)."""
    shape = scene.network.nodes[scene.v].shape
    seed = F.one_hot(places.channel, shape[0]).to(signs) * signs[:, None]
    rows = {scene.v: seed[:, None, None, :]}
    flat = (places.channel * shape[1] + places.y) * shape[
        2
    ] + places.x  # in an image (C, H, W), as one axis
    # A unit row pays the allowance of its own node at once: |y| is 1 at one place.
    total = -walls.allowances[scene.v][places.image, 0, flat]
    size, count = total.abs(), 4
    steepness = torch.zeros_like(total)
    for w in range(scene.v, -1, -1):
        y = rows.pop(w, None)
        if y is None:
            continue
        index = scene.network.site_of_output.get(w)
        if index == 0:
            steepness = dual_norms(scene.inside(0, y, places).flatten(1), norm)
        elif index is not None:
            pulled, part = _through_lines(scene, walls, index, y, places)
            _add(rows, scene.network.sites[index].source, pulled)
            total, size, count = total + part, size + part.abs(), count + 1
        else:
            # v is paid for already, and folded nodes by what reads them.
            if w != scene.v and w not in walls.folded:
                part = _charge(scene, walls, w, y, places)
                total, size, count = total + part, size + part.abs(), count + 1
            through_edges(scene, rows, w, y, places)
    return Pulled(total - gamma(count) * size - VANISHED, steepness)


def _through_lines(
    scene: Scene, walls: Walls, index: int, y: Tensor, places: Places
) -> tuple[Tensor, Tensor]:
    """See `Relaxation.pull`."""
    lines = walls.relaxations[index]
    assert isinstance(lines, Lines)
    w = scene.network.sites[index].output
    sizes = y.abs()
    part = inner_products(
        y, scene.look("middle", w, lambda: lines.middle()[:, 0], places)
    )
    part = part + inner_products(
        sizes, scene.look("spread", w, lambda: lines.spread()[:, 0], places)
    )
    pulled = scene.look("mean", w, lambda: lines.mean_slope()[:, 0], places).mul_(y)
    pulled.addcmul_(
        sizes, scene.look("half", w, lambda: lines.half_slope()[:, 0], places)
    )
    return pulled, part


def _charge(scene: Scene, walls: Walls, w: int, y: Tensor, places: Places) -> Tensor:
    """−|y|·η."""
    allowance = walls.allowances[w]
    images = allowance.reshape(len(allowance), *scene.network.nodes[w].shape)
    return -inner_products(y.abs(), scene.look("allowance", w, lambda: images, places))


def inner_products(rows: Tensor, values: Tensor) -> Tensor:
    """(P,): the product of every row with its own values."""
    return dot(rows.flatten(1)[:, None], values.flatten(1)[:, None])[:, 0]


def through_edges(
    scene: Scene, rows: dict[int, Tensor], w: int, y: Tensor, places: Places
) -> None:
    """Rows at a linear node become rows at its sources."""
    for edge in scene.network.nodes[w].edges:
        u = edge.source
        pulled = scene.reframed(
            _adjoint(edge.op, y), scene.frames[w].through(edge.op), u, places
        )
        # What falls into the padding of a convolution is not part of the image. Behind
        # a nonlinearity it vanishes by itself, for slopes are padded with zeros.
        if isinstance(edge.op, Convolution) and u not in scene.network.site_of_output:
            pulled = scene.inside(u, pulled, places)
        _add(rows, u, pulled)


def _add(rows: dict[int, Tensor], u: int, pulled: Tensor) -> None:
    if u in rows:
        pulled = rows[u] + pulled
    rows[u] = pulled


def _adjoint(op: LinearOp, y: Tensor) -> Tensor:
    """Aᵀy inside windows; nothing is cut off yet."""
    if isinstance(op, Convolution):
        if y.dtype == torch.float32:
            return _transposed(y, op)
        if max(op.stride) == 1 and min(y.shape[1:3]) >= _LARGE:
            return _mirrored(y, op)
        return _spread_kernel(y, op)
    if isinstance(op, Identity):
        return -y if op.sign < 0 else y
    assert isinstance(op, Scale)
    return y * op.factor().to(y).reshape(-1)


def _transposed(y: Tensor, op: Convolution) -> Tensor:
    """The same in float32, for which torch is fast; a single entry of a window is a product with the kernel."""
    weight = op.weight().float()
    # Of a window with one entry no two taps meet: a product with a matrix does.
    if y.shape[1:3] == (1, 1) and max(op.dilation) == 1:
        filters, channels, *kernel = weight.shape
        matrix = weight.permute(0, 2, 3, 1).reshape(filters, -1)
        return (y.reshape(-1, filters) @ matrix).reshape(len(y), *kernel, channels)
    spread = F.conv_transpose2d(
        y.permute(0, 3, 1, 2), weight, None, op.stride, dilation=op.dilation
    )
    return spread.permute(0, 2, 3, 1)


def _mirrored(y: Tensor, op: Convolution) -> Tensor:
    """The same for stride 1, as a convolution with the mirrored kernel."""
    # A full convolution: windows grow by the reach of the kernel on every side.
    kernel = op.weight().flip(2, 3).transpose(0, 1)
    padding = (
        op.dilation[0] * (kernel.shape[2] - 1),
        op.dilation[1] * (kernel.shape[3] - 1),
    )
    return patches.convolve(
        y.permute(0, 3, 1, 2), kernel, op.stride, padding, op.dilation
    ).permute(0, 2, 3, 1)


def _spread_kernel(y: Tensor, op: Convolution) -> Tensor:
    """Every entry of a window times the kernel, added up where kernels overlap.

    Along one axis, two entries with stride 2 and a kernel of 3: the first reaches 0 1
    2, the second 2 3 4, five places. Entry i of the kernel goes to i and i + 2 of them.
    """
    weight = op.weight()
    filters, channels, *kernel = weight.shape
    rows, height, width, _ = y.shape
    matrix = weight.permute(0, 2, 3, 1).reshape(filters, -1)
    # One product for all places, in which BLAS is fastest; what is left are additions.
    products = (y.reshape(-1, filters) @ matrix).reshape(
        rows, height, width, *kernel, channels
    )
    sides = []
    for axis, side in enumerate((height, width)):
        sides.append(
            (side - 1) * op.stride[axis] + op.dilation[axis] * (kernel[axis] - 1) + 1
        )
    total = y.new_zeros(rows, *sides, channels)
    for i in range(kernel[0]):
        top = i * op.dilation[0]
        lines = slice(top, top + (height - 1) * op.stride[0] + 1, op.stride[0])
        for j in range(kernel[1]):
            left = j * op.dilation[1]
            columns = slice(left, left + (width - 1) * op.stride[1] + 1, op.stride[1])
            total[:, lines, columns] += products[:, :, :, i, j]
    return total
