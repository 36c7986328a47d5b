"""`lipcert.certify_local`: radii from linear relaxations over a ball around each input."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import torch
from torch import Tensor, nn

from lipcert.bounds.bound import Bound
from lipcert.bounds.fingerprint import check_finite
from lipcert.certificate.binary import has_one_logit, two_logits
from lipcert.certificate.certificates import Certificates
from lipcert.certificate.certify import Certifier
from lipcert.certificate.inputs import (
    CertifyBatch,
    Inputs,
    Labels,
    certify_all,
    compared,
    from_numpy,
)
from lipcert.certificate.requirements import (
    check_arithmetic,
    check_covered,
    check_finite_inputs,
    check_input,
    check_labels,
    check_operators,
)
from lipcert.local.ball_options import checked_epsilon, checked_norm
from lipcert.local.centres import executed_values
from lipcert.local.points import Point
from lipcert.local.prepared import Prepared
from lipcert.local.proving import promised_radius, proved_radius
from lipcert.local.pulling import Ball
from lipcert.local.search import largest_radius
from lipcert.local.sharpening import Effort
from lipcert.network.build import normal_form, trace
from lipcert.network.capture import CAPTURE_LOCK
from lipcert.network.normal_form import Network
from lipcert.network.probes import probes
from lipcert.progress import Progress, no_progress
from lipcert.rounding import denormals_kept

_FIRST_SHARE = 0.5
"""A search begins at this share of what the slopes at an input promise."""


class LocalCertifier:
    """A model, ready to be certified over balls around inputs; `bound` gives radii that are never fallen below."""

    def __init__(
        self,
        model: nn.Module | Network,
        input_shape: tuple[int, ...],
        norm: float = 2,
        bound: Bound | None = None,
        effort: Effort | None = None,
    ) -> None:
        self.norm = checked_norm(norm)
        self.effort = effort or Effort()
        with CAPTURE_LOCK, torch.inference_mode(False), denormals_kept():
            traced = (
                model
                if isinstance(model, Network)
                else trace(model, input_shape, local=True)
            )
            check_arithmetic(traced.dtype, traced.device)
            check_finite(traced.program)
            check_covered(traced)
            self.captured = traced.program.frozen()  # as the model returns it
            if has_one_logit(traced):
                traced = trace(two_logits(traced), traced.input_shape, local=True)
            self.classes = traced.classes
            # Copies: what is proved is about the weights as they are now.
            program = traced.program.frozen()
            # What operators that are not torch's own compute now.
            self.probes = probes(program)
            self.network = normal_form(program, check=False, local=True)
            self.prepared = Prepared(
                self.network, normal_form(program, exact=True, local=True)
            )
        self.globally = None if bound is None else Certifier(model, bound)
        self.guarantee = "deterministic" if bound is None else bound.guarantee

    def certify(
        self,
        x: Tensor,
        epsilon: float | None = None,
        first: int = 0,
        label: Tensor | None = None,
    ) -> Certificates:
        """Certificates of one batch, by a search or at ε; `first` is the index of its first input, for messages."""
        return self.certify_at(x, None if epsilon is None else [epsilon], first, label)

    @denormals_kept()
    @torch.inference_mode(False)
    def certify_at(
        self,
        x: Tensor,
        epsilons: Sequence[float] | None,
        first: int = 0,
        label: Tensor | None = None,
    ) -> Certificates:
        """Certificates of one batch, by a search or at ascending ε, as long as they are proved."""
        # For every batch: autocast or TF32 may be on since the last one.
        check_arithmetic(self.network.dtype, self.network.device)
        check_input(x, self.network.input_shape, self.network.dtype)
        if label is not None:
            check_labels(label, len(x), self.classes)
        if len(x) == 0:
            none = torch.zeros(0, dtype=torch.float64)
            return Certificates(
                none.long(), none, none, self.guarantee, label, norm=self.norm
            )
        check_finite_inputs(x, first)
        x = x.to(self.network.device)
        # Lines are improved by gradients, which tensors of inference mode cannot have.
        if x.is_inference():
            x = x.clone()
        start = self._global_radius(x, first)
        values, computed = executed_values(self.network, x)
        logits = computed.double()
        point = Point(values, logits, logits.argmax(1))
        radius = self._radius(point, start, epsilons)
        check_operators(self.network.program, self.probes)
        margin = point.margins().amin(1)
        known = (point.prediction.cpu(), margin.cpu(), radius.cpu())
        return Certificates(*known, self.guarantee, label, norm=self.norm)

    def _radius(
        self, point: Point, start: Tensor, epsilons: Sequence[float] | None
    ) -> Tensor:
        if epsilons is None:
            guess = _FIRST_SHARE * promised_radius(self.prepared, point, self.norm)
            return largest_radius(self.prove, point, start, guess)
        radius = start.clone()
        failed = torch.zeros_like(start, dtype=torch.bool)
        for epsilon in epsilons:
            # What failed in a smaller ball is not tried; what holds farther out needs
            # no proof.
            left = (~failed & (radius < epsilon)).nonzero().flatten()
            if len(left):
                trial = torch.full(
                    (len(left),), epsilon, dtype=torch.float64, device=start.device
                )
                found = self.prove(point.take(left), trial, patient=True)
                radius[left] = torch.maximum(radius[left], found)
            failed |= radius < epsilon
        return radius

    def prove(self, point: Point, radius: Tensor, patient: bool = False) -> Tensor:
        """(B,): radii within which the predictions are proved, up to the given ones."""
        ball = Ball(self.norm, radius)
        return proved_radius(self.prepared, point, ball, self.effort, patient)

    def _global_radius(self, x: Tensor, first: int) -> Tensor:
        """The radii of the bound; an l∞ ball is inside the l2 ball of √n times its radius."""
        if self.globally is None:
            return torch.zeros(len(x), dtype=torch.float64, device=x.device)
        radius = self.globally.certify(x, first).radius.to(x.device)
        # Rounded down: √n and the quotient are off by a few units of 2⁻⁵³.
        if self.norm == inf:
            radius = radius / prod(x.shape[1:]) ** 0.5 * (1 - 2.0**-45)
        return radius


def certify_local(
    model: nn.Module,
    x: Inputs,
    epsilon: float | None = None,
    *,
    norm: float = 2,
    labels: Labels | None = None,
    bound: Bound | None = None,
    effort: Effort | None = None,
    batch_size: int = 32,
    progress: Progress = no_progress,
) -> Certificates:
    """Certified radii from bounds over a ball around each input, which hold for the model as executed.

    Args:
        model: an ordinary network in eval mode; normalisation belongs inside: radii are in the units of its input.
        x: a batch of inputs as a tensor or an array, a torch data set, or an iterable of batches.
        epsilon: the radius is at least this wherever that is proved; without it, the largest one that a search finds.
        norm: 2 or ∞ (`math.inf`): in which norm distances of inputs are measured.
        labels: true classes for a single tensor of inputs.
        bound: from `lipcert.bound`; radii are then never below those of `lipcert.certify`.
        effort: how many steps are spent on better slopes; `Effort(last_steps=20, inner_steps=20)` proves more, slowly.
        batch_size: how many inputs are bounded at a time.
        progress: called with what is being done and the fraction done.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> lipcert.certify_local(model, torch.rand(2, 4), epsilon=0.01).radius.shape
        torch.Size([2])
    """
    size = checked_epsilon(epsilon)
    x, true = from_numpy(x, model), from_numpy(labels)

    def make(inputs: Tensor) -> CertifyBatch:
        shape = tuple(inputs.shape[1:])
        certifier = LocalCertifier(model, shape, norm, bound, effort=effort)

        def certify(
            batch: Tensor, first: int, label: Tensor | None = None
        ) -> Certificates:
            return certifier.certify(batch, size, first, label)

        return compared(certify, certifier.captured, model)

    return certify_all(make, x, true, batch_size, progress)
