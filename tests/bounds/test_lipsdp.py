"""LipSDP against the paper's theorem, against exact constants, Jacobians and LipLT; and with solvers that fail."""

import sys
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from drawn import networks
from helpers import check_jacobians, examples, jacobians, reference
from lipcert.bounds import inequality, lipsdp
from lipcert.bounds.lipsdp import lipsdp_constants
from lipcert.errors import NonFiniteError, OptionError, TooLargeError
from lipcert.layers import MaxMin
from models import PaperResidual, dense_chain, gaussian, named_models

MODELS = named_models()
SMALL = ["chain", "gelu chain", "prelu chain", "paper residual", "two branches", "pooled"]
POOLED = gaussian(nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(2, 3)))
SLOPES = {"relu": (nn.ReLU, 0.0, 1.0), "leaky": (lambda: nn.LeakyReLU(0.3), 0.3, 1.0), "tanh": (nn.Tanh, 0.0, 1.0)}


def constants(model, shape, *args, **options):
    return lipsdp_constants(lipcert.trace(model, shape), *args, **options)


def check_against_jacobians(model, shape, variant):
    found = {target: constants(model, shape, target, variant) for target in ("network", "per-class", "pairwise")}
    check_jacobians(model, shape, found, 12)
    network, rows, pairwise = found.values()
    assert torch.equal(pairwise, pairwise.T)
    assert (pairwise.diagonal() == 0).all()
    assert (rows <= network * (1 + 1e-6)).all()
    assert (pairwise <= sqrt(2) * network * (1 + 1e-6)).all()
    for target, value in (("network", network), ("per-class", rows), ("pairwise", pairwise)):
        assert (value <= reference(model, shape, "liplt", target) * (1 + 1e-6) + 1e-9).all()


@examples(1)
@given(drawn=networks, variant=st.sampled_from(["neuron", "layer"]))
def test_drawn_networks_lie_between_jacobians_and_liplt(drawn, variant):
    check_against_jacobians(*drawn, variant)


@pytest.mark.parametrize("name", MODELS)
def test_one_multiplier_per_coordinate_is_at_least_as_good_as_one_per_site(name):
    neuron, layer = (constants(*MODELS[name], "network", variant) for variant in ("neuron", "layer"))
    assert neuron <= layer * (1 + 1e-6)
    assert layer <= reference(*MODELS[name]) * (1 + 1e-6)


def theorem(w0, w1, alpha, beta, skip=None):
    """The paper's theorem for h(x) = Hx + W¹φ(W⁰x) as it stands, by cvxpy."""
    cvxpy = pytest.importorskip("cvxpy")
    w0, w1 = w0.detach().numpy(), w1.detach().numpy()
    h = np.zeros((w1.shape[0], w0.shape[1])) if skip is None else skip.detach().numpy()
    rho, t = cvxpy.Variable(), cvxpy.Variable(w0.shape[0], nonneg=True)
    corner = -2 * alpha * beta * w0.T @ cvxpy.diag(t) @ w0 + h.T @ h - rho * np.eye(w0.shape[1])
    side = (alpha + beta) * w0.T @ cvxpy.diag(t) + h.T @ w1
    whole = cvxpy.bmat([[corner, side], [side.T, -2 * cvxpy.diag(t) + w1.T @ w1]])
    cvxpy.Problem(cvxpy.Minimize(rho), [(whole + whole.T) / 2 << 0]).solve(solver="CLARABEL")
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
        assert constants(model, (widths[0],), "pairwise")[0, 1].item() == pytest.approx(expected, rel=1e-6)


def test_a_residual_layer_is_the_generalised_theorem():
    model = gaussian(PaperResidual([4, 5], 6, 3, nn.ReLU))
    out = model.out.weight
    expected = theorem(model.w[0].weight, out @ model.g[0].weight, 0.0, 1.0, out @ model.h[0].weight)
    assert constants(model, (4,)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("variant", ["neuron", "layer"])
def test_both_solvers_agree(name, variant):
    pytest.importorskip("cvxpy")
    model, shape = MODELS.get(name, (POOLED, (1, 3, 3)))
    own, other = (constants(model, shape, "network", variant, solver=s).item() for s in ("barrier", "cvxpy"))
    assert own == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("variant", ["neuron", "layer"])
@pytest.mark.parametrize("inputs", [4, 30])
def test_linear_models_get_their_spectral_norm(inputs, variant):
    model = gaussian(nn.Sequential(nn.Linear(inputs, 5), nn.Linear(5, 3)))
    weight = (model[1].weight @ model[0].weight).detach()
    value = constants(model, (inputs,), "network", variant).item()
    exact = torch.linalg.matrix_norm(weight, 2).item()
    assert exact <= value <= exact * (1 + 1e-6)
    pairwise = constants(model, (inputs,), "pairwise", variant)
    torch.testing.assert_close(pairwise, torch.cdist(weight, weight), rtol=1e-6, atol=1e-12)


def test_a_diagonal_network_is_exact():
    """φ acts on each coordinate of a diagonal chain alone, so the constant is the largest product of weights."""
    model = dense_chain(3, 3, 3, 3)
    first, second, third = torch.tensor([[3.0, 1.0, 2.0], [0.5, 4.0, 1.0], [2.0, 1.0, 1.5]], dtype=torch.float64)
    for layer, diagonal in zip(model[::2], (first, second, third), strict=True):
        layer.weight.data = torch.diag(diagonal)
    exact = (first * second * third).max().item()
    assert exact <= constants(model, (3,)).item() <= exact * (1 + 1e-6)


@pytest.mark.parametrize("name", ["chain", "paper residual", "two branches"])
def test_pairs_are_networks_with_one_output(name):
    model, shape = MODELS[name]
    pairwise, per_class = constants(model, shape, "pairwise"), constants(model, shape, "per-class")
    difference = nn.Linear(3, 1, bias=False).double()
    for weights, expected in (([1, 0, -1], pairwise[0, 2]), ([0, 1, -1], pairwise[1, 2]), ([0, 1, 0], per_class[1])):
        difference.weight.data = torch.tensor([weights], dtype=torch.float64)
        alone = constants(nn.Sequential(model, difference).eval(), shape)
        assert alone.item() == pytest.approx(expected.item(), rel=1e-6)


def test_only_some_pairs():
    model, shape = MODELS["chain"]
    whole, some = constants(model, shape, "pairwise"), constants(model, shape, "pairwise", pairs=[(2, 0), (0, 2)])
    assert some[0, 2] == some[2, 0] == whole[0, 2]
    assert some.isinf().sum() == 4
    assert (some.diagonal() == 0).all()


def test_layers_that_mix_coordinates():
    for mixing in (MaxMin(), nn.Softmax(dim=1)):
        model = gaussian(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), mixing, nn.Linear(6, 3)))
        local = torch.linalg.matrix_norm(jacobians(model, (4,), 40), 2).max()
        value = constants(model, (4,))
        assert local <= value <= lipcert.bound(model, (4,), target="network").value


def test_a_sorting_layer_behind_orthogonal_maps_is_exact():
    model = gaussian(nn.Sequential(nn.Linear(4, 4), MaxMin(), nn.Linear(4, 4), MaxMin(), nn.Linear(4, 2)))
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
    assert constants(model, (50,), **options).item() == pytest.approx(constants(folded, (4,)).item(), rel=1e-6)


@pytest.mark.parametrize("scales", [(1e-8, 1e8, 1.0), (1e6, 1e6, 1e-30), (1e-60, 1.0, 1.0)])
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
        for layer, diagonal in zip(model[::2], ([3.0, 1.0, 2.0], [0.5, 4.0, 1.0], [2.0, 1.0, 1.5]), strict=True):
            layer.weight.data = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        least = 4.0
    else:
        model, shape = MODELS[name]
        least = constants(model, shape).item() * (1 - 1e-7)  # the optimum, but for the solver's tolerance
    monkeypatch.setitem(inequality.SOLVERS, "barrier", lambda problem: BAD[solution](inequality.barrier(problem)))
    value = constants(model, shape).item()
    assert least <= value <= reference(model, shape).item() * (1 + 1e-6)
    if solution == "ρ too small":  # ρ is not taken from the solver
        assert value == pytest.approx(least, rel=1e-6)


def test_a_solver_that_fails_leaves_liplt(monkeypatch):
    def fail(problem):
        raise np.linalg.LinAlgError

    monkeypatch.setitem(inequality.SOLVERS, "barrier", fail)
    model, shape = MODELS["paper residual"]
    for target in ("network", "pairwise"):
        expected = reference(model, shape, "liplt", target)
        torch.testing.assert_close(constants(model, shape, target), expected, rtol=1e-6, atol=1e-9)


def test_neurons_without_input_or_output_do_not_count():
    model, smaller = dense_chain(4, 6, 5, 3), dense_chain(4, 4, 5, 3)
    model[0].weight.data[4].zero_()
    model[2].weight.data[:, 5].zero_()
    smaller[0].weight.data = model[0].weight.data[:4]
    smaller[2].weight.data = model[2].weight.data[:, :4]
    smaller[4].weight.data = model[4].weight.data
    for target in ("network", "pairwise"):
        expected = constants(smaller, (4,), target)
        torch.testing.assert_close(constants(model, (4,), target), expected, rtol=1e-6, atol=0)


@torch.no_grad()
def test_the_proof_refuses_what_is_infeasible():
    """ρ below the optimum by the accuracy of the solver is not proved, and errors in the maps enlarge the bound."""
    problem, _, _ = lipsdp._System(lipcert.trace(*MODELS["chain"]), "neuron", 99, lambda *_: None).problem(None)
    x = inequality.barrier(problem)
    x[0] = inequality.smallest_rho(problem, x)
    assert inequality.proved(problem, x * np.where(np.arange(len(x)) == 0, 1 + 1e-8, 1.0)) < 1e-9
    assert inequality.proved(problem, x * np.where(np.arange(len(x)) == 0, 1 - 1e-8, 1.0)) == np.inf
    plain = inequality.prove(problem, x, 1.0)
    shaky = inequality.Problem(
        **{**vars(problem), "drift": problem.drift + np.tril(np.full_like(problem.drift, 1e-7), -1)}
    )
    assert plain * (1 + 1e-6) < inequality.prove(shaky, x, 1.0)


def test_refusals(monkeypatch):
    model, shape = MODELS["chain"]
    with pytest.raises(TooLargeError, match=r"order 14 .*limit is 13; use method='rescaled'"):
        constants(model, shape, limit=13)
    assert constants(model, shape, limit=14) > 0
    with pytest.raises(TooLargeError, match=r"order 11 or more .*limit is 5"):
        constants(model, shape, limit=5)
    for options in ({"target": "last-layer"}, {"variant": "network"}, {"solver": "mosek"}, {"pairs": [(0, 1)]}):
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
