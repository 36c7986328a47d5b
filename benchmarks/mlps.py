"""Fully connected networks to compare bounds on: random ones, and classifiers of digits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipcert.data import Dataset

WIDTH = 80
"""Of all hidden layers of random networks."""


def random_mlp(depth: int, seed: int) -> nn.Sequential:
    """4 inputs, 1 output, normal weights with spectral norms drawn from [0.4, 1.8], no biases."""
    generator = torch.Generator().manual_seed(1000 * depth + seed)
    layers: list[nn.Module] = []
    for n, m in pairwise([4, *[WIDTH] * (depth - 1), 1]):
        layer = nn.Linear(n, m)
        weight = torch.randn(m, n, generator=generator, dtype=torch.float64)
        norm = 0.4 + 1.4 * torch.rand((), generator=generator, dtype=torch.float64)
        layer.weight.data = (
            weight * norm / torch.linalg.matrix_norm(weight, 2)
        ).float()
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def trained_mlp(hidden: Sequence[int], data: Dataset, epochs: int = 2) -> nn.Sequential:
    """784-…-10, by cross-entropy and Adam."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten()]
    for n, m in pairwise([784, *hidden, 10]):
        layers += [nn.Linear(n, m), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(data.train)).split(128):
            optimizer.zero_grad()
            F.cross_entropy(
                model(data.train.pixels(index)), data.train.labels[index]
            ).backward()
            optimizer.step()
    return model.eval()


def weights(model: nn.Module) -> list[Tensor]:
    """The matrices of the dense layers, in float64."""
    return [
        m.weight.detach().double() for m in model.modules() if isinstance(m, nn.Linear)
    ]
