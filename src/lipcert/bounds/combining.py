"""The smallest of several bounds on the same constants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lipcert.bounds.forms import Form
from lipcert.bounds.prefixes import smallest_prefixes
from lipcert.bounds.targets import Target
from lipcert.progress import Progress, Report
from lipcert.rounding import UNDERFLOW, gamma


@dataclass(frozen=True)
class Combined:
    """The numbers of a bound, see `Bound`; what gave them, and by how much randomised norms were enlarged."""

    tails: Tensor
    between: Tensor
    shares: Tensor
    sites: tuple[str, ...]
    winners: dict[str, str]
    inflation: float


@torch.no_grad()
def combined(
    forms: Sequence[Form],
    target: Target,
    others: Mapping[str, Tensor],
    progress: Progress,
) -> Combined:
    """The smallest values of all forms and other bounds; constants between sites are those of the first form.

    The shares are those of the form with the smallest mean, among those with the sites
    of the first one.
    """
    prefixes = smallest_prefixes(forms)
    found = []
    for count, (form, m) in enumerate(zip(forms, prefixes.forms, strict=True)):
        report = partial(progress, f"rows {count + 1}/{len(forms)}")
        found.append(_value_of_form(form, target, m, report))
    # Forms with promised layers have other sites, which `facts.sites` and the tails
    # could not name.
    program = forms[0].network.program
    named = [one for one in found if one.form.network.program is program]
    best = min(named, key=lambda one: one.mean)
    methods = [*(form.method for form in forms), *others]
    values = [*(one.value for one in found), *others.values()]
    # Every one of them is an upper bound, so the smallest is, functional by functional.
    value, winner = torch.stack(values).min(0)
    shares = torch.stack([target.mean(share) for share in best.shares])
    # Shares explain the value, which may be smaller than their sum; scaled, they sum to
    # it.
    shares = shares * (float(target.mean(value)) / max(float(shares.sum()), UNDERFLOW))
    tails = forms[0].tails(target)
    # Site 0 is the input, so its tail and the value bound the same map.
    tails[0] = torch.minimum(tails[0], value)
    winners: dict[str, str] = {}
    if len(methods) > 1:
        winners = prefixes.winners | _winning_methods(methods, winner, target)
    inflation = max(0.0, *(one.inflation for one in found))
    names = tuple(best.form.names)
    return Combined(tails, forms[0].between(), shares, names, winners, inflation)


@dataclass(frozen=True)
class _FormValue:
    """What one form gives; `mean` is that of the sums of its shares."""

    form: Form
    shares: Tensor
    value: Tensor
    mean: float
    inflation: float


def _value_of_form(form: Form, target: Target, m: Tensor, report: Report) -> _FormValue:
    shares = form.shares(target, m, report)
    # L_ab = Σ_i m_i ‖r_a^i − r_b^i‖ of docs/method.md, for all pairs at once: S_i is
    # part of the rows in a form.
    total = shares.sum(0)
    # The terms are rounded up already, their sum is not.
    value = total * (1 + gamma(4 * (len(shares) + 2)))
    mean, inflation = float(target.mean(total)), form.inflation(target, shares, m)
    return _FormValue(form, shares, value, mean, inflation)


def _winning_methods(
    names: Sequence[str], winner: Tensor, target: Target
) -> dict[str, str]:
    """Which method gave the value, or, if there are several, how many of the functionals each of them won."""
    places = winner.reshape(-1)
    # (K, K): the pairs (a, b) and (b, a) are one functional, the diagonal is none.
    if winner.dim() == 2:
        places = winner[torch.ones_like(winner).triu(1).bool()]
    counted = Counter(names[int(place)] for place in places)
    if len(counted) == 1:
        return {target.name: next(iter(counted))}
    total = counted.total()
    return {f"{target.name} ({n} of {total})": name for name, n in counted.items()}
