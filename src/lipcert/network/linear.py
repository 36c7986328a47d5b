"""Linear operations of a traced network: apply, adjoint, magnitude, dense matrix.

Every operation maps a batch of vectors, `(rows, *in_shape) → (rows, *out_shape)`, and reads its weights when it is
called: they are the model's own, never copies, so gradients reach them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.errors import ShapeError

Shape = tuple[int, ...]
Live = Callable[[], Tensor]
"""A tensor of the model, read at the moment it is needed."""


class LinearOp(ABC):
    """A linear map A between spaces of tensors; subclasses write `_apply`, `_adjoint` and `_magnitude`."""

    in_shape: Shape
    out_shape: Shape
    terms: int
    """Products accumulated per output entry; 0 if the operation only moves or copies entries (exact in floats)."""

    @property
    def accumulations(self) -> int:
        """Most products accumulated for one entry of A x or of Aᵀ y."""
        return max(prod(self.in_shape), prod(self.out_shape))

    def apply(self, x: Tensor) -> Tensor:
        """A x for every row of the batch."""
        self._check(x, self.in_shape, "apply")
        return self._apply(x)

    def adjoint(self, y: Tensor) -> Tensor:
        """Aᵀ y for every row of the batch."""
        self._check(y, self.out_shape, "adjoint")
        return self._adjoint(y)

    def magnitude(self, x: Tensor) -> Tensor:
        """|A| x for every row of the batch, |A| being the entrywise absolute value."""
        self._check(x, self.in_shape, "magnitude")
        return self._magnitude(x)

    def as_matrix(self, like: Tensor | None = None) -> Tensor:
        """The dense matrix, `(prod(out_shape), prod(in_shape))`, in the dtype and device of `like`."""
        n = prod(self.in_shape)
        eye = torch.eye(
            n, dtype=like.dtype if like is not None else None, device=like.device if like is not None else None
        )
        return self.apply(eye.reshape(n, *self.in_shape)).reshape(n, -1).T

    def _check(self, x: Tensor, shape: Shape, verb: str) -> None:
        if tuple(x.shape[1:]) != shape:
            raise ShapeError(f"{type(self).__name__}.{verb} expects rows of shape {shape}, got {tuple(x.shape[1:])}")

    @abstractmethod
    def _apply(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _adjoint(self, y: Tensor) -> Tensor: ...

    @abstractmethod
    def _magnitude(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Identity(LinearOp):
    """y = ±x."""

    in_shape: Shape
    sign: int = 1
    terms: int = 0

    @property
    def out_shape(self) -> Shape:  # type: ignore[override]
        return self.in_shape

    def _apply(self, x: Tensor) -> Tensor:
        return x if self.sign > 0 else -x

    def _adjoint(self, y: Tensor) -> Tensor:
        return self._apply(y)

    def _magnitude(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Reshape(LinearOp):
    """The same entries in another shape (flatten, view, squeeze, …)."""

    in_shape: Shape
    out_shape: Shape
    terms: int = 0

    def _apply(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], *self.out_shape)

    def _adjoint(self, y: Tensor) -> Tensor:
        return y.reshape(y.shape[0], *self.in_shape)

    def _magnitude(self, x: Tensor) -> Tensor:
        return self._apply(x)


@dataclass(frozen=True)
class Dense(LinearOp):
    """y = W x along the last axis, W of shape (out, in)."""

    weight: Live
    in_shape: Shape
    out_shape: Shape

    @property
    def terms(self) -> int:  # type: ignore[override]
        return self.in_shape[-1]

    @property
    def accumulations(self) -> int:
        return max(self.in_shape[-1], self.out_shape[-1])

    def _apply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight())

    def _adjoint(self, y: Tensor) -> Tensor:
        return y @ self.weight()

    def _magnitude(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight().abs())


@dataclass(frozen=True)
class Scale(LinearOp):
    """y = d ⊙ x, d broadcast over the trailing axes of a row (batch normalisation, multiplication by a constant)."""

    factor: Live
    in_shape: Shape
    terms: int = 1
    offset: Live | None = None
    """Magnitude of what the operation adds, where that is more than its value at zero (batch normalisation)."""

    @property
    def out_shape(self) -> Shape:  # type: ignore[override]
        return self.in_shape

    @property
    def accumulations(self) -> int:
        return self.terms

    def _apply(self, x: Tensor) -> Tensor:
        return x * self.factor().to(x.dtype)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self._apply(y)

    def _magnitude(self, x: Tensor) -> Tensor:
        return x * self.factor().to(x.dtype).abs()


@dataclass(frozen=True)
class Embed(LinearOp):
    """Places a block among zeros along one axis: the part of a concatenation that belongs to one input."""

    in_shape: Shape
    out_shape: Shape
    axis: int
    offset: int
    terms: int = 0

    def _apply(self, x: Tensor) -> Tensor:
        after = self.out_shape[self.axis] - self.offset - self.in_shape[self.axis]
        trailing = len(self.in_shape) - 1 - self.axis
        return F.pad(x, (0, 0) * trailing + (self.offset, after))

    def _adjoint(self, y: Tensor) -> Tensor:
        return y.narrow(self.axis + 1, self.offset, self.in_shape[self.axis])

    def _magnitude(self, x: Tensor) -> Tensor:
        return self._apply(x)


@dataclass(frozen=True)
class Function(LinearOp):
    """Any linear function of a batch; the adjoint comes from automatic differentiation.

    Used where torch's own function already is the linear map (pooling, padding, slicing, …), and for rules that users
    register. `terms` counts the products per output; `nonnegative` says that all entries of the matrix are ≥ 0, so
    that |A| = A. Without both, rounding errors of the operation cannot be bounded.
    """

    function: Callable[[Tensor], Tensor]
    in_shape: Shape
    out_shape: Shape
    terms: int = -1
    nonnegative: bool = False

    def _apply(self, x: Tensor) -> Tensor:
        return self.function(x)

    def _adjoint(self, y: Tensor) -> Tensor:
        wants_graph = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.zeros(y.shape[0], *self.in_shape, dtype=y.dtype, device=y.device, requires_grad=True)
            (gradient,) = torch.autograd.grad(self.function(x), x, y, create_graph=wants_graph)
        return gradient

    def _magnitude(self, x: Tensor) -> Tensor:
        if not self.nonnegative:
            raise NotImplementedError
        return self._apply(x)

    def check(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """What is wrong with `function` as a linear map of independent rows; None if nothing was found."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(3, *self.in_shape, generator=generator).to(device, dtype)
        x[1] = 0
        with torch.no_grad():
            y, sums = self.function(x), self.function(torch.cat([2 * x[2:], x[2:] + x[:1]]))
        if tuple(y.shape) != (3, *self.out_shape):
            return f"maps a batch of 3 to the shape {tuple(y.shape)}, expected {(3, *self.out_shape)}"
        if y[1].count_nonzero() > 0:
            return "does not map zero to zero, or mixes the rows of a batch"
        expected = torch.stack([2 * y[2], y[2] + y[0]])
        error = (sums - expected).abs().max()
        return "is not linear" if error > 1e-3 * expected.abs().max() else None
