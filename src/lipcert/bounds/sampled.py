"""The floor under all bounds: slopes that a network really has somewhere.

For almost every x, ‖J(x)‖ is at most the Lipschitz constant. For piecewise linear
networks it has no useful gradient, but the mean slope between x − rd/2 and x + rd/2 has
one. So segments climb while they shrink: d turns to the gradients at the ends, x
follows their difference, and J is taken at points on the way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from math import prod, sqrt

import torch
from torch import Tensor, nn

from lipcert.bounds.fingerprint import check_finite
from lipcert.bounds.targets import Target, find_target
from lipcert.errors import OptionError
from lipcert.network.build import trace
from lipcert.network.normal_form import Network
from lipcert.norms.rows import per_row
from lipcert.progress import Progress, no_progress

_SCALES = (-1.0, 2.0)  # powers of ten of the entries of the first points
_SHRINK = 1e-2  # of a segment, from the first step to the last
_STRIDE = 0.5  # of x, in lengths of the segment
_ROUNDS = 4
"""How often Jacobians are taken on the way, and at the start besides."""
# Of Jacobians formed at a time.
_ENTRIES = 1 << 24


@torch.inference_mode(False)
def estimate_sampled(
    model: nn.Module,
    input_shape: tuple[int, ...],
    target: str = "network",
    *,
    samples: int = 64,
    steps: int = 100,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Tensor:
    """The steepest slopes found in a model in eval mode: below its l2 Lipschitz constants, but for rounding.

    Args:
        model: any model that `lipcert.trace` accepts. It is climbed in its own precision and judged in float64.
        input_shape: shape of one input, without the batch axis.
        target: "network" gives (), "per-class" (K,), "last-layer" and "pairwise" both (K, K), of logit differences.
        samples: random inputs, from all over the input space. steps: of the ascent from each, 0 for none. seed: of all.
        progress: called with what is being done and the fraction done.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> below = lipcert.estimate_sampled(model, (4,), "network", samples=8, steps=5)
        >>> bool(below <= lipcert.bound(model, (4,), target="network").value)
        True
    """
    wanted = find_target(target)
    if samples < 1 or steps < 0:
        raise OptionError(
            f"samples is {samples} and steps is {steps}, expected samples "
            "≥ 1 and steps ≥ 0"
        )
    network = trace(model, input_shape)
    check_finite(network.program)
    wanted.check(network)
    generator = torch.Generator().manual_seed(seed)
    return _steepest(model, network, wanted, samples, steps, generator, progress)


def _steepest(
    model: nn.Module,
    network: Network,
    wanted: Target,
    samples: int,
    steps: int,
    generator: torch.Generator,
    progress: Progress,
) -> Tensor:
    """The largest norms of the functionals of all Jacobians on the way, batch by batch."""
    # Copies: neither gradients nor a conversion to float64 must reach the caller's
    # model.
    climber = copy.deepcopy(model).requires_grad_(False)
    exact = copy.deepcopy(climber).double()
    steepest: list[Tensor] = []
    # A Jacobian has outputs × inputs entries.
    batch = max(1, _ENTRIES // (prod(network.output_shape) * prod(network.input_shape)))
    for first in range(0, samples, batch):
        size = min(batch, samples - first)
        x, radius = _first_points(network, size, generator)
        rows = _rows(network, wanted, first, size)
        for done, points in _climb(climber, x, radius, rows, steps, generator):
            for jacobian in _jacobians(exact, points.double()):
                steepest.append(wanted.row_norms(jacobian))
            # One maximum is kept instead of all norms.
            steepest = [torch.stack(steepest).amax(0)]
            progress("slopes", (first + size * done) / samples)
    return steepest[0].cpu()


def _first_points(
    network: Network, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Gaussian points of many magnitudes, and the lengths of their segments: the typical distance between two."""
    (low, high), shape = _SCALES, network.input_shape
    # The steepest region may be near or far: magnitudes are uniform in the exponent.
    scale = 10.0 ** (
        low
        + (high - low)
        * torch.rand(count, *(1,) * len(shape), generator=generator).double()
    )
    x = scale * torch.randn(count, *shape, generator=generator).double()
    # E|x − x′|² = 2n·scale² for two Gaussian points.
    radius = scale * sqrt(2 * prod(shape))
    return x.to(network.device, network.dtype), radius.to(network.device, network.dtype)


def _rows(network: Network, target: Target, first: int, count: int) -> Tensor | None:
    """(count, K): the weights of the logits that each point is to make steep; the points take turns."""
    if target.whole_output:
        return None
    # Points 0, 1, 2, … climb for functionals 0, 1, …, F − 1, 0, 1, …
    weights = [weight for _, weight in target.functionals(network.classes)]
    if not weights:  # a single class has no pairs
        weights = [torch.ones(1, network.classes, dtype=torch.float64)]
    return torch.cat([weights[k % len(weights)] for k in range(first, first + count)])


def _climb(
    model: nn.Module,
    x: Tensor,
    radius: Tensor,
    rows: Tensor | None,
    steps: int,
    generator: torch.Generator,
) -> Iterator[tuple[float, Tensor]]:
    """The fraction done and points, at first and from time to time."""
    yield 0.0, x
    direction = _unit(torch.randn(x.shape, generator=generator).to(x))
    stops = {round(steps * (k + 1) / _ROUNDS) for k in range(_ROUNDS)}
    for step in range(1, steps + 1):
        half = 0.5 * radius * _SHRINK ** ((step - 1) / steps) * direction
        # (2B, …): one pass for both ends of all segments.
        ends = torch.cat([x + half, x - half]).requires_grad_()
        with torch.enable_grad():
            upper, lower = model(ends).flatten(1).chunk(2)
            rise = upper - lower
            # The slope of the whole map is |rise|, whose half square has the same
            # direction of ascent.
            if rows is None:
                slope = rise.square().sum() / 2
            else:
                slope = (rise * rows.to(rise)).sum()
            (gradient,) = torch.autograd.grad(slope, ends)
        up, down = gradient.chunk(2)
        direction = _unit(
            up - down
        )  # the chunks have opposite signs, so this is the sum of the two gradients
        x = x + _STRIDE * 2 * half.flatten(1).norm(dim=1).reshape(radius.shape) * _unit(
            up + down
        )
        if step in stops:
            yield step / steps, torch.cat([x, ends.detach()[: len(x)]])


def _unit(x: Tensor) -> Tensor:
    """Every entry of the batch divided by its norm; zero where that is zero."""
    norm = per_row(x.flatten(1).norm(dim=1), x)
    return torch.where(norm > 0, x / norm, 0.0)


def _jacobians(model: nn.Module, x: Tensor) -> Tensor:
    """(points, outputs, inputs)."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        outputs = model(x).flatten(1)
        # Rows of a batch are independent, so the gradient of a sum over the batch is
        # that of every point.
        rows = []
        for output in outputs.unbind(1):
            (gradient,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
            rows.append(gradient.flatten(1))
    return torch.stack(rows, 1)
