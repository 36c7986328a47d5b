"""Ordinary networks of the size that people have, which the zoo does not hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def vgg11(classes: int = 10) -> nn.Module:
    """VGG-11 with BatchNorm and max-pooling, for 3×32×32."""
    layers: list[nn.Module] = []
    channels = 3
    for filters in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if filters == 0:
            layers.append(nn.MaxPool2d(2, 2))
            continue
        layers += [
            nn.Conv2d(channels, filters, 3, padding=1),
            nn.BatchNorm2d(filters),
            nn.ReLU(),
        ]
        channels = filters
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))


def many_classes(classes: int = 1000) -> nn.Module:
    """2.7 million parameters, for 3×64×64."""
    layers: list[nn.Module] = []
    channels = 3
    for filters in (32, 64, 64):
        layers += [nn.Conv2d(channels, filters, 3, 2, 1), nn.ReLU()]
        channels = filters
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, classes)
    )


def chain(depth: int, width: int = 32) -> nn.Module:
    """Dense layers of one width, with ReLU."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Bottleneck(nn.Module):
    """The block of ResNet-50: 1×1, 3×3 and 1×1 convolutions with BatchNorm, and a skip connection."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        filters = 4 * width
        self.inner = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, filters, 1, bias=False),
            nn.BatchNorm2d(filters),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != filters:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, filters, 1, stride, bias=False),
                nn.BatchNorm2d(filters),
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x) + self.shortcut(x))


def resnet50(classes: int = 1000) -> nn.Module:
    """ResNet-50 for 3×224×224; its first pooling has windows that do not overlap."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
    ]
    channels = 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(channels, width, stride))
            channels = 4 * width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )
