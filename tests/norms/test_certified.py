"""Bounds on all norms of a network, by both paths."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from drawn import networks
from helpers import dense_maps, examples, transformed
from lipcert.errors import NonFiniteError, OptionError, TooLargeError
from lipcert.network.build import trace
from lipcert.norms import certified, plan
from lipcert.norms.certified import bound_norms
from lipcert.norms.kept import KeptNorms
from lipcert.norms.norm_options import NormOptions
from lipcert.norms.randomised import Ritz, bound_by_lanczos
from lipcert.norms.recurrence import Recurrence
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
        lambda: gaussian(
            nn.Sequential(
                nn.Conv2d(1, 2, 3, 1, 1),
                nn.ReLU(),
                nn.Conv2d(2, 1, 3, 1, 1),
                nn.Flatten(),
            )
        ),
        (1, 16, 16),
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_randomised_norms_of_maps_with_more_dimensions_than_steps(name):
    """Here the Lanczos process stops long before it has exhausted the space."""
    build, shape = LARGE[name]
    norms = check(build(), shape, NormOptions(dense_limit=5, seed=0), 0.01 + 1e-6)
    ratios = [norms.bounds[pair] / norms.lower[pair] - 1 for pair in norms.randomised]
    assert 0.004 < max(ratios) < 0.0101


def test_the_limit_decides_the_path_of_every_pair():
    norms = norms_of(dense_chain(6, 5, 8, 3), (6,), NormOptions(dense_limit=5, seed=0))
    assert norms.randomised == {
        (2, 0)
    }  # the only one with more than 5 dimensions on both sides


@pytest.mark.parametrize(("limit", "memory"), [(0, 700), (4096, 400)])
def test_little_memory_means_more_rounds_not_other_results(limit, memory, monkeypatch):
    model, shape = dense_chain(5, 6, 7, 4), (5,)
    rounds = []

    def counted(function):
        def call(*args):
            rounds.append(function)
            return function(*args)

        return call

    monkeypatch.setattr(
        certified, "bound_by_lanczos", counted(certified.bound_by_lanczos)
    )
    monkeypatch.setattr(
        certified.gram, "dense_rows", counted(certified.gram.dense_rows)
    )
    ample = norms_of(model, shape, NormOptions(dense_limit=limit, seed=3)).bounds
    few = len(rounds)
    scarce = norms_of(
        model, shape, NormOptions(dense_limit=limit, seed=3, memory=memory)
    ).bounds
    assert len(rounds) - few > few
    assert scarce == pytest.approx(ample, rel=1e-6 if limit else 1e-3)


def test_a_norm_that_does_not_fit_is_refused_with_a_forecast():
    options = NormOptions(dense_limit=0, memory=600)
    with pytest.raises(
        TooLargeError,
        match=r"takes 624 B, and 600 B may be used \(all norms: about 0:00:01, 624 B\)",
    ):
        norms_of(dense_chain(5, 6, 7, 4), (5,), options)


def test_progress_counts_work_and_reaches_one():
    seen: list[tuple[str, float]] = []
    norms_of(dense_chain(5, 6, 3), (5,), progress=lambda *report: seen.append(report))
    assert {what for what, _ in seen} == {"norms"}
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1.0)


def test_long_work_is_forecast(monkeypatch, caplog):
    monkeypatch.setattr(plan, "_LITTLE_WORK", 0.0)
    labels = set()
    with caplog.at_level("INFO", logger="lipcert"):
        norms_of(
            dense_chain(5, 6, 3),
            (5,),
            NormOptions(memory=2 << 30),
            progress=lambda what, done: labels.add(what),
        )
    assert labels == {"norms (about 0:00:01, 2 GiB)"}
    assert "norms: 3 proved, 0 by Lanczos, about 0:00:01, 2 GiB expected" in caplog.text


def test_norms_that_are_done_are_not_computed_again(tmp_path, monkeypatch):
    """Interrupted after the first round of Lanczos; the second time starts with what is kept."""
    model, shape = dense_chain(5, 6, 7, 4), (5,)
    options = NormOptions(dense_limit=0, seed=3, memory=700)
    expected = norms_of(model, shape, options).bounds
    limit, done = 2, []

    def interrupted(network, steps, *rest):
        if len(done) == limit:
            raise KeyboardInterrupt
        done.append(set(steps))
        return bound_by_lanczos(network, steps, *rest)

    monkeypatch.setattr(certified, "bound_by_lanczos", interrupted)
    with pytest.raises(KeyboardInterrupt):
        norms_of(model, shape, options, kept=KeptNorms(tmp_path))
    limit = 100
    assert norms_of(
        model, shape, options, kept=KeptNorms(tmp_path)
    ).bounds == pytest.approx(expected, rel=1e-9)
    assert sum(map(len, done)) == len(set.union(*done)) == len(expected)


@pytest.mark.parametrize(
    "change", [{"inflation": 0.001}, {"failure_probability": 1e-12}]
)
def test_kept_norms_have_to_be_as_precise_and_as_certain(tmp_path, change):
    model, shape = dense_chain(40, 50, 45, 4), (40,)
    coarse = NormOptions(dense_limit=0, seed=3, inflation=0.5)
    norms_of(model, shape, coarse, kept=KeptNorms(tmp_path))
    finer = replace(coarse, **change)
    fresh = norms_of(model, shape, finer).bounds
    assert norms_of(
        model, shape, finer, kept=KeptNorms(tmp_path)
    ).bounds == pytest.approx(fresh, rel=1e-9)


def test_a_norm_that_is_begun_anew_has_the_same_start(tmp_path, monkeypatch):
    """Another start, drawn because the first did not suit, would fail twice as often."""
    seeds = []

    def spied(network, goals, probability, seed, *rest):
        seeds.append(seed)
        return bound_by_lanczos(network, goals, probability, seed, *rest)

    monkeypatch.setattr(certified, "bound_by_lanczos", spied)
    model, shape = dense_chain(40, 50, 45, 4), (40,)
    for inflation in (0.5, 0.001):
        norms_of(
            model,
            shape,
            NormOptions(dense_limit=0, inflation=inflation),
            kept=KeptNorms(tmp_path),
        )
    assert len(seeds) > 1
    assert len(set(seeds)) == 1


@pytest.mark.parametrize("error", [0.0, 1e-16, 1e-3])
def test_a_product_that_vanishes_says_little_about_the_norm(error):
    """‖B‖ = 2·error/τ and a start with the part τ along its eigenvector: all of A b is lost in the error."""
    component = 1e-9
    vanished = Recurrence((0.0,), (0.0,), (0.0,), 1.0)
    ritz = Ritz(0.0, (vanished,), 1e-9, component)
    assert ritz.upper(error) >= 2 * error / component


def test_maps_that_only_scale_have_exact_norms():
    """All eigenvalues are equal, so that Lanczos ends after one step and knows little of what is left."""
    model = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(300, 2)).double()
    norms = norms_of(model, (300,), NormOptions(dense_limit=2, seed=0))
    assert (2, 1) in norms.randomised
    assert 0.5 <= norms.bounds[2, 1] <= 0.5 * (1 + 1e-8)


def test_a_seed_is_kept_from_the_first_moment_on(tmp_path):
    kept = KeptNorms(tmp_path)
    assert [kept.seed(1), kept.seed(2), KeptNorms(tmp_path).seed(3)] == [1, 1, 1]


def test_kept_norms_have_the_starts_that_are_wanted_now(tmp_path):
    """One start fails in another event than two do: to take what suits would fail more often."""
    model, shape = dense_chain(40, 50, 45, 4), (40,)
    certain = NormOptions(dense_limit=0, seed=3, failure_probability=1e-10)
    norms_of(model, shape, certain, kept=KeptNorms(tmp_path))
    cheaper = replace(certain, failure_probability=0.01)
    fresh = norms_of(model, shape, cheaper).bounds
    again = norms_of(model, shape, cheaper, kept=KeptNorms(tmp_path)).bounds
    assert again == pytest.approx(fresh, rel=1e-9)


def test_damaged_files_count_as_missing(tmp_path):
    kept = KeptNorms(tmp_path)
    kept.add({(1, 0): {"norm": 2.0, "rows": 3}})
    assert KeptNorms(tmp_path).find((1, 0)) == {"norm": 2.0, "rows": 3}
    file = tmp_path / "norms-0.json"
    file.write_text(file.read_text().replace("2.0", "1.0"))
    assert KeptNorms(tmp_path).find((1, 0)) is None
    file.write_text("{")
    assert KeptNorms(tmp_path).find((1, 0)) is None


def test_starts_come_from_entropy_unless_seeded():
    model = dense_chain(200, 200, 2)
    options = NormOptions(dense_limit=2, failure_probability=0.1, inflation=0.3)
    first, second = (norms_of(model, (200,), options).bounds[1, 0] for _ in range(2))
    assert first != second
    seeded = NormOptions(dense_limit=2, failure_probability=0.1, inflation=0.3, seed=7)
    assert (
        norms_of(model, (200,), seeded).bounds == norms_of(model, (200,), seeded).bounds
    )


@pytest.mark.parametrize("limit", [0, 4096])
@pytest.mark.parametrize("size", [0.0, 1e-170])
def test_vanishing_operators_are_bounded_from_above(limit, size):
    """The squares of 1e-170 vanish in float64; the bound must not."""
    model = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, size)
    norms = norms_of(model, (4,), NormOptions(dense_limit=limit, seed=0))
    assert 12**0.5 * size <= norms.bounds[1, 0] <= 1e-140


@pytest.mark.parametrize("limit", [0, 4096])
@pytest.mark.parametrize(("count", "size"), [(3, 1e-110), (9, 1e-37), (20, 1e-20)])
def test_what_underflows_on_the_way_may_be_enlarged_again(limit, count, size):
    """The identity, by way of numbers that float64 does not have."""
    factors = [size] * count + [1 / size] * count
    layers = [nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in factors]
    for layer, factor in zip(layers, factors, strict=True):
        nn.init.eye_(layer.weight).data.mul_(factor)
    network = trace(nn.Sequential(*layers).requires_grad_(False), (3,))
    try:
        norms = bound_norms(network, 1, NormOptions(dense_limit=limit, seed=0))
    except NonFiniteError:
        return
    assert norms.bounds[1, 0] >= 1.0


@pytest.mark.parametrize("limit", [0, 4096])
def test_norms_beyond_float64_are_refused(limit):
    model = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, 1e200)
    with pytest.raises(
        NonFiniteError, match="the norm between sites 0 and 1 cannot be bounded"
    ):
        norms_of(model, (4,), NormOptions(dense_limit=limit, seed=0))


REFUSED = {
    "inflation is 0, expected a number between 0 and 1": {"inflation": 0},
    "inflation is 1.5": {"inflation": 1.5},
    "failure_probability is 0, expected": {"failure_probability": 0},
    "failure_probability is 1, expected": {"failure_probability": 1},
    "expected a number between 1e-30 and 1": {"failure_probability": 1e-300},
    "inflation is 'much'": {"inflation": "much"},
    "dense_limit is -1, expected a whole number": {"dense_limit": -1},
    "dense_limit is 'a'": {"dense_limit": "a"},
    "memory is 0, expected a whole number, at least 1": {"memory": 0},
    "seed is -1, expected": {"seed": -1},
    "seed is 0.5, expected": {"seed": 0.5},
    "keep is 3, expected the path of a folder": {"keep": 3},
}


@pytest.mark.parametrize("message", REFUSED)
def test_options_out_of_range(message):
    with pytest.raises(OptionError, match=message):
        NormOptions(**REFUSED[message])


def test_kept_norms_of_another_network_are_not_taken(tmp_path):
    """A file that was copied into the folder of another network would make its bound false."""
    options = NormOptions(dense_limit=0, keep=tmp_path)
    small, large = dense_chain(12, 20, 4), dense_chain(12, 20, 4)
    with torch.no_grad():
        for parameter in large.parameters():
            parameter.mul_(30)
    lipcert.bound(small, (12,), options=options)
    (of_small,) = tmp_path.glob("*/norms-0.json")
    right = lipcert.bound(large, (12,), options=options)
    (of_large,) = set(tmp_path.glob("*/norms-0.json")) - {of_small}
    of_large.write_bytes(of_small.read_bytes())
    again = lipcert.bound(large, (12,), options=options)
    torch.testing.assert_close(again.value, right.value, rtol=0.02, atol=0)


def test_norms_are_kept_in_a_folder_that_a_string_names(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3)).eval()
    options = NormOptions(dense_limit=0, seed=0, keep=str(tmp_path))
    lipcert.bound(model, (40,), options=options)
    assert list(tmp_path.rglob("*"))
