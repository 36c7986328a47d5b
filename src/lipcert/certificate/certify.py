"""Margins and constants → certified radii."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from math import ceil, inf
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from lipcert.bounds.bound import Bound
from lipcert.bounds.compute import bound_network
from lipcert.bounds.fingerprint import check_finite
from lipcert.bounds.methods import find_method
from lipcert.bounds.targets import find_target
from lipcert.certificate.certificates import Certificates, concatenate
from lipcert.certificate.error_pass import ErrorPass
from lipcert.certificate.propagation import LARGEST, rounding_model
from lipcert.certificate.requirements import (
    check_arithmetic,
    check_covered,
    check_dense,
    check_finite_inputs,
    check_input,
    check_label_count,
    check_labels,
)
from lipcert.certificate.stages import stage_bounds
from lipcert.errors import ModelError, NonFiniteError, OptionError, ShapeError
from lipcert.network.build import normal_form, trace
from lipcert.network.capture import LOCK
from lipcert.network.normal_form import Network
from lipcert.progress import Progress, no_progress
from lipcert.rounding import denormals_kept

_ROUND_DOWN = 1 - 2.0**-45

Inputs = Tensor | Iterable[Tensor | Sequence[Tensor]]


class Certifier:
    """A model with its bound, ready to certify batches.

    The radius of an input x with prediction y is the smallest over the other classes i of

        (z_y − z_i − errors_yi) / (L_yi + κ_yi),

    rounded down and at least 0: `errors` bounds the rounding errors of the executed model at x and at any point of the
    ball, up to κ per unit of distance.
    """

    def __init__(self, model: nn.Module | Network, bound: Bound) -> None:
        with LOCK, torch.inference_mode(False), denormals_kept():
            self._prepare(model, bound)

    def _prepare(self, model: nn.Module | Network, bound: Bound) -> None:
        if not isinstance(bound, Bound):
            raise OptionError(f"bound is {type(bound).__name__}, expected what lipcert.bound or Bound.load returns")
        traced = model
        if not isinstance(traced, Network):
            traced = trace(traced, bound.facts.input_shape)
        check_arithmetic(traced.dtype, traced.device)
        check_finite(traced.program)
        bound.check_belongs(traced)
        check_covered(traced)
        self.bound = bound
        self.classes = traced.classes
        if self.classes == 1:
            raise ModelError(
                "the model has one logit, which leaves nothing to certify; for two classes, give it a second logit, "
                "such as a constant 0"
            )
        program = traced.program.frozen()
        check_finite(program)
        self.network = normal_form(program, check=False)
        with torch.no_grad():
            exact = normal_form(program, exact=True)
            stages = stage_bounds(self.network, exact)
            self.rounding = rounding_model(self.network, exact, stages, bound)
        self.constants = bound.pairwise(self.classes) + self.rounding.growth
        if not bool(torch.isfinite(self.constants).all()) or not self.rounding.reach > 0:
            raise NonFiniteError(
                "the constants of the rounding errors are not finite; the weights are too large or differ too much in "
                "magnitude: scale them down"
            )
        self.error_pass = ErrorPass(self.network, stages)

    def certify(self, x: Tensor, first: int = 0, label: Tensor | None = None) -> Certificates:
        """Certificates of one batch; `first` is the index of its first input, for messages."""
        check_arithmetic(self.network.dtype, self.network.device)
        check_input(x, self.network.input_shape, self.network.dtype)
        check_finite_inputs(x, first)
        if label is not None:
            check_labels(label, len(x), self.classes)
        x = x.to(self.network.device)
        if x.dim() == 4:
            # Convolutions are fastest in this memory format; the error analysis holds in any.
            x = x.contiguous(memory_format=torch.channels_last)
        execution = self.error_pass.execute(x).cpu()
        if not float(execution.largest) <= LARGEST[self.network.dtype]:
            self._refuse_overflow(x, first)
        logits = execution.logits.double()
        prediction = logits.argmax(1)
        errors = self.rounding.errors(execution, prediction)
        margins = logits.gather(1, prediction[:, None]) - logits  # (B, K)
        radius = certified_radius(margins, errors, self.constants[prediction], prediction)
        radius = radius.clamp(max=self.rounding.reach)
        return Certificates(prediction, _smallest_other(margins, prediction), radius, self.bound.guarantee, label)

    def _refuse_overflow(self, x: Tensor, first: int) -> NoReturn:
        """Find the first input whose values are too large."""
        limit = LARGEST[self.network.dtype]
        for k in range(len(x)):
            if not float(self.error_pass.execute(x[k : k + 1]).largest) <= limit:
                break
        raise NonFiniteError(
            f"the model overflows on input {first + k}, or comes near it: it computes values beyond {limit:g}; "
            "nothing is certified"
        )


def certified_radius(margins: Tensor, errors: Tensor, constants: Tensor, prediction: Tensor) -> Tensor:
    """(B,): min over i ≠ y of (margin_i − errors_i)/constants_i, rounded down, at least 0.

    The differences of logits are exact to 2^-53 of the logits, which the rounding-down of the result does not cover:
    the errors do, because they contain a rounding of the logits themselves.
    """
    slack = (margins - errors).clamp(min=0)
    ratios = torch.where(slack > 0, slack / constants.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    return _smallest_other(ratios, prediction) * _ROUND_DOWN


def _smallest_other(values: Tensor, prediction: Tensor) -> Tensor:
    """(B,): the smallest value of the classes other than the predicted one."""
    return values.scatter(1, prediction[:, None], torch.inf).amin(1)


def certify(
    model: nn.Module,
    x: Inputs,
    bound: Bound | None = None,
    *,
    labels: Tensor | None = None,
    batch_size: int = 256,
    progress: Progress = no_progress,
) -> Certificates:
    """Certified l2 radii for inputs or for a loader of inputs, or of (inputs, labels).

    Args:
        model: in eval mode; normalisation belongs inside, so that radii are in the units of its input.
        x: a batch of inputs, or an iterable of batches.
        bound: from `lipcert.bound`; computed (method "liplt", target "pairwise") if not given.
        labels: true classes for a single tensor of inputs.
        batch_size: how many inputs run at a time.
        progress: called with what is being done and the fraction done.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise OptionError(f"batch_size is {batch_size}, expected 1 or more")
    total = _batch_count(x, batch_size)
    certifier: Certifier | None = None
    certificates: list[Certificates] = []
    done = 0
    for inputs, label in _batches(x, labels, batch_size):
        if certifier is None:
            certifier = _certifier(model, inputs, bound, progress)
        certificates.append(certifier.certify(inputs, done, label))
        done += len(inputs)
        progress("certifying", len(certificates) / total)
    if not certificates:
        raise OptionError("there are no inputs to certify")
    return concatenate(certificates)


def _certifier(model: nn.Module, inputs: Tensor, bound: Bound | None, progress: Progress) -> Certifier:
    """The model is captured once, for its bound and for certifying."""
    if bound is not None:
        return Certifier(model, bound)
    network = trace(model, tuple(inputs.shape[1:]))
    method, target = find_method("liplt"), find_target("pairwise")
    return Certifier(network, bound_network(network, method, [target], progress=progress)[target.name])


def _batch_count(x: Inputs, size: int) -> float:
    """How many batches there will be; infinite if a loader does not tell."""
    if isinstance(x, Tensor):
        return max(1, ceil(len(x) / size))
    if isinstance(x, Sized):
        return max(1, len(x))
    return inf


def _batches(x: Inputs, labels: Tensor | None, size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Inputs and their labels, if there are any, from a tensor or from a loader."""
    if isinstance(x, np.ndarray):
        raise ShapeError("inputs are a numpy array, expected a tensor; use torch.from_numpy(x)")
    if isinstance(x, Tensor):
        check_dense(x)
        if labels is not None:
            check_label_count(labels, len(x))
        for first in range(0, len(x), size):
            batch = slice(first, first + size)
            yield x[batch], None if labels is None else labels[batch]
        return
    if labels is not None:
        raise OptionError("labels go with a tensor of inputs; let the loader give (inputs, labels) instead")
    if not isinstance(x, Iterable):
        raise ShapeError(f"inputs are {type(x).__name__}, expected a tensor or a loader of tensors")
    for given in x:
        if isinstance(given, Tensor):
            yield given, None
        elif isinstance(given, list | tuple) and len(given) == 2:
            yield given[0], given[1]
        else:
            raise ShapeError(f"the loader gives {type(given).__name__}, expected inputs or (inputs, labels)")
