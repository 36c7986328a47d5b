"""Bounds on all norms of a network, by both paths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drawn import networks
from helpers import dense_maps, examples, transformed
from lipcert.errors import NonFiniteError, OptionError
from lipcert.norms.certified import NormOptions, bound_norms
from models import dense_chain, gaussian


def norms_of(model, shape, options=None, **more):
    network = transformed(model, shape)
    return bound_norms(network, network.depth + 1, options, **more)


def check(model, shape, options, inflation):
    norms = norms_of(model, shape, options)
    dense = dense_maps(model, shape).transformed
    for pair, matrix in dense.items():
        exact = torch.linalg.matrix_norm(matrix, 2).item()
        if pair not in norms.bounds:  # no linear path
            assert exact == 0.0
            continue
        bound = norms.bounds[pair]
        assert exact * (1 - 1e-13) <= bound <= exact * (1 + inflation) + 1e-12
    return norms


@examples(2)
@given(drawn=networks)
def test_deterministic_norms(drawn):
    norms = check(*drawn, None, 1e-6)
    assert norms.failure_probability == 0.0
    assert norms.lower == norms.bounds
    assert not norms.randomised


@examples(2)
@given(drawn=networks, seed=st.integers(0, 999))
def test_randomised_norms(drawn, seed):
    norms = check(*drawn, NormOptions(dense_limit=0, seed=seed), 0.01 + 1e-6)
    assert norms.failure_probability == 1e-9
    assert norms.randomised == set(norms.bounds)
    for pair, bound in norms.bounds.items():
        assert norms.lower[pair] <= bound


LARGE = {
    "chain": (lambda: dense_chain(210, 240, 220, 3), (210,)),
    "convolution": (
        lambda: gaussian(nn.Sequential(nn.Conv2d(1, 2, 3, 1, 1), nn.ReLU(), nn.Conv2d(2, 1, 3, 1, 1), nn.Flatten())),
        (1, 16, 16),
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_randomised_norms_of_maps_with_more_dimensions_than_steps(name):
    """Here the Lanczos process stops long before it has exhausted the space."""
    build, shape = LARGE[name]
    norms = check(build(), shape, NormOptions(dense_limit=5, seed=0), 0.01 + 1e-6)
    ratios = [norms.bounds[pair] / norms.lower[pair] - 1 for pair in norms.randomised]
    assert 0.0095 < max(ratios) < 0.0101


def test_the_limit_decides_the_path_of_every_pair():
    norms = norms_of(dense_chain(6, 5, 8, 3), (6,), NormOptions(dense_limit=5, seed=0))
    assert norms.randomised == {(2, 0)}  # the only one with more than 5 dimensions on both sides


@pytest.mark.parametrize("limit", [0, 4096])
def test_little_memory_means_more_rounds_not_other_results(limit):
    model, shape = dense_chain(5, 6, 7, 4), (5,)
    rounds: list[str] = []
    ample = norms_of(model, shape, NormOptions(dense_limit=limit, seed=3)).bounds
    options = NormOptions(dense_limit=limit, seed=3, memory=400)
    scarce = norms_of(model, shape, options, progress=lambda what, fraction: rounds.append(what)).bounds
    assert len(set(rounds)) > 1
    assert scarce == pytest.approx(ample, rel=1e-6 if limit else 1e-3)


def test_progress_reaches_one():
    fractions: dict[str, float] = {}
    norms_of(dense_chain(5, 6, 3), (5,), progress=fractions.__setitem__)
    assert fractions
    assert set(fractions.values()) == {1.0}


def test_starts_come_from_entropy_unless_seeded():
    model = dense_chain(200, 200, 2)
    options = NormOptions(dense_limit=2, failure_probability=0.1, inflation=0.3)
    first, second = (norms_of(model, (200,), options).bounds[1, 0] for _ in range(2))
    assert first != second
    seeded = NormOptions(dense_limit=2, failure_probability=0.1, inflation=0.3, seed=7)
    assert norms_of(model, (200,), seeded).bounds == norms_of(model, (200,), seeded).bounds


@pytest.mark.parametrize("limit", [0, 4096])
@pytest.mark.parametrize("size", [0.0, 1e-170])
def test_vanishing_operators_are_bounded_from_above(limit, size):
    """The squares of 1e-170 vanish in float64; the bound must not."""
    model = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, size)
    norms = norms_of(model, (4,), NormOptions(dense_limit=limit, seed=0))
    assert 12**0.5 * size <= norms.bounds[1, 0] <= 1e-149


@pytest.mark.parametrize("limit", [0, 4096])
def test_norms_beyond_float64_are_refused(limit):
    model = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, 1e200)
    with pytest.raises(NonFiniteError, match="the norm between sites 0 and 1 cannot be bounded"):
        norms_of(model, (4,), NormOptions(dense_limit=limit, seed=0))


REFUSED = {
    "inflation is 0, expected a number between 0 and 1": {"inflation": 0},
    "inflation is 1.5": {"inflation": 1.5},
    "failure_probability is 0, expected": {"failure_probability": 0},
    "failure_probability is 1, expected": {"failure_probability": 1},
    "must not be negative": {"dense_limit": -1},
    "dense_limit and memory": {"memory": 0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_options_out_of_range(message):
    with pytest.raises(OptionError, match=message):
        NormOptions(**REFUSED[message])
