"""LipSDP against the paper's theorem, against exact constants, Jacobians and LipLT; and with solvers that fail."""

import re
import sys
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn

import lipcert
from drawn import networks
from helpers import (
    check_jacobians,
    examples,
    jacobians,
    reference,
    traced,
    transformed,
)
from lipcert.bounds import inequality, semidefinite_solvers
from lipcert.bounds.fit import FitOptions
from lipcert.bounds.semidefinite import lipsdp_constants
from lipcert.bounds.semidefinite_system import System
from lipcert.errors import NonFiniteError, OptionError, SolverError, TooLargeError
from lipcert.layers import MaxMin
from models import PaperResidual, dense_chain, gaussian, named_models

MODELS = named_models()
SMALL = [
    "chain",
    "gelu chain",
    "prelu chain",
    "paper residual",
    "two branches",
    "pooled",
]
POOLED = gaussian(
    nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(2, 3)
    )
)
SLOPES = {
    "relu": (nn.ReLU, 0.0, 1.0),
    "leaky": (lambda: nn.LeakyReLU(0.3), 0.3, 1.0),
    "tanh": (nn.Tanh, 0.0, 1.0),
}


def constants(model, shape, *args, **options):
    return lipsdp_constants(traced(model, shape), *args, **options)


def check_against_jacobians(model, shape):
    found = {
        target: constants(model, shape, target)
        for target in ("network", "per-class", "pairwise")
    }
    check_jacobians(model, shape, found, 12)
    network, rows, pairwise = found.values()
    assert torch.equal(pairwise, pairwise.T)
    assert (pairwise.diagonal() == 0).all()
    assert (rows <= network * (1 + 1e-6)).all()
    assert (pairwise <= sqrt(2) * network * (1 + 1e-6)).all()
    for target, value in (
        ("network", network),
        ("per-class", rows),
        ("pairwise", pairwise),
    ):
        assert (
            value <= reference(model, shape, "liplt", target) * (1 + 1e-6) + 1e-9
        ).all()


@examples(1)
@given(drawn=networks)
def test_drawn_networks_lie_between_jacobians_and_liplt(drawn):
    check_against_jacobians(*drawn)


@pytest.mark.parametrize("name", MODELS)
def test_named_networks_lie_between_jacobians_and_liplt(name):
    check_against_jacobians(*MODELS[name])


def theorem(w0, w1, alpha, beta, skip=None):
    """The paper's theorem for h(x) = Hx + W¹φ(W⁰x) as it stands, by cvxpy."""
    cvxpy = pytest.importorskip("cvxpy")
    w0, w1 = w0.detach().numpy(), w1.detach().numpy()
    h = np.zeros((w1.shape[0], w0.shape[1])) if skip is None else skip.detach().numpy()
    rho, t = cvxpy.Variable(), cvxpy.Variable(w0.shape[0], nonneg=True)
    corner = (
        -2 * alpha * beta * w0.T @ cvxpy.diag(t) @ w0
        + h.T @ h
        - rho * np.eye(w0.shape[1])
    )
    side = (alpha + beta) * w0.T @ cvxpy.diag(t) + h.T @ w1
    whole = cvxpy.bmat([[corner, side], [side.T, -2 * cvxpy.diag(t) + w1.T @ w1]])
    cvxpy.Problem(cvxpy.Minimize(rho), [(whole + whole.T) / 2 << 0]).solve(
        solver="CLARABEL"
    )
    return sqrt(rho.value)


@pytest.mark.parametrize("widths", [(4, 6, 3), (8, 5, 2), (2, 6, 1)])
@pytest.mark.parametrize("activation", SLOPES)
def test_one_hidden_layer_is_the_theorem_of_the_paper(activation, widths):
    make, alpha, beta = SLOPES[activation]
    model = dense_chain(*widths, activation=make, seed=7)
    expected = theorem(model[0].weight, model[2].weight, alpha, beta)
    assert constants(model, (widths[0],)).item() == pytest.approx(expected, rel=1e-6)
    rows = model[2].weight
    if len(rows) > 1:
        expected = theorem(model[0].weight, rows[:1] - rows[1:2], alpha, beta)
        assert constants(model, (widths[0],), "pairwise")[0, 1].item() == pytest.approx(
            expected, rel=1e-6
        )


def test_a_residual_layer_is_the_generalised_theorem():
    model = gaussian(PaperResidual([4, 5], 6, 3, nn.ReLU))
    out = model.out.weight
    expected = theorem(
        model.w[0].weight, out @ model.g[0].weight, 0.0, 1.0, out @ model.h[0].weight
    )
    assert constants(model, (4,)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_both_solvers_agree(name):
    pytest.importorskip("cvxpy")
    model, shape = MODELS.get(name, (POOLED, (1, 3, 3)))
    own, other = (
        constants(model, shape, "network", solver=s).item()
        for s in ("barrier", "cvxpy")
    )
    assert own == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("inputs", [4, 30])
def test_linear_models_get_their_spectral_norm(inputs):
    model = gaussian(nn.Sequential(nn.Linear(inputs, 5), nn.Linear(5, 3)))
    weight = (model[1].weight @ model[0].weight).detach()
    value = constants(model, (inputs,), "network").item()
    exact = torch.linalg.matrix_norm(weight, 2).item()
    assert exact <= value <= exact * (1 + 1e-6)
    pairwise = constants(model, (inputs,), "pairwise")
    torch.testing.assert_close(
        pairwise, torch.cdist(weight, weight), rtol=1e-6, atol=1e-12
    )


def test_a_diagonal_network_is_exact():
    """φ acts on each coordinate of a diagonal chain alone, so the constant is the largest product of weights."""
    model = dense_chain(3, 3, 3, 3)
    first, second, third = torch.tensor(
        [[3.0, 1.0, 2.0], [0.5, 4.0, 1.0], [2.0, 1.0, 1.5]], dtype=torch.float64
    )
    for layer, diagonal in zip(model[::2], (first, second, third), strict=True):
        layer.weight.data = torch.diag(diagonal)
    exact = (first * second * third).max().item()
    assert exact <= constants(model, (3,)).item() <= exact * (1 + 1e-6)


@pytest.mark.parametrize("name", ["chain", "paper residual", "two branches"])
def test_pairs_are_networks_with_one_output(name):
    model, shape = MODELS[name]
    pairwise, per_class = (
        constants(model, shape, "pairwise"),
        constants(model, shape, "per-class"),
    )
    difference = nn.Linear(3, 1, bias=False).double()
    for weights, expected in (
        ([1, 0, -1], pairwise[0, 2]),
        ([0, 1, -1], pairwise[1, 2]),
        ([0, 1, 0], per_class[1]),
    ):
        difference.weight.data = torch.tensor([weights], dtype=torch.float64)
        alone = constants(nn.Sequential(model, difference).eval(), shape)
        assert alone.item() == pytest.approx(expected.item(), rel=1e-6)


def test_only_some_pairs():
    model, shape = MODELS["chain"]
    whole, some = (
        constants(model, shape, "pairwise"),
        constants(model, shape, "pairwise", pairs=[(2, 0), (0, 2)]),
    )
    assert some[0, 2] == some[2, 0] == whole[0, 2]
    assert some.isinf().sum() == 4
    assert (some.diagonal() == 0).all()


def test_layers_that_mix_coordinates():
    for mixing in (MaxMin(), nn.Softmax(dim=1)):
        model = gaussian(
            nn.Sequential(
                nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), mixing, nn.Linear(6, 3)
            )
        )
        local = torch.linalg.matrix_norm(jacobians(model, (4,), 40), 2).max()
        value = constants(model, (4,))
        assert local <= value <= lipcert.bound(model, (4,), target="network").value


def test_a_sorting_layer_behind_orthogonal_maps_is_exact():
    model = gaussian(
        nn.Sequential(
            nn.Linear(4, 4), MaxMin(), nn.Linear(4, 4), MaxMin(), nn.Linear(4, 2)
        )
    )
    for k in (0, 2):
        model[k].weight.data = torch.linalg.qr(model[k].weight.data).Q
    exact = torch.linalg.matrix_norm(model[4].weight, 2).item()
    assert constants(model, (4,)).item() == pytest.approx(exact, rel=1e-6)


def test_directions_of_the_input_that_no_map_sees_are_left_out():
    model = dense_chain(50, 4, 4, 3)
    folded = dense_chain(4, 4, 4, 3)
    q, r = torch.linalg.qr(model[0].weight.data.T)
    folded.load_state_dict(model.state_dict() | {"0.weight": r.T})
    assert q.shape == (50, 4)
    options = {"limit": 4 + 4 + 4}
    assert constants(model, (50,), **options).item() == pytest.approx(
        constants(folded, (4,)).item(), rel=1e-6
    )


@pytest.mark.parametrize(
    "scales", [(1e-8, 1e8, 1.0), (1e6, 1e6, 1e-30), (1e-60, 1.0, 1.0)]
)
def test_weights_of_different_magnitudes(scales):
    model = dense_chain(6, 4, 4, 3)
    expected = constants(model, (6,)).item() * np.prod(scales)
    for layer, scale in zip(model[::2], scales, strict=True):
        layer.weight.data *= scale
    assert constants(model, (6,)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dead", [0, 2, 4])
def test_dead_layers(dead):
    model = dense_chain(3, 4, 4, 3)
    model[dead].weight.data.zero_()
    assert 0 <= constants(model, (3,)).item() <= 1e-12
    branch = gaussian(PaperResidual([4, 4], 5, 3, nn.ReLU))
    branch.g[0].weight.data.zero_()
    exact = torch.linalg.matrix_norm(branch.out.weight @ branch.h[0].weight, 2).item()
    assert exact <= constants(branch, (4,)).item() <= exact * (1 + 1e-6)


BAD = {
    "1% too small": lambda x: 0.99 * x,
    "1% too large": lambda x: 1.01 * x,
    "nothing": np.zeros_like,
    "negative": lambda x: -x,
    "huge": lambda x: 1e200 * x,
    "not a number": lambda x: np.full_like(x, np.nan),
    "noise": lambda x: np.random.default_rng(0).random(len(x)),
    "ρ too small": lambda x: np.append(0.5 * x[0], x[1:]),
}


@pytest.mark.parametrize("solution", BAD)
@pytest.mark.parametrize("name", ["exact", "chain", "paper residual"])
def test_a_bad_solver_costs_accuracy_but_not_truth(name, solution, monkeypatch):
    """In the exact example LipSDP is the true constant, so nothing may come out below it."""
    if name == "exact":
        model, shape = dense_chain(3, 3, 3, 3), (3,)
        for layer, diagonal in zip(
            model[::2], ([3.0, 1.0, 2.0], [0.5, 4.0, 1.0], [2.0, 1.0, 1.5]), strict=True
        ):
            layer.weight.data = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        least = 4.0
    else:
        model, shape = MODELS[name]
        least = constants(model, shape).item() * (
            1 - 1e-7
        )  # the optimum, but for the solver's tolerance
    with torch.no_grad():
        system = System(transformed(model, shape), 99, lambda *_: None)
        problem, scale, _ = system.problem(None)
    proposal = BAD[solution](semidefinite_solvers.barrier(problem))
    assert least <= scale * sqrt(inequality.prove(problem, proposal, system.stretch))
    monkeypatch.setitem(
        semidefinite_solvers.SOLVERS, "barrier", lambda problem: proposal
    )
    if solution == "1% too large":  # ρ follows from the other multipliers
        assert least <= constants(model, shape).item() <= reference(model, shape).item()
    elif solution != "huge":
        with pytest.raises(SolverError):
            constants(model, shape)


def test_a_solver_that_stops_early_is_an_error(monkeypatch):
    model, shape = MODELS["paper residual"]
    optimum, liplt = constants(model, shape).item(), reference(model, shape).item()
    monkeypatch.setattr(semidefinite_solvers, "_STEPS", 5)
    with pytest.raises(
        SolverError, match=r"use method='rescaled' or method='best', .*solver='cvxpy'"
    ) as caught:
        lipcert.bound(model, shape, "lipsdp", "network")
    value, excess = re.search(
        r"prove ([\d.e+-]+), LipSDP may be up to ([\d.]+)% smaller", str(caught.value)
    ).groups()
    assert optimum < float(value) <= liplt * (1 + 1e-6)
    assert float(value) * (1 - float(excess) / 100) <= optimum * (1 + 1e-4)
    for target in ("per-class", "pairwise"):
        with pytest.raises(SolverError):
            constants(model, shape, target)
    best = lipcert.bound(model, shape, "best", "network", fit=FitOptions(steps=2))
    assert "lipsdp" not in best.facts.winners.values()
    assert optimum <= best.value <= liplt * (1 + 1e-6)


ACAS = (5, 50, 50, 50, 50, 50, 50, 5)


def badly_scaled(widths, kind, seed=1):
    """Layers with norms from 1e-3 to 1e3; neurons of different sizes, or one large direction and weak neurons."""
    model, generator = (
        dense_chain(*widths, seed=seed),
        torch.Generator().manual_seed(seed),
    )
    for layer in model[::2]:
        weight = layer.weight.data
        rows, columns = (
            torch.randn(n, generator=generator, dtype=torch.float64)
            for n in weight.shape
        )
        if kind == "neurons":
            weight *= (3 * rows).exp()[:, None] ** 0.5
        if kind == "directions":
            weight += (
                3
                * weight.norm()
                * torch.outer(rows / rows.norm(), columns / columns.norm())
            )
            weight[rows > 1] *= 1e-3 if len(weight) > 5 else 1.0
        weight *= 10 ** (
            6 * torch.rand((), generator=generator, dtype=torch.float64) - 3
        )
    return model


@pytest.mark.parametrize("kind", ["layers", "neurons", "directions"])
def test_badly_scaled_deep_networks(kind):
    model = badly_scaled(ACAS, kind)
    local = torch.linalg.matrix_norm(jacobians(model, (5,), 5), 2).max()
    assert local <= constants(model, (5,)) < 0.4 * reference(model, (5,))


def test_rows_and_pairs_of_badly_scaled_networks():
    model = badly_scaled((5, 20, 20, 20, 20, 5), "directions")
    found = {
        target: constants(model, (5,), target)
        for target in ("network", "per-class", "pairwise")
    }
    check_jacobians(model, (5,), found, 12)
    for target, value in found.items():
        liplt = reference(model, (5,), "liplt", target)
        assert (value[liplt > 0] < 0.6 * liplt[liplt > 0]).all()


def test_moving_factors_between_layers_changes_nothing():
    model = badly_scaled((5, 20, 20, 20, 20, 5), "neurons")
    expected = constants(model, (5,)).item()
    for k, factor in enumerate((1e3, 1e-3, 3e2, 1e-2)):
        model[2 * k].weight.data *= factor
        model[2 * k + 2].weight.data /= factor
    assert constants(model, (5,)).item() == pytest.approx(expected, rel=1e-6)
    factors = torch.logspace(-2, 2, 20, dtype=torch.float64)
    model[2].weight.data *= factors[:, None]
    model[4].weight.data /= factors
    assert constants(model, (5,)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["neurons", "directions"])
def test_both_solvers_agree_on_badly_scaled_networks(kind):
    pytest.importorskip("cvxpy")
    model = badly_scaled((3, 6, 6, 6, 3), kind)
    own, other = (constants(model, (3,), solver=s).item() for s in ("barrier", "cvxpy"))
    assert own == pytest.approx(other, rel=1e-4)


def test_classes_that_are_equal_but_for_rounding():
    model = dense_chain(4, 6, 6, 3)
    model[4].weight.data[1] = model[4].weight.data[0]
    pairwise = constants(model, (4,), "pairwise")
    assert pairwise[0, 1] <= 1e-12
    assert pairwise[0, 2].item() == pytest.approx(pairwise[1, 2].item(), rel=1e-6)


def test_neurons_without_input_or_output_do_not_count():
    model, smaller = dense_chain(4, 6, 5, 3), dense_chain(4, 4, 5, 3)
    model[0].weight.data[4].zero_()
    model[2].weight.data[:, 5].zero_()
    smaller[0].weight.data = model[0].weight.data[:4]
    smaller[2].weight.data = model[2].weight.data[:, :4]
    smaller[4].weight.data = model[4].weight.data
    for target in ("network", "pairwise"):
        expected = constants(smaller, (4,), target)
        torch.testing.assert_close(
            constants(model, (4,), target), expected, rtol=1e-6, atol=0
        )


@torch.no_grad()
def test_the_proof_refuses_what_is_infeasible():
    """ρ below the optimum by the accuracy of the solver is not proved, and errors in the maps enlarge the bound."""
    problem, _, _ = System(transformed(*MODELS["chain"]), 99, lambda *_: None).problem(
        None
    )
    x = semidefinite_solvers.barrier(problem)
    x[0] = inequality.smallest_rho(problem, x)
    assert (
        inequality.proved(problem, x * np.where(np.arange(len(x)) == 0, 1 + 1e-8, 1.0))
        < 1e-9
    )
    assert (
        inequality.proved(problem, x * np.where(np.arange(len(x)) == 0, 1 - 1e-8, 1.0))
        == np.inf
    )
    plain = inequality.prove(problem, x, 1.0)
    shaky = inequality.Problem(
        **{
            **vars(problem),
            "drift": problem.drift + np.tril(np.full_like(problem.drift, 1e-7), -1),
        }
    )
    assert plain * (1 + 1e-6) < inequality.prove(shaky, x, 1.0)


def test_refusals(monkeypatch):
    model, shape = MODELS["chain"]
    with pytest.raises(
        TooLargeError, match=r"order 14 .*limit is 13; use method='rescaled'"
    ):
        constants(model, shape, limit=13)
    assert constants(model, shape, limit=14) > 0
    with pytest.raises(TooLargeError, match=r"order 11 or more .*limit is 5"):
        constants(model, shape, limit=5)
    for options in ({"target": "last-layer"}, {"solver": "mosek"}, {"pairs": [(0, 1)]}):
        with pytest.raises(OptionError):
            constants(model, shape, **options)
    for pairs in ([(0, 0)], [(0, 3)], [(-1, 2)]):
        with pytest.raises(OptionError, match=r"classes of 0\.\.2"):
            constants(model, shape, "pairwise", pairs=pairs)
    with pytest.raises(OptionError, match=r"model\.double"):
        constants(nn.Linear(2, 2), (2,))
    huge = dense_chain(3, 3, 3)
    huge[0].weight.data *= 1e200
    with pytest.raises(NonFiniteError):
        constants(huge, (3,))
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(OptionError, match=r"pip install 'lipcert\[sdp\]'"):
        constants(model, shape, solver="cvxpy")
    assert constants(model, shape) > 0  # our own solver needs nothing
