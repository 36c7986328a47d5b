"""Inputs and labels from arrays of any origin: what they may be, and what is said if they are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipcert.errors import DataError

_COLOURS = (1, 3, 4)


def checked_inputs(given: Any, what: str) -> tuple[Tensor, str]:
    """Bytes (N, …) or float32 in [0, 1] (N, …), with a channel axis in front; and what was done to them."""
    inputs = as_tensor(given, f"the inputs of {what}")
    if inputs.ndim < 2 or 0 in inputs.shape:
        raise DataError(
            f"the inputs of {what} have the shape {tuple(inputs.shape)}, "
            "expected (N, …), not empty"
        )
    inputs = _bytes_or_floats(inputs, what)
    remark = ""
    # (N, H, W) of bytes are grey images; floats of three axes may be anything.
    if inputs.ndim == 3 and inputs.dtype == torch.uint8:
        inputs = inputs[:, None]
    # (N, 32, 32, 3) → (N, 3, 32, 32). An image of 3 rows and 3 columns stays as it is.
    if (
        inputs.ndim == 4
        and inputs.shape[-1] in _COLOURS
        and inputs.shape[1] not in _COLOURS
    ):
        inputs, remark = (
            inputs.movedim(-1, 1),
            "channels moved from the last axis to the first",
        )
    return inputs.contiguous(), remark


def _bytes_or_floats(inputs: Tensor, what: str) -> Tensor:
    low, high = float(inputs.min()), float(inputs.max())
    if inputs.is_floating_point():
        if not 0 <= low <= high <= 1:  # also NaN
            remedy = (
                "scale them, and let the model undo it in its first layer: "
                "radii are in these units"
            )
            if 0 <= low <= high <= 255:
                remedy = "divide by 255"
            raise DataError(
                f"the inputs of {what} are from {low:g} to {high:g}, expected "
                f"numbers in [0, 1]; {remedy}"
            )
        return inputs.float()
    if inputs.dtype == torch.bool or inputs.is_complex() or not 0 <= low <= high <= 255:
        kind = str(inputs.dtype).removeprefix("torch.")
        raise DataError(
            f"the inputs of {what} are {kind} from {low:g} to {high:g}, expected "
            "bytes or floats in [0, 1]"
        )
    return inputs.to(torch.uint8)


def checked_labels(given: Any, count: int, what: str) -> Tensor:
    """int64 (N,)."""
    labels = as_tensor(given, f"the labels of {what}")
    # As Keras keeps them.
    if labels.shape == (count, 1):
        labels = labels[:, 0]
    if (
        labels.shape != (count,)
        or labels.is_floating_point()
        or labels.dtype == torch.bool
        or labels.is_complex()
    ):
        kind = f"{str(labels.dtype).removeprefix('torch.')} {tuple(labels.shape)}"
        raise DataError(
            f"the labels of {what} are {kind}, expected integers ({count},): one "
            "class per input, from 0"
        )
    if int(labels.min()) < 0:
        raise DataError(
            f"the labels of {what} contain {int(labels.min())}, expected 0 or more"
        )
    return labels.to(torch.int64).contiguous()


def as_tensor(given: Any, what: str) -> Tensor:
    """A tensor on the CPU."""
    if isinstance(given, Tensor):
        return given.detach().cpu()
    try:
        array = np.asarray(given)
        # torch has hardly any arithmetic for it.
        if array.dtype == np.uint16:
            array = array.astype(np.int64)
        return torch.from_numpy(np.require(array, requirements=["C", "W"]))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{what} are {type(given).__name__}, expected an array or a "
            "tensor of numbers"
        ) from error
