"""Bounds on the rounding errors of products: compared with exact rational arithmetic."""

from fractions import Fraction
from functools import cache, partial
from math import isqrt, prod, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from helpers import examples, operations, randn, transformed
from lipcert.network.rewrites import rescale
from lipcert.norms.certified import bound_norms
from lipcert.norms.product_errors import ProductErrors, magnitude_norm
from models import Op, PaperResidual, dense_chain, gaussian, named_models


def rational(vector):
    return [Fraction(value) for value in vector.flatten().tolist()]


def multiply(matrix, vector):
    """A product without rounding."""
    return [
        sum((Fraction(a) * b for a, b in zip(row, vector, strict=True)), Fraction(0))
        for row in matrix.tolist()
    ]


def norm_above(vector):
    """The l2 norm of rational numbers, from above, to 60 bits of its largest entry."""
    largest = max((abs(v) for v in vector), default=Fraction(0))
    if largest == 0:
        return 0.0
    scale = 2**60 / largest
    return float(
        (isqrt(sum(int(abs(v) * scale) ** 2 for v in vector)) + len(vector) + 1) / scale
    )


@pytest.mark.parametrize("name", named_models())
def test_magnitude_norm_is_above_the_norm_of_absolute_values(name):
    for op in operations(lipcert.trace(*named_models()[name])):
        matrix = op.as_matrix(like=randn(1)).detach().abs()
        largest = torch.linalg.matrix_norm(matrix, 2).item()
        assert largest * (1 - 1e-12) <= magnitude_norm(op, randn(1))
        assert magnitude_norm(op, randn(1)) <= sqrt(max(matrix.shape)) * largest * (
            1 + 1e-9
        )


def test_magnitude_norm_of_a_registered_function_with_signs(monkeypatch):
    shape = (4,)
    signed = lipcert.network.linear.Function(
        lambda t: torch.stack([t[:, 0] - t[:, 1], t[:, 2] - t[:, 3]], 1), shape, (2,)
    )
    assert magnitude_norm(signed, randn(1)) == pytest.approx(sqrt(2), rel=1e-9)
    monkeypatch.setattr("lipcert.norms.product_errors._DENSE_ENTRIES", 7)
    with pytest.raises(
        lipcert.UnsupportedError, match=r"state terms= and nonnegative=True in its rule"
    ):
        magnitude_norm(signed, randn(1))


def cancelling(seed):
    """The second layer takes differences of what the first has made nearly equal: all digits are lost."""
    model = dense_chain(6, 4, 4, 3, seed=seed)
    model[0].weight.data[1:] = model[0].weight.data[0] * (
        1 + 1e-14 * randn(3, 1, seed=seed)
    )
    model[2].weight.data = model[2].weight.data - model[2].weight.data.mean(
        1, keepdim=True
    )
    return model


@cache
def traced_chain(naive):
    """A chain and its transformed network, which reads the weights whenever it is used."""
    model = dense_chain(6, 4, 4, 3).requires_grad_(False)
    return model, transformed(model, (6,), naive)


@examples(2)
@given(seed=st.integers(0, 9999), cancels=st.booleans(), naive=st.booleans())
def test_product_errors_cover_the_difference_from_exact_arithmetic(
    seed, cancels, naive
):
    model, network = traced_chain(naive)
    model.load_state_dict(
        (
            cancelling(seed) if cancels else dense_chain(6, 4, 4, 3, seed=seed)
        ).state_dict()
    )
    errors = bound_norms(network, 3).errors
    x = randn(1, 6, seed=seed)
    pushed = network.push(0, x)
    exact = rational(x)
    for j, layer in enumerate((model[0], model[2], model[4]), start=1):
        exact = multiply(layer.weight, exact)
        if pushed[j - 1] is None:
            continue
        off = norm_above(
            [a - b for a, b in zip(rational(pushed[j - 1]), exact, strict=True)]
        )
        assert off <= errors.error((j, 0)) * norm_above(rational(x))
        exact = [value / 2 for value in exact]


def test_product_errors_are_not_absurdly_large():
    """A cancelling network has errors that are visible beside its results, and the bound stays within a factor."""
    network = transformed(cancelling(0).requires_grad_(False), (6,))
    error = bound_norms(network, 3).errors.error((3, 0))
    columns = network.push(0, torch.eye(6, dtype=torch.float64))[2]
    assert columns.norm() < 1e-10
    assert 1e-18 < error < 1e-13


@examples(1)
@given(seed=st.integers(0, 9999))
def test_adjoint_products_have_the_same_bound(seed):
    """A node that many others read sums many terms in the adjoint pass."""

    def forward(m, x):
        h = m.first(x)
        return m.last(torch.cat([k * h for k in range(1, 9)], 1))

    model = gaussian(
        Op(forward, first=nn.Linear(3, 2), last=nn.Linear(16, 2)), seed
    ).requires_grad_(False)
    network = lipcert.trace(model, (3,))
    error = ProductErrors(network).error((1, 0))
    y = randn(1, 2, seed=seed)
    (pulled,) = network.pull(1, y)
    back = multiply(model.last.weight.T, rational(y))
    hidden = [sum((k + 1) * back[2 * k + c] for k in range(8)) for c in range(2)]
    exact = multiply(model.first.weight.T, hidden)
    off = norm_above([a - b for a, b in zip(rational(pulled), exact, strict=True)])
    assert off <= error * norm_above(rational(y))


def test_known_norms_of_short_pairs_sharpen_the_errors_of_long_ones():
    """Products of |A| grow like √width per layer, exact norms do not."""
    model = gaussian(PaperResidual([30, 30, 30, 30], 30, 3, nn.ReLU), 1)
    network = transformed(model.requires_grad_(False), (30,))
    known = bound_norms(network, network.depth + 1).errors
    last = (network.depth + 1, 0)
    known.known.pop(last)
    assert known.error(last) < 0.3 * ProductErrors(network).error(last)
    assert prod(network.input_shape) == 30


@pytest.mark.parametrize("rescaled", [False, True])
def test_errors_of_deep_networks_do_not_grow_like_products_of_absolute_values(rescaled):
    """Paths around nonlinearities lead through as many layers as those through them."""
    network = transformed(dense_chain(*[20] * 16, 3).requires_grad_(False), (20,))
    if rescaled:
        diagonals = {
            site: (0.3 * randn(20, seed=site)).exp()
            for site in range(1, network.depth + 1)
        }
        network = rescale(
            network, {site: partial(lambda d: d, d) for site, d in diagonals.items()}
        )
    norms, last = bound_norms(network, network.depth + 1), (network.depth + 1, 0)
    assert norms.errors.error(last) < 1e-10 * norms.bounds[last]
    assert norms.errors.error(last) < 1e-5 * ProductErrors(network).error(last)
