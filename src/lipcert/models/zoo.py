"""Built-in architectures: the paper's mCnF networks, its depth family, MLPs, residual and ρ-Lipschitz networks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from lipcert.errors import check_choice
from lipcert.layers import MaxMin, RhoLipschitzLinear
from lipcert.models.abs_networks import patch_network, shift_network
from lipcert.network.program import Shape

Conv = tuple[int, int, int, int]
"""Filters, kernel size, stride, padding: the paper's C(c, k, s, p)."""


@dataclass(frozen=True)
class Architecture:
    """A network of the zoo with the input shape and number of classes it was designed for."""

    name: str
    input_shape: Shape
    classes: int
    build: Callable[[Shape, int], nn.Module]


class InputRange(nn.Module):
    """Maps pixels in [0, 1] to [low, high]: the first layer of a network that was designed for that range."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, x: Tensor) -> Tensor:
        # A layer of the model: its factor is part of the constants, so that radii stay
        # in pixels.
        return x * (self.high - self.low) + self.low

    def extra_repr(self) -> str:
        return f"low={self.low:g}, high={self.high:g}"


def build(
    name: str,
    input_shape: Shape | None = None,
    classes: int | None = None,
    *,
    seed: int | None = None,
    input_range: tuple[float, float] = (0.0, 1.0),
) -> nn.Module:
    """A freshly initialised network of the zoo, reproducible if a seed is given.

    It takes pixels in [0, 1]. With another `input_range`, a first layer maps them to
    that range.
    """
    check_choice("zoo name", name, names())
    architecture = ZOO[name]
    shape = input_shape or architecture.input_shape
    count = classes or architecture.classes
    if seed is None:
        network = architecture.build(shape, count)
    else:
        # The caller's random numbers are the same with and without a seed here.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = architecture.build(shape, count)
    return ranged(network, input_range)


def ranged(network: nn.Module, input_range: tuple[float, float]) -> nn.Module:
    """The network for pixels in [0, 1]: with another range, a first layer maps them to it."""
    if input_range == (0.0, 1.0):
        return network
    layers = OrderedDict(input_range=InputRange(*input_range), network=network)
    return nn.Sequential(layers)


def names() -> list[str]:
    """All names of the zoo."""
    return list(ZOO)


def feed_forward(
    convolutions: list[Conv], dense: list[int], input_shape: Shape, classes: int
) -> nn.Sequential:
    """The paper's mCnF: convolutions, then dense layers, with a ReLU between any two layers."""
    layers: list[nn.Module] = []
    channels, size = input_shape[0], input_shape[1]
    for filters, kernel, stride, padding in convolutions:
        layers += [nn.Conv2d(channels, filters, kernel, stride, padding), nn.ReLU()]
        # The side of the image, which is square: 28 → 28 → 14 → 14 → 7 for 4C.
        channels, size = filters, (size + 2 * padding - kernel) // stride + 1
    layers.append(nn.Flatten())
    width = channels * size * size
    for neurons in dense:
        layers += [nn.Linear(width, neurons), nn.ReLU()]
        width = neurons
    layers.append(nn.Linear(width, classes))
    return nn.Sequential(*layers)


def mlp(
    widths: list[int],
    input_shape: Shape,
    classes: int,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Dense layers with a nonlinearity between any two, for inputs of any shape."""
    layers: list[nn.Module] = [nn.Flatten()]
    previous = prod(input_shape)
    for width in widths:
        layers += [nn.Linear(previous, width), activation()]
        previous = width
    return nn.Sequential(*layers, nn.Linear(previous, classes))


def rho_mlp(
    width: int, depth: int, rescaling: str, input_shape: Shape, classes: int
) -> nn.Sequential:
    """Residual layers that are √ρ-Lipschitz by construction, with learned ρ, between two dense layers."""
    layers = [
        RhoLipschitzLinear(width, width, rescaling=rescaling, learn_rho=True)
        for _ in range(depth)
    ]
    first = nn.Linear(prod(input_shape), width)
    return nn.Sequential(nn.Flatten(), first, *layers, nn.Linear(width, classes))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with batch normalisation and a skip connection."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != filters:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, filters, 1, stride, bias=False),
                nn.BatchNorm2d(filters),
            )

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: Tensor = self.relu(inner + self.shortcut(x))
        return result


def residual(
    widths: list[int], blocks: list[int], input_shape: Shape, classes: int
) -> nn.Sequential:
    """A ResNet for small images: 3×3 stem, stages of basic blocks, global average pooling, one dense layer."""
    layers: list[nn.Module] = [
        nn.Conv2d(input_shape[0], widths[0], 3, 1, 1, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(),
    ]
    channels = widths[0]
    for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        for block in range(count):
            # The first block of every stage but the first halves the image.
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(BasicBlock(channels, width, stride))
            channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


def convolutional(widths: list[int], input_shape: Shape, classes: int) -> nn.Sequential:
    """Pairs of 3×3 convolutions, normalised, with a ReLU and max-pooling between them: for accuracy, not for bounds."""
    layers: list[nn.Module] = []
    channels = input_shape[0]
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.MaxPool2d(2)]
        layers += [nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, 1, 1, bias=False)]
        layers += [nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


_DIGITS, _MNIST, _CIFAR, _TINY = (1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64)
_C1, _C2 = (64, 3, 1, 1), (64, 4, 2, 1)
_4C = [(32, 3, 1, 1), (32, 4, 2, 1), (64, 3, 1, 1), (64, 4, 2, 1)]
_6C = [*_4C, _C1, _C2]
_9C = [*_6C, _C1, _C2, _C1]
_8C = [(64, 3, 1, 1), (64, 3, 1, 0), (64, 4, 2, 0)]
_8C += [(128, 3, 1, 1), (128, 3, 1, 1), (128, 4, 2, 0), (256, 3, 1, 1), (256, 4, 2, 0)]
# Huang et al. pad the second convolution, so that the first strided one leaves a
# remainder.
_8C_ORIGINAL = [_8C[0], (64, 3, 1, 1), *_8C[2:]]

_ARCHITECTURES = (
    Architecture("4C3F", _MNIST, 10, partial(feed_forward, _4C, [512, 512])),
    Architecture("6C2F", _CIFAR, 10, partial(feed_forward, _6C, [512])),
    Architecture("8C2F", _TINY, 200, partial(feed_forward, _8C, [256])),
    Architecture(
        "8C2F-original", _TINY, 200, partial(feed_forward, _8C_ORIGINAL, [256])
    ),
    Architecture("7C2F", _CIFAR, 10, partial(feed_forward, [*_6C, _C1], [512])),
    Architecture(
        "8C2F-depth", _CIFAR, 10, partial(feed_forward, [*_6C, _C1, _C2], [256])
    ),
    Architecture("9C2F", _CIFAR, 10, partial(feed_forward, _9C, [256])),
    Architecture("9C3F", _CIFAR, 10, partial(feed_forward, _9C, [128, 128])),
    Architecture("9C4F", _CIFAR, 10, partial(feed_forward, _9C, [128, 128, 64])),
    Architecture("10C4F", _CIFAR, 10, partial(feed_forward, [*_9C, _C2], [64, 64, 32])),
    Architecture(
        "11C4F", _CIFAR, 10, partial(feed_forward, [*_9C, _C2, _C1], [64, 64, 32])
    ),
    Architecture(
        "2C2F", _DIGITS, 10, partial(feed_forward, [(16, 3, 1, 1), (32, 4, 2, 1)], [64])
    ),
    Architecture("mlp-64", _MNIST, 10, partial(mlp, [64])),
    Architecture("mlp-256", _MNIST, 10, partial(mlp, [256])),
    Architecture("maxmin-1024", _MNIST, 10, partial(mlp, [1024], activation=MaxMin)),
    Architecture(
        "maxmin-512-512", _MNIST, 10, partial(mlp, [512, 512], activation=MaxMin)
    ),
    Architecture("patches-48", _CIFAR, 10, partial(patch_network, 48, 2)),
    Architecture(
        "shifts-512-deep",
        _CIFAR,
        10,
        partial(shift_network, [64, 256, 512, 512], [3, 6, 3, 0]),
    ),
    Architecture(
        "shifts-512-tiny",
        _TINY,
        200,
        partial(shift_network, [128, 256, 512, 512], [3, 3, 1, 0], first_patch=4),
    ),
    Architecture("conv-192", _CIFAR, 10, partial(convolutional, [48, 96, 192])),
    Architecture("rho-mlp", _DIGITS, 10, partial(rho_mlp, 64, 2, "sll")),
    Architecture("rho-mlp-256", _MNIST, 10, partial(rho_mlp, 256, 4, "sll")),
    Architecture(
        "resnet-small", _CIFAR, 10, partial(residual, [16, 32, 64], [1, 1, 1])
    ),
    Architecture(
        "resnet18", _CIFAR, 10, partial(residual, [64, 128, 256, 512], [2, 2, 2, 2])
    ),
)
ZOO = {architecture.name: architecture for architecture in _ARCHITECTURES}
DEPTH_FAMILY = ("6C2F", "7C2F", "8C2F-depth", "9C2F", "9C3F", "9C4F", "10C4F", "11C4F")
"""The networks of the paper's run-time figure, from shallow to deep."""
