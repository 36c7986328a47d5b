"""Muon on kernels of any shape."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from helpers import randn
from lipcert.resources import bfloat16_works
from lipcert.training.muon import (
    KernelMuon,
    kernels,
    nearer_to_orthogonal,
    orthogonalised,
)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
def test_singular_vectors_stay_and_singular_values_become_alike(shape):
    matrix = randn(*shape)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.T @ orthogonalised(matrix) @ right.T
    values = inner.diagonal()
    assert 0.3 < values.min() < values.max() < 1.3
    torch.testing.assert_close(inner, torch.diag(values), rtol=0, atol=1e-9)


def test_a_convolution_moves_like_the_matrix_of_its_filters():
    kernel = nn.Parameter(randn(5, 2, 3, 3))
    matrix = nn.Parameter(kernel.detach().reshape(5, 18).clone())
    for parameter in (kernel, matrix):
        optimizer = KernelMuon([parameter], lr=0.1, weight_decay=0.5)
        for step in range(3):
            parameter.grad = randn(5, 18, seed=step).reshape(parameter.shape)
            optimizer.step()
    torch.testing.assert_close(kernel.reshape(5, 18), matrix)


def test_a_step_has_the_length_of_the_learning_rate_whatever_the_gradient():
    for scale in (1e-6, 1.0, 1e6):
        weight = nn.Parameter(torch.zeros(8, 4, dtype=torch.float64))
        weight.grad = scale * randn(8, 4)
        KernelMuon([weight], lr=0.1).step()
        assert torch.linalg.matrix_norm(weight, 2).item() == pytest.approx(
            0.1 * 2**0.5, rel=0.3
        )


def test_kernels_are_the_weights_of_dense_layers_and_convolutions():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)
    )
    assert [tuple(kernel.shape) for kernel in kernels(model)] == [(2, 1, 3, 3), (3, 8)]


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_a_step_towards_orthogonal_squares_the_distance(shape):
    matrix = nn.init.orthogonal_(torch.empty(*shape, dtype=torch.float64))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    far = u @ torch.diag(torch.linspace(0.9, 1.1, 6 if 6 in shape else 8).double()) @ v
    values = torch.linalg.svdvals(nearer_to_orthogonal(far))
    assert (values - 1).abs().max() <= 1.6 * 0.1**2


@pytest.mark.parametrize(("iterations", "smallest"), [(3, 1 / 40), (5, 1 / 480)])
def test_what_a_step_makes_of_singular_values(iterations, smallest):
    """Of those above the given share of the norm, values near 1; signs and vectors stay."""
    torch.manual_seed(0)
    u, v = (nn.init.orthogonal_(torch.empty(6, 6)) for _ in range(2))
    values = torch.linspace(smallest, 0.4, 6)
    values[-1] = (1 - values[:-1].square().sum()).sqrt()
    made = orthogonalised(u @ torch.diag(values) @ v.T, iterations)
    found = u.T @ made @ v
    assert (found - torch.diag(found.diagonal())).abs().max() <= 1e-4
    assert 0.65 <= found.diagonal().min() <= found.diagonal().max() <= 1.25


@pytest.mark.parametrize("coarse", [False, True])
def test_kernels_stay_orthogonal(coarse):
    if coarse and not bfloat16_works():
        pytest.skip("this processor cannot multiply bfloat16 numbers")
    torch.manual_seed(0)
    kernel = nn.Parameter(nn.init.orthogonal_(torch.empty(6, 3, 2, 2)))
    before = kernel.detach().clone()
    optimizer = KernelMuon([kernel], lr=0.05, orthogonal=True, coarse=coarse)
    for _ in range(30):
        kernel.grad = torch.randn_like(kernel)
        optimizer.step()
    values = torch.linalg.svdvals(kernel.detach().reshape(6, -1))
    assert (values - 1).abs().max() <= 0.01
    assert (kernel - before).norm() > 0.1
    assert kernel.dtype == torch.float32


class RoundedFactors(TorchFunctionMode):
    """A processor that multiplies matrices of float32 in bfloat16 where it may."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        allowed = torch.get_float32_matmul_precision() == "medium"
        if function is torch.Tensor.__matmul__ and allowed:
            args = tuple(factor.bfloat16().float() for factor in args)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(48, 200), (200, 48)])
def test_kernels_stay_orthogonal_where_products_are_of_bfloat16(shape):
    torch.manual_seed(0)
    matrix = nn.init.orthogonal_(torch.empty(shape))
    for _ in range(3):
        matrix = matrix + 0.03 * nn.init.orthogonal_(torch.empty(shape))
        exact = nearer_to_orthogonal(matrix)
        with RoundedFactors():
            coarse = nearer_to_orthogonal(matrix, coarse=True)
            matrix = nearer_to_orthogonal(coarse, coarse=True)
        torch.testing.assert_close(coarse, exact, rtol=0, atol=1e-4)
        assert (torch.linalg.svdvals(matrix.double()) - 1).abs().max() < 1e-4
    assert torch.get_float32_matmul_precision() == "highest"
