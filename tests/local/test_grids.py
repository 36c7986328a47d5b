"""Lines over intervals: for every activation, and for any slope, the graph lies between them."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import lipcert
from lipcert.local.grids import Grid, grid
from lipcert.network.build import normal_form
from lipcert.network.normal_form import Site
from models import Op

ACTIVATIONS = [
    nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.5, 2.0), nn.LeakyReLU(0.2), nn.LeakyReLU(-0.3), nn.LeakyReLU(1.5), nn.PReLU(),
    nn.PReLU(init=-2.0), nn.ELU(), nn.ELU(2.0), nn.ELU(-0.4), nn.CELU(), nn.CELU(0.3), nn.CELU(3.0), nn.SELU(),
    nn.Softplus(threshold=40.0), nn.Softplus(beta=3.0, threshold=50.0), nn.Sigmoid(), nn.LogSigmoid(), nn.Tanh(),
    nn.Softsign(), nn.Softshrink(), nn.Softshrink(0.1), nn.Hardsigmoid(), nn.GELU(), nn.GELU(approximate="tanh"),
    nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.RReLU(0.1, 0.3), nn.Threshold(0.5, 0.5), nn.SELU(inplace=True),
    nn.ELU(inplace=True), Op(lambda m, x: torch.sin(x)), Op(lambda m, x: torch.cos(x)), Op(lambda m, x: torch.atan(x)),
    Op(lambda m, x: torch.asinh(x)), Op(lambda m, x: x.abs()), Op(lambda m, x: x.clamp(-0.3, 1.2)),
    Op(lambda m, x: x.clamp(min=0.4)), Op(lambda m, x: torch.maximum(x, m.limit), limit=torch.tensor([0.3])),
    Op(lambda m, x: torch.minimum(x, m.limit), limit=torch.tensor([-0.3])),
    Op(lambda m, x: x.clamp(m.low, m.high), low=torch.tensor([-0.3]), high=torch.tensor([0.1])),
]  # fmt: skip
NAMES = [
    f"function {k}" if isinstance(module, Op) else str(module)
    for k, module in enumerate(ACTIVATIONS)
]


def site_of(activation: nn.Module) -> Site:
    """The site of an activation, in float64."""
    model = nn.Sequential(nn.Linear(1, 1), activation, nn.Linear(1, 2)).double().eval()
    network = normal_form(lipcert.trace(model, (1,)).program, exact=True)
    (site,) = network.sites[1:-1]
    return site


def intervals() -> tuple[Tensor, Tensor, Tensor]:
    """Centres and widths of many magnitudes, (B, 1) each."""
    generator = torch.Generator().manual_seed(0)
    scale = 10.0 ** (
        5 * torch.rand(120, 3, generator=generator, dtype=torch.float64) - 3
    )
    centre = scale[:, 0] * torch.randn(120, generator=generator, dtype=torch.float64)
    below, above = scale[:, 1:].unbind(1)
    below[::10], above[::7] = 0.0, 0.0
    return centre[:, None], below[:, None].clone(), above[:, None].clone()


def graph_of(site: Site) -> tuple[Grid, Tensor, Tensor]:
    """The grid, and many places ζ with the rises φ(z + ζ) − φ(z), (P, B, 1) each."""
    centre, below, above = intervals()
    value = site.function(centre)
    share = torch.linspace(0, 1, 401, dtype=torch.float64)[:, None, None]
    inside = (centre - below) * (1 - share) + (centre + above) * share
    inside = inside.clamp(centre - below, centre + above)
    near = torch.tensor([-3.0, -0.5, -0.3, 0.0, 0.1, 0.5, 3.0], dtype=torch.float64)[
        :, None, None
    ]
    points = torch.cat(
        [inside, near.expand(-1, *centre.shape).clamp(centre - below, centre + above)]
    )
    rises = torch.stack([site.function(point) for point in points]) - value
    return grid(site, centre, value, below, above), points - centre, rises


@cache
def graph_of_activation(activation: nn.Module) -> tuple[Grid, Tensor, Tensor]:
    """Computed once for each of them: two tests read it."""
    return graph_of(site_of(activation))


def check_between(graph: Grid, places: Tensor, rises: Tensor) -> None:
    lowest, highest = graph.range()
    assert ((rises >= lowest) & (rises <= highest)).all()
    for sign in (-1, 1):
        generator = torch.Generator().manual_seed(sign + 1)
        best = graph.steep(sign)
        random = (
            2 * torch.rand(best.shape, generator=generator, dtype=torch.float64) - 1
        ) * graph.steepest
        for slope in (best, random, torch.zeros_like(best)):
            assert (rises <= slope * places + graph.high(slope[:, None])[:, 0]).all()
            assert (rises >= slope * places + graph.low(slope[:, None])[:, 0]).all()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
def test_lines_of_every_activation_hold_for_any_slope(activation):
    check_between(*graph_of_activation(activation))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
def test_lines_are_close_to_the_graph_at_the_middle(activation):
    """Over intervals up to 4 wide, lines could move by at most 4 % of the width times the largest slope."""
    graph, places, rises = graph_of_activation(activation)
    width = graph.places[-1] - graph.places[0]
    for sign, intercept in ((1, graph.high), (-1, graph.low)):
        slope = graph.steep(sign)
        dense = (sign * (rises - slope * places)).amax(0)
        gap = sign * intercept(slope[:, None])[:, 0] - dense
        assert (gap <= 0.04 * graph.steepest * width + 1e-9)[width <= 4].all()


def test_piecewise_linear_activations_have_exact_lines():
    for activation in (nn.ReLU(), nn.LeakyReLU(0.1), nn.Hardtanh()):
        graph, places, rises = graph_of(site_of(activation))
        for slope in (graph.steep(1), graph.steep(-1)):
            for intercept, dense in (
                (graph.high(slope[:, None])[:, 0], (rises - slope * places).amax(0)),
                (graph.low(slope[:, None])[:, 0], (rises - slope * places).amin(0)),
            ):
                width = graph.places[-1] - graph.places[0]
                assert (
                    (intercept - dense).abs() <= 0.003 * width + 1e-9
                ).all()  # kinks between sampled points


def test_relu_gets_the_lines_of_crown():
    site = site_of(nn.ReLU())
    centre = torch.tensor([[1.0], [1.0], [-1.0], [2.0], [-2.0]], dtype=torch.float64)
    radius = torch.tensor([[3.0], [1.5], [2.0], [1.0], [1.0]], dtype=torch.float64)
    graph = grid(site, centre, centre.clamp(min=0), radius, radius)
    chord = torch.tensor([4 / 6, 2.5 / 3, 1 / 4, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(graph.steep(1)[:, 0], chord)
    torch.testing.assert_close(
        graph.steep(-1)[:, 0],
        torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64),
    )


def test_a_rule_without_a_curvature_is_bounded_by_its_slopes():
    @lipcert.register_rule(torch.erf)
    def erf_rule(call, x):
        return lipcert.Slope(0.0, 1.1283791670955128, ulps=4.0)

    site = site_of(Op(lambda m, x: torch.erf(x)))
    assert site.slope.curvature is None
    check_between(*graph_of(site))


def test_a_curvature_that_is_too_small_would_be_found():
    site = site_of(nn.Tanh())
    false = Site(
        site.name,
        site.source,
        site.output,
        lipcert.Slope(0.0, 1.0, ulps=4.0, curvature=0.0),
        site.function,
    )
    with pytest.raises(AssertionError):
        check_between(*graph_of(false))


@pytest.mark.parametrize("function", [torch.sigmoid, torch.sin, torch.relu])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_best_line_is_an_edge_of_the_hull(function, sign):
    generator = torch.Generator().manual_seed(0)
    points = 4 * torch.randn(21, 50, generator=generator, dtype=torch.float64)
    points = points.sort(0).values
    values, none = function(points), torch.zeros(50, dtype=torch.float64)
    graph = Grid(points, values, none, torch.zeros(()), 1.0)
    middle = (points[0] + points[-1]) / 2

    def height(slope):
        return (sign * (values - slope * (points - middle))).amax(0)

    # All chords, one by one: no slope of the hull is better at the midpoint.
    best = torch.full_like(none, torch.inf)
    for i in range(21):
        for j in range(i + 1, 21):
            chord = (values[j] - values[i]) / (points[j] - points[i])
            best = torch.minimum(best, height(chord))
    reached = height(graph.steep(sign))
    assert ((reached - best).abs() <= 1e-12 + 0.01 * best.abs()).float().mean() > 0.95
    assert (reached <= best + 0.1).all()
