"""`lipcert.bound`: guaranteed constants by the recursion over guaranteed norms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from lipcert.bounds.bound import Bound, Facts
from lipcert.bounds.fingerprint import check_finite, fingerprint
from lipcert.bounds.forms import Form, form, found_scales, has_promises, neurons, smallest_prefixes
from lipcert.bounds.lipsdp import lipsdp_constants
from lipcert.bounds.refine import refinable, refine
from lipcert.bounds.scales import FitOptions
from lipcert.bounds.shift import shifted_form
from lipcert.bounds.targets import TARGETS, class_norms, pair_norms
from lipcert.errors import check_choice
from lipcert.network.normal_form import Network
from lipcert.network.trace import exact_copy, trace
from lipcert.norms.certified import NormOptions, Progress, no_progress
from lipcert.norms.estimate import flat_rows, row_norms
from lipcert.norms.rounding import UNDERFLOW, ProductErrors, gamma

METHODS = ("naive", "liplt", "rescaled", "shifted", "lt-sdp", "lipsdp", "best")
_FORMS = {"naive": ("naive",), "liplt": ("liplt",), "rescaled": ("liplt", "rescaled"), "shifted": ("liplt", "shifted"),
          "lt-sdp": ("liplt", "lt-sdp"), "lipsdp": ("liplt",),
          "best": ("liplt", "naive", "rescaled", "shifted")}  # fmt: skip
_MOST_FORMS = len(_FORMS["best"]) + 2
"""Every form has this part of the failure probability, so that its norms are the same in every method."""
_SMALL = 300
"""The largest number of neurons for which "best" solves semidefinite programs too."""
_DENSE = 1024
"""The largest number of neurons for which "best" refines terms by LT-SDP."""


def bound(
    model: nn.Module,
    input_shape: tuple[int, ...],
    method: str = "liplt",
    target: str = "pairwise",
    *,
    options: NormOptions | None = None,
    fit: FitOptions | None = None,
    progress: Progress = no_progress,
) -> Bound:
    """Guaranteed upper bounds on the l2 Lipschitz constants of a model in eval mode.

    Norms are proved where the smaller side of a map is at most `options.dense_limit`, and hold with the stated
    probability elsewhere. Rounding is accounted for everywhere.

    Args:
        model: any model that `lipcert.trace` accepts.
        input_shape: shape of one input, without the batch axis.
        method: "naive", "liplt", "rescaled" (LipLT in better coordinates), "shifted" (and better centres), "lt-sdp"
            (where matrices fit into memory), "lipsdp" (small networks), or "best", which combines all of them.
        target: "network", "per-class", "last-layer" or "pairwise".
        options: how the norms are bounded.
        fit: how the coordinates of "rescaled", "shifted" and "best" are found.
        progress: called with what is being done and the fraction done.
    """
    return bound_targets(model, input_shape, method, (target,), options=options, fit=fit, progress=progress)[target]


def stored_bound(
    model: nn.Module,
    input_shape: tuple[int, ...],
    path: str | Path,
    progress: Progress = no_progress,
    method: str = "liplt",
    fit: FitOptions | None = None,
    earlier: Bound | None = None,
) -> Bound:
    """The bound that was saved at `path`, or else the earlier one, if it belongs to the model; otherwise a new one.

    The scales of the earlier one are where those of a new one begin, unless `fit` says otherwise. What is found is
    saved at `path`.
    """
    wanted = (method, "pairwise", tuple(input_shape))
    known = [known for known in (Bound.find(path), earlier) if known is not None]
    same = [k for k in known if (k.method, k.target, k.facts.input_shape) == wanted and k.belongs_to(model)]
    fit = fit or FitOptions(start=earlier.scales if earlier is not None else None)
    found = same[0] if same else bound(model, input_shape, method, fit=fit, progress=progress)
    found.save(path)
    return found


@torch.inference_mode(False)
def bound_targets(
    model: nn.Module,
    input_shape: tuple[int, ...],
    method: str,
    targets: Sequence[str],
    *,
    options: NormOptions | None = None,
    fit: FitOptions | None = None,
    progress: Progress = no_progress,
) -> dict[str, Bound]:
    """`bound` for several targets, which share the norms; each bound's time is that of all of them."""
    check_choice("method", method, METHODS)
    for target in targets:
        check_choice("target", target, TARGETS)
    began = perf_counter()
    mark = fingerprint(model, trace(model, input_shape))
    check_finite(model)
    exact = exact_copy(model)
    network = trace(exact, input_shape)
    if set(targets) != {"network"}:
        _ = network.classes
    last = network.depth + ("network" in targets)
    options = options or NormOptions()
    allowed = options.failure_probability
    options = replace(options, failure_probability=allowed / _MOST_FORMS)
    shared = [form(name, network, last, options, progress) for name in _FORMS[method] if name in ("naive", "liplt")]
    half = replace(options, memory=options.memory // 2)  # "best" has two refined forms at a time
    refines = method == "best" and neurons(network) <= min(_DENSE, options.dense_limit) and refinable(shared[0], half)
    if method == "lt-sdp" or refines:
        shared.append(refine(shared[0], options, progress=progress))
    if method == "best" and has_promises(model):
        promised = trace(exact, input_shape, view="certified")
        reach = promised.depth + ("network" in targets)
        shared += [form(name, promised, reach, options, progress) for name in ("liplt", "naive")]
    bounds = {}
    for target in targets:
        forms, scales = list(shared), {}
        if "rescaled" in _FORMS[method]:
            scales = found_scales(model, input_shape, target, fit or FitOptions(), progress)
            forms.append(form("rescaled", network, last, options, progress, scales))
            if refines:
                forms.append(refine(forms[-1], options, progress=progress))
        if "shifted" in _FORMS[method]:
            forms.append(shifted_form(model, network, last, target, fit or FitOptions(), options, progress))
        others = {}
        if method == "lipsdp" or (method == "best" and target != "last-layer" and neurons(network) <= _SMALL):
            others["lipsdp"] = lipsdp_constants(network, target, progress=progress)
        numbers = _numbers(forms, target, others, progress)
        norms = {id(f.norms): f.norms for f in forms}.values()
        probability = allowed if any(n.randomised for n in norms) else 0.0
        facts = Facts(
            method,
            target,
            f"holds with probability ≥ 1 − {probability:g}" if probability else "deterministic",
            probability,
            max(n.inflation for n in norms),
            0.0,
            tuple(input_shape),
            numbers.sites,
            mark,
            _version(),
            numbers.winners,
        )
        bounds[target] = Bound(facts, numbers.tails, numbers.between, numbers.shares, scales)
    seconds = perf_counter() - began
    return {t: replace(b, facts=replace(b.facts, seconds=seconds)) for t, b in bounds.items()}


def promised_constants(
    model: nn.Module, input_shape: tuple[int, ...], targets: Sequence[str], progress: Progress = no_progress
) -> dict[str, Tensor]:
    """Guaranteed values that rest on what layers promise by construction, proved for their present weights.

    Empty if the model has no such layers.
    """
    if not has_promises(model):
        return {}
    network = trace(exact_copy(model), input_shape, view="certified")
    last = network.depth + ("network" in targets)
    options = NormOptions(failure_probability=NormOptions().failure_probability / 2)
    forms = [form(name, network, last, options, progress) for name in ("liplt", "naive")]
    return {target: _numbers(forms, target, {}, progress).tails[0] for target in targets}


@dataclass(frozen=True)
class _Numbers:
    tails: Tensor
    between: Tensor
    shares: Tensor
    sites: tuple[str, ...]
    winners: dict[str, str]


@torch.no_grad()
def _numbers(forms: Sequence[Form], target: str, others: Mapping[str, Tensor], progress: Progress) -> _Numbers:
    """The smallest values of all forms and other bounds; constants between sites are those of the first form."""
    prefixes = smallest_prefixes(forms)
    candidates: dict[str, Tensor] = {}
    terms: dict[str, tuple[Tensor, Sequence[str]]] = {}
    for count, (one, m) in enumerate(zip(forms, prefixes.forms, strict=True)):
        rows, weighted = _rows(one, target)
        label = f"{one.method} {count}"
        shares = weighted.shares(target, rows, m, partial(progress, f"rows {count + 1}/{len(forms)}"))
        candidates[label] = shares.sum(0) * (1 + gamma(4 * (len(shares) + 2)))
        terms[label] = shares, one.names
        if count == 0:
            tails, between = _tails(rows, one.between(), weighted.radii), one.between()
    candidates |= others
    stacked = torch.stack(list(candidates.values()))
    value, winner = stacked.min(0)
    means = {label: float(_mean(values[None], target)) for label, values in candidates.items()}
    shares, sites = terms[min(terms, key=means.__getitem__)]
    shares = _mean(shares, target)
    shares = shares * (float(_mean(value[None], target)) / max(float(shares.sum()), UNDERFLOW))
    tails[0] = torch.minimum(tails[0], value)
    labels = list(candidates)
    counted = Counter(labels[k].rsplit(maxsplit=1)[0] for k in _entries(winner))
    chosen = {f"{target} ({n} of {counted.total()})" if len(counted) > 1 else target: w for w, n in counted.items()}
    winners = {**prefixes.winners, **chosen} if len(candidates) > 1 else {}
    return _Numbers(tails, between, shares, tuple(sites), winners)


def _entries(winner: Tensor) -> list[int]:
    """Of every class, or of every pair of different classes."""
    if winner.dim() == 2:
        winner = winner[torch.ones_like(winner).triu(1).bool()]
    return [int(k) for k in winner.reshape(-1)]


def _rows(form: Form, target: str) -> tuple[Tensor, Form]:
    """Norms of the rows of B_{n+1,i} for a target, and the form with the radii that belong to them."""
    if target == "network":
        last = form.network.depth + 1
        values = [form.norms.bounds.get((last, i), 0.0) for i in range(last)]
        return torch.tensor(values, dtype=torch.float64), form
    if target == "last-layer":  # no loop transformation across the last layer
        slopes = [float(slope) for _, slope in form.network.lipschitz_sectors()]
        radii = [slope * (1 + gamma(6)) for slope in slopes]
        return _row_norms(form.network, [0.0] * len(slopes), target, form.norms.errors), replace(form, radii=radii)
    return _row_norms(form.network, form.centres, target, form.norms.errors), form


def _tails(rows: Tensor, between: Tensor, radii: Sequence[float]) -> Tensor:
    """T_i = rows_i + Σ_{l>i} rows_l s_l M_li, rounded up: constants from each site's output to the target."""
    weights = torch.tensor(radii, dtype=torch.float64)[:, None] * between + torch.eye(len(radii), dtype=torch.float64)
    tails = torch.einsum("li,l...->i...", weights, rows)
    return tails * (1 + gamma(4 * (len(radii) + 2)))


def _row_norms(network: Network, centres: Sequence[float], target: str, errors: ProductErrors) -> Tensor:
    """(n+1, K) or (n+1, K, K): norms of the rows of B_{n+1,i}, or of their differences, with rounding allowances."""
    count = network.classes
    seed = torch.eye(count, dtype=torch.float64, device=network.device)
    pulled = network.pullback(seed, centres)
    last = network.depth + 1
    exact = ProductErrors(network, list(centres))
    exact.known = dict(errors.known) if list(centres) == errors.centres else {}
    results: list[Tensor] = [torch.empty(0)] * last
    for i in reversed(range(last)):
        rows = pulled[i]
        pulled[i] = None
        if rows is None:
            results[i] = torch.zeros((count,) if target == "per-class" else (count, count), dtype=torch.float64)
            continue
        error = exact.error((last, i))
        results[i] = (_upper_class_norms if target == "per-class" else _upper_pair_norms)(flat_rows(rows), error).cpu()
        exact.know((last, i), float(row_norms(rows).square().sum().sqrt()) * (1 + 1e-9) + sqrt(count) * error)
    return torch.stack(results)


def _upper_class_norms(rows: Tensor, error: float) -> Tensor:
    return class_norms(rows) * (1 + gamma(rows.shape[1] + 4)) + error + UNDERFLOW


def _upper_pair_norms(rows: Tensor, error: float) -> Tensor:
    """Distances of the rows from above: their squares come from a Gram matrix with errors of γ_n·(‖r_a‖² + ‖r_b‖²)."""
    squares = class_norms(rows - rows.mean(0, keepdim=True)).square()
    scale = squares[:, None] + squares[None, :]
    roundoff = gamma(rows.shape[1] + 8)
    distances = pair_norms(rows).square()
    # Distances below 1e-6 of the scale were formed from the difference itself, the others after centring; near that
    # threshold the larger allowance holds for both.
    from_difference = distances <= 0.99e-6 * scale
    allowance = torch.where(from_difference, distances, 4 * scale) * roundoff
    centring = torch.where(from_difference, 0.0, 8 * gamma(1) * float(rows.mean(0).norm()))
    upper: Tensor = (distances + allowance).sqrt() * (1 + gamma(8)) + 2 * error + centring + UNDERFLOW
    return upper.fill_diagonal_(0.0)


def _mean(rows: Tensor, target: str) -> Tensor:
    """(n+1,): the mean over classes, or over pairs of different classes."""
    if target == "network":
        return rows
    flat = rows.flatten(1).sum(1)
    count = rows.shape[1]
    return flat / (count if target == "per-class" else max(count * (count - 1), 1))


def _version() -> str:
    from lipcert import __version__

    return f"lipcert {__version__}, torch {torch.__version__}"
