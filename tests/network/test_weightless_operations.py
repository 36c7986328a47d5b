"""Operations that move, average, sum, scale or add, in all their spellings, against the Jacobian of the model."""

import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from helpers import check_linear, operations, randn
from models import Op, gaussian

IMAGE = (4, 6, 4)
FACTOR = randn(4, 1, 1, seed=7)

MODULES = {
    "AvgPool1d": (nn.AvgPool1d(3, 2, 1), (2, 8)),
    "AvgPool2d": (nn.AvgPool2d((3, 2), 2, (1, 0)), (2, 7, 5)),
    "AvgPool2d-ceil": (nn.AvgPool2d(2, ceil_mode=True), (2, 5, 5)),
    "AvgPool2d-padding-not-counted": (nn.AvgPool2d(3, 1, 1, count_include_pad=False), (1, 4, 4)),
    "AvgPool3d": (nn.AvgPool3d(2, 1), (1, 3, 3, 3)),
    "AdaptiveAvgPool1d": (nn.AdaptiveAvgPool1d(3), (2, 7)),
    "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d((2, None)), IMAGE),
    "AdaptiveAvgPool2d-global": (nn.AdaptiveAvgPool2d(1), IMAGE),
    "AdaptiveAvgPool3d": (nn.AdaptiveAvgPool3d(2), (1, 3, 4, 2)),
    "Flatten": (nn.Flatten(), IMAGE),
    "Flatten-part": (nn.Flatten(2), IMAGE),
    "Unflatten": (nn.Unflatten(1, (2, 3)), (6, 2)),
    "PixelShuffle": (nn.PixelShuffle(2), (4, 2, 3)),
    "PixelUnshuffle": (nn.PixelUnshuffle(2), (1, 4, 6)),
    "ChannelShuffle": (nn.ChannelShuffle(2), IMAGE),
    "ZeroPad2d": (nn.ZeroPad2d((1, 2, 0, 1)), (2, 3, 3)),
    "ConstantPad1d": (nn.ConstantPad1d(2, 3.5), (2, 3)),
    "ReflectionPad2d": (nn.ReflectionPad2d(2), (1, 4, 4)),
    "ReplicationPad3d": (nn.ReplicationPad3d(1), (1, 2, 2, 2)),
    "CircularPad2d": (nn.CircularPad2d((1, 2, 2, 1)), (1, 3, 4)),
    "Upsample-nearest": (nn.Upsample(scale_factor=2), (2, 3, 2)),
    "Upsample-size": (nn.Upsample(size=(5, 3)), (1, 3, 2)),
    "Upsample-bilinear": (nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), (1, 3, 3)),
    "UpsamplingNearest2d": (nn.UpsamplingNearest2d(scale_factor=3), (1, 2, 2)),
    "Identity": (nn.Identity(), IMAGE),
    "Dropout": (nn.Sequential(nn.Dropout(0.3), nn.Dropout2d()), IMAGE),
    "AlphaDropout": (nn.AlphaDropout(), (3,)),
}

FUNCTIONS = {
    "avg_pool1d": lambda m, x: F.avg_pool1d(x.flatten(2), 3, stride=2),
    "avg_pool2d": lambda m, x: F.avg_pool2d(x, kernel_size=2, padding=1),
    "avg_pool3d": lambda m, x: F.avg_pool3d(x.unsqueeze(1), (2, 1, 2)),
    "adaptive_avg_pool2d": lambda m, x: F.adaptive_avg_pool2d(x, (4, 3)),
    "global-mean": lambda m, x: x.mean((2, 3)),
    "mean-keywords": lambda m, x: torch.mean(x, dim=(-1, -2), keepdim=True),
    "mean-axis": lambda m, x: x.mean(1),
    "sum": lambda m, x: torch.sum(x, 2),
    "sum-method": lambda m, x: x.sum(dim=-1, keepdim=True),
    "flatten": lambda m, x: torch.flatten(x, 1),
    "flatten-method": lambda m, x: x.flatten(1),
    "view": lambda m, x: x.view(x.size(0), -1),
    "view-shape": lambda m, x: x.view(x.shape[0], 4 * 6, 4),
    "reshape": lambda m, x: torch.reshape(x, (-1, 2, 48)),
    "reshape-method": lambda m, x: x.reshape(len_of(x), 12, 8),
    "unflatten": lambda m, x: x.unflatten(1, (2, 2)),
    "squeeze": lambda m, x: x[:, :, :1].squeeze(2),
    "squeeze-function": lambda m, x: torch.squeeze(x[..., 1:2], -1),
    "unsqueeze": lambda m, x: torch.unsqueeze(x, 1),
    "permute": lambda m, x: x.permute(0, 2, 3, 1),
    "permute-function": lambda m, x: torch.permute(x, (0, 3, 1, 2)),
    "transpose": lambda m, x: x.transpose(1, 2),
    "transpose-function": lambda m, x: torch.transpose(x, -1, 1),
    "movedim": lambda m, x: torch.movedim(x, 1, -1),
    "flip": lambda m, x: torch.flip(x, dims=(2,)),
    "roll": lambda m, x: x.roll(1, 3),
    "slice": lambda m, x: x[:, 1:3, ::2, -1],
    "slice-by-size": lambda m, x: x[:, : x.size(1) // 2],
    "index": lambda m, x: x[:, [2, 0, 0]],
    "index-buffer": lambda m, x: x[:, m.order],
    "narrow": lambda m, x: x.narrow(2, 1, 3),
    "expand": lambda m, x: x[:, :1].expand(-1, 3, -1, -1),
    "cat": lambda m, x: torch.cat([x, -x, x[:, 1:2]], 1),
    "cat-keywords": lambda m, x: torch.concat((x, 2 * x), dim=-2),
    "cat-with-constant": lambda m, x: torch.cat([m.block.expand(x.shape[0], 1, 6, 4), x], dim=1),
    "pad": lambda m, x: F.pad(x, (1, 0, 2, 1)),
    "pad-value": lambda m, x: F.pad(x, [1, 1], value=7.0),
    "pad-crop": lambda m, x: F.pad(x, (-1, 0, 0, -2)),
    "pad-reflect": lambda m, x: F.pad(x, (1, 2, 3, 0), mode="reflect"),
    "pad-circular": lambda m, x: F.pad(x, (1, 2, 3, 0), mode="circular"),
    "interpolate": lambda m, x: F.interpolate(x, scale_factor=2),
    "interpolate-size": lambda m, x: F.interpolate(x, size=(7, 3), mode="nearest-exact"),
    "interpolate-bilinear": lambda m, x: F.interpolate(x, (3, 7), mode="bilinear"),
    "pixel_shuffle": lambda m, x: F.pixel_shuffle(x, 2),
    "dropout": lambda m, x: F.dropout(x, 0.5, m.training),
    "dropout-keyword": lambda m, x: F.dropout2d(x, training=m.training),
    "clone": lambda m, x: x.clone().contiguous(),
    "add": lambda m, x: x + x.flip(2),
    "add-function": lambda m, x: torch.add(x, x.flip(2), alpha=3),
    "add-method": lambda m, x: x.add(x.flip(2)),
    "add-constant": lambda m, x: 1 + x + m.factor,
    "add-broadcast": lambda m, x: x + x.mean(1, keepdim=True),
    "add-in-place": lambda m, x: x.clone().add_(x),
    "sub": lambda m, x: x - x.flip(2),
    "sub-function": lambda m, x: torch.sub(x, x.flip(3), alpha=0.3),
    "sub-reverse": lambda m, x: 1 - x,
    "sub-centred": lambda m, x: x - x.mean((1, 2), keepdim=True),
    "rsub": lambda m, x: torch.rsub(x, x.flip(2), alpha=2),
    "neg": lambda m, x: -x,
    "neg-function": lambda m, x: torch.neg(x),
    "neg-method": lambda m, x: x.neg(),
    "mul": lambda m, x: x * 0.1,
    "mul-left": lambda m, x: -0.7 * x,
    "mul-function": lambda m, x: torch.mul(x, m.factor),
    "mul-method": lambda m, x: x.mul(m.factor[None]),
    "mul-broadcast": lambda m, x: x[:, :1] * m.factor,
    "mul-computed": lambda m, x: x * torch.exp(m.factor),
    "div": lambda m, x: x / 0.3,
    "div-function": lambda m, x: torch.div(x, m.factor),
    "div-method": lambda m, x: x.div(m.factor),
    "normalise": lambda m, x: (x - m.factor) / (m.factor.abs() + 1),
    "in-place-operators": lambda m, x: scaled_in_place(x.clone()),
    "batch_norm": lambda m, x: F.batch_norm(x, m.mean, m.var, m.mean, m.var, eps=1e-3),
    "batch_norm-plain": lambda m, x: F.batch_norm(x, m.mean, m.var),
    "operator-module": lambda m, x: operator.add(operator.neg(x), operator.truediv(x, 3)),
}


def len_of(x):
    return x.shape[0]


def scaled_in_place(x):
    x *= 3
    x -= 1
    x /= 7
    x += x
    return x


@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    module, shape = MODULES[name]
    check_linear(module, shape)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_spelling(name):
    mean, var = randn(4, seed=8), randn(4, seed=9).abs() + 0.1
    buffers = {"factor": FACTOR, "order": torch.tensor([3, 1]), "block": randn(1, 1, 6, 4), "mean": mean, "var": var}
    check_linear(Op(FUNCTIONS[name], **buffers), IMAGE)


BATCH_NORMS = [
    (nn.BatchNorm1d, (3,)),
    (nn.BatchNorm1d, (3, 4)),
    (nn.BatchNorm2d, (3, 2, 3)),
    (nn.BatchNorm3d, (3, 2, 1, 2)),
]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("module", "shape"), BATCH_NORMS)
def test_batch_norm(module, shape, affine):
    if affine:
        check_linear(gaussian(module(3)), shape)
    else:
        layer = module(3, affine=False).double()
        layer(randn(5, *shape))  # moves the running statistics
        check_linear(layer, shape)


@pytest.mark.parametrize("scale", [0.1, 1 / 3, -2.7])
def test_python_numbers_keep_their_precision(scale):
    """A scale rounded to float32 would be wrong in the eighth digit, and a bound computed from it too small."""
    (product,) = operations(check_linear(Op(lambda m, x: x * scale), (1,)))
    (quotient,) = operations(check_linear(Op(lambda m, x: x / scale), (1,)))
    assert product.as_matrix(like=randn(1)).item() == scale
    assert quotient.as_matrix(like=randn(1)).item() == 1 / scale


@given(data=st.data(), dims=st.integers(1, 3))
def test_average_pooling_of_any_geometry(data, dims):
    pool = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}[dims]
    size = data.draw(st.tuples(*[st.integers(2, 6)] * dims))
    kernel, stride = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    padding = data.draw(st.integers(0, kernel // 2))
    assume(all(n >= kernel for n in size))
    counted = data.draw(st.booleans())
    check_linear(pool(kernel, stride, padding, data.draw(st.booleans()), counted), (1, *size))


@given(data=st.data())
def test_concatenation_along_any_axis(data):
    axis = data.draw(st.integers(1, 3))
    pieces = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    check_linear(Op(lambda m, x: torch.cat([x.narrow(axis, 0, n) for n in pieces], axis - 4)), (2, 3, 2))
