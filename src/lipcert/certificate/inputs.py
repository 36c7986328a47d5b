"""Inputs in all forms that they are given in, as batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from math import ceil, inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from lipcert.certificate.certificates import Certificates, concatenate
from lipcert.certificate.requirements import check_dense, check_label_count
from lipcert.errors import OptionError, ShapeError
from lipcert.network.capture import CAPTURE_LOCK
from lipcert.network.capture_comparison import check_batch
from lipcert.network.program import Program
from lipcert.progress import Progress

Inputs = Tensor | NDArray[Any] | TorchDataset[Any] | Iterable[Tensor | Sequence[Tensor]]
Labels = Tensor | NDArray[Any]
CertifyBatch = Callable[[Tensor, int, Tensor | None], Certificates]
"""Of a batch, the index of its first input and its labels, if there are any."""


def certify_all(
    make: Callable[[Tensor], CertifyBatch],
    x: Inputs,
    labels: Tensor | None,
    batch_size: int,
    progress: Progress,
) -> Certificates:
    """All batches one after the other, by what is made for the shape of the first."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise OptionError(f"batch_size is {batch_size}, expected 1 or more")
    certify: CertifyBatch | None = None
    certificates: list[Certificates] = []
    done, total = 0, _batch_count(x, batch_size)
    for inputs, label in _batches_of(x, labels, batch_size):
        # A loader tells the shape of its inputs with the first batch only.
        if certify is None:
            check_dense(inputs)
            certify = make(inputs)
        # `done` makes error messages count inputs over all batches.
        certificates.append(certify(inputs, done, label))
        done += len(inputs)
        progress("certifying", len(certificates) / total)
    if not certificates:
        raise OptionError("there are no inputs to certify")
    return concatenate(certificates)


def compared(certify: CertifyBatch, program: Program, model: nn.Module) -> CertifyBatch:
    """The same, which refuses a model that is not its program; asked once for every size of a batch."""
    sizes = {0}  # of an empty batch there is nothing to compare

    def certify_compared(
        x: Tensor, first: int, label: Tensor | None = None
    ) -> Certificates:
        certificates = certify(x, first, label)
        if len(x) not in sizes:
            sizes.add(len(x))
            # While another thread captures the model, its tensors are not its own.
            with CAPTURE_LOCK:
                check_batch(program, model, x)
        return certificates

    return certify_compared


def from_numpy(value: Any, model: nn.Module | None = None) -> Any:
    """Arrays as tensors; floating-point inputs in the dtype of the model's weights, if they are exact there.

    A radius around a rounded input says little about the input itself: it is refused.
    """
    if not isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise ShapeError("the array is masked; fill what is masked with x.filled(…)")
    try:
        # torch takes neither foreign byte orders nor negative strides, and warns about
        # arrays that are read-only.
        native = value.astype(value.dtype.newbyteorder("="), copy=False)
        tensor = torch.from_numpy(np.require(native, requirements=["C", "W"]))
    except TypeError:
        raise ShapeError(
            f"the array has entries of type {value.dtype}, expected numbers"
        ) from None
    weights = (
        []
        if model is None
        else [weight for weight in model.parameters() if weight.is_floating_point()]
    )
    if not tensor.is_floating_point() or not weights:
        return tensor
    dtype = weights[0].dtype
    converted = tensor.to(dtype)
    # NaN equals nothing. It passes here, to be refused by `check_finite_inputs`, which
    # names the input.
    exact = (converted.to(tensor.dtype) == tensor) | tensor.isnan()
    if not bool(exact.all()):
        name = str(dtype).removeprefix("torch.")
        raise ShapeError(
            f"inputs are {value.dtype} and the model computes in {name}: radii would be about rounded inputs; use "
            f"x.astype(numpy.{name}) and certify what you run"
        )
    return converted


def _batch_count(x: Inputs, size: int) -> float:
    """How many batches there will be; infinite if a loader does not tell."""
    if isinstance(x, Tensor):
        check_dense(x)
    # A data set has single inputs, other things that can be counted are loaders of
    # batches.
    if isinstance(x, Tensor | TorchDataset) and isinstance(x, Sized):
        # At least 1: progress divides by it.
        return max(1, ceil(len(x) / size))
    if isinstance(x, Sized):
        return max(1, len(x))
    return inf


def _batches_of(
    x: Inputs, labels: Tensor | None, size: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Inputs and their labels, if there are any, from a tensor or from a loader."""
    # Before the test for iterables: a data set may be indexed only, and gives single
    # inputs.
    if isinstance(x, TorchDataset):
        x = DataLoader(x, size)
    if isinstance(x, Tensor):
        check_dense(x)
        if labels is not None:
            check_label_count(labels, len(x))
        for first in range(0, len(x), size):
            batch = slice(first, first + size)
            yield x[batch], None if labels is None else labels[batch]
        return
    if labels is not None:
        raise OptionError(
            "labels go with a tensor of inputs; let the loader give (inputs, labels) instead"
        )
    # Asked before the loop, which would fail with a message that helps nobody.
    if hasattr(x, "test"):
        raise ShapeError(
            "inputs are a lipcert.data.Dataset; pass dataset.test.pixels() and labels=dataset.test.labels"
        )
    if not isinstance(x, Iterable):
        raise ShapeError(
            f"inputs are {type(x).__name__}, expected a tensor, an array, a data set or a loader of tensors"
        )
    for given in x:
        if isinstance(given, Tensor):
            yield given, None
        elif isinstance(given, list | tuple) and len(given) == 2:
            yield given[0], given[1]
        else:
            raise ShapeError(
                f"the loader gives {type(given).__name__}, expected inputs or (inputs, labels)"
            )
