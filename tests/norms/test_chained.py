"""Norms of chains as products of the norms of their operations."""

import pytest
import torch
from torch import nn

import lipcert
from helpers import jacobian, transformed
from lipcert.layers import Abs, Shift
from lipcert.norms.budget import Guide
from lipcert.norms.certified import bound_norms
from lipcert.norms.chained import chained_norms
from lipcert.norms.norm_options import NormOptions
from models import gaussian


def shifted(seed=0):
    """Patches and 1×1 convolutions of shifted channels, all of them orthogonal."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 2, 2), Abs(), Shift(16), nn.Conv2d(16, 16, 1), Abs(),
        nn.Conv2d(16, 24, 2, 2), Abs(), nn.Flatten(), nn.Linear(96, 3),
    )  # fmt: skip
    for name, weight in model.named_parameters():
        if name.endswith("weight"):
            nn.init.orthogonal_(weight)
    return model.double().eval()


def spectral(layer, shape):
    """The norm of a linear layer, from its Jacobian."""
    return torch.linalg.matrix_norm(jacobian(layer, shape), 2).item()


def norms_of(model, shape, options):
    network = transformed(model, shape)
    guide = Guide(network, passing={})
    return bound_norms(network, network.depth + 1, options, guide=guide)


def test_orthogonal_networks_are_bounded_tightly_and_without_chance():
    model, shape = shifted(), (3, 8, 8)
    norms = norms_of(model, shape, NormOptions(dense_limit=40, seed=0))
    assert norms.failure_probability == 0.0
    inputs = [(3, 8, 8), (16, 4, 4), (16, 4, 4), (24, 2, 2)]
    between = [model[:1], model[2:4], model[5:6], model[7:]]
    for site, layers in enumerate(between):
        exact = spectral(layers, inputs[site])
        bound = norms.bounds[site + 1, site]
        assert exact * (1 - 1e-13) <= bound <= exact * (1 + 1e-6)
        assert norms.lower[site + 1, site] <= bound


def test_a_product_that_is_not_tight_is_left_to_others():
    # Norms of 2 and 1 in different coordinates: the product is 2, the map has 1.
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), Abs(), nn.Flatten())
    model = model.double().eval()
    with torch.no_grad():
        for layer, diagonal in zip(model[:2], ([2.0, 0.5], [0.5, 1.0]), strict=True):
            layer.weight[:, :, 0, 0] = torch.diag(torch.tensor(diagonal))
    shape = (2, 6, 6)
    network = transformed(model, shape)
    assert chained_norms(network, [(1, 0)], 40)[1, 0] == pytest.approx(2.0)
    norms = norms_of(model, shape, NormOptions(dense_limit=40, seed=0))
    assert norms.failure_probability > 0
    assert 1 <= norms.bounds[1, 0] <= 1.01


CHAINS = {
    "dense": (nn.Linear(8, 5), (8,)),
    "1×1": (nn.Conv2d(4, 3, 1, bias=False), (4, 5, 5)),
    "patches": (nn.Conv2d(3, 4, 2, 2), (3, 6, 6)),
    "patches with a remainder": (nn.Conv2d(3, 4, 2, 3), (3, 7, 8)),
    "groups": (nn.Conv2d(4, 6, 2, 2, groups=2), (4, 6, 6)),
    "pooled": (nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(3, 4, 1)), (3, 6, 6)),
    "overlapping": (nn.Conv2d(2, 3, 3, padding=1), (2, 5, 5)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_products_are_bounds_and_norms_of_single_operations_where_these_are_exact(name):
    layer, shape = CHAINS[name]
    model = gaussian(nn.Sequential(layer, Abs(), nn.Flatten())).double().eval()
    network = transformed(model, shape)
    exact = spectral(model[0], shape)
    product = chained_norms(network, [(1, 0)], 40)[1, 0]
    assert product >= exact * (1 - 1e-13)
    if name != "overlapping":
        assert product <= exact * (1 + 1e-6)


def test_sums_are_no_chains():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv2d(2, 2, 1)

        def forward(self, x):
            return (x + self.inner(x)).abs().flatten(1)

    network = transformed(Skip().double().eval(), (2, 4, 4))
    assert chained_norms(network, [(1, 0)], 40) == {}


def test_the_network_of_shifts_is_certified_as_if_its_norms_were_known():
    model = lipcert.zoo.build("shifts-512-deep", (3, 16, 16), 4, seed=0).double().eval()
    for name, weight in model.named_parameters():
        if name.endswith("weight"):
            nn.init.orthogonal_(weight)
    bound = lipcert.bound(model, (3, 16, 16), options=NormOptions(dense_limit=512))
    others = ~torch.eye(4, dtype=torch.bool)
    assert bound.guarantee == "deterministic"
    assert bound.value[others].max() <= 2**0.5 * (1 + 1e-4)
    assert bound.value[others].min() >= 2**0.5 * (1 - 1e-6)
