"""Rho-Lipschitz layers with random weights, alone and among ordinary layers, and their dense matrices."""

from math import prod

import pytest
import torch
from torch import nn

from helpers import eye
from lipcert.layers import RhoLipschitzConv2d, RhoLipschitzLinear

RESCALINGS = ("sn", "aol", "sll")
ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky": lambda: nn.LeakyReLU(0.3),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "elu": nn.ELU,
    "softshrink": nn.Softshrink,
}
both_kinds = pytest.mark.parametrize("kind", ["dense", "conv"])
every_rescaling = pytest.mark.parametrize("rescaling", RESCALINGS)


def randomise(module, seed=0, scale=1.0):
    """Gaussian weights, biases and q for all layers of a float64 model, with power iterations done."""
    module.double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            if not name.endswith("log_rho"):
                tensor.copy_(
                    scale
                    * torch.randn(
                        tensor.shape, generator=generator, dtype=torch.float64
                    )
                )
    return settle(module)


def settle(module):
    """Power iterations for the present weights, enough even for singular values that are close together."""
    for layer in module.modules():
        if isinstance(layer, RhoLipschitzConv2d):
            layer.iterate(1000)
    return module


def single(kind, *args, **options):
    """One layer with the given options, and the shape of its inputs."""
    if kind == "dense":
        return RhoLipschitzLinear(4, 3, *args, **options), (4,)
    return RhoLipschitzConv2d(2, 3, 3, *args, **options), (2, 3, 4)


def stack(kind, rescaling="aol", activation=nn.ReLU, seed=0):
    """Such layers among ordinary ones, in float64, and the input shape."""
    options = {"rescaling": rescaling, "learn_rho": True}
    if kind == "dense":
        inner = [
            nn.Linear(4, 5), RhoLipschitzLinear(5, 3, activation(), rho=1.4, **options), nn.Linear(5, 5), activation(),
            RhoLipschitzLinear(5, 6, activation(), rho=0.7, **options), nn.Linear(5, 3),
        ]  # fmt: skip
        return randomise(nn.Sequential(*inner), seed, 0.6), (4,)
    inner = [
        nn.Conv2d(1, 2, 3, 2, 1), RhoLipschitzConv2d(2, 3, 3, activation(), rho=1.4, **options), activation(),
        RhoLipschitzConv2d(2, 4, 1, activation(), rho=0.7, **options), nn.Flatten(), nn.Linear(8, 3),
    ]  # fmt: skip
    return randomise(nn.Sequential(*inner), seed, 0.6), (1, 4, 4)


def matrix_of(layer, shape):
    """W as a dense matrix, (hidden, inputs)."""
    weight = layer.weight.detach()
    if weight.dim() == 2:
        return weight
    images = nn.functional.conv2d(eye(shape), weight, padding=layer.reach)
    return images.reshape(prod(shape), -1).T


def factors_of(layer, shape):
    """The layer's factors, one for each row of `matrix_of`."""
    return layer.factors().detach().expand(layer.weight.shape[0], *shape[1:]).flatten()
