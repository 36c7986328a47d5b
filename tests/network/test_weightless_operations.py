"""Operations that move, average, sum, scale or add, in all their spellings, against the Jacobian of the model."""

import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import lipcert
from helpers import (
    check_linear,
    check_operation,
    eye,
    jacobian,
    operations,
    randn,
)
from models import Op, gaussian

IMAGE = (4, 6, 4)
FACTOR = randn(4, 1, 1, seed=7)

MODULES = {
    "AvgPool1d": (nn.AvgPool1d(3, 2, 1), (2, 8)),
    "AvgPool2d": (nn.AvgPool2d((3, 2), 2, (1, 0)), (2, 7, 5)),
    "AvgPool2d-ceil": (nn.AvgPool2d(2, ceil_mode=True), (2, 5, 5)),
    "AvgPool2d-padding-not-counted": (
        nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        (1, 4, 4),
    ),
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
    "ZeroPad1d": (nn.ZeroPad1d(1), (2, 3)),
    "ZeroPad3d": (nn.ZeroPad3d((1, 0, 0, 2, 1, 1)), (1, 2, 2, 2)),
    "CircularPad1d": (nn.CircularPad1d((1, 2)), (2, 4)),
    "CircularPad1d-vector": (nn.CircularPad1d(1), (3,)),
    "CircularPad3d": (nn.CircularPad3d(1), (1, 2, 2, 2)),
    "ReflectionPad1d": (nn.ReflectionPad1d(2), (2, 3)),
    "ReflectionPad3d": (nn.ReflectionPad3d(1), (1, 2, 2, 2)),
    "ReplicationPad2d": (nn.ReplicationPad2d((1, 0, 2, 1)), (1, 2, 2)),
    "Unfold": (nn.Unfold((2, 3), padding=1, stride=2), (2, 4, 5)),
    "Fold": (nn.Fold((4, 5), (2, 3)), (12, 9)),
    "ReflectionPad2d": (nn.ReflectionPad2d(2), (1, 4, 4)),
    "ReplicationPad3d": (nn.ReplicationPad3d(1), (1, 2, 2, 2)),
    "CircularPad2d": (nn.CircularPad2d((1, 2, 2, 1)), (1, 3, 4)),
    "Upsample-nearest": (nn.Upsample(scale_factor=2), (2, 3, 2)),
    "Upsample-size": (nn.Upsample(size=(5, 3)), (1, 3, 2)),
    "Upsample-linear": (nn.Upsample(scale_factor=2, mode="linear"), (2, 3)),
    "Upsample-trilinear": (nn.Upsample(scale_factor=2, mode="trilinear"), (1, 2, 2, 2)),
    "UpsamplingBilinear2d": (nn.UpsamplingBilinear2d(scale_factor=2), (1, 3, 3)),
    "SyncBatchNorm": (nn.SyncBatchNorm(3), (3, 2)),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout(), (3, 2)),
    "Upsample-bilinear": (
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        (1, 3, 3),
    ),
    "UpsamplingNearest2d": (nn.UpsamplingNearest2d(scale_factor=3), (1, 2, 2)),
    "Identity": (nn.Identity(), IMAGE),
    "Dropout": (nn.Sequential(nn.Dropout(0.3), nn.Dropout2d()), IMAGE),
    "AlphaDropout": (nn.AlphaDropout(), (3,)),
}

FUNCTIONS = {
    "avg_pool1d": lambda m, x: F.avg_pool1d(x.flatten(2), 3, stride=2),
    "avg_pool2d": lambda m, x: F.avg_pool2d(x, kernel_size=2, padding=1),
    "avg_pool2d-all-options": lambda m, x: F.avg_pool2d(
        x, (3, 2), (2, 1), (1, 0), True, False, 5
    ),
    "avg_pool2d-not-counted": lambda m, x: F.avg_pool2d(
        x, 3, padding=1, ceil_mode=True, count_include_pad=False
    ),
    "avg_pool2d-divisor": lambda m, x: F.avg_pool2d(x, 2, divisor_override=3),
    "interpolate-area": lambda m, x: F.interpolate(x, (2, 3), mode="area"),
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
    "transpose-last": lambda m, x: x.mT,
    "transpose-last-conjugate": lambda m, x: x.mH,
    "adjoint": lambda m, x: x.adjoint(),
    "swapaxes": lambda m, x: x.swapaxes(1, -1),
    "movedim-several": lambda m, x: torch.movedim(x, (1, 2), (2, 1)),
    "moveaxis": lambda m, x: x.moveaxis(3, 1),
    "permute-from-the-end": lambda m, x: x.permute(-4, -1, -2, -3),
    "new-axis": lambda m, x: x[..., None],
    "new-axes": lambda m, x: x[:, None, :, 0, None],
    "atleast_3d": lambda m, x: torch.atleast_3d(x),
    "view_as": lambda m, x: x.flatten(1).view_as(x),
    "unpacked-shape": lambda m, x: with_shape(x, *x.shape),
    "rot90": lambda m, x: torch.rot90(x, 1, (2, 3)),
    "fliplr": lambda m, x: torch.fliplr(x),
    "tril": lambda m, x: x.tril(1),
    "triu": lambda m, x: torch.triu(x),
    "diagonal": lambda m, x: x.diagonal(1, 2, 3),
    "diagonal-keywords": lambda m, x: torch.diagonal(x, dim1=-1, dim2=1),
    "diag_embed": lambda m, x: torch.diag_embed(x),
    "windows": lambda m, x: x.unfold(2, 3, 2),
    "im2col": lambda m, x: F.unfold(x, 2, dilation=2),
    "col2im": lambda m, x: F.fold(x.reshape(-1, 8, 12), (4, 5), (2, 2)),
    "flip": lambda m, x: torch.flip(x, dims=(2,)),
    "roll": lambda m, x: x.roll(1, 3),
    "slice": lambda m, x: x[:, 1:3, ::2, -1],
    "slice-by-size": lambda m, x: x[:, : x.size(1) // 2],
    "slice-from-the-end": lambda m, x: x[:, :-1, -4:-1, ::3],
    "slice-everything": lambda m, x: x[:, :][:],
    "ellipsis": lambda m, x: x[..., -1],
    "index-two-axes": lambda m, x: x[:, m.order, m.order],
    "index-last": lambda m, x: x[..., m.order],
    "index-inner": lambda m, x: x[:, :, [5, 0], 1],
    "index_select": lambda m, x: torch.index_select(x, -1, m.order),
    "select": lambda m, x: x.select(2, -1),
    "gather": lambda m, x: x.gather(
        1, m.order.reshape(1, 2, 1, 1).expand(x.shape[0], 2, 6, 4)
    ),
    "chunk": lambda m, x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "chunk-uneven": lambda m, x: x.chunk(4, 2)[-1],
    "split": lambda m, x: torch.cat(torch.split(x, 2, 1)[::-1], 1),
    "split-sizes": lambda m, x: x.split([1, 5], 2)[1],
    "tensor_split": lambda m, x: x.tensor_split(3, 1)[0],
    "hsplit": lambda m, x: torch.hsplit(x, 2)[1],
    "dsplit": lambda m, x: torch.dsplit(x, [1, 3])[1],
    "unbind": lambda m, x: x.unbind(1)[2] - x.unbind(1)[0],
    "sum-of-unbound": lambda m, x: sum(x.unbind(2)),
    "index": lambda m, x: x[:, [2, 0, 0]],
    "index-buffer": lambda m, x: x[:, m.order],
    "narrow": lambda m, x: x.narrow(2, 1, 3),
    "expand": lambda m, x: x[:, :1].expand(-1, 3, -1, -1),
    "expand-as": lambda m, x: x[:, :1].expand_as(x),
    "broadcast_to": lambda m, x: torch.broadcast_to(x[:, :1], (x.shape[0], 5, 6, 4)),
    "repeat": lambda m, x: x.repeat(1, 2, 1, 3),
    "tile": lambda m, x: torch.tile(x, (1, 2, 1, 1)),
    "repeat_interleave": lambda m, x: x.repeat_interleave(2, 1),
    "stack": lambda m, x: torch.stack([x, -x], 1),
    "stack-with-constant": lambda m, x: torch.stack(
        [m.whole.expand(x.shape[0], 4, 6, 4), 2 * x], -1
    ),
    "hstack": lambda m, x: torch.hstack([x, 2 * x]),
    "dstack": lambda m, x: torch.dstack([x, -x]),
    "column_stack": lambda m, x: torch.column_stack([x.flatten(1), x[:, 0].flatten(1)]),
    "where": lambda m, x: torch.where(m.mask, x, -x),
    "where-constant": lambda m, x: torch.where(m.mask, m.factor, x),
    "where-number": lambda m, x: torch.where(m.mask, x, 0.0),
    "where-other-number": lambda m, x: torch.where(m.mask, 7.0, x),
    "where-twice-the-same": lambda m, x: torch.where(m.mask, x, x),
    "masked_fill": lambda m, x: x.masked_fill(m.mask, 3.0),
    "masked_fill-in-place": lambda m, x: x.clone().masked_fill_(m.mask, -1),
    "masked_fill-tensor": lambda m, x: x.masked_fill(m.mask, m.mean[0]),
    "mask-as-factor": lambda m, x: x * m.mask,
    "index_fill": lambda m, x: x.index_fill(1, m.order, 2.0),
    "write-zeros": lambda m, x: written(x, (slice(None), 0), 0),
    "write-number": lambda m, x: written(x, (slice(None), slice(1, None, 2)), 1.5),
    "write-to-positions": lambda m, x: written(x, (slice(None), [0, 2]), 5.0),
    "write-entries": lambda m, x: written(x, (slice(None), 0), 2 * x[:, 1]),
    "write-slice": lambda m, x: written(x, (..., slice(0, 2)), x[..., 2:]),
    "write-everything": lambda m, x: written(x, slice(None), 3 * x),
    "write-itself": lambda m, x: written(x, slice(None), x),
    "cat": lambda m, x: torch.cat([x, -x, x[:, 1:2]], 1),
    "cat-keywords": lambda m, x: torch.concat((x, 2 * x), dim=-2),
    "cat-with-constant": lambda m, x: torch.cat(
        [m.block.expand(x.shape[0], 1, 6, 4), x], dim=1
    ),
    "pad": lambda m, x: F.pad(x, (1, 0, 2, 1)),
    "pad-value": lambda m, x: F.pad(x, [1, 1], value=7.0),
    "pad-crop": lambda m, x: F.pad(x, (-1, 0, 0, -2)),
    "pad-reflect": lambda m, x: F.pad(x, (1, 2, 3, 0), mode="reflect"),
    "pad-replicate": lambda m, x: F.pad(x, (1, 2, 3, 0), mode="replicate"),
    "pad-channels": lambda m, x: F.pad(x, (0, 0, 0, 0, 2, 1), value=3.0),
    "pad-vector": lambda m, x: F.pad(x.flatten(1), (1, 1), "constant", 2.0),
    "pad-circular": lambda m, x: F.pad(x, (1, 2, 3, 0), mode="circular"),
    "interpolate": lambda m, x: F.interpolate(x, scale_factor=2),
    "interpolate-size": lambda m, x: F.interpolate(
        x, size=(7, 3), mode="nearest-exact"
    ),
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
    "addcmul": lambda m, x: torch.addcmul(m.factor, x, m.factor, value=2),
    "addcmul-both": lambda m, x: x.addcmul(m.factor, x.flip(2)),
    "addcmul-constants": lambda m, x: torch.addcmul(x, m.factor, m.factor),
    "addcdiv": lambda m, x: torch.addcdiv(x, x.flip(1), m.factor, value=-0.5),
    "lerp": lambda m, x: torch.lerp(x, x.flip(2), 0.3),
    "lerp-constant": lambda m, x: torch.lerp(m.whole, x, 1.7),
    "lerp-tensor": lambda m, x: x.lerp(x[:, :1], m.factor),
    "sub": lambda m, x: x - x.flip(2),
    "sub-function": lambda m, x: torch.sub(x, x.flip(3), alpha=0.3),
    "sub-reverse": lambda m, x: 1 - x,
    "sub-centred": lambda m, x: x - x.mean((1, 2), keepdim=True),
    "rsub": lambda m, x: torch.rsub(x, x.flip(2), alpha=2),
    "neg": lambda m, x: -x,
    "neg-function": lambda m, x: torch.neg(x),
    "negative": lambda m, x: torch.negative(x),
    "positive": lambda m, x: +x,
    "neg-method": lambda m, x: x.neg(),
    "mul": lambda m, x: x * 0.1,
    "mul-left": lambda m, x: -0.7 * x,
    "mul-function": lambda m, x: torch.mul(x, m.factor),
    "mul-method": lambda m, x: x.mul(m.factor[None]),
    "mul-broadcast": lambda m, x: x[:, :1] * m.factor,
    "mul-in-place": lambda m, x: (x * 1).mul_(m.factor),
    "mul-row": lambda m, x: x * m.whole,
    "mul-rows": lambda m, x: x * m.whole.expand(x.shape[0], 4, 6, 4),
    "multiply": lambda m, x: torch.multiply(m.factor, x),
    "divide": lambda m, x: torch.divide(x, m.factor),
    "mul-computed": lambda m, x: x * torch.exp(m.factor),
    "div": lambda m, x: x / 0.3,
    "div-function": lambda m, x: torch.div(x, m.factor),
    "div-method": lambda m, x: x.div(m.factor),
    "normalise": lambda m, x: (x - m.factor) / (m.factor.abs() + 1),
    "in-place-operators": lambda m, x: scaled_in_place(x.clone()),
    "batch_norm": lambda m, x: F.batch_norm(x, m.mean, m.var, m.mean, m.var, eps=1e-3),
    "batch_norm-plain": lambda m, x: F.batch_norm(x, m.mean, m.var),
    "operator-module": lambda m, x: operator.add(
        operator.neg(x), operator.truediv(x, 3)
    ),
}


def len_of(x):
    return x.shape[0]


def with_shape(x, batch, channels, height, width):
    return (
        x.view(batch, channels, height * width)
        .transpose(1, 2)
        .reshape(batch, height, width * channels)
    )


def written(x, where, value):
    """A copy of x with entries overwritten."""
    y = x.clone()
    y[where] = value
    return y


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


# Programs with operators in place are rewritten as a whole, so they are apart.
IN_PLACE = [
    name for name in FUNCTIONS if "in-place" in name or name.startswith("write")
]
OTHERS = [name for name in FUNCTIONS if name not in IN_PLACE]
TOGETHER = 12
GROUPS = [
    names[k : k + TOGETHER]
    for names in (IN_PLACE, OTHERS)
    for k in range(0, len(names), TOGETHER)
]


@pytest.mark.parametrize(
    "names", GROUPS, ids=lambda names: f"{names[0]} to {names[-1]}"
)
def test_spellings(names):
    """Several side by side in one captured model, each against its own Jacobian."""
    mean, var = randn(4, seed=8), randn(4, seed=9).abs() + 0.1
    buffers = {
        "factor": FACTOR,
        "order": torch.tensor([3, 1]),
        "block": randn(1, 1, 6, 4),
        "mean": mean,
        "var": var,
    }
    buffers |= {
        "whole": randn(1, 4, 6, 4, seed=5),
        "mask": torch.tensor([True, False, False, True]),
    }
    functions = [FUNCTIONS[name] for name in names]

    def beside(m, x):
        return torch.cat([function(m, x).flatten(1) for function in functions], 1)

    network = lipcert.trace(Op(beside, **buffers).double().eval(), IMAGE)
    assert network.depth == 0
    (columns,) = network.push(0, eye(IMAGE))
    (rows,) = network.pull(1, eye(network.output_shape))
    pushed, pulled = columns.T, rows.flatten(1)
    place = 0
    for name, function in zip(names, functions, strict=True):
        expected = jacobian(Op(function, **buffers).double().eval(), IMAGE)
        own = slice(place, place + len(expected))
        place = own.stop
        for found in (pushed[own], pulled[own]):
            torch.testing.assert_close(
                found,
                expected,
                rtol=1e-10,
                atol=1e-10,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    assert len(pushed) == len(pulled) == place
    for op in operations(network):
        check_operation(op)


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
    """In a float64 model, a scale rounded to float32 would be wrong in the eighth digit, and a bound too small."""
    like = nn.BatchNorm1d(1, affine=False).double()  # whose tensors make it one
    (product,) = operations(check_linear(Op(lambda m, x: x * scale, like=like), (1,)))
    (quotient,) = operations(check_linear(Op(lambda m, x: x / scale, like=like), (1,)))
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
    check_linear(
        pool(kernel, stride, padding, data.draw(st.booleans()), counted), (1, *size)
    )


@given(data=st.data())
def test_concatenation_along_any_axis(data):
    axis = data.draw(st.integers(1, 3))
    pieces = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    check_linear(
        Op(lambda m, x: torch.cat([x.narrow(axis, 0, n) for n in pieces], axis - 4)),
        (2, 3, 2),
    )
