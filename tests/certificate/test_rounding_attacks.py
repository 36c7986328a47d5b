"""Floating-point attacks in the manner of Jin et al.: to the edge of the radius, then through neighbouring floats.

A certificate is about the model as executed in float32. Candidates are float32 inputs whose exact distance is within
the radius; the model itself judges them.
"""

import os
from functools import cache
from math import sqrt

import pytest
import torch
from torch import nn

from helpers import certifier_of, randn
from models import dense_chain, gaussian

FULL = os.environ.get("LIPCERT_FULL") == "1"
LINEAR, SMALL = (1000, 200) if FULL else (100, 21)
CANDIDATES = 32


def neighbours(start, direction, generator):
    """Float32 inputs around `start`: random coordinates move by one or two floats in the direction."""
    towards = torch.where(direction > 0, torch.inf, -torch.inf).float()
    points = start.expand(CANDIDATES, -1).clone()
    shares = torch.linspace(0, 1, CANDIDATES)[:, None]
    for _ in range(2):
        moved = torch.rand(points.shape, generator=generator) < shares
        points = torch.where(
            moved, torch.nextafter(points, towards.expand_as(points)), points
        )
    return points


def candidates(x, direction, radius, generator):
    """Points near x + radius·direction that are really within the radius; distances in float64."""
    unit = direction / direction.norm()
    points = []
    for shrink in (1.0, 1 - 1e-7, 1 - 1e-6, 1 - 1e-5):
        edge = (x.double() + shrink * radius * unit).float()
        points += [
            neighbours(edge, unit, generator),
            neighbours(edge, -unit, generator),
        ]
    cloud = torch.cat(points)
    distance = (cloud.double() - x.double()).norm(dim=1)
    return cloud[distance * (1 + 1e-12) <= radius]


@torch.no_grad()
def violated(model, x, prediction, direction, radius, generator):
    """Whether the search finds another prediction within the radius."""
    cloud = candidates(x, direction, radius, generator)
    return len(cloud) > 0 and bool((model(cloud).argmax(1) != prediction).any())


@cache
def linear(n, k):
    """One module for all weights of these sizes, so that it is captured once."""
    return nn.Linear(n, k).requires_grad_(False).eval()


@cache
def chain(activation):
    build = {
        "relu": nn.ReLU,
        "nearly linear": lambda: nn.LeakyReLU(0.99999),
        "tanh": nn.Tanh,
    }[activation]
    return dense_chain(20, 30, 30, 3, activation=build).float().requires_grad_(False)


def classifier(seed):
    """A float32 linear classifier and an input, of many sizes, magnitudes and distances from the boundary."""
    generator = torch.Generator().manual_seed(seed)
    n, k = (4, 30, 300)[seed % 3], (2, 5)[seed % 2]
    model = linear(n, k)
    offsets = torch.rand(k, generator=torch.Generator().manual_seed(10_000 + seed))
    model.bias.copy_((2 * offsets - 1) / sqrt(n))
    model.weight.copy_(
        torch.randn(k, n, generator=generator)
        * 10 ** (2 * torch.rand(k, 1, generator=generator) - 1)
    )
    x = torch.randn(1, n, generator=generator) * 10.0 ** (seed % 4 - 1)
    if seed % 5 == 0:  # close to the boundary, where rounding decides
        model.bias.copy_(
            -(model.weight @ x[0]) + 1e-4 * torch.rand(k, generator=generator)
        )
    return model, x, generator


def towards_the_boundary(model, x, y):
    """The normal of the nearest face of a linear classifier, and the radius that ignores rounding."""
    w = model.weight.double()
    logits = model(x).double()[0]
    distances = (logits[y] - logits) / (w[y] - w).norm(dim=1)
    distances[y] = torch.inf
    i = int(distances.argmin())
    return w[i] - w[y], float(distances[i])


def test_linear_classifiers():
    """No violation within certified radii; the radii that ignore rounding are violated by the same search."""
    broken = attacked = 0
    for seed in range(LINEAR):
        model, x, generator = classifier(seed)
        certificate = certifier_of(model, x.shape[1:]).certify(x)
        y, radius = int(certificate.prediction), float(certificate.radius)
        direction, naive = towards_the_boundary(model, x, y)
        assert radius <= naive * (1 + 1e-6)
        if radius > 0:
            assert not violated(model, x, y, direction, radius, generator), seed
            attacked += 1
        if naive > 0:
            broken += violated(model, x, y, direction, naive, generator)
    assert attacked > 0.8 * LINEAR
    assert broken > 0.02 * LINEAR


def test_radii_that_are_a_little_too_large_are_found_out():
    caught = 0
    for seed in range(50):
        model, x, generator = classifier(3 * seed + 1)
        y = int(model(x).argmax(1))
        direction, naive = towards_the_boundary(model, x, y)
        caught += violated(model, x, y, direction, 1.001 * naive, generator)
    assert caught >= 40


def ascend(model, x, y, radius):
    """Projected gradient ascent on the largest other logit, within the radius, in float64."""
    wide = x.double()
    point = wide.clone()
    for _ in range(20):
        at = point.float().requires_grad_()
        logits = model(at)[0]
        others = logits.clone()
        others[y] = -torch.inf
        (gradient,) = torch.autograd.grad(others.max() - logits[y], at)
        if gradient.norm() == 0:
            break
        point = point + 0.5 * radius * gradient.double() / gradient.double().norm()
        offset = point - wide
        point = wide + offset * min(1.0, radius / float(offset.norm()))
    return (point - wide)[0]


@pytest.mark.parametrize("activation", ["relu", "nearly linear", "tanh"])
def test_small_networks(activation):
    """Bounds of nearly linear networks are nearly tight, so that their radii end close to the boundary."""
    close, model = 0, chain(activation)
    for seed in range(-(-SMALL // 3)):
        gaussian(model, seed).float()
        certifier = certifier_of(model, (20,))
        x = randn(1, 20, seed=seed).float()
        certificate = certifier.certify(x)
        y, radius = int(certificate.prediction), float(certificate.radius)
        assert radius > 0
        direction = ascend(model, x, y, radius)
        generator = torch.Generator().manual_seed(seed)
        assert not violated(model, x, y, direction, radius, generator), seed
        close += violated(model, x, y, direction, 1.01 * radius, generator)
    assert close > 0 or activation != "nearly linear"
