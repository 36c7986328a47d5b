"""Rescaled LipLT and the best of several methods: against dense matrices, sampled slopes and each other."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from drawn import networks
from helpers import bounded, converged, dense_maps, examples, randn, traced
from lipcert.bounds.bound import Bound
from lipcert.bounds.fit import FitOptions, fit_scales
from lipcert.bounds.forms import make_form
from lipcert.bounds.methods import best as best_method
from lipcert.bounds.prefixes import smallest_prefixes
from lipcert.bounds.scales import Scales
from lipcert.bounds.targets import find_target
from lipcert.certificate.certify import Certifier
from lipcert.errors import OptionError
from lipcert.layers import GroupSort
from lipcert.network.rewrites import free_scales, spread_scales
from lipcert.norms.norm_options import NormOptions
from lipcert.progress import no_progress
from models import dense_chain, gaussian, named_models

MODELS = named_models()
QUICK = FitOptions(steps=8, lr=0.1, iterations=3)
PLAIN = dense_chain(6, 7, 3)
ORDER = 1 + 1e-9


def drawn_scales(network, seed, per_neuron=False, deviation=1.0):
    """Random diagonals by the names of their sites."""
    generator = torch.Generator().manual_seed(seed)
    names, result = network.site_names(), {}
    for site in range(1, network.depth + 1):
        count = free_scales(network, site, per_neuron)
        values = (
            deviation * torch.randn(count, generator=generator, dtype=torch.float64)
        ).exp()
        result[names[site]] = spread_scales(values, network, site)
    return result


def flat(diagonal, shape):
    return diagonal.expand(shape).reshape(-1)


def check_slopes(model, shape, bound):
    x, y = randn(60, *shape), randn(60, *shape, seed=1)
    y[30:] = x[30:] + 1e-3 * y[30:]
    with torch.no_grad():
        change, distance = model(x) - model(y), (x - y).flatten(1).norm(dim=1)
    assert (change.norm(dim=1) <= distance * bound * ORDER).all()


@pytest.mark.parametrize("per_neuron", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_maps_of_the_rescaled_network(name, per_neuron):
    """The norms are those of D_j⁻¹ B_ji D_i."""
    model, shape = MODELS[name]
    network = traced(model, shape)
    scales = drawn_scales(network, 0, per_neuron)
    found = make_form(
        "rescaled", network, network.depth + 1, NormOptions(), no_progress, scales
    )
    dense = dense_maps(model, shape).transformed
    names, last = network.site_names(), network.depth + 1
    for (j, i), bound in found.norms.bounds.items():
        matrix = dense[j, i]
        if i > 0:
            matrix = matrix * flat(
                scales[names[i]], network.nodes[network.sites[i].output].shape
            )
        if j < last:
            matrix = (
                matrix
                / flat(scales[names[j]], network.nodes[network.sites[j].source].shape)[
                    :, None
                ]
            )
        exact = float(torch.linalg.matrix_norm(matrix, 2))
        assert exact * (1 - 1e-12) <= bound <= exact * (1 + 1e-7) + 1e-12


@examples(1)
@given(drawn=networks, seed=st.integers(0, 99), per_neuron=st.booleans())
def test_any_positive_scales_give_a_valid_bound(drawn, seed, per_neuron):
    model, shape = drawn
    network = lipcert.trace(model, shape)
    scales = drawn_scales(network, seed, per_neuron)
    found = make_form(
        "rescaled", network, network.depth + 1, NormOptions(), no_progress, scales
    )
    (m,) = smallest_prefixes([found]).forms
    value = found.shares(find_target("network"), m, lambda _: None).sum()
    check_slopes(model, shape, value)


@pytest.mark.parametrize("options", [None, NormOptions(dense_limit=0, seed=1)])
@examples(0.5)
@given(
    drawn=networks,
    target=st.sampled_from(["network", "per-class", "pairwise", "last-layer"]),
)
def test_no_method_is_worse_than_those_it_rests_on(options, drawn, target):
    model, shape = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            best_method, "_SMALL", 0
        )  # semidefinite programs have their own tests
        values = {
            method: bounded(model, shape, method, target, options=options, fit=QUICK)
            for method in ("naive", "liplt", "rescaled", "best")
        }
    slack = ORDER if options is None else 1.02
    floor = 1e-12 * float(values["naive"].value.max())
    assert (values["rescaled"].value <= values["liplt"].value * slack + floor).all()
    for method in ("naive", "liplt", "rescaled"):
        assert (values["best"].value <= values[method].value * slack + floor).all()
    for bound in values.values():
        assert sum(bound.contributions.values()) == pytest.approx(
            bound.mean, rel=1e-9, abs=1e-12
        )
    if target == "network":
        check_slopes(model, shape, values["best"].value)
        check_slopes(model, shape, values["rescaled"].value)


def test_best_is_not_above_lipsdp_and_says_which_method_won():
    model = dense_chain(6, 12, 12, 3)
    best, sdp = (
        bounded(model, (6,), method, fit=QUICK) for method in ("best", "lipsdp")
    )
    assert (best.value <= sdp.value * ORDER).all()
    assert best.winners["pairwise"] == "lipsdp"
    assert set(best.winners) == {"1", "3", "pairwise"}
    assert bounded(model, (6,)).winners == {}


def test_constants_of_other_forms_enter_the_recursion():
    model = dense_chain(5, 7, 6, 4)
    network = lipcert.trace(model, (5,))
    plain = make_form("liplt", network, network.depth + 1, NormOptions(), no_progress)
    bad = make_form(
        "rescaled",
        network,
        network.depth + 1,
        NormOptions(),
        no_progress,
        drawn_scales(network, 3, deviation=2.0),
    )
    names = network.site_names()
    alone = smallest_prefixes([plain])
    both = smallest_prefixes([plain, bad])
    assert all(both.known[name] <= alone.known[name] for name in names[1:])
    for j in range(1, network.depth + 1):
        assert (
            both.forms[1][j]
            <= alone.known[names[j]] / float(bad.diagonals[j].min()) * ORDER
        )
    assert both.forms[1][2] < bad.prefix({})[2]


def test_scales_have_the_grain_of_their_site():
    shape = (2, 8, 8)
    layers = [
        nn.Conv2d(2, 6, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        GroupSort(3),
        nn.Flatten(),
        nn.Linear(54, 5),
        nn.Softmax(1),
    ]
    network = lipcert.trace(nn.Sequential(*layers, nn.Linear(5, 3)).eval(), shape)
    assert [free_scales(network, site) for site in range(1, 5)] == [6, 6, 2, 1]
    assert [free_scales(network, site, per_neuron=True) for site in range(1, 5)] == [
        216,
        6,
        2,
        1,
    ]
    channels = flat(
        spread_scales(torch.tensor([1.0, 2.0]), network, 3),
        network.nodes[network.sites[3].source].shape,
    )
    assert channels.reshape(6, -1).tolist() == [[k] * 9 for k in (1, 1, 1, 2, 2, 2)]
    assert Scales(network).sites() == [
        1,
        2,
        3,
    ]  # one scale for all coordinates changes nothing
    assert lipcert.trace(nn.Sequential(nn.Linear(3, 2)), (3,)).depth == 0


@pytest.mark.parametrize("per_neuron", [False, True])
def test_scales_begin_with_given_diagonals(per_neuron):
    layers = [
        nn.Conv2d(2, 6, 3),
        nn.ReLU(),
        GroupSort(3),
        nn.Flatten(),
        nn.Linear(216, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    ]
    network = lipcert.trace(nn.Sequential(*layers).double(), (2, 8, 8))
    for given_per_neuron in (False, per_neuron):
        given, scales = (
            drawn_scales(network, 0, given_per_neuron),
            Scales(network, per_neuron),
        )
        scales.begin_with(given)
        found = scales.diagonals()
        assert found.keys() == given.keys()
        assert all(
            torch.allclose(*torch.broadcast_tensors(found[name], given[name]))
            for name in given
        )
    named = next(iter(given))
    others = Scales(network, per_neuron)
    others.begin_with({named: given[named]})
    assert all(
        (diagonal == 1).all()
        for name, diagonal in others.diagonals().items()
        if name != named
    )


def test_best_of_random_norms_is_not_above_liplt():
    """With the same random starts: a form's share of the failure probability does not depend on the method."""
    model = dense_chain(6, 12, 12, 12, 3)
    options = NormOptions(dense_limit=3, seed=4)
    best, plain = (
        bounded(model, (6,), method, options=options, fit=QUICK)
        for method in ("best", "liplt")
    )
    assert plain.guarantee == "holds with probability ≥ 1 − 1e-09"
    assert best.guarantee == plain.guarantee
    assert (best.value <= plain.value).all()
    assert (best.between <= plain.between).all()


@pytest.mark.parametrize("name", ["chain", "paper residual", "relu then max-pool"])
def test_the_gradient_with_respect_to_scales(name):
    """Against finite differences of the converged estimate."""
    model, shape = MODELS[name]
    estimator = converged(
        model, shape, method="rescaled", target="pairwise", accelerated=True
    )
    # All different: with equal scales around a max-pooling its channels have one norm,
    # and the largest of them no gradient.
    for seed, parameter in enumerate(estimator.scales.parameters()):
        with torch.no_grad():
            parameter.copy_(0.3 * randn(*parameter.shape, seed=seed))
    estimator.power_iterations = 80
    estimator().sum().backward()
    for parameter in estimator.scales.parameters():
        for k in (0,):
            values = []
            for step in (1e-5, -2e-5):
                with torch.no_grad():
                    parameter[k] += step
                    values.append(float(estimator().sum()))
            with torch.no_grad():
                parameter[k] += 1e-5
            assert float(parameter.grad[k]) == pytest.approx(
                (values[0] - values[1]) / 2e-5, rel=1e-4, abs=1e-6
            )


def test_fitting_improves_and_never_worsens():
    model = dense_chain(8, 20, 20, 20, 4)
    estimator = lipcert.Estimator(
        model.requires_grad_(False), (8,), "rescaled", "network", 5
    )
    first = float(converged(model, (8,), target="network")().detach())
    reached = fit_scales(estimator, FitOptions(steps=100))
    assert reached < 0.9 * first
    assert estimator.power_iterations == 5
    kept = [parameter.clone() for parameter in estimator.scales.parameters()]
    assert fit_scales(estimator, FitOptions(steps=3, lr=50.0)) == pytest.approx(
        reached, rel=1e-6
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(kept, estimator.scales.parameters(), strict=True)
    )
    assert all(parameter.grad is None for parameter in estimator.scales.parameters())


def test_scales_for_one_pair_serve_it_best():
    model = dense_chain(8, 20, 20, 5)
    mean, pair = (
        bounded(model, (8,), "rescaled", fit=FitOptions(steps=100, pair=chosen))
        for chosen in (None, (1, 3))
    )
    assert pair.value[1, 3] < mean.value[1, 3]
    assert mean.mean < pair.mean
    with pytest.raises(
        OptionError,
        match=r"pair is \(0, 1\), which needs the target pairwise or last-layer",
    ):
        lipcert.bound(model, (8,), "rescaled", "network", fit=FitOptions(pair=(0, 1)))


def test_scales_are_stored_with_the_bound(tmp_path):
    model = dense_chain(5, 7, 6, 4)
    bound = lipcert.bound(model, (5,), "rescaled", fit=QUICK)
    bound.save(tmp_path / "bound")
    loaded = Bound.load(tmp_path / "bound")
    assert loaded.scales.keys() == {"1", "3"}
    assert all(
        torch.equal(loaded.scales[name], bound.scales[name]) for name in bound.scales
    )
    assert loaded.winners == bound.winners
    network = lipcert.trace(model, (5,))
    again = make_form(
        "rescaled", network, network.depth, NormOptions(), no_progress, loaded.scales
    )
    plain = make_form("liplt", network, network.depth, NormOptions(), no_progress)
    m = smallest_prefixes([plain, again])
    assert m.known["3"] <= float(lipcert.bound(model, (5,)).prefix[1]) * ORDER


def test_certificates_from_rescaled_and_best_bounds_hold_and_are_larger():
    model = gaussian(dense_chain(8, 24, 24, 4)).float().eval()
    x = randn(40, 8).float()
    radii = {
        method: Certifier(traced(model, (8,)), bounded(model, (8,), method))
        .certify(x)
        .radius
        for method in ("liplt", "rescaled", "best")
    }
    assert (radii["rescaled"] >= radii["liplt"] * (1 - 1e-6)).all()
    assert (radii["best"] >= radii["rescaled"] * (1 - 1e-6)).all()
    assert radii["best"].mean() > 1.02 * radii["liplt"].mean()


def test_training_moves_the_scales():
    model = dense_chain(8, 16, 16, 4)
    estimator = lipcert.Estimator(model, (8,), "rescaled")
    estimator().sum().backward()
    for parameter in estimator.scales.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0
    assert "scales.log_1" in estimator.state_dict()


def test_refusals():
    model = dense_chain(4, 5, 3)
    with pytest.raises(
        OptionError, match="the estimator has no scales; use method='rescaled'"
    ):
        fit_scales(lipcert.Estimator(model, (4,)))
    with pytest.raises(
        OptionError, match="expected steps and each ≥ 0, iterations ≥ 1 and lr > 0"
    ):
        replace(FitOptions(), lr=0.0)


def test_scales_that_were_learned_are_a_start():
    """A bound that begins with them is as small as they make it, without a step of fitting."""
    model = dense_chain(6, 20, 20, 5)
    estimator = lipcert.Estimator(model, (6,), "rescaled", power_iterations=50)
    fit_scales(estimator, FitOptions(steps=60))
    start = estimator.scales.diagonals()
    assert max(float(diagonal.max()) for diagonal in start.values()) > 1.05
    begun = bounded(model, (6,), "rescaled", fit=FitOptions(steps=0, start=start))
    plain = bounded(model, (6,), "rescaled", fit=FitOptions(steps=0))
    assert begun.mean == pytest.approx(
        float(estimator.estimate().contributions.detach().sum()), rel=1e-3
    )
    assert begun.mean < plain.mean
    again = bounded(
        model, (6,), "rescaled", fit=FitOptions(steps=0, start=begun.scales)
    )
    assert torch.equal(again.value, begun.value)
    with pytest.raises(
        OptionError,
        match=r"the scales of 1 have the shape \(7,\), its inputs have \(20,\); start with",
    ):
        bounded(model, (6,), "rescaled", fit=FitOptions(start={"1": torch.ones(7)}))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"pair": (0,)}, "expected two different classes"),
        ({"pair": (0, 1, 2)}, "expected two different classes"),
        ({"pair": (0.5, 1)}, "expected two different classes"),
        ({"pair": (1, 1)}, "expected two different classes"),
        ({"pair": (0, -1)}, "expected two different classes"),
        ({"pair": "ab"}, "expected two different classes"),
        ({"pair": (0, 9)}, "but the network has 3 classes"),
        ({"start": "x"}, "start is a str, expected diagonals"),
        ({"start": {"1": 3}}, "start has a int for '1'"),
        ({"start": {"1": -torch.ones(7)}}, "not positive and finite"),
        ({"start": {"1": torch.full((7,), torch.nan)}}, "not positive and finite"),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["rescaled", "ellipsoids"])
def test_options_that_do_not_fit(method, option, message):
    with pytest.raises(OptionError, match=message):
        bounded(PLAIN, (6,), method, fit=FitOptions(**option))
