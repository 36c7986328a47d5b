"""Distances between all rows from their Gram matrix: exact, safe against cancellation, differentiable at zero."""

from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lipcert
from helpers import randn, reference
from lipcert.bounds import targets
from lipcert.bounds.targets import class_norms, pair_norms, pairwise_matrix, weighted_norms
from models import dense_chain


def pair_by_pair(rows, order=2.0):
    """One difference at a time, in float64."""
    flat = rows.double().reshape(len(rows), -1)
    return torch.stack([torch.linalg.vector_norm(row - flat, ord=order, dim=1) for row in flat])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 200, 1000])
def test_many_classes(classes, dtype):
    rows = randn(classes, 3, 7).to(dtype)
    precision = 1e-5 if dtype == torch.float32 else 1e-12
    distances = pair_norms(rows)
    assert distances.dtype == dtype
    torch.testing.assert_close(distances, distances.T, rtol=precision, atol=0)
    torch.testing.assert_close(distances.double(), pair_by_pair(rows), rtol=precision, atol=0)


@given(seed=st.integers(0, 999), scale=st.floats(1.0, 1e6), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_large_common_part(seed, scale, dtype):
    """Rows that are one huge vector plus small differences: the squares agree in all digits."""
    rows = (scale * randn(1, 20, seed=seed) + randn(8, 20, seed=seed + 1)).to(dtype)
    precision = 1e-4 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(pair_norms(rows).double(), pair_by_pair(rows), rtol=precision, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-5])
def test_two_nearly_equal_rows_among_very_different_ones(gap, dtype):
    rows = 100 * randn(50, 30)
    rows[7] = rows[31] + gap * randn(30, seed=1)
    rows = rows.to(dtype)
    precision = 1e-4 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(pair_norms(rows).double(), pair_by_pair(rows), rtol=precision, atol=0)


def test_clusters():
    """Many pairs need their difference formed, in several chunks."""
    rows = (100 * randn(5, 40)[torch.arange(60) % 5] + 1e-3 * randn(60, 40, seed=1)).float()
    expected = pair_norms(rows)
    torch.testing.assert_close(expected.double(), pair_by_pair(rows), rtol=1e-4, atol=0)


def test_chunks_do_not_change_the_result(monkeypatch):
    rows = (100 * randn(5, 40)[torch.arange(60) % 5] + 1e-3 * randn(60, 40, seed=1)).float()
    expected = pair_norms(rows)
    monkeypatch.setattr(targets, "_CHUNK", 100)
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
    assert torch.autograd.gradcheck(lambda r: (pair_norms(r) * probe).sum(), randn(5, 2, 3).requires_grad_())
    close = torch.cat([randn(3, 4), randn(3, 4) + 1e-4 * randn(3, 4, seed=1)]).requires_grad_()
    assert torch.autograd.gradcheck(pair_norms, close, eps=1e-9, atol=1e-3)


def test_a_second_derivative_is_refused_rather_than_wrong():
    rows = randn(3, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(pair_norms(rows).square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(("norm", "dual"), [(1.0, inf), (2.0, 2.0), (inf, 1.0)])
def test_dual_norms(norm, dual):
    rows = randn(4, 2, 3)
    torch.testing.assert_close(pair_norms(rows, norm), pair_by_pair(rows, dual))
    torch.testing.assert_close(class_norms(rows, norm), torch.linalg.vector_norm(rows.flatten(1), ord=dual, dim=1))


@pytest.mark.parametrize(("norm", "factor"), [(1.0, 1.0), (2.0, 2**0.5), (inf, 2.0)])
def test_pairwise_constants_from_other_targets(norm, factor):
    """|Δ_a − Δ_b| ≤ ‖e_a − e_b‖_q·‖Δ‖_p."""
    network = pairwise_matrix(torch.tensor(3.0), "network", 3, norm)
    torch.testing.assert_close(network, 3 * factor * (1 - torch.eye(3)))
    per_class = pairwise_matrix(torch.tensor([1.0, 2.0, 4.0]), "per-class", 3, norm)
    assert per_class.tolist() == [[0.0, 3.0, 5.0], [3.0, 0.0, 6.0], [5.0, 6.0, 0.0]]
    assert torch.equal(pairwise_matrix(network, "pairwise", 3, norm), network)


def test_contributions_are_mean_shares():
    rows = [randn(4, 5), None, randn(4, 2, 3, seed=1)]
    weights = torch.tensor([2.0, 9.0, 0.5], dtype=torch.float64)
    value, shares = weighted_norms(rows, weights, "pairwise")
    torch.testing.assert_close(value, 2 * pair_by_pair(rows[0]) + 0.5 * pair_by_pair(rows[2]))
    assert shares.sum().item() == pytest.approx(value.sum().item() / 12)
    assert shares[1] == 0
    value, shares = weighted_norms(rows, weights, "per-class")
    assert shares.sum().item() == pytest.approx(value.mean().item())


@pytest.mark.parametrize("classes", [200, 1000])
def test_estimator_with_many_classes_equals_pair_by_pair(classes):
    model = dense_chain(5, 6, 4, classes)
    value = lipcert.Estimator(model, (5,), target="pairwise", power_iterations=500)()
    expected = reference(model, (5,), target="pairwise")
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)
    value.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in (model[0].weight, model[2].weight, model[4].weight))
