"""The numbers of a bound: what they have to be, and what follows from them for logit differences."""

from __future__ import annotations

import torch
from torch import Tensor

from lipcert.bounds.targets import find_target
from lipcert.errors import BoundError


def pairwise_upper(value: Tensor, target: str, classes: int) -> Tensor:
    """The constants of the logit differences that follow from those of a target, rounded up."""
    # √2·L and L_a + L_b take at most three roundings of 2^-53 each, this product
    # included.
    return find_target(target).pairwise(value, classes) * (1 + 2.0**-50)


def check_numbers(name: str, numbers: Tensor, positive: bool = False) -> None:
    """Refuse anything but finite float64 numbers that are not negative."""
    if numbers.dtype != torch.float64:
        problem = f"are {numbers.dtype}, expected torch.float64"
    # NaN would pass the comparison with 0 that follows.
    elif not bool(torch.isfinite(numbers).all()):
        problem = (
            "contain NaN or infinity: the weights are too large, or a file was edited"
        )
    elif positive and bool((numbers <= 0).any()):
        problem = "contain numbers that are not positive"
    elif bool((numbers < 0).any()):
        problem = "contain negative numbers"
    else:
        return
    raise BoundError(
        f"the {name} of the bound {problem}; compute it again with lipcert.bound"
    )
