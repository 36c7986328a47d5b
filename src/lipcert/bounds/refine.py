"""LT-SDP (the paper's thm:lipSdpForLoopTransformed and thm:multiLayerLipschitz-Sdp) for any DAG.

If site i is elementwise and T is diagonal with B_jiᵀB_ji ⪯ T, then |B_ji ψ_i(z)|² ≤
ψ_i(z)ᵀTψ_i(z) ≤ |T^½z|². So

    Lip(T^½z_i)  ≤  Σ_{l<i} ‖T^½B_il‖ m_l

is a constant of x ↦ B_ji ψ_i(z_i). With T = ‖B_ji‖²I it is LipLT's, and the better of
both is taken. In place of the sum the paper has ‖W_iᵀTW_i‖^½ times a constant of what
W_i is applied to; its remark says why z_i should be unrolled. Any positive diagonal T =
D² can be proposed: what is used is ν²T with a proved bound ν on ‖B_ji D⁻¹‖.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, sqrt

import numpy as np
import torch
from torch import Tensor

from lipcert.bounds.forms import Form
from lipcert.bounds.multipliers import MULTIPLIERS, propose_diagonals
from lipcert.bounds.output_rows import output_rows
from lipcert.bounds.recursion import recursion
from lipcert.bounds.targets import Target
from lipcert.bounds.weighted_rows import weighted_rows
from lipcert.errors import TooLargeError, check_choice
from lipcert.network.sweep import Pair
from lipcert.norms.gram import all_matrices, bound_matrix_norm
from lipcert.norms.norm_options import NormOptions
from lipcert.progress import Progress, Report, no_progress
from lipcert.rounding import UNDERFLOW, gamma, round_up, up_product, up_sum

_EXACT = 300  # neurons of a site up to which "optimal" is the default
_FUNCTIONALS = 5000  # functionals of a target up to which their rows are refined


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

    def limited_prefix(self, limits: Sequence[float]) -> Tensor:
        """m_0..m_n by the recursion with the better terms, rounded up."""
        first, count = torch.ones((), dtype=torch.float64), self.network.depth + 1
        return recursion(lambda j, m: up_sum(self.terms(j, m)), count, first, limits)

    def terms(self, j: int, m: Tensor) -> Tensor:
        """(j,): constants of x ↦ B_ji ψ_i(z_i) for all sites i before j, the better of LipLT's and the refined one."""
        # ‖B_ji‖ m_i, LipLT's terms.
        terms = up_product(self.matrix[j, :j], m[:j])
        for i in range(1, j):
            if (j, i) in self.factors:
                refined = float(_weighted(self.factors[j, i], m[:i].numpy()))
                terms[i] = terms[i].clamp(max=refined)
        return terms

    def shares(self, target: Target, m: Tensor, report: Report) -> Tensor:
        """The better of LipLT's share and the refined one, for each site and each functional of the target.

        Targets of very many functionals, and those that stop before the last layer, are
        left to LipLT.
        """
        # (n+1, …). From here on entries only become smaller.
        shares = super().shares(target, m, report)
        if target.whole_output:
            return self.terms(self.network.depth + 1, m)
        if not target.refinable:
            return shares
        functionals = target.functionals(self.network.classes)
        if not 0 < len(functionals) <= _FUNCTIONALS:
            return shares
        # (F, K): one functional in each row.
        weights = torch.cat([weight for _, weight in functionals]).numpy()
        last = self.network.depth + 1
        for i, rows, error in output_rows(self.network, self.norms.errors):
            if not self.is_elementwise(i):
                continue
            matrix = rows.flatten(1).detach().cpu().numpy()
            targets, target_error = weighted_rows(weights, matrix, error)
            part = partial(_report_part, report, last - 1 - i, last)
            # (F, 1, n_i): each functional is a matrix G of one row, with a T of its own.
            single, before = targets[:, None], m[:i].numpy()
            factors = self.refined_factors(single, target_error, i, before, part)
            refined = _weighted(factors, before)
            # For a pair the place is ([a, b], [b, a]): both entries of the symmetric
            # matrix.
            for (place, _), value in zip(functionals, refined.tolist(), strict=True):
                shares[i][place] = shares[i][place].clamp(max=value)
        report(1.0)
        return shares

    def is_elementwise(self, i: int) -> bool:
        """Whether the terms of a site can be refined."""
        slope = self.network.sites[i].slope
        return slope is not None and slope.elementwise

    def refine_row(self, j: int, m: Tensor, report: Report) -> None:
        """Find the factors of the maps to site j, from the constants of the sites before it."""
        for i in range(1, j):
            # T is a diagonal: |ψ_i(z)|_T ≤ |z|_T needs every coordinate to be
            # 1-Lipschitz for itself.
            if (j, i) in self.maps and self.is_elementwise(i):
                one, error = self.maps[j, i][None], self.errors[j, i]
                factors = self.refined_factors(one, error, i, m[:i].numpy(), report)
                # `terms` finds them, so that m_j and all constants behind it gain from
                # them.
                self.factors[j, i] = factors[0]

    def refined_factors(
        self, targets: np.ndarray, error: float, i: int, m: np.ndarray, report: Report
    ) -> np.ndarray:
        """(P, i): ν‖D B_il‖ for each of P matrices with columns for site i, known up to `error`, with the best D."""
        factors = np.zeros((len(targets), i))
        maps = {k: self.maps[i, k] for k in range(i) if (i, k) in self.maps}
        if not maps:
            return factors
        # By Cauchy–Schwarz (Σ_l ‖DB_il‖m_l)² is at most Σ_l ‖DB_il‖²m_l/‖B_il‖ times a
        # constant. ‖DW‖² for these maps side by side stands for that sum. It only
        # chooses D; the bound is proved below.
        weighted = [
            sqrt(m[k] / (self.norms.bounds[i, k] + UNDERFLOW)) * b
            for k, b in maps.items()
        ]
        whole = np.concatenate(weighted, axis=1)
        if whole.shape[1] > whole.shape[0]:
            # ‖DW‖ depends on WWᵀ alone, which is that of the triangular factor.
            whole = np.asarray(np.linalg.qr(whole.T, mode="r")).T
        multiplier = self.multiplier
        if multiplier is None:
            # For a single row "sll" is optimal (see `propose_diagonals`).
            exact = targets.shape[1] > 1 and targets.shape[2] <= _EXACT
            multiplier = "optimal" if exact else "sll"
        for p, diagonal in enumerate(propose_diagonals(targets, whole, multiplier)):
            # ν ≥ ‖G D⁻¹‖ makes ν²D² a T with GᵀG ⪯ T, whatever D was proposed. An error
            # of G grows by max D⁻¹ at most.
            enlarged = error * float((1 / diagonal).max())
            nu = _bound_product(targets[p] / diagonal, enlarged)
            for k, b in maps.items():
                enlarged = self.errors[i, k] * float(diagonal.max())
                product = _bound_product(diagonal[:, None] * b, enlarged)
                factors[p, k] = round_up(nu * product)
            report((p + 1) / len(targets))
        return factors


def _weighted(factors: np.ndarray, m: np.ndarray) -> np.ndarray:
    """Σ_l ν‖T^½B_il‖ m_l, rounded up; infinity where it overflows."""
    value = (factors @ m) * (1 + gamma(len(m) + 8))
    return np.where(np.isnan(value), inf, value)


def _bound_product(product: np.ndarray, error: float) -> float:
    """A bound on the norm of a matrix from one computed with relative errors of a few roundings and this error."""
    # Scaling by D rounds every entry: relative errors, whose norm ‖·‖_F bounds.
    roundoff = gamma(8) * float(np.linalg.norm(product)) * (1 + 1e-8)
    return round_up(bound_matrix_norm(product) + roundoff + error + UNDERFLOW, 8)


def _report_part(report: Report, done: int, total: int, fraction: float) -> None:
    report((done + fraction) / total)


@torch.no_grad()
def refine(
    plain: Form,
    options: NormOptions,
    multiplier: str | None = None,
    progress: Progress = no_progress,
) -> RefinedForm:
    """LT-SDP from the norms of LipLT: T for every pair of sites, by the constants of the sites before them.

    A form in other coordinates is refined in them.

    multiplier: "sn" (T = ‖B_ji‖²I, LipLT), "aol" (row sums of |B_jiᵀB_ji|), "sll" (row
    sums with the best weights),
        "optimal", or None for "optimal" at sites of at most 300 neurons and "sll" elsewhere.
    """
    if multiplier is not None:
        check_choice("multiplier", multiplier, MULTIPLIERS)
    _check_size(plain, options)
    maps, errors = _matrices(plain, progress)
    method = "lt-sdp" if plain.method == "liplt" else f"{plain.method} lt-sdp"
    network, base, norms, radii = plain.network, plain.base, plain.norms, plain.radii
    form = RefinedForm(
        method, network, base, norms, radii, plain.diagonals, maps, errors, multiplier
    )
    last = max((j for j, _ in maps), default=0)

    def row(j: int, m: Tensor) -> Tensor:
        form.refine_row(j, m, partial(progress, f"multipliers {j}/{last}"))
        return up_sum(form.terms(j, m))

    recursion(row, last + 1, torch.ones((), dtype=torch.float64))
    return form


def _matrices(
    plain: Form, progress: Progress
) -> tuple[dict[Pair, np.ndarray], dict[Pair, float]]:
    """B_ji for all pairs whose norms are known, and bounds on the Frobenius norms of their errors."""
    network = plain.network
    maps = all_matrices(network, list(plain.norms.bounds), progress)
    errors = {}
    for j, i in maps:
        # The maps are formed column by column, each with this error: √(number of
        # columns) in the Frobenius norm.
        column = plain.norms.errors.error((j, i))
        errors[j, i] = round_up(sqrt(network.out_size(i)) * column)
    return maps, errors


def refinable(plain: Form, options: NormOptions) -> bool:
    """Whether the matrices of a form fit into the limits."""
    widest, size = _sizes(plain)
    return widest <= options.dense_limit and size <= options.memory


def _sizes(plain: Form) -> tuple[int, int]:
    """The widest site, and the bytes of the matrices of all maps."""
    network = plain.network
    widest = max((network.out_size(i) for i in range(1, network.depth + 1)), default=0)
    entries = sum(
        network.in_size(j) * network.out_size(i) for j, i in plain.norms.bounds
    )
    return widest, 8 * entries


def _check_size(plain: Form, options: NormOptions) -> None:
    widest, size = _sizes(plain)
    if not refinable(plain, options):
        raise TooLargeError(
            f"LT-SDP needs the matrices of all maps between sites, {size / 2**30:.3g} GiB with sides up to {widest} "
            f"for this network; the limits are memory={options.memory / 2**30:.3g} GiB and "
            f"dense_limit={options.dense_limit}; use method='rescaled', or larger limits in options="
        )
