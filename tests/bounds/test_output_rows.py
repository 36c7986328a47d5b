"""More logits than neurons before them: the rows of the neurons travel, and no constant is below that of the logits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from helpers import randn, reference, transformed
from lipcert.bounds.compute import bound_targets
from lipcert.bounds.output_rows import bound_rows, majorant, narrow_head, output_rows
from lipcert.bounds.targets import TARGETS, find_target
from lipcert.norms.product_errors import ProductErrors
from models import dense_chain

PRECISION = 1e-9


@given(
    seed=st.integers(0, 999), rank=st.integers(1, 9), exponent=st.integers(-140, 140)
)
def test_a_majorant_shortens_no_combination_of_rows(seed, rank, exponent):
    """Also of rows that depend on each other, and of very large and very small ones."""
    rows = randn(6, rank, seed=seed) @ randn(rank, 30, seed=seed + 1) * 10.0**exponent
    weights = randn(200, 6, seed=seed + 2)
    exact, upper = (weights @ rows).norm(dim=1), (weights @ majorant(rows)).norm(dim=1)
    size = weights.norm(dim=1) * rows.norm()
    assert (upper >= exact * (1 - 1e-15) - 1e-15 * size).all()
    assert (upper <= exact + 1e-5 * size).all()
    if rank > 6:
        assert (upper <= exact * (1 + 1e-6)).all()


def test_what_cannot_be_factored_stays_as_it_is():
    wide, narrow = randn(3, 5) * 1e200, randn(5, 3)
    assert majorant(wide) is wide
    assert majorant(narrow) is narrow


@pytest.mark.parametrize("method", ["naive", "liplt"])
def test_constants_of_many_classes_are_those_of_the_dense_maps(method):
    model = dense_chain(12, 9, 5, 30).double()
    assert narrow_head(transformed(model, (12,))) is not None
    for target, bound in bound_targets(model, (12,), method, list(TARGETS)).items():
        exact = reference(model, (12,), method, target).detach()
        assert (bound.value >= exact * (1 - 1e-13)).all()
        assert (bound.value <= exact * (1 + 1e-7)).all()


@torch.no_grad()
@pytest.mark.parametrize("target", ["per-class", "pairwise"])
def test_convolutions_before_a_narrow_layer(target):
    """Against the rows of all logits."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 6),
        nn.ReLU(),
        nn.Linear(6, 20),
    ]
    network = transformed(
        nn.Sequential(*layers, nn.Flatten()).double().eval(), (2, 4, 4)
    )
    errors, wanted = ProductErrors(network), find_target(target)
    norms = bound_rows(network, wanted, errors)
    for i, rows, error in output_rows(network, errors):
        assert error < 1e-12
        exact = wanted.row_norms(rows.flatten(1))
        assert (norms[i] >= exact * (1 - 1e-14)).all()
        assert (norms[i] <= exact * (1 + PRECISION)).all()


def test_nearly_equal_classes_are_near():
    """Distances come from differences of the last layer's rows, not from large numbers that cancel."""
    model = dense_chain(12, 9, 5, 30).double()
    with torch.no_grad():
        model[-1].weight[7] = model[-1].weight[3] + 1e-7 * randn(5, seed=4)
    exact = reference(model, (12,), "liplt", "pairwise").detach()[3, 7]
    value = lipcert.bound(model, (12,)).value[3, 7]
    assert exact * (1 - 1e-9) <= value <= exact * 1.001


class Sum(nn.Module):
    """Logits that two branches give."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 9), nn.Linear(4, 9)

    def forward(self, x):
        return self.first(x.relu()) + self.second(x)


WIDE = {
    "square": dense_chain(4, 9, 9),
    "nonlinear end": nn.Sequential(nn.Linear(4, 9), nn.ReLU()),
    "branches": Sum(),
    "softmax": nn.Sequential(nn.Linear(4, 9), nn.Softmax(1)),
}


@pytest.mark.parametrize("model", WIDE.values(), ids=WIDE)
def test_networks_without_a_narrow_last_layer(model):
    assert narrow_head(transformed(model.double().eval(), (4,))) is None
