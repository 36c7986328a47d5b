"""Numbers as configurations state them: what they may be, and how they may be written."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Field


def read_fraction(value: Any) -> Any:
    """Numbers may be written as "36/255"."""
    if not isinstance(value, str) or "/" not in value:
        return value
    try:
        return float(Fraction(value.replace(" ", "")))
    except (ValueError, ZeroDivisionError):
        raise ValueError('expected a number or a fraction such as "36/255"') from None


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Radius = Annotated[float, Field(ge=0), BeforeValidator(read_fraction)]
Epsilon = Annotated[
    float, Field(gt=0, allow_inf_nan=False), BeforeValidator(read_fraction)
]
