"""Classes that are settled in float32 are those of the function; the others are computed in float64."""

import copy
import pickle
from functools import cache

import pytest
import torch
from torch import nn

import lipcert
from lipcert.errors import LipcertError, ModelError, OptionError


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def dense():
    return nn.Sequential(
        nn.Linear(700, 40), nn.ReLU(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4)
    ), (700,)


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        Residual(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Tanh())),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 16, 5),
    ), (3, 8, 8)


def shallow():
    return nn.Sequential(nn.Flatten(), nn.Linear(300, 3)), (3, 100)


MAKERS = {"dense": dense, "convolutional": convolutional, "no nonlinearity": shallow}


@cache
def made(name, seed=0):
    """A model in float64 whose weights float32 has, its bound and its classifier."""
    torch.manual_seed(seed)
    model, shape = MAKERS[name]()
    model = model.eval().double()
    bound = lipcert.bound(model, shape)
    return model, shape, lipcert.SettledClassifier(model, bound), bound


def at_boundaries(model, shape, rows=200):
    """Inputs in float32 whose classes float32 can hardly tell: between inputs of two classes."""
    low, high = torch.randn(rows, *shape), torch.randn(rows, *shape)
    first = model(low.double()).argmax(1)
    other = model(high.double()).argmax(1) != first
    low, high, first = low[other], high[other], first[other]
    for _ in range(40):
        middle = (low + high) / 2
        same = model(middle.double()).argmax(1) == first
        keep = same.reshape(-1, *[1] * len(shape))
        low, high = torch.where(keep, middle, low), torch.where(keep, high, middle)
    return torch.cat([low, high])


@pytest.mark.parametrize("name", MAKERS)
def test_classes_at_boundaries_are_those_of_float64(name):
    wrong = 0
    for seed in range(2):
        model, shape, settled, _ = made(name, seed)
        x = at_boundaries(model, shape)
        with torch.no_grad():
            expected = model(x.double()).argmax(1)
            plain = copy.deepcopy(model).float()(x).argmax(1)
        assert (settled(x) == expected).all()
        wrong += int((plain != expected).sum())
    assert wrong > 0  # or float32 alone would pass


@pytest.mark.parametrize("name", MAKERS)
def test_errors_at_an_input_are_bounded(name):
    model, shape, settled, _ = made(name)
    narrow, rounding = settled._narrow[0], settled._rounding
    for scale in (1e-3, 1.0, 1e3):
        x = scale * torch.randn(50, *shape)
        execution = narrow.execute(x)
        with torch.no_grad():
            off = execution.logits.double() - model(x.double())
        classes = execution.logits.argmax(1)
        allowed = rounding.errors_at(execution, classes)
        differences = (off.gather(1, classes[:, None]) - off).abs()
        assert (differences <= allowed).all()
        assert float(allowed.mean()) < 1e-3 * scale + 1e-3


def test_most_inputs_are_settled_and_others_run_again():
    model, shape, settled, _ = made("convolutional")
    easy = torch.randn(100, *shape)
    assert settled.first_pass(easy)[1].float().mean() > 0.9
    near = at_boundaries(model, shape, 50)
    assert not settled.first_pass(near)[1].any()


def test_certificates_of_float64_hold_for_it():
    model, shape, settled, bound = made("dense")
    x = torch.randn(60, *shape)
    certificates = lipcert.certify(model, x.double(), bound)
    assert (settled(x) == certificates.prediction).all()
    directions = torch.nn.functional.normalize(torch.randn(60, *shape), dim=1)
    moved = x + 0.99 * certificates.radius[:, None].float() * directions
    assert (settled(moved) == certificates.prediction).all()


def test_nothing_is_settled_where_values_are_no_numbers_or_too_large():
    _, shape, settled, _ = made("dense")
    x = torch.randn(4, *shape)
    x[1, 0], x[2, 0], x[3] = float("nan"), float("inf"), 1e17 * x[3]
    assert settled.first_pass(x)[1].tolist() == [True, False, False, False]
    assert settled(x[:0]).shape == (0,)


def test_one_logit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 1)).eval().double()
    settled = lipcert.SettledClassifier(
        model, lipcert.bound(model, (6,), target="network")
    )
    x = torch.randn(50, 6)
    with torch.no_grad():
        assert (settled(x) == (model(x.double())[:, 0] > 0)).all()


REFUSED = {
    "a number": nn.LeakyReLU(0.01),
    "an integer": nn.Hardtanh(0, 2**24 + 1),
    "a default": nn.LeakyReLU(),
    "epsilon": nn.BatchNorm1d(4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_float32_does_not_have(name):
    model = nn.Sequential(nn.Linear(4, 4), REFUSED[name], nn.Linear(4, 3))
    model = model.eval().double()
    with pytest.raises(OptionError, match="float32 does not have"):
        lipcert.SettledClassifier(model, lipcert.bound(model, (4,)))


@pytest.mark.parametrize("value", [0.1, 1e-40, 1e300])
def test_weights_that_float32_does_not_have(value):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).eval().double()
    with torch.no_grad():
        model[0].weight[0, 0] = value
    with pytest.raises(LipcertError):
        lipcert.SettledClassifier(model, lipcert.bound(model, (4,)))


class Doubled(nn.Module):
    """In float64 x, otherwise 2·x: code that asks for types is captured as it runs in float64."""

    def forward(self, x):
        return x if x.dtype == torch.float64 else 2 * x


class Typed(nn.Module):
    def forward(self, x):
        return x * torch.ones(4, dtype=torch.float64)


def test_code_that_asks_for_types():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Doubled(), nn.Linear(4, 3))
    model = model.eval().double()
    settled = lipcert.SettledClassifier(model, lipcert.bound(model, (4,)))
    x = at_boundaries(model, (4,))
    with torch.no_grad():
        assert (settled(x) == model(x.double()).argmax(1)).all()
    typed = nn.Sequential(Typed(), nn.Linear(4, 3)).eval().double()
    with pytest.raises(OptionError, match="type"):
        lipcert.SettledClassifier(typed, lipcert.bound(typed, (4,)))


def test_what_it_is_made_of():
    model, shape, _, bound = made("dense")
    model = copy.deepcopy(model)  # which others use, too
    settled = lipcert.SettledClassifier(model, bound)
    narrow = copy.deepcopy(model).float()
    with pytest.raises(LipcertError):
        lipcert.SettledClassifier(narrow, bound)
    with pytest.raises(OptionError, match="in float64"):
        lipcert.SettledClassifier(narrow, lipcert.bound(narrow, shape))
    with pytest.raises(LipcertError):
        settled(torch.randn(2, *shape).double())
    x = torch.randn(5, *shape)
    before = settled(x)
    with torch.no_grad():
        model[0].weight.mul_(-1)
    assert (settled.half()(x) == before).all()
    settled.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    with pytest.raises(ModelError, match="hooks"):
        settled(x)


def test_autocast_is_refused():
    _, shape, settled, _ = made("dense")
    with torch.autocast("cpu"), pytest.raises(OptionError, match="autocast"):
        settled(torch.randn(2, *shape))


FOLLOWED = {
    "exported": lambda settled, x: torch.export.export(settled, (x,)),
    "traced": lambda settled, x: torch.jit.trace(settled, (x,)),
    "vectorised": lambda settled, x: torch.func.vmap(lambda r: settled(r[None]))(x),
    "pickled": lambda settled, x: pickle.dumps(settled),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_it_is_not_recorded_or_kept(name):
    _, shape, settled, _ = made("dense")
    with pytest.raises(LipcertError):
        FOLLOWED[name](settled, torch.randn(2, *shape))
    assert copy.deepcopy(settled) is settled
