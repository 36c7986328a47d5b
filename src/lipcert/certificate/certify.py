"""Margins and constants → certified radii."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized

import numpy as np
import torch
from torch import Tensor, nn

from lipcert.bounds.bound import Bound
from lipcert.bounds.compute import bound_network
from lipcert.bounds.fingerprint import check_finite
from lipcert.bounds.methods import find_method
from lipcert.bounds.targets import find_target
from lipcert.certificate.certificates import Certificates, concatenate
from lipcert.certificate.error_pass import ErrorPass, Execution, check_covered
from lipcert.certificate.propagation import rounding_model
from lipcert.certificate.stages import stage_bounds
from lipcert.errors import LabelError, ModelError, NonFiniteError, OptionError, ShapeError
from lipcert.network.build import normal_form, trace
from lipcert.network.normal_form import Network
from lipcert.progress import Progress, no_progress
from lipcert.rounding import denormals_kept

_ROUND_DOWN = 1 - 2.0**-45
_MKLDNN = ("conv", "matmul")  # parts of the CPU backend that can be told to use fewer bits


class Certifier:
    """A model with its bound, ready to certify batches.

    The radius of an input x with prediction y is the smallest over the other classes i of

        (z_y − z_i − errors_yi) / (L_yi + κ_yi),

    rounded down and at least 0: `errors` bounds the rounding errors of the executed model at x and at any point of the
    ball, up to κ per unit of distance.
    """

    @torch.inference_mode(False)
    @denormals_kept()
    def __init__(self, model: nn.Module | Network, bound: Bound) -> None:
        traced = model if isinstance(model, Network) else trace(model, bound.facts.input_shape)
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
        self._pass = ErrorPass(self.network, stages)

    def certify(self, x: Tensor, first: int = 0, label: Tensor | None = None) -> Certificates:
        """Certificates of one batch; `first` is the index of its first input, for messages."""
        check_arithmetic(self.network.dtype, self.network.device)
        check_input(x, self.network.input_shape, self.network.dtype)
        _check_finite(x, first)
        x = x.to(self.network.device)
        # Convolutions are fastest in this memory format; the error analysis holds in any.
        execution = self._pass.execute(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x)
        _check_execution(execution, first)
        logits = execution.logits.double().cpu()
        prediction = logits.argmax(1)
        if label is not None:
            check_labels(label, len(x), self.classes)
        on_cpu = Execution(logits, execution.sites.cpu(), execution.output.cpu())
        errors = self.rounding.errors(on_cpu, prediction)
        margins = logits.gather(1, prediction[:, None]) - logits  # (B, K)
        radii = certified_radius(margins, errors, self.constants[prediction], prediction)
        radii = radii.clamp(max=self.rounding.reach)
        return Certificates(prediction, _smallest_other(margins, prediction), radii, self.bound.guarantee, label)


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


def check_input(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse inputs of another shape or type than the model's."""
    if not isinstance(x, Tensor):
        raise ShapeError(f"inputs are {type(x).__name__}, expected a tensor; torch.stack makes one of several images")
    if tuple(x.shape[1:]) != shape:
        hint = "; a single input needs a batch axis, x[None]" if tuple(x.shape) == shape else ""
        raise ShapeError(f"inputs have shape {tuple(x.shape[1:])} each, the bound is for {shape}{hint}")
    if x.dtype != dtype:
        remedy = f"x.to({dtype})" + ("" if x.is_floating_point() else " / 255, if they are pixels")
        raise ShapeError(f"inputs have dtype {x.dtype}, the model computes in {dtype}; use {remedy}")


def _check_finite(x: Tensor, first: int) -> None:
    bad = ~torch.isfinite(x.reshape(len(x), -1)).all(1)
    if bool(bad.any()):
        raise NonFiniteError(f"input {first + int(bad.nonzero()[0])} contains NaN or infinity")


def _check_execution(execution: Execution, first: int) -> None:
    finite = torch.isfinite(execution.logits).all(1).cpu()
    # An error bound is at least 2^-53 of the largest sum of absolute products in its stage.
    finite &= (execution.sites < 1e20).all(1).cpu() & (execution.output < 1e20).all(1).cpu()
    if not bool(finite.all()):
        raise NonFiniteError(
            f"the model overflows on input {first + int((~finite).nonzero()[0])}; nothing is certified"
        )


def check_labels(label: Tensor, count: int, classes: int) -> None:
    """Refuse labels that are not one class per input."""
    _check_count(label, count)
    if label.is_floating_point() or (count and (int(label.min()) < 0 or int(label.max()) >= classes)):
        raise LabelError(f"labels must be integers from 0 to {classes - 1}")


def _check_count(label: Tensor, count: int) -> None:
    if not isinstance(label, Tensor):
        raise LabelError(f"labels are {type(label).__name__}, expected a tensor of integers; use torch.tensor(labels)")
    if label.shape != (count,):
        raise LabelError(f"labels have shape {tuple(label.shape)}, expected one per input, ({count},)")


def check_arithmetic(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse arithmetic that the error analysis does not describe."""
    if dtype not in (torch.float32, torch.float64):
        raise OptionError(f"certificates cover models in float32 and float64, not {dtype}; convert the model")
    switches = (torch.backends, torch.backends.mkldnn, *(getattr(torch.backends.mkldnn, n, None) for n in _MKLDNN))
    reduced = any(getattr(switch, "fp32_precision", "none") not in ("none", "ieee") for switch in switches)
    reduced = reduced or torch.get_float32_matmul_precision() != "highest"
    if torch.is_autocast_enabled(device.type):
        raise OptionError("autocast computes with fewer bits than the error analysis assumes; certify outside of it")
    if device.type == "cuda":
        reduced |= torch.backends.cudnn.allow_tf32
    if device.type == "cpu" and dtype == torch.float32 and not _is_plain_convolution():
        raise OptionError(
            "with oneDNN switched off, torch computes convolutions by Winograd's algorithm, whose rounding errors are "
            "not bounded; set torch.backends.mkldnn.enabled, or torch.backends.nnpack.set_flags(False)"
        )
    if dtype == torch.float32 and reduced:
        raise OptionError(
            "float32 products are allowed to use fewer bits; call torch.set_float32_matmul_precision('highest') "
            "and, on a GPU, set torch.backends.cudnn.allow_tf32 = False"
        )


def _is_plain_convolution() -> bool:
    """Whether float32 convolutions on the CPU are sums of products: NNPACK's are not, and step in without oneDNN."""
    if torch._C._has_mkldnn and torch._C._get_mkldnn_enabled():
        return True
    return not torch._C._get_nnpack_enabled()


def certify(
    model: nn.Module,
    x: Tensor | Iterable[Tensor | Sequence[Tensor]],
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
    if batch_size < 1:
        raise OptionError(f"batch_size is {batch_size}, expected 1 or more")
    if bound is not None and not isinstance(bound, Bound):
        raise OptionError(f"bound is {type(bound).__name__}, expected what lipcert.bound or Bound.load returns")
    if isinstance(x, np.ndarray):
        raise ShapeError("inputs are a numpy array, expected a tensor; use torch.from_numpy(x)")
    if isinstance(x, Tensor):
        shape = tuple(x.shape[1:])
        batches = _split(x, labels, batch_size)
        total: int | None = max(1, -(-len(x) // batch_size))
    elif labels is not None:
        raise OptionError("labels go with a tensor of inputs; let the loader give (inputs, labels) instead")
    else:
        batches, total = _pairs(x), len(x) if isinstance(x, Sized) else None
        shape = bound.facts.input_shape if bound is not None else ()
    parts: list[Certificates] = []
    certifier: Certifier | None = None
    done = 0
    for index, (inputs, label) in enumerate(batches):
        if certifier is None:
            shape = shape or tuple(inputs.shape[1:])
            certifier = _certifier(model, shape, bound, progress)
        parts.append(certifier.certify(inputs, done, label))
        done += len(inputs)
        progress("certifying", (index + 1) / total if total else 0.0)
    if not parts:
        raise OptionError("there are no inputs to certify")
    return concatenate(parts)


def _certifier(model: nn.Module, shape: tuple[int, ...], bound: Bound | None, progress: Progress) -> Certifier:
    """The model is captured once, for its bound and for certifying."""
    if bound is not None:
        return Certifier(model, bound)
    network = trace(model, shape)
    method, target = find_method("liplt"), find_target("pairwise")
    return Certifier(network, bound_network(network, method, [target], progress=progress)[target.name])


def _split(x: Tensor, labels: Tensor | None, size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    if labels is not None:
        _check_count(labels, len(x))
    for first in range(0, len(x), size):
        yield x[first : first + size], labels[first : first + size] if labels is not None else None


def _pairs(batches: Iterable[Tensor | Sequence[Tensor]]) -> Iterator[tuple[Tensor, Tensor | None]]:
    for batch in batches:
        if isinstance(batch, Tensor):
            yield batch, None
        elif isinstance(batch, list | tuple) and len(batch) == 2:
            yield batch[0], batch[1]
        else:
            raise ShapeError(f"the loader gives {type(batch).__name__}, expected inputs or (inputs, labels)")
