"""Bounds on the norms of single operations: above the norm of the dense matrix, and not far above it."""

from math import inf, prod, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from helpers import examples, operations, randn
from lipcert.network.linear import Scale
from lipcert.norms.operations import operation_norm
from models import gaussian


def spectral(op):
    return torch.linalg.matrix_norm(op.as_matrix(like=randn(1)).detach(), 2).item()


def operation(layer, *shape):
    (op,) = operations(lipcert.trace(gaussian(layer), shape))
    return op


@st.composite
def kernels(draw):
    """A convolution or a transposed one in one or two dimensions, with any stride, dilation, padding and groups."""
    dims, groups = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    channels, filters = (
        groups * draw(st.integers(1, 3)),
        groups * draw(st.integers(1, 3)),
    )
    kinds = {1: (nn.Conv1d, nn.ConvTranspose1d), 2: (nn.Conv2d, nn.ConvTranspose2d)}
    size = [draw(st.integers(1, 4)) for _ in range(dims)]
    options = {
        "stride": draw(st.integers(1, 3)),
        "dilation": draw(st.integers(1, 3)),
        "groups": groups,
    }
    layer = draw(st.sampled_from(kinds[dims]))(
        channels, filters, size, padding=draw(st.integers(0, 1)), **options
    )
    return operation(layer, channels, *(draw(st.integers(10, 12)) for _ in range(dims)))


@examples(2)
@given(op=kernels())
def test_convolutions(op):
    exact = spectral(op)
    assert exact * (1 - 1e-9) <= operation_norm(op)
    assert operation_norm(op) <= sqrt(prod(op.weight().shape[2:])) * exact * (1 + 1e-6)


def test_kernels_that_do_not_overlap_are_exact():
    op = operation(nn.Conv2d(3, 4, 3, stride=3), 3, 9, 9)
    assert operation_norm(op) == pytest.approx(spectral(op), rel=1e-6)
    op = operation(nn.Conv3d(2, 3, 1), 2, 2, 2, 2)
    assert operation_norm(op) == pytest.approx(spectral(op), rel=1e-6)


def test_dense_layers_are_exact():
    for shape in ((20,), (3, 20)):
        op = operation(nn.Linear(20, 7), *shape)
        assert operation_norm(op) == pytest.approx(spectral(op), rel=1e-6)


def test_nothing_is_known_of_large_matrices_and_of_other_operations(monkeypatch):
    assert operation_norm(Scale(lambda: torch.ones(3), (3,))) == inf
    monkeypatch.setattr("lipcert.norms.operations._LARGEST_SIDE", 6)
    assert operation_norm(operation(nn.Linear(20, 7), 20)) == inf
