"""Distances between all rows from their Gram matrix: exact, safe against cancellation, differentiable at zero."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lipcert
from helpers import randn, reference
from lipcert.bounds.targets import class_norms, distances, find_target, pair_norms
from models import dense_chain


def pair_by_pair(rows, order=2.0):
    """One difference at a time, in float64."""
    flat = rows.double().reshape(len(rows), -1)
    return torch.stack(
        [torch.linalg.vector_norm(row - flat, ord=order, dim=1) for row in flat]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 200, 1000])
def test_many_classes(classes, dtype):
    rows = randn(classes, 3, 7).to(dtype)
    precision = 1e-5 if dtype == torch.float32 else 1e-12
    distances = pair_norms(rows)
    assert distances.dtype == dtype
    torch.testing.assert_close(distances, distances.T, rtol=precision, atol=0)
    torch.testing.assert_close(
        distances.double(), pair_by_pair(rows), rtol=precision, atol=0
    )


@given(
    seed=st.integers(0, 999),
    scale=st.floats(1.0, 1e6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_large_common_part(seed, scale, dtype):
    """Rows that are one huge vector plus small differences: the squares agree in all digits."""
    rows = (scale * randn(1, 20, seed=seed) + randn(8, 20, seed=seed + 1)).to(dtype)
    precision = 1e-4 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(
        pair_norms(rows).double(), pair_by_pair(rows), rtol=precision, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-5])
def test_two_nearly_equal_rows_among_very_different_ones(gap, dtype):
    rows = 100 * randn(50, 30)
    rows[7] = rows[31] + gap * randn(30, seed=1)
    rows = rows.to(dtype)
    precision = 1e-4 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(
        pair_norms(rows).double(), pair_by_pair(rows), rtol=precision, atol=0
    )


def test_clusters():
    """Many pairs need their difference formed, in several chunks."""
    rows = (
        100 * randn(5, 40)[torch.arange(60) % 5] + 1e-3 * randn(60, 40, seed=1)
    ).float()
    expected = pair_norms(rows)
    torch.testing.assert_close(expected.double(), pair_by_pair(rows), rtol=1e-4, atol=0)


def test_chunks_do_not_change_the_result(monkeypatch):
    rows = (
        100 * randn(5, 40)[torch.arange(60) % 5] + 1e-3 * randn(60, 40, seed=1)
    ).float()
    expected = pair_norms(rows)
    monkeypatch.setattr(distances, "_CHUNK", 100)
    assert torch.equal(pair_norms(rows), expected)


def test_gradient_with_a_large_common_part():
    rows = (1e4 * randn(1, 20) + randn(8, 20, seed=1)).float()
    single, double = rows.clone().requires_grad_(), rows.double().requires_grad_()
    pair_norms(single).sum().backward()
    torch.linalg.vector_norm(double[:, None] - double[None], dim=2).sum().backward()
    torch.testing.assert_close(single.grad.double(), double.grad, rtol=1e-4, atol=1e-4)


def test_equal_rows_have_distance_zero_and_gradient_zero():
    rows = torch.stack([randn(6), randn(6), randn(6, seed=1)]).requires_grad_()
    distances = pair_norms(rows)
    assert distances[0, 1] == 0
    assert distances.diagonal().count_nonzero() == 0
    distances[0, 1].backward()
    assert rows.grad.count_nonzero() == 0
    rows.grad = None
    pair_norms(rows).sum().backward()
    assert torch.isfinite(rows.grad).all()
    assert rows.grad[2].count_nonzero() > 0


def test_one_class():
    rows = randn(1, 4).requires_grad_()
    distances = pair_norms(rows)
    assert distances.tolist() == [[0.0]]
    distances.sum().backward()
    assert rows.grad.count_nonzero() == 0


def test_gradient():
    probe = randn(5, 5, seed=2)  # not symmetric
    assert torch.autograd.gradcheck(
        lambda r: (pair_norms(r) * probe).sum(), randn(5, 2, 3).requires_grad_()
    )
    close = torch.cat(
        [randn(3, 4), randn(3, 4) + 1e-4 * randn(3, 4, seed=1)]
    ).requires_grad_()
    assert torch.autograd.gradcheck(pair_norms, close, eps=1e-9, atol=1e-3)


def test_a_second_derivative_is_refused_rather_than_wrong():
    rows = randn(3, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(
        pair_norms(rows).square().sum(), rows, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_class_norms():
    rows = randn(4, 2, 3)
    torch.testing.assert_close(class_norms(rows), rows.reshape(4, -1).norm(dim=1))


def test_pairwise_constants_from_other_targets():
    """|Δ_a − Δ_b| ≤ ‖e_a − e_b‖₂·‖Δ‖₂."""
    network = find_target("network").pairwise(torch.tensor(3.0), 3)
    torch.testing.assert_close(network, 3 * 2**0.5 * (1 - torch.eye(3)))
    per_class = find_target("per-class").pairwise(torch.tensor([1.0, 2.0, 4.0]), 3)
    assert per_class.tolist() == [[0.0, 3.0, 5.0], [3.0, 0.0, 6.0], [5.0, 6.0, 0.0]]
    for name in ("pairwise", "last-layer"):
        assert torch.equal(find_target(name).pairwise(network, 3), network)


@pytest.mark.parametrize("name", ["network", "per-class", "last-layer", "pairwise"])
def test_functionals_are_what_the_norms_of_rows_are_norms_of(name):
    """Every functional has its place in the value, and the mean is that over all of them."""
    wanted, rows = find_target(name), randn(4, 2, 3)
    norms, found = (
        wanted.row_norms(rows),
        torch.zeros(wanted.shape(4), dtype=torch.float64),
    )
    assert norms.shape == found.shape
    values = []
    for place, weights in wanted.functionals(4):
        values.append(torch.linalg.matrix_norm(weights @ rows.reshape(4, -1), 2))
        found[place] = values[-1]
    torch.testing.assert_close(norms, found)
    assert wanted.mean(norms).item() == pytest.approx(torch.stack(values).mean().item())
    if not wanted.whole_output:
        for error in (0.0, 1e-3):
            bounds = wanted.bound_row_norms(rows.reshape(4, -1), error)
            assert ((bounds >= norms + error) | (norms == 0)).all()
            assert (bounds <= norms + 2 * error + 1e-12).all()


@pytest.mark.parametrize("classes", [200, 1000])
def test_estimator_with_many_classes_equals_pair_by_pair(classes):
    model = dense_chain(5, 6, 4, classes)
    value = lipcert.Estimator(model, (5,), target="pairwise", power_iterations=500)()
    expected = reference(model, (5,), target="pairwise")
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)
    value.sum().backward()
    assert all(
        torch.isfinite(p.grad).all()
        for p in (model[0].weight, model[2].weight, model[4].weight)
    )
