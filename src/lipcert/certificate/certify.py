"""Margins and constants → certified radii."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor, nn

from lipcert.bounds.bound import Bound, network_of
from lipcert.bounds.compute import bound_network
from lipcert.bounds.fingerprint import check_finite
from lipcert.bounds.methods import find_method
from lipcert.bounds.targets import default_target, find_target
from lipcert.certificate.binary import has_one_logit, with_two_logits
from lipcert.certificate.certificates import Certificates
from lipcert.certificate.error_pass import ErrorPass
from lipcert.certificate.inputs import (
    CertifyBatch,
    Inputs,
    Labels,
    certify_all,
    compared,
    from_numpy,
)
from lipcert.certificate.propagation import LARGEST, rounding_model
from lipcert.certificate.radius import certified_radius, smallest_other
from lipcert.certificate.requirements import (
    check_arithmetic,
    check_covered,
    check_finite_inputs,
    check_input,
    check_labels,
    check_operators,
)
from lipcert.certificate.stages import stage_bounds
from lipcert.errors import NonFiniteError, OptionError
from lipcert.network.build import normal_form, trace
from lipcert.network.capture import CAPTURE_LOCK
from lipcert.network.normal_form import Network
from lipcert.network.probes import probes
from lipcert.network.splitting import split_sums
from lipcert.progress import Progress, no_progress
from lipcert.rounding import denormals_kept


class Certifier:
    """A model with its bound, ready to certify batches.

    The radius of an input x with prediction y is the smallest, over other classes i, of

        (z_y − z_i − errors_yi) / (L_yi + κ_yi),

    rounded down and at least 0: `errors` bounds the rounding errors of the executed
    model at x and at any point of the ball, up to κ per unit of distance. With
    `longest_sum`, what is executed sums in parts (see `network.splitting`).
    """

    def __init__(
        self, model: nn.Module | Network, bound: Bound, longest_sum: int | None = None
    ) -> None:
        with CAPTURE_LOCK, torch.inference_mode(False), denormals_kept():
            self._prepare(model, bound, longest_sum)

    def _prepare(
        self, model: nn.Module | Network, bound: Bound, longest_sum: int | None
    ) -> None:
        traced = frozen_copy(model, bound)
        # As the model returns it: with one logit, sums whole.
        self.captured = traced.program
        # What operators that are not torch's own compute now; asked after every batch.
        self.probes = probes(traced.program)
        bound.check_belongs(traced)
        # Not before `check_belongs`: the bound is one of the model with one logit.
        if has_one_logit(traced):
            traced, bound = with_two_logits(traced, bound)
        check_covered(traced)
        self.bound = bound
        self.classes = traced.classes
        program = traced.program.frozen()
        if longest_sum is not None:
            program = split_sums(program, longest_sum)
        # Weights that the model computes, as a weight norm does, can overflow, too.
        check_finite(program)
        self.network = normal_form(program, check=False)
        with torch.no_grad():
            exact = normal_form(program, exact=True)
            # T_k belong to sites: a rewrite of the sums must not add or remove any.
            if exact.depth != traced.depth:
                raise OptionError(
                    "with longest_sum, the model has other nonlinearities than its bound; leave it out"
                )
            stages = stage_bounds(self.network, exact)
            self.rounding = rounding_model(self.network, exact, stages, bound)
        # L_yi + κ_yi, the denominator of the radius, (K, K).
        self.constants = bound.pairwise(self.classes) + self.rounding.growth
        finite = bool(torch.isfinite(self.constants).all())
        if not finite or not self.rounding.reach > 0:
            raise NonFiniteError(
                "the constants of the rounding errors are not finite; the weights are too large or differ too much in "
                "magnitude: scale them down"
            )
        self.error_pass = ErrorPass(self.network, stages)

    def certify(
        self, x: Tensor, first: int = 0, label: Tensor | None = None
    ) -> Certificates:
        """Certificates of one batch; `first` is the index of its first input, for messages."""
        # For every batch: TF32 or autocast may have been switched on since the last.
        check_arithmetic(self.network.dtype, self.network.device)
        check_input(x, self.network.input_shape, self.network.dtype)
        check_finite_inputs(x, first)
        if label is not None:
            check_labels(label, len(x), self.classes)
        x = _channels_last(x.to(self.network.device))
        # Logits and error bounds are of one execution, so of the same roundings.
        execution = self.error_pass.execute(x).cpu()
        # Not `>`: NaN has to be refused, too.
        if not float(execution.largest) <= LARGEST[self.network.dtype]:
            self._refuse_overflow(x, first)
        check_operators(self.network.program, self.probes)
        # Exact: every float32 number is one of float64.
        logits = execution.logits.double()
        prediction = logits.argmax(1)
        errors = self.rounding.errors(execution, prediction)
        # Of two equal logits argmax takes one; their margin is 0, and so is the radius.
        margins = logits.gather(1, prediction[:, None]) - logits  # (B, K)
        constants = self.constants[prediction]
        radius = certified_radius(margins, errors, constants, prediction)
        # Farther away something may overflow, where the error analysis does not hold.
        radius = radius.clamp(max=self.rounding.reach)
        margin = smallest_other(margins, prediction)
        return Certificates(prediction, margin, radius, self.bound.guarantee, label)

    def _refuse_overflow(self, x: Tensor, first: int) -> NoReturn:
        """Find the first input whose values are too large."""
        limit = LARGEST[self.network.dtype]
        # One by one, only to name the input.
        for k in range(len(x)):
            if not float(self.error_pass.execute(x[k : k + 1]).largest) <= limit:
                break
        raise NonFiniteError(
            f"the model overflows on input {first + k}, or comes near it: it computes values beyond {limit:g}; "
            "nothing is certified"
        )


def _channels_last(x: Tensor) -> Tensor:
    """Fastest for convolutions of images; the error analysis holds in any memory format."""
    if x.dim() != 4:
        return x
    if x.shape[1] > 1:
        return x.contiguous(memory_format=torch.channels_last)
    # One channel is contiguous in both formats: kernels look at strides.
    return x.contiguous().view(len(x), *x.shape[2:], 1).permute(0, 3, 1, 2)


def frozen_copy(model: nn.Module | Network, bound: Bound) -> Network:
    """The model as it is now: its tensors are copies, which nothing done to it can change."""
    if not isinstance(bound, Bound):
        raise OptionError(
            f"bound is {type(bound).__name__}, expected what lipcert.bound or Bound.load returns"
        )
    traced = network_of(model, bound.facts.input_shape)
    traced = replace(traced, program=traced.program.frozen())
    check_arithmetic(traced.dtype, traced.device)
    check_finite(traced.program)
    return traced


def certify(
    model: nn.Module,
    x: Inputs,
    bound: Bound | None = None,
    *,
    labels: Labels | None = None,
    batch_size: int = 256,
    longest_sum: int | None = None,
    progress: Progress = no_progress,
) -> Certificates:
    """Certified l2 radii for inputs or for a loader of inputs, or of (inputs, labels).

    A model with one logit is a classifier too: its class is 1 where the logit is
    positive and 0 elsewhere.

    Args:
        model: in eval mode; normalisation belongs inside, so that radii are in the units of its input.
        x: a batch of inputs as a tensor or an array, a torch data set, or an iterable of batches.
        bound: from `lipcert.bound`; computed (method "liplt") if not given.
        labels: true classes for a single batch of inputs.
        batch_size: how many inputs run at a time.
        longest_sum: execute dense layers and convolutions in parts of at most so many products, and certify that; 144
            is a good choice. Rounding then costs a fraction of what it does otherwise, at some cost in time.
        progress: called with what is being done and the fraction done.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> lipcert.certify(model, torch.rand(2, 4)).radius.shape
        torch.Size([2])
    """
    x, true = from_numpy(x, model), from_numpy(labels)

    def make(inputs: Tensor) -> CertifyBatch:
        certifier = _certifier(model, bound, longest_sum, progress, inputs)
        return compared(certifier.certify, certifier.captured, model)

    return certify_all(make, x, true, batch_size, progress)


def _certifier(
    model: nn.Module,
    bound: Bound | None,
    longest_sum: int | None,
    progress: Progress,
    inputs: Tensor,
) -> Certifier:
    """The model is captured once, for its bound and for certifying."""
    if bound is not None:
        return Certifier(model, bound, longest_sum)
    network = trace(model, tuple(inputs.shape[1:]))
    method, target = find_method("liplt"), find_target(default_target(network))
    found = bound_network(network, method, [target], progress=progress)[target.name]
    return Certifier(network, found, longest_sum)
