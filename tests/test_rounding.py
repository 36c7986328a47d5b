"""γ_n and arithmetic that rounds up: compared with exact rational arithmetic."""

from fractions import Fraction
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lipcert
from helpers import examples
from lipcert.rounding import (
    denormals_kept,
    gamma,
    round_up,
    up_matmul,
    up_product,
    up_sum,
)

NUMBERS = st.one_of(st.just(0.0), st.floats(1e-40, 1e40), st.integers(0, 99).map(float))


def matrices(rows, columns):
    return st.lists(
        st.lists(NUMBERS, min_size=columns, max_size=columns),
        min_size=rows,
        max_size=rows,
    )


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def check(found, exact, terms=16):
    """Not below the exact number, and above it by no more than a few roundings per term."""
    assert exact <= Fraction(float(found)) <= exact * (1 + Fraction(terms, 2**50))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gamma_bounds_the_error_of_repeated_roundings(dtype):
    unit = torch.finfo(dtype).eps / 2
    assert Fraction(gamma(100, dtype)) >= Fraction(100 * unit) / (
        1 - Fraction(100 * unit)
    )
    assert gamma(100, dtype) <= 101 * unit
    assert gamma(2 / unit, dtype) == inf


def test_other_types_are_refused():
    with pytest.raises(
        lipcert.errors.OptionError,
        match=r"float32 and float64, not for torch\.bfloat16; convert",
    ):
        gamma(1, torch.bfloat16)


def test_round_up_covers_as_many_roundings_as_stated():
    total, exact = 0.0, Fraction(0)
    for k in range(1, 1000):
        total += 1 / k
        exact += Fraction(1 / k)
    assert Fraction(round_up(total, 1000)) >= exact
    assert round_up(inf) == inf


@examples(4)
@given(factors=st.lists(NUMBERS, min_size=1, max_size=6))
def test_products(factors):
    exact = Fraction(1)
    for factor in factors:
        exact *= Fraction(factor)
    check(up_product(*(tensor(factor) for factor in factors)), exact)
    check(up_product(*factors), exact)


def test_products_whose_first_factors_underflow():
    exact = Fraction(1e-200) ** 2 * Fraction(1e300)
    assert exact <= Fraction(float(up_product(1e-200, 1e-200, 1e300)))


def test_denormals_are_kept_whatever_the_default_type_is():
    tiny = torch.tensor(1e-40)
    torch.set_flush_denormal(True)
    torch.set_default_dtype(torch.float64)
    try:
        with denormals_kept():
            assert float(tiny * torch.ones((), dtype=torch.float32)) > 0
        assert float(tiny * torch.ones((), dtype=torch.float32)) == 0
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_flush_denormal(False)


def test_products_broadcast():
    column, row = tensor([[0.1], [0.3]]), tensor([0.7, 1e-3, 3.0])
    found = up_product(column, row, 0.9)
    assert found.shape == (2, 3)
    for a in range(2):
        for b in range(3):
            check(
                found[a, b],
                Fraction(float(column[a, 0])) * Fraction(float(row[b])) * Fraction(0.9),
            )


@examples(4)
@given(terms=matrices(5, 3), dim=st.integers(0, 1))
def test_sums(terms, dim):
    found = up_sum(tensor(terms), dim)
    lines = terms if dim == 1 else list(zip(*terms, strict=True))
    assert found.shape == (len(lines),)
    for value, line in zip(found, lines, strict=True):
        check(value, sum(map(Fraction, line)))


@examples(4)
@given(a=matrices(3, 5), b=matrices(5, 2))
def test_matrix_products(a, b):
    def exact(i, k):
        return sum(Fraction(a[i][j]) * Fraction(b[j][k]) for j in range(5))

    found = up_matmul(tensor(a), tensor(b))
    vector, number = (
        up_matmul(tensor(a), tensor(b)[:, 0]),
        up_matmul(tensor(a)[0], tensor(b)[:, 0]),
    )
    assert (found.shape, vector.shape, number.shape) == ((3, 2), (3,), ())
    for i in range(3):
        check(vector[i], exact(i, 0))
        for k in range(2):
            check(found[i, k], exact(i, k))
    check(number, exact(0, 0))


@pytest.mark.parametrize("count", [1, 2, 3, 10, 1000, 100_000])
def test_many_terms_that_are_all_rounded_down(count):
    """1 and then terms below half a unit in its last place, which sequential addition loses."""
    terms = torch.full((count,), 2.0**-54, dtype=torch.float64)
    terms[0] = 1.0
    exact = 1 + (count - 1) * Fraction(2.0**-54)
    check(up_sum(terms), exact, 16 + count)
    check(up_matmul(terms, torch.ones_like(terms)), exact, 16 + count)
    third = torch.full((count,), 1 / 3, dtype=torch.float64)
    check(up_matmul(third, third), count * Fraction(1 / 3) ** 2, 16 + count)


def test_nothing_at_all():
    empty = torch.zeros(0, dtype=torch.float64)
    assert up_sum(empty) == 0
    assert up_matmul(empty, empty) == 0
