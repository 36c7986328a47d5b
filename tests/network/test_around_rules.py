"""Modules with a rule: hooks, a __call__ or a forward of their own run as in the model, or are refused."""

import pytest
import torch
from torch import nn

import lipcert
from helpers import bounded, traced
from lipcert.certificate.certify import Certifier
from lipcert.network.rules import registry
from models import Op

SIZE = 6
PLACE = torch.linspace(-1, 1, SIZE) + 0.3


@pytest.fixture(autouse=True)
def _own_rules(monkeypatch):
    """Rules registered in a test are gone after it."""
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    monkeypatch.setattr(
        registry,
        "MODULE_RULES",
        {view: dict(own) for view, own in registry.MODULE_RULES.items()},
    )
    lipcert.register_rule(Squareplus)(lambda call, x: lipcert.Slope(0.0, 1.0, ulps=8.0))


class Squareplus(nn.Module):
    gain = 1.0

    def forward(self, x):
        return (x + torch.sqrt(x * x + 4)) / 2 * self.gain


def near(x):
    """Only not zero close to one place, where no trial looks."""
    return torch.relu(1 - 9 * (x - PLACE).abs().amax(-1, keepdim=True)) * torch.cos(
        torch.arange(SIZE) * 1.0
    )


def changed(module, args, out):
    return out + near(args[0])


class OwnCall(Squareplus):
    def __call__(self, x):
        return super().__call__(x) + near(x)


def before(module, args, kwargs):
    return (args[0] + near(args[0]),), kwargs


AROUND = {
    "after": lambda act: act.register_forward_hook(changed),
    "after, always": lambda act: act.register_forward_hook(changed, always_call=True),
    "after, with keywords": lambda act: act.register_forward_hook(
        lambda module, args, kwargs, out: out + near(args[0]), with_kwargs=True
    ),
    "before": lambda act: act.register_forward_pre_hook(
        lambda module, args: args[0] + near(args[0])
    ),
    "before, with keywords": lambda act: act.register_forward_pre_hook(
        before, with_kwargs=True
    ),
    "to a keyword": lambda act: act.register_forward_pre_hook(
        lambda module, args, kwargs: ((), {"x": args[0] + near(args[0])}),
        with_kwargs=True,
    ),
    "several": lambda act: [act.register_forward_hook(changed) for _ in range(3)],
    "looks only": lambda act: act.register_forward_hook(
        lambda module, args, out: setattr(module, "last", out)
    ),
    "__call__": lambda act: setattr(act, "__class__", OwnCall),
    "__call__ and hooks": lambda act: (
        setattr(act, "__class__", OwnCall),
        act.register_forward_hook(changed),
    ),
    "nothing": lambda act: None,
}
GLOBAL = {
    "after, global": lambda: nn.modules.module.register_module_forward_hook(
        lambda module, args, out: (
            out + near(args[0]) if isinstance(module, Squareplus) else None
        )
    ),
    "after, for all modules": lambda: nn.modules.module.register_module_forward_hook(
        lambda module, args, out: (
            out + near(out) if out.shape[1:] == (SIZE,) else 2 * out
        )
    ),
    "before, for all modules": lambda: (
        nn.modules.module.register_module_forward_pre_hook(
            lambda module, args: args[0] + near(args[0])
        )
    ),
}
MODELS = {
    "in a sequence": lambda act: nn.Sequential(act, nn.Linear(SIZE, 3)),
    "twice": lambda act: Op(
        lambda m, x: m.l(m.act(m.act(x) * 0.5)), act=act, l=nn.Linear(SIZE, 3)
    ),
    "its forward": lambda act: Op(
        lambda m, x: m.l(m.act.forward(x)), act=act, l=nn.Linear(SIZE, 3)
    ),
    "the model itself": lambda act: act,
}


def check_same(model):
    """The program and the classifier compute what the model computes, close to the place too."""
    x = PLACE + 0.02 * torch.randn(20, SIZE)
    assert bool(near(x).any(1).all())
    network, bound = traced(model, (SIZE,)), bounded(model, (SIZE,))
    certificates = Certifier(network, bound).certify(x)
    with torch.no_grad():
        expected = model(x)
    assert torch.equal(network.program.run(x), expected)
    assert torch.equal(certificates.prediction, expected.argmax(1))
    assert torch.equal(
        lipcert.CertifiedClassifier(network, bound).forward(x)[0], expected
    )


# All of them around two calls, but for what the first call leaves to the second; one of
# each kind in other models.
PAIRS = [(around, "twice") for around in AROUND if around != "looks only"]
PAIRS += [
    (around, shape)
    for around in ("after", "before, with keywords", "looks only", "__call__ and hooks")
    for shape in MODELS
    if shape != "twice"
]


@pytest.mark.parametrize(("around", "shape"), PAIRS)
def test_what_is_around_a_module_with_a_rule_runs_once(around, shape):
    act = Squareplus()
    AROUND[around](act)
    check_same(MODELS[shape](act).eval())


@pytest.mark.parametrize("around", GLOBAL)
def test_global_hooks_run_once_around_the_modules_of_the_model(around):
    model = nn.Sequential(
        Squareplus(), nn.Linear(SIZE, SIZE), nn.Sequential(Squareplus())
    ).eval()
    handle = GLOBAL[around]()
    try:
        check_same(model)
    finally:
        handle.remove()
    assert not nn.modules.module._global_forward_hooks


def test_a_forward_of_an_instance_has_no_rule():
    act = Squareplus()
    act.forward = lambda x: torch.relu(x + near(x))
    model = nn.Sequential(act, nn.Linear(SIZE, 3)).eval()
    check_same(model)


def test_the_constants_of_hooks_count():
    act = Squareplus()
    model = nn.Sequential(nn.Linear(SIZE, SIZE), act, nn.Linear(SIZE, 3)).eval()
    plain = float(lipcert.bound(model, (SIZE,), target="network").value)
    act.register_forward_hook(lambda module, args, out: 2 * out)
    act.register_forward_pre_hook(lambda module, args: 3 * args[0])
    assert float(
        lipcert.bound(model, (SIZE,), target="network").value
    ) == pytest.approx(6 * plain, rel=1e-6)


def test_rules_see_the_module_without_what_is_around_it():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(3.0))

        def forward(self, x):
            return self.factor * x

    @lipcert.register_rule(Scaled)
    def rule(call, x):
        assert isinstance(call.module, Scaled)
        return call.linear(call.module)

    model = nn.Sequential(Scaled())
    model[0].register_forward_hook(lambda module, args, out: 5 * out)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 7 * out
    )
    try:
        network = lipcert.trace(model, (SIZE,))
    finally:
        handle.remove()
    (columns,) = network.push(0, torch.eye(SIZE))
    torch.testing.assert_close(columns, 3.0 * 5 * 7 * 7 * torch.eye(SIZE))
    with torch.no_grad():
        model[0].factor.fill_(2.0)
    torch.testing.assert_close(
        network.push(0, torch.eye(SIZE))[0], 2.0 * 5 * 7 * 7 * torch.eye(SIZE)
    )


def set_before(m, x):
    m.act.gain = 1 + near(x)
    return m.l(m.act(x))


def set_inside_a_dictionary(m, x):
    m.act.table["gain"] = x
    return m.l(m.act(x))


SET = {
    "by a hook": lambda module, args: setattr(module, "gain", near(args[0])),
    "a number, by a hook": lambda module, args: setattr(module, "gain", 2.5),
    "by a hook inside": lambda module, args: module.inner.add_module("a", None),
    "the mode": lambda module, args: setattr(module, "training", True),
}
CODE = {"by the caller": set_before, "in a dictionary": set_inside_a_dictionary}


@pytest.mark.parametrize("name", [*SET, *CODE])
def test_what_a_module_with_a_rule_may_read_is_not_set_while_the_model_runs(name):
    act = Squareplus()
    act.table, act.inner = {}, nn.Sequential()
    act.register_forward_pre_hook(SET.get(name, lambda module, args: None))
    code = CODE.get(name, lambda m, x: m.l(m.act(x)))
    model = Op(code, act=act, l=nn.Linear(SIZE, 3)).eval()
    with pytest.raises(
        lipcert.UnsupportedError,
        match=r"act \(Squareplus\): .* its attribute .* is set while",
    ):
        lipcert.bound(model, (SIZE,))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weights_computed_by_hooks_and_by_parametrisations():
    class Dense(nn.Linear):
        pass

    lipcert.register_rule(Dense)(lambda call, x: call.linear())
    by_hook = nn.utils.weight_norm(Dense(SIZE, SIZE, bias=False))
    with pytest.raises(
        lipcert.UnsupportedError,
        match=r"1 \(Dense\): it has a rule, but .*utils\.parametrize",
    ):
        lipcert.bound(
            nn.Sequential(Squareplus(), by_hook, nn.Linear(SIZE, 3)).eval(), (SIZE,)
        )
    computed = nn.utils.parametrizations.weight_norm(Dense(SIZE, SIZE, bias=False))
    lipcert.bound(
        nn.Sequential(Squareplus(), computed, nn.Linear(SIZE, 3)).eval(), (SIZE,)
    )


CALLS = {
    "a second argument": lambda m, x: m.l(m.act(x, 2.0)),
    "a keyword": lambda m, x: m.l(m.act(x, scale=2.0)),
    "another first argument": lambda m, x: m.l(m.act(scale=x)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_module_with_a_rule_is_called_with_one_tensor(name):
    class Scaled(nn.Module):
        def forward(self, x=1.0, scale=1.0):
            return x * scale

    lipcert.register_rule(Scaled)(lambda call, x: lipcert.Slope(0.0, 2.0, ulps=2.0))
    model = Op(CALLS[name], act=Scaled(), l=nn.Linear(SIZE, 3)).eval()
    with pytest.raises(
        lipcert.UnsupportedError,
        match=r"act \(Scaled\): it has a rule, so it must be called with one",
    ):
        lipcert.bound(model, (SIZE,))
