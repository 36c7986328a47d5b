"""Slope intervals: every slope lies inside, the ends are attained, and four intervals are proved on a grid."""

from dataclasses import dataclass
from math import inf, nan, pi, sqrt

import pytest
import torch
from torch import Tensor, nn

import lipcert
from helpers import randn
from lipcert.errors import OptionError, UnsupportedError
from lipcert.network import slopes
from lipcert.network.slopes import Slope
from models import Op

ACTIVATIONS = {
    nn.ReLU(): (0.0, 1.0),
    nn.ReLU6(): (0.0, 1.0),
    nn.Hardtanh(-0.5, 2.0): (0.0, 1.0),
    nn.LeakyReLU(0.2): (0.2, 1.0),
    nn.LeakyReLU(-0.3): (-0.3, 1.0),
    nn.LeakyReLU(1.5): (1.0, 1.5),
    nn.PReLU(): (0.25, 1.0),
    nn.PReLU(init=-2.0): (-2.0, 1.0),
    nn.PReLU(init=3.0): (1.0, 3.0),
    nn.ELU(): (0.0, 1.0),
    nn.ELU(0.5): (0.0, 1.0),
    nn.ELU(2.0): (0.0, 2.0),
    nn.ELU(-0.4): (-0.4, 1.0),
    nn.CELU(): (0.0, 1.0),
    nn.CELU(3.0): (0.0, 1.0),
    nn.SELU(): (0.0, 1.7580993408473766),
    nn.Softplus(threshold=40.0): (0.0, 1.0),
    nn.Softplus(beta=3.0, threshold=50.0): (0.0, 1.0),
    nn.Softplus(beta=0.5, threshold=40.0): (0.0, 1.0),
    nn.Sigmoid(): (0.0, 0.25),
    nn.LogSigmoid(): (0.0, 1.0),
    nn.Tanh(): (0.0, 1.0),
    nn.Softsign(): (0.0, 1.0),
    nn.Softshrink(): (0.0, 1.0),
    nn.Hardsigmoid(): (0.0, 1 / 6),
    nn.GELU(): (-0.128904145, 1.128904145),
    nn.GELU(approximate="tanh"): (-0.128993069, 1.128993069),
    nn.SiLU(): (-0.099839320, 1.099839320),
    nn.Mish(): (-0.112526122, 1.088498161),
    nn.Hardswish(): (-0.5, 1.5),
    nn.RReLU(0.1, 0.3): (0.2, 1.0),
    nn.Threshold(0.5, 0.5): (0.0, 1.0),
    Op(lambda m, x: torch.sin(x)): (-1.0, 1.0),
    Op(lambda m, x: torch.cos(x)): (-1.0, 1.0),
    Op(lambda m, x: torch.atan(x)): (0.0, 1.0),
}
NAMES = [
    f"function {k}" if isinstance(module, Op) else str(module)
    for k, module in enumerate(ACTIVATIONS)
]


DOUBLE = nn.Linear(1, 1)  # has a type, which activations have not


@pytest.mark.parametrize(("activation", "expected"), ACTIVATIONS.items(), ids=NAMES)
def test_interval_contains_every_slope_and_is_attained(activation, expected):
    model = nn.Sequential(activation, DOUBLE).double().eval()
    network = lipcert.trace(model, (1,))
    site = network.sites[1]
    assert site.slope.elementwise
    assert (
        len(network.nodes) == 3
    )  # the input, the activation alone, and the dense layer
    alpha, beta = (
        end.item() if isinstance(end, Tensor) else end for end in site.slope.interval()
    )
    assert (alpha, beta) == pytest.approx(
        expected, abs=5e-7
    )  # with room for numbers that torch has in float32
    step = 2.0**-11
    with torch.no_grad():
        values = activation(torch.arange(-200, 200, step, dtype=torch.float64)[:, None])
    quotients = values.diff(dim=0) / step
    assert quotients.min() >= alpha - 1e-9
    assert quotients.max() <= beta + 1e-9
    assert quotients.min() <= alpha + 1e-3
    assert quotients.max() >= beta - 1e-3


def test_tanhshrink_is_a_difference_with_the_same_constant():
    """x − tanh(x) has slopes in [0, 1]; as x/2 − (tanh(x) − x/2) it is bounded by 1/2 + 1/2."""
    model = nn.Sequential(nn.Tanhshrink(), nn.Linear(1, 1)).double().eval()
    assert [site.name for site in lipcert.trace(model, (1,)).sites] == [
        "input",
        "0",
        "output",
    ]
    bound = lipcert.bound(model, (1,), target="network")
    assert float(bound.value) == pytest.approx(abs(model[1].weight.item()), rel=1e-6)


def test_softplus_jumps_where_torch_switches_to_the_identity():
    """By log(1 + e^−threshold)/beta, which float32 rounds away at the default threshold of 20, and float64 does not."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Softplus())
    assert lipcert.trace(model, (1,)).sites[1].slope.interval() == (0.0, 1.0)
    with pytest.raises(
        UnsupportedError,
        match=r"1 \(Softplus\): threshold=20.0 makes a jump.*threshold=40",
    ):
        lipcert.trace(model.double(), (1,))
    x = torch.tensor([20.0, 20.0 + 1e-9], dtype=torch.float64)
    below, above = nn.functional.softplus(x)
    assert below > above


def test_absolute_value():
    assert lipcert.trace(Op(lambda m, x: x.abs()), (1,)).sites[1].slope.interval() == (
        -1.0,
        1.0,
    )


def test_prelu_per_channel_has_the_hull_of_its_slopes_and_follows_the_weights():
    activation = nn.PReLU(3).double()
    activation.weight.data = torch.tensor([0.1, -0.4, 0.3], dtype=torch.float64)
    slope = lipcert.trace(activation, (3, 2)).sites[1].slope
    assert [end.item() for end in slope.interval()] == [-0.4, 1.0]
    assert [end.item() for end in slope.sector()] == [0.3, 0.7]
    activation.weight.data[0] = 2.5
    assert [end.item() for end in slope.interval()] == [-0.4, 2.5]
    assert slope.lipschitz().item() == 2.5
    slope.lipschitz().backward()
    assert activation.weight.grad.tolist() == [1.0, 0.0, 0.0]


@dataclass(frozen=True)
class Smooth:
    """The derivative f′ of an activation, with |f‴| ≤ third everywhere.

    For |x| ≥ 20, f′ is within 1e-6 of 0 (left) and 1 (right): |f′(x) − [x > 0]| ≤ 2(1 + |x|)·exp(−|x|) for all four.
    """

    derivative: object
    third: float


def _gelu(x: Tensor) -> Tensor:
    density = torch.exp(-x.square() / 2) / sqrt(2 * pi)
    return torch.special.erfc(-x / sqrt(2)) / 2 + x * density


def _gelu_tanh(x: Tensor) -> Tensor:
    k, a = sqrt(2 / pi), 0.044715
    t = torch.tanh(k * (x + a * x**3))
    return (1 + t) / 2 + x / 2 * (1 - t.square()) * k * (1 + 3 * a * x.square())


def _silu(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s + x * s * (1 - s)


def _mish(x: Tensor) -> Tensor:
    w = torch.exp(x)  # tanh(softplus(x)) = 1 − 2/q
    q, dq = w * w + 2 * w + 2, 2 * w * w + 2 * w
    return (w * w + 2 * w) / q + 2 * x * dq / q.square()


PROVED = {
    # f‴ = x(x²−4)φ(x); |x|³φ ≤ 0.47 and 4|x|φ ≤ 0.97
    "GELU": (slopes.GELU, Smooth(_gelu, 1.5)),
    # ½·sech²(u)·[3(|u″| + 2u′²) + |x|(|u‴| + 6|u′u″| + 4|u′|³)] with sech²(u) ≤ min(1, 4e^{−2|u|})
    "GELU_TANH": (slopes.GELU_TANH, Smooth(_gelu_tanh, 4.5)),
    # f‴ = 3σ″ + xσ‴; |σ″| ≤ 0.097 and |xσ‴| ≤ |x|σ′ ≤ |x|e^{−|x|} ≤ 0.37
    "SILU": (slopes.SILU, Smooth(_silu, 1.0)),
    # g = 1 − 2/q: |g″| ≤ 24/q ≤ 12; |xg‴| ≤ 208·|x|/q ≤ 39 for x > 0 and ≤ 33 for x < 0; f‴ = 3g″ + xg‴
    "MISH": (slopes.MISH, Smooth(_mish, 80.0)),
}
ROUNDING = 1e-15


@pytest.mark.parametrize("name", PROVED)
def test_interval_is_proved_on_a_grid(name):
    slope, smooth = PROVED[name]
    highest = _supremum(smooth.derivative, smooth.third)
    lowest = -_supremum(lambda x: -smooth.derivative(x), smooth.third)
    assert slope.alpha < -1e-6 < 1 + 1e-6 < slope.beta  # the tails
    assert slope.alpha <= lowest
    assert highest <= slope.beta
    assert lowest - slope.alpha < 1e-6
    assert slope.beta - highest < 1e-6


@pytest.mark.parametrize("name", PROVED)
def test_the_derivative_of_the_proof_is_that_of_the_activation(name):
    activation = {
        "GELU": nn.GELU(),
        "GELU_TANH": nn.GELU("tanh"),
        "SILU": nn.SiLU(),
        "MISH": nn.Mish(),
    }[name]
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64, requires_grad=True)
    (derivative,) = torch.autograd.grad(activation(x).sum(), x)
    torch.testing.assert_close(
        PROVED[name][1].derivative(x), derivative, rtol=1e-12, atol=1e-13
    )


def _supremum(function, curvature: float) -> float:
    """An upper bound of a function on [−20, 20] whose second derivative is at most `curvature` in size.

    At an interior maximum the first derivative vanishes, so the nearest grid point, at most h/2 away, is at most
    curvature·h²/8 lower. The coarse grid shows where the maximum can be, the fine grid how high it is.
    """
    coarse = torch.arange(-20, 20 + 1e-4, 1e-4, dtype=torch.float64)
    values = function(coarse)
    possible = coarse[values >= values.max() - curvature * 1e-8 / 8 - 2 * ROUNDING]
    low, high = possible.min().item() - 1e-4, possible.max().item() + 1e-4
    fine = torch.linspace(low, high, 1_000_001, dtype=torch.float64)
    step = (high - low) / 1e6
    return function(fine).max().item() + curvature * step**2 / 8 + ROUNDING


@pytest.mark.parametrize(
    ("module", "low", "high"),
    [(nn.Softmax(1), 0.0, 0.5), (nn.Softmin(1), -0.5, 0.0)],
    ids=str,
)
def test_softmax_has_a_symmetric_jacobian_with_eigenvalues_in_the_interval(
    module, low, high
):
    """Softmin is a change of sign and a softmax."""
    network = lipcert.trace(module, (4,))
    slope = network.sites[1].slope
    assert (slope.alpha, slope.beta, slope.elementwise) == (0.0, 0.5, False)
    assert torch.equal(
        network.push(0, torch.eye(4))[0], (1 if high else -1) * torch.eye(4)
    )
    points = [3 * randn(4, seed=k) for k in range(50)] + [
        torch.tensor([0.0, 0.0, 99.0, 99.0], dtype=torch.float64)
    ]
    matrices = torch.stack(
        [
            torch.autograd.functional.jacobian(lambda t: module(t[None])[0], x)
            for x in points
        ]
    )
    torch.testing.assert_close(matrices, matrices.mT)
    eigenvalues = torch.linalg.eigvalsh(matrices)
    assert eigenvalues.min() >= low - 1e-12
    assert eigenvalues.max() <= high + 1e-12
    assert max(abs(eigenvalues.min()), eigenvalues.max()) > 0.5 - 1e-9


def test_sector_is_centre_and_radius_of_the_interval():
    assert Slope(-0.5, 1.5).sector() == (0.5, 1.0)
    assert Slope(-0.5, 1.5).lipschitz() == 1.5
    assert Slope(-2.5, 1.5).lipschitz() == 2.5
    assert slopes.SOFTMAX.sector() == (0.25, 0.25)


def test_slopes_are_numbers_in_order():
    assert Slope(0, 1) == Slope(0.0, 1.0)
    assert isinstance(Slope(0, 1).beta, float)
    for alpha, beta in [(0.0, inf), (nan, 1.0), (-inf, 1.0)]:
        with pytest.raises(OptionError, match="expected a finite slope"):
            Slope(alpha, beta)
    with pytest.raises(
        OptionError,
        match=r"the slopes are \[1.0, 0.0\], expected the smaller one first",
    ):
        Slope(1.0, 0.0)
