"""Linear operations of a traced network: apply, adjoint, magnitude, dense matrix.

Every operation maps a batch of vectors, `(rows, *in_shape) → (rows, *out_shape)`, and
reads its weights when it is called: they are the model's own, never copies, so
gradients reach them.
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
from lipcert.network.program import Live, Shape
from lipcert.rounding import has_denormals


class LinearOp(ABC):
    """A linear map A between spaces of tensors; subclasses write `_apply`, `_adjoint` and `_magnitude`."""

    in_shape: Shape
    out_shape: Shape
    terms: int
    """Products accumulated per output entry; 0 if the operation only moves or copies entries (exact in floats)."""
    weighted: bool = False
    """Whether |A| may have a larger norm than A."""
    coarse: bool = False
    """Whether entries of the result are so many that errors of few products are better bounded in norm."""
    adds: bool = False
    """Whether the operation stands for a term of a sum, which is rounded even if its entries are only moved."""

    @property
    def accumulations(self) -> int:
        """Most products accumulated for one entry of A x or of Aᵀ y."""
        return max(prod(self.in_shape), prod(self.out_shape))

    @property
    def covered(self) -> bool:
        """Whether the rounding errors of the operation can be bounded."""
        return self.terms >= 0

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

    def norm_proofs(self) -> list[tuple[float, list[Tensor]]]:
        """Pairs (f, matrices) with ‖A‖₂ ≤ √f·(largest norm of the matrices); none if nothing is known."""
        return []

    def denormal(self) -> bool:
        """Whether weights are so small that processors may take them for zero."""
        return False

    def as_matrix(self, like: Tensor) -> Tensor:
        """The dense matrix, `(prod(out_shape), prod(in_shape))`, in the dtype and device of `like`."""
        n = prod(self.in_shape)
        eye = torch.eye(n, dtype=like.dtype, device=like.device)
        return self.apply(eye.reshape(n, *self.in_shape)).reshape(n, -1).T

    def _check(self, x: Tensor, shape: Shape, verb: str) -> None:
        if tuple(x.shape[1:]) != shape:
            raise ShapeError(
                f"{type(self).__name__}.{verb} expects rows of shape {shape}, got "
                f"{tuple(x.shape[1:])}"
            )

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
    terms = 0
    adds = True

    @property
    def out_shape(self) -> Shape:  # type: ignore[override]
        return self.in_shape

    def _apply(self, x: Tensor) -> Tensor:
        if self.sign < 0:
            return -x
        return x

    def _adjoint(self, y: Tensor) -> Tensor:
        return self._apply(y)

    def _magnitude(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Reshape(LinearOp):
    """The same entries in another shape (flatten, view, squeeze, …)."""

    in_shape: Shape
    out_shape: Shape
    terms = 0

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
    weighted = True

    @property
    def terms(self) -> int:  # type: ignore[override]
        return self.in_shape[-1]

    def norm_proofs(self) -> list[tuple[float, list[Tensor]]]:
        return [(1.0, [self.weight()])]

    def denormal(self) -> bool:
        return has_denormals(self.weight())

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

    def denormal(self) -> bool:
        return has_denormals(self.factor())


@dataclass(frozen=True, eq=False)
class Function(LinearOp):
    """Any linear function of a batch; the adjoint comes from automatic differentiation.

    Used where torch's own function already is the linear map (pooling, padding,
    slicing, …), and for rules that users register. `terms` counts the products per
    output; |A| is A itself if no entry of the matrix is negative (`nonnegative`), or
    else the function `absolute`. Without them, rounding errors cannot be bounded.
    """

    function: Callable[[Tensor], Tensor]
    in_shape: Shape
    out_shape: Shape
    terms: int = -1
    nonnegative: bool = False
    absolute: Callable[[Tensor], Tensor] | None = None

    @property
    def weighted(self) -> bool:  # type: ignore[override]
        return self.absolute is not None

    @property
    def covered(self) -> bool:
        return self.terms >= 0 and (self.nonnegative or self.absolute is not None)

    def _apply(self, x: Tensor) -> Tensor:
        return self.function(x)

    def _adjoint(self, y: Tensor) -> Tensor:
        wants_graph = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            # The derivative of a linear function is the same everywhere, so at zero.
            shape = (y.shape[0], *self.in_shape)
            x = torch.zeros(shape, dtype=y.dtype, device=y.device, requires_grad=True)
            image = self.function(x)
            (gradient,) = torch.autograd.grad(image, x, y, create_graph=wants_graph)
        return gradient

    def _magnitude(self, x: Tensor) -> Tensor:
        if self.absolute is not None:
            return self.absolute(x)
        if not self.nonnegative:
            raise NotImplementedError
        return self._apply(x)


def number(value: float) -> Live:
    """Reads a fixed number."""
    tensor = torch.tensor(value, dtype=torch.float64)
    return lambda: tensor
