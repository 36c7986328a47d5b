"""Locally optimal conjugate gradients (Knyazev 2001) for the largest eigenvalues of A = BᵀB, in place of power steps.

A step moves to the best vector in the span of x, of the residual Ax − θx and of the
direction of the step before. It costs one product with A like a power step and some
operations on vectors, is never worse, and fewer are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lipcert.network.sweep import Pair
from lipcert.norms.rows import flat_rows, per_row, row_norms, unit_rows

# About √u: what is smaller, relative to numbers near 1, has squares that drown in
# rounding.
_NOISE = {torch.float32: 2.0**-12, torch.float64: 2.0**-26}


class ConjugateGradients:
    """Vectors x of pairs that move together, with Ax, the last step p and Ap, as far as they are known."""

    def __init__(self, pairs: Sequence[Pair], x: Tensor) -> None:
        self.pairs = pairs
        self._x = x
        self._image: Tensor | None = None
        self._step: tuple[Tensor, Tensor] | None = None

    def probe(self) -> Tensor:
        """What A is to be applied to next: the residual r of x, or x itself while its image is not known."""
        if self._image is None:
            return self._x
        # θ = ⟨x, Ax⟩/⟨x, x⟩, the Rayleigh quotient of x, never exceeds the largest
        # eigenvalue of A.
        self._squares = _dots(self._x, self._x)
        self._theta = _dots(self._x, self._image) / self._squares
        residual = torch.addcmul(
            self._image, per_row(self._theta, self._x), self._x, value=-1
        )
        length = row_norms(residual)
        # A residual that is rounding has no direction: to give it length 1 would send
        # the step anywhere. Dividing it by infinity instead makes it zero, and the step
        # does without it.
        significant = (
            length > _NOISE[length.dtype] / 16 * self._theta
        )  # what is smaller is noise
        self._length = torch.where(significant, length, torch.zeros_like(length))
        self._residual = residual / per_row(
            torch.where(significant, length, torch.inf), residual
        )
        return self._residual

    def advance(self, image: Tensor) -> None:
        """Take in the image of the probe: the best vector in the span of x, r and p becomes x."""
        if self._image is None:
            # The first probe was x itself: what comes back is Ax, and no step can be
            # taken yet.
            self._image = image
            if self._x.stride() != image.stride():  # one memory format for all
                self._x = torch.empty_like(image).copy_(self._x)
            return
        x, r, theta = self._x, self._residual, self._theta
        weights = _best_combination(*self._products(image))
        # Rows that A maps to zero have nothing to gain: x keeps its weight 1, the
        # others get 0, and x stays as it is.
        weights = torch.where((theta > 0)[:, None], weights, torch.zeros_like(weights))
        of_x = per_row(torch.where(theta > 0, weights[:, 0], torch.ones_like(theta)), x)
        of_r = per_row(weights[:, 1], r)
        # The step p is what is added to of_x·x. Leaving out the part along x keeps both
        # from becoming parallel.
        step, step_image = of_r * r, of_r * image
        if self._step is not None:
            p, p_image = self._step
            of_p = per_row(weights[:, 2] * self._inverse_length(p), r)
            step = torch.addcmul(step, of_p, p)
            step_image = torch.addcmul(step_image, of_p, p_image)
        # A is linear: images of the new vectors are the same combinations of known
        # images, and cost no product with A.
        self._step = step, step_image
        self._x = torch.addcmul(step, of_x, x)
        self._image = torch.addcmul(step_image, of_x, self._image)

    def _products(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, k, k): ⟨a, b⟩ and ⟨a, Ab⟩ for a, b among x, r and, if there is one, p of length 1.

        Ax = θx + |Ax − θx|·r, so that ⟨y, Ax⟩ follows from ⟨y, x⟩ and ⟨y, r⟩.
        """
        x, r, theta, length = self._x, self._residual, self._theta, self._length
        # r has length 1, or is zero where the residual was rounding.
        xx, xr, rr = self._squares, _dots(x, r), (length > 0).to(x.dtype)
        xax, xar, rar = theta * xx, theta * xr + length * rr, _dots(r, image)
        # Two directions after the first image; the third one is there from the first
        # step on.
        if self._step is None:
            return _matrix([[xx, xr], [xr, rr]]), _matrix([[xax, xar], [xar, rar]])
        p, p_image = self._step
        unit = self._inverse_length(p)
        # p shrinks as the search converges; divided by its length, it does not look
        # dependent in `inner`.
        xp, rp, pp = unit * _dots(x, p), unit * _dots(r, p), (unit > 0).to(x.dtype)
        xap, rap = theta * xp + length * rp, unit * _dots(p, image)
        pap = unit * unit * _dots(p, p_image)
        inner = [[xx, xr, xp], [xr, rr, rp], [xp, rp, pp]]
        forms = [[xax, xar, xap], [xar, rar, rap], [xap, rap, pap]]
        return _matrix(inner), _matrix(forms)

    def _inverse_length(self, step: Tensor) -> Tensor:
        """1/|p| of every row; 0 for a step so short that it is forgotten."""
        size = row_norms(step)
        return torch.where(size > _NOISE[step.dtype], size, torch.inf).reciprocal()

    def result(self) -> Tensor:
        """One more power step, for the image is known."""
        if self._image is None:
            return self._x
        return unit_rows(self._image, fallback=self._x)


def _best_combination(inner: Tensor, forms: Tensor) -> Tensor:
    """(rows, k): weights w with wᵀ(inner)w = 1 and the largest wᵀ(forms)w (Rayleigh–Ritz)."""
    # eigh raises on numbers that are not finite. One row that overflows must not stop
    # the others.
    inner = torch.nan_to_num(inner, posinf=0.0, neginf=0.0)
    forms = torch.nan_to_num(forms, posinf=0.0, neginf=0.0)
    # With inner = QΛQᵀ and W = QΛ^−½, w = Wy has wᵀ(inner)w = yᵀy: an ordinary
    # eigenvalue problem for y.
    values, axes = torch.linalg.eigh(inner)
    independent = (
        values > _NOISE[values.dtype]
    )  # directions that hardly differ from others carry more noise than gain
    # Where λ is noise, 1/√∞ = 0 takes the direction out.
    whitening = axes * torch.where(independent, values, torch.inf).rsqrt()[:, None, :]
    # Eigenvectors do not depend on the scale of a matrix, but squares of entries of A
    # under- and overflow.
    largest = forms.diagonal(dim1=1, dim2=2).amax(1)
    scale = largest.clamp(min=torch.finfo(values.dtype).tiny)[:, None, None]
    forms = torch.nan_to_num(
        whitening.mT @ (forms / scale) @ whitening, posinf=0.0, neginf=0.0
    )
    top = torch.linalg.eigh((forms + forms.mT) / 2).eigenvectors[:, :, -1:]
    weights: Tensor = (whitening @ top).squeeze(2)
    return weights


def _matrix(rows: list[list[Tensor]]) -> Tensor:
    """(n, k, k) from k × k tensors of shape (n,)."""
    return torch.stack([torch.stack(row, 1) for row in rows], 1)


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """(rows,): the inner products of corresponding rows."""
    # Equal strides: `flat_rows` then has the entries of both in the same order, and
    # nothing is copied.
    if x.stride() == y.stride():
        return torch.einsum("rn,rn->r", flat_rows(x), flat_rows(y))
    return (x * y).reshape(len(x), -1).sum(1)
