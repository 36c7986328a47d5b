"""LipLT against a plain dense implementation of the theorem, and against Combettes & Pesquet."""

from fractions import Fraction
from itertools import combinations, pairwise
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from helpers import converged, examples, jacobian, randn, reference
from lipcert.bounds.recursion import (
    bound_between,
    bound_prefix,
    norm_matrix,
    prefix_constants,
)
from lipcert.bounds.targets import find_target
from models import PaperResidual, RandomDag, dense_chain, gaussian, named_models

MODELS = named_models()
TARGETS = ["network", "per-class", "last-layer", "pairwise"]
ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky": lambda: nn.LeakyReLU(0.3),
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "prelu": nn.PReLU,
}
DRAWN = {"target": st.sampled_from(TARGETS), "seed": st.integers(0, 99)}
OPERATIONS = st.sampled_from(
    ["linear", "cat", "add", "relu", "relu", "gelu", "tanh", "leaky"]
)


def agree(model, shape, method, target):
    with torch.no_grad():
        value = converged(model, shape, method=method, target=target)()
    torch.testing.assert_close(
        value,
        reference(model, shape, method, target),
        rtol=1e-6,
        atol=1e-9,
        msg=lambda text: f"{method}, {target}: {text}",
    )
    return value


@pytest.mark.parametrize("name", MODELS)
def test_networks(name):
    """They agree with the references, so methods and targets have their order, and no sampled slope is above them."""
    model, shape = MODELS[name]
    values = {
        (method, target): agree(model, shape, method, target)
        for method in ("naive", "liplt")
        for target in TARGETS
    }
    for target in TARGETS:
        naive, liplt = values["naive", target], values["liplt", target]
        assert (liplt <= naive * (1 + 1e-9)).all(), target
    for target in ("per-class", "network"):
        implied = find_target(target).pairwise(values["liplt", target], 3)
        assert (values["liplt", "pairwise"] <= implied * (1 + 1e-9)).all(), target
    check_slopes(
        model, shape, values["liplt", "network"].item(), values["liplt", "pairwise"]
    )


def check_slopes(model, shape, network, pairwise):
    """Secants of many lengths, and the Jacobian at points where the network is differentiable."""
    with torch.no_grad():
        x = randn(600, *shape)
        lengths = torch.logspace(-3, 1, 600, dtype=torch.float64).reshape(
            -1, *[1] * len(shape)
        )
        y = x + lengths * randn(600, *shape, seed=1)
        change, distance = model(x) - model(y), (x - y).flatten(1).norm(dim=1)
    assert (change.norm(dim=1) / distance).max() <= network * (1 + 1e-9)
    slopes = (change[:, :, None] - change[:, None, :]).abs() / distance[:, None, None]
    assert (slopes.amax(0) <= pairwise * (1 + 1e-9)).all()
    local = jacobian(model, shape)
    assert torch.linalg.matrix_norm(local, 2) <= network * (1 + 1e-9)
    assert ((local[:, None] - local[None]).norm(dim=2) <= pairwise * (1 + 1e-9)).all()


@examples(0.5)
@given(
    widths=st.lists(st.integers(1, 5), min_size=2, max_size=5),
    activation=st.sampled_from([*ACTIVATIONS]),
    **DRAWN,
)
def test_random_chains(widths, activation, target, seed):
    model = dense_chain(*widths, activation=ACTIVATIONS[activation], seed=seed)
    agree(model, (widths[0],), "liplt", target)


@examples(0.5)
@given(
    widths=st.lists(st.integers(2, 4), min_size=2, max_size=4),
    activation=st.sampled_from([*ACTIVATIONS]),
    **DRAWN,
)
def test_random_residual_networks(widths, activation, target, seed):
    model = gaussian(PaperResidual(widths, 3, 3, ACTIVATIONS[activation]), seed)
    agree(model, (widths[0],), "liplt", target)


@examples(0.5)
@given(
    plan=st.lists(
        st.tuples(OPERATIONS, st.integers(0, 9), st.integers(0, 9)),
        min_size=2,
        max_size=8,
    ),
    **DRAWN,
)
def test_random_dags(plan, target, seed):
    agree(gaussian(RandomDag(3, 3, plan), seed), (3,), "liplt", target)


def test_residual_form_written_out():
    """thm:multiLayerLipschitz with its own symbols for L = 2, φ = ReLU and y_L = W_2 x_2."""
    model = gaussian(PaperResidual([3, 4, 3], 5, 2, nn.ReLU))
    (h0, h1), (w0, w1), (g0, g1) = (
        [layer.weight for layer in layers] for layers in (model.h, model.w, model.g)
    )
    w2 = model.out.weight
    hat0, hat1 = h0 + g0 @ w0 / 2, h1 + g1 @ w1 / 2

    def norm(matrix):
        return torch.linalg.matrix_norm(matrix, 2).item()

    m0 = norm(w0)
    m1 = norm(w1 @ hat0) + norm(w1 @ g0) * m0 / 2
    m2 = norm(w2 @ hat1 @ hat0) + (norm(w2 @ hat1 @ g0) * m0 + norm(w2 @ g1) * m1) / 2
    estimate = converged(model, (3,), target="network").estimate()
    assert estimate.prefix.tolist() == pytest.approx([m0, m1], rel=1e-6)
    assert estimate.value.item() == pytest.approx(m2, rel=1e-6)


def combettes_pesquet(weights):
    """θ_k: the mean over all ways to cut W_k⋯W_0 into consecutive products of the product of their norms."""
    k = len(weights) - 1
    total = 0.0
    for count in range(k + 1):
        for cuts in combinations(range(1, k + 1), count):
            ends = [0, *cuts, k + 1]
            product = 1.0
            for low, high in pairwise(ends):
                factor = weights[low]
                for weight in weights[low + 1 : high]:
                    factor = weight @ factor
                product *= torch.linalg.matrix_norm(factor, 2).item()
            total += product
    return total / 2**k


@examples(0.5)
@given(
    widths=st.lists(st.integers(1, 5), min_size=2, max_size=6), seed=st.integers(0, 99)
)
def test_relu_chains_give_the_constant_of_combettes_and_pesquet(widths, seed):
    model = dense_chain(*widths, seed=seed)
    weights = [layer.weight.detach() for layer in model if isinstance(layer, nn.Linear)]
    estimate = converged(model, (widths[0],), target="network").estimate()
    assert estimate.value.item() == pytest.approx(combettes_pesquet(weights), rel=1e-6)
    prefixes = [combettes_pesquet(weights[:k]) for k in range(1, len(weights))]
    assert estimate.prefix.tolist() == pytest.approx(prefixes, rel=1e-6)


def test_recursion_by_hand():
    pairs, norms = [(1, 0), (2, 0), (2, 1), (3, 2)], torch.tensor([2.0, 3.0, 5.0, 7.0])
    matrix = norm_matrix(pairs, norms, 4)
    assert matrix.tolist() == [[0, 0, 0, 0], [2, 0, 0, 0], [3, 5, 0, 0], [0, 0, 7, 0]]
    assert prefix_constants(matrix).tolist() == [1.0, 2.0, 3 + 5 * 2, 7 * 13]
    assert prefix_constants(norm_matrix([], norms[:0], 1)).tolist() == [1.0]


def test_recursion_is_differentiable():
    pairs = [(1, 0), (2, 0), (2, 1), (3, 1)]
    norms = randn(4).abs().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda n: prefix_constants(norm_matrix(pairs, n, 4)), norms
    )


def lower_triangle(count, seed, sparse):
    """N of a network with this many sites, with zeros where there is no path."""
    matrix = randn(count, count, seed=seed).abs() * 10.0 ** randn(
        count, count, seed=seed + 1
    )
    return (
        matrix * (randn(count, count, seed=seed + 2) > -0.5) if sparse else matrix
    ).tril(-1)


def rational_resolvent(norms):
    """(I − N)⁻¹ = I + N + N² + … by exact forward substitution, row by row."""
    n = [[Fraction(value) for value in row] for row in norms.tolist()]
    rows = []
    for j in range(len(n)):
        row = [
            sum((n[j][k] * rows[k][i] for k in range(j)), Fraction(0))
            for i in range(len(n))
        ]
        row[j] += 1
        rows.append(row)
    return rows


DRAWN_NORMS = {
    "count": st.integers(1, 8),
    "seed": st.integers(0, 9999),
    "sparse": st.booleans(),
}


@examples(2)
@given(**DRAWN_NORMS)
def test_constants_are_columns_of_the_inverse_and_bounds_are_never_below_it(
    count, seed, sparse
):
    norms = lower_triangle(count, seed, sparse)
    inverse, exact = (
        torch.linalg.inv(torch.eye(count, dtype=torch.float64) - norms),
        rational_resolvent(norms),
    )
    torch.testing.assert_close(
        prefix_constants(norms), inverse[:, 0], rtol=1e-9, atol=1e-12
    )
    prefix, between = bound_prefix(norms), bound_between(norms)
    torch.testing.assert_close(
        between, inverse, rtol=1e-9, atol=1e-9 * inverse.abs().max().item()
    )
    for j in range(count):
        assert (
            exact[j][0]
            <= Fraction(prefix[j].item())
            <= exact[j][0] * (1 + Fraction(1, 10**12))
        )
        for i in range(count):
            assert (
                exact[j][i]
                <= Fraction(between[j, i].item())
                <= exact[j][i] * (1 + Fraction(1, 10**12))
            )


@examples(2)
@given(share=st.floats(0.01, 2.0), site=st.integers(0, 9), **DRAWN_NORMS)
def test_what_is_known_already_enters_the_recursion(share, site, count, seed, sparse):
    """With exact rational numbers: m_j = min(known_j, Σ N_ji m_i)."""
    norms = lower_triangle(count, seed, sparse)
    plain = bound_prefix(norms)
    limits = [inf] * count
    limits[site % count] = share * plain[site % count].item()
    found = bound_prefix(norms, limits)
    exact = [Fraction(1)]
    for j in range(1, count):
        total = sum(
            (Fraction(norms[j, i].item()) * exact[i] for i in range(j)), Fraction(0)
        )
        exact.append(total if limits[j] == inf else min(total, Fraction(limits[j])))
    assert found[0] == 1.0
    assert (found <= plain).all()
    for value, limit, expected in zip(found.tolist(), limits, exact, strict=True):
        assert expected <= Fraction(value) <= expected * (1 + Fraction(1, 10**12))
        assert value <= limit or value == 1.0
    assert torch.equal(bound_prefix(norms, [inf] * count), plain)


@pytest.mark.parametrize("target", ["network", "per-class", "pairwise"])
def test_linear_models_are_estimated_exactly(target):
    model, shape = MODELS["purely linear"]
    value = converged(model, shape, target=target).estimate()
    assert value.prefix.numel() == 0
    weight = model[1].weight @ model[0].weight
    if target == "network":
        expected = torch.linalg.matrix_norm(weight, 2)
    else:
        rows = weight[:, None] - weight[None] if target == "pairwise" else weight
        expected = rows.norm(dim=-1)
    torch.testing.assert_close(value.value, expected)


def test_identity_has_constant_one():
    assert lipcert.Estimator(
        nn.Identity(), (2, 3), target="network"
    )().item() == pytest.approx(1.0, rel=1e-6)
