"""Random rotations, translations and flips of whole batches, by kornia."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor, nn

from lipcert.errors import OptionError, ShapeError


class Augmentation(nn.Module):
    """The paper's augmentation (d, t): rotation by up to ±degrees and translation by up to ±translate of each side.

    Every image of a batch is moved at random, always, in training and eval mode; what
    comes in from outside is black. Pixels stay in [0, 1]. The random numbers are drawn
    on the CPU: from the given generator or, without one, from torch's own, so that the
    result depends on the seed and not on the device.

    Args:
        degrees: 0 to 180.
        translate: 0 to 1, a ratio of width and height.
        flip: whether to mirror half of the images; the paper does not.
    """

    def __init__(self, degrees: float, translate: float, flip: bool = False) -> None:
        super().__init__()
        if not (isfinite(degrees) and 0 <= degrees <= 180):
            raise OptionError(f"degrees is {degrees}, expected a number from 0 to 180")
        if not 0 <= translate <= 1:
            raise OptionError(f"translate is {translate}, expected a ratio from 0 to 1")
        self.degrees, self.translate, self.flip = degrees, translate, flip
        # In a tuple, so that moving this module to a device does not move the random
        # numbers there.
        self._steps = tuple(self._make_steps())

    def _make_steps(self) -> list[nn.Module]:
        steps: list[nn.Module] = []
        if not (self.degrees or self.translate or self.flip):
            return steps
        # Only here: most configurations have no augmentation.
        from kornia.augmentation import (
            RandomAffine,
            RandomHorizontalFlip,
        )  # takes a while to import

        if self.degrees or self.translate:
            shift = (self.translate, self.translate)
            steps.append(RandomAffine(self.degrees, shift, resample="NEAREST", p=1.0))
        if self.flip:
            steps.append(RandomHorizontalFlip(p=0.5))
        return steps

    def forward(
        self, images: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """The moved images, (B, C, H, W) as they came."""
        if not self._steps or len(images) == 0:
            return images
        if images.ndim != 4 or not images.is_floating_point():
            raise ShapeError(
                f"images: expected floating-point (B, C, H, W), got {images.dtype} "
                f"{tuple(images.shape)}"
            )
        if generator is None:
            return self._move(images)
        # kornia takes no generator: the global one is seeded from it for a moment, and
        # put back.
        seed = int(
            torch.randint(2**62, (), generator=generator, device=generator.device)
        )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self._move(images)

    @torch.no_grad()
    def _move(self, images: Tensor) -> Tensor:
        for step in self._steps:
            images = step(images)
        return images

    def extra_repr(self) -> str:
        return f"degrees={self.degrees}, translate={self.translate}, flip={self.flip}"
