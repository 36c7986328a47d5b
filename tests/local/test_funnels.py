"""Dual norms of rows at the node through which all of the input comes, in float32 too."""

from math import inf

import pytest
import torch

from lipcert.local.funnels import Funnel, dual_norms

SCALES = (1.0, 1e-20, 1e-39, 1e12)


@pytest.mark.parametrize("norm", [2.0, inf])
@pytest.mark.parametrize("scale", SCALES)
def test_quick_norms_are_never_below_exact_ones_and_close_to_them(norm, scale):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(60, 90, generator=generator, dtype=torch.float64)
    matrix[::7] *= 1e-3
    rows = scale * torch.randn(2, 40, 60, generator=generator, dtype=torch.float64)
    # Rows that nearly cancel: what float32 loses is then most of what is left.
    rows[1, :, 1] = -rows[1, :, 0] * (1 + 1e-9)
    matrix[1] = matrix[0]
    rows[1, :, 2:] *= 1e-6
    funnel = Funnel(0, matrix, dual_norms(matrix, norm))
    exact = torch.linalg.vector_norm(rows @ matrix, 1 if norm == inf else 2, dim=-1)
    quick = funnel.steepness(rows, norm, quick=True)
    assert quick.dtype == torch.float64
    assert (quick >= exact).all()
    assert (quick[0] <= 1.001 * exact[0] + 1e-25).all()
    slow = funnel.steepness(rows, norm, quick=False)
    torch.testing.assert_close(slow, exact)


def test_without_its_allowance_a_quick_norm_would_be_too_small():
    matrix = torch.full((50, 3), 1 + 2.0**-25, dtype=torch.float64)
    funnel = Funnel(0, matrix, dual_norms(matrix, inf))
    row = torch.full((1, 50), 1 + 2.0**-25, dtype=torch.float64)
    bare = (row.float() @ matrix.float()).double().abs().sum(-1)
    exact = (row @ matrix).abs().sum(-1)
    assert (bare < exact).all()
    assert (funnel.steepness(row, inf, quick=True) >= exact).all()


@pytest.mark.parametrize("norm", [2.0, inf])
def test_what_float32_does_not_reach_is_infinite(norm):
    matrix = torch.tensor([[1e30, 0.0], [-1e30, 1.0]], dtype=torch.float64)
    funnel = Funnel(0, matrix, dual_norms(matrix, norm))
    rows = torch.tensor([[1e20, 1e20], [1e50, 0.0]], dtype=torch.float64)
    assert (funnel.steepness(rows, norm, quick=True) == inf).all()
