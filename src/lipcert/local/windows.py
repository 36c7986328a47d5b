"""What rows inside windows meet on their way: tensors of images, seen through the same windows.

Windows are laid out as (rows, height, width, channels). What belongs to places of an
image (slopes, intercepts, allowances) is padded with zeros, so that entries outside of
the image vanish at the next nonlinearity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.local.receptive_fields import Frame
from lipcert.network.normal_form import Network


@dataclass(frozen=True)
class Places:
    """Entries of a node whose rows are asked for: (P,) each, the input in the batch, the channel, and where it is."""

    image: Tensor
    channel: Tensor
    y: Tensor
    x: Tensor

    def take(self, index: slice) -> Places:
        """Some of them."""
        return Places(
            self.image[index], self.channel[index], self.y[index], self.x[index]
        )

    def twice(self) -> Places:
        """All of them, and again."""
        return Places(
            self.image.repeat(2),
            self.channel.repeat(2),
            self.y.repeat(2),
            self.x.repeat(2),
        )


class Scene:
    """The windows of all nodes before a node v of a network."""

    def __init__(self, network: Network, v: int, frames: dict[int, Frame]) -> None:
        self.network, self.v, self.frames = network, v, frames
        self.places = network.nodes[v].shape[1:]
        self._seen: dict[tuple[str, int], Tensor] = {}

    def look(
        self, kind: str, u: int, make: Callable[[], Tensor], places: Places
    ) -> Tensor:
        """(P, h, w, C): windows of a tensor (B, C, H, W) that belongs to node u; `kind` names it."""
        if (kind, u) not in self._seen:
            self._seen[kind, u] = self._views(self.frames[u], make())
        return self._seen[kind, u][places.image, places.y, places.x]

    def _views(self, frame: Frame, values: Tensor) -> Tensor:
        """(B, height, width, h, w, C): [b, y, x] is the window of place (y, x) of v in the padded tensor.

        Four places with step 2, corner −1 and size 3 see −1..1, 1..3, 3..5 and 5..7:
        one line of zeros before the image, and as many behind it as the last window
        needs.
        """
        pads: list[int] = []
        for axis in (1, 0):  # `F.pad` wants the last axis first
            last = (
                frame.step[axis] * (self.places[axis] - 1)
                + frame.corner[axis]
                + frame.size[axis]
            )
            pads += [-frame.corner[axis], max(0, last - values.shape[2 + axis])]
        padded = F.pad(values.permute(0, 2, 3, 1), (0, 0, *pads)).contiguous()
        # Nothing is copied: windows overlap in memory, and that of place (y, x) begins
        # step·y lines and step·x columns further on.
        batch, row, column, one = padded.stride()
        shape = (len(values), *self.places, *frame.size, values.shape[1])
        return padded.as_strided(
            shape,
            (batch, frame.step[0] * row, frame.step[1] * column, row, column, one),
        )

    def inside(self, u: int, rows: Tensor, places: Places) -> Tensor:
        """Rows at a node, with zeros outside of the image."""
        if self.frames[u].step == (0, 0):
            return rows
        shape = (1, 1, *self.network.nodes[u].shape[1:])
        # The border is the same for all inputs: one image of ones will do.
        first = Places(
            torch.zeros_like(places.image), places.channel, places.y, places.x
        )
        return rows * self.look(
            "inside",
            u,
            lambda: torch.ones(shape, dtype=rows.dtype, device=rows.device),
            first,
        )

    def reframed(self, rows: Tensor, frame: Frame, u: int, places: Places) -> Tensor:
        """Rows in some windows of node u as rows in the windows that are its frame."""
        target = self.frames[u]
        if frame == target:
            return rows
        # Only whole images have another step (see `_join`): the windows are put into
        # them.
        if frame.step != target.step:
            return self._placed(rows, frame, u, places)
        pads: list[int] = []
        for axis in (1, 0):
            before = frame.corner[axis] - target.corner[axis]
            pads += [before, target.size[axis] - before - frame.size[axis]]
        return F.pad(rows, (0, 0, *pads))

    def _placed(self, rows: Tensor, frame: Frame, u: int, places: Places) -> Tensor:
        """Rows in windows as rows in whole images: entry Y of an image is entry Y − (step·y + corner) of the window."""
        wanted, valid = [], []
        for axis, place in enumerate((places.y, places.x)):
            line = torch.arange(
                self.network.nodes[u].shape[1 + axis], device=rows.device
            )
            index = line - (frame.step[axis] * place + frame.corner[axis])[:, None]
            valid.append((index >= 0) & (index < frame.size[axis]))
            wanted.append(index.clamp(0, frame.size[axis] - 1))
        every = torch.arange(len(rows), device=rows.device)
        picked = rows[
            every[:, None, None], wanted[0][:, :, None], wanted[1][:, None, :]
        ]
        return picked * (valid[0][:, :, None] & valid[1][:, None, :])[..., None]
