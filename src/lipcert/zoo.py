"""Built-in architectures: the paper's mCnF networks, its depth family, MLPs, residual and ρ-Lipschitz networks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from lipcert.errors import check_choice
from lipcert.layers import MaxMin, RhoLipschitzConv2d, RhoLipschitzLinear

Shape = tuple[int, ...]
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

    It takes pixels in [0, 1]. With another `input_range`, a first layer maps them to that range.
    """
    check_choice("zoo name", name, names())
    architecture = ZOO[name]
    shape, count = input_shape or architecture.input_shape, classes or architecture.classes
    if seed is None:
        network = architecture.build(shape, count)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = architecture.build(shape, count)
    if input_range == (0.0, 1.0):
        return network
    return nn.Sequential(OrderedDict(input_range=InputRange(*input_range), network=network))


def names() -> list[str]:
    """All names of the zoo."""
    return list(ZOO)


def feed_forward(convolutions: list[Conv], dense: list[int], input_shape: Shape, classes: int) -> nn.Sequential:
    """The paper's mCnF: convolutions, then dense layers, with a ReLU between any two layers."""
    layers: list[nn.Module] = []
    channels, size = input_shape[0], input_shape[1]
    for filters, kernel, stride, padding in convolutions:
        layers += [nn.Conv2d(channels, filters, kernel, stride, padding), nn.ReLU()]
        channels, size = filters, (size + 2 * padding - kernel) // stride + 1
    layers.append(nn.Flatten())
    width = channels * size * size
    for neurons in dense:
        layers += [nn.Linear(width, neurons), nn.ReLU()]
        width = neurons
    layers.append(nn.Linear(width, classes))
    return nn.Sequential(*layers)


def mlp(
    widths: list[int], input_shape: Shape, classes: int, activation: Callable[[], nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Dense layers with a nonlinearity between any two, for inputs of any shape."""
    layers: list[nn.Module] = [nn.Flatten()]
    previous = prod(input_shape)
    for width in widths:
        layers += [nn.Linear(previous, width), activation()]
        previous = width
    return nn.Sequential(*layers, nn.Linear(previous, classes))


def rho_mlp(width: int, depth: int, rescaling: str, input_shape: Shape, classes: int) -> nn.Sequential:
    """Residual layers that are √ρ-Lipschitz by construction, with learned ρ, between two dense layers."""
    layers = [RhoLipschitzLinear(width, width, rescaling=rescaling, learn_rho=True) for _ in range(depth)]
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), width), *layers, nn.Linear(width, classes))


def rho_conv(
    convolutions: list[Conv], depth: int, dense: int, rescaling: str, input_shape: Shape, classes: int
) -> nn.Sequential:
    """After each convolution some ρ-Lipschitz convolutional layers; then the same with dense layers."""
    layers: list[nn.Module] = []
    channels, size = input_shape[0], input_shape[1]
    for filters, kernel, stride, padding in convolutions:
        layers.append(nn.Conv2d(channels, filters, kernel, stride, padding))
        layers += [RhoLipschitzConv2d(filters, filters, 3, rescaling=rescaling, learn_rho=True) for _ in range(depth)]
        channels, size = filters, (size + 2 * padding - kernel) // stride + 1
    layers += [nn.Flatten(), nn.Linear(channels * size * size, dense)]
    layers += [RhoLipschitzLinear(dense, dense, rescaling=rescaling, learn_rho=True) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(dense, classes))


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
            self.shortcut = nn.Sequential(nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: Tensor = self.relu(inner + self.shortcut(x))
        return result


def residual(widths: list[int], blocks: list[int], input_shape: Shape, classes: int) -> nn.Sequential:
    """A ResNet for small images: 3×3 stem, stages of basic blocks, global average pooling, one dense layer."""
    layers: list[nn.Module] = [
        nn.Conv2d(input_shape[0], widths[0], 3, 1, 1, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(),
    ]
    channels = widths[0]
    for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        for block in range(count):
            layers.append(BasicBlock(channels, width, 2 if stage > 0 and block == 0 else 1))
            channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


def _feed_forward(
    name: str, convolutions: list[Conv], dense: list[int], input_shape: Shape, classes: int
) -> Architecture:
    return Architecture(
        name, input_shape, classes, lambda shape, count: feed_forward(convolutions, dense, shape, count)
    )


def _residual(name: str, widths: list[int], blocks: list[int]) -> Architecture:
    return Architecture(name, (3, 32, 32), 10, lambda shape, count: residual(widths, blocks, shape, count))


def _mlp(*widths: int, kind: str = "mlp", activation: Callable[[], nn.Module] = nn.ReLU) -> Architecture:
    name = "-".join([kind, *map(str, widths)])
    return Architecture(name, _MNIST, 10, lambda shape, count: mlp(list(widths), shape, count, activation))


def _rho_mlp(name: str, width: int, depth: int, input_shape: Shape) -> Architecture:
    return Architecture(name, input_shape, 10, lambda shape, count: rho_mlp(width, depth, "sll", shape, count))


_DIGITS, _MNIST, _CIFAR, _TINY = (1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64)
_C1, _C2 = (64, 3, 1, 1), (64, 4, 2, 1)
_2C = [(16, 4, 2, 1), (32, 4, 2, 1)]
_4C = [(32, 3, 1, 1), (32, 4, 2, 1), (64, 3, 1, 1), (64, 4, 2, 1)]
_6C = [*_4C, _C1, _C2]
_8C = [
    (64, 3, 1, 1),
    (64, 3, 1, 0),
    (64, 4, 2, 0),
    (128, 3, 1, 1),
    (128, 3, 1, 1),
    (128, 4, 2, 0),
    (256, 3, 1, 1),
    (256, 4, 2, 0),
]
# Huang et al. pad the second convolution, so that the first strided one leaves a remainder.
_8C_ORIGINAL = [_8C[0], (64, 3, 1, 1), *_8C[2:]]

ZOO: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        _feed_forward("4C3F", _4C, [512, 512], _MNIST, 10),
        _feed_forward("6C2F", _6C, [512], _CIFAR, 10),
        _feed_forward("8C2F", _8C, [256], _TINY, 200),
        _feed_forward("8C2F-original", _8C_ORIGINAL, [256], _TINY, 200),
        _feed_forward("7C2F", [*_6C, _C1], [512], _CIFAR, 10),
        _feed_forward("8C2F-depth", [*_6C, _C1, _C2], [256], _CIFAR, 10),
        _feed_forward("9C2F", [*_6C, _C1, _C2, _C1], [256], _CIFAR, 10),
        _feed_forward("9C3F", [*_6C, _C1, _C2, _C1], [128, 128], _CIFAR, 10),
        _feed_forward("9C4F", [*_6C, _C1, _C2, _C1], [128, 128, 64], _CIFAR, 10),
        _feed_forward("10C4F", [*_6C, _C1, _C2, _C1, _C2], [64, 64, 32], _CIFAR, 10),
        _feed_forward("11C4F", [*_6C, _C1, _C2, _C1, _C2, _C1], [64, 64, 32], _CIFAR, 10),
        _feed_forward("2C2F", [(16, 3, 1, 1), (32, 4, 2, 1)], [64], _DIGITS, 10),
        _mlp(64),
        _mlp(256),
        _mlp(1024),
        _mlp(2048),
        _mlp(1024, 1024),
        _mlp(1024, kind="maxmin", activation=MaxMin),
        _mlp(512, 512, kind="maxmin", activation=MaxMin),
        _rho_mlp("rho-mlp", 64, 2, _DIGITS),
        _rho_mlp("rho-mlp-256", 256, 4, _MNIST),
        Architecture("rho-conv", _MNIST, 10, lambda shape, count: rho_conv(_2C, 1, 128, "sll", shape, count)),
        _residual("resnet-small", [16, 32, 64], [1, 1, 1]),
        _residual("resnet18", [64, 128, 256, 512], [2, 2, 2, 2]),
    )
}
DEPTH_FAMILY = ("6C2F", "7C2F", "8C2F-depth", "9C2F", "9C3F", "9C4F", "10C4F", "11C4F")
"""The networks of the paper's run-time figure, from shallow to deep."""
