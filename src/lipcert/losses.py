"""Training losses: CRM, signed radius, GloRo, LMT and the standard ones, as functions of logits, labels and constants.

Every loss takes logits z (B, K) and labels y (B,); the robust ones also take constants L (K, K), where L_ij bounds the
Lipschitz constant of z_i − z_j. Row y of L is read, its diagonal is ignored. Gradients reach logits and constants.
Everything is computed in the wider dtype of logits and constants, at least float32. NaN logits give a NaN loss.

With r_yi = (z_y − z_i)/L_yi: a pair whose constant is zero can never be reached, so r_yi is the largest radius in use
(9e17 in float32, 6e152 in float64) with the sign of the margin, zero at a tie, and has no gradient. The same holds for
constants too small to divide by. With a single class there is no other one to reach, and the radius is that largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

import torch
from torch import Tensor
from torch.nn import functional as F

from lipcert.errors import DataError, NonFiniteError, OptionError, ShapeError, check_choice

BASES = ("cross-entropy", "soft-margin", "label-smoothing")
RADII = ("soft", "hard")


@dataclass(frozen=True)
class Loss:
    """A loss and its parts, all of shape (): `loss` = `base` + `robust`, with every weight already in.

    Differentiate `loss`; the parts are there to be logged and may be detached.
    """

    loss: Tensor
    base: Tensor
    robust: Tensor


def standard(
    logits: Tensor, labels: Tensor, *, base: str = "cross-entropy", margin_t: float = 1.0, smoothing: float = 0.1
) -> Loss:
    """Training for accuracy only: mean of the cross-entropy, of its smoothed form or of the negative soft logit margin.

    "soft-margin" is −γ_t^soft (eq: soft logit margin) with t = `margin_t`; "label-smoothing" spreads `smoothing` over
    all classes.
    """
    logits, labels = _checked(logits, labels)
    value = _base(logits, labels, base, margin_t, smoothing)
    return Loss(value, value, torch.zeros_like(value))


def crm(
    logits: Tensor,
    labels: Tensor,
    constants: Tensor,
    *,
    t: float,
    r0: float,
    weight: float,
    radius: str = "soft",
    base: str = "cross-entropy",
    margin_t: float = 1.0,
    smoothing: float = 0.1,
) -> Loss:
    """Certified radius maximisation (eq:regularize added h soft): base + weight · mean_b 1{z_y is the largest}·g.

    With radius "soft", g = −R_t^soft; with "hard", g = (1/t)·exp(−t·R). Both are 0 where the hard radius R exceeds r0
    (par:crmHyperparams). The mean is over the whole batch. `base`, `margin_t` and `smoothing` are those of `standard`.
    """
    check_choice("radius", radius, RADII)
    _check_positive(t=t)
    _check_not_negative(weight=weight)
    if not r0 >= 0:
        raise OptionError(f"r0 is {r0}, expected 0 or more, inf for no truncation")
    logits, labels, constants = _checked_with_constants(logits, labels, constants)
    first = _base(logits, labels, base, margin_t, smoothing)
    radii = _pair_radii(logits, labels, constants)
    hard = radii.amin(1)
    active = (hard > 0) & (hard <= r0)
    if radius == "soft":
        penalty = -_soft_minimum(radii, t)
    else:
        penalty = torch.exp(-t * torch.where(active, hard, torch.zeros_like(hard))) / t
    robust = weight * torch.where(active, penalty, torch.zeros_like(penalty)).mean()
    return Loss(first + robust, first, robust)


def signed_radius(logits: Tensor, labels: Tensor, constants: Tensor, *, t: float, r0: float) -> Loss:
    """Cross-entropy over the signed radii: mean_b log(1 + Σ_{i≠y} exp(t·(r0 − r_yi))); not in the paper.

    It is free of the scale of the logits. `base` is its value at r0 = 0, the soft version of being classified
    correctly; `robust` is what asking for the radius r0 adds.
    """
    _check_positive(t=t)
    _check_not_negative(r0=r0)
    logits, labels, constants = _checked_with_constants(logits, labels, constants)
    radii = _pair_radii(logits, labels, constants)
    true = F.one_hot(labels, radii.shape[1]).bool()
    loss = F.cross_entropy((t * (r0 - radii)).masked_fill(true, 0.0), labels)
    with torch.no_grad():
        base = F.cross_entropy((-t * radii).masked_fill(true, 0.0), labels)
    return Loss(loss, base, loss.detach() - base)


def gloro(logits: Tensor, labels: Tensor, constants: Tensor, *, epsilon: float, weight: float = 1.0) -> Loss:
    """GloRo (Leino et al. 2021): a class ⊥ with the logit z_⊥ = max_{i≠j} z_i + ε·L_ji is added, j the predicted class.

    Cross-entropy over the K + 1 logits equals CE(z, y) + log(1 + exp(z_⊥ − lse(z))), and the second term equals
    KL(softmax(z) ‖ softmax(z, z_⊥)), the term of their TRADES loss. So weight 1 is their cross-entropy and any
    other weight is their TRADES loss with that λ.
    """
    _check_not_negative(epsilon=epsilon, weight=weight)
    logits, labels, constants = _checked_with_constants(logits, labels, constants)
    predicted = logits.argmax(1)
    rivals = logits + epsilon * constants[predicted]
    bottom = rivals.masked_fill(F.one_hot(predicted, logits.shape[1]).bool(), -inf).amax(1)
    base = F.cross_entropy(logits, labels)
    robust = weight * F.softplus(bottom - logits.logsumexp(1)).mean()
    return Loss(base + robust, base, robust)


def lmt(logits: Tensor, labels: Tensor, constants: Tensor, *, epsilon: float) -> Loss:
    """Lipschitz-margin training (Tsuzuku et al. 2018): cross-entropy after adding ε·L_yi to every other logit z_i.

    `base` is the cross-entropy of the logits themselves and `robust` what the addition costs.
    """
    _check_not_negative(epsilon=epsilon)
    logits, labels, constants = _checked_with_constants(logits, labels, constants)
    true = F.one_hot(labels, logits.shape[1]).bool()
    loss = F.cross_entropy(logits + (epsilon * constants[labels]).masked_fill(true, 0.0), labels)
    with torch.no_grad():
        base = F.cross_entropy(logits, labels)
    return Loss(loss, base, loss.detach() - base)


def hard_radius(logits: Tensor, labels: Tensor, constants: Tensor) -> Tensor:
    """min_{i≠y} (z_y − z_i)/L_yi, (B,): eq: input margin lower bound Lip. Positive if and only if y is predicted.

    It is a certified radius only if the constants are guaranteed bounds and rounding is accounted for.
    """
    return _pair_radii(*_checked_with_constants(logits, labels, constants)).amin(1)


def soft_radius(logits: Tensor, labels: Tensor, constants: Tensor, t: float) -> Tensor:
    """−(1/t)·log Σ_{i≠y} exp(−t·(z_y − z_i)/L_yi), (B,): eq: input margin lower bound Lip soft.

    Between the hard radius − log(K−1)/t and the hard radius (proposition: soft certified radius).
    """
    _check_positive(t=t)
    return _soft_minimum(_pair_radii(*_checked_with_constants(logits, labels, constants)), t)


def _pair_radii(logits: Tensor, labels: Tensor, constants: Tensor) -> Tensor:
    """(z_y − z_i)/L_yi, (B, K), with the largest radius at i = y so that it never is the smallest of the row."""
    smallest = torch.finfo(logits.dtype).tiny ** 0.5
    largest = 0.1 / smallest
    margins = logits.gather(1, labels[:, None]) - logits
    rows = constants[labels]
    reachable = (rows >= smallest) & (margins.abs() < largest * rows)
    radii = margins / torch.where(reachable, rows, torch.ones_like(rows))
    unreachable = torch.where(margins.isnan(), margins, margins.sign() * largest).detach()
    radii = torch.where(reachable, radii, unreachable)
    return radii.masked_fill(F.one_hot(labels, logits.shape[1]).bool(), largest)


def _soft_minimum(radii: Tensor, t: float) -> Tensor:
    """−(1/t)·log Σ exp(−t·r) of every row, taken relative to the row's minimum: no overflow, never above it."""
    hard = radii.amin(1, keepdim=True).detach()
    return hard[:, 0] - torch.logsumexp(-t * (radii - hard), 1) / t


def _base(logits: Tensor, labels: Tensor, base: str, margin_t: float, smoothing: float) -> Tensor:
    check_choice("base", base, BASES)
    if base == "cross-entropy":
        return F.cross_entropy(logits, labels)
    if base == "label-smoothing":
        if not 0 <= smoothing <= 1:
            raise OptionError(f"smoothing is {smoothing}, expected a number from 0 to 1")
        return F.cross_entropy(logits, labels, label_smoothing=smoothing)
    _check_positive(margin_t=margin_t)
    if logits.shape[1] == 1:
        return 0.0 * logits.sum()  # no other class, no margin
    others = (margin_t * logits).masked_fill(F.one_hot(labels, logits.shape[1]).bool(), -inf)
    return (others.logsumexp(1) / margin_t - logits.gather(1, labels[:, None])[:, 0]).mean()


def _checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if logits.ndim != 2 or 0 in logits.shape or not logits.is_floating_point():
        raise ShapeError(f"logits: expected floating-point (B, K), not empty, got {_kind(logits)}")
    if labels.shape != logits.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ShapeError(f"labels: expected integers of shape ({len(logits)},), got {_kind(labels)}")
    low, high = (int(value) for value in labels.aminmax())
    if low < 0 or high >= logits.shape[1]:
        culprit = low if low < 0 else high
        raise DataError(
            f"labels contain {culprit}, expected 0 to {logits.shape[1] - 1}: the logits have that many classes"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.long()


def _checked_with_constants(logits: Tensor, labels: Tensor, constants: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, labels = _checked(logits, labels)
    classes = logits.shape[1]
    if constants.shape != (classes, classes) or not constants.is_floating_point():
        remedy = "use Estimator.pairwise() for other targets"
        raise ShapeError(f"constants: expected floating-point ({classes}, {classes}), got {_kind(constants)}; {remedy}")
    other = ~torch.eye(classes, dtype=torch.bool, device=constants.device)
    if not bool((constants.isfinite() | ~other).all()):
        raise NonFiniteError("constants contain NaN or infinity; restore the last good weights")
    if bool(((constants < 0) & other).any()):
        raise OptionError("constants contain a negative number, expected Lipschitz constants (0 or more)")
    dtype = torch.promote_types(logits.dtype, constants.dtype)
    return logits.to(dtype), labels, constants.to(dtype)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if not (isfinite(value) and value > 0):
            raise OptionError(f"{name} is {value}, expected a positive number")


def _check_not_negative(**options: float) -> None:
    for name, value in options.items():
        if not (isfinite(value) and value >= 0):
            raise OptionError(f"{name} is {value}, expected 0 or more")
