"""Rows are pulled back for the nonlinearities that cost most: which ones, and what is known before stays known."""

import pytest
import torch
from torch import nn

from lipcert.local import proving, zonotopes
from lipcert.local.centres import executed_values
from lipcert.local.certify_local import LocalCertifier
from lipcert.local.deviations import follow
from lipcert.local.influence import _costs, _largest, costly_entries
from lipcert.local.points import Point, margin_rows, pulled_rows
from lipcert.local.pulling import Ball


def dense():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 4)).eval()  # fmt: skip


def convolutional():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3),
    ).eval()  # fmt: skip


def located(model, x, norm=2.0):
    certifier = LocalCertifier(model, tuple(x.shape[1:]), norm)
    values, logits = executed_values(certifier.network, x)
    return certifier.prepared, Point(values, logits.double(), logits.argmax(1))


def ball(radius, norm=2.0, count=1):
    return Ball(norm, torch.full((count,), radius, dtype=torch.float64))


def test_costs_are_those_of_the_rows_that_lines_meet():
    prepared, point = located(dense(), torch.rand(2, 5))
    state = follow(prepared, ball(0.3, count=2), dict(point.values))
    rows = margin_rows(point)
    # The last dense layer is the only thing behind the last nonlinearity.
    last = max(state.sites)
    weight = dense()[4].weight.detach().double()
    lines = state.walls.relaxations[last]
    expected = ((rows @ weight).abs() * (lines.high - lines.low)).sum(1)
    torch.testing.assert_close(_costs(state, rows)[last], expected)


def test_costs_are_what_rows_gain_where_a_nonlinearity_is_settled():
    """The constant grows by half of the costs if lines with the same slopes are moved together, in their middle."""
    prepared, point = located(dense(), torch.rand(1, 5))
    state = follow(prepared, ball(0.3), dict(point.values))
    rows = margin_rows(point)
    costs = _costs(state, rows)
    for k, lines in list(state.walls.relaxations.items()):
        before = pulled_rows(state, rows).constant.sum()
        middle = lines.middle()
        state.walls.relaxations[k] = type(lines)(
            lines.low_slope, lines.high_slope, middle, middle
        )
        gained = pulled_rows(state, rows).constant.sum() - before
        state.walls.relaxations[k] = lines
        torch.testing.assert_close(gained, costs[k].sum() / 2)


def test_the_largest_entries_make_up_a_share():
    costs = torch.tensor([[1.0, 5.0, 0.0, 4.0], [0.0, 0.0, 3.0, 0.0]])
    assert _largest(costs, 0.4).tolist() == [
        [False, True, False, False],
        [False, False, True, False],
    ]
    assert _largest(costs, 0.6)[0].tolist() == [False, True, False, True]
    assert _largest(costs, 0.95)[0].tolist() == [True, True, False, True]


def test_all_entries_are_chosen_for_everything():
    prepared, point = located(dense(), torch.rand(1, 5))
    state = follow(prepared, ball(0.3), dict(point.values))
    chosen = costly_entries(state, margin_rows(point), 1.0)
    assert set(chosen) == set(prepared.sites_of_source)
    assert all(bool(entries.all()) for entries in chosen.values())


@pytest.mark.parametrize("norm", [2.0, torch.inf])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_second_walk_keeps_what_is_known_and_bounds_what_is_executed(
    monkeypatch, norm, share
):
    """Few columns, so that much is left to rows."""
    monkeypatch.setattr("lipcert.local.prepared._ROW_ENTRIES", 0)
    monkeypatch.setattr(zonotopes, "_MOST_COLUMNS", 20)
    model, x = convolutional(), torch.rand(1, 2, 12, 12)
    prepared, point = located(model, x, norm)
    assert prepared.columned
    radius = 0.2 if norm == 2 else 0.05
    around = ball(radius, norm)
    first = follow(prepared, around, dict(point.values), columns_only=True)
    rows = margin_rows(point)
    chosen = costly_entries(first, rows, share)
    second = follow(prepared, around, dict(point.values), first, chosen)
    narrower = False
    for v in prepared.sites_of_source:
        assert (second.below[v] <= first.below[v]).all()
        assert (second.above[v] <= first.above[v]).all()
        narrower |= bool((second.below[v] < 0.9 * first.below[v]).any())
    assert narrower
    better = pulled_rows(second, rows).at(around.radius)
    assert (better >= pulled_rows(first, rows).at(around.radius)).all()
    _executed_within(prepared, second, x, radius, norm)


def _executed_within(prepared, state, x, radius, norm):
    step = torch.randn(200, *x.shape[1:], dtype=torch.float64)
    if norm == 2:
        step = step / step.flatten(1).norm(dim=1)[:, None, None, None] * radius
    else:
        step = step.sign() * radius
    values, _ = executed_values(prepared.network, (x + 0.999 * step).float())
    for v in prepared.sites_of_source:
        moved = values[v].double() - state.centre[v]
        assert (moved >= -state.below[v]).all()
        assert (moved <= state.above[v]).all()


def test_rows_prove_what_columns_do_not(monkeypatch):
    monkeypatch.setattr("lipcert.local.prepared._ROW_ENTRIES", 0)
    monkeypatch.setattr(zonotopes, "_MOST_COLUMNS", 20)
    model, x = convolutional(), torch.rand(6, 2, 12, 12)
    few = LocalCertifier(model, (2, 12, 12))
    radius = few.certify(x).radius.median().item()
    with_rows = few.certify(x, radius).radius
    monkeypatch.setattr(proving, "_SOME_ROWS", 0.0)
    monkeypatch.setattr(proving, "_ALL_ROWS", 0.0)
    columns = few.certify(x, radius).radius
    assert (with_rows >= columns).all()
    assert (with_rows >= radius).sum() > (columns >= radius).sum()


def test_rows_that_end_at_pooling_tell_nothing_of_what_is_before(monkeypatch):
    """Largest entries that are not settled, and rows that would have to bound them from above."""
    monkeypatch.setattr("lipcert.local.prepared._ROW_ENTRIES", 0)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(12),
        nn.Flatten(), nn.Linear(4, 2),
    ).eval()  # fmt: skip
    with torch.no_grad():
        # The margin is a negative multiple of a maximum, which has no line above it.
        model[-1].weight[0], model[-1].weight[1] = -1.0, 0.0
    prepared, point = located(model, torch.rand(1, 1, 12, 12))
    assert prepared.columned
    state = follow(prepared, ball(2.0), dict(point.values), columns_only=True)
    rows = margin_rows(point)
    rows = rows if int(point.prediction) == 0 else -rows
    assert not any(bool(cost.any()) for cost in _costs(state, rows).values())
    chosen = costly_entries(state, rows, 0.8)
    assert all(bool(entries.all()) for entries in chosen.values())
