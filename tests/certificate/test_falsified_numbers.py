"""Certificates that were once false by rounding, overflow or underflow, and rules that say false things about them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lipcert
from lipcert.errors import LipcertError, ShapeError, UnsupportedError
from models import Op


def test_sums_that_overflow_inside_an_operator():
    """The mean of large numbers is finite, their sum is not: neither there nor near it is anything certified."""
    model = Op(lambda m, x: m.l(x.mean(1, keepdim=True)), l=nn.Linear(1, 2)).eval()
    bound = lipcert.bound(model, (1000,))
    with pytest.raises(LipcertError, match="comes near it"):
        lipcert.certify(model, torch.full((1, 1000), 1e35), bound)
    radius = lipcert.certify(model, torch.full((1, 1000), 1e14), bound).radius
    assert 0 < float(radius) <= 1e16
    _, radius = lipcert.CertifiedClassifier(model, bound)(torch.full((1, 1000), 1e35))
    assert float(radius) == 0


def test_products_of_several_constants_are_bounded_but_not_certified():
    """They may under- or overflow before they are multiplied by the input, or after."""
    constants = {"c": torch.full((3,), 1e30), "d": torch.full((3,), 1e-30)}
    model = Op(lambda m, x: torch.einsum("bi,i,i->bi", x, m.c, m.d), **constants).eval()
    assert float(lipcert.bound(model, (3,), target="network").value) == pytest.approx(
        1.0, rel=1e-6
    )
    with pytest.raises(LipcertError, match="rounding errors are unknown"):
        lipcert.certify(model, torch.rand(2, 3))


LAST = {
    "sigmoid": nn.Sigmoid(),
    "softmax": nn.Softmax(1),
    "hard sigmoid": nn.Hardsigmoid(),
    "log-sigmoid": nn.LogSigmoid(),
    "double sigmoid": nn.Sigmoid().double(),
}


@pytest.mark.parametrize("name", LAST)
def test_a_model_that_ends_in_a_nonlinearity_near_zero(name):
    """The results are far larger than the inputs, and so are their rounding errors."""
    model = nn.Sequential(LAST[name], nn.Identity()).eval()
    dtype = torch.float64 if "double" in name else torch.float32
    generator = torch.Generator().manual_seed(0)
    scale = 1e-15 if "double" in name else 1e-7
    x = scale * torch.randn(200, 3, generator=generator, dtype=dtype)
    model.register_buffer("number", torch.zeros((), dtype=dtype))
    bound = lipcert.bound(model, (3,))
    certificates = lipcert.certify(model, x, bound)
    _, radius = lipcert.CertifiedClassifier(model, bound)(x)
    for radii in (certificates.radius, radius):
        step = torch.randn(50, 200, 3, generator=generator, dtype=torch.float64)
        step = step / step.norm(dim=2, keepdim=True) * (0.9 * radii[:, None])
        moved = (x.double() + step).to(dtype)
        inside = (moved.double() - x.double()).norm(dim=2) < radii
        flipped = (
            model(moved.reshape(-1, 3)).argmax(1).reshape(50, 200)
            != certificates.prediction
        )
        assert not bool((flipped & inside).any())


class Kinked(nn.Module):
    def forward(self, x):
        return x + 2 * F.relu(x - 10)


class Blur(nn.Module):
    def forward(self, x):
        return x - x.roll(1, 1)


class Curve(nn.Module):
    def forward(self, x):
        return torch.tanh(x)


LIES = {
    "linear up to ten": (Kinked, lambda call, x: call.linear(), "inputs of size"),
    "not negative": (
        Blur,
        lambda call, x: call.linear(terms=2, nonnegative=True),
        "negative",
    ),
    "fewer products": (Blur, lambda call, x: call.linear(terms=1), "sums 2 products"),
    "only moves": (Blur, lambda call, x: call.linear(terms=0), "products"),
    "no rounding": (Curve, lambda call, x: lipcert.Slope(0.0, 1.0, ulps=0.0), "ulps=0"),
    "a rule that fails": (Curve, lambda call, x: 1 / 0, "its rule fails"),
}


@pytest.mark.parametrize("name", LIES)
def test_rules_that_lie(name):
    module, rule, message = LIES[name]
    lipcert.register_rule(module)(rule)
    model = nn.Sequential(nn.Linear(4, 4), module(), nn.Linear(4, 3)).eval()
    with pytest.raises(LipcertError, match=message):
        lipcert.trace(model, (4,))


@pytest.mark.parametrize(
    ("weight", "problem"), [(1e-45, "too small"), (1e38, "too large")]
)
def test_weights_that_leave_the_range_of_their_type_are_not_called_a_false_rule(
    weight, problem
):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    nn.init.constant_(model[0].weight, weight)
    with pytest.raises(
        UnsupportedError,
        match=rf"0 \(Linear\): what it computes is {problem} for torch.float32",
    ):
        lipcert.bound(model, (4,))


@pytest.mark.parametrize("target", ["pairwise", "network"])
def test_a_model_without_outputs(target):
    model = nn.Sequential(nn.Linear(4, 3), Op(lambda m, x: x[:, 3:])).eval()
    with pytest.raises(
        UnsupportedError,
        match=r"output .*: the model returns no numbers, rows of shape \(0,\)",
    ):
        lipcert.bound(model, (4,), target=target)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout):
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    x = torch.nested.nested_tensor([torch.rand(4), torch.rand(4)], layout=layout)
    bound = lipcert.bound(model, (4,))
    for attempt in (
        lambda: lipcert.certify(model, x),
        lambda: lipcert.certify(model, x, bound),
        lambda: lipcert.certify(model, [x]),
        lambda: lipcert.certify(model, [x], bound),
        lambda: lipcert.CertifiedClassifier(model, bound)(x),
    ):
        with pytest.raises(ShapeError, match=r"nested tensor; use torch\.stack"):
            attempt()


@pytest.mark.parametrize("certify", [lipcert.certify, lipcert.certify_local])
def test_arrays_that_the_model_would_round_are_refused(certify):
    """Radii would be about other inputs: here two that are closer than any radius have different predictions."""
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    x = np.array([[2.0**24, 2.0**24 + 1.01]])
    with pytest.raises(
        ShapeError,
        match=r"inputs are float64 and the model computes in float32.*astype",
    ):
        certify(model, x)
    assert len(certify(model, np.array([[0.5, 0.25]]))) == 1


@pytest.mark.parametrize("certify", [lipcert.certify, lipcert.certify_local])
@pytest.mark.parametrize(
    "x", [torch.tensor(1.0), np.array([["a"]])], ids=["number", "words"]
)
def test_what_is_no_batch_of_numbers_is_refused(certify, x):
    with pytest.raises(ShapeError, match=r"single number|expected numbers"):
        certify(nn.Sequential(nn.Linear(1, 2)).eval(), x)


def test_arrays_of_other_byte_orders_and_with_masks():
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    x = np.random.default_rng(0).random((5, 4)).astype(np.float32)
    swapped = lipcert.certify(model, x.astype(">f4"))
    assert torch.equal(swapped.radius, lipcert.certify(model, x).radius)
    with pytest.raises(ShapeError, match="the array is masked"):
        lipcert.certify(model, np.ma.masked_less(x, 0.5))


ABOVE_ONE = 1 + 2.0**-24 + 2.0**-45
"""In float32 it is 1 + 2⁻²³."""
SCALARS = {
    "factor": lambda x: x * ABOVE_ONE,
    "factor in front": lambda x: ABOVE_ONE * x,
    "divisor": lambda x: x / (1 + 2.0**-24 - 2.0**-45),
    "tensor without axes": lambda x: x * torch.tensor(ABOVE_ONE, dtype=torch.float64),
    "alpha": lambda x: torch.add(x * 0, x, alpha=ABOVE_ONE),
    "alpha of a difference": lambda x: torch.sub(x * 0, x, alpha=ABOVE_ONE),
    "value": lambda x: torch.addcmul(x * 0, x, torch.ones(1), value=ABOVE_ONE),
    "value of a quotient": lambda x: torch.addcdiv(
        x * 0, x, torch.ones(1), value=ABOVE_ONE
    ),
    "leaky": lambda x: F.leaky_relu(x, ABOVE_ONE),
    "rrelu": lambda x: F.rrelu(x, ABOVE_ONE, ABOVE_ONE),
    "rrelu of two": lambda x: F.rrelu(x, 1.0, 1 + 2.0**-23 + 2.0**-44),
    "scale": lambda x: torch.ops.aten.elu(x, 1.0, ABOVE_ONE, 1.0),
    "hardsigmoid": lambda x: F.hardsigmoid(x) - 0.5,
    "integer": lambda x: x * 33554435,
    "integers in a tensor": lambda x: x * torch.tensor([33554435]),
}


@pytest.mark.parametrize("name", SCALARS)
def test_numbers_in_a_program_are_those_that_it_computes_with(name):
    """torch rounds them to float32: bounds of what is written were below the slopes of what runs."""
    model = Op(lambda m, x: SCALARS[name](x), bias=nn.Parameter(torch.zeros(1))).eval()
    at = torch.tensor([[1.0], [-1.0]])
    executed = float(
        model(at).double().abs().max()
    )  # exact, for the numbers are powers of two
    written = float(SCALARS[name](at.double()).abs().max())
    value = float(lipcert.bound(model, (1,), target="network").value)
    assert executed <= value <= max(executed, written) * (1 + 1e-6)
    lipcert.certify(Op(lambda m, x: F.pad(model(x), (1, 0))).eval(), at)


def test_scale_factors_of_sizes_are_not_rounded():
    model = Op(
        lambda m, x: F.interpolate(x, scale_factor=0.7, mode="nearest"),
        b=nn.Parameter(torch.zeros(1)),
    ).eval()
    assert lipcert.trace(model, (1, 10)).output_shape == (1, 7)
    assert float(
        lipcert.bound(model, (1, 10), target="network").value
    ) == pytest.approx(1.0, rel=1e-6)
