"""Dense layers and (transposed) convolutions, as modules and as functions, against the Jacobian of the model."""

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import lipcert
from helpers import check_linear, examples, operations, randn
from lipcert.network import patches
from lipcert.network.convolution import Convolution, TransposedConvolution
from lipcert.network.linear import Dense, Function
from models import Op

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CONV_TRANSPOSE = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
LARGEST = {1: 9, 2: 6, 3: 4}


@st.composite
def convolutions(draw, dims, transposed=False):
    """(module, input shape): sizes, strides, paddings, dilations and groups that fit together."""

    def per_axis(low, high):
        return draw(st.tuples(*[st.integers(low, high)] * dims))

    groups = draw(st.integers(1, 2))
    channels, filters = (
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
    )
    size = per_axis(2, LARGEST[dims])
    kernel, stride, dilation = per_axis(1, 3), per_axis(1, 3), per_axis(1, 2)
    common = {
        "stride": stride,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    if transposed:
        extra = tuple(
            draw(st.integers(0, max(s, d) - 1))
            for s, d in zip(stride, dilation, strict=True)
        )
        common |= {"padding": per_axis(0, 1), "output_padding": extra}
        return CONV_TRANSPOSE[dims](channels, filters, kernel, **common), (
            channels,
            *size,
        )
    padding = draw(
        st.one_of(
            st.just("valid"),
            st.just("same"),
            st.integers(0, 2),
            st.just(per_axis(0, 2)),
        )
    )
    mode = draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    if padding == "same":
        common["stride"] = 1
        widths = [
            d * (k - 1) - d * (k - 1) // 2
            for k, d in zip(kernel, dilation, strict=True)
        ]
    else:
        widths = (
            [0] * dims
            if padding == "valid"
            else [padding] * dims
            if isinstance(padding, int)
            else padding
        )
    if mode in ("circular", "reflect"):
        assume(all(w < n for w, n in zip(widths, size, strict=True)))
    fits = zip(size, widths, kernel, dilation, strict=True)
    assume(all(n + 2 * w >= d * (k - 1) + 1 for n, w, k, d in fits))
    return CONV[dims](
        channels, filters, kernel, padding=padding, padding_mode=mode, **common
    ), (channels, *size)


@pytest.mark.parametrize("dims", [1, 2, 3])
@examples(1)
@given(data=st.data())
def test_convolution(dims, data):
    module, shape = data.draw(convolutions(dims))
    network = check_linear(module, shape)
    *pads, last = operations(network)
    assert isinstance(last, Convolution)
    assert all(isinstance(pad, Function) for pad in pads)


@pytest.mark.parametrize("dims", [1, 2, 3])
@examples(1)
@given(data=st.data())
def test_transposed_convolution(dims, data):
    module, shape = data.draw(convolutions(dims, transposed=True))
    full = zip(
        shape[1:], module.stride, module.padding, module.output_padding, strict=True
    )
    reach = [
        d * (k - 1) + 1
        for k, d in zip(module.kernel_size, module.dilation, strict=True)
    ]
    assume(
        all(
            (n - 1) * s - 2 * p + e + r > 0
            for (n, s, p, e), r in zip(full, reach, strict=True)
        )
    )
    (op,) = operations(check_linear(nn.Sequential(module), shape))
    assert isinstance(op, TransposedConvolution)


@given(
    n=st.integers(1, 7),
    m=st.integers(1, 7),
    axes=st.lists(st.integers(1, 3), max_size=2),
    bias=st.booleans(),
)
def test_dense(n, m, axes, bias):
    (op,) = operations(check_linear(nn.Linear(n, m, bias=bias), (*axes, n)))
    assert isinstance(op, Dense)
    assert op.terms == n


def test_strided_convolution_that_leaves_a_remainder():
    """The 8C2F of Huang et al. on 64×64 has a 4×4 convolution with stride 2 and no padding on 64 columns."""
    (op,) = operations(check_linear(nn.Conv2d(1, 2, 4, 2, 0), (1, 9, 8)))
    assert op.adjoint(torch.ones(1, *op.out_shape, dtype=torch.float64)).shape == (
        1,
        1,
        9,
        8,
    )


FUNCTIONS = {
    "linear": (lambda m, x: F.linear(x, m.w, m.b), (4, 5), (5,)),
    "linear-keywords": (
        lambda m, x: F.linear(input=x, weight=m.w, bias=m.b),
        (4, 5),
        (5,),
    ),
    "matmul-operator": (lambda m, x: x @ m.w.T, (4, 5), (5,)),
    "matmul": (lambda m, x: torch.matmul(x, m.w), (5, 4), (3, 5)),
    "matmul-method": (lambda m, x: x.matmul(m.w), (5, 4), (5,)),
    "mm": (lambda m, x: torch.mm(x, m.w) + m.b, (5, 4), (5,)),
    "addmm": (lambda m, x: torch.addmm(m.b, x, m.w), (5, 4), (5,)),
    "weight-from-parameters": (
        lambda m, x: F.linear(x, torch.sigmoid(m.w) * 2),
        (4, 5),
        (5,),
    ),
    "matmul-vector": (lambda m, x: x @ m.w, (4,), (3, 4)),
    "matmul-left": (lambda m, x: m.w @ x, (5, 3), (2, 3, 4)),
    "matmul-several": (lambda m, x: x @ m.w, (2, 3, 4), (2, 5, 3)),
    "bmm": (lambda m, x: torch.bmm(x, m.w.expand(x.shape[0], 3, 4)), (1, 3, 4), (2, 3)),
    "bmm-left": (
        lambda m, x: torch.bmm(m.w.expand(x.shape[0], 3, 4), x),
        (1, 3, 4),
        (4, 2),
    ),
    "inner": (lambda m, x: torch.inner(x, m.w), (5, 4), (2, 4)),
    "tensordot": (
        lambda m, x: torch.tensordot(x, m.w, dims=([1, 2], [0, 2])),
        (3, 5, 2),
        (3, 2),
    ),
    "einsum": (lambda m, x: torch.einsum("bchw,ck->bkhw", x, m.w), (3, 2), (3, 2, 2)),
    "einsum-left": (lambda m, x: torch.einsum("oc,bcn->bon", m.w, x), (4, 3), (3, 2)),
    "einsum-sum": (lambda m, x: torch.einsum("bcn->bc", x) * m.w, (3,), (3, 2)),
    "einsum-diagonal": (lambda m, x: torch.einsum("bii->bi", x) * m.w, (3,), (3, 3)),
    "lerp-to-a-product": (lambda m, x: torch.lerp(x, x @ m.w, 0.2), (4, 4), (4,)),
    "conv1d": (
        lambda m, x: F.conv1d(x, m.w, m.b, stride=2, padding=1),
        (4, 2, 3),
        (2, 8),
    ),
    "conv2d": (
        lambda m, x: F.conv2d(x, m.w, None, 2, (1, 0), 1, 1),
        (4, 2, 3, 3),
        (2, 6, 5),
    ),
    "conv2d-same": (
        lambda m, x: F.conv2d(x, m.w, padding="same"),
        (4, 2, 2, 3),
        (2, 4, 5),
    ),
    "conv2d-same-even": (
        lambda m, x: F.conv2d(x, m.w, padding="same", dilation=(1, 3)),
        (4, 2, 4, 2),
        (2, 5, 6),
    ),
    "conv2d-valid": (
        lambda m, x: F.conv2d(x, m.w, padding="valid", stride=2),
        (4, 2, 2, 3),
        (2, 4, 5),
    ),
    "conv1d-same-groups": (
        lambda m, x: F.conv1d(x, m.w, padding="same", groups=2),
        (4, 1, 2),
        (2, 5),
    ),
    "conv2d-groups": (
        lambda m, x: torch.conv2d(x, m.w, groups=2, dilation=2),
        (4, 2, 2, 2),
        (4, 5, 5),
    ),
    "conv3d": (
        lambda m, x: F.conv3d(x, m.w, m.b, padding=1),
        (4, 1, 2, 2, 2),
        (1, 3, 3, 2),
    ),
    "conv_transpose1d": (
        lambda m, x: F.conv_transpose1d(x, m.w, stride=3, output_padding=2),
        (2, 3, 3),
        (2, 4),
    ),
    "conv_transpose2d": (
        lambda m, x: F.conv_transpose2d(x, m.w, None, 2, 1, 1, 2),
        (4, 1, 3, 3),
        (4, 3, 2),
    ),
    "conv_transpose3d": (
        lambda m, x: F.conv_transpose3d(x, m.w, padding=1),
        (1, 2, 3, 3, 3),
        (1, 2, 3, 3),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functional_spelling(name):
    function, weight_shape, shape = FUNCTIONS[name]
    model = Op(
        function, w=nn.Parameter(randn(*weight_shape)), b=nn.Parameter(randn(4, seed=1))
    )
    check_linear(model, shape)


def test_parametrised_weights_are_read_through_their_parametrisation():
    check_linear(nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 3, 3)), (2, 5, 5))
    check_linear(nn.utils.parametrizations.orthogonal(nn.Linear(4, 3)), (4,))


def test_product_with_a_vector():
    network = lipcert.trace(Op(lambda m, x: torch.mv(x, m.w), w=randn(4)), (4,))
    assert network.output_shape == ()
    torch.testing.assert_close(
        network.push(0, torch.eye(4, dtype=torch.float64))[0], randn(4)
    )
    torch.testing.assert_close(
        network.pull(1, torch.ones(1, dtype=torch.float64))[0], randn(4)[None]
    )


def test_products_of_several_constants():
    """Their rounding errors are not known, their matrix is."""
    model = Op(
        lambda m, x: torch.einsum("bi,ij,jk->bk", x, m.v, m.w),
        v=randn(2, 9),
        w=randn(9, 3, seed=1),
    )
    network = lipcert.trace(model.double(), (2,))
    (op,) = operations(network)
    matrix = (model.v @ model.w).T
    torch.testing.assert_close(op.as_matrix(like=randn(1)), matrix)
    torch.testing.assert_close(op.adjoint(torch.eye(3, dtype=torch.float64)), matrix)
    assert not op.covered


def test_transposed_convolution_with_output_size():
    """output_size is turned into an output_padding, in forward."""
    model = Op(
        lambda m, x: m.up(x, output_size=[6, 7]), up=nn.ConvTranspose2d(2, 3, 3, 2)
    )
    (op,) = operations(check_linear(model, (2, 2, 3)))
    assert op.out_shape == (3, 6, 7)


@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.weight_norm,
        nn.utils.parametrizations.weight_norm,
        lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: nn.utils.spectral_norm(layer).eval(),
        lambda layer: nn.utils.parametrizations.spectral_norm(layer).eval(),
    ],
    ids=[
        "old weight_norm",
        "weight_norm",
        "prune",
        "old spectral_norm",
        "spectral_norm",
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_are_computed_in_forward(wrap):
    check_linear(wrap(nn.Linear(4, 3)), (4,))


def test_subclass_that_keeps_forward_uses_the_rule_and_one_that_changes_it_is_looked_into():
    class Named(nn.Linear):
        pass

    class Halved(nn.Linear):
        def forward(self, x):
            return F.linear(x, 0.5 * self.weight)

    check_linear(nn.Sequential(Named(4, 3), Halved(3, 2)), (4,))


def test_weights_are_read_when_needed():
    model = nn.Sequential(nn.Linear(3, 2)).double()
    network = check_linear(model, (3,))
    model[0].weight = nn.Parameter(randn(2, 3, seed=9))
    (columns,) = network.push(0, torch.eye(3, dtype=torch.float64))
    assert torch.equal(columns.T, model[0].weight)


@examples(10)
@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_products_of_patches_transpose_a_convolution(size, kernel, stride, padding):
    """Entry by entry what differentiation gives: every residue of the stride has its own taps."""
    assume(all(n + 2 * p >= k for n, p, k in zip(size, padding, kernel, strict=True)))
    weight, x = randn(3, 2, *kernel), randn(2, 2, *size, seed=1).requires_grad_()
    image = F.conv2d(x, weight, None, stride, padding)
    rows = randn(*image.shape, seed=2)
    (expected,) = torch.autograd.grad(image, x, rows)
    with patches.constant_kernels():
        for _ in range(2):
            found = patches.transpose(rows, weight, stride, padding, size)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
