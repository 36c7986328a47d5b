"""Random rotations, translations and flips of whole batches, by kornia."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor, nn

from lipcert.errors import OptionError, ShapeError, check_choice

INTERPOLATIONS = ("nearest", "bilinear")


class Augmentation(nn.Module):
    """Moves every image of a batch at random, always, in training and eval mode; what comes in from outside is black.

    Pixels stay in [0, 1]. The random numbers are drawn on the CPU: from the given generator or, without one, from
    torch's own, so that the result depends on the seed and not on the device.
    """

    def __init__(self, degrees: float, translate: float, flip: bool, interpolation: str) -> None:
        super().__init__()
        if not (isfinite(degrees) and 0 <= degrees <= 180):
            raise OptionError(f"degrees is {degrees}, expected a number from 0 to 180")
        if not 0 <= translate <= 1:
            raise OptionError(f"translate is {translate}, expected a ratio from 0 to 1")
        check_choice("interpolation", interpolation, INTERPOLATIONS)
        self.degrees, self.translate, self.flip, self.interpolation = degrees, translate, flip, interpolation
        # In a tuple, so that moving this module to a device does not move the random numbers there.
        self._steps = tuple(_steps(degrees, translate, flip, interpolation))

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The moved images, (B, C, H, W) as they came."""
        if images.ndim != 4 or not images.is_floating_point():
            raise ShapeError(f"images: expected floating-point (B, C, H, W), got {images.dtype} {tuple(images.shape)}")
        if not self._steps or len(images) == 0:
            return images
        if generator is None:
            return self._move(images)
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self._move(images)

    def _move(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            for step in self._steps:
                images = step(images)
        return images

    def extra_repr(self) -> str:
        return (
            f"degrees={self.degrees}, translate={self.translate}, flip={self.flip}, "
            f"interpolation={self.interpolation!r}"
        )


def augmentation(
    degrees: float, translate: float, flip: bool = False, *, interpolation: str = "nearest"
) -> Augmentation:
    """The paper's augmentation (d, t): rotation by up to ±degrees and translation by up to ±translate of each side.

    Args:
        degrees: 0 to 180.
        translate: 0 to 1, a ratio of width and height.
        flip: whether to mirror half of the images; the paper does not.
        interpolation: "nearest", the default of the RandomAffine that the paper uses, or "bilinear", which blurs.
    """
    return Augmentation(degrees, translate, flip, interpolation)


def _steps(degrees: float, translate: float, flip: bool, interpolation: str) -> list[nn.Module]:
    if not (degrees or translate or flip):
        return []
    from kornia.augmentation import RandomAffine, RandomHorizontalFlip  # takes a while to import

    steps: list[nn.Module] = []
    if degrees or translate:
        steps.append(RandomAffine(degrees, (translate, translate), resample=interpolation.upper(), p=1.0))
    if flip:
        steps.append(RandomHorizontalFlip(p=0.5))
    return steps
