"""`lipcert.bound`: guaranteed constants by the recursion over guaranteed norms."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from lipcert.bounds.bound import Bound, Facts, site_names
from lipcert.bounds.fingerprint import check_finite, fingerprint
from lipcert.bounds.targets import TARGETS, class_norms, pair_norms
from lipcert.errors import BoundError, check_choice
from lipcert.network.normal_form import Network
from lipcert.network.trace import trace
from lipcert.norms.certified import CertifiedNorms, NormOptions, Progress, bound_norms, no_progress
from lipcert.norms.estimate import flat_rows, row_norms
from lipcert.norms.rounding import UNDERFLOW, ProductErrors, gamma

METHODS = ("naive", "liplt")


def bound(
    model: nn.Module,
    input_shape: tuple[int, ...],
    method: str = "liplt",
    target: str = "pairwise",
    *,
    options: NormOptions | None = None,
    progress: Progress = no_progress,
) -> Bound:
    """Guaranteed upper bounds on the l2 Lipschitz constants of a model in eval mode.

    Norms are proved where the smaller side of a map is at most `options.dense_limit`, and hold with the stated
    probability elsewhere. Rounding is accounted for everywhere.

    Args:
        model: any model that `lipcert.trace` accepts.
        input_shape: shape of one input, without the batch axis.
        method: "naive" or "liplt".
        target: "network", "per-class", "last-layer" or "pairwise".
        options: how the norms are bounded.
        progress: called with what is being done and the fraction done.
    """
    return bound_targets(model, input_shape, method, (target,), options=options, progress=progress)[target]


def stored_bound(
    model: nn.Module, input_shape: tuple[int, ...], path: str | Path, progress: Progress = no_progress
) -> Bound:
    """The bound that was saved at `path`, if it belongs to the model; otherwise a new one, saved there."""
    try:
        found = Bound.load(path)
        found.check_belongs(model)
    except BoundError:
        found = bound(model, input_shape, progress=progress)
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
    progress: Progress = no_progress,
) -> dict[str, Bound]:
    """`bound` for several targets, which share the norms; each bound's time is that of all of them."""
    check_choice("method", method, METHODS)
    for target in targets:
        check_choice("target", target, TARGETS)
    began = perf_counter()
    mark = fingerprint(model, trace(model, input_shape))
    check_finite(model)
    network = trace(copy.deepcopy(model).double(), input_shape)
    if set(targets) != {"network"}:
        _ = network.classes
    with torch.no_grad():
        slopes = [float(slope) for _, slope in network.lipschitz_sectors()]
        sectors = (
            [(0.0, s) for s in slopes] if method == "naive" else [(float(c), float(s)) for c, s in network.sectors()]
        )
        centres = [c for c, _ in sectors]
        radii = [s + gamma(2) * (abs(c) + s) if c else s for c, s in sectors]  # c and s are rounded
        norms = bound_norms(network, centres, network.depth + ("network" in targets), options, progress)
        between = _between(norms, radii, network.depth)
        progress("rows", 0.0)
        results = {}
        for target in targets:
            if target == "network":
                last = network.depth + 1
                rows = torch.tensor([norms.bounds.get((last, i), 0.0) for i in range(last)], dtype=torch.float64)
            else:
                open_centres = [0.0] * len(slopes) if target == "last-layer" else centres
                rows = _row_norms(network, open_centres, target, norms.errors)
            results[target] = rows, slopes if target == "last-layer" else radii
        progress("rows", 1.0)
    seconds = perf_counter() - began
    proved = not norms.randomised
    bounds = {}
    for target, (rows, weights) in results.items():
        facts = Facts(
            method,
            target,
            "deterministic" if proved else f"holds with probability ≥ 1 − {norms.failure_probability:g}",
            norms.failure_probability,
            norms.inflation,
            seconds,
            tuple(input_shape),
            tuple(site_names(network)),
            mark,
            _version(),
        )
        prefix = torch.cat([torch.ones(1, dtype=torch.float64), between[1:, 0]])
        shares = torch.tensor(weights, dtype=torch.float64) * prefix * _mean(rows, target)
        bounds[target] = Bound(facts, _tails(rows, between, weights), between, shares)
    return bounds


def _between(norms: CertifiedNorms, radii: Sequence[float], depth: int) -> Tensor:
    """M_ki = ‖B_ki‖ + Σ_{i<l<k} ‖B_kl‖ s_l M_li, rounded up: constants from each site's output to each site's input."""
    between = torch.zeros(depth + 1, depth + 1, dtype=torch.float64)
    for i in range(depth + 1):
        for k in range(i + 1, depth + 1):
            total = norms.bounds.get((k, i), 0.0)
            for middle in range(i + 1, k):
                total += norms.bounds.get((k, middle), 0.0) * radii[middle] * float(between[middle, i])
            between[k, i] = total
    return between * (1 + gamma(4 * (depth + 2) ** 2))


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
