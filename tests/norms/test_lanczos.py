"""Lanczos from random starts: exact in the end, and wrong no more often than predicted before."""

from math import inf, log, pi, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from helpers import dense_maps, examples, randn, transformed
from lipcert.network.patches import constant_kernels
from lipcert.norms.lanczos import run_lanczos
from lipcert.norms.lanczos_process import Process
from lipcert.norms.randomised import (
    Goal,
    bound_by_lanczos,
    eigenvalue_gap,
    failure_probability,
    required_steps,
    starts,
)
from lipcert.norms.recurrence import Recurrence
from lipcert.progress import no_report
from models import dense_chain

STARTS = 2000


def one_layer(matrix: torch.Tensor) -> lipcert.Network:
    layer = nn.Linear(
        matrix.shape[1], matrix.shape[0], bias=False, dtype=torch.float64
    ).requires_grad_(False)
    layer.weight.data = matrix
    return lipcert.trace(layer, (matrix.shape[1],))


def top_value(network: lipcert.Network, steps: int, seed: int) -> float:
    return sqrt(run_lanczos(network, {(1, 0): steps}, (seed,))[1, 0].ritz())


def spectrum(kind: str, n: int, epsilon: float) -> np.ndarray:
    """Eigenvalues with 1 at the top and the others just below 1 − ε, where they are easily mistaken for it."""
    edge = (1 - epsilon) * 0.999
    others = {
        "chebyshev": edge * (1 + np.cos(np.linspace(0, np.pi, n - 1))) / 2,
        "uniform": np.linspace(0, edge, n - 1),
        "crowded": edge * (1 - np.linspace(0, 1, n - 1) ** 2 / 2),
    }
    return np.r_[1.0, others[kind]]


@pytest.mark.parametrize(
    ("n", "steps", "epsilon"), [(24, 4, 0.25), (60, 5, 0.2), (40, 3, 0.5)]
)
@pytest.mark.parametrize("kind", ["chebyshev", "uniform", "crowded"])
def test_underestimates_are_no_more_frequent_than_predicted(kind, n, steps, epsilon):
    predicted = failure_probability(n, steps, epsilon)
    assert 0.05 <= predicted <= 0.5
    eigenvalues = torch.from_numpy(spectrum(kind, n, epsilon))
    values = []
    for seed in range(STARTS):
        process = Process(randn(1, n, seed=seed), steps)
        while not process.done:
            process.advance(eigenvalues * process.vector)
        values.append(sqrt(process.ritz() / (1 - epsilon)))
    wrong = sum(value < 1.0 for value in values)
    assert wrong / STARTS <= predicted
    assert max(values) <= (1 + 1e-12) / sqrt(
        1 - epsilon
    )  # Ritz values lie below the norm
    assert (
        wrong > 0 or kind != "chebyshev"
    )  # the hardest spectrum does deceive some starts


@pytest.mark.parametrize(
    ("n", "steps", "probability"),
    [(24, 4, 0.3), (60, 5, 0.1), (40, 12, 0.05), (40, 3, 0.2)],
)
@pytest.mark.parametrize("kind", ["chebyshev", "uniform", "crowded"])
def test_bounds_from_what_was_seen_fail_no_more_often_than_predicted(
    kind, n, steps, probability
):
    """Also if the steps end when the bound looks best, for chance is in the start alone."""
    eigenvalues = torch.from_numpy(spectrum(kind, n, 0.3))
    component = probability / sqrt(2 / pi * n)
    wrong, reached = 0, []
    for seed in range(STARTS):
        process = Process(randn(1, n, seed=seed), steps)
        deceived = False
        while not process.done:
            process.advance(eigenvalues * process.vector)
            # F falls: the bound is below 1 if and only if F(1) is below the component.
            hidden = process.recurrence().hidden(1.0 / process.unit, 0.0)
            deceived = deceived or hidden < component
        wrong += deceived
        if seed < 100:
            reached.append(bound_of(process, component))
    assert wrong / STARTS <= probability
    assert (
        wrong > 0 or kind == "uniform" or steps > 5
    )  # some starts hide the largest eigenvalue
    assert sorted(reached)[50] <= 1 / max(1 - gap(n, steps, probability), 1e-9)


def bound_of(process: Process, component: float) -> float:
    recurrence = process.recurrence()
    return recurrence.largest_eigenvalue(component, 0.0, process.ritz())


def gap(n: int, steps: int, probability: float) -> float:
    """The ε that so many steps leave by the bound that is known before them."""
    return (log(1.648 * sqrt(n) / probability) / (2 * steps - 1)) ** 2


@pytest.mark.parametrize("scale", [1e-140, 1.0, 1e140])
def test_a_bound_reaches_its_goal_with_fewer_steps_than_are_planned(scale):
    matrix = scale * torch.diag(torch.logspace(0, -3, 200, dtype=torch.float64))
    network = one_layer(matrix)
    planned = Goal.of(network, (1, 0), 0.01, 1e-12)
    ritz = bound_by_lanczos(network, {(1, 0): planned}, 1e-12, 3, no_report)[1, 0]
    assert len(ritz.recurrences) == starts(1e-12) == 2
    for recurrence in ritz.recurrences:
        assert len(recurrence.alpha) < planned.steps / 2
    assert ritz.value <= scale * (1 + 1e-12)
    assert scale <= ritz.upper(0.0) <= 1.01 * ritz.value


def bounded(matrix, steps):
    network = one_layer(matrix)
    goals = {(1, 0): Goal(1e-9, steps)}
    return bound_by_lanczos(network, goals, 1e-12, 0, no_report)[1, 0].upper(0.0)


def test_zero_maps_have_a_bound():
    assert bounded(torch.zeros(5, 4, dtype=torch.float64), 4) <= 1e-140


@pytest.mark.parametrize("n", [1, 2, 10, 40])
def test_a_basis_of_the_whole_space_gives_the_norm(n):
    matrix = randn(n, n)
    norm = torch.linalg.matrix_norm(matrix, 2).item()
    assert norm <= bounded(matrix, n) <= norm * 1.001


def test_a_space_that_ends_early_gives_the_norm():
    diagonal = torch.zeros(50, dtype=torch.float64)
    diagonal[:2] = torch.tensor([3.0, 1.0])
    assert 3.0 <= bounded(torch.diag(diagonal), 50) <= 3.0 * (1 + 1e-6)


@pytest.mark.parametrize("error", [0.0, 1e-12, 1e-6, 1e-3])
@pytest.mark.parametrize("kind", ["chebyshev", "uniform", "crowded"])
@pytest.mark.parametrize("part", [0.0, 1e-9, 1e-5])
def test_no_error_of_products_hides_more_than_is_allowed_for(kind, error, part):
    """An adversary who knows u and bends every product so that the vectors have no part along it."""
    n, steps = 60, 25
    eigenvalues = torch.from_numpy(spectrum(kind, n, 0.1))  # u is the first axis
    start = randn(1, n, seed=1)
    start[0, 0] = part * float(torch.linalg.vector_norm(start[0, 1:]))
    process = Process(start, steps)
    hidden = float(process.vector[0, 0])
    # ‖B‖ = 1, so that products are off by at most this.
    most = error * (2 + error)
    while not process.done:
        image = eigenvalues * process.vector
        image[0, 0] -= float(image[0, 0].clamp(-most, most))
        process.advance(image)
        recurrence = process.recurrence()
        assert abs(hidden) <= recurrence.hidden(1.0 / recurrence.unit, error)
    assert process.recurrence().hidden(1.0 / process.unit, error) < inf


@examples(3)
@given(seed=st.integers(0, 999), steps=st.integers(1, 12), noise=st.floats(0, 1e-2))
def test_what_a_recurrence_hides_bounds_the_part_of_the_start(seed, steps, noise):
    """For every eigenvalue beyond the Ritz values, whatever the errors of the products were."""
    eigenvalues = torch.linspace(0.0, 1.0, 15, dtype=torch.float64)
    process = Process(randn(1, 15, seed=seed), steps)
    first = process.vector[0].clone()
    step = 0
    while not process.done:
        error = randn(1, 15, seed=1000 * seed + step)
        error *= 2 * noise / torch.linalg.vector_norm(error)
        process.advance(eigenvalues * process.vector + error)
        step += 1
    recurrence = process.recurrence()
    for value, part in zip(eigenvalues.tolist(), first.tolist(), strict=True):
        if value > 0:
            # Errors of products are allowed to be e·(2√x + e).
            hidden = recurrence.hidden(value / process.unit, noise / sqrt(value))
            assert abs(part) <= hidden


@pytest.mark.parametrize(
    ("probability", "count"), [(0.1, 1), (1e-7, 1), (1e-8, 2), (1e-11, 2), (1e-15, 3)]
)
def test_starts_are_as_many_as_rounding_makes_necessary(probability, count):
    assert starts(probability) == count


@examples(4)
@given(
    n=st.integers(1, 10**6),
    inflation=st.floats(1e-4, 0.5),
    probability=st.floats(1e-12, 0.5),
)
def test_required_steps_are_the_fewest_that_suffice(n, inflation, probability):
    epsilon = eigenvalue_gap(inflation)
    assert 1 / sqrt(1 - epsilon) == pytest.approx(1 + inflation)
    steps = required_steps(n, epsilon, probability)
    assert failure_probability(n, steps, epsilon) <= probability * (1 + 1e-9)
    assert steps == 1 or failure_probability(n, steps - 1, epsilon) >= probability * (
        1 - 1e-9
    )


def test_failure_probability_is_zero_only_when_the_space_is_exhausted():
    assert failure_probability(10, 10, 0.01) == 0.0
    assert failure_probability(10, 1, 0.01) == 1.0
    assert 0 < failure_probability(10**6, 500, 0.01) < 1e-30


@examples(1)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 999))
def test_as_many_steps_as_dimensions_give_the_norm(rows, columns, seed):
    """On the side of the input for tall matrices and of the output for wide ones."""
    matrix = randn(rows, columns, seed=seed)
    value = top_value(one_layer(matrix), min(rows, columns), seed)
    assert value == pytest.approx(torch.linalg.matrix_norm(matrix, 2).item(), rel=1e-12)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_process_that_ends_early_has_found_the_norm(rank):
    matrix = (
        randn(9, rank) @ randn(rank, 7, seed=1)
        if rank
        else torch.zeros(9, 7, dtype=torch.float64)
    )
    value = top_value(one_layer(matrix), 7, 0)
    assert value == pytest.approx(
        torch.linalg.matrix_norm(matrix, 2).item(), rel=1e-12, abs=0
    )


def test_all_pairs_of_a_network_ride_together_whatever_their_sizes_and_steps():
    model = dense_chain(7, 3, 9, 2, 5)
    dense = dense_maps(model, (7,)).transformed
    network = transformed(model.requires_grad_(False), (7,))
    steps = {pair: min(matrix.shape) for pair, matrix in dense.items()}
    processes = run_lanczos(network, steps, (1,))
    assert processes.keys() == dense.keys()
    for pair, matrix in dense.items():
        assert sqrt(processes[pair].ritz()) == pytest.approx(
            torch.linalg.matrix_norm(matrix, 2).item(), rel=1e-11
        )


def test_a_start_depends_on_the_seed_and_the_pair_only():
    network = one_layer(torch.diag(torch.linspace(0, 1, 50, dtype=torch.float64)))
    first = top_value(network, 3, 0)
    assert first != top_value(network, 3, 1)
    assert first == top_value(network, 3, 0)
    chain = transformed(dense_chain(30, 20, 25, 5).requires_grad_(False), (30,))
    together = run_lanczos(chain, {(1, 0): 3, (2, 0): 3, (2, 1): 2}, (4,))
    alone = run_lanczos(chain, {(2, 0): 3}, (4,))
    assert alone[2, 0].ritz() == pytest.approx(together[2, 0].ritz(), rel=1e-12)
    assert together[1, 0].ritz() != together[2, 0].ritz()


def test_starts_have_more_than_32_bits():
    network = one_layer(torch.diag(torch.linspace(0, 1, 50, dtype=torch.float64)))
    assert top_value(network, 3, 5) != top_value(network, 3, 5 + 2**32)
    assert top_value(network, 3, 5) != top_value(network, 3, 5 + 2**100)


def test_negative_numbers_of_a_process_prove_nothing():
    """Errors of products are all that can make them: F would grow where they are large."""
    recurrence = Recurrence((-1.4,), (0.0,), (5e-15,), 1e-9)
    component, error = 1.2e-9, 1e-9
    bound = recurrence.largest_eigenvalue(component, error, 0.0) / recurrence.unit
    assert bound >= 2.8
    for x in np.geomspace(bound, 1e30, 500):
        assert recurrence.hidden(x, error) <= component


def test_the_basis_stays_orthonormal():
    """One pass is enough, since what A q has along the last two vectors is removed first."""
    diagonal = torch.logspace(0, -16, 80, dtype=torch.float64)
    process = Process(randn(1, 80), 60)
    vectors = []
    while not process.done:
        vectors.append(process.vector)
        process.advance(diagonal * process.vector)
    basis = torch.cat(vectors)
    torch.testing.assert_close(
        basis @ basis.T, torch.eye(60, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_starts_side_by_side_give_the_same_bounds():
    """To the last digit: a start has its own vectors, whoever works beside it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 4, 3, 2), nn.Flatten()
    )
    network = transformed(model.double().requires_grad_(False), (2, 8, 8))
    goals = {(1, 0): Goal(0.01, 40), (2, 0): Goal(0.02, 40), (2, 1): Goal(0.01, 9)}
    alone = bound_by_lanczos(network, goals, 1e-12, 5, no_report)
    with constant_kernels():
        together = bound_by_lanczos(network, goals, 1e-12, 5, no_report, at_once=2)
    assert together == alone


def test_the_upper_bound_grows_with_inexact_products():
    network = one_layer(torch.diag(torch.logspace(0, -3, 200, dtype=torch.float64)))
    goals = {(1, 0): Goal(0.01, 100)}
    ritz = bound_by_lanczos(network, goals, 1e-10, 3, no_report)[1, 0]
    bounds = [ritz.upper(error) for error in (0.0, 1e-12, 1e-9, 1e-6, 1e-3)]
    assert bounds == sorted(bounds)
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-5)
    assert bounds[-1] > 10.0
    assert ritz.upper(inf) == inf


def test_products_that_overflow_give_infinity():
    network = one_layer(torch.full((3, 3), 1e200, dtype=torch.float64))
    assert top_value(network, 3, 0) == inf
