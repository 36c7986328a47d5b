"""Bounds on rounding errors: compared with exact rational arithmetic."""

from fractions import Fraction
from math import inf, isqrt, prod, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from helpers import examples, operations, randn
from lipcert.norms.certified import bound_norms
from lipcert.norms.rounding import ProductErrors, gamma, magnitude_norm, round_up
from models import Op, PaperResidual, dense_chain, gaussian, named_models


def rational(vector):
    return [Fraction(value) for value in vector.flatten().tolist()]


def multiply(matrix, vector):
    """A product without rounding."""
    return [sum((Fraction(a) * b for a, b in zip(row, vector, strict=True)), Fraction(0)) for row in matrix.tolist()]


def norm_above(vector):
    """The l2 norm of rational numbers, from above, to 60 bits of its largest entry."""
    largest = max((abs(v) for v in vector), default=Fraction(0))
    if largest == 0:
        return 0.0
    scale = 2**60 / largest
    return float((isqrt(sum(int(abs(v) * scale) ** 2 for v in vector)) + len(vector) + 1) / scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gamma_bounds_the_error_of_repeated_roundings(dtype):
    unit = torch.finfo(dtype).eps / 2
    assert Fraction(gamma(100, dtype)) >= Fraction(100 * unit) / (1 - Fraction(100 * unit))
    assert gamma(100, dtype) <= 101 * unit
    assert gamma(2 / unit, dtype) == inf


def test_other_types_are_refused():
    with pytest.raises(lipcert.errors.OptionError, match=r"float32 and float64, not for torch\.bfloat16; convert"):
        gamma(1, torch.bfloat16)


def test_round_up_covers_as_many_roundings_as_stated():
    total, exact = 0.0, Fraction(0)
    for k in range(1, 1000):
        total += 1 / k
        exact += Fraction(1 / k)
    assert Fraction(round_up(total, 1000)) >= exact
    assert round_up(inf) == inf


@pytest.mark.parametrize("name", named_models())
def test_magnitude_norm_is_above_the_norm_of_absolute_values(name):
    for op in operations(lipcert.trace(*named_models()[name])):
        matrix = op.as_matrix(like=randn(1)).detach().abs()
        largest = torch.linalg.matrix_norm(matrix, 2).item()
        assert largest * (1 - 1e-12) <= magnitude_norm(op, randn(1))
        assert magnitude_norm(op, randn(1)) <= sqrt(max(matrix.shape)) * largest * (1 + 1e-9)


def test_magnitude_norm_of_a_registered_function_with_signs(monkeypatch):
    shape = (4,)
    signed = lipcert.network.linear.Function(
        lambda t: torch.stack([t[:, 0] - t[:, 1], t[:, 2] - t[:, 3]], 1), shape, (2,)
    )
    assert magnitude_norm(signed, randn(1)) == pytest.approx(sqrt(2), rel=1e-9)
    monkeypatch.setattr("lipcert.norms.rounding._DENSE_ENTRIES", 7)
    with pytest.raises(lipcert.UnsupportedError, match=r"state terms= and nonnegative=True in its rule"):
        magnitude_norm(signed, randn(1))


def cancelling(seed):
    """The second layer takes differences of what the first has made nearly equal: all digits are lost."""
    model = dense_chain(6, 4, 4, 3, seed=seed)
    model[0].weight.data[1:] = model[0].weight.data[0] * (1 + 1e-14 * randn(3, 1, seed=seed))
    model[2].weight.data = model[2].weight.data - model[2].weight.data.mean(1, keepdim=True)
    return model


@examples(2)
@given(seed=st.integers(0, 9999), cancels=st.booleans(), naive=st.booleans())
def test_product_errors_cover_the_difference_from_exact_arithmetic(seed, cancels, naive):
    model = cancelling(seed) if cancels else dense_chain(6, 4, 4, 3, seed=seed)
    network = lipcert.trace(model.requires_grad_(False), (6,))
    centres = [0.0, 0.0, 0.0] if naive else [0.0, 0.5, 0.5]
    errors = bound_norms(network, centres, 3).errors
    x = randn(1, 6, seed=seed)
    pushed = network.push(0, x, centres)
    exact = rational(x)
    for j, layer in enumerate((model[0], model[2], model[4]), start=1):
        exact = multiply(layer.weight, exact)
        if pushed[j - 1] is None:
            continue
        off = norm_above([a - b for a, b in zip(rational(pushed[j - 1]), exact, strict=True)])
        assert off <= errors.error((j, 0)) * norm_above(rational(x))
        exact = [value / 2 for value in exact]


def test_product_errors_are_not_absurdly_large():
    """A cancelling network has errors that are visible beside its results, and the bound stays within a factor."""
    network = lipcert.trace(cancelling(0).requires_grad_(False), (6,))
    error = bound_norms(network, [0.0, 0.5, 0.5], 3).errors.error((3, 0))
    columns = network.push(0, torch.eye(6, dtype=torch.float64), [0.0, 0.5, 0.5])[2]
    assert columns.norm() < 1e-10
    assert 1e-18 < error < 1e-13


@examples(1)
@given(seed=st.integers(0, 9999))
def test_adjoint_products_have_the_same_bound(seed):
    """A node that many others read sums many terms in the adjoint pass."""

    def forward(m, x):
        h = m.first(x)
        return m.last(torch.cat([k * h for k in range(1, 9)], 1))

    model = gaussian(Op(forward, first=nn.Linear(3, 2), last=nn.Linear(16, 2)), seed).requires_grad_(False)
    network = lipcert.trace(model, (3,))
    error = ProductErrors(network, [0.0]).error((1, 0))
    y = randn(1, 2, seed=seed)
    (pulled,) = network.pullback(y, [0.0])
    back = multiply(model.last.weight.T, rational(y))
    hidden = [sum((k + 1) * back[2 * k + c] for k in range(8)) for c in range(2)]
    exact = multiply(model.first.weight.T, hidden)
    off = norm_above([a - b for a, b in zip(rational(pulled), exact, strict=True)])
    assert off <= error * norm_above(rational(y))


def test_known_norms_of_short_pairs_sharpen_the_errors_of_long_ones():
    """Products of |A| grow like √width per layer, exact norms do not."""
    model = gaussian(PaperResidual([30, 30, 30, 30], 30, 3, nn.ReLU), 1)
    network = lipcert.trace(model.requires_grad_(False), (30,))
    centres = [0.0, *[0.5] * network.depth]
    known = bound_norms(network, centres, network.depth + 1).errors
    last = (network.depth + 1, 0)
    known.known.pop(last)
    assert known.error(last) < 0.3 * ProductErrors(network, centres).error(last)
    assert prod(network.input_shape) == 30
