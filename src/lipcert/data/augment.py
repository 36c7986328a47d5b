"""Random moves and colours of whole batches; the moves by kornia."""

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
        zoom: 0 to 1; larger or smaller by up to this ratio. Pixels are then
            interpolated, which the paper's are not.
        colour: 0 to 1; brightness, contrast and saturation change by up to this ratio.
        erase: 0 to 1; a square of this ratio of the sides becomes grey, at a random
            place.
    """

    def __init__(
        self,
        degrees: float,
        translate: float,
        flip: bool = False,
        *,
        zoom: float = 0.0,
        colour: float = 0.0,
        erase: float = 0.0,
    ) -> None:
        super().__init__()
        if not (isfinite(degrees) and 0 <= degrees <= 180):
            raise OptionError(f"degrees is {degrees}, expected a number from 0 to 180")
        ratios = {"zoom": zoom, "colour": colour, "erase": erase}
        for name, ratio in {"translate": translate, **ratios}.items():
            if not 0 <= ratio <= 1:
                raise OptionError(f"{name} is {ratio}, expected a ratio from 0 to 1")
        self.degrees, self.translate, self.flip = degrees, translate, flip
        self.zoom, self.colour, self.erase = zoom, colour, erase
        # In a tuple, so that moving this module to a device does not move the random
        # numbers there.
        self._steps = tuple(self._make_steps())

    def _make_steps(self) -> list[nn.Module]:
        steps: list[nn.Module] = []
        affine = self.degrees or self.translate or self.zoom
        if affine or self.flip:
            # Only here: it takes a while to import, and most configurations need none.
            from kornia.augmentation import RandomAffine, RandomHorizontalFlip
        if affine:
            shift = (self.translate, self.translate)
            scale = (1 - self.zoom, 1 + self.zoom) if self.zoom else None
            resample = "BILINEAR" if self.zoom else "NEAREST"
            steps.append(
                RandomAffine(self.degrees, shift, scale, resample=resample, p=1.0)
            )
        if self.flip:
            steps.append(RandomHorizontalFlip(p=0.5))
        if self.colour:
            steps.append(_Colours(self.colour))
        if self.erase:
            steps.append(_Erase(self.erase))
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
        named = {"zoom": self.zoom, "colour": self.colour, "erase": self.erase}
        further = "".join(f", {name}={value}" for name, value in named.items() if value)
        return f"degrees={self.degrees}, translate={self.translate}, flip={self.flip}{further}"


class _Colours(nn.Module):
    """Brightness, contrast and saturation of every image times a number from 1 − ratio to 1 + ratio each."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio

    def forward(self, images: Tensor) -> Tensor:
        drawn = 1 + self.ratio * (2 * torch.rand(3, len(images), 1, 1, 1) - 1)
        brightness, contrast, saturation = drawn.to(images).unbind()
        images = images * brightness
        mean = images.mean((1, 2, 3), keepdim=True)
        images = mean + contrast * (images - mean)
        grey = images.mean(1, keepdim=True)
        return (grey + saturation * (images - grey)).clamp(0, 1)


class _Erase(nn.Module):
    """A grey square at a random place of every image, cut off where it leaves the image."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio

    def forward(self, images: Tensor) -> Tensor:
        centres = torch.rand(2, len(images), 1)
        outside = [
            ((torch.arange(size) + 0.5) / size - centre).abs() > self.ratio / 2
            for size, centre in zip(images.shape[2:], centres, strict=True)
        ]
        kept = outside[0][:, None, :, None] | outside[1][:, None, None, :]
        return torch.where(kept.to(images.device), images, 0.5)
