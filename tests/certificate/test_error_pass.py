"""The bound on rounding errors covers what float32 does, measured against float64."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from drawn import networks
from helpers import certifier_of, examples, randn
from lipcert.models.zoo import residual
from models import DenselyConnected, Op, dense_chain, gaussian


def sequence(*layers):
    return nn.Sequential(*layers)


def convolutions(*after, **options):
    return sequence(
        nn.Conv2d(2, 6, 3, **options), nn.ReLU(), *after, nn.Flatten(), nn.LazyLinear(4)
    )


def in_place(m, x):
    h = m.first(x)
    h += 1.5
    h = torch.relu_(h)
    h *= 0.7
    return m.second(h)


MODELS = {
    "linear": (sequence(nn.Linear(50, 4)), (50,)),
    "wide chain": (dense_chain(40, 300, 300, 4), (40,)),
    "without nonlinearity": (sequence(nn.Linear(30, 60), nn.Linear(60, 60), nn.Linear(60, 4)), (30,)),
    "gelu": (dense_chain(20, 30, 30, 4, activation=nn.GELU), (20,)),
    "tanh": (dense_chain(20, 30, 30, 4, activation=nn.Tanh), (20,)),
    "sigmoid": (dense_chain(20, 30, 30, 4, activation=nn.Sigmoid), (20,)),
    "silu": (dense_chain(20, 30, 30, 4, activation=nn.SiLU), (20,)),
    "mish": (dense_chain(20, 30, 30, 4, activation=nn.Mish), (20,)),
    "softplus": (dense_chain(20, 30, 30, 4, activation=nn.Softplus), (20,)),
    "softsign": (dense_chain(20, 30, 30, 4, activation=nn.Softsign), (20,)),
    "log-sigmoid": (dense_chain(20, 30, 30, 4, activation=nn.LogSigmoid), (20,)),
    "elu": (dense_chain(20, 30, 30, 4, activation=nn.ELU), (20,)),
    "selu": (dense_chain(20, 30, 30, 4, activation=nn.SELU), (20,)),
    "hard sigmoid": (dense_chain(20, 30, 30, 4, activation=nn.Hardsigmoid), (20,)),
    "hard swish": (dense_chain(20, 30, 30, 4, activation=nn.Hardswish), (20,)),
    "leaky": (dense_chain(20, 30, 30, 4, activation=nn.LeakyReLU), (20,)),
    "prelu": (dense_chain(20, 30, 30, 4, activation=lambda: nn.PReLU(30)), (20,)),
    "softshrink alone": (sequence(nn.Softshrink(0.3)), (5,)),
    "softmax": (sequence(nn.Linear(20, 200), nn.Softmax(1), nn.Linear(200, 4)), (20,)),
    "softmax alone": (sequence(nn.Softmax(1)), (40,)),
    "constant on a broadcast input": (Op(lambda m, x: x + m.b, b=randn(5)), (1,)),
    "constant alone": (Op(lambda m, x: m.b - 3 * x / 7, b=randn(5)), (5,)),
    "residual with batch norm": (residual([4, 8], [1, 1], (3, 8, 8), 4), (3, 8, 8)),
    "dense net": (DenselyConnected(), (1, 5, 6)),
    "stride and groups": (convolutions(stride=2, groups=2), (2, 9, 9)),
    "circular padding": (convolutions(padding=1, padding_mode="circular"), (2, 7, 7)),
    "reflected padding": (convolutions(padding=2, padding_mode="reflect"), (2, 7, 7)),
    "same padding": (convolutions(padding="same"), (2, 7, 7)),
    "in-place relu": (sequence(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(4)), (2, 6, 6)),
    "in-place arithmetic": (Op(in_place, first=nn.Linear(5, 6), second=nn.Linear(6, 4)), (5,)),
    "max-pooling": (convolutions(nn.MaxPool2d(2)), (2, 8, 8)),
    "average pooling": (convolutions(nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2)), (2, 10, 10)),
    "upsampling": (convolutions(nn.Upsample(scale_factor=2, mode="bilinear")), (2, 6, 6)),
    "transposed": (sequence(nn.ConvTranspose2d(2, 3, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)), (2, 4, 4)),
    "reductions": (Op(lambda m, x: m.a(x).mean((2, 3)) - x.sum((2, 3)), a=nn.Conv2d(2, 2, 3)), (2, 9, 9)),
}  # fmt: skip


def build(name):
    model, shape = MODELS[name]
    model = deepcopy(model).float()
    model(torch.zeros(2, *shape))  # lazy layers
    return gaussian(model).float(), shape


def check_logits(certifier, model, x):
    """|float32 − float64| of every difference of logits, at the input itself and from the distance to zero."""
    execution = certifier.error_pass.execute(x)
    with torch.no_grad():
        assert torch.equal(execution.logits, model(x))
        exact = deepcopy(model).double()(x.double())
    off = execution.logits.double() - exact
    centre = certifier.error_pass.execute(torch.zeros_like(x[:1]))
    distance = x.double().flatten(1).norm(dim=1)[:, None] * (1 + 1e-9)
    used = 0.0
    for y in range(certifier.classes):
        measured = (off[:, y : y + 1] - off).abs()
        bound = certifier.rounding.errors(execution, torch.full((len(x),), y)) / 2
        from_zero = (
            certifier.rounding.errors_from(centre)[y]
            + distance * certifier.rounding.growth[y]
        )
        assert (measured <= bound).all()
        assert (measured <= from_zero).all()
        used = max(used, (measured / bound.clamp(min=1e-300)).max().item())
    return used


@pytest.mark.parametrize("name", MODELS)
def test_measured_errors_stay_below_the_bound(name):
    model, shape = build(name)
    certifier = certifier_of(model, shape)
    used = 0.0
    for seed, (batch, size) in enumerate(
        [(1, 1.0), (7, 100.0), (64, 1e-3), (200, 1.0)]
    ):
        x = size * randn(batch, *shape, seed=seed).float()
        used = max(used, check_logits(certifier, model, x))
        if len(shape) == 3:
            check_logits(
                certifier, model, x.contiguous(memory_format=torch.channels_last)
            )
    assert used > 1e-9  # float32 does round, and the bound is not beyond all measure


@examples(1)
@given(drawn=networks, seed=st.integers(0, 999), exponent=st.integers(-4, 4))
def test_drawn_networks(drawn, seed, exponent):
    model, shape = drawn
    model = model.float()
    certifier = certifier_of(model, shape)
    check_logits(
        certifier, model, 10.0**exponent * randn(20, *shape, seed=seed).float()
    )


@pytest.mark.parametrize(
    "name",
    ["wide chain", "residual with batch norm", "softmax", "gelu", "circular padding"],
)
def test_errors_over_the_ball(name):
    """The bound from one input holds at others, with the growth per unit of distance."""
    model, shape = build(name)
    certifier = certifier_of(model, shape)
    x = randn(1, *shape).float()
    errors = certifier.rounding.errors(
        certifier.error_pass.execute(x), torch.zeros(1, dtype=torch.long)
    )
    wide = deepcopy(model).double()
    for seed in range(20):
        there = x + 10.0 ** (seed % 5 - 2) * randn(30, *shape, seed=seed).float()
        with torch.no_grad():
            off = model(there).double() - wide(there.double())
            here = model(x).double() - wide(x.double())
        distance = (there.double() - x.double()).flatten(1).norm(dim=1)[:, None]
        measured = (off[:, :1] - off).abs() + (here[:, :1] - here).abs()
        assert (measured <= errors + distance * certifier.rounding.growth[0]).all()


def test_float64_models_have_float64_errors():
    model = dense_chain(20, 30, 4)
    certifier = certifier_of(model, (20,))
    execution = certifier.error_pass.execute(randn(5, 20))
    assert 0 < execution.output.max() < 1e-12
    assert 0 < execution.sites.max() < 1e-11


def test_the_model_is_executed_not_changed():
    model, shape = build("in-place arithmetic")
    x = randn(3, *shape).float()
    before = x.clone()
    lipcert.certify(model, x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("joined", [False, True])
def test_constants_beside_the_input_are_rounded_too(joined):
    """A padding with large numbers, or a constant channel, before a convolution of few products."""
    constant = torch.full((1, 1, 8, 8), 1000.0)
    joint = Op(
        lambda m, x: torch.cat([x, constant.to(x.dtype).expand(x.shape[0], 1, 8, 8)], 1)
    )
    beside = joint if joined else nn.ConstantPad2d(1, 1000.0)
    model = nn.Sequential(
        beside,
        nn.Conv2d(1 + joined, 4, 3, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    x = 1e-3 * randn(16, 1, 8, 8).float()
    model(x)
    model = gaussian(model).float().eval()
    certifier = certifier_of(model, (1, 8, 8))
    exact = deepcopy(model).double()[:3](x.double())
    actual = (model[:3](x).double() - exact).flatten(1).norm(dim=1)
    assert (actual > 0).all()
    assert (actual <= certifier.error_pass.execute(x).sites[:, 0]).all()


def test_threads_take_turns():
    model = (
        gaussian(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)))
        .float()
        .eval()
    )
    certifier = certifier_of(model, (64,))
    batches = [randn(64, 64).float() * scale for scale in (1.0, 1000.0)] * 20
    alone = [certifier.certify(x).radius for x in batches[:2]] * 20
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda x: certifier.certify(x).radius, batches))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
