"""The ordinary networks of `python -m benchmarks local`: for accuracy, or against an attack."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch
from torch import Tensor, nn

import lipcert
from lipcert.models.zoo import ZOO, residual

KEPT = Path("build/local-networks")
"""Trained weights are kept here, so that a run that was stopped need not train again."""


def _mlp(width: int, depth: int, activation: Callable[[], nn.Module]) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(784, width), activation()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _conv(channels: int) -> nn.Module:
    side, first, second = (7, 8, 16) if channels == 1 else (8, 8, 16)
    return nn.Sequential(
        nn.Conv2d(channels, first, 4, 2, 1), nn.ReLU(), nn.Conv2d(first, second, 4, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(second * side * side, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def _resnet() -> nn.Module:
    return ZOO["resnet-small"].build((3, 32, 32), 10)


def _resnet_of_patches() -> nn.Module:
    """A residual network on 8×8 patches, which α-CROWN can still improve in minutes."""
    patches = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU())
    return nn.Sequential(patches, residual([8, 16], [1, 1], (8, 8, 8), 10))


@dataclass(frozen=True)
class Case:
    """A network, its data, how long it is trained, and the sizes of the balls in l2 and l∞.

    images: how many test images are certified. searched: how many of them by the methods that spend
    time on slopes, which take seconds per image; 0 for none. batch: how many at a time by auto_LiRPA.
    attack: the size in l2 of the perturbations of adversarial training; 0 for training on accuracy alone.
    correct_only: images that are misclassified, which nobody proves, are not tried; times are per image tried.
    """

    build: Callable[[], nn.Module]
    data: str
    epochs: int
    balls: dict[float, tuple[float, ...]]
    images: int = 50
    searched: int = 20
    batch: int = 10
    attack: float = 0.0
    correct_only: bool = False


_MNIST = {2.0: (0.05, 0.1, 0.2), inf: (0.002, 0.005, 0.01)}
_WIDE = {2.0: (0.2, 0.5, 1.0), inf: (0.01, 0.02, 0.04)}
_CIFAR = {2.0: (0.01, 0.03, 0.06), inf: (0.0005, 0.001, 0.002)}
CASES = {
    "784-256×2-10": Case(lambda: _mlp(256, 2, nn.ReLU), "mnist", 2, _MNIST),
    "784-256×4-10": Case(lambda: _mlp(256, 4, nn.ReLU), "mnist", 2, _MNIST),
    "784-200×8-10": Case(lambda: _mlp(200, 8, nn.ReLU), "mnist", 2, _MNIST),
    "sigmoid 784-200×5-10": Case(lambda: _mlp(200, 5, nn.Sigmoid), "mnist", 6, _MNIST),
    "784-256×4-10, adversarially": Case(
        lambda: _mlp(256, 4, nn.ReLU), "mnist", 2, _WIDE, attack=1.0
    ),
    "conv 1×28×28": Case(lambda: _conv(1), "mnist", 1, _MNIST, 20, 10),
    "conv 3×32×32": Case(lambda: _conv(3), "cifar10", 1, _CIFAR, 20, 10),
    "conv 1×28×28, adversarially": Case(
        lambda: _conv(1), "mnist", 1, _WIDE, 20, 10, attack=1.0
    ),
    "conv 3×32×32, adversarially": Case(
        lambda: _conv(3), "cifar10", 1, _CIFAR, 20, 10, attack=0.25
    ),
    "resnet of patches": Case(_resnet_of_patches, "cifar10", 2, _CIFAR, 20, 10),
    "resnet of patches, adversarially": Case(
        _resnet_of_patches, "cifar10", 2, _CIFAR, 20, 10, attack=0.25
    ),
    "resnet-small": Case(_resnet, "cifar10", 1, _CIFAR, 5, 0, 1, correct_only=True),
    "resnet-small, adversarially": Case(
        _resnet, "cifar10", 1, _CIFAR, 5, 0, 1, attack=0.25, correct_only=True
    ),
}


def trained(title: str) -> tuple[nn.Module, lipcert.data.Dataset]:
    """A network of `CASES` and its data; weights that an earlier run has kept are taken."""
    case, path = CASES[title], KEPT / f"{title}.pt"
    data = lipcert.data.load(case.data, os.environ.get("LIPCERT_DATA_DIR"))
    if path.exists():
        model = case.build()
        model.load_state_dict(torch.load(path))
        return model.eval(), data
    model = train_ordinarily(case, data)
    KEPT.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model, data


def test_images(case: Case, data: lipcert.data.Dataset) -> tuple[Tensor, Tensor]:
    """The first test images of MNIST; of CIFAR-10, whose files may be sorted by class, some at random."""
    index = torch.arange(len(data.test))
    if case.data == "cifar10":
        index = torch.randperm(len(index), generator=torch.Generator().manual_seed(0))
    index = index[: case.images]
    return data.test.pixels(index), data.test.labels[index]


def train_ordinarily(case: Case, data: lipcert.data.Dataset) -> nn.Module:
    """Cross-entropy alone, on images or on what three steps of an attack make of them."""
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(case.epochs):
        for index in torch.randperm(len(data.train)).split(128):
            x, y = data.train.pixels(index), data.train.labels[index]
            if case.attack:
                x = _attacked(model, x, y, case.attack)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def _attacked(model: nn.Module, x: Tensor, y: Tensor, size: float) -> Tensor:
    """Three steps up the loss, inside an l2 ball and between 0 and 1."""
    moved = x
    for _ in range(3):
        moved = moved.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(
            nn.functional.cross_entropy(model(moved), y), moved
        )
        gradient = (
            gradient
            / gradient.flatten(1).norm(dim=1).clamp(min=1e-12)[:, None, None, None]
        )
        step = moved.detach() + 0.5 * size * gradient - x
        length = step.flatten(1).norm(dim=1)[:, None, None, None]
        moved = (x + step * (size / length.clamp(min=1e-12)).clamp(max=1.0)).clamp(0, 1)
    return moved.detach()
