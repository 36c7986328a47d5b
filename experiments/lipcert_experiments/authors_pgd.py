"""The PGD that the authors evaluate with, as their published code does it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipcert.attacks import PAPER_STEP, Attacked
from lipcert.errors import OptionError, TrainingModeError


def authors_pgd(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    epsilon: float,
    *,
    steps: int = 100,
    step: float = PAPER_STEP,
    pixels: tuple[float, float] = (0.0, 1.0),
) -> Attacked:
    """Steps of `step`·sign(gradient), after each of which the change is scaled to the length ε and pixels are clipped.

    The gradient is that of −log(1 + softmax_y). There is one run, from the input itself, and only its last point
    counts. Where the gradient vanishes the input stays as it is.
    """
    if model.training:
        raise TrainingModeError(
            "the model is in training mode; call model.eval() before attacking it"
        )
    if steps < 1 or epsilon <= 0 or step <= 0:
        raise OptionError("PGD needs epsilon > 0, step > 0 and steps ≥ 1")
    point = x.clone()
    for _ in range(steps):
        point.requires_grad_()
        share = model(point).softmax(1).gather(1, labels[:, None])
        (gradient,) = torch.autograd.grad(-torch.log1p(share).sum(), point)
        change = point.detach() + step * gradient.sign() - x
        length = change.flatten(1).norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny)
        point = (
            x + change * (epsilon / length).reshape(-1, *[1] * (x.dim() - 1))
        ).clamp(*pixels)
    with torch.no_grad():
        changed = model(point).argmax(1) != labels
    distance = torch.linalg.vector_norm((point.double() - x.double()).flatten(1), dim=1)
    shape = (-1, *[1] * (x.dim() - 1))
    return Attacked(
        torch.where(changed.reshape(shape), point, x),
        torch.where(changed, distance, torch.inf),
    )
