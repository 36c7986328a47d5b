"""Floating-point error analysis, and arithmetic that rounds up.

Notation of Higham: u is the unit roundoff, γ_n = n·u/(1 − n·u). A sum of n products, in
any order, is computed with an error of at most γ_n times the sum of the absolute
products. Results of the functions `up_*` are upper bounds on the exact results for
arguments that are not negative: whoever composes them need not count roundings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import torch
from torch import Tensor

from lipcert.errors import OptionError

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
UNDERFLOW = 1e-150
"""Added to every norm, for the squares of smaller numbers vanish in float64."""
_TINY = 4 * torch.finfo(torch.float64).tiny
"""At least what a product loses where it underflows."""


def gamma(n: float, dtype: torch.dtype = torch.float64) -> float:
    """γ_n in the given precision; infinite where n·u ≥ 1."""
    if dtype not in UNIT_ROUNDOFF:
        raise OptionError(
            "rounding errors are bounded for float32 and float64, not for "
            f"{dtype}; convert the model"
        )
    # The factor 1 + 1e-12 makes up for the few roundings of this formula itself.
    nu = n * UNIT_ROUNDOFF[dtype]
    return nu / (1 - nu) * (1 + 1e-12) if nu < 1 else inf


def round_up(value: float, operations: int = 1) -> float:
    """An upper bound on a non-negative result whose computation took this many roundings in float64."""
    # Two more: of 1 + γ and of the product. NaN is not below infinity, and becomes
    # infinite.
    return value * (1 + gamma(operations + 2)) if value < inf else inf


def up_product(*factors: Tensor | float) -> Tensor:
    """The product of float64 tensors, rounded up; zero only where a factor is."""
    total = torch.as_tensor(factors[0], dtype=torch.float64)
    # Where no factor is zero, the product is positive, but may underflow to zero: a
    # bound of zero would be false there.
    positive = total > 0
    for factor in factors[1:]:
        positive = positive & (torch.as_tensor(factor, dtype=torch.float64) > 0)
        total = total * factor + _TINY * positive.double()
    return total * (1 + gamma(2 * len(factors)))


def up_sum(terms: Tensor, dim: int = 0) -> Tensor:
    """The sum of a float64 tensor along an axis, rounded up."""
    return (
        terms.sum(dim) * (1 + gamma(terms.shape[dim] + 1))
        + _TINY * (terms > 0).any(dim).double()
    )


def up_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of float64 matrices, or of a matrix and a vector, rounded up; zero only where all its terms are."""
    product: Tensor = a @ b
    # Counts the terms that are positive, which cannot underflow: entries that have any
    # get what all could lose.
    positive = (a > 0).double() @ (b > 0).double() > 0
    return (
        product * (1 + gamma(a.shape[-1] + 2)) + a.shape[-1] * _TINY * positive.double()
    )


@contextmanager
def denormals_kept() -> Iterator[None]:
    """Within, numbers below the smallest normal one are not taken for zero (`torch.set_flush_denormal`)."""
    # 1e-40 is below the smallest normal number of float32, 1.2e-38.
    flushes = (
        float(
            torch.tensor(1e-40, dtype=torch.float32)
            * torch.ones((), dtype=torch.float32)
        )
        == 0.0
    )
    if not flushes:
        yield
        return
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(True)


def has_denormals(weight: Tensor) -> bool:
    """Whether a tensor has entries between zero and the smallest normal number of float32."""
    # Float64 copies of float32 weights are asked, too: what counts is the type in which
    # they are executed.
    size = weight.detach().abs()
    return bool(((size > 0) & (size < torch.finfo(torch.float32).tiny)).any())
