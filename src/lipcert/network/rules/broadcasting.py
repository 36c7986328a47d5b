"""Rows that are copied into larger ones."""

from __future__ import annotations

from torch import Tensor

from lipcert.network.linear import Function
from lipcert.network.program import Shape
from lipcert.network.rules.values import Refusal


def broadcast(shape: Shape, out_shape: Shape) -> Function:
    """Copies a row of one shape into a larger one, as arithmetic does."""
    # torch aligns axes from the right: a row (3,) that meets rows (2, 3) would have its
    # batch axis beside the 2.
    if len(shape) != len(out_shape):
        raise Refusal(
            f"it broadcasts rows of shape {shape} to {out_shape}; reshape "
            "them explicitly first"
        )

    def copies(x: Tensor) -> Tensor:
        return x.expand(x.shape[0], *out_shape)

    return Function(copies, shape, out_shape, terms=0, nonnegative=True)
