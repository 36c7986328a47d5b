"""Estimates of ‖B_ji‖ by warm-started power iteration: they approach the norms from below."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from lipcert.network.sweep import Pair, Sweep

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
    costs one sweep like a power step and some operations on vectors, is never worse, and fewer are needed.

    Far pairs take turns, so that the cost of an iteration grows with the depth of a network, not its square: those that
    span at most four sites take part in every iteration, those up to eight in every second, farther ones in every
    fourth. There are many of them, they change slowly, and every site halves their share of the bound (for ReLU).
    """

    PERIOD = 4

    def __init__(self, sweep: Sweep) -> None:
        strides = {(j, i): 1 if j - i <= 4 else 2 if j - i <= 8 else self.PERIOD for j, i in sweep.pairs}
        period = max(strides.values(), default=1)
        last = max((j for j, _ in sweep.pairs), default=0)
        turns = [{p for p, stride in strides.items() if (turn + sum(p)) % stride == 0} for turn in range(period)]
        self._phases = [sweep] if period == 1 else [Sweep(sweep.network, last, only=turn) for turn in turns]
        self._groups: dict[int, list[list[Pair]]] = {}  # pairs of a start site that take part at the same times
        for i, pairs in sweep.starts.items():
            together: dict[tuple[bool, ...], list[Pair]] = {}
            for pair in pairs:
                together.setdefault(tuple(pair in turn for turn in turns), []).append(pair)
            self._groups[i] = list(together.values())
        self._starts = sweep.starts

    @property
    def period(self) -> int:
        """How many iterations until every pair has had its turn."""
        return len(self._phases)

    @torch.no_grad()
    def iterate(
        self,
        vectors: Vectors,
        iterations: int,
        turn: int = 0,
        accelerated: bool = True,
    ) -> Vectors:
        """Iterations from the given turn on; vectors of pairs that wait, and rows that B maps to zero, stay.

        Without acceleration, all are power steps.
        """
        searches = {
            i: [_Search(part, accelerated) for part in _split(vectors[i], self._starts[i], groups)]
            for i, groups in self._groups.items()
        }
        for k in range(turn, turn + iterations):
            phase = self._phases[k % self.period]
            active = {
                i: [g for g, group in enumerate(self._groups[i]) if group[0] in rows]
                for i, rows in phase.starts.items()
            }
            probes = {
                i: _join([searches[i][g].probe() for g in active[i]], [self._groups[i][g] for g in active[i]], rows)
                for i, rows in phase.starts.items()
            }
            for i, image in phase.adjoint(phase.forward(probes)).items():
                parts = _split(image, phase.starts[i], [self._groups[i][g] for g in active[i]])
                for g, part in zip(active[i], parts, strict=True):
                    searches[i][g].advance(part)
        return {
            i: _join([search.result() for search in searches[i]], groups, self._starts[i])
            for i, groups in self._groups.items()
        }


class _Search:
    """Vectors x that move together, with Ax, the last step p and Ap, as far as they are known."""

    def __init__(self, x: Tensor, accelerated: bool) -> None:
        self.x, self.accelerated = x, accelerated
        self.image: Tensor | None = None
        self.step: tuple[Tensor, Tensor] | None = None

    def probe(self) -> Tensor:
        """What A is to be applied to next: the residual r of x, or x itself while its image is not known."""
        if self.image is None:
            return self.x
        self.squares = _dots(self.x, self.x)
        self.theta = _dots(self.x, self.image) / self.squares
        residual = torch.addcmul(self.image, _wide(self.theta, self.x), self.x, value=-1)
        length = row_norms(residual)
        significant = length > _NOISE[length.dtype] / 16 * self.theta  # what is smaller is noise
        self.length = torch.where(significant, length, torch.zeros_like(length))
        self.residual = residual / _wide(torch.where(significant, length, torch.inf), residual)
        return self.residual

    def advance(self, image: Tensor) -> None:
        """Take in the image of the probe: the best vector in the span of x, r and p becomes x.

        Ax = θx + |Ax − θx|·r, so that ⟨y, Ax⟩ follows from ⟨y, x⟩ and ⟨y, r⟩.
        """
        if not self.accelerated:
            self.x = unit_rows(image, fallback=self.x)
            return
        if self.image is None:
            self.image = image
            if self.x.stride() != image.stride():  # one memory format for all
                self.x = torch.empty_like(image).copy_(self.x)
            return
        x, r, theta, length = self.x, self.residual, self.theta, self.length
        rr, xr = (length > 0).to(x.dtype), _dots(x, r)
        xar = theta * xr + length * rr
        inner, forms = [[self.squares, xr], [xr, rr]], [[theta * self.squares, xar], [xar, _dots(r, image)]]
        if self.step is not None:
            p, p_image = self.step
            size = row_norms(p)
            unit = torch.where(size > _NOISE[x.dtype], size, torch.inf).reciprocal()  # a shorter step is forgotten
            xp, rp, par = (unit * dots for dots in (_dots(x, p), _dots(r, p), _dots(p, image)))
            xap = theta * xp + length * rp
            inner = [[*inner[0], xp], [*inner[1], rp], [xp, rp, (unit > 0).to(x.dtype)]]
            forms = [[*forms[0], xap], [*forms[1], par], [xap, par, unit * unit * _dots(p, p_image)]]
        weights = _best_combination(_matrix(inner), _matrix(forms))
        weights = torch.where((theta > 0)[:, None], weights, torch.zeros_like(weights))
        first = torch.where(theta > 0, weights[:, 0], torch.ones_like(theta))
        step, step_image = (_wide(weights[:, 1], r) * y for y in (r, image))
        if self.step is not None:
            share = _wide(weights[:, 2] * unit, r)
            step, step_image = torch.addcmul(step, share, p), torch.addcmul(step_image, share, p_image)
        self.step = step, step_image
        self.x = torch.addcmul(step, _wide(first, x), x)
        self.image = torch.addcmul(step_image, _wide(first, x), self.image)

    def result(self) -> Tensor:
        """One more power step, for the image is known."""
        return self.x if self.image is None else unit_rows(self.image, fallback=self.x)


def _best_combination(inner: Tensor, forms: Tensor) -> Tensor:
    """(rows, k): weights w with wᵀ(inner)w = 1 and the largest wᵀ(forms)w (Rayleigh–Ritz)."""
    inner, forms = (torch.nan_to_num(matrix, posinf=0.0, neginf=0.0) for matrix in (inner, forms))
    values, axes = torch.linalg.eigh(inner)
    independent = values > _NOISE[values.dtype]  # directions that hardly differ from others carry more noise than gain
    whitening = axes * torch.where(independent, values, torch.inf).rsqrt()[:, None, :]
    scale = forms.diagonal(dim1=1, dim2=2).amax(1).clamp(min=torch.finfo(values.dtype).tiny)[:, None, None]
    forms = torch.nan_to_num(whitening.mT @ (forms / scale) @ whitening, posinf=0.0, neginf=0.0)
    top = torch.linalg.eigh((forms + forms.mT) / 2).eigenvectors[:, :, -1:]
    weights: Tensor = (whitening @ top).squeeze(2)
    return weights


def _matrix(rows: list[list[Tensor]]) -> Tensor:
    """(n, k, k) from k × k tensors of shape (n,)."""
    return torch.stack([torch.stack(row, 1) for row in rows], 1)


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """One value per row, in a shape that broadcasts over rows."""
    return values.reshape(-1, *(1,) * (like.dim() - 1))


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """(rows,): the inner products of corresponding rows."""
    if x.stride() == y.stride():
        return torch.einsum("rn,rn->r", flat_rows(x), flat_rows(y))
    return (x * y).reshape(len(x), -1).sum(1)


def _split(rows: Tensor, pairs: Sequence[Pair], groups: Sequence[Sequence[Pair]]) -> list[Tensor]:
    """The rows of some groups of pairs, from those of all `pairs`."""
    if len(groups) == 1 and list(groups[0]) == list(pairs):
        return [rows]
    index = {pair: k for k, pair in enumerate(pairs)}
    return [torch.cat([rows[index[pair] : index[pair] + 1] for pair in group]) for group in groups]


def _join(parts: Sequence[Tensor], groups: Sequence[Sequence[Pair]], pairs: Sequence[Pair]) -> Tensor:
    """The rows of all `pairs` from those of groups of them."""
    if len(parts) == 1 and list(groups[0]) == list(pairs):
        return parts[0]
    found = {pair: part[k : k + 1] for part, group in zip(parts, groups, strict=True) for k, pair in enumerate(group)}
    return torch.cat([found[pair] for pair in pairs])


def estimate_norms(sweep: Sweep, vectors: Vectors) -> Tensor:
    """‖B_ji x_ji‖ for all pairs, in the order of `sweep.pairs`.

    Differentiable in the weights: at a top right singular vector v with left singular vector u, the derivative of
    ‖Bv‖ for fixed v is uᵀ(dB)v, which is the derivative of the norm.
    """
    ends = sweep.forward(vectors)
    return torch.cat([row_norms(ends[j]) for j in sorted(ends)])


def flat_rows(x: Tensor) -> Tensor:
    """(rows, n): the entries of every row in the order in which they lie in memory, without copying them."""
    if x.is_contiguous():
        return x.reshape(x.shape[0], -1)
    axes = sorted(range(1, x.dim()), key=lambda axis: (-x.stride()[axis], -x.shape[axis]))
    return x.permute(0, *axes).reshape(x.shape[0], -1)


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
