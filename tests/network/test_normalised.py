"""Softmax and LayerNorm over boxes: every allowance against numbers of more digits, at means that swamp deviations."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.network.normalised import Normalisation, moment_errors
from lipcert.network.softmax_tangent import Softmax
from lipcert.network.tangents import Tangent

WIDTH = 12
WEIGHT = torch.linspace(-1.0, 2.0, WIDTH, dtype=torch.float64)
TANGENTS: dict[str, Tangent] = {
    "softmax": Softmax(1, WIDTH),
    "layer norm": Normalisation(1, 1e-5, lambda: WEIGHT, lambda: WEIGHT),
}


def function_of(tangent: Tangent, x: Tensor) -> Tensor:
    if isinstance(tangent, Softmax):
        return x.softmax(1)
    return F.layer_norm(x, (WIDTH,), WEIGHT.to(x), WEIGHT.to(x))


def exact(tangent: Tangent, x: np.ndarray) -> np.ndarray:
    """The function in numbers of 64 binary digits or more."""
    if isinstance(tangent, Softmax):
        powers = np.exp(x - x.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)
    shifted = x - x.mean(1, keepdims=True)
    weight = WEIGHT.numpy().astype(np.longdouble)
    return (
        shifted
        / np.sqrt((shifted**2).mean(1, keepdims=True) + np.longdouble(1e-5))
        * weight
        + weight
    )


def exact_pulled(tangent: Tangent, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    if isinstance(tangent, Softmax):
        p = exact(tangent, x)
        return p * rows - p * (p * rows).sum(1, keepdims=True)
    q = rows * WEIGHT.numpy().astype(np.longdouble)
    shifted = x - x.mean(1, keepdims=True)
    scale = 1 / np.sqrt((shifted**2).mean(1, keepdims=True) + np.longdouble(1e-5))
    unit = shifted * scale
    return scale * (
        q - q.mean(1, keepdims=True) - unit * (q * unit).mean(1, keepdims=True)
    )


def centres(spread: float, mean: float, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (
        (
            spread * torch.randn(200, WIDTH, generator=generator, dtype=torch.float64)
            + mean
        )
        .to(dtype)
        .double()
    )


PLACES = [
    (1.0, 0.0),
    (1e-3, 0.0),
    (30.0, 0.0),
    (1.0, 1e3),
    (1.0, 1e6),
    (1e-2, 1e5),
    (1.0, 1e9),
]


@pytest.mark.parametrize(("spread", "mean"), PLACES)
@pytest.mark.parametrize("name", TANGENTS)
def test_rows_are_pulled_back_within_their_allowance(name, spread, mean):
    """torch's own backward pass of LayerNorm is off by more at large means, so the rows are computed otherwise."""
    tangent, centre = TANGENTS[name], centres(spread, mean, torch.float64)
    rows = torch.randn(200, 1, WIDTH, dtype=torch.float64)
    reach = torch.rand_like(centre)
    computed = (
        tangent.adjoint(lambda x: function_of(tangent, x), centre, rows)[:, 0]
        .numpy()
        .astype(np.longdouble)
    )
    truth = exact_pulled(
        tangent,
        centre.numpy().astype(np.longdouble),
        rows[:, 0].numpy().astype(np.longdouble),
    )
    made = torch.from_numpy(np.abs(computed - truth).astype(np.float64))
    allowed = (rows[:, 0].abs() * tangent.pulling_error(centre, reach)).sum(1)
    assert ((made * reach).sum(1) <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("spread", "mean"), PLACES)
@pytest.mark.parametrize("name", TANGENTS)
def test_executed_operators_are_off_by_less_than_their_error(name, spread, mean, dtype):
    tangent, centre = TANGENTS[name], centres(spread, mean, dtype)
    computed = (
        function_of(tangent, centre.to(dtype)).double().numpy().astype(np.longdouble)
    )
    made = np.abs(
        computed - exact(tangent, centre.numpy().astype(np.longdouble))
    ).astype(np.float64)
    allowed = tangent.error(centre, torch.zeros_like(centre), dtype)
    assert (torch.from_numpy(made) <= allowed).all()
    if mean == 0.0:
        assert (allowed < 2e-3).all()


@pytest.mark.parametrize("size", [1e-9, 1e-3, 0.3, 5.0])
@pytest.mark.parametrize(("spread", "mean"), PLACES[:5])
@pytest.mark.parametrize("name", TANGENTS)
def test_remainders_hold_in_the_box(name, spread, mean, size):
    tangent, centre = TANGENTS[name], centres(spread, mean, torch.float64)
    reach = size * torch.rand_like(centre)
    steps, remainder = tangent.linear(centre, reach), tangent.remainder(centre, reach)
    origin = exact(tangent, centre.numpy().astype(np.longdouble))
    for share in (1.0, 0.5, 1e-3):
        moved = centre + share * reach * torch.randn_like(reach).sign()
        zeta = moved - centre
        inside = (zeta.abs() <= reach).all(1)
        change = exact(tangent, moved.numpy().astype(np.longdouble)) - origin
        for i in range(WIDTH):
            row = np.zeros_like(origin)
            row[:, i] = 1.0
            linear = (
                exact_pulled(tangent, centre.numpy().astype(np.longdouble), row)
                * zeta.numpy()
            ).sum(1)
            rest = torch.from_numpy(np.abs(change[:, i] - linear).astype(np.float64))
            size_of = torch.from_numpy(np.abs(linear).astype(np.float64))
            assert (rest <= remainder[:, i] + 1e-18 * (1 + mean + spread))[inside].all()
            assert (size_of <= steps[:, i] + 1e-18 * (1 + mean + spread))[inside].all()


def test_moments_of_many_numbers_are_off_by_less_than_their_bounds():
    for count in (3, 16, 100, 1000, 5000):
        x = 1e3 + torch.randn(50, count)
        truth = x.double()
        low, high = truth.mean(1), truth.std(1, correction=0)
        largest = truth.abs().amax(1)
        _, means, scales = torch.native_layer_norm(x, [count], None, None, 1e-12)
        mean, spread = moment_errors(count)
        unit = 2.0**-24 * largest
        assert ((means[:, 0].double() - low).abs() <= mean * unit).all()
        sigma = 1 / scales[:, 0].double()
        assert (
            (sigma - high).abs()
            <= spread * unit + (count + 16) * 2.0**-24 * high + 1e-9
        ).all()
