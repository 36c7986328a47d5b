"""Power iteration: from below, monotone, to the norm; row norms that survive zeros and extreme scales."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers import dense_maps, randn, transformed
from lipcert.network.sweep import Sweep
from lipcert.norms.estimate import estimate_norms, random_vectors
from lipcert.norms.rotation import Rotation
from lipcert.norms.rows import row_norms
from models import dense_chain, gaussian, named_models

MODELS = named_models()


def sweep_of(model, shape):
    network = transformed(model, shape)
    return Sweep(network, network.depth + 1)


def iterate(sweep, vectors, iterations):
    return Rotation(sweep).iterate(vectors, iterations)


@pytest.mark.parametrize("name", MODELS)
def test_estimates_grow_towards_the_norms_and_never_exceed_them(name):
    model, shape = MODELS[name]
    sweep = sweep_of(model, shape)
    dense = dense_maps(model, shape).transformed
    exact = torch.stack(
        [torch.linalg.matrix_norm(dense[pair], 2) for pair in sweep.pairs]
    )
    vectors = random_vectors(sweep, 0)
    previous = torch.zeros_like(exact)
    with torch.no_grad():
        for iterations in (0, 1, 3, 10, 400):
            vectors = iterate(sweep, vectors, iterations)
            norms = estimate_norms(sweep, vectors)
            assert (norms <= exact * (1 + 1e-12)).all()
            assert (norms >= previous * (1 - 1e-12)).all()
            previous = norms
    torch.testing.assert_close(norms, exact, rtol=1e-3, atol=1e-12)


def one_matrix(values, dtype=torch.float64):
    """A sweep over a single matrix with the given singular values."""
    n = len(values)
    left, right = (torch.linalg.qr(randn(n, n, seed=seed)).Q for seed in (1, 2))
    model = nn.Linear(n, n, bias=False).double()
    model.weight.data = (
        left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right
    )
    return sweep_of(model.to(dtype), (n,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_iteration_is_a_power_step_and_many_converge_much_faster(dtype):
    sweep = one_matrix([1.0, *(0.995 - 0.005 * k for k in range(80))], dtype)
    matrix = sweep.network.nodes[-1].edges[0].op.weight()
    x = random_vectors(sweep, 0)
    expected = x[0] @ matrix.T @ matrix
    torch.testing.assert_close(iterate(sweep, x, 1)[0], expected / expected.norm())
    slow = x
    for _ in range(40):
        slow = iterate(sweep, slow, 1)
    errors = [
        1 - float(estimate_norms(sweep, v).detach())
        for v in (slow, iterate(sweep, x, 40))
    ]
    assert errors[0] > 1e-3
    assert errors[1] < 1e-5


def test_vectors_of_one_batch_do_not_mix_and_layouts_do_not_matter():
    model, shape = MODELS["chain"]
    sweep = sweep_of(model, shape)
    x = random_vectors(sweep, 0)
    other = {i: v.clone() for i, v in x.items()}
    other[0][0] = other[0][0].flip(-1)
    moved, moved_other = (iterate(sweep, v, 6) for v in (x, other))
    for i in x:
        if i > 0:
            torch.testing.assert_close(moved[i], moved_other[i], rtol=1e-12, atol=1e-12)


def test_vectors_are_unit_vectors_and_reproducible():
    sweep = sweep_of(*MODELS["paper residual"])
    first, second, other = (random_vectors(sweep, seed) for seed in (3, 3, 4))
    assert first.keys() == sweep.starts.keys()
    for i, x in first.items():
        assert x.dtype == torch.float64
        assert len(x) == len(sweep.starts[i])
        assert torch.equal(x, second[i])
        assert not torch.equal(x, other[i])
    for vectors in (first, iterate(sweep, first, 7)):
        for x in vectors.values():
            torch.testing.assert_close(
                row_norms(x), torch.ones(len(x), dtype=x.dtype), rtol=1e-14, atol=0
            )


def test_iterations_need_no_gradient():
    sweep = sweep_of(*MODELS["chain"])
    vectors = iterate(sweep, random_vectors(sweep, 0), 2)
    assert not any(x.requires_grad for x in vectors.values())
    assert estimate_norms(sweep, vectors).requires_grad


def test_a_map_that_is_zero_keeps_its_vector_and_has_zero_norm_and_gradient():
    model = dense_chain(3, 4, 2)
    model[0].weight.data.zero_()
    sweep = sweep_of(model, (3,))
    start = random_vectors(sweep, 0)
    vectors = iterate(sweep, start, 3)
    assert torch.equal(vectors[0], start[0])
    norms = estimate_norms(sweep, vectors)
    assert norms[sweep.pairs.index((1, 0))] == 0
    norms.sum().backward()
    assert all(
        torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None
    )


@cache
def traced_layer():
    """A layer in float32 and its sweep, which reads the weights whenever it is used."""
    model = nn.Linear(3, 4)
    return model, sweep_of(model, (3,))


@given(seed=st.integers(0, 99), exponent=st.integers(-18, 18))
def test_float32_estimates_scale_with_the_weights(seed, exponent):
    """Squares of 1e±18 leave the range of float32; the estimate must not notice."""
    model, sweep = traced_layer()
    model.load_state_dict(gaussian(nn.Linear(3, 4), seed).float().state_dict())
    expected = (
        torch.linalg.matrix_norm(model.weight.double(), 2).item() * 10.0**exponent
    )
    model.weight.data *= 10.0**exponent
    with torch.no_grad():
        vectors = iterate(sweep, random_vectors(sweep, 0), 200)
        assert estimate_norms(sweep, vectors).item() == pytest.approx(
            expected, rel=1e-4
        )


@given(
    rows=st.integers(1, 4),
    seed=st.integers(0, 99),
    shape=st.lists(st.integers(1, 3), max_size=3),
)
def test_row_norms(rows, seed, shape):
    x = randn(rows, *shape, seed=seed)
    expected = x.reshape(rows, -1).square().sum(1).sqrt()
    torch.testing.assert_close(row_norms(x), expected)
    kept = row_norms(x, keepdim=True)
    assert kept.shape == (rows, *[1] * len(shape))
    torch.testing.assert_close(kept.flatten(), expected)


def test_row_norms_of_zero_nan_and_extreme_rows():
    rows = torch.tensor(
        [[0.0, 0.0], [3e30, 4e30], [3e-30, 4e-30], [3.0, float("nan")]],
        requires_grad=True,
    )
    norms = row_norms(rows)
    torch.testing.assert_close(norms[:3], torch.tensor([0.0, 5e30, 5e-30]))
    assert norms[3].isnan()
    norms[:3].sum().backward()
    torch.testing.assert_close(
        rows.grad[:3], torch.tensor([[0.0, 0.0], [0.6, 0.8], [0.6, 0.8]])
    )


def test_row_norms_gradient():
    assert torch.autograd.gradcheck(row_norms, randn(4, 5).requires_grad_())
