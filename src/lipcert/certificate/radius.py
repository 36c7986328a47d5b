"""The radius that follows from margins, their errors and their constants."""

from __future__ import annotations

import torch
from torch import Tensor

# Tensors, because exporters write the numbers of Python in float32, in which the first
# would be 1 and the second 0.
_ROUND_DOWN = torch.tensor(1 - 2.0**-45, dtype=torch.float64)
_TINY = torch.tensor(torch.finfo(torch.float64).tiny, dtype=torch.float64)


def certified_radius(
    margins: Tensor, errors: Tensor, constants: Tensor, prediction: Tensor
) -> Tensor:
    """(B,): min over i ≠ y of (margin_i − errors_i)/constants_i, rounded down, at least 0.

    The differences of logits are exact to 2^-53 of the logits, which the rounding-down
    of the result does not cover: the errors do, because they contain a rounding of the
    logits themselves.
    """
    # Where errors may exceed the margin nothing is certified: the radius is 0, not
    # negative.
    slack = (margins - errors).clamp(min=0)
    # L_yi = 0 if two logits differ by a constant: the ratio is then huge or infinite,
    # and `reach` limits the radius.
    ratios = torch.where(slack > 0, slack / torch.maximum(constants, _TINY), 0.0)
    return smallest_other(ratios, prediction) * _ROUND_DOWN


def smallest_other(values: Tensor, prediction: Tensor) -> Tensor:
    """(B,): the smallest value of the classes other than the predicted one."""
    return values.scatter(1, prediction[:, None], torch.inf).amin(1)
