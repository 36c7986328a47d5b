"""What is not certified, and what the messages say."""

import pytest
import torch
from torch import nn

import lipcert
from helpers import randn
from lipcert.certificate import Certifier
from lipcert.errors import (
    BoundError,
    LabelError,
    NonFiniteError,
    OptionError,
    ShapeError,
    TrainingModeError,
)
from lipcert.network.build import normal_form
from lipcert.network.rules.registry import MODULE_RULES
from models import Op, dense_chain, gaussian


@pytest.fixture
def model():
    return dense_chain(3, 4, 2).float()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_named_by_their_index(model, value):
    x = randn(30, 3).float()
    x[17, 1] = value
    for batch_size in (256, 8):
        with pytest.raises(NonFiniteError, match="input 17 contains NaN or infinity"):
            lipcert.certify(model, x, batch_size=batch_size)
    with pytest.raises(NonFiniteError, match="input 17 contains"):
        lipcert.certify(model, [x[:10], x[10:]])


def test_overflow_names_the_input(model):
    x = randn(9, 3).float()
    x[5] *= 1e38
    with pytest.raises(
        NonFiniteError,
        match=r"the model overflows on input 5, or comes near it: .* nothing is certified",
    ):
        lipcert.certify(model, x, batch_size=2)


def test_overflow_inside_that_the_logits_do_not_show():
    model = gaussian(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))).float()
    nn.init.constant_(model[0].weight, 1e15)
    x = torch.tensor([[1.0, 2.0], [1e25, 1e25]])
    assert torch.isfinite(model(x)).all()
    with pytest.raises(NonFiniteError, match="the model overflows on input 1"):
        lipcert.certify(model, x)


def test_inputs_of_another_type_or_shape(model):
    bound = lipcert.bound(model, (3,))
    with pytest.raises(
        ShapeError,
        match=r"inputs have dtype torch.float64, the model computes in torch.float32",
    ):
        lipcert.certify(model, randn(2, 3), bound)
    with pytest.raises(ShapeError, match=r"inputs have dtype torch.int64"):
        lipcert.certify(model, torch.ones(2, 3, dtype=torch.long), bound)
    with pytest.raises(
        ShapeError, match=r"inputs have shape \(4,\) each, the bound is for \(3,\)"
    ):
        lipcert.certify(model, randn(2, 4).float(), bound)
    with pytest.raises(ShapeError, match=r"does not accept inputs of shape \(4,\)"):
        lipcert.certify(model, randn(2, 4).float())


def test_arguments_of_other_kinds(model):
    x, bound = randn(2, 3).float(), lipcert.bound(model, (3,))
    with pytest.raises(
        ShapeError, match=r"a single input needs a batch axis, x\[None\]"
    ):
        lipcert.certify(model, x[0], bound)
    with pytest.raises(
        ShapeError, match=r"use x.to\(torch.float32\) / 255, if they are pixels"
    ):
        lipcert.certify(model, torch.ones(2, 3, dtype=torch.uint8), bound)
    for loader in ([{"x": x}], [(x,)]):
        with pytest.raises(
            ShapeError,
            match=r"the loader gives (dict|tuple), expected inputs or \(inputs, labels\)",
        ):
            lipcert.certify(model, loader, bound)
    with pytest.raises(ShapeError, match="inputs are ndarray, expected a tensor"):
        lipcert.certify(model, [(x.numpy(), torch.zeros(2))], bound)
    with pytest.raises(
        OptionError,
        match=r"bound is str, expected what lipcert.bound or Bound.load returns",
    ):
        lipcert.certify(model, x, "bound.json")
    with pytest.raises(
        LabelError, match="labels are list, expected a tensor of integers"
    ):
        lipcert.certify(model, x, bound, labels=[0, 1])
    certificates = lipcert.certify(model, x, bound, labels=torch.tensor([0, 1]))
    assert certificates.certified_accuracies(torch.tensor([0.0, 9e9]).numpy()) == [
        certificates.clean_accuracy,
        0.0,
    ]
    assert (
        certificates.certified_accuracy(torch.zeros(()).numpy()[()])
        == certificates.clean_accuracy
    )


def test_labels(model):
    x = randn(4, 3).float()
    with pytest.raises(
        LabelError, match=r"labels have shape \(3,\), expected one per input, \(4,\)"
    ):
        lipcert.certify(model, x, labels=torch.zeros(3, dtype=torch.long))
    with pytest.raises(LabelError, match=r"labels have shape \(4, 1\)"):
        lipcert.certify(model, [(x, torch.zeros(4, 1, dtype=torch.long))])
    for wrong in (
        torch.tensor([0, 1, 2, 0]),
        torch.tensor([0, -1, 0, 0]),
        torch.zeros(4),
    ):
        with pytest.raises(LabelError, match="labels must be integers from 0 to 1"):
            lipcert.certify(model, x, labels=wrong)
    with pytest.raises(OptionError, match="let the loader give"):
        lipcert.certify(model, [x], labels=torch.zeros(4, dtype=torch.long))
    with pytest.raises(
        OptionError, match="accuracy needs labels: pass labels= or a loader"
    ):
        _ = lipcert.certify(model, x).clean_accuracy


def test_nothing_to_certify(model):
    for empty in ([], torch.zeros(0, 3)):
        with pytest.raises(OptionError, match="there are no inputs to certify"):
            lipcert.certify(model, empty)
    with pytest.raises(OptionError, match="batch_size is 0, expected 1 or more"):
        lipcert.certify(model, randn(2, 3).float(), batch_size=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(model, dtype):
    bound = lipcert.bound(model, (3,))
    with pytest.raises(
        OptionError, match=rf"float32 and float64, not {dtype}; convert the model"
    ):
        Certifier(model.to(dtype), bound)


def test_half_precision_inside_a_float32_model():
    reduced = Op(
        lambda m, x: m.a(x.to(torch.bfloat16).type_as(m.a.weight)), a=nn.Linear(3, 2)
    )
    with pytest.raises(
        lipcert.UnsupportedError,
        match=r"computes in torch.bfloat16 inside a model in torch.float32",
    ):
        lipcert.bound(reduced, (3,))


def test_convolutions_by_winograd(model):
    bound = lipcert.bound(model, (3,))
    with torch.backends.mkldnn.flags(enabled=False):
        with pytest.raises(OptionError, match="Winograd"):
            Certifier(model, bound)
        with torch.backends.nnpack.flags(enabled=False):
            Certifier(model, bound)


def test_arithmetic_with_fewer_bits(model):
    x, bound = randn(2, 3).float(), lipcert.bound(model, (3,))
    certifier = Certifier(model, bound)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for use in (lambda: Certifier(model, bound), lambda: certifier.certify(x)):
            with pytest.raises(
                OptionError,
                match=r"fewer bits; call torch.set_float32_matmul_precision\('highest'\)",
            ):
                use()
        lipcert.certify(model.double(), x.double())  # does not concern float64
    finally:
        torch.set_float32_matmul_precision(before)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(OptionError, match="autocast computes with fewer bits"),
    ):
        certifier.certify(x)


@pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "conv"), reason="this torch has no such switch"
)
def test_convolutions_with_fewer_bits(model):
    switch = torch.backends.mkldnn.conv
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    try:
        with pytest.raises(OptionError, match="fewer bits"):
            lipcert.certify(model, randn(2, 3).float())
    finally:
        switch.fp32_precision = before
    assert len(lipcert.certify(model, randn(2, 3).float())) == 2


def test_a_bound_of_another_model(model):
    bound = lipcert.bound(model, (3,))
    with pytest.raises(BoundError, match="made for other weights"):
        lipcert.certify(
            dense_chain(3, 4, 2, seed=1).float(), randn(2, 3).float(), bound
        )
    with pytest.raises(BoundError, match="made for other weights"):
        lipcert.certify(
            dense_chain(3, 4, 2, activation=nn.GELU).float(), randn(2, 3).float(), bound
        )


def test_training_mode_and_weights_that_are_not_finite():
    model = gaussian(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    bound = lipcert.bound(model, (3,))
    with pytest.raises(TrainingModeError, match=r"1 \(BatchNorm\) is in training mode"):
        lipcert.certify(model.train(), randn(2, 3), bound)
    model.eval()[0].weight.data[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"0.weight contains NaN or infinity"):
        lipcert.certify(model, randn(2, 3), bound)


class Shift(nn.Module):
    def forward(self, x):
        return torch.roll(torch.sin(x), 1, 1)


def test_rules_that_do_not_state_their_rounding_errors(monkeypatch):
    monkeypatch.setitem(MODULE_RULES, "residual", dict(MODULE_RULES["residual"]))
    model = nn.Sequential(nn.Linear(3, 3), Shift())
    x = randn(2, 3).float()

    @lipcert.register_rule(Shift)
    def nonlinear(call, x):
        return lipcert.Slope(-1.0, 1.0, elementwise=False)

    with pytest.raises(
        lipcert.UnsupportedError,
        match=r"1 \(rule\): its rounding errors are unknown.*state ulps=",
    ):
        lipcert.certify(model, x)

    @lipcert.register_rule(Shift)
    def stated(call, x):
        return lipcert.Slope(-1.0, 1.0, elementwise=False, ulps=4.0)

    assert (lipcert.certify(model, x).radius >= 0).all()

    class Double(nn.Module):
        def forward(self, x):
            return x + x

    @lipcert.register_rule(Double)
    def linear(call, x):
        return call.linear()

    with pytest.raises(
        lipcert.UnsupportedError, match=r"state terms= and nonnegative=True in its rule"
    ):
        lipcert.certify(nn.Sequential(nn.Linear(3, 3), Double()), x)


def test_interpolation_with_inexact_weights():
    upsample = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Flatten())
    assert (lipcert.certify(upsample, randn(2, 1, 3, 3).float()).radius >= 0).all()
    upsample[0] = nn.Upsample(size=7, mode="bilinear")
    with pytest.raises(
        lipcert.UnsupportedError, match="its rounding errors are unknown"
    ):
        lipcert.certify(upsample, randn(2, 1, 3, 3).float())


def test_weights_that_are_computed_with_rounding_errors():
    """Standardising a nearly constant kernel cancels most of its digits in float32."""
    model = Op(lambda m, x: m.out(torch.relu(nn.functional.linear(x, standardised(m.kernel.weight)))),
               kernel=nn.Linear(6, 4), out=nn.Linear(4, 3))  # fmt: skip
    with torch.no_grad():
        model.kernel.weight.copy_(1 + 1e-4 * randn(4, 6))
    model = model.float().eval()
    executed = standardised(model.kernel.weight).detach()
    plain = nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU(), model.out).eval()
    plain[0].weight = nn.Parameter(executed)
    x = randn(9, 6).float()
    torch.testing.assert_close(
        lipcert.bound(model, (6,)).value,
        lipcert.bound(plain, (6,)).value,
        rtol=1e-12,
        atol=0,
    )
    torch.testing.assert_close(
        lipcert.certify(model, x).radius,
        lipcert.certify(plain, x).radius,
        rtol=1e-12,
        atol=0,
    )
    scaled = Op(
        lambda m, x: m.out(x * ((m.a * 1.1 + m.a * 0.3) - m.a * 1.4)),
        out=nn.Linear(6, 3),
    ).eval()
    scaled.a = nn.Parameter(torch.rand(6))
    exact = normal_form(lipcert.trace(scaled, (6,)).program, exact=True)
    factor = ((scaled.a * 1.1 + scaled.a * 0.3) - scaled.a * 1.4).detach()
    assert torch.equal(exact.nodes[1].edges[0].op.factor(), factor.double())


def standardised(weight):
    return (weight - weight.mean(1, keepdim=True)) / weight.std(1, keepdim=True)


@pytest.mark.parametrize(
    "parametrisation",
    [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal],
)
def test_parametrised_weights_are_those_that_are_executed(parametrisation):
    model = nn.Sequential(
        parametrisation(nn.Linear(6, 5)), nn.ReLU(), nn.Linear(5, 3)
    ).eval()
    x = randn(20, 6).float()
    exact = normal_form(lipcert.trace(model, (6,)).program, exact=True)
    assert torch.equal(exact.nodes[1].edges[0].op.weight(), model[0].weight.double())
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), model[2]).eval()
    plain.load_state_dict(
        {
            "0.weight": model[0].weight,
            "0.bias": model[0].bias,
            **model[2].state_dict(prefix="2."),
        }
    )
    torch.testing.assert_close(
        lipcert.certify(model, x).radius,
        lipcert.certify(plain, x).radius,
        rtol=1e-4,
        atol=1e-6,
    )


def test_rules_without_magnitudes(monkeypatch):
    monkeypatch.setitem(MODULE_RULES, "residual", dict(MODULE_RULES["residual"]))
    lipcert.register_rule(Differences)(
        lambda call, x: call.linear(lambda t: t[:, 1:] - t[:, :-1], terms=2)
    )
    model = nn.Sequential(
        nn.Linear(4, 5), Differences(), nn.ReLU(), nn.Linear(4, 3)
    ).eval()
    with pytest.raises(
        lipcert.UnsupportedError, match=r"state terms= and nonnegative=True in its rule"
    ):
        lipcert.certify(model, randn(2, 4).float())


class Differences(nn.Module):
    def forward(self, x):
        return x[:, 1:] - x[:, :-1]
