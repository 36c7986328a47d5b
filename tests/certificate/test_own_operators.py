"""Operators of users read what they like: a bound is refused when they compute something else than it was made for."""

import pytest
import torch
from torch import nn

import lipcert
from lipcert.errors import BoundError, OptionError
from lipcert.network.rules import registry
from models import Op

STATE = {"table": torch.eye(6), "factor": 1.0, "calls": 0}


@pytest.fixture(autouse=True)
def _own_rules_and_state(monkeypatch):
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    monkeypatch.setattr(
        registry,
        "MODULE_RULES",
        {view: dict(own) for view, own in registry.MODULE_RULES.items()},
    )
    for key, value in STATE.items():
        monkeypatch.setitem(STATE, key, value)
    lipcert.register_rule(mix)(lambda call, x: call.linear(terms=6, nonnegative=True))
    lipcert.register_rule(bend)(lambda call, x: lipcert.Slope(0.0, 10.0, ulps=2.0))
    lipcert.register_rule(Mixed)(lambda call, x: call.linear(terms=6, nonnegative=True))


@torch.library.custom_op("lipcert_tests::mix", mutates_args=())
def mix(x: torch.Tensor) -> torch.Tensor:
    return x @ STATE["table"].to(x)


@torch.library.custom_op("lipcert_tests::bend", mutates_args=())
def bend(x: torch.Tensor) -> torch.Tensor:
    return STATE["factor"] * x.clamp(min=0)


@mix.register_fake
@bend.register_fake
def _(x):
    return torch.empty_like(x)


mix.register_autograd(lambda ctx, gradient: gradient @ STATE["table"].T.to(gradient))


class Mixed(nn.Module):
    def forward(self, x):
        return mix(x)


def twice(m, x):
    return m.l(mix(torch.relu(mix(x))))


MODELS = {
    "linear": (lambda m, x: m.l(mix(x)), "table"),
    "nonlinear": (lambda m, x: m.l(bend(x)), "factor"),
    "twice": (twice, "table"),
    "inside a module with a rule": (lambda m, x: m.l(m.mixed(x)), "table"),
    "in a hook": (lambda m, x: m.hooked(x), "factor"),
    "a constant": (lambda m, x: x @ mix(m.l.weight).T, "table"),
}


def made(name):
    model = Op(
        MODELS[name][0], l=nn.Linear(6, 3), mixed=Mixed(), hooked=nn.Linear(6, 3)
    ).eval()
    model.hooked.register_forward_hook(
        lambda module, args, out: bend(out) + bend(out / 2)
    )
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("change", [5.0, 1.001], ids=str)
def test_a_bound_of_another_operator_is_refused(name, change, tmp_path, monkeypatch):
    model, x = made(name), torch.randn(5, 6)
    bound = lipcert.bound(model, (6,))
    bound.save(tmp_path / "bound")
    before = lipcert.certify(model, x, bound)
    key = MODELS[name][1]
    value = STATE[key]
    monkeypatch.setitem(STATE, key, change * value)
    for kept in (bound, lipcert.Bound.load(tmp_path / "bound")):
        assert not kept.belongs_to(model)
        with pytest.raises(BoundError, match="an operator of your own"):
            lipcert.certify(model, x, kept)
    monkeypatch.setitem(STATE, key, value)
    assert torch.equal(lipcert.certify(model, x, bound).radius, before.radius)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "a constant"])
def test_certifying_ends_when_an_operator_changes(name, monkeypatch):
    model, x = made(name), torch.randn(5, 6)
    bound = lipcert.bound(model, (6,))
    classifier = lipcert.CertifiedClassifier(model, bound)
    _, radius = classifier(x)
    assert bool((radius > 0).any())
    key = MODELS[name][1]

    def loader():
        yield x
        monkeypatch.setitem(STATE, key, 5 * STATE[key])
        yield x

    with pytest.raises(
        BoundError,
        match=r"operator .*lipcert_tests\.\w+\.default\) is not torch's own, and computes",
    ):
        lipcert.certify(model, loader(), bound)
    with pytest.raises(BoundError, match=r"compute the bound again"):
        classifier(x)


def test_a_classifier_keeps_constants_that_an_operator_has_computed(monkeypatch):
    model, x = made("a constant"), torch.randn(5, 6)
    classifier = lipcert.CertifiedClassifier(model, lipcert.bound(model, (6,)))
    before = classifier(x)
    monkeypatch.setitem(STATE, "table", 5 * STATE["table"])
    assert all(torch.equal(a, b) for a, b in zip(before, classifier(x), strict=True))


def test_a_classifier_with_an_operator_can_be_exported():
    model, x = made("nonlinear"), torch.randn(5, 6)
    classifier = lipcert.CertifiedClassifier(model, lipcert.bound(model, (6,)))
    exported = torch.export.export(classifier, (x,)).module()
    assert all(
        torch.equal(a, b) for a, b in zip(exported(x), classifier(x), strict=True)
    )


@pytest.mark.parametrize("name", MODELS)
def test_no_class_is_settled_by_operators_whose_float32_is_unknown(name):
    model = made(name).double()
    bound = lipcert.bound(model, (6,))
    with pytest.raises(OptionError, match="not an operator of torch"):
        lipcert.SettledClassifier(model, bound)
