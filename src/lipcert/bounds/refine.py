"""LT-SDP (the paper's thm:lipSdpForLoopTransformed and thm:multiLayerLipschitz-Sdp) for any DAG.

If site i is elementwise and T is diagonal with B_jiᵀB_ji ⪯ T, then |B_ji ψ_i(z)|² ≤ ψ_i(z)ᵀTψ_i(z) ≤ s_i²|T^½z|². So

    s_i Lip(T^½z_i)  ≤  s_i Σ_{l<i} s_l ‖T^½B_il‖ m_l

is a constant of x ↦ B_ji ψ_i(z_i). With T = ‖B_ji‖²I it is LipLT's, and the better of both is taken. In place of the
sum the paper has ‖W_iᵀTW_i‖^½ times a constant of what W_i is applied to; its remark says why z_i should be unrolled.
Any positive diagonal T = D² can be proposed: what is used is ν²T with a proved bound ν on ‖B_ji D⁻¹‖.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, sqrt

import numpy as np
import torch
from torch import Tensor

from lipcert.bounds.forms import Form
from lipcert.errors import TooLargeError, check_choice
from lipcert.network.sweep import Pair
from lipcert.norms.certified import NormOptions, Progress, no_progress
from lipcert.norms.estimate import flat_rows
from lipcert.norms.gram import bound_spectral_norm, dense_rows
from lipcert.norms.rounding import UNDERFLOW, ProductErrors, gamma, round_up

MULTIPLIERS = ("sn", "aol", "sll", "optimal")
_STEPS = {"sll": 100, "optimal": 2000}
_EXACT = 300  # neurons of a site up to which "optimal" is the default
_PAIRS = 5000  # pairs of classes up to which their rows are refined
_CHUNK = 1 << 22  # entries of vectors iterated at a time
_SPREAD = 1e-7  # how far the weights q of a site may lie apart


@dataclass(frozen=True, eq=False)
class RefinedForm(Form):
    """A form with its maps as matrices. `errors` bounds the Frobenius norms of their errors.

    factors: for a pair (j, i) of sites, bounds on ν‖T^½B_il‖ for l < i.
    multiplier: how T is chosen; None for "optimal" at small sites and "sll" elsewhere.
    """

    maps: Mapping[Pair, np.ndarray]
    errors: Mapping[Pair, float]
    multiplier: str | None = None
    factors: dict[Pair, np.ndarray] = field(default_factory=dict)

    def term(self, j: int, i: int, m: Sequence[float]) -> float:
        plain = super().term(j, i, m)
        return min(plain, float(self._value(self.factors[j, i], i, m))) if (j, i) in self.factors else plain

    def shares(self, target: str, rows: Tensor, m: Sequence[float], report: Callable[[float], None]) -> Tensor:
        """The better of LipLT's share and the refined one, for each site and each class or pair of classes.

        The last layer of the target last-layer, and more than 5000 pairs of classes, are left to LipLT.
        """
        shares = super().shares(target, rows, m, report)
        if target == "network":
            refined = [self.term(self.network.depth + 1, i, m) for i in range(len(shares))]
            return torch.minimum(shares, torch.tensor(refined, dtype=torch.float64))
        count = self.network.classes
        if target == "last-layer" or (target == "pairwise" and count * (count - 1) // 2 > _PAIRS):
            return shares
        class_rows = self._class_rows()
        for done, (i, (matrix, error)) in enumerate(class_rows.items()):

            def part(fraction: float, done: int = done) -> None:
                report((done + fraction) / len(class_rows))

            if target == "per-class":
                found = self._value(self._factors(matrix[:, None], error, i, m, part), i, m)
                shares[i] = torch.minimum(shares[i], torch.from_numpy(found))
            else:
                a, b = np.triu_indices(count, 1)
                found = self._value(self._factors((matrix[a] - matrix[b])[:, None], 2 * error, i, m, part), i, m)
                shares[i, a, b] = shares[i, b, a] = torch.minimum(shares[i, a, b], torch.from_numpy(found))
        return shares

    def _value(self, factors: np.ndarray, i: int, m: Sequence[float]) -> np.ndarray:
        """s_i Σ_l s_l ν‖T^½B_il‖ m_l, rounded up; infinity where it overflows."""
        weights = np.array([s * constant for s, constant in zip(self.radii[:i], m[:i], strict=True)])
        value = self.radii[i] * (factors @ weights) * (1 + gamma(i + 8))
        return np.where(np.isnan(value), inf, value)

    def _class_rows(self) -> dict[int, tuple[np.ndarray, float]]:
        """The rows of B_{n+1,i} for every site that can be refined, and bounds on their errors."""
        last, count = self.network.depth + 1, self.network.classes
        seed = torch.eye(count, dtype=torch.float64, device=self.network.device)
        pulled = self.network.pullback(seed, self.centres)
        errors, found = _copied(self.norms.errors), {}
        for i in reversed(range(1, last)):
            if (rows := pulled[i]) is None:
                continue
            matrix, error = flat_rows(rows).detach().cpu().numpy(), errors.error((last, i))
            errors.know((last, i), float(np.linalg.norm(matrix)) * (1 + 1e-9) + sqrt(count) * error)
            if self._refinable(i):
                found[i] = matrix, error
        return found

    def _refinable(self, i: int) -> bool:
        slope = self.network.sites[i].slope
        return slope is not None and slope.elementwise

    def _factors(
        self, targets: np.ndarray, error: float, i: int, m: Sequence[float], report: Callable[[float], None]
    ) -> np.ndarray:
        """(P, i): ν‖D B_il‖ for each of P matrices with columns for site i, known up to `error`, with the best D."""
        parts = {k: self.maps[i, k] for k in range(i) if (i, k) in self.maps}
        factors = np.zeros((len(targets), i))
        if not parts:
            return factors
        weights = {k: self.radii[k] * m[k] / (self.norms.bounds[i, k] + UNDERFLOW) for k in parts}
        whole = np.concatenate([sqrt(weights[k]) * part for k, part in parts.items()], axis=1)
        if whole.shape[1] > whole.shape[0]:
            whole = np.asarray(np.linalg.qr(whole.T, mode="r")).T
        exact = targets.shape[1] > 1 and targets.shape[2] <= _EXACT
        multiplier = self.multiplier or ("optimal" if exact else "sll")
        for p, diagonal in enumerate(propose_diagonals(targets, whole, multiplier)):
            nu = _bound_product(targets[p] / diagonal, error * float((1 / diagonal).max()))
            for k, part in parts.items():
                product = _bound_product(diagonal[:, None] * part, self.errors[i, k] * float(diagonal.max()))
                factors[p, k] = round_up(nu * product)
            report((p + 1) / len(targets))
        return factors


@torch.no_grad()
def refine(
    plain: Form, options: NormOptions, multiplier: str | None = None, progress: Progress = no_progress
) -> RefinedForm:
    """LT-SDP from the norms of LipLT: T for every pair of sites, by the constants of the sites before them.

    A form in other coordinates is refined in them.

    multiplier: "sn" (T = ‖B_ji‖²I, LipLT), "aol" (row sums of |B_jiᵀB_ji|), "sll" (row sums with the best weights),
        "optimal", or None for "optimal" at sites of at most 300 neurons and "sll" elsewhere.
    """
    if multiplier is not None:
        check_choice("multiplier", multiplier, MULTIPLIERS)
    _check_size(plain, options)
    maps, errors = _matrices(plain, progress)
    method = "lt-sdp" if plain.method == "liplt" else f"{plain.method} lt-sdp"
    form = RefinedForm(**{**vars(plain), "method": method}, maps=maps, errors=errors, multiplier=multiplier)
    m, last = [1.0], max((j for j, _ in maps), default=0)
    for j in range(1, last + 1):
        for i in range(1, j):
            if (j, i) in maps and form._refinable(i):
                report = partial(progress, f"multipliers {j}/{last}")
                form.factors[j, i] = form._factors(maps[j, i][None], errors[j, i], i, m, report)[0]
        m.append(sum(form.term(j, i, m) for i in range(j)))
    return form


def propose_diagonals(targets: np.ndarray, whole: np.ndarray, multiplier: str) -> np.ndarray:
    """(P, n): positive D = T^½ that make ‖G D⁻¹‖·‖D W‖ small for each of P matrices G, (P, o, n), and one W, (n, r).

    With weights d > 0 of the neurons, "sll" is t_k = Σ_j |GᵀG|_kj d_j/d_k. In "optimal" directions v_k of length 1 turn
    this into t_k = |Σ_j (GᵀG)_kj d_j v_j|/d_k, where v_k is the direction of that sum; for a single row G both agree.
    The best d_k are the norms of the rows of WY, where Y maximises Σ_kj (GᵀG)_kj d_k d_j ⟨v_k, v_j⟩ subject to |Y| = 1:
    the dual of the semidefinite program in factored form. Y and v follow by power iteration, Y ← WᵀTWY.
    """
    count, outputs, n = targets.shape
    if multiplier == "sn":
        return np.ones((count, n))
    if outputs > n:
        targets = np.stack([np.linalg.qr(target, mode="r") for target in targets])
    columns = min(whole.shape[1], 4 + round(sqrt(2 * n)))
    step = max(1, _CHUNK // (n * columns))
    scale = np.abs(targets).max(initial=0.0, axis=(1, 2), keepdims=True), np.abs(whole).max(initial=0.0)
    targets, whole = targets / (scale[0] + UNDERFLOW), whole / (scale[1] + UNDERFLOW)
    chunks = [_squares(targets[k : k + step], whole, multiplier, columns) for k in range(0, count, step)]
    squares = np.nan_to_num(np.concatenate(chunks), nan=0.0, posinf=0.0)
    largest = squares.max(axis=1, keepdims=True)
    return np.asarray(np.sqrt(np.where(largest > 0, np.maximum(squares, 1e-12 * largest), 1.0)))


def _squares(targets: np.ndarray, whole: np.ndarray, multiplier: str, columns: int) -> np.ndarray:
    """T of some matrices G, (P, n)."""
    count, outputs, n = targets.shape
    signed = multiplier == "optimal" or outputs == 1
    sizes = np.ones((0, 0, 0)) if signed and multiplier != "aol" else np.abs(targets.transpose(0, 2, 1) @ targets)
    if multiplier == "aol":
        return np.asarray(sizes.sum(2))
    basis = np.linalg.svd(whole, full_matrices=False)[2][:columns].T
    y = np.broadcast_to(basis / sqrt(columns), (count, *basis.shape))
    directions = np.random.default_rng(0).standard_normal((count, n, 1 if outputs == 1 else min(outputs, columns)))
    previous = np.zeros(count)
    for step in range(_STEPS[multiplier]):
        images = whole @ y
        d = np.linalg.norm(images, axis=2)
        d = np.maximum(d, _SPREAD * d.max(axis=1, keepdims=True)) + UNDERFLOW
        if signed:
            for _ in range(1 if outputs == 1 else 3):
                directions = targets.transpose(0, 2, 1) @ (targets @ (d[:, :, None] * directions))
                sums = np.linalg.norm(directions, axis=2)
                directions = directions / (sums[:, :, None] + UNDERFLOW)
        else:
            sums = (sizes @ d[:, :, None])[:, :, 0]
        squares = sums / d
        y = whole.T @ (squares[:, :, None] * images)
        value = np.linalg.norm(y, axis=(1, 2))
        y = y / (value[:, None, None] + UNDERFLOW)
        if step % 10 == 9:
            if (np.abs(value - previous) <= 1e-9 * value).all():
                break
            previous = value
    return np.asarray(squares)


def _bound_product(product: np.ndarray, error: float) -> float:
    """A bound on the norm of a matrix from one computed with relative errors of a few roundings and this error."""
    rows = product if product.shape[0] <= product.shape[1] else np.ascontiguousarray(product.T)
    roundoff = gamma(8) * float(np.linalg.norm(product)) * (1 + 1e-8)
    return round_up(bound_spectral_norm(rows) + roundoff + error + UNDERFLOW, 8)


def _matrices(plain: Form, progress: Progress) -> tuple[dict[Pair, np.ndarray], dict[Pair, float]]:
    """B_ji for all pairs whose norms are known, and bounds on the Frobenius norms of their errors."""
    network, pairs = plain.network, list(plain.norms.bounds)
    maps: dict[Pair, np.ndarray] = {}
    for i in range(network.depth + 1):
        if members := [pair for pair in pairs if pair[1] == i]:
            report = partial(progress, f"matrices {i + 1}/{network.depth + 1}")
            rows = dense_rows(network, ("push", i), members, plain.centres, report)
            maps |= {pair: matrix.T for pair, matrix in rows.items()}
    errors = {(j, i): round_up(sqrt(network.out_size(i)) * plain.norms.errors.error((j, i))) for j, i in pairs}
    return maps, errors


def _copied(errors: ProductErrors) -> ProductErrors:
    copied = copy.copy(errors)
    copied.known = dict(errors.known)
    return copied


def refinable(plain: Form, options: NormOptions) -> bool:
    """Whether the matrices of a form fit into the limits."""
    widest, size = _sizes(plain)
    return widest <= options.dense_limit and size <= options.memory


def _sizes(plain: Form) -> tuple[int, int]:
    """The widest site, and the bytes of the matrices of all maps."""
    network = plain.network
    widest = max((network.out_size(i) for i in range(1, network.depth + 1)), default=0)
    return widest, 8 * sum(network.in_size(j) * network.out_size(i) for j, i in plain.norms.bounds)


def _check_size(plain: Form, options: NormOptions) -> None:
    widest, size = _sizes(plain)
    if not refinable(plain, options):
        raise TooLargeError(
            f"LT-SDP needs the matrices of all maps between sites, {size / 2**30:.3g} GiB with sides up to {widest} "
            f"for this network; the limits are memory={options.memory / 2**30:.3g} GiB and "
            f"dense_limit={options.dense_limit}; use method='rescaled', or larger limits in options="
        )
