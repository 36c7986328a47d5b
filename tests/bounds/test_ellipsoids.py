"""LipSDP with shared multipliers by elimination: above every slope, below LipLT, near LipSDP, with true gradients."""

import pytest
import torch
from torch import nn

import lipcert
from helpers import bounded, randn, traced
from lipcert import FitOptions
from lipcert.bounds.ellipsoids import LIMIT, Maps, eliminate, sharpened
from lipcert.bounds.fit import fit_scales
from lipcert.bounds.semidefinite import constants_of_ellipsoids
from lipcert.bounds.targets import find_target
from lipcert.errors import OptionError, TooLargeError
from lipcert.layers import MaxMin
from lipcert.network.build import normal_form

QUICK = FitOptions(steps=60, each=20)


class Skip(nn.Module):
    """Two branches that share a layer, and one more nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(6, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        return self.last(torch.tanh(h - self.second(h).relu()))


def chain(activation: type[nn.Module], *widths: int) -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(6, widths[0])]
    for width, following in zip(widths, [*widths[1:], 3], strict=True):
        layers += [activation(), nn.Linear(width, following)]
    return nn.Sequential(*layers).double().eval()


BUILD = {
    "ReLU": lambda: chain(nn.ReLU, 8, 10),
    "MaxMin": lambda: chain(MaxMin, 8, 10),
    "tanh": lambda: chain(nn.Tanh, 9),
    "deep": lambda: chain(nn.ReLU, 6, 5, 7, 4),
    "skip": lambda: Skip().double().eval(),
    "linear": lambda: nn.Sequential(nn.Linear(6, 3)).double().eval(),
}
MODELS = {name: build() for name, build in BUILD.items()}


def steepest(model: nn.Module) -> torch.Tensor:
    """The largest slopes of all logit differences that were found, (K, K)."""
    jacobians = torch.func.vmap(torch.func.jacrev(lambda x: model(x[None])[0]))(
        2 * randn(4000, 6)
    )
    return (jacobians[:, :, None] - jacobians[:, None]).norm(dim=-1).amax(0)


@pytest.mark.parametrize("name", MODELS)
def test_constants_lie_between_slopes_and_liplt(name):
    model = MODELS[name]
    values = bounded(model, (6,), "ellipsoids", fit=QUICK).value
    assert (steepest(model) <= values).all()
    assert (values <= bounded(model, (6,), "liplt").value * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", ["ReLU", "MaxMin", "deep"])
def test_fitted_multipliers_come_near_those_of_the_semidefinite_program(name):
    model = MODELS[name]
    best = bounded(model, (6,), "lipsdp").value
    found = bounded(model, (6,), "ellipsoids", fit=FitOptions(steps=150, each=60)).value
    assert (best <= found * (1 + 1e-4)).all()
    off = ~torch.eye(3, dtype=torch.bool)
    assert (found / best)[off].max() < 1.05


def test_maxmin_is_half_linear():
    """Sorting is 1-Lipschitz, and no more is known of it to a product of norms; the program sees its linear half."""
    model = MODELS["MaxMin"]
    rescaled = bounded(model, (6,), "rescaled").mean
    assert bounded(model, (6,), "ellipsoids", fit=QUICK).mean < 0.9 * rescaled
    assert bounded(model, (6,), "lipsdp").mean < 0.9 * rescaled


@pytest.mark.parametrize("target", ["network", "per-class", "pairwise"])
def test_estimates_are_what_is_proved(target):
    """No power iteration: with the same multipliers, both agree but for rounding."""
    model = MODELS["MaxMin"]
    estimator = lipcert.Estimator(model, (6,), "ellipsoids", target)
    fit_scales(estimator, FitOptions(steps=30))
    network = normal_form(traced(model, (6,)).program, exact=True, apart=True)
    with torch.no_grad():
        shared = estimator.ellipsoids()
    proved = constants_of_ellipsoids(network, target, shared)
    torch.testing.assert_close(proved, estimator().detach(), rtol=1e-6, atol=1e-9)
    if target == "pairwise":
        estimate = estimator.estimate()
        mean = find_target(target).mean(estimate.value)
        torch.testing.assert_close(estimate.contributions.sum(), mean)
        assert estimate.prefix.shape == (2,)


def test_gradients_against_finite_differences():
    model = BUILD["MaxMin"]()
    estimator = lipcert.Estimator(model, (6,), "ellipsoids")
    weight, step = model[0].weight, 1e-6
    direction = randn(*weight.shape, seed=5)
    value = estimator().sum()
    slope = float((torch.autograd.grad(value, weight)[0] * direction).sum())
    with torch.no_grad():
        weight += step * direction
        above = float(estimator().sum())
        weight -= 2 * step * direction
        below = float(estimator().sum())
    assert slope == pytest.approx((above - below) / (2 * step), rel=1e-4)


def test_any_multipliers_are_valid():
    """How they were found does not enter the guarantee: drawn ones give larger constants, never smaller ones."""
    model = MODELS["MaxMin"]
    network = normal_form(traced(model, (6,)).program, exact=True, apart=True)
    maps = Maps.of(lipcert.Estimator(model, (6,), "ellipsoids").network)
    slopes = steepest(model)
    for seed in range(5):
        diagonals = [randn(4, seed=seed).exp(), randn(5, seed=seed + 9).exp()]
        with torch.no_grad():
            drawn = eliminate(maps, diagonals, randn(2, seed=seed).exp())
        values = constants_of_ellipsoids(network, "pairwise", drawn)
        assert (slopes <= values).all()


def test_multipliers_of_one_functional_are_no_worse_than_the_shared_ones():
    estimator = lipcert.Estimator(MODELS["ReLU"], (6,), "ellipsoids")
    with torch.no_grad():
        shared = estimator.ellipsoids()
    weights = torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64)
    own = Maps.of(estimator.network).weighted(weights)
    expected = float(weights @ shared.output @ weights.T)
    assert float(sharpened(own, shared, 0, 0.1).output) == pytest.approx(
        expected, rel=1e-12
    )
    assert float(sharpened(own, shared, 20, 0.1).output) < expected


@pytest.mark.parametrize("activation", [nn.ReLU, MaxMin])
def test_equal_logits_and_dead_ones(activation):
    model = chain(activation, 8, 10)
    with torch.no_grad():
        model[4].weight[2] = model[4].weight[1]
        assert lipcert.bound(model, (6,), "ellipsoids", fit=QUICK).value[1, 2] < 1e-9
        model[4].weight[1:] = 0
    values = lipcert.bound(model, (6,), "ellipsoids", "per-class", fit=QUICK).value
    assert values[0] > 0.1
    assert (values[1:] < 1e-9).all()


def test_certificates_rest_on_them(tmp_path):
    model = chain(MaxMin, 8, 10).float()
    bound = lipcert.bound(model, (6,), "ellipsoids", fit=QUICK)
    assert bound.guarantee == "deterministic"
    x = torch.rand(20, 6)
    radius = lipcert.certify(model, x, bound).radius
    assert (
        radius
        >= lipcert.certify(model, x, lipcert.bound(model, (6,), "liplt")).radius
        * (1 - 1e-6)
    ).all()
    again = lipcert.bound(
        model, (6,), "ellipsoids", fit=FitOptions(steps=5, each=5, start=bound.scales)
    )
    assert again.mean < 1.1 * bound.mean


def test_what_cannot_be_followed_is_refused():
    pooled = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    ).eval()
    with pytest.raises(OptionError, match="mixes the entries of its input"):
        lipcert.bound(pooled, (1, 6, 6), "ellipsoids")
    with pytest.raises(OptionError, match="no target 'last-layer'"):
        lipcert.Estimator(MODELS["ReLU"], (6,), "ellipsoids", "last-layer")
    wide = nn.Sequential(
        nn.Linear(6, LIMIT + 1), nn.ReLU(), nn.Linear(LIMIT + 1, 3)
    ).eval()
    with pytest.raises(TooLargeError, match="4097 neurons"):
        lipcert.Estimator(wide, (6,), "ellipsoids")
