"""Slopes that are searched for together: intervals and radii hold, and are no worse than without."""

from math import inf

import pytest
import torch
from torch import nn

import lipcert
from lipcert.attacks import pgd
from lipcert.local.centres import executed_values
from lipcert.local.certify_local import LocalCertifier
from lipcert.local.deviations import follow
from lipcert.local.joint_search import search_jointly
from lipcert.local.points import Point, margin_rows, pulled_rows
from lipcert.local.pulling import Ball
from lipcert.local.sharpening import Effort
from local.test_deviations import points_in_ball
from models import named_models


def deep(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(6, 16), activation()]
    for _ in range(4):
        layers += [nn.Linear(16, 16), activation()]
    model = nn.Sequential(*layers, nn.Linear(16, 3)).eval()
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=1.4 * layer.in_features**-0.5)
    return model


CASES = {
    "relu": (lambda: (deep(), (6,)), 0.3),
    "sigmoid": (lambda: (deep(nn.Sigmoid), (6,)), 0.5),
    "gelu chain": (lambda: named_models()["gelu chain"], 0.3),
    "two branches": (lambda: named_models()["two branches"], 0.3),
    "relu then max-pool": (lambda: named_models()["relu then max-pool"], 0.3),
}


@pytest.mark.parametrize("norm", [2, inf])
@pytest.mark.parametrize("name", CASES)
def test_executions_stay_inside_the_intervals_and_above_the_bounds_of_a_search(
    name, norm
):
    build, size = CASES[name]
    model, shape = build()
    certifier = LocalCertifier(model.float(), shape, norm)
    x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
    values, logits = executed_values(certifier.network, x)
    point = Point(values, logits.double(), logits.argmax(1))
    radius = torch.tensor([size if norm == 2 else size / 4], dtype=torch.float64)
    state = follow(certifier.prepared, Ball(norm, radius), dict(values))
    rows = margin_rows(point)
    before = pulled_rows(state, rows)
    after = search_jointly(state, rows, before, 0 * point.margins() - 1.0, steps=8)
    assert (after.at(radius) >= before.at(radius)).all()
    moved, other = executed_values(
        certifier.network, points_in_ball(x, norm, radius, 400)
    )
    for site in certifier.prepared.exact.sites[1:-1]:
        v = site.source
        if v in moved:
            assert not (moved[v] - state.centre[v] > state.above[v]).any()
            assert not (moved[v] - state.centre[v] < -state.below[v]).any()
    change = (other.double() - point.logits) @ rows[0].T
    assert (change >= after.at(radius)).all()


def test_a_search_proves_more_than_slopes_for_the_last_rows_and_attacks_find_nothing():
    model = deep()
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))
    plain = LocalCertifier(model, (6,)).certify(x, 0.3)
    searched = LocalCertifier(model, (6,), effort=Effort(inner_steps=10)).certify(
        x, 0.3
    )
    assert (searched.radius >= plain.radius).all()
    assert (searched.radius > 1.01 * plain.radius).any()
    found = pgd(model, x, searched.prediction, 0.3, steps=40, pixels=(-9.0, 9.0))
    assert (found.distance >= searched.radius).all()


def test_a_search_for_too_many_slopes_is_left_out(monkeypatch):
    model, x = deep(), torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    plain = LocalCertifier(model, (6,)).certify(x, 0.2)
    monkeypatch.setattr("lipcert.local.joint_search._MOST_ENTRIES", 10)
    searched = LocalCertifier(model, (6,), effort=Effort(inner_steps=20)).certify(
        x, 0.2
    )
    torch.testing.assert_close(searched.radius, plain.radius)


def test_a_nonlinearity_behind_another_one_has_no_rows_of_its_own():
    layers = [nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(8, 3)).eval()
    x = torch.rand(3, 6)
    effort = lipcert.Effort(last_steps=4, inner_steps=3)
    searched = lipcert.certify_local(model, x, effort=effort).radius
    assert (searched >= 0.97 * lipcert.certify_local(model, x).radius).all()
