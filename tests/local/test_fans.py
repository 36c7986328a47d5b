"""Mixtures of proved lines: for every activation, and at any position, the graph lies between them."""

import pytest
import torch
from torch import nn

from lipcert.local.centres import executed_values
from lipcert.local.certify_local import LocalCertifier
from lipcert.local.fans import Fan, fan_of
from lipcert.local.replaced import Replaced
from lipcert.local.replacing import replace_site
from local.test_grids import ACTIVATIONS, NAMES, intervals

POSITIONS = (0.0, 0.1, 0.25, 1 / 3, 0.5, 0.77, 1.0)


def replaced(activation: nn.Module) -> tuple[Replaced, torch.Tensor, torch.Tensor]:
    """A site over many intervals, with places ζ and rises φ(z + ζ) − φ(z), (P, B, 1) each."""
    model = nn.Sequential(nn.Linear(1, 1), activation, nn.Linear(1, 2)).double().eval()
    prepared = LocalCertifier(model, (1,)).prepared
    (site,) = prepared.exact.sites[1:-1]
    centre, below, above = intervals()
    value = site.function(centre)
    result = replace_site(
        site, centre, value, below, above, torch.zeros_like(centre), prepared
    )
    share = torch.linspace(0, 1, 201, dtype=torch.float64)[:, None, None]
    inside = (centre - below) * (1 - share) + (centre + above) * share
    inside = inside.clamp(centre - below, centre + above)
    rises = torch.stack([site.function(point) for point in inside]) - value
    return result, inside - centre, rises


def lines_at(fan: Fan, position: float, sign: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slope and intercept, (B, 1) each, as rows of ±1 meet them: y·Δ ≥ pulled·ζ + constant."""
    rows = torch.full_like(fan.start_low, float(sign))
    pulled, constant = fan.pull(rows, torch.full_like(rows, position))
    return pulled[:, 0], constant


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
def test_mixtures_and_lines_of_every_activation_hold_at_any_position(activation):
    site, places, rises = replaced(activation)
    fan = fan_of(site)
    for sign in (1, -1):
        for position in POSITIONS:
            slope, constant = lines_at(fan, position, sign)
            assert (sign * rises >= slope * places + constant).all()
            lines = fan.lines(torch.full_like(fan.start_low, position))
            pulled, proved = lines.pull(torch.full_like(fan.start_low, float(sign)))
            assert (sign * rises >= pulled[:, 0] * places + proved).all()


def test_slopes_of_a_fan_go_from_one_end_of_the_hull_to_the_other():
    site, _, _ = replaced(nn.Tanh())
    fan = fan_of(site)
    assert (fan.low_slope.diff(dim=1) >= -1e-9).all()
    assert (fan.high_slope.diff(dim=1) <= 1e-9).all()
    relu = fan_of(replaced(nn.ReLU())[0])
    assert relu.low_slope.shape[1] == 2
    torch.testing.assert_close(relu.high_slope[:, 0], relu.high_slope[:, 1])


def test_intercepts_that_are_too_tight_would_be_found():
    site, places, rises = replaced(nn.Sigmoid())
    fan = fan_of(site)
    tighter = Fan(
        fan.low_slope, fan.high_slope, fan.low + 1e-3, fan.high, fan.start_low,
        fan.start_high, site,
    )  # fmt: skip
    slope, constant = lines_at(tighter, 0.5, 1)
    assert not (rises >= slope * places + constant).all()


def test_rows_meet_the_lines_that_their_signs_ask_for():
    """Against sums over entries in a plain loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Sigmoid(), nn.Linear(5, 2)).eval()
    certifier = LocalCertifier(model, (3,))
    values, _ = executed_values(certifier.network, torch.rand(2, 3))
    site = certifier.prepared.exact.sites[1]
    centre, span = values[site.source], torch.rand(2, 5, dtype=torch.float64)
    none = torch.zeros_like(centre)
    known = centre, values[site.output], span, span, none
    fan = fan_of(replace_site(site, *known, certifier.prepared))
    rows = torch.randn(2, 4, 5, dtype=torch.float64)
    position = torch.rand(2, 4, 5, dtype=torch.float64)
    pulled, constant = fan.pull(rows, position)
    pieces = fan.low.shape[1] - 1
    for b, r in ((0, 0), (1, 3)):
        total = 0.0
        for k in range(5):
            y, t = float(rows[b, r, k]), float(position[b, r, k]) * pieces
            slopes, heights = (
                (fan.low_slope, fan.low) if y > 0 else (fan.high_slope, fan.high)
            )
            j = min(int(t), pieces - 1)
            mix = [
                float(e[b, j, k] * (1 - (t - j)) + e[b, j + 1, k] * (t - j))
                for e in (slopes, heights)
            ]
            assert abs(float(pulled[b, r, k]) - y * mix[0]) < 1e-12
            total += y * mix[1]
        assert abs(float(constant[b, r]) - total) < 1e-12
