"""Attacks from foolbox: inputs nearby with another prediction."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.errors import OptionError, TrainingModeError, check_choice
from lipcert.network.states import fastest_layout

PAPER_STEP = 0.001
"""The size of the steps of PGD that the paper states."""


@dataclass(frozen=True, eq=False)
class Attacked:
    """What an attack found, one entry per input.

    adversarial: inputs with another prediction; the given inputs where none was found.
    distance: l2 distance to it in float64, infinite where none was found.
    """

    adversarial: Tensor
    distance: Tensor

    @classmethod
    def nothing(cls, x: Tensor) -> Attacked:
        """No input was found."""
        return cls(x, torch.full((len(x),), torch.inf, dtype=torch.float64))

    @property
    def success(self) -> Tensor:
        return torch.isfinite(self.distance)


def pgd(
    model: nn.Module,
    x: Tensor,
    classes: Tensor,
    epsilon: float,
    *,
    steps: int = 100,
    step: str = "relative",
    restarts: int = 2,
    pixels: tuple[float, float] = (0.0, 1.0),
) -> Attacked:
    """l2 projected gradient descent: looks for inputs within ε that the model does not assign to `classes`.

    step="relative" moves by ε/10 at first and restarts from random points; step="paper"
    makes constant steps of 0.001, the size that the paper states, from the input
    itself: 100 of them move it by 0.1 at most. What the paper's authors run is another
    attack, `lipcert_experiments.authors_pgd`.
    """
    from foolbox.attacks.projected_gradient_descent import (
        L2ProjectedGradientDescentAttack as L2PGD,
    )

    check_choice("step", step, ("relative", "paper"))
    if steps < 1 or restarts < 1 or epsilon <= 0:
        raise OptionError("PGD needs epsilon > 0, steps ≥ 1 and restarts ≥ 1")
    # From the input itself every restart would be the same.
    if step == "paper":
        attack = L2PGD(abs_stepsize=PAPER_STEP, steps=steps, random_start=False)
        return _run(attack, epsilon, model, x, classes, pixels, Attacked.nothing(x))
    best = Attacked.nothing(x)
    for restart in range(restarts):
        # At least 2ε/steps: few steps have to be able to cross the ball. Restarts begin
        # at random points.
        size = max(0.1, 2.0 / steps)
        attack = L2PGD(rel_stepsize=size, steps=steps, random_start=restart > 0)
        best = _run(attack, epsilon, model, x, classes, pixels, best)
    return best


def minimum_norm(
    model: nn.Module,
    x: Tensor,
    classes: Tensor,
    *,
    steps: int = 100,
    pixels: tuple[float, float] = (0.0, 1.0),
) -> Attacked:
    """DDN (Rony et al. 2019): looks for the closest input that the model does not assign to `classes`."""
    from foolbox.attacks.ddn import DDNAttack

    attack = DDNAttack(init_epsilon=1.0, steps=steps, gamma=0.05)
    return _run(attack, None, model, x, classes, pixels, Attacked.nothing(x))


class _Guide(nn.Module):
    """What shows an attack the way: a model with smaller logits, in the layout in which it is fastest.

    Logits are divided such that their typical margin is at most 10: softmax has no
    gradient at larger ones.
    """

    def __init__(
        self, model: nn.Module, x: Tensor, layout: torch.memory_format
    ) -> None:
        super().__init__()
        self.model, self.layout, self.scale = model, layout, 1.0
        with torch.no_grad():
            logits = self(x)
        self.finite = bool(logits.isfinite().all())
        # Of one logit both columns are the same, and the margin 0.
        margins = logits.topk(min(2, logits.shape[1]), dim=1).values
        margin = float((margins[:, 0] - margins[:, -1]).median())
        if 10 < margin < torch.inf:
            self.scale = margin / 10

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x.contiguous(memory_format=self.layout))
        return logits / self.scale


def _guide(model: nn.Module, x: Tensor) -> tuple[_Guide, Tensor]:
    """A copy of the model in float32, with convolutions laid out for speed, and the inputs it begins from.

    Convolutions in float64 are several times slower, and where the nearest boundary is
    does not depend on the last digits. What is found is judged by the model itself.
    """
    try:
        copy, start = deepcopy(model).float().requires_grad_(False), x.float()
        guide = _Guide(copy, start, fastest_layout(copy, tuple(x.shape[1:]))).eval()
        if guide.finite:
            return guide, start
    # A model that makes float64 tensors of its own cannot be had in float32; some
    # cannot be copied.
    except (RuntimeError, TypeError):
        pass
    return _Guide(model, x, torch.contiguous_format).eval(), x


def _run(
    attack: Callable[..., Any],
    epsilon: float | None,
    model: nn.Module,
    x: Tensor,
    classes: Tensor,
    pixels: tuple[float, float],
    best: Attacked,
) -> Attacked:
    """Run one attack where none has succeeded yet; success is judged by the model's own prediction."""
    from foolbox.models.pytorch import PyTorchModel

    if model.training:
        raise TrainingModeError(
            "the model is in training mode; call model.eval() before attacking it"
        )
    # Restarts go on with the inputs that are left; places of x from here on.
    left = (~best.success).nonzero().flatten()
    if len(left) == 0:
        return best
    guide, start = _guide(model, x[left])
    attacked_model = PyTorchModel(guide, bounds=pixels, device=x.device)
    _, clipped, _ = attack(attacked_model, start, classes[left], epsilons=epsilon)
    candidate: Tensor = clipped.detach().to(x.dtype)
    with torch.no_grad():
        # Not foolbox's own judgement, which is of tempered logits, and perhaps in
        # float32: dividing and rounding may merge two that nearly tie.
        changed = model(candidate).argmax(1) != classes[left]
    # In float64, to be compared with radii in float64.
    moved = (candidate.double() - x[left].double()).flatten(1)
    distance = torch.linalg.vector_norm(moved, dim=1)
    adversarial, distances = best.adversarial.clone(), best.distance.clone()
    adversarial[left[changed]] = candidate[changed]
    distances[left[changed]] = distance[changed]
    return Attacked(adversarial, distances)
