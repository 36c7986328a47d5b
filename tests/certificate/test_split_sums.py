"""Long sums in parts: the same function, smaller errors, and what runs is what was certified."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import lipcert
from helpers import randn
from lipcert.certificate import Certifier
from lipcert.errors import OptionError
from lipcert.models.loaded import LoadedModel
from lipcert.network.splitting import split_sums
from models import gaussian


def conv_net():
    layers = [
        nn.Conv2d(20, 12, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(12, 8, 3, 2, padding="valid"),
        nn.ReLU(),
        nn.Flatten(),
    ]
    return (
        gaussian(nn.Sequential(*layers, nn.Linear(32, 40), nn.Tanh(), nn.Linear(40, 4)))
        .float()
        .eval()
    )


def longest(network):
    return max(edge.op.terms for node in network.nodes for edge in node.edges)


@pytest.mark.parametrize("products", [9, 30, 144])
def test_no_sum_is_longer_than_allowed_and_the_function_is_the_same(products):
    model = conv_net()
    bound = lipcert.bound(model, (20, 6, 6))
    certifier = Certifier(model, bound, products)
    assert (
        longest(certifier.network)
        <= products
        < longest(lipcert.trace(model, (20, 6, 6)))
    )
    x = randn(5, 20, 6, 6).float()
    executed = certifier.network.program.run(x)
    exact = deepcopy(model).double()(x.double())
    assert torch.allclose(
        executed.double(), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item()
    )
    wide = split_sums(
        lipcert.trace(deepcopy(model).double(), (20, 6, 6)).program, products
    )
    assert torch.allclose(
        wide.run(x.double()), exact, rtol=1e-12, atol=1e-12 * exact.abs().max().item()
    )


def test_radii_lie_between_those_of_float32_and_float64():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 5)).eval()
    x = torch.rand(50, 1024)
    plain = lipcert.certify(model, x).radius
    split = lipcert.certify(model, x, longest_sum=128).radius
    exact = lipcert.certify(deepcopy(model).double(), x.double()).radius
    assert (plain <= split).all()
    assert (split <= exact * (1 + 1e-6)).all()
    assert (exact - split).mean() < 0.4 * (exact - plain).mean()


def test_the_classifier_runs_the_parts():
    model = conv_net()
    bound = lipcert.bound(model, (20, 6, 6))
    classifier = lipcert.CertifiedClassifier(model, bound, longest_sum=9)
    x = randn(6, 20, 6, 6).float()
    logits, radius = classifier(x)
    loaded = LoadedModel(model, (20, 6, 6), "net", longest_sum=9)
    assert loaded.execution == "float32-split"
    assert torch.equal(logits, loaded.executed(x))
    assert (radius <= lipcert.certify(model, x, bound, longest_sum=9).radius).all()


def test_grouped_and_short_sums_stay_as_they_are():
    model = nn.Sequential(
        nn.Conv2d(32, 32, 3, groups=8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
    ).eval()
    program = lipcert.trace(model, (32, 3, 3)).program
    targets = [
        str(node.target)
        for node in split_sums(program, 36).graph.nodes
        if node.op == "call_function"
    ]
    assert targets == [
        "aten.conv2d.default",
        "aten.relu.default",
        "aten.flatten.using_ints",
        "aten.linear.default",
    ]


@pytest.mark.parametrize("products", [0, -1, 2.5])
def test_refused_lengths(products):
    with pytest.raises(OptionError, match=r"longest_sum is .*, expected 1 or more"):
        lipcert.certify(nn.Linear(4, 3).eval(), torch.rand(2, 4), longest_sum=products)
