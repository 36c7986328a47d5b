"""Centres of the loop transformation: the middle is the best one per site, and coordinates apart gain more."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from drawn import networks
from helpers import check_between, examples, jacobian, jacobian_at, randn, reference
from lipcert.bounds.forms import form
from lipcert.bounds.scales import FitOptions, fit_scales
from lipcert.bounds.shift import ShiftedEstimator, with_centres
from lipcert.layers import MaxMin
from lipcert.norms.certified import no_progress
from models import PaperResidual, dense_chain, gaussian, named_models

MODELS = named_models()


def norm(matrix):
    return torch.linalg.matrix_norm(matrix, 2)


def dense_recursion(model, centres, alpha=0.0, beta=1.0):
    """LipLT of a PaperResidual with a vector of centres per layer, by hand; the radii are columns of the maps."""
    maps, m = [torch.eye(model.h[0].weight.shape[1], dtype=torch.float64)], [1.0]
    for h, w, g, centre in zip(model.h, model.w, model.g, centres, strict=True):
        inputs = [w.weight @ b for b in maps]
        m.append(sum(norm(b) * constant for b, constant in zip(inputs, m, strict=True)))
        radius = torch.maximum((alpha - centre).abs(), (beta - centre).abs())
        maps = [h.weight @ b + g.weight @ (centre[:, None] * z) for b, z in zip(maps, inputs, strict=True)]
        maps.append(g.weight * radius)
    return sum(norm(model.out.weight @ b) * constant for b, constant in zip(maps, m, strict=True)).item()


def rho_layers(width=5, hidden=8, layers=2, seed=0):
    """x − 2Wᵀφ(Wx)/‖W‖², where H and GW point in opposite directions."""
    model = gaussian(PaperResidual([width] * (layers + 1), hidden, 3, nn.ReLU), seed)
    for h, w, g in zip(model.h, model.w, model.g, strict=True):
        h.weight.data = torch.eye(width, dtype=torch.float64)
        g.weight.data = -2 * w.weight.data.T / norm(w.weight.data) ** 2
    return model


def shifted_value(model, shape, centres):
    """The recursion of lipcert with given centres, by site."""
    network = with_centres(lipcert.trace(model, shape), centres)
    found = form("shifted", network, network.depth + 1, None, no_progress)
    m = found.prefix({})
    return sum(found.term(network.depth + 1, i, m) for i in range(network.depth + 1))


@pytest.mark.parametrize("make", [rho_layers, lambda seed: gaussian(PaperResidual([5, 5, 5], 8, 3, nn.ReLU), seed)])
@pytest.mark.parametrize("seed", range(3))
def test_the_middle_is_the_best_centre_of_a_site(make, seed):
    """On a grid over both centres, with residual paths."""
    model = make(seed=seed)
    values = {
        pair: dense_recursion(model, [torch.full((8,), c, dtype=torch.float64) for c in pair])
        for pair in product([-0.2, 0.0, 0.2, 0.4, 0.49, 0.5, 0.51, 0.6, 0.8, 1.0, 1.2], repeat=2)
    }
    assert min(values, key=values.get) == (0.5, 0.5)
    assert values[0.5, 0.5] == pytest.approx(reference(model, (5,)).item(), rel=1e-9)


@examples(0.5)
@given(seed=st.integers(0, 999), spread=st.sampled_from([0.0, 0.1, 2.0]), leak=st.sampled_from([0.0, 0.2]))
def test_any_centres_are_the_recursion_by_hand(seed, spread, leak):
    model = gaussian(PaperResidual([4, 4, 5], 6, 3, lambda: nn.LeakyReLU(leak)), seed)
    centres = [0.5 + spread * randn(6, seed=seed + k) for k in range(2)]
    expected = dense_recursion(model, centres, alpha=leak)
    assert shifted_value(model, (4,), {1: centres[0], 2: centres[1]}) == pytest.approx(expected, rel=1e-6)
    for k in range(4):
        assert norm(jacobian_at(model, randn(4, seed=k))) <= expected


@pytest.mark.parametrize("name", MODELS)
def test_estimates_with_any_parameters_are_estimates_of_the_shifted_network(name):
    """Of every kind of network; the shifts are zero at first, which is LipLT."""
    model, shape = MODELS[name]
    estimator = ShiftedEstimator(model, shape, "rescaled", "network", 40, accelerated=True)
    scales = estimator.scales
    assert estimator().item() == pytest.approx(reference(model, shape).item(), rel=1e-5)
    for site in scales.shifted_sites():
        parameter = scales.get_parameter(f"shift_{site}")
        parameter.data = 0.5 * randn(*parameter.shape, seed=site)
    for _ in range(3):
        value = estimator()
    centres = {site: scales.centre(site).detach() for site in scales.shifted_sites()}
    assert value.item() == pytest.approx(shifted_value(model, shape, centres), rel=1e-4)
    assert norm(jacobian(model, shape)) <= value * (1 + 1e-4)


@examples(0.1)
@given(drawn=networks)
def test_drawn_networks_lie_between_jacobians_and_liplt(drawn):
    check_between(*drawn, "shifted", fit=FitOptions(steps=4))


@pytest.mark.parametrize("name", MODELS)
def test_named_networks_lie_between_jacobians_and_liplt(name):
    check_between(*MODELS[name], "shifted", fit=FitOptions(steps=4))


def test_centres_alone_gain():
    """A neuron that hardly counts in ‖G‖ takes the centre that its part of ‖H + GCW‖ likes best."""
    model = gaussian(PaperResidual([2, 2], 2, 2, nn.ReLU))
    for layer, matrix in ((model.h[0], [[-5.0, 0.0], [0.0, 6.0]]), (model.w[0], [[1.0, 0.0], [0.0, 1.0]]),
                          (model.g[0], [[10.0, 0.0], [0.0, -1.0]]), (model.out, [[1.0, 0.0], [0.0, 1.0]])):  # fmt: skip
        layer.weight.data = torch.tensor(matrix, dtype=torch.float64)
    middle, moved = (dense_recursion(model, [torch.tensor(c, dtype=torch.float64)]) for c in ([0.5, 0.5], [0.5, 1.5]))
    assert middle == pytest.approx(5.5 + 5)
    assert moved == pytest.approx(4.5 + 5)
    assert reference(model, (2,)).item() == pytest.approx(middle)
    assert shifted_value(model, (2,), {1: torch.tensor([0.5, 1.5])}) == pytest.approx(moved)
    fitted = lipcert.bound(model, (2,), "shifted", "network", fit=FitOptions(steps=60)).value
    assert 5.0 <= fitted < 0.95 * middle


@pytest.mark.parametrize("seed", range(2))
def test_strict_gain_over_coordinates(seed):
    model = dense_chain(12, 12, 12, 4, seed=seed)
    fit = FitOptions(steps=80)
    shifted, rescaled = (lipcert.bound(model, (12,), method, "network", fit=fit) for method in ("shifted", "rescaled"))
    assert shifted.value < 0.99 * rescaled.value
    assert set(shifted.winners.values()) <= {"liplt", "shifted"}
    assert shifted.winners["network"] == "shifted"


def test_nothing_to_shift():
    """One entry per site, or layers that mix coordinates: LipLT, or coordinates alone."""
    single = dense_chain(3, 1, 1, 2)
    assert (
        lipcert.bound(single, (3,), "shifted", "network").value == lipcert.bound(single, (3,), "liplt", "network").value
    )
    mixing = gaussian(nn.Sequential(nn.Linear(4, 6), MaxMin(), nn.Linear(6, 3)))
    estimator = ShiftedEstimator(mixing, (4,), "rescaled", "network")
    assert estimator.scales.shifted_sites() == []
    assert len(estimator.scales.sites()) == 1
    fit = FitOptions(steps=20)
    values = [lipcert.bound(mixing, (4,), method, "network", fit=fit).value for method in ("shifted", "rescaled")]
    torch.testing.assert_close(*values, rtol=1e-9, atol=0)


def test_fitting_moves_the_centres_and_keeps_them_if_nothing_is_gained():
    model = dense_chain(6, 8, 8, 3)
    estimator = ShiftedEstimator(model, (6,), "rescaled", "network", 40)
    first = estimator().item()
    reached = fit_scales(estimator, FitOptions(steps=60))
    assert reached < first
    assert any(estimator.scales.get_parameter(f"shift_{k}").abs().max() > 0.01 for k in (1, 2))
    kept = {k: estimator.scales.get_parameter(f"shift_{k}").clone() for k in (1, 2)}
    fit_scales(estimator, FitOptions(steps=1, lr=3.0))
    assert all(torch.equal(estimator.scales.get_parameter(f"shift_{k}"), kept[k]) for k in (1, 2))
