"""A classifier that computes in float32, and again in float64 where float32 cannot tell the class."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from lipcert.bounds.bound import Bound
from lipcert.bounds.fingerprint import check_finite
from lipcert.certificate.binary import has_one_logit, with_two_logits
from lipcert.certificate.certify import frozen_copy
from lipcert.certificate.error_pass import NormPass
from lipcert.certificate.propagation import LARGEST, rounding_model
from lipcert.certificate.requirements import (
    check_arithmetic,
    check_covered,
    check_input,
)
from lipcert.certificate.stages import stage_bounds
from lipcert.errors import ModelError, OptionError
from lipcert.network.build import normal_form
from lipcert.network.capture import CAPTURE_LOCK
from lipcert.network.narrowing import narrowed
from lipcert.network.normal_form import Network
from lipcert.network.splitting import split_sums
from lipcert.rounding import denormals_kept

_LONGEST_DENSE_SUM = 256
# All values of a batch are kept until their norms are taken: of few rows at a time, so
# that their memory is used again.
_ROWS, _WIDE_ROWS = 256, 64


class SettledClassifier(nn.Module):
    """x ↦ classes, for which the certificates of the model in float64 hold, at nearly the cost of float32.

    Every input is run in float32, and what rounding may have changed of its logits is
    bounded. Where that is less than the margin, the class is *settled*: it is the one
    of the function that the model computes without any rounding. The other inputs are
    run in float64. A certificate of `model.double()` says that within its radius both
    the function and the model in float64 have one class, so that this classifier has
    it, too.

    `model` is in float64, with weights that float32 has (`model.double()` of a model in
    float32), and `bound` is its bound. It owns copies of both programs.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> wide = model.double()
        >>> bound = lipcert.bound(wide, (4,))
        >>> x = torch.rand(5, 4)
        >>> radius = lipcert.certify(wide, x.double(), bound).radius
        >>> lipcert.SettledClassifier(wide, bound)(x).shape
        torch.Size([5])
    """

    def __init__(self, model: nn.Module | Network, bound: Bound) -> None:
        super().__init__()
        with CAPTURE_LOCK, torch.inference_mode(False), denormals_kept():
            self._prepare(model, bound)

    def _prepare(self, model: nn.Module | Network, bound: Bound) -> None:
        traced = frozen_copy(model, bound)
        bound.check_belongs(traced)
        self._input_shape = traced.input_shape
        if traced.dtype != torch.float64:
            raise OptionError(
                "a SettledClassifier is made of a model in float64 and its bound: "
                "model.double()"
            )
        if has_one_logit(traced):
            traced, bound = with_two_logits(traced, bound)
        check_covered(traced)
        network = narrowed(traced)
        check_covered(network)
        # Dense layers in parts take hardly longer, and err far less.
        program = split_sums(network.program, _LONGEST_DENSE_SUM, dense_only=True)
        check_finite(program)
        network = normal_form(program, check=False)
        with torch.no_grad():
            exact = normal_form(program, exact=True)
            assert exact.depth == traced.depth
            stages = stage_bounds(network, exact, by_norms=True)
            self._rounding = rounding_model(network, exact, stages, bound)
        # In tuples, not as parts of the module: a state dict could replace them, or a
        # conversion make them too small.
        self._narrow = (NormPass(network, stages),)
        self._wide = (traced.program.frozen().module(),)
        self._device = network.device

    def forward(self, x: Tensor) -> Tensor:
        """(B,): the classes of inputs in float32."""
        prediction: Tensor
        prediction, settled = self.first_pass(x)
        again = (~settled).nonzero()[:, 0]
        if len(again) > 0:
            prediction[again] = self._in_float64(x[again])
        return prediction

    @torch.no_grad()
    def _in_float64(self, x: Tensor) -> Tensor:
        classes = []
        for rows in torch.split(x, _WIDE_ROWS):
            # This layout is fastest for convolutions in float64.
            logits = self._wide[0](rows.double().contiguous())
            classes.append(logits.argmax(1))
        return torch.cat(classes)

    def __call__(self, x: Tensor) -> Tensor:
        """The same as `forward`: hooks could change inputs, and do not run here."""
        if self._forward_pre_hooks or self._forward_hooks:
            raise ModelError(
                "a SettledClassifier has hooks, which could change its inputs; put "
                "them around a module that calls it"
            )
        return type(self).forward(self, x)

    def __deepcopy__(self, memo: object) -> SettledClassifier:
        """Itself: nothing changes it."""
        return self

    def __reduce__(self) -> NoReturn:
        raise ModelError(
            "a SettledClassifier is not kept in files: save the model's weights and "
            "the bound, and build it again from both"
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def first_pass(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The classes in float32, and which of them are settled."""
        check_input(x, self._input_shape, torch.float32)
        if _is_followed(x):
            raise OptionError(
                "a SettledClassifier runs some inputs again, depending on their values: "
                "it is not exported, traced or vectorised; export a CertifiedClassifier"
            )
        check_arithmetic(torch.float32, self._device)
        parts = [self._settle(rows) for rows in torch.split(x, _ROWS)]
        predictions, settled = zip(*parts, strict=True)
        return torch.cat(predictions), torch.cat(settled)

    def _settle(self, x: Tensor) -> tuple[Tensor, Tensor]:
        execution = self._narrow[0].execute(x)
        logits = execution.logits.double()
        prediction = logits.argmax(1)
        margins = logits.gather(1, prediction[:, None]) - logits
        # Rows of a batch with NaN or infinity settle nothing: comparisons are false.
        errors = self._rounding.errors_at(execution, prediction)
        beaten = margins > errors
        beaten.scatter_(1, prediction[:, None], True)
        in_range = execution.largest <= LARGEST[torch.float32]
        return prediction, beaten.all(1) & in_range

    def _apply(self, fn: object, recurse: bool = True) -> SettledClassifier:
        """Conversions and moves leave it as it is: what it proves is about these types, on this device."""
        return self


def _is_followed(x: Tensor) -> bool:
    """Whether torch records what is done to a tensor that stands for others."""
    if torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None:
        return True
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))
