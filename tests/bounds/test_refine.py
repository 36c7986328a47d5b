"""LT-SDP against the paper's formulas on dense matrices, the semidefinite program itself, Jacobians and LipLT."""

from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from drawn import networks
from helpers import (
    bounded,
    check_between,
    dense_maps,
    examples,
    jacobian,
    randn,
    reference,
    traced,
)
from lipcert.bounds.fit import FitOptions
from lipcert.bounds.forms import make_form
from lipcert.bounds.methods import METHODS
from lipcert.bounds.multipliers import MULTIPLIERS, propose_diagonals
from lipcert.bounds.refine import refine
from lipcert.bounds.targets import TARGETS, find_target
from lipcert.errors import OptionError, TooLargeError
from lipcert.layers import MaxMin
from lipcert.norms.norm_options import NormOptions
from lipcert.progress import no_progress
from models import PaperResidual, dense_chain, gaussian, named_models

MODELS = named_models()


@torch.no_grad()
def refined(model, shape, multiplier=None, target="network", options=None):
    """LT-SDP on its own, from the constants of the refined form alone."""
    network = traced(model, shape)
    options = options or NormOptions()
    plain = make_form("liplt", network, network.depth + 1, options, no_progress)
    found = refine(plain, options, multiplier)
    shares = found.shares(find_target(target), found.prefix({}), lambda _: None)
    return shares.sum().item() if target == "network" else shares


def one_layer(n=6, inputs=4, outputs=3, seed=0):
    model = dense_chain(inputs, n, outputs, seed=seed)
    return (
        model,
        (inputs,),
        model[0].weight.detach().numpy(),
        model[2].weight.detach().numpy(),
    )


def formula(g, w, t):
    """L_LT-SDP(T) of the paper for G·ReLU(Wx)."""
    return 0.5 * np.linalg.norm(g @ w, 2) + 0.5 * sqrt(
        np.linalg.norm(w.T @ np.diag(t) @ w, 2)
    )


def optimum(g, w):
    """min ‖WᵀTW‖ subject to GᵀG ⪯ T, by cvxpy."""
    cvxpy = pytest.importorskip("cvxpy")
    t, rho = cvxpy.Variable(w.shape[0], nonneg=True), cvxpy.Variable()
    large = rho * np.eye(w.shape[1]) - w.T @ cvxpy.diag(t) @ w
    cvxpy.Problem(
        cvxpy.Minimize(rho), [cvxpy.diag(t) - g.T @ g >> 0, large >> 0]
    ).solve(solver="CLARABEL")
    return rho.value


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [(6, 4, 3), (5, 8, 7), (9, 3, 1), (8, 8, 8)])
def test_one_layer_is_the_best_multiplier_of_the_paper(sizes, seed):
    model, shape, w, g = one_layer(*sizes, seed=seed)
    expected = 0.5 * np.linalg.norm(g @ w, 2) + 0.5 * sqrt(optimum(g, w))
    assert refined(model, shape, "optimal") == pytest.approx(expected, rel=1e-6)
    values = {name: refined(model, shape, name) for name in MULTIPLIERS}
    assert values["optimal"] <= min(values.values()) * (1 + 1e-6)
    assert values["sn"] == pytest.approx(reference(model, shape).item(), rel=1e-6)
    gram = np.abs(g.T @ g)
    assert values["aol"] <= formula(g, w, gram.sum(1)) * (1 + 1e-6)
    q = np.linalg.eigh(gram)[1][:, -1]
    assert values["sll"] <= formula(g, w, gram @ np.abs(q) / np.abs(q)) * (1 + 1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_pairs_and_classes_are_layers_with_one_output(seed):
    """For a single row the weights of SLL are as good as any T."""
    model, shape, w, g = one_layer(seed=seed)
    for multiplier in ("sll", "optimal"):
        pairs, classes = (
            refined(model, shape, multiplier, target)[1]
            for target in ("pairwise", "per-class")
        )
        assert torch.equal(pairs, pairs.T)
        for value, row in ((pairs[0, 2], g[:1] - g[2:]), (classes[1], g[1:2])):
            assert value.item() == pytest.approx(
                0.5 * sqrt(optimum(row, w)),
                rel=1e-6 if multiplier == "optimal" else 1e-3,
            )


@pytest.mark.parametrize("multiplier", MULTIPLIERS)
@pytest.mark.parametrize(
    "sizes", [(1, 3, 7, 5), (4, 1, 9, 3), (1, 12, 5, 9), (2, 1, 1, 1)]
)
def test_diagonals_are_feasible(sizes, multiplier):
    count, outputs, n, inputs = sizes
    targets, whole = randn(count, outputs, n).numpy(), randn(n, inputs, seed=1).numpy()
    targets[:, :, 0] = 0
    whole[-1] = 0
    for g, d in zip(
        targets, propose_diagonals(targets, whole, multiplier), strict=True
    ):
        assert (d > 0).all()
        t = (np.linalg.norm(g / d, 2) * d) ** 2
        assert np.linalg.eigvalsh(np.diag(t) - g.T @ g)[0] >= -1e-9 * t.max()
        if multiplier == "aol":  # feasible as it is, so that ours is no larger
            assert (t[1:] <= np.abs(g.T @ g).sum(1)[1:] * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", MODELS)
def test_spectral_normalisation_is_liplt(name):
    model, shape = MODELS[name]
    assert refined(model, shape, "sn") == pytest.approx(
        reference(model, shape).item(), rel=1e-6
    )


@pytest.mark.parametrize("multiplier", MULTIPLIERS)
@pytest.mark.parametrize("name", MODELS)
def test_several_layers_are_the_recursion_on_dense_matrices(name, multiplier):
    """With the T that was chosen, the factors are norms of products, none below the exact one."""
    model, shape = MODELS[name]
    dense, network = dense_maps(model, shape), traced(model, shape)
    found = refine(
        make_form("liplt", network, dense.last, NormOptions(), no_progress),
        NormOptions(),
        multiplier,
    )
    maps = dense.transformed
    for (j, i), factors in found.factors.items():
        for k in range(i):
            through = torch.linalg.matrix_norm(maps[j, i] @ maps[i, k], 2).item()
            alone = torch.linalg.matrix_norm(maps[j, i], 2) * torch.linalg.matrix_norm(
                maps[i, k], 2
            )
            assert factors[k] >= through * (1 - 1e-12)
            if multiplier == "sn":
                assert factors[k] == pytest.approx(alone.item(), rel=1e-6, abs=1e-9)
    m = found.prefix({})
    assert all(
        own <= plain * (1 + 1e-6) for own, plain in zip(m, dense.prefix(), strict=True)
    )


@pytest.mark.parametrize("seed", range(5))
def test_one_layer_refined_in_any_coordinates_is_the_same(seed):
    """The optimal T of the scaled layer is that of the layer, scaled."""
    model, shape, w, g = one_layer(seed=seed)
    network = traced(model, shape)
    scales = {"1": (2 * randn(6, seed=seed)).exp()}
    rescaled = make_form("rescaled", network, 2, NormOptions(), no_progress, scales)
    found = refine(rescaled, NormOptions(), "optimal")
    assert found.method == "rescaled lt-sdp"
    value, plain = (
        f.shares(find_target("network"), f.prefix({}), lambda _: None).sum().item()
        for f in (found, rescaled)
    )
    assert value == pytest.approx(
        0.5 * np.linalg.norm(g @ w, 2) + 0.5 * sqrt(optimum(g, w)), rel=1e-3
    )
    assert value < plain


@examples(1)
@given(drawn=networks)
def test_drawn_networks_lie_between_jacobians_and_liplt(drawn):
    check_between(*drawn, "lt-sdp")


@pytest.mark.parametrize("name", MODELS)
def test_named_networks_lie_between_jacobians_and_liplt(name):
    check_between(*MODELS[name], "lt-sdp")


@pytest.mark.parametrize("multiplier", MULTIPLIERS)
@examples(0.3)
@given(drawn=networks)
def test_every_multiplier_holds(multiplier, drawn):
    model, shape = drawn
    value = refined(model, shape, multiplier)
    assert (
        torch.linalg.matrix_norm(jacobian(model, shape), 2)
        <= value
        <= reference(model, shape) * (1 + 1e-6) + 1e-9
    )


def test_a_diagonal_layer_is_exact():
    """Each coordinate travels alone, so T makes ‖G T^−½‖‖T^½W‖ the largest product, which ‖GW‖ is too."""
    model, shape, _, _ = one_layer(3, 3, 3)
    first, second = torch.tensor(
        [[3.0, 1.0, 2.0], [0.5, 4.0, 1.0]], dtype=torch.float64
    )
    model[0].weight.data, model[2].weight.data = torch.diag(first), torch.diag(second)
    assert 4.0 <= refined(model, shape, "optimal") <= 4.0 * (1 + 1e-6)
    assert refined(model, shape, "sn") == pytest.approx(0.5 * 4.0 + 0.5 * 12.0)


def test_strict_gain():
    model, shape = gaussian(PaperResidual([6, 6, 6], 10, 4, nn.ReLU)), (6,)
    for target, factor in (("network", 0.9), ("per-class", 0.9), ("pairwise", 0.9)):
        refined_value, plain = (
            bounded(model, shape, method, target).mean for method in ("lt-sdp", "liplt")
        )
        assert refined_value < factor * plain
    bound = lipcert.bound(model, shape, "lt-sdp", "network")
    assert set(bound.winners.values()) == {"liplt", "lt-sdp"}
    assert bound.guarantee == "deterministic"
    assert sum(bound.contributions.values()) == pytest.approx(bound.mean)


def test_layers_that_mix_coordinates_stay_as_they_are():
    model = gaussian(nn.Sequential(nn.Linear(4, 6), MaxMin(), nn.Linear(6, 3)))
    for target in TARGETS:
        values = [
            bounded(model, (4,), method, target).value for method in ("lt-sdp", "liplt")
        ]
        torch.testing.assert_close(*values, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scales", [(1e-8, 1e8), (1e60, 1e-70)])
def test_weights_of_different_magnitudes(scales):
    model, shape, _, _ = one_layer()
    expected = refined(model, shape) * np.prod(scales)
    for layer, scale in zip(model[::2], scales, strict=True):
        layer.weight.data *= scale
    assert refined(model, shape) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dead", [0, 2, 4])
def test_dead_layers(dead):
    model = dense_chain(3, 4, 4, 3)
    model[dead].weight.data.zero_()
    for target in TARGETS:
        assert (bounded(model, (3,), "lt-sdp", target).value <= 1e-12).all()


def test_neurons_without_input_or_output_do_not_count():
    model, shape, _, _ = one_layer(8)
    model[0].weight.data[6].zero_()
    model[2].weight.data[:, 7].zero_()
    smaller = dense_chain(4, 6, 3)
    smaller[0].weight.data, smaller[2].weight.data = (
        model[0].weight.data[:6],
        model[2].weight.data[:, :6],
    )
    assert refined(model, shape) == pytest.approx(refined(smaller, shape), rel=1e-6)


@examples(0.1)
@given(drawn=networks, target=st.sampled_from(list(TARGETS)))
def test_best_is_the_best_of_all(drawn, target):
    model, shape = drawn
    fit = FitOptions(steps=5)
    methods = [
        m
        for m in METHODS
        if m != "best" and not (m == "lipsdp" and target == "last-layer")
    ]
    best = bounded(model, shape, "best", target, fit=fit).value
    for method in methods:
        assert (
            best <= bounded(model, shape, method, target, fit=fit).value * (1 + 1e-9)
        ).all()


def test_refusals():
    model, shape = MODELS["chain"]
    with pytest.raises(
        TooLargeError,
        match=r"GiB with sides up to 5 .*dense_limit=4; use method='rescaled'",
    ):
        lipcert.bound(model, shape, "lt-sdp", options=NormOptions(dense_limit=4))
    with pytest.raises(
        TooLargeError, match=r"LT-SDP needs the matrices of all maps between sites"
    ):
        lipcert.bound(model, shape, "lt-sdp", options=NormOptions(memory=500))
    with pytest.raises(
        OptionError, match=r"multiplier is 'sl', expected one of sn, aol, sll, optimal"
    ):
        refined(model, shape, "sl")
    options, fit = NormOptions(dense_limit=4), FitOptions(steps=1)
    assert (
        lipcert.bound(model, shape, "best", "network", options=options, fit=fit).value
        > 0
    )
