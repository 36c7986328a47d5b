"""Lipschitz constants of max-pooling: never below a sampled slope, and exact."""

from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import lipcert
from helpers import randn
from models import Op

EXACT = {
    "disjoint windows": (nn.MaxPool2d(2), (1, 4, 4), 1),
    "disjoint windows, remainder": (nn.MaxPool2d(2), (1, 5, 5), 1),
    "gaps": (nn.MaxPool1d(2, 3), (1, 9), 1),
    "stride 1": (nn.MaxPool2d(3, 1, 1), (1, 6, 6), 9),
    "resnet stem": (nn.MaxPool2d(3, 2, 1), (1, 8, 8), 4),
    "1d": (nn.MaxPool1d(4, 2), (2, 9), 2),
    "3d": (nn.MaxPool3d(3, (2, 1, 3)), (1, 5, 4, 6), 4),
    "rectangular": (nn.MaxPool2d((2, 3), (2, 1)), (1, 4, 5), 3),
    "one window only": (nn.MaxPool1d(3, 2), (1, 4), 1),
    "one more window by ceil_mode": (nn.MaxPool1d(3, 2, ceil_mode=True), (1, 4), 2),
    "dilation": (nn.MaxPool1d(2, 1, dilation=2), (1, 5), 2),
    "adaptive": (nn.AdaptiveMaxPool2d(2), (1, 4, 6), 1),
    "adaptive, uneven": (nn.AdaptiveMaxPool1d(3), (1, 7), 2),
    "adaptive, enlarged": (nn.AdaptiveMaxPool1d(7), (2, 3), 3),
    "adaptive, both axes": (nn.AdaptiveMaxPool2d((2, 3)), (1, 3, 4), 4),
    "values beside indices": (
        Op(lambda m, x: m.pool(x)[0], pool=nn.MaxPool1d(2, 1, return_indices=True)),
        (1, 4),
        2,
    ),
    "function": (Op(lambda m, x: F.max_pool2d(x, 3, stride=1)), (1, 5, 5), 9),
    "function, stride from the kernel": (
        Op(lambda m, x: F.max_pool2d(x, (2, 2))),
        (1, 4, 4),
        1,
    ),
    "1d function": (Op(lambda m, x: F.max_pool1d(x, 3, 1, 1)), (1, 5), 3),
    "3d function": (
        Op(lambda m, x: F.max_pool3d(x, kernel_size=2, stride=1)),
        (1, 3, 3, 3),
        8,
    ),
    "adaptive function": (Op(lambda m, x: F.adaptive_max_pool1d(x, 3)), (1, 6), 1),
}


@pytest.mark.parametrize("name", EXACT)
def test_constant_is_the_root_of_the_overlap_and_a_single_peak_attains_it(name):
    module, shape, overlap = EXACT[name]
    slope = lipcert.trace(module, shape).sites[1].slope
    assert slope.lipschitz() == pytest.approx(sqrt(overlap), rel=1e-15)
    assert slope.lipschitz() >= sqrt(overlap)
    assert slope.sector() == (0.0, slope.lipschitz())
    peaks = torch.eye(torch.Size(shape).numel(), dtype=torch.float64).reshape(
        -1, *shape
    )
    gains = (module(peaks) - module(0 * peaks)).flatten(1)
    assert gains.norm(dim=1).max().item() == pytest.approx(sqrt(overlap))


@given(data=st.data(), dims=st.integers(1, 2))
def test_sampled_slopes_never_exceed_the_constant(data, dims):
    pool = {1: nn.MaxPool1d, 2: nn.MaxPool2d}[dims]
    size = data.draw(st.tuples(*[st.integers(2, 7)] * dims))
    kernel, stride = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    dilation, padding = (
        data.draw(st.integers(1, 2)),
        data.draw(st.integers(0, kernel // 2)),
    )
    assume(all(n + 2 * padding >= dilation * (kernel - 1) + 1 for n in size))
    module = pool(kernel, stride, padding, dilation, ceil_mode=data.draw(st.booleans()))
    slope = lipcert.trace(module, (1, *size)).sites[1].slope
    x = randn(200, 1, *size)
    y = x + torch.cat([0.1 * randn(100, 1, *size, seed=1), _sparse(100, size)])
    change, gain = (x - y).flatten(1), (module(x) - module(y)).flatten(1)
    assert (gain.norm(dim=1) / change.norm(dim=1)).max() <= slope.lipschitz() * (
        1 + 1e-12
    )


def _sparse(rows: int, size: tuple[int, ...]) -> torch.Tensor:
    """Large changes of one entry each."""
    changes = torch.zeros(rows, torch.Size(size).numel(), dtype=torch.float64)
    changes[torch.arange(rows), torch.arange(rows) % changes.shape[1]] = 9.0
    return changes.reshape(rows, 1, *size)


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool1d(2, return_indices=True),
        nn.AdaptiveMaxPool1d(2, return_indices=True),
    ],
)
def test_indices_are_refused(pool):
    model = Op(lambda m, x: x + m.pool(x)[1].float().mean(2, keepdim=True), pool=pool)
    with pytest.raises(
        lipcert.UnsupportedError,
        match=r"pool \(.*Pool1d\): the positions of entries are not continuous",
    ):
        lipcert.trace(model, (1, 4))
