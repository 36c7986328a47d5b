"""Estimates of ‖B_ji‖ by warm-started power iteration: they approach the norms from below."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from lipcert.network.sweep import Sweep

Vectors = dict[int, Tensor]
"""For each start site, one row per pair that begins there."""
_NOISE = {torch.float32: 2.0**-12, torch.float64: 2.0**-26}


def random_vectors(sweep: Sweep, seed: int) -> Vectors:
    """Unit vectors in random directions, reproducible from the seed."""
    network = sweep.network
    generator = torch.Generator().manual_seed(seed)
    vectors = {}
    for i, pairs in sweep.starts.items():
        shape = network.nodes[network.sites[i].output].shape
        x = torch.randn(len(pairs), *shape, generator=generator).to(network.device, network.dtype)
        vectors[i] = x / row_norms(x, keepdim=True)
    return vectors


class Rotation:
    """Turns unit vectors towards the top right singular vectors of all pairs at once, by sweeps with A = BᵀB.

    The first step of a pair is a power step, x ← Ax/‖Ax‖. The others move to the best vector in the span of x, the
    residual Ax − θx and the direction of the step before (locally optimal conjugate gradients, Knyazev 2001): each
    costs one sweep like a power step, is never worse, and fewer are needed.

    Far pairs take turns, so that the cost of an iteration grows with the depth of a network, not its square: those that
    span at most four sites take part in every iteration, those up to eight in every second, farther ones in every
    fourth. There are many of them, they change slowly, and every site halves their share of the bound (for ReLU).
    """

    PERIOD = 4

    def __init__(self, sweep: Sweep, passing: Sequence[bool]) -> None:
        strides = {(j, i): 1 if j - i <= 4 else 2 if j - i <= 8 else self.PERIOD for j, i in sweep.pairs}
        period = max(strides.values(), default=1)
        last = max((j for j, _ in sweep.pairs), default=0)
        turns = [{p for p, stride in strides.items() if (turn + sum(p)) % stride == 0} for turn in range(period)]
        self._phases = [sweep] if period == 1 else [Sweep(sweep.network, passing, last, only=turn) for turn in turns]
        self._rows = [
            {i: torch.tensor([sweep.starts[i].index(pair) for pair in pairs]) for i, pairs in phase.starts.items()}
            for phase in self._phases
        ]

    @property
    def period(self) -> int:
        """How many iterations until every pair has had its turn."""
        return len(self._phases)

    @torch.no_grad()
    def iterate(self, vectors: Vectors, centres: Sequence[float | Tensor], iterations: int, turn: int = 0) -> Vectors:
        """Iterations from the given turn on; vectors of pairs that wait, and rows that B maps to zero, stay."""
        searches = {i: _Search(x) for i, x in vectors.items()}
        for k in range(turn, turn + iterations):
            phase, rows = self._phases[k % self.period], self._rows[k % self.period]
            chosen = {i: searches[i].take(index if self.period > 1 else None) for i, index in rows.items()}
            ends = phase.forward({i: search.probe() for i, search in chosen.items()}, centres)
            for i, image in phase.adjoint(ends, centres).items():
                chosen[i].advance(image)
                searches[i].put(rows[i] if self.period > 1 else None, chosen[i])
        return {i: search.result() for i, search in searches.items()}


class _Search:
    """Vectors x of one start site, with Ax, the last direction and its image; zeros as long as they are not known."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.image, self.direction, self.direction_image = (torch.zeros_like(x) for _ in range(3))

    def take(self, rows: Tensor | None) -> _Search:
        if rows is None:
            return self
        rows = rows.to(self.x.device)
        part = _Search(self.x[rows])
        part.image, part.direction = self.image[rows], self.direction[rows]
        part.direction_image = self.direction_image[rows]
        return part

    def put(self, rows: Tensor | None, part: _Search) -> None:
        if rows is None:
            return
        rows = rows.to(self.x.device)
        for name in ("x", "image", "direction", "direction_image"):
            setattr(self, name, getattr(self, name).index_copy(0, rows, getattr(part, name)))

    def probe(self) -> Tensor:
        """What A is to be applied to next: the residual of x or, while its image is not known, x itself."""
        self._new = row_norms(self.image, keepdim=True) == 0
        self._residual = unit_rows(self.image - _dots(self.x, self.image) * self.x)
        return torch.where(self._new, self.x, self._residual)

    def advance(self, image: Tensor) -> None:
        """Take in the image of the probe: the best vector in the span of x, residual and direction becomes x."""
        if bool(self._new.all()):
            self.image = image
            return
        known = torch.where(self._new, torch.zeros_like(image), image)
        basis, images = [self.x, self._residual, self.direction], [self.image, known, self.direction_image]
        weights = _best_combination(basis, images)
        first, *others = (weights[:, k].reshape(-1, *(1,) * (self.x.dim() - 1)) for k in range(3))
        direction = others[0] * basis[1] + others[1] * basis[2]
        direction_image = others[0] * images[1] + others[1] * images[2]
        x, moved = first * self.x + direction, first * self.image + direction_image
        scale = row_norms(x, keepdim=True)
        length = row_norms(direction, keepdim=True)
        length = torch.where(length > _NOISE[x.dtype], length, torch.inf)  # a shorter step is forgotten
        self.direction, self.direction_image = direction / length, direction_image / length
        self.x, self.image = torch.where(self._new, self.x, x / scale), torch.where(self._new, image, moved / scale)

    def result(self) -> Tensor:
        """One more power step, for the image is known."""
        return unit_rows(self.image, fallback=self.x)


def _best_combination(basis: list[Tensor], images: list[Tensor]) -> Tensor:
    """(rows, 3): the weights of the unit combination of the basis that A stretches most (Rayleigh–Ritz)."""
    inner, forms = (torch.nan_to_num(_inner(basis, side), posinf=0.0, neginf=0.0) for side in (basis, images))
    values, axes = torch.linalg.eigh(inner)
    independent = values > _NOISE[values.dtype]  # directions that hardly differ from others carry more noise than gain
    whitening = axes * torch.where(independent, values, torch.inf).rsqrt()[:, None, :]
    scale = forms.diagonal(dim1=1, dim2=2).amax(1).clamp(min=torch.finfo(values.dtype).tiny)[:, None, None]
    forms = torch.nan_to_num(whitening.mT @ (forms / scale) @ whitening, posinf=0.0, neginf=0.0)
    top = torch.linalg.eigh((forms + forms.mT) / 2).eigenvectors[:, :, -1:]
    weights: Tensor = (whitening @ top).squeeze(2)
    return weights


def _inner(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """(rows, 3, 3): the inner products of three vectors with three others, for every row."""
    channels_last = left[0].dim() == 4 and left[0].is_contiguous(memory_format=torch.channels_last)
    a, b = (
        torch.stack([x.permute(0, 2, 3, 1) if channels_last else x for x in side], 1).flatten(2)
        for side in (left, right)
    )
    products: Tensor = a @ b.mT
    return products


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """The inner products of corresponding rows, in a shape that broadcasts over them."""
    dots: Tensor = (x * y).sum(tuple(range(1, x.dim())), keepdim=True)
    return dots


def estimate_norms(sweep: Sweep, vectors: Vectors, centres: Sequence[float | Tensor]) -> Tensor:
    """‖B_ji x_ji‖ for all pairs, in the order of `sweep.pairs`.

    Differentiable in the weights: at a top right singular vector v with left singular vector u, the derivative of
    ‖Bv‖ for fixed v is uᵀ(dB)v, which is the derivative of the norm.
    """
    ends = sweep.forward(vectors, centres)
    return torch.cat([row_norms(ends[j]) for j in sorted(ends)])


def flat_rows(x: Tensor) -> Tensor:
    """(rows, n): the entries of every row in the order in which they lie in memory, without copying them."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        x = x.permute(0, 2, 3, 1)
    return x.reshape(x.shape[0], -1)


def row_norms(x: Tensor, keepdim: bool = False) -> Tensor:
    """The l2 norm of every row, with gradient zero (not NaN) at zero; squares neither overflow nor underflow."""
    flat = flat_rows(x)
    norms: Tensor = torch.linalg.vector_norm(flat, dim=1)
    limits = torch.finfo(x.dtype)
    if not bool(((norms > limits.tiny**0.4) & (norms < limits.max**0.4)).all()):
        largest = torch.linalg.vector_norm(flat.detach(), ord=inf, dim=1, keepdim=True)
        scale = torch.where(largest == 0, torch.ones_like(largest), largest)
        norms = torch.linalg.vector_norm(flat / scale, dim=1) * scale.squeeze(1)
    return norms.reshape(-1, *(1,) * (x.dim() - 1)) if keepdim else norms


def unit_rows(x: Tensor, fallback: Tensor | None = None) -> Tensor:
    """Every row divided by its norm; rows of zeros stay, or are replaced."""
    scale = row_norms(x, keepdim=True)
    if bool((scale > 0).all()):
        return x / scale
    fallback = x if fallback is None else fallback
    return torch.where(scale > 0, x / torch.where(scale > 0, scale, torch.ones_like(scale)), fallback)
