"""The √ρ-Lipschitz residual layers, each on its own: never steeper than promised, and what is proved of them."""

from copy import deepcopy
from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rho import (
    ACTIVATIONS,
    RESCALINGS,
    both_kinds,
    every_rescaling,
    factors_of,
    matrix_of,
    randomise,
    settle,
    single,
)
from torch import nn

from helpers import examples, jacobian, jacobian_at, randn
from lipcert.layers import RhoLipschitzConv2d, RhoLipschitzLinear, proof


@st.composite
def layers(draw):
    """A layer with drawn sizes, weights and options, and the shape of its inputs."""
    channels, hidden = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    options = {
        "activation": ACTIVATIONS[draw(st.sampled_from(sorted(ACTIVATIONS)))](),
        "rescaling": draw(st.sampled_from(RESCALINGS)),
        "rho": draw(st.floats(0.1, 5.0)),
        "learn_rho": draw(st.booleans()),
        "bias": draw(st.booleans()),
    }
    if draw(st.booleans()):
        shape = (channels, draw(st.integers(1, 5)), draw(st.integers(1, 5)))
        layer = RhoLipschitzConv2d(
            channels, hidden, draw(st.sampled_from([1, 3, 5])), **options
        )
    else:
        shape = (channels,)
        layer = RhoLipschitzLinear(channels, hidden, **options)
    randomise(
        layer, draw(st.integers(0, 999)), draw(st.sampled_from([1e-3, 0.3, 1.0, 30.0]))
    )
    if draw(st.booleans()):
        with torch.no_grad():
            layer.weight[0] = 0
        settle(layer)
    return layer, shape


def promised(layer):
    return float(layer.lipschitz().detach()) * (1 + 1e-9)


def steepest(layer, shape, steps=40):
    """The largest slope found: of the Jacobian at random points, and of secants, improved by gradient ascent."""
    points = [
        scale * randn(*shape, seed=seed) for seed, scale in enumerate([1e-2, 1.0, 10.0])
    ]
    largest = max(
        float(torch.linalg.matrix_norm(jacobian_at(layer, x), 2)) for x in points
    )
    pair = torch.cat(
        [randn(20, *shape, seed=8), randn(20, *shape, seed=9)]
    ).requires_grad_()
    optimizer = torch.optim.Adam([pair], lr=0.1)
    for _ in range(steps):
        a, b = pair[:20], pair[20:]
        slope = (layer(a) - layer(b)).flatten(1).norm(dim=1) / (a - b).flatten(1).norm(
            dim=1
        )
        largest = max(largest, float(slope.detach().max()))
        (gradient,) = torch.autograd.grad(-slope.sum(), pair)
        pair.grad = gradient
        optimizer.step()
    return largest


@examples(2)
@given(layers())
def test_no_slope_exceeds_root_rho(drawn):
    layer, shape = drawn
    assert steepest(layer, shape) <= promised(layer)
    assert promised(layer) <= layer.certified_lipschitz() * (1 + 1e-9)


@examples(4)
@given(layers())
def test_the_inequality_of_the_proposition_holds_for_the_dense_matrix(drawn):
    layer, shape = drawn
    total, rho = layer.alpha + layer.beta, float(layer.lipschitz().detach()) ** 2
    diagonal = factors_of(layer, shape) * sqrt(rho) / total  # T
    assert (diagonal > 0).all()
    assert torch.isfinite(diagonal).all()
    scaled = diagonal.sqrt()[:, None] * matrix_of(layer, shape)
    kappa = float(torch.linalg.matrix_norm(scaled, 2)) ** 2 * total**2 / (2 * rho)
    assert kappa <= 1
    assert layer.certified_lipschitz() == pytest.approx(sqrt(rho), rel=1e-12)


@every_rescaling
def test_the_inequality_is_not_wasteful(rescaling):
    """Orthogonal weights reach the constant: with all slopes at β the layer is a reflection."""
    layer = RhoLipschitzLinear(6, 6, rescaling=rescaling, rho=2.0).double().eval()
    with torch.no_grad():
        nn.init.orthogonal_(layer.weight)
        layer.bias.fill_(100.0)
    singular = torch.linalg.svdvals(jacobian(layer, (6,)))
    torch.testing.assert_close(
        singular, torch.full_like(singular, sqrt(2.0)), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize(("kind", "rescaling"), [("dense", "aol"), ("conv", "sn")])
def test_zero_weights_give_the_scaled_identity_and_finite_gradients(kind, rescaling):
    layer, shape = single(kind, rescaling=rescaling)
    nn.init.zeros_(layer.weight)
    layer.eval()
    x = torch.rand(2, *shape)
    y = layer(x)
    assert torch.equal(y, x)
    y.square().sum().backward()
    assert all(
        torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None
    )


@every_rescaling
@both_kinds
def test_the_factors_in_float32_are_one_rounding_from_those_in_float64(kind, rescaling):
    options = {"rescaling": rescaling, "rho": 1.7, "learn_rho": True}
    layer = (
        RhoLipschitzLinear(7, 9, **options)
        if kind == "dense"
        else RhoLipschitzConv2d(3, 5, 3, **options)
    )
    with torch.no_grad():
        layer.weight.normal_()
    exact = deepcopy(layer).double()
    for value, reference in [
        (layer.factors(), exact.factors()),
        (layer.lipschitz(), exact.lipschitz()),
    ]:
        assert value.dtype == torch.float32
        assert (
            (value.double() - reference).abs() <= reference * 2.0**-24 * (1 + 1e-6)
        ).all()


@every_rescaling
@both_kinds
def test_gradients_of_the_layer_are_those_of_finite_differences(kind, rescaling):
    layer, shape = single(kind, nn.Tanh(), rescaling=rescaling, rho=1.4, learn_rho=True)
    randomise(layer, scale=0.6)
    x = randn(2, *shape)
    parameters = {
        k: p
        for k, p in layer.named_parameters()
        if not (rescaling == "sn" and kind == "conv" and p.dim())
    }

    def value(*tensors):
        return torch.func.functional_call(
            layer, dict(zip(parameters, tensors, strict=True)), (x,)
        )

    inputs = tuple(p.detach().clone().requires_grad_() for p in parameters.values())
    assert torch.autograd.gradcheck(value, inputs)


def test_a_power_iteration_that_lags_behind_costs_what_it_must():
    torch.manual_seed(1)
    layer = randomise(RhoLipschitzConv2d(2, 3, 3, rescaling="sn", rho=1.5))
    with torch.no_grad():
        layer.weight.copy_(
            randn(*layer.weight.shape, seed=77)
        )  # the vector is that of other weights
        layer.bias.fill_(100.0)  # all slopes 1, the worst case
    constant = layer.certified_lipschitz()
    slope = float(torch.linalg.matrix_norm(jacobian(layer, (2, 12, 12)), 2))
    assert slope > promised(layer)
    assert slope <= constant <= 1.1 * slope
    layer.iterate(300)
    assert layer.certified_lipschitz() == pytest.approx(sqrt(1.5), rel=1e-6)
    assert steepest(layer, (2, 5, 5)) <= promised(layer)


def test_the_power_iteration_follows_training():
    layer = RhoLipschitzConv2d(2, 3, 3, rescaling="sn")
    before = layer.vector.clone()
    layer.eval()(torch.rand(1, 2, 4, 4))
    assert torch.equal(layer.vector, before)
    with torch.no_grad():
        layer.weight.normal_()
    layer.train()
    for _ in range(300):
        layer(torch.rand(1, 2, 4, 4))
    assert layer.certified_lipschitz() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("alpha", "kappa"),
    [(0.0, 1.0), (0.0, 1.3), (0.0, 3.0), (0.2, 1.1), (0.2, 2.0), (1.0, 5.0)],
)
def test_the_constant_for_a_failed_inequality_is_attained_by_a_scalar_layer(
    alpha, kappa
):
    """w = 1, T = κ·2ρ/(α+β)²: the slope is √ρ(1 − 2κd/(α+β)), d ∈ {α, β}, and √ρ where the row is zero."""
    expected = sqrt(2.0) * max(
        1.0, *(abs(1 - 2 * kappa * d / (alpha + 1)) for d in (alpha, 1.0))
    )
    constant = proof.lipschitz_constant(
        torch.tensor(2.0, dtype=torch.float64).log().item(), alpha, 1.0, kappa
    )
    assert constant >= expected * (1 - 1e-15)
    assert constant == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_proofs_bound_the_norm_of_a_convolution_of_any_size_closely(size):
    weight, factors = randn(3, 2, size, size), randn(3, seed=1).abs() + 0.1
    layer = RhoLipschitzConv2d(2, 3, size).double()
    with torch.no_grad():
        layer.weight.copy_(weight * factors.sqrt().reshape(-1, 1, 1, 1))
    dense = float(torch.linalg.matrix_norm(matrix_of(layer, (2, 16, 16)), 2)) ** 2
    symbols = torch.fft.fft2(layer.weight.detach(), (128, 128)).permute(2, 3, 0, 1)
    largest = float(torch.linalg.matrix_norm(symbols, 2).max()) ** 2
    assert max(dense, largest) <= proof.kernel_norm(weight, factors) <= 1.006 * largest
    assert dense <= proof.gershgorin(weight, randn(3, seed=2), factors)
    matrix = randn(5, 4)
    exact = (
        float(
            torch.linalg.matrix_norm(matrix * factors[[0, 1, 2, 0, 1], None].sqrt(), 2)
        )
        ** 2
    )
    assert (
        exact
        <= proof.dense_norm(matrix, factors[[0, 1, 2, 0, 1]])
        <= exact * (1 + 1e-6)
    )
    assert exact <= proof.gershgorin(matrix, None, factors[[0, 1, 2, 0, 1]])
