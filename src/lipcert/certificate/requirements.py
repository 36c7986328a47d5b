"""What certifying requires of the model, of the arithmetic, and of inputs and labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lipcert.errors import (
    BoundError,
    LabelError,
    NonFiniteError,
    OptionError,
    ShapeError,
    UnsupportedError,
    UnsupportedNode,
)
from lipcert.network.normal_form import Network
from lipcert.network.probes import probes
from lipcert.network.program import Program


def check_covered(network: Network) -> None:
    """Refuse networks with an operation whose rounding errors are not known."""
    reason = (
        "its rounding errors are unknown: it is bounded, but not certified; if "
        "its rule is your own, "
    )
    remedies: dict[str, str] = {}
    for node in network.nodes:
        # Such an operation has a norm, so it can be bounded; without its roundings a
        # radius would be a guess.
        if not all(edge.op.covered for edge in node.edges):
            remedies[node.name] = "state terms= and nonnegative=True in its rule"
    for site in network.sites:
        if site.slope is not None and site.slope.ulps is None:
            remedies[site.name] = "state ulps= in the Slope of its rule"
    if remedies:
        raise UnsupportedError(
            [
                UnsupportedNode(name, "rule", reason + remedy)
                for name, remedy in remedies.items()
            ]
        )


def check_operators(program: Program, before: Sequence[tuple[str, str]]) -> None:
    """Refuse operators that do not compute any more what they computed `before` (see `probes`), naming the first."""
    if not before:
        return
    # The order is that of the program, which is frozen.
    for (name, value), (_, now) in zip(before, probes(program), strict=True):
        if now != value:
            raise BoundError(
                f"the operator {name} is not torch's own, and computes something "
                "else than when the bound was checked: "
                "it must not depend on what changes; compute the bound again "
                "with lipcert.bound"
            )


def check_input(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse inputs of another shape or type than the model's."""
    check_dense(x)
    if tuple(x.shape[1:]) != shape:
        # The commonest mistake has a remedy of its own.
        hint = (
            "; a single input needs a batch axis, x[None]"
            if tuple(x.shape) == shape
            else ""
        )
        raise ShapeError(
            f"inputs have shape {tuple(x.shape[1:])} each, the bound is "
            f"for {shape}{hint}"
        )
    # A silent conversion would round the input, and the radius would be one around
    # another point.
    if x.dtype != dtype:
        remedy = f"x.to({dtype})" + (
            "" if x.is_floating_point() else " / 255, if they are pixels"
        )
        raise ShapeError(
            f"inputs have dtype {x.dtype}, the model computes in {dtype}; use {remedy}"
        )


def check_dense(x: Any) -> None:
    """Refuse what is not a tensor, and tensors that are nested or sparse, or that have no values."""
    if not isinstance(x, Tensor):
        remedy = "torch.stack makes one of several images"
        if isinstance(x, np.ndarray):
            remedy = "use torch.from_numpy"
        raise ShapeError(f"inputs are {type(x).__name__}, expected a tensor; {remedy}")
    if x.is_nested:
        raise ShapeError(
            "inputs are a nested tensor; use torch.stack(x.unbind()), if its "
            "parts have one shape"
        )
    if x.layout != torch.strided or x.is_meta:
        raise ShapeError(
            "inputs are sparse or on the meta device; use dense tensors with values"
        )
    # Operators on a subclass run its code. Tensors that are traced are subclasses, too.
    plain = type(x) in (Tensor, nn.Parameter) or torch.compiler.is_exporting()
    if not plain:
        raise ShapeError(
            f"inputs are a {type(x).__name__}, whose operators may compute something "
            "else; use x.as_subclass(torch.Tensor)"
        )
    if x.dim() == 0:
        raise ShapeError(
            "inputs are a single number, expected a batch: its first axis is "
            "that of the inputs"
        )


def check_finite_inputs(x: Tensor, first: int) -> None:
    """Refuse NaN and infinity; `first` is the index of the first input."""
    bad = ~torch.isfinite(x.reshape(len(x), -1)).all(1)
    if bool(bad.any()):
        raise NonFiniteError(
            f"input {first + int(bad.nonzero()[0])} contains NaN or infinity"
        )


def check_labels(label: Tensor, count: int, classes: int) -> None:
    """Refuse labels that are not one class per input."""
    check_label_count(label, count)
    if label.is_floating_point() or (
        count and (int(label.min()) < 0 or int(label.max()) >= classes)
    ):
        raise LabelError(f"labels must be integers from 0 to {classes - 1}")


def check_label_count(label: Tensor, count: int) -> None:
    """Refuse labels that are not one per input."""
    if not isinstance(label, Tensor):
        raise LabelError(
            f"labels are {type(label).__name__}, expected a tensor of integers; use "
            "torch.tensor(labels)"
        )
    if label.shape != (count,):
        raise LabelError(
            f"labels have shape {tuple(label.shape)}, expected one per "
            f"input, ({count},)"
        )


def check_arithmetic(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse arithmetic that the error analysis does not describe."""
    if dtype not in (torch.float32, torch.float64):
        raise OptionError(
            f"certificates cover models in float32 and float64, not {dtype}; "
            "convert the model"
        )
    if torch.is_autocast_enabled(device.type):
        raise OptionError(
            "autocast computes with fewer bits than the error analysis assumes; "
            "certify outside of it"
        )
    # While exporting, torch has modes of its own, which are gone in what it makes.
    if not torch.compiler.is_exporting():
        _check_modes()
    # Winograd's algorithm adds and subtracts inputs before it multiplies: γ|A||x| does
    # not bound its errors.
    if device.type == "cpu" and dtype == torch.float32 and not _is_plain_convolution():
        raise OptionError(
            "with oneDNN switched off, torch computes convolutions by Winograd's "
            "algorithm, whose rounding errors are "
            "not bounded; set torch.backends.mkldnn.enabled, or "
            "torch.backends.nnpack.set_flags(False)"
        )
    if dtype == torch.float32 and _uses_fewer_bits(device):
        raise OptionError(
            "float32 products are allowed to use fewer bits; call "
            "torch.set_float32_matmul_precision('highest') and, "
            "where it was changed in torch.backends, fp32_precision = "
            "'ieee'; on a GPU, also "
            "torch.backends.cudnn.allow_tf32 = False"
        )


def _check_modes() -> None:
    """Refuse code of others that runs in place of torch's operators; where tensors are made is no matter."""
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    for mode in [*functions, *_get_current_dispatch_mode_stack()]:
        if not isinstance(mode, DeviceContext):
            raise OptionError(
                f"within {type(mode).__name__}, operators may compute something else "
                "than the program; certify outside of it"
            )


def _is_plain_convolution() -> bool:
    """Whether float32 convolutions on the CPU are sums of products: NNPACK's are not, and step in without oneDNN."""
    # torch asks oneDNN first, and for the direct algorithm.
    if torch._C._has_mkldnn and torch._C._get_mkldnn_enabled():
        return True
    return not torch._C._get_nnpack_enabled()


def _uses_fewer_bits(device: torch.device) -> bool:
    """Whether float32 products may be computed with fewer bits than float32 has."""
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return True
    except (
        RuntimeError
    ):  # where `fp32_precision` has been used instead, torch refuses to tell
        if device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision not in (
            "none",
            "ieee",
        ):
            return True
    if device.type == "cuda" and torch.backends.cudnn.allow_tf32:
        return True
    # Newer versions of torch have switches per backend and operation, on CPUs as well;
    # older ones lack some of them.
    mkldnn = torch.backends.mkldnn
    switches = (
        torch.backends,
        mkldnn,
        getattr(mkldnn, "conv", None),
        getattr(mkldnn, "matmul", None),
    )
    return any(
        getattr(switch, "fp32_precision", "none") not in ("none", "ieee")
        for switch in switches
    )
