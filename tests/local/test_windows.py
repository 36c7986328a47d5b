"""Rows inside windows are the rows of whole images."""

from math import inf

import pytest
import torch
from torch import nn

from lipcert.local.centres import executed_values
from lipcert.local.certify_local import LocalCertifier
from lipcert.local.deviations import follow
from lipcert.local.pulling import Ball
from lipcert.local.receptive_fields import Frame, frames_of
from lipcert.local.state import Deviations
from lipcert.models.zoo import residual
from models import Op


def shaken(model: nn.Module) -> nn.Module:
    """With statistics that differ from channel to channel."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2.0)
    return model.eval()


def strided() -> nn.Module:
    """Strides that leave a remainder, dilation, no padding, a convolution after a convolution, a difference."""
    layers = [
        nn.Conv2d(1, 3, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(3, 4, 2, 1, 0),
        nn.Conv2d(4, 4, 3, 1, 2, dilation=2),
    ]
    inner = nn.Sequential(*layers)
    return Op(
        lambda m, x: m.last((m.side(torch.tanh(m.inner(x))) - torch.relu(m.inner(x))).relu().flatten(1)),
        inner=inner, side=nn.Conv2d(4, 4, 3, 1, 1), last=nn.Linear(4 * 5 * 5, 3),
    )  # fmt: skip


MODELS = {
    "residual": (residual([3, 4, 5], [1, 1, 1], (2, 12, 12), 4), (2, 12, 12)),
    "strided": (strided(), (1, 11, 11)),
}


def deviations(
    model: nn.Module, shape: tuple[int, ...], norm: float, *, by_windows: bool
) -> Deviations:
    certifier = LocalCertifier(shaken(model), shape, norm)
    if not by_windows:
        certifier.prepared.frames = lambda v: None  # type: ignore[method-assign]
    x = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0))
    values, _ = executed_values(certifier.network, x)
    scale = 0.05 if norm == 2 else 0.004
    return follow(
        certifier.prepared,
        Ball(norm, torch.tensor([scale], dtype=torch.float64)),
        values,
    )


@pytest.mark.parametrize("norm", [2, inf])
@pytest.mark.parametrize("name", MODELS)
def test_windows_give_the_intervals_of_whole_rows(name, norm):
    model, shape = MODELS[name]
    windows = deviations(model, shape, norm, by_windows=True)
    whole = deviations(model, shape, norm, by_windows=False)
    for v in whole.below:
        torch.testing.assert_close(
            windows.below[v], whole.below[v], rtol=1e-9, atol=1e-12
        )
        torch.testing.assert_close(
            windows.above[v], whole.above[v], rtol=1e-9, atol=1e-12
        )


def test_large_windows_are_convolved_to_the_same_rows(monkeypatch):
    model, shape = MODELS["strided"]
    spread = deviations(model, shape, 2, by_windows=True)
    monkeypatch.setattr("lipcert.local.window_rows._LARGE", 1)
    convolved = deviations(model, shape, 2, by_windows=True)
    for v in spread.below:
        torch.testing.assert_close(
            convolved.below[v], spread.below[v], rtol=1e-9, atol=1e-12
        )


def test_windows_grow_by_kernels_and_become_images():
    certifier = LocalCertifier(MODELS["residual"][0].eval(), (2, 12, 12))
    network = certifier.prepared.exact
    sources = [site.source for site in network.sites[1:-1]]
    second = frames_of(network, sources[1])
    assert second is not None
    assert second[0] == Frame((1, 1), (-2, -2), (5, 5))
    last = frames_of(network, sources[-1])
    assert last is not None
    assert last[0] == Frame((0, 0), (0, 0), (12, 12))
    assert frames_of(network, network.sites[-1].source) is None
