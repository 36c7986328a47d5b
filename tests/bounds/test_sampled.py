"""Slopes that are found against exact constants by all activation patterns, spectral norms and guaranteed bounds."""

from itertools import product

import pytest
import torch
from torch import nn

from helpers import bounded, randn
from lipcert.bounds.sampled import estimate_sampled
from lipcert.errors import OptionError, TrainingModeError
from models import dense_chain, gaussian, named_models

MODELS = named_models()


def all_jacobians(model):
    """Of a network without biases in the plane: at a fine grid of angles, which meets every pattern but slivers."""
    angles = torch.linspace(0, 2 * torch.pi, 200_001, dtype=torch.float64)[:-1] + 1e-7
    x = torch.stack([angles.cos(), angles.sin()], 1).requires_grad_()
    outputs = model(x)
    return torch.stack(
        [
            torch.autograd.grad(z.sum(), x, retain_graph=True)[0]
            for z in outputs.unbind(1)
        ],
        1,
    )


def planar(*widths, seed):
    """A chain without biases, whose Jacobian depends on the angle of its two inputs only."""
    model = dense_chain(2, *widths, seed=seed)
    for layer in model[::2]:
        layer.bias.data.zero_()
    return model


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("widths", [(6, 3), (8, 6, 4)])
def test_it_finds_the_constant_of_small_networks(widths, seed):
    model = planar(*widths, seed=seed)
    jacobians = all_jacobians(model)
    network = torch.linalg.matrix_norm(jacobians, 2).max()
    rows = jacobians.norm(dim=2).amax(0)
    pairs = (jacobians[:, :, None] - jacobians[:, None]).norm(dim=3).amax(0)
    for target, exact in (
        ("network", network),
        ("per-class", rows),
        ("pairwise", pairs),
    ):
        found = estimate_sampled(model, (2,), target, samples=256)
        assert found.shape == exact.shape
        assert (found <= exact * (1 + 1e-9)).all()
        assert (
            found >= 0.99 * exact
        ).double().mean() > 0.7  # a pattern may belong to a narrow cone
        assert found.sum() >= 0.9 * exact.sum()


def test_one_hidden_layer_by_all_patterns():
    """With more inputs than neurons and biases, some input has each of the 2ⁿ patterns."""
    model = dense_chain(7, 6, 3, seed=5)
    first, last = model[0].weight.detach(), model[2].weight.detach()
    patterns = torch.tensor(list(product([0.0, 1.0], repeat=6)), dtype=torch.float64)
    exact = torch.linalg.matrix_norm((last * patterns[:, None]) @ first, 2).max()
    found = estimate_sampled(model, (7,), samples=256)
    assert 0.98 * exact <= found <= exact * (1 + 1e-9)


def test_linear_networks_have_their_spectral_norm():
    model = gaussian(nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 3)))
    weight = (model[2].weight @ model[1].weight).detach()
    for steps in (0, 3):
        found = {
            t: estimate_sampled(model, (3, 4), t, samples=2, steps=steps)
            for t in ("network", "pairwise")
        }
        torch.testing.assert_close(
            found["network"], torch.linalg.matrix_norm(weight, 2)
        )
        torch.testing.assert_close(found["pairwise"], torch.cdist(weight, weight))


@pytest.mark.parametrize("name", MODELS)
def test_it_lies_below_guaranteed_bounds(name):
    model, shape = MODELS[name]
    for target in ("network", "per-class", "pairwise"):
        found = estimate_sampled(model, shape, target, samples=24, steps=20)
        bound = bounded(model, shape, target=target)
        assert (found <= bound.value * (1 + 1e-9)).all()
        assert (found >= 0).all()
        assert found.max() > 0


def test_climbing_finds_more_than_random_inputs():
    model = dense_chain(30, 40, 40, 5)
    random, climbed = (
        estimate_sampled(model, (30,), samples=32, steps=steps) for steps in (0, 60)
    )
    assert climbed > 1.1 * random


def test_samples_in_parts_are_the_same_kind_of_samples(monkeypatch):
    """With memory for one Jacobian at a time every pair still gets its turn, and progress reaches the end."""
    model, shape = MODELS["chain"]
    monkeypatch.setattr("lipcert.bounds.sampled._ENTRIES", 1)
    reports = []
    found = estimate_sampled(
        model,
        shape,
        "pairwise",
        samples=9,
        steps=8,
        progress=lambda *r: reports.append(r),
    )
    assert (found + torch.eye(3) > 0).all()
    assert torch.equal(found, found.T)
    assert [fraction for _, fraction in reports] == sorted(
        fraction for _, fraction in reports
    )
    assert reports[-1] == ("slopes", 1.0)


def test_the_model_is_left_alone():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        first = estimate_sampled(model, (4,), samples=4)
    assert first == estimate_sampled(model, (4,), samples=4)  # the same seed
    assert first.dtype == torch.float64
    assert all(
        p.requires_grad and p.grad is None and p.dtype == torch.float32
        for p in model.parameters()
    )
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()
    )
    assert torch.isfinite(model(randn(2, 4).float())).all()


def test_refusals():
    model, shape = MODELS["chain"]
    for options in ({"target": "all"}, {"samples": 0}, {"steps": -1}):
        with pytest.raises(OptionError):
            estimate_sampled(model, shape, **options)
    with pytest.raises(TrainingModeError):
        estimate_sampled(nn.Sequential(nn.Linear(4, 3), nn.Dropout()).train(), shape)
