"""Several ways to write one network, each with guaranteed norms, and the recursion that takes the best of all.

Any valid prefix constant m_i may enter the recursion of any form. So a form computes m_j = Σ_i ‖B_ji‖ s_i m_i from the
smallest constants known, hands them on, and the forms take turns until nothing improves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

import torch
from torch import Tensor, nn

from lipcert.bounds.bound import site_names
from lipcert.bounds.estimator import Estimator
from lipcert.bounds.scales import FitOptions, fit_scales
from lipcert.network.coordinates import rescale
from lipcert.network.normal_form import Network
from lipcert.network.rules import find_rule
from lipcert.norms.certified import CertifiedNorms, NormOptions, Progress, bound_norms
from lipcert.norms.rounding import gamma

_ROUNDS = 8


@dataclass(frozen=True, eq=False)
class Form:
    """A network whose sites 0..n have the centres c_i and radii s_i, with bounds on the norms of its maps.

    `largest` and `smallest` bound the entries of the diagonal D_i of each site, if the form is in other coordinates:
    its constants are those of D_i⁻¹z_i.
    """

    method: str
    network: Network
    centres: Sequence[float]
    radii: Sequence[float]
    norms: CertifiedNorms
    largest: Sequence[float]
    smallest: Sequence[float]

    @property
    def names(self) -> Sequence[str]:
        return site_names(self.network)

    def term(self, j: int, i: int, m: Sequence[float]) -> float:
        """A constant of x ↦ B_ji ψ_i(z_i), from the constants m_0..m_i."""
        return self.norms.bounds.get((j, i), 0.0) * self.radii[i] * m[i]

    def prefix(self, known: Mapping[str, float]) -> list[float]:
        """m_0..m_n in the coordinates of the form, none above what the known constants give, rounded up."""
        m = [1.0]
        for j, name in enumerate(self.names[1:], start=1):
            own = sum(self.term(j, i, m) for i in range(j)) * (1 + gamma(4 * j + 4))
            m.append(min(own, known.get(name, inf) / self.smallest[j] * (1 + gamma(4))))
        return m

    def shares(self, target: str, rows: Tensor, m: Sequence[float], report: Callable[[float], None]) -> Tensor:
        """(n+1, …): what every site adds to each value, from the norms of the rows of B_{n+1,i}."""
        report(1.0)
        weights = torch.tensor([s * constant for s, constant in zip(self.radii, m, strict=True)], dtype=torch.float64)
        return rows * weights.reshape(-1, *(1,) * (rows.dim() - 1)) * (1 + gamma(4))

    def between(self) -> Tensor:
        """M_ki = ‖B_ki‖ + Σ_{i<l<k} ‖B_kl‖ s_l M_li, rounded up: from each site's output to each site's input."""
        depth = self.network.depth
        between = torch.zeros(depth + 1, depth + 1, dtype=torch.float64)
        for i in range(depth + 1):
            for k in range(i + 1, depth + 1):
                total = self.norms.bounds.get((k, i), 0.0)
                for middle in range(i + 1, k):
                    total += self.norms.bounds.get((k, middle), 0.0) * self.radii[middle] * float(between[middle, i])
                between[k, i] = total
        return between * (1 + gamma(4 * (depth + 2) ** 2))


@dataclass
class Prefixes:
    """The smallest constants of the maps from the input to each nonlinearity, by name, and the methods they are due to.

    `forms` holds them in the coordinates of each form.
    """

    known: dict[str, float] = field(default_factory=dict)
    winners: dict[str, str] = field(default_factory=dict)
    forms: list[list[float]] = field(default_factory=list)


def smallest_prefixes(forms: Sequence[Form]) -> Prefixes:
    """Let the forms take turns until none improves a constant any more."""
    result = Prefixes()
    for _ in range(_ROUNDS):
        improved = False
        for form in forms:
            m = form.prefix(result.known)
            for j, name in enumerate(form.names[1:], start=1):
                value = m[j] * form.largest[j] * (1 + gamma(4))
                if value < result.known.get(name, inf) * (1 - 1e-12):
                    result.known[name], result.winners[name] = value, form.method
                    improved = True
        if not improved:
            break
    result.forms = [form.prefix(result.known) for form in forms]
    return result


@torch.no_grad()
def form(
    method: str,
    network: Network,
    last: int,
    options: NormOptions | None,
    progress: Progress,
    scales: Mapping[str, Tensor] | None = None,
) -> Form:
    """A float64 network by one method, with norms up to site `last`; "rescaled" in the coordinates of the scales."""
    largest, smallest = [1.0] * (network.depth + 1), [1.0] * (network.depth + 1)
    if scales is not None:
        diagonals = {k: scales[name].double() for k, name in enumerate(site_names(network)) if name in scales}
        for k, diagonal in diagonals.items():
            largest[k], smallest[k] = float(diagonal.max()), float(diagonal.min())
        network = rescale(network, {k: partial(_same, diagonal) for k, diagonal in diagonals.items()})
    naive = method == "naive"
    sectors = [(float(c), float(s)) for c, s in (network.lipschitz_sectors() if naive else network.sectors())]
    centres = [c for c, _ in sectors]
    # c and s are rounded, and so are the diagonals before and after a site, whose product is not quite 1.
    radii = [s + gamma(6) * (abs(c) + s) if c or scales is not None else s for c, s in sectors]
    norms = bound_norms(network, centres, last, options, progress)
    return Form(method, network, centres, radii, norms, largest, smallest)


@torch.enable_grad()
def found_scales(
    model: nn.Module, input_shape: tuple[int, ...], target: str, options: FitOptions, progress: Progress
) -> dict[str, Tensor]:
    """Diagonals by the names of their sites, fitted to the weights of a copy of the model."""
    copied = copy.deepcopy(model).requires_grad_(False)
    estimator = Estimator(copied, input_shape, "rescaled", target, per_neuron=options.per_neuron)
    assert estimator.scales is not None
    if options.start is not None:
        estimator.scales.begin_with(options.start)
    fit_scales(estimator, options, lambda fraction: progress("coordinates", fraction))
    return estimator.scales.diagonals()


def neurons(network: Network) -> int:
    """The number of entries of all nonlinearities."""
    return sum(network.out_size(k) for k in range(1, network.depth + 1))


def has_promises(model: nn.Module) -> bool:
    """Whether a layer is Lipschitz by construction, so that it appears otherwise in the view "certified"."""
    return any(find_rule(module, "certified") is not find_rule(module) for module in model.modules())


def _same(value: Tensor) -> Tensor:
    return value
