"""Several ways to write one network, each with guaranteed norms of the maps between its sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf

import torch
from torch import Tensor

from lipcert.bounds.output_rows import bound_rows
from lipcert.bounds.recursion import (
    bound_between,
    bound_prefix,
    norm_matrix,
    prefix_constants,
)
from lipcert.bounds.targets import Target
from lipcert.network.normal_form import Network
from lipcert.network.program import Live
from lipcert.network.rewrites import liplt_lines, loop_transform, naive_lines, rescale
from lipcert.norms.budget import Guide, passed_sites
from lipcert.norms.certified import CertifiedNorms, bound_norms
from lipcert.norms.kept import KeptNorms
from lipcert.norms.norm_options import NormOptions
from lipcert.norms.product_errors import ProductErrors
from lipcert.norms.rows import per_row
from lipcert.progress import Progress, Report
from lipcert.rounding import gamma, round_up, up_product

_SMALLEST_RADIUS = 2.0**-60
_TINY = 1e-300


@dataclass(frozen=True, eq=False)
class Form:
    """A float64 network with 1-Lipschitz nonlinearities, and bounds on the norms of its maps.

    method: what the form is called.
    base: the network before it was transformed.
    radii: S_0..S_n of the transformation, at least; 1 for the input.
    diagonals: D_i of sites in other coordinates, in which the constants of the form are
    those of D_i⁻¹z_i.
    """

    method: str
    network: Network
    base: Network
    norms: CertifiedNorms
    radii: Sequence[float]
    diagonals: Mapping[int, Tensor]
    _output_norms: dict[str, Tensor] = field(
        default_factory=dict, init=False, repr=False
    )

    @cached_property
    def names(self) -> list[str]:
        return self.network.site_names()

    @cached_property
    def matrix(self) -> Tensor:
        """N, (n+2) × (n+2), with zeros where norms are not known."""
        values = torch.tensor(list(self.norms.bounds.values()), dtype=torch.float64)
        return norm_matrix(list(self.norms.bounds), values, self.network.depth + 2)

    @cached_property
    def inner(self) -> Tensor:
        """N between the sites 0..n, without the output."""
        last = self.network.depth + 1
        return self.matrix[:last, :last]

    def in_network(self, site: int, constant: float) -> float:
        """The constant of z_i that follows from one of D_i⁻¹z_i, rounded up."""
        if site in self.diagonals:
            # |z| = |D·D⁻¹z| ≤ max D·|D⁻¹z|.
            constant *= float(self.diagonals[site].max())
        return constant * (1 + gamma(4))

    def in_form(self, site: int, constant: float) -> float:
        """The constant of D_i⁻¹z_i that follows from one of z_i, rounded up."""
        if site in self.diagonals:
            # |D⁻¹z| ≤ |z|/min D.
            constant /= float(self.diagonals[site].min())
        return constant * (1 + gamma(4))

    def prefix(self, known: Mapping[str, float]) -> Tensor:
        """m_0..m_n in the coordinates of the form, none above what the known constants give, rounded up."""
        # m_0 = 1 of the input needs no limit.
        limits = [inf]
        for site, name in enumerate(self.names[1:], start=1):
            limits.append(self.in_form(site, known.get(name, inf)))
        return self.limited_prefix(limits)

    def limited_prefix(self, limits: Sequence[float]) -> Tensor:
        """m_0..m_n by the recursion, none above its limit, rounded up."""
        return bound_prefix(self.inner, limits)

    def inflation(self, target: Target, shares: Tensor, m: Tensor) -> float:
        """By how much the norms' bounds can have enlarged the values of a target, at most, from the shares of sites."""
        if not self.norms.randomised:
            return 0.0
        last = self.network.depth + 1
        values = torch.tensor(list(self.norms.lower.values()), dtype=torch.float64)
        lower = norm_matrix(list(self.norms.lower), values, last + 1)
        reached = (
            prefix_constants(lower[:last, :last]) / m
        )  # of m_i, what the lower bounds on norms account for
        if target.whole_output:
            reached = (
                reached * lower[last, :last] / self.matrix[last, :last].clamp(min=_TINY)
            )
        total = shares.sum(0)
        # What the value would at least be, had every randomised norm its lower bound:
        # total/least − 1 is the inflation.
        least = (shares * per_row(reached, shares)).sum(0)
        ratios = torch.where(total > 0, total / least.clamp(min=_TINY), 1.0)
        return max(float(ratios.max()) - 1, 0.0)

    def shares(self, target: Target, m: Tensor, report: Report) -> Tensor:
        """(n+1, …): what every site adds to each value of a target, ‖B_{n+1,i}‖ m_i by its functionals, rounded up."""
        norms = self.output_norms(target)
        report(1.0)
        return up_product(norms, per_row(m, norms))

    def output_norms(self, target: Target) -> Tensor:
        """(n+1, …): upper bounds on the norms of the functionals of B_{n+1,i}; computed once for each target."""
        if target.name not in self._output_norms:
            self._output_norms[target.name] = self._bound_output_norms(target)
        return self._output_norms[target.name]

    def _bound_output_norms(self, target: Target) -> Tensor:
        last = self.network.depth + 1
        if target.whole_output:
            return self.matrix[last, :last]
        if target.transforms_last:
            return bound_rows(self.network, target, self.norms.errors)
        lines = {}
        for site, (_, radius) in naive_lines(self.base).items():
            lines[site] = 0.0, _positive(radius)
        # m_i of LipLT bounds z_i. From there rows start at φ_i itself, so that they
        # lead across the last layer alone.
        plain = _rescaled(loop_transform(self.base, lines), self.diagonals)
        return bound_rows(plain, target, ProductErrors(plain)) * (1 + gamma(6))

    def between(self) -> Tensor:
        """(n+1, n+1): entry [k, i] bounds the map from the output of nonlinearity i to the input of site k > i.

        The recursion gives constants from the output of ψ_i, which S_i multiplies.
        """
        resolvent = bound_between(self.inner)
        # R_ii = 1 is no map from the output of a site to an input behind it.
        strictly_lower = resolvent - torch.eye(len(resolvent), dtype=torch.float64)
        return up_product(
            strictly_lower, 1 / torch.tensor(self.radii, dtype=torch.float64)
        )

    def tails(self, target: Target) -> Tensor:
        """(n+1, …): constants from the output of every nonlinearity to the functionals, in the form's coordinates."""
        last = self.network.depth + 1
        rows = self.output_norms(target)
        if target.transforms_last:
            resolvent = bound_between(self.inner)
            # From ψ_i straight to the output, R_ii = 1, or by way of any later site l:
            # Σ_l ‖B_{n+1,l}‖ R_li.
            constants = torch.einsum("li,l...->i...", resolvent, rows) * (
                1 + gamma(last + 2)
            )
            return up_product(
                constants,
                per_row(1 / torch.tensor(self.radii, dtype=torch.float64), rows),
            )
        # Here rows start at φ itself, whose S is its Lipschitz constant.
        radii = [1.0]
        for _, radius in naive_lines(self.base).values():
            radii.append(_positive(radius))
        direct = rows / per_row(torch.tensor(radii, dtype=torch.float64), rows)
        onward = torch.einsum("li,l...->i...", self.between(), rows)
        return (direct + onward) * (1 + gamma(4 * (last + 2)))


@torch.no_grad()
def make_form(
    method: str,
    base: Network,
    last: int,
    options: NormOptions,
    progress: Progress,
    scales: Mapping[str, Tensor] | None = None,
    rough: Network | None = None,
    kept: KeptNorms | None = None,
) -> Form:
    """A float64 network, loop-transformed unless the method is "naive", with norms up to site `last`.

    `scales` are diagonals by the names of their sites; `rough` is the network in the
    model's own precision; norms that are done are added to `kept`, and not computed
    again.
    """
    lines = naive_lines(base) if method == "naive" else liplt_lines(base, up=True)
    diagonals: dict[int, Tensor] = {}
    radii = [1.0]
    for site, name in enumerate(base.site_names()[1:], start=1):
        centre, line_radius = lines[site]
        radius = _positive(line_radius)
        if scales is not None and name in scales:
            diagonals[site] = scales[name].double()
            radius *= 1 + gamma(
                6
            )  # D⁻¹ before and D after a site are rounded: their product is not quite 1
        lines[site] = centre, radius
        radii.append(radius)
    # lines and radii must not change any more: the maps of the network contain S,
    # `between` and `tails` divide by it.
    network = _rescaled(loop_transform(base, lines), diagonals)
    passing = {}
    for site in passed_sites(base):
        passing[site] = round_up(_largest(lines[site][0]) / radii[site])
    guide = Guide(_rescaled(loop_transform(rough or base, lines), diagonals), passing)
    norms = bound_norms(network, last, options, progress, guide, kept)
    return Form(method, network, base, norms, radii, diagonals)


def _largest(centre: float | Live) -> float:
    """max |C|."""
    return abs(centre) if isinstance(centre, float) else float(centre().abs().max())


def _positive(radius: float | Live) -> float:
    """The radius of a line, large enough to divide by."""
    value = radius if isinstance(radius, float) else float(radius())
    return max(value, _SMALLEST_RADIUS)


def _rescaled(network: Network, diagonals: Mapping[int, Tensor]) -> Network:
    return rescale(
        network,
        {site: partial(torch.clone, diagonal) for site, diagonal in diagonals.items()},
    )
