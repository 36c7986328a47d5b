"""Intervals over balls: no execution at any point of a ball leaves them."""

from math import inf, prod

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import drawn
from helpers import examples, traced
from lipcert.layers import GroupSort, MaxMin
from lipcert.local.centres import executed_values
from lipcert.local.certify_local import LocalCertifier
from lipcert.local.deviations import follow
from lipcert.local.pulling import Ball
from models import Op, named_models

NAMED = named_models()


def points_in_ball(x: Tensor, norm: float, radius: Tensor, count: int) -> Tensor:
    """(count·B, …): points of the balls around inputs, close to the sphere and in the type of the inputs."""
    generator = torch.Generator().manual_seed(0)
    size = (count, *x.shape)
    noise = torch.randn(size, generator=generator, dtype=torch.float64)
    if norm == inf:
        noise = (
            noise.sign()
            * torch.rand(size, generator=generator, dtype=torch.float64) ** 0.1
        )
    else:
        noise = noise / noise.flatten(2).norm(dim=2).reshape(
            count, len(x), *(1,) * (x.dim() - 1)
        )
    step = 0.98 * radius.reshape(-1, *(1,) * (x.dim() - 1)) * noise
    return (x.double() + step).to(x.dtype).flatten(0, 1)


def check_intervals(model: nn.Module, shape: tuple[int, ...], norm: float) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    certifier = LocalCertifier(traced(model, shape, local=True), shape, norm)
    values, _ = executed_values(certifier.network, x)
    for scale in (1e-4, 0.02, 0.7):
        radius = scale * torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
        state = follow(certifier.prepared, Ball(norm, radius), dict(values))
        other, _ = executed_values(
            certifier.network, points_in_ball(x, norm, radius, 60)
        )
        for v, moved in other.items():
            deviation = moved.unflatten(0, (60, 3)) - state.centre[v]
            length = deviation.flatten(2).norm(dim=2)
            # Where a bound is not a number nothing is known, and nothing is certified.
            assert not (deviation > state.above[v]).any(), (v, scale)
            assert not (deviation < -state.below[v]).any(), (v, scale)
            assert not (deviation.abs() > state.reach[v]).any(), (v, scale)
            assert not (length > state.norms[v] * (1 + 1e-9)).any(), (v, scale)
            if scale < 0.01:
                assert torch.isfinite(state.reach[v]).all()


@pytest.mark.parametrize("norm", [2, inf])
@pytest.mark.parametrize("name", NAMED)
def test_named_networks_stay_inside_their_intervals(name, norm):
    model, shape = NAMED[name]
    check_intervals(model.float(), shape, norm)


@given(network=drawn.networks)
@examples(0.8)
def test_drawn_networks_stay_inside_their_intervals(network):
    model, shape = network
    check_intervals(model.float(), shape, 2)
    check_intervals(model, shape, inf)


MIXED = {
    "max-pooling": nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)
    ),
    "overlapping": nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.MaxPool2d(3, 1), nn.Flatten(), nn.Linear(48, 3)
    ),
    "adaptive": nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    ),
    "maxmin": nn.Sequential(
        nn.Conv2d(1, 4, 3), MaxMin(), nn.Flatten(), nn.Linear(144, 3)
    ),
    "groupsort": nn.Sequential(
        nn.Flatten(), nn.Linear(64, 9), GroupSort(3), nn.Linear(9, 3)
    ),
    "amin": Op(
        lambda m, x: m.out(m.conv(x).amin(1).flatten(1)),
        conv=nn.Conv2d(1, 4, 3),
        out=nn.Linear(36, 3),
    ),
    "maximum": Op(
        lambda m, x: torch.maximum(m.a(x.flatten(1)), m.b(x.flatten(1))),
        a=nn.Linear(64, 3),
        b=nn.Linear(64, 3),
    ),
    "softmax": Op(
        lambda m, x: m.b(m.a(x.flatten(1)).softmax(1)),
        a=nn.Linear(64, 5),
        b=nn.Linear(5, 3),
    ),
    "logsumexp": Op(
        lambda m, x: m.b(m.a(x.flatten(1)).reshape(-1, 4, 5).logsumexp(2)),
        a=nn.Linear(64, 20),
        b=nn.Linear(4, 3),
    ),
}


@pytest.mark.parametrize("norm", [2, inf])
@pytest.mark.parametrize("name", MIXED)
def test_networks_that_mix_entries_stay_inside_their_intervals(name, norm):
    torch.manual_seed(3)
    for parameter in MIXED[name].parameters():
        nn.init.normal_(parameter, std=prod(parameter.shape[1:]) ** -0.5)
    check_intervals(MIXED[name].eval(), (1, 8, 8), norm)


def test_intervals_that_are_too_narrow_would_be_found(monkeypatch):
    model, _ = named_models()["chain"]
    monkeypatch.setattr(
        "lipcert.local.funnels._triangle", lambda matrix: 0.5 * matrix[:, : len(matrix)]
    )
    monkeypatch.setattr(
        "lipcert.local.prepared.Prepared.prefix_norms", lambda self, v, norm: None
    )
    model = model.float()
    with pytest.raises(AssertionError):
        check_intervals(
            nn.Sequential(nn.Linear(9, 4), nn.ReLU(), *model).eval(), (9,), 2
        )
