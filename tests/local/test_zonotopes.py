"""Columns: no execution leaves the intervals that they show, and without unsettled nonlinearities these are exact."""

from math import inf, prod

import pytest
import torch
from torch import Tensor, nn

import lipcert
from lipcert.attacks import pgd
from lipcert.local.centres import executed_values
from lipcert.local.certify_local import LocalCertifier
from lipcert.local.columns import columned_nodes, pushed, single_columns
from lipcert.local.deviations import follow
from lipcert.local.points import Point
from lipcert.local.pulling import Ball
from lipcert.local.rounding_rows import rounding_by_rows
from lipcert.local.state import Deviations
from lipcert.local.windows import Scene
from lipcert.models.zoo import residual
from local.test_deviations import points_in_ball
from local.test_windows import shaken
from models import Op


def chain(*middle: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*middle, nn.Flatten(), nn.Linear(width, 3))


def difference() -> nn.Module:
    """Strides that leave a remainder, no padding, a convolution after a convolution, a difference."""
    return Op(
        lambda m, x: m.last((m.side(torch.relu(m.inner(x))) - m.inner(x).abs()).relu().flatten(1)),
        inner=nn.Sequential(nn.Conv2d(1, 3, 3, 2, 1), nn.ReLU(), nn.Conv2d(3, 4, 2)),
        side=nn.Conv2d(4, 4, 3, 1, 1), last=nn.Linear(4 * 5 * 5, 3),
    )  # fmt: skip


def dilated() -> nn.Module:
    return chain(
        nn.Conv2d(1, 3, 3, 1, 2, 2),
        nn.LeakyReLU(),
        nn.Conv2d(3, 2, 3, 2, 0, 2),
        nn.ReLU(),
        width=18,
    )


def grouped() -> nn.Module:
    first, second = nn.Conv2d(2, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 2, 1, groups=4)
    return chain(
        first,
        nn.ReLU(),
        second,
        nn.Hardtanh(-0.1, 0.1),
        nn.Conv2d(4, 2, 1),
        nn.ReLU(),
        width=50,
    )


def skipping() -> nn.Module:
    """Strides larger than kernels, so that some pixels reach nothing."""
    return chain(
        nn.Conv2d(1, 3, 2, 3), nn.ReLU(), nn.Conv2d(3, 3, 1, 2), nn.ReLU(), width=12
    )


MODELS = {
    "residual": (lambda: residual([3, 4, 5], [1, 1, 1], (2, 12, 12), 4), (2, 12, 12)),
    "difference": (difference, (1, 11, 11)),
    "dilated": (dilated, (1, 10, 10)),
    "grouped": (grouped, (2, 9, 9)),
    "skipping": (skipping, (1, 12, 12)),
}


@pytest.fixture(autouse=True)
def columns_for_all(monkeypatch):
    """Networks of any size are bounded by columns, in small tiles, and rounding is followed by rows everywhere."""
    monkeypatch.setattr("lipcert.local.prepared._ROW_ENTRIES", 0)
    monkeypatch.setattr("lipcert.local.zonotopes._TILE", 4)
    monkeypatch.setattr("lipcert.local.zonotopes._SMALL", 0.0)


def made(name: str, norm: float) -> tuple[LocalCertifier, Tensor]:
    build, shape = MODELS[name]
    torch.manual_seed(2)
    model = shaken(build())
    x = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0))
    return LocalCertifier(model, shape, norm), x


def spread(certifier: LocalCertifier, x: Tensor, radius: float) -> Deviations:
    values, _ = executed_values(certifier.network, x)
    ball = Ball(certifier.norm, torch.tensor([radius], dtype=torch.float64))
    state = follow(certifier.prepared, ball, values, columns_only=True)
    assert state.zonotope is not None
    return state


def jacobian(certifier: LocalCertifier, x: Tensor, v: int) -> Tensor:
    """(n, inputs): the derivative of a node at an input."""
    network = certifier.prepared.exact

    def value(x: Tensor) -> Tensor:
        values = {0: x}
        for u, node in enumerate(network.nodes[: v + 1]):
            index = network.site_of_output.get(u)
            if index:
                values[u] = network.sites[index].function(
                    values[network.sites[index].source]
                )
            elif node.edges:
                total = sum(edge.op.apply(values[edge.source]) for edge in node.edges)
                shift = executed[u] - sum(
                    edge.op.apply(executed[edge.source]) for edge in node.edges
                )
                values[u] = total + shift
        return values[v].flatten()

    executed, _ = executed_values(certifier.network, x)
    for u, node in enumerate(network.nodes):
        if u not in executed and node.edges:
            executed[u] = sum(
                edge.op.apply(executed[edge.source]) for edge in node.edges
            )
    return torch.autograd.functional.jacobian(value, x.double()).reshape(
        -1, x[0].numel()
    )


def steepest_points(
    certifier: LocalCertifier, x: Tensor, radius: float, v: int
) -> Tensor:
    """Where entries of a node are largest and smallest over the ball, if they were linear."""
    rows = jacobian(certifier, x, v)
    rows = rows[
        torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))[:40]
    ]
    steps = rows.sign()
    if certifier.norm == 2:
        steps = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    steps = 0.999999 * radius * torch.cat([steps, -steps]).reshape(-1, *x.shape[1:])
    return (x.double() + steps).float()


def check_inside(certifier: LocalCertifier, x: Tensor, radius: float) -> None:
    state = spread(certifier, x, radius)
    sources = sorted(
        certifier.prepared.columned & certifier.prepared.sites_of_source.keys()
    )
    points = [points_in_ball(x, certifier.norm, state.ball.radius, 50)]
    points += [steepest_points(certifier, x, radius, v) for v in sources]
    moved, _ = executed_values(certifier.network, torch.cat(points))
    for v in sources:
        below, above = state.zonotope.interval(v)
        deviation = moved[v] - state.centre[v]
        assert (deviation <= above).all(), v
        assert (deviation >= -below).all(), v


@pytest.mark.parametrize("norm", [2, inf])
@pytest.mark.parametrize("name", MODELS)
def test_no_execution_leaves_the_intervals_of_columns(name, norm):
    certifier, x = made(name, norm)
    for radius in (1e-5, 0.01, 0.2, 2.0):
        check_inside(certifier, x, radius if norm == 2 else radius / 8)


def test_columns_that_pass_nonlinearities_unchanged_would_be_found(monkeypatch):
    certifier, x = made("residual", 2)
    monkeypatch.setattr("lipcert.local.columns.Bundle.times", lambda self, slopes: self)
    with pytest.raises(AssertionError):
        check_inside(certifier, x, 0.01)


def test_columns_beyond_the_most_are_counted_as_errors(monkeypatch):
    monkeypatch.setattr("lipcert.local.zonotopes._MOST_COLUMNS", 5)
    certifier, x = made("residual", 2)
    check_inside(certifier, x, 0.1)
    assert spread(certifier, x, 0.1).zonotope.column_count == 5


@pytest.mark.parametrize("norm", [2, inf])
@pytest.mark.parametrize("name", MODELS)
def test_without_unsettled_nonlinearities_intervals_are_those_of_the_derivative(
    name, norm
):
    certifier, x = made(name, norm)
    radius = 1e-5
    zonotope = spread(certifier, x, radius).zonotope
    for v in certifier.prepared.columned & certifier.prepared.sites_of_source.keys():
        rows = jacobian(certifier, x, v)
        exact = radius * (rows.norm(dim=1) if norm == 2 else rows.abs().sum(1))
        torch.testing.assert_close(
            zonotope.sizes[v].flatten(), exact, rtol=1e-4, atol=1e-12
        )


@pytest.mark.parametrize("largest", [1, 1 << 20])
def test_rows_bound_rounding_between_what_reaches_an_entry_and_the_sum_of_all(
    largest, monkeypatch
):
    monkeypatch.setattr("lipcert.local.rounding_rows._LARGEST_WINDOW", largest)
    certifier, x = made("residual", 2)
    zonotope, network = spread(certifier, x, 0.02).zonotope, certifier.prepared.exact
    v = max(zonotope.prepared.columned & zonotope.prepared.sites_of_source.keys())
    scene = Scene(network, v, certifier.prepared.frames(v))
    wanted = torch.ones(network.nodes[v].shape, dtype=torch.bool)
    tables = (zonotope.own_errors, zonotope.errors, zonotope.slopes)
    bounds = rounding_by_rows(scene, *tables, wanted)
    every = (
        torch.eye(prod(network.nodes[v].shape))
        .double()
        .reshape(-1, *network.nodes[v].shape)
    )
    rows, exact = {v: every}, torch.zeros(len(every), dtype=torch.float64)
    for w in range(v, 0, -1):
        if w not in rows:
            continue
        y = rows.pop(w)
        exact += (y.abs() * zonotope.own_errors[w]).flatten(1).sum(1)
        index = network.site_of_output.get(w)
        if index:
            source = network.sites[index].source
            rows[source] = rows.get(source, 0) + y * zonotope.slopes[w]
        for edge in network.nodes[w].edges:
            rows[edge.source] = rows.get(edge.source, 0) + edge.op.adjoint(y)
    assert (bounds >= exact * (1 - 1e-9)).all()
    if largest > 1:
        torch.testing.assert_close(bounds, exact, rtol=1e-3, atol=1e-20)
    else:
        assert (bounds > exact * 1.01).any()


def test_what_one_entry_does_stays_inside_its_rectangle():
    model = nn.Sequential(
        nn.Conv2d(1, 1, 3, 2, 1), nn.ReLU(), nn.Conv2d(1, 1, 3), nn.ReLU()
    ).eval()
    op = (
        LocalCertifier(chain(*model, width=196), (1, 32, 32))
        .prepared.exact.nodes[1]
        .edges[0]
        .op
    )
    at = torch.tensor([8, 11])
    bundle = pushed(single_columns(0 * at, at, at, torch.ones(2), 1, ball=True), op)
    assert (bundle.start, bundle.stop) == ((4, 4), (7, 7))
    unit = torch.zeros(2, 1, 32, 32)
    unit[torch.arange(2), 0, at, at] = 1.0
    whole = op.apply(unit.double())
    torch.testing.assert_close(
        bundle.values.double(),
        whole[(slice(None), *bundle.seen())],
        rtol=1e-5,
        atol=1e-7,
    )
    assert int((whole != 0).sum()) == int((bundle.values != 0).sum())


def test_columns_are_not_followed_through_curves_or_dense_layers():
    curved = chain(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.GELU(), width=32
    )
    assert LocalCertifier(curved.eval(), (1, 8, 8)).prepared.columned == set()
    dense = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 5),
        nn.ReLU(),
        nn.Linear(5, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )
    assert (
        columned_nodes(LocalCertifier(dense.eval(), (1, 8, 8)).prepared.exact) == set()
    )


@pytest.mark.parametrize("norm", [2, inf])
def test_radii_by_columns_withstand_attacks_and_are_no_smaller_than_by_rows(
    norm, monkeypatch
):
    torch.manual_seed(0)
    model = shaken(residual([4, 6], [1, 1], (1, 12, 12), 3))
    x = torch.rand(3, 1, 12, 12)
    certificates = lipcert.certify_local(model, x, norm=norm)
    assert (certificates.radius > 0).all()
    if norm == 2:
        for one, certificate in zip(x, certificates.radius.tolist(), strict=True):
            label = model(one[None]).argmax(1)
            assert not pgd(
                model, one[None], label, 0.999 * certificate, steps=40
            ).success.any()
    monkeypatch.setattr("lipcert.local.prepared._ROW_ENTRIES", inf)
    by_rows = lipcert.certify_local(model, x, norm=norm)
    assert (certificates.radius >= 0.9 * by_rows.radius).all()


def test_where_columns_do_not_suffice_rows_prove_more_at_a_given_radius(monkeypatch):
    monkeypatch.setattr("lipcert.local.zonotopes._MOST_COLUMNS", 5)
    certifier, x = made("residual", 2)
    values, logits = executed_values(certifier.network, x)
    point = Point(values, logits.double(), logits.argmax(1))
    gained = 0
    for size in (0.6, 0.8, 1.0, 1.6):
        ball = torch.tensor([size], dtype=torch.float64)
        quick = certifier.prove(point, ball)
        patient = certifier.prove(point, ball, patient=True)
        assert patient >= quick
        assert certifier.certify(x, size).radius[0] == patient[0]
        gained += int(patient > 1.01 * quick)
    assert gained
