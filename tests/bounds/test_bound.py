"""lipcert.bound: never below the dense reference, never far above it, and what it says about itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from drawn import networks
from helpers import dense_maps, examples, randn, reference, traced
from lipcert.bounds.compute import bound_targets
from lipcert.bounds.targets import TARGETS
from lipcert.errors import NonFiniteError, OptionError, TrainingModeError
from lipcert.norms.norm_options import NormOptions
from models import Op, dense_chain, gaussian, named_models

MODELS = named_models()
PATHS = {"deterministic": None, "randomised": NormOptions(dense_limit=0, seed=1)}


def check_against_dense(model, shape, method, options):
    bounds = bound_targets(
        model,
        shape,
        method,
        list(TARGETS),
        options=options,
        network=traced(model, shape),
    )
    for target, bound in bounds.items():
        exact = reference(model, shape, method, target).detach()
        largest = exact.max()
        assert bound.value.shape == exact.shape
        assert (bound.value >= exact * (1 - 1e-13) - 1e-14 * largest).all()
        assert (bound.value <= exact * 1.01 + 1e-9 * largest).all()
    return bounds


@pytest.mark.parametrize("path", PATHS)
@examples(0.6)
@given(drawn=networks, method=st.sampled_from(["naive", "liplt"]))
def test_drawn_networks(path, drawn, method):
    """Exact dense value ≤ bound ≤ 1.01 × exact; estimates and sampled slopes ≤ bound."""
    model, shape = drawn
    bounds = check_against_dense(model, shape, method, PATHS[path])
    network = traced(model, shape)
    for target, bound in bounds.items():
        estimator = lipcert.Estimator.of_network(network, method, target)
        estimator.power_iterations = 100
        with torch.no_grad():
            estimate = estimator()
        assert (estimate <= bound.value * (1 + 1e-12)).all()
    x, y = randn(50, *shape), randn(50, *shape, seed=1)
    y[25:] = x[25:] + 1e-3 * y[25:]
    with torch.no_grad():
        change, distance = model(x) - model(y), (x - y).flatten(1).norm(dim=1)
    assert (change.norm(dim=1) <= distance * bounds["network"].value * (1 + 1e-9)).all()
    slopes = (change[:, :, None] - change[:, None, :]).abs() / distance[:, None, None]
    assert (slopes.amax(0) <= bounds["pairwise"].value * (1 + 1e-9)).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["naive", "liplt"])
@pytest.mark.parametrize("name", MODELS)
def test_named_networks(name, method, path):
    check_against_dense(*MODELS[name], method, PATHS[path])


@pytest.mark.parametrize("name", MODELS)
def test_what_certificates_need_of_the_inside(name):
    """prefix, between and tails: constants of every part of the network, by the recursion on dense matrices."""
    model, shape = MODELS[name]
    bound, dense = lipcert.bound(model, shape), dense_maps(model, shape)
    m = dense.prefix()
    torch.testing.assert_close(
        bound.prefix, torch.tensor(m[1:], dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert torch.equal(bound.tails[0], bound.value)
    norm = {
        pair: torch.linalg.matrix_norm(matrix, 2) for pair, matrix in dense.maps.items()
    }
    for i in range(1, dense.last):
        parts = {i: 1.0}
        for k in range(i + 1, dense.last):
            parts[k] = dense.radii[k] * sum(norm[k, j] * parts[j] for j in range(i, k))
            reached = sum(norm[k, j] * parts[j] for j in range(i, k))
            assert bound.between[k, i].item() == pytest.approx(float(reached), rel=1e-6)
        rows = {k: dense.maps[dense.last, k] for k in parts}
        tail = sum(
            parts[k] * (rows[k][:, None] - rows[k][None]).norm(dim=2) for k in parts
        )
        torch.testing.assert_close(bound.tails[i], tail.detach(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_contributions_sum_to_the_mean(name):
    network = traced(*MODELS[name])
    bounds = bound_targets(*MODELS[name], "liplt", list(TARGETS), network=network)
    for target, bound in bounds.items():
        assert next(iter(bound.contributions)) == "input", target
        total = sum(bound.contributions.values())
        assert total == pytest.approx(bound.mean, rel=1e-9), target
        off_diagonal = (
            bound.value[~torch.eye(3, dtype=torch.bool)]
            if bound.value.dim() == 2
            else bound.value
        )
        assert bound.mean == pytest.approx(off_diagonal.mean().item()), target


def test_names_of_sites_are_distinct():
    def forward(m, x):
        for layer in (m.first, m.second, m.third):
            x = m.act(layer(x))
        return x

    layers = {name: nn.Linear(3, 3) for name in ("first", "second", "third")}
    model = gaussian(Op(forward, act=nn.ReLU(), **layers))
    names = lipcert.trace(model, (3,)).site_names()
    assert names == ["input", "act", "act#2", "act#3"]
    assert list(lipcert.bound(model, (3,)).contributions) == names
    shared = gaussian(
        nn.Sequential(nn.Linear(3, 3), relu := nn.ReLU(), nn.Linear(3, 3), relu)
    )
    assert lipcert.trace(shared, (3,)).site_names() == [
        "input",
        "1",
        "3",
    ]  # by the places of one module


def test_a_bound_says_what_it_is():
    model = dense_chain(4, 5, 3)
    proved = lipcert.bound(model, (4,))
    assert proved.guarantee == "deterministic"
    assert proved.inflation == 0.0
    assert repr(proved).startswith(
        f"Bound({proved.mean:.6g} (mean of (3, 3)), method='liplt', target='pairwise', det"
    )
    options = NormOptions(dense_limit=0, failure_probability=1e-6, seed=0)
    likely = lipcert.bound(model, (4,), "naive", "network", options=options)
    assert likely.guarantee == "holds with probability ≥ 1 − 1e-06"
    assert 0 < likely.inflation < 0.0051
    assert likely.seconds > 0
    assert "mean of" not in repr(likely)


def test_rows_need_no_randomised_norm():
    """A linear classifier is bounded by its rows alone, whatever the path."""
    bound = lipcert.bound(dense_chain(4, 3), (4,), options=NormOptions(dense_limit=0))
    assert bound.guarantee == "deterministic"


def test_nearly_equal_rows_keep_their_distance():
    """Distances that a Gram matrix would lose to cancellation: two clusters of rows, and two equal rows."""
    model = dense_chain(50, 12).requires_grad_(False)
    w = model[0].weight
    w[1:6], w[7:] = (
        w[0] + 1e-9 * randn(5, 50, seed=1),
        w[6] + 1e-9 * randn(5, 50, seed=2),
    )
    w[11] = w[10]
    value = lipcert.bound(model, (50,)).value
    exact = (w[:, None] - w[None]).norm(dim=2)
    assert (value >= exact * (1 - 1e-15)).all()
    assert (value <= exact * (1 + 1e-5) + 1e-13).all()


def test_pairwise_constants_follow_from_every_target():
    model, shape = MODELS["two branches"]
    exact = lipcert.bound(model, shape).pairwise(3)
    for target in TARGETS:
        matrix = lipcert.bound(model, shape, target=target).pairwise(3)
        assert matrix.shape == (3, 3)
        assert (matrix >= exact).all()
        assert (matrix.diagonal() == 0).all()


def test_float32_weights_are_bounded_as_the_numbers_they_are():
    model = dense_chain(4, 5, 3).float()
    exact = reference(
        dense_chain(4, 5, 3).float().double(), (4,), target="pairwise"
    ).detach()
    torch.testing.assert_close(
        lipcert.bound(model, (4,)).value, exact, rtol=1e-8, atol=0
    )


def test_works_under_inference_mode():
    model = dense_chain(4, 5, 3)
    with torch.inference_mode():
        value = lipcert.bound(model, (4,)).value
    assert torch.equal(value, lipcert.bound(model, (4,)).value)


def test_refusals():
    model = dense_chain(4, 5, 3)
    with pytest.raises(
        OptionError,
        match=r"method is 'lipl', expected one of naive, liplt, .*; did you mean 'liplt'",
    ):
        lipcert.bound(model, (4,), "lipl")
    with pytest.raises(
        OptionError,
        match=r"target is 'pairs', expected one of .*; did you mean 'pairwise'",
    ):
        lipcert.bound(model, (4,), target="pairs")
    with pytest.raises(
        OptionError,
        match=r"shape \(2, 2\) per input, expected a vector of logits; use target='net",
    ):
        lipcert.bound(nn.Conv1d(2, 2, 3), (2, 4), target="pairwise")
    with pytest.raises(
        TrainingModeError,
        match=r"1 \(BatchNorm\) is in training mode.*call model.eval\(\)",
    ):
        lipcert.bound(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), (4,))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
def test_weights_that_are_not_finite_are_named(name, value):
    model = gaussian(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    model.state_dict()[name].view(-1)[1] = value
    with pytest.raises(
        NonFiniteError,
        match=rf"{name} contains NaN or infinity; restore the last good weights",
    ):
        lipcert.bound(model, (4,))
