"""The bound on rounding errors covers operations that err as much as they may, in the direction that does most harm.

What float32 really does is far from that, so that comparisons with it would not notice factors that are too small.
"""

from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from drawn import networks
from helpers import certifier_of, examples, randn
from lipcert import data
from lipcert.certificate.error_pass import ErrorPass, Execution
from lipcert.certificate.node_errors import BatchErrors
from lipcert.layers import RhoLipschitzConv2d, RhoLipschitzLinear
from lipcert.models import zoo
from lipcert.network.build import normal_form
from lipcert.network.splitting import split_sums
from lipcert.norms.product_errors import magnitude_norm
from lipcert.rounding import gamma
from models import dense_chain, gaussian, rho_conv

FEWEST = 8  # products; the roundings that really happen are then much fewer than those that are allowed


class Gradients:
    """How the difference of the first two logits depends on the value of every node, in exact arithmetic."""

    def __init__(self, network):
        self.network = network

    def at(self, x):
        values = {}

        def observe(node, value):
            if node in self.network.produced:
                values.setdefault(self.network.produced[node], value)
            return value

        logits = self.network.program.run(x.double().requires_grad_(), observe)
        difference = (logits[:, 0] - logits[:, 1]).sum()
        gradients = torch.autograd.grad(
            difference, list(values.values()), materialize_grads=True
        )
        return dict(zip(values, gradients, strict=True))


class WorstPass(ErrorPass):
    """Moves the result of every operation by half of what its rounding may do, always in the given direction."""

    def execute(self, x, directions):
        values, network = {}, self.network

        def observe(node, value):
            v = network.produced.get(node)
            if v is None or v in values:
                return value
            edges = network.nodes[v].edges
            if edges and network.nodes[v].roundings >= FEWEST:
                sums = sum(
                    edge.op.magnitude(values[edge.source].abs()) for edge in edges
                )
                sums = sums + self.offsets.get(v, 0)
                share = 0.5 * gamma(network.nodes[v].roundings, value.dtype)
                value = value + share * sums * directions[v].sign().float()
            values[v] = value
            return value

        with torch.no_grad():
            logits = network.program.run(x, observe)
            parts = self.network, self.stages, self.offsets
            sites, output = BatchErrors(*parts, values, len(x)).errors_of(logits)
            return Execution(logits, sites, output, logits.abs().max())


class Adversary:
    """A model in float32 and what its errors can be at any input."""

    def __init__(self, model, shape, longest_sum=None):
        self.model = deepcopy(model).float().requires_grad_(False).eval()
        self.certifier = certifier_of(self.model, shape, longest_sum)
        self.wide = deepcopy(self.model).double()
        network = lipcert.trace(self.wide, shape)
        if longest_sum:
            network = normal_form(split_sums(network.program, longest_sum))
        self.gradients = Gradients(network)
        self.worst = WorstPass(self.certifier.network, self.certifier.error_pass.stages)

    def execute(self, x):
        """The execution, and the size of the error of the difference of the first two logits."""
        execution = self.worst.execute(x, self.gradients.at(x))
        off = execution.logits.double() - self.wide(x.double())
        return execution, (off[:, 0] - off[:, 1]).abs()

    def check(self, x):
        """The largest part of the bound that is used, at the points and from the first one to the others."""
        execution, measured = self.execute(x)
        rounding = self.certifier.rounding
        both = rounding.errors(execution, torch.zeros(len(x), dtype=torch.long))[:, 1]
        distance = (x.double() - x[:1].double()).flatten(1).norm(dim=1)
        together = both[0] + distance * rounding.growth[0, 1]
        assert (measured <= both / 2).all()
        assert (measured + measured[0] <= together).all()
        return (2 * measured / both).max().item(), (
            (measured + measured[0]) / together
        )[1:].max().item()


def sequence(*layers):
    return gaussian(nn.Sequential(*layers))


def rho_network(kind):
    leaky = nn.LeakyReLU(0.9)
    if kind == "dense":
        layers = [RhoLipschitzLinear(6, 300, leaky), RhoLipschitzLinear(6, 50, leaky)]
        return nn.Sequential(nn.Linear(400, 6), *layers, nn.Linear(6, 3)).eval(), (400,)
    layers = [RhoLipschitzConv2d(3, 40, 3, leaky), RhoLipschitzConv2d(3, 20, 3, leaky)]
    return nn.Sequential(
        nn.Conv2d(30, 3, 3, padding=1), *layers, nn.Flatten(), nn.Linear(75, 3)
    ).eval(), (30, 5, 5)


# Most errors are made in operations of many products; the narrow ones before or behind them only carry what is there.
NETWORKS = {
    "chain": (dense_chain(300, 20, 20, 3, activation=lambda: nn.LeakyReLU(0.9)), (300,)),
    "dense layers in series": (sequence(nn.Linear(700, 3), nn.Linear(3, 3), nn.Linear(3, 3)), (700,)),
    "in series before a nonlinearity": (
        sequence(nn.Linear(700, 3), nn.Linear(3, 3), nn.LeakyReLU(0.9), nn.Linear(3, 3)), (700,),
    ),
    "a narrow layer first": (sequence(nn.Linear(3, 700), nn.Linear(700, 3)), (3,)),
    "a narrow layer first, before a nonlinearity": (
        sequence(nn.Linear(3, 700), nn.Linear(700, 3), nn.LeakyReLU(0.9), nn.Linear(3, 3)), (3,)
    ),
    "a narrow convolution first": (
        sequence(nn.Conv2d(2, 25, 1), nn.Conv2d(25, 2, 3), nn.LeakyReLU(0.9), nn.Flatten(), nn.Linear(32, 3)), (2, 6, 6)
    ),
    "convolutions in series": (
        sequence(nn.Conv2d(25, 2, 3), nn.Conv2d(2, 2, 1), nn.LeakyReLU(0.9), nn.Flatten(), nn.Linear(32, 3)), (25, 6, 6)
    ),
    "convolutions of many products in series": (
        sequence(nn.Conv2d(50, 2, 3), nn.Conv2d(2, 2, 1), nn.LeakyReLU(0.9), nn.Flatten(), nn.Linear(8, 3)), (50, 4, 4)
    ),
    "batch normalisation": (
        sequence(nn.Conv2d(25, 2, 3), nn.BatchNorm2d(2), nn.LeakyReLU(0.9), nn.Flatten(), nn.Linear(32, 3)), (25, 6, 6)
    ),
    "residual": (zoo.residual([4, 8], [1, 1], (3, 6, 6), 4), (3, 6, 6)),
    "dense rho": rho_network("dense"),
    "convolutional rho": rho_network("conv"),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_worst_errors_stay_below_the_bound(name):
    model, shape = NETWORKS[name]
    adversary = Adversary(model, shape)
    used = [
        adversary.check(size * randn(20, *shape, seed=seed).float())
        for seed, size in enumerate([1.0, 30.0])
    ]
    used.append(
        adversary.check(
            torch.cat([torch.zeros(1, *shape), 10 * randn(20, *shape).float()])
        )
    )
    assert max(at for at, _ in used) > 0.02
    assert max(over for _, over in used) > 0.005


@pytest.mark.parametrize(
    "name", ["chain", "dense layers in series", "convolutions in series", "residual"]
)
def test_worst_errors_of_sums_in_parts_stay_below_the_bound(name):
    model, shape = NETWORKS[name]
    adversary = Adversary(model, shape, longest_sum=20)
    at, over = adversary.check(randn(20, *shape).float())
    assert at > 0.005
    assert over > 0.001


@examples(1)
@given(drawn=networks, seed=st.integers(0, 999))
def test_worst_errors_of_drawn_networks(drawn, seed):
    model, shape = drawn
    Adversary(model, shape).check(randn(10, *shape, seed=seed).float())


def fitted_rho_network():
    """ρ-Lipschitz convolutions with random weights, and a last layer fitted to the digits by least squares."""
    digits = data.load("digits").train
    images, targets = (
        digits.images.float() / digits.maximum,
        nn.functional.one_hot(digits.labels).double(),
    )
    model = (
        rho_conv([(8, 3, 1, 1), (16, 4, 2, 1)], 2, 64, "aol", (1, 8, 8), 10)
        .eval()
        .requires_grad_(False)
    )
    features = model[:-1](images).double()
    features = torch.cat([features, torch.ones(len(features), 1)], dim=1)
    gram = features.T @ features + torch.eye(features.shape[1])
    solution = torch.linalg.solve(gram, features.T @ targets)
    model[-1].weight.copy_(solution[:-1].T)
    model[-1].bias.copy_(solution[-1])
    return model, images[:100]


def test_rounding_costs_rho_lipschitz_convolutions_little():
    """Their stages have several convolutions in series and paths around all nonlinearities."""
    model, x = fitted_rho_network()
    radius = lipcert.certify(model, x).radius
    unrounded = lipcert.certify(deepcopy(model).double(), x.double()).radius
    assert unrounded.median() > 0.1
    assert radius.mean() > 0.9 * unrounded.mean()


def test_stages_of_one_dense_layer_are_followed_entry_by_entry():
    model = dense_chain(50, 40, 30, 3).float()
    certifier = certifier_of(model, (50,))
    x = randn(20, 50).float()
    execution = certifier.error_pass.execute(x)
    with torch.no_grad():
        for k, layer in enumerate([model[0], model[2], model[4]]):
            value = model[: 2 * k](x).double().abs()
            made = value @ layer.weight.double().abs().T + layer.bias.double().abs()
            made *= gamma(layer.in_features + 2, torch.float32)
            found = execution.sites[:, k] if k < 2 else execution.output
            torch.testing.assert_close(
                found, made.norm(dim=1) if k < 2 else made, rtol=1e-4, atol=0
            )


def test_stages_of_one_convolution_of_few_products_are_bounded_by_norms():
    model = sequence(
        nn.Conv2d(2, 3, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
    ).float()
    certifier = certifier_of(model, (2, 6, 6))
    x = randn(20, 2, 6, 6).float()
    (edge,) = lipcert.trace(deepcopy(model).double(), (2, 6, 6)).nodes[1].edges
    norm = magnitude_norm(edge.op, torch.zeros((), dtype=torch.float64))
    expected = (
        gamma(2 * 9 + 2, torch.float32) * norm * x.double().flatten(1).norm(dim=1)
    )
    torch.testing.assert_close(
        certifier.error_pass.execute(x).sites[:, 0], expected, rtol=1e-4, atol=0
    )


def test_a_nonlinearity_of_the_logits_that_is_not_used():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x):
            logits = self.second(self.first(x))
            torch.relu(logits)
            return logits

    model = gaussian(Unused()).float()
    assert lipcert.certify(model, randn(6, 5).float()).radius.min() > 0
