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
    "function": (Op(lambda m, x: F.max_pool2d(x, 3, stride=1)), (1, 5, 5), 9),
    "function, stride from the kernel": (Op(lambda m, x: F.max_pool2d(x, (2, 2))), (1, 4, 4), 1),
    "1d function": (Op(lambda m, x: F.max_pool1d(x, 3, 1, 1)), (1, 5), 3),
    "3d function": (Op(lambda m, x: F.max_pool3d(x, kernel_size=2, stride=1)), (1, 3, 3, 3), 8),
    "adaptive function": (Op(lambda m, x: F.adaptive_max_pool1d(x, 3)), (1, 6), 1),
}


@pytest.mark.parametrize("name", EXACT)
def test_constant_is_the_root_of_the_overlap_and_a_single_peak_attains_it(name):
    module, shape, overlap = EXACT[name]
    slope = lipcert.trace(module, shape).sites[1].slope
    assert slope.lipschitz() == pytest.approx(sqrt(overlap), rel=1e-15)
    assert slope.lipschitz() >= sqrt(overlap)
    assert slope.sector() == (0.0, slope.lipschitz())
    assert slope.lipschitz(1.0) == overlap
    assert slope.lipschitz(float("inf")) == 1.0
    peaks = torch.eye(torch.Size(shape).numel(), dtype=torch.float64).reshape(-1, *shape)
    gains = (module(peaks) - module(0 * peaks)).flatten(1)
    assert gains.norm(dim=1).max().item() == pytest.approx(sqrt(overlap))
    assert gains.sum(1).max().item() == overlap


@given(data=st.data(), dims=st.integers(1, 2))
def test_sampled_slopes_never_exceed_the_constant(data, dims):
    pool = {1: nn.MaxPool1d, 2: nn.MaxPool2d}[dims]
    size = data.draw(st.tuples(*[st.integers(2, 7)] * dims))
    kernel, stride = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    dilation, padding = data.draw(st.integers(1, 2)), data.draw(st.integers(0, kernel // 2))
    assume(all(n + 2 * padding >= dilation * (kernel - 1) + 1 for n in size))
    module = pool(kernel, stride, padding, dilation, ceil_mode=data.draw(st.booleans()))
    slope = lipcert.trace(module, (1, *size)).sites[1].slope
    x = randn(200, 1, *size)
    y = x + torch.cat([0.1 * randn(100, 1, *size, seed=1), _sparse(100, size)])
    change, gain = (x - y).flatten(1), (module(x) - module(y)).flatten(1)
    for norm in (1.0, 2.0, float("inf")):
        ratios = gain.norm(norm, dim=1) / change.norm(norm, dim=1)
        assert ratios.max() <= slope.lipschitz(norm) * (1 + 1e-12)


def _sparse(rows: int, size: tuple[int, ...]) -> torch.Tensor:
    """Large changes of one entry each."""
    changes = torch.zeros(rows, torch.Size(size).numel(), dtype=torch.float64)
    changes[torch.arange(rows), torch.arange(rows) % changes.shape[1]] = 9.0
    return changes.reshape(rows, 1, *size)


def test_uneven_adaptive_windows_are_refused():
    with pytest.raises(lipcert.UnsupportedError, match="overlap unevenly"):
        lipcert.trace(nn.AdaptiveMaxPool1d(3), (1, 7))


def test_indices_are_refused():
    model = Op(lambda m, x: x + m.pool(x)[0].mean(2, keepdim=True), pool=nn.MaxPool1d(2, return_indices=True))
    with pytest.raises(lipcert.UnsupportedError, match=r"pool \(MaxPool1d\): it returns several tensors"):
        lipcert.trace(model, (1, 4))
