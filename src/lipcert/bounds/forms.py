"""Several ways to write one network, each with guaranteed norms, and the recursion that takes the best of all.

Any valid constant m_i may enter the recursion of any form. So a form computes its constants from the smallest ones
known, hands them on, and the forms take turns until nothing improves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf, sqrt

import torch
from torch import Tensor

from lipcert.bounds.recursion import bound_between, bound_prefix, norm_matrix
from lipcert.bounds.targets import Target
from lipcert.network.normal_form import Network
from lipcert.network.program import Live
from lipcert.network.rewrites import liplt_lines, loop_transform, naive_lines, rescale
from lipcert.norms.certified import CertifiedNorms, NormOptions, bound_norms
from lipcert.norms.product_errors import ProductErrors
from lipcert.norms.rows import flat_rows, row_norms
from lipcert.progress import Progress
from lipcert.rounding import gamma, up_product

_ROUNDS = 8
_SMALLEST_RADIUS = 2.0**-60


@dataclass(frozen=True, eq=False)
class Form:
    """A float64 network with 1-Lipschitz nonlinearities, and bounds on the norms of its maps.

    method: what the form is called. base: the network before it was transformed.
    radii: S_0..S_n of the transformation, at least; 1 for the input.
    diagonals: D_i of sites in other coordinates, in which the constants of the form are those of D_i⁻¹z_i.
    """

    method: str
    network: Network
    base: Network
    norms: CertifiedNorms
    radii: Sequence[float]
    diagonals: Mapping[int, Tensor]

    @cached_property
    def names(self) -> list[str]:
        return self.network.site_names()

    @cached_property
    def matrix(self) -> Tensor:
        """N, (n+2) × (n+2), with zeros where norms are not known."""
        pairs = list(self.norms.bounds)
        values = torch.tensor([self.norms.bounds[pair] for pair in pairs], dtype=torch.float64)
        return norm_matrix(pairs, values, self.network.depth + 2)

    def largest(self, site: int) -> float:
        """The largest entry of D of a site."""
        return float(self.diagonals[site].max()) if site in self.diagonals else 1.0

    def smallest(self, site: int) -> float:
        """The smallest entry of D of a site."""
        return float(self.diagonals[site].min()) if site in self.diagonals else 1.0

    def prefix(self, known: Mapping[str, float]) -> Tensor:
        """m_0..m_n in the coordinates of the form, none above what the known constants give, rounded up."""
        return self._recursion(self._limits(known))

    def _recursion(self, limits: Sequence[float]) -> Tensor:
        last = self.network.depth + 1
        return bound_prefix(self.matrix[:last, :last], limits)

    def _limits(self, known: Mapping[str, float]) -> list[float]:
        limits = []
        for site, name in enumerate(self.names):
            limits.append(known.get(name, inf) / self.smallest(site) * (1 + gamma(4)) if site else inf)
        return limits

    def shares(self, target: Target, m: Tensor, report: Callable[[float], None]) -> Tensor:
        """(n+1, …): what every site adds to each value of a target, ‖B_{n+1,i}‖ m_i by its functionals, rounded up."""
        norms = self.output_norms(target)
        report(1.0)
        return up_product(norms, m.reshape(-1, *(1,) * (norms.dim() - 1)))

    def output_norms(self, target: Target) -> Tensor:
        """(n+1, …): upper bounds on the norms of the functionals of B_{n+1,i}."""
        last = self.network.depth + 1
        if target.whole_output:
            return self.matrix[last, :last]
        if target.transforms_last:
            return _bound_rows(self.network, target, self.norms.errors)
        lines = {
            site: (0.0, max(_value(radius), _SMALLEST_RADIUS)) for site, (_, radius) in naive_lines(self.base).items()
        }
        plain = _rescaled(loop_transform(self.base, lines), self.diagonals)
        return _bound_rows(plain, target, ProductErrors(plain)) * (1 + gamma(6))

    def between(self) -> Tensor:
        """(n+1, n+1): entry [k, i] bounds the map from the output of nonlinearity i to the input of site k > i.

        The recursion gives constants from the output of ψ_i, which S_i multiplies.
        """
        last = self.network.depth + 1
        found = bound_between(self.matrix[:last, :last]) - torch.eye(last, dtype=torch.float64)
        return up_product(found, 1 / self._radii)

    def tails(self, target: Target) -> Tensor:
        """(n+1, …): constants from the output of every nonlinearity to the functionals, in the form's coordinates."""
        last = self.network.depth + 1
        rows = self.output_norms(target)
        resolvent = bound_between(self.matrix[:last, :last])
        if not target.transforms_last:  # rows start at φ itself, whose S is its Lipschitz constant
            constants = torch.tensor([1.0, *(max(r, _SMALLEST_RADIUS) for r in self._lipschitz)], dtype=torch.float64)
            own = rows / constants.reshape(-1, *(1,) * (rows.dim() - 1))
            onward = torch.einsum("li,l...->i...", self.between(), rows)
            return (own + onward) * (1 + gamma(4 * (last + 2)))
        found = torch.einsum("li,l...->i...", resolvent, rows) * (1 + gamma(last + 2))
        return up_product(found, (1 / self._radii).reshape(-1, *(1,) * (rows.dim() - 1)))

    @property
    def _radii(self) -> Tensor:
        return torch.tensor(self.radii, dtype=torch.float64)

    @property
    def _lipschitz(self) -> list[float]:
        return [float(site.slope.lipschitz()) for site in self.base.sites[1:-1] if site.slope is not None]


def _bound_rows(network: Network, target: Target, errors: ProductErrors) -> Tensor:
    """Norms of the functionals of B_{n+1,i} for all sites, from the rows of the output, with rounding allowances."""
    classes, last = network.classes, network.depth + 1
    seed = torch.eye(classes, dtype=torch.float64, device=network.device)
    pulled = network.pull(last, seed)
    errors = errors.copy()
    results: list[Tensor] = [torch.empty(0)] * last
    for i in reversed(range(last)):
        rows, pulled[i] = pulled[i], None
        if rows is None:
            results[i] = torch.zeros(target.shape(classes), dtype=torch.float64)
            continue
        error = errors.error((last, i))
        results[i] = target.bound_row_norms(flat_rows(rows), error).cpu()
        errors.know((last, i), float(row_norms(rows).square().sum().sqrt()) * (1 + 1e-9) + sqrt(classes) * error)
    return torch.stack(results)


@torch.no_grad()
def make_form(
    method: str,
    base: Network,
    last: int,
    options: NormOptions,
    progress: Progress,
    scales: Mapping[str, Tensor] | None = None,
) -> Form:
    """A float64 network, loop-transformed unless the method is "naive", with norms up to site `last`.

    `scales` are diagonals by the names of their sites.
    """
    lines = naive_lines(base) if method == "naive" else liplt_lines(base, up=True)
    names = base.site_names()
    diagonals = {}
    for site, name in enumerate(names):
        if scales is not None and name in scales:
            diagonals[site] = scales[name].double()
    radii = [1.0]
    for site in range(1, base.depth + 1):
        centre, radius = lines[site]
        value = max(_value(radius), _SMALLEST_RADIUS)
        # The diagonals before and after a site are rounded, so that their product is not quite 1.
        value = value * (1 + gamma(6)) if site in diagonals else value
        lines[site] = centre, value
        radii.append(value)
    network = _rescaled(loop_transform(base, lines), diagonals)
    return Form(method, network, base, bound_norms(network, last, options, progress), radii, diagonals)


def _value(line: float | Live) -> float:
    return line if isinstance(line, float) else float(line())


def _rescaled(network: Network, diagonals: Mapping[int, Tensor]) -> Network:
    return rescale(network, {site: partial(_same, diagonal) for site, diagonal in diagonals.items()})


def _same(value: Tensor) -> Tensor:
    return value


@dataclass
class Prefixes:
    """The smallest constants of the maps from the input to each nonlinearity, by name, and the methods they are due to.

    `forms` holds them in the coordinates of each form.
    """

    known: dict[str, float] = field(default_factory=dict)
    winners: dict[str, str] = field(default_factory=dict)
    forms: list[Tensor] = field(default_factory=list)


def smallest_prefixes(forms: Sequence[Form]) -> Prefixes:
    """Let the forms take turns until none improves a constant any more."""
    result = Prefixes()
    for _ in range(_ROUNDS):
        improved = False
        for form in forms:
            constants = form.prefix(result.known).tolist()
            for site, name in enumerate(form.names[1:], start=1):
                value = constants[site] * form.largest(site) * (1 + gamma(4))
                if value < result.known.get(name, inf) * (1 - 1e-12):
                    result.known[name], result.winners[name] = value, form.method
                    improved = True
        if not improved:
            break
    result.forms = [form.prefix(result.known) for form in forms]
    return result
