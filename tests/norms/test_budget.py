"""Where precision is spent: weights of norms in the constants, products in place of norms, and what steps cost."""

from math import inf

import pytest
import torch
from hypothesis import given
from torch import nn

import lipcert
from drawn import networks
from helpers import dense_maps, examples, randn, transformed
from lipcert.bounds.forms import make_form
from lipcert.bounds.recursion import bound_prefix, norm_matrix
from lipcert.network.build import normal_form
from lipcert.norms.budget import inflations, passed_sites, shares, with_products
from lipcert.norms.certified import bound_norms
from lipcert.norms.norm_options import NormOptions
from lipcert.progress import no_progress
from models import dense_chain


def value(norms: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    constants = [norms.new_ones(())]
    for j in range(1, len(norms)):
        constants.append(norms[j, :j] @ torch.stack(constants))
    return output @ torch.stack(constants)


def test_shares_are_the_logarithmic_derivatives_of_the_constants():
    norms = randn(5, 5).abs().tril(-1).requires_grad_()
    output = randn(5, seed=1).abs()
    total = value(norms, output)
    (gradient,) = torch.autograd.grad(total, norms)
    torch.testing.assert_close(
        shares(norms.detach(), output), (gradient * norms / total).detach()
    )


class Skips(nn.Module):
    """Three blocks of two nonlinearities; the second block has a connection around its first nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.layers[0](x))
        x = torch.relu(self.layers[1](x))
        inner = torch.relu(self.layers[2](x))
        x = torch.relu(self.layers[3](inner) + x)
        return self.layers[5](torch.relu(self.layers[4](x)))


def test_sites_that_all_paths_lead_through():
    assert passed_sites(lipcert.trace(dense_chain(3, 4, 4, 2), (3,))) == [1, 2]
    assert passed_sites(lipcert.trace(Skips().eval(), (4,))) == [1, 2, 4, 5]


@examples(0.3)
@given(drawn=networks)
def test_products_bound_the_norms_that_they_replace(drawn):
    model, shape = drawn
    dense = dense_maps(model, shape).transformed
    base = lipcert.trace(model, shape)
    network = transformed(model, shape)
    count = network.depth + 2
    norms = torch.zeros(count, count, dtype=torch.float64)
    for pair, matrix in dense.items():
        norms[pair] = torch.linalg.matrix_norm(matrix, 2)
    passing = {}
    for k in passed_sites(base):
        centre, radius = (
            float(torch.as_tensor(number)) for number in base.sites[k].slope.sector()
        )
        if radius > 0:
            passing[k] = abs(centre) / radius
    far = [pair for pair in dense if any(pair[1] < k < pair[0] for k in passing)]
    unknown = norms.clone()
    for pair in far:
        unknown[pair] = inf
    closed = with_products(unknown, passing)
    for pair in far:
        assert norms[pair] * (1 - 1e-12) <= closed[pair]
    assert (closed <= unknown).all()


def test_what_is_spent_is_the_budget_and_heavy_norms_get_the_least():
    weights = {(1, 0): 1.0, (2, 1): 1.0, (2, 0): 0.01, (3, 0): 1e-9}
    costs = {(1, 0): 1.0, (2, 1): 8.0, (2, 0): 2.0, (3, 0): 3.0}
    spent = inflations(weights, costs, 0.01)
    assert sum(weights[pair] * spent[pair] for pair in weights) == pytest.approx(
        0.01, rel=1e-3
    )
    assert spent[1, 0] < spent[2, 1] < spent[2, 0] < spent[3, 0] <= 1.0


def test_a_long_chain_leaves_far_norms_to_products_at_no_cost():
    network = normal_form(
        lipcert.trace(dense_chain(*(4 for _ in range(61))), (4,)).program.frozen(),
        exact=True,
    )
    form = make_form("liplt", network, network.depth, NormOptions(), no_progress)
    assert len(form.norms.lower) < 0.9 * len(form.norms.bounds)
    every = bound_norms(form.network, network.depth)
    assert every.bounds.keys() == form.norms.bounds.keys()
    pairs, count = list(every.bounds), network.depth + 1
    exact = bound_prefix(
        norm_matrix(
            pairs, torch.tensor(list(every.bounds.values()), dtype=torch.float64), count
        )
    )
    torch.testing.assert_close(form.prefix({}), exact, rtol=1e-8, atol=0)


@pytest.mark.parametrize("target", ["network", "pairwise"])
def test_the_stated_inflation_covers_the_difference_to_exact_norms(target):
    model = dense_chain(40, 50, 45, 50, 6)
    exact = lipcert.bound(model, (40,), target=target).value
    bound = lipcert.bound(
        model,
        (40,),
        target=target,
        options=NormOptions(dense_limit=5, seed=1, inflation=0.05),
    )
    assert (exact <= bound.value * (1 + 1e-12)).all()
    assert (bound.value <= exact * (1 + bound.inflation) * (1 + 1e-9)).all()
    assert 0 < bound.inflation < 0.06
