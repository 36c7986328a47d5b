"""l1 and l∞ norms from dense matrices."""

from math import inf

import pytest
import torch
from torch import nn

import lipcert
from helpers import dense_maps, reference
from lipcert.errors import TooLargeError
from lipcert.network.sweep import Sweep
from lipcert.norms import dense
from models import dense_chain, named_models

MODELS = named_models()
NORMS = [1.0, inf]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["chain", "paper residual", "densely connected", "relu then max-pool"])
def test_norms_of_all_pairs(name, norm):
    model, shape = MODELS[name]
    network = lipcert.trace(model, shape)
    centres = [c for c, _ in network.sectors(norm)]
    passing = [not (isinstance(c, float) and c == 0) for c in centres]
    pairs = Sweep(network, passing, network.depth + 1).pairs
    matrices = dense_maps(model, shape).maps
    expected = torch.stack([torch.linalg.matrix_norm(matrices[pair], ord=norm) for pair in pairs])
    torch.testing.assert_close(dense.dense_norms(network, pairs, centres, norm), expected)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("target", ["network", "per-class", "last-layer", "pairwise"])
@pytest.mark.parametrize("method", ["naive", "liplt"])
def test_estimator_in_other_norms(method, target, norm):
    for name in ("chain", "gelu chain", "paper residual", "densely connected", "purely linear"):
        model, shape = MODELS[name]
        value = lipcert.Estimator(model, shape, method, target, norm=norm)()
        torch.testing.assert_close(value, reference(model, shape, method, target, norm), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_at_equal_rows_are_finite(norm):
    model = dense_chain(3, 4, 3)
    model[2].weight.data[1] = model[2].weight.data[0]
    value = lipcert.Estimator(model, (3,), norm=norm)()
    assert value[0, 1] == 0
    value.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in (model[0].weight, model[2].weight))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "activation", [nn.Softmax(1), nn.Sequential(nn.Unflatten(1, (2, 2)), nn.MaxPool1d(2))], ids=str
)
def test_maps_that_are_not_elementwise_have_no_centre_in_these_norms(activation, norm):
    model = nn.Sequential(nn.Linear(3, 4), activation, nn.Flatten(), nn.LazyLinear(2)).double()
    model(torch.zeros(1, 3, dtype=torch.float64))
    liplt = lipcert.Estimator(model, (3,), "liplt", "network", norm=norm)()
    naive = lipcert.Estimator(model, (3,), "naive", "network", norm=norm)()
    constant = 0.5 if isinstance(activation, nn.Softmax) else 1.0
    norms = [torch.linalg.matrix_norm(layer.weight, ord=norm).item() for layer in (model[0], model[-1])]
    assert liplt.item() == pytest.approx(constant * norms[0] * norms[1])
    assert naive.item() == pytest.approx(liplt.item())


def test_too_large_networks_are_refused(monkeypatch):
    model = dense_chain(30, 40, 5)
    monkeypatch.setattr(dense, "DENSE_LIMIT", 1 << 13)
    with pytest.raises(TooLargeError, match=r"dense matrices of 0\.0 GiB.*use norm=2"):
        lipcert.Estimator(model, (30,), norm=inf)()
    assert lipcert.Estimator(model, (30,))().shape == (5, 5)


def test_a_convolutional_network_of_ordinary_size_is_too_large():
    from lipcert import zoo

    estimator = lipcert.Estimator(zoo.build("6C2F", seed=0), (3, 32, 32), norm=1)
    with pytest.raises(TooLargeError, match="use norm=2"):
        estimator()
