"""Examples out of objects: pairs of arrays, and data sets that give one example at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lipcert.errors import DataError

_INPUT_KEYS = ("image", "img", "images", "pixel_values", "x", "input")
_LABEL_KEYS = ("label", "labels", "y", "target", "fine_label")


@dataclass(frozen=True)
class Examples:
    """Inputs and labels as they were given, and the names of the classes, if they were too."""

    inputs: Any
    labels: Any
    class_names: tuple[str, ...] | None


def is_array(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def read_examples(given: object, forms: str) -> Examples:
    """The examples of a pair of arrays or of a data set; `forms` says what is expected."""
    if isinstance(given, TensorDataset) and len(given.tensors) == 2:
        given = given.tensors
    if isinstance(given, tuple | list) and len(given) == 2 and is_array(given[0]):
        return Examples(given[0], given[1], None)
    if isinstance(given, DataLoader):
        raise DataError(
            "data are a DataLoader; pass the data set that it draws from, its .dataset"
        )
    if (
        is_array(given)
        or not hasattr(given, "__getitem__")
        or not hasattr(given, "__len__")
    ):
        raise DataError(f"data are {type(given).__name__}, expected {forms}")
    # From here on one example at a time, by index: data sets of torch need not be
    # iterable.
    data: Any = given
    inputs, labels = [], []
    for k in range(len(data)):
        x, label = _example(data[k], k)
        inputs.append(_tensor(x, k))
        labels.append(_label(label, k))
    if not inputs:
        raise DataError(f"the data set {type(given).__name__} is empty")
    # Before torch.stack, whose message names neither.
    kinds = list(dict.fromkeys(f"{x.dtype} {tuple(x.shape)}" for x in inputs))
    if len(kinds) > 1:
        raise DataError(
            f"the inputs of {type(given).__name__} differ: {kinds[0]} and "
            f"{kinds[1]}; resize them"
        )
    return Examples(torch.stack(inputs), torch.tensor(labels), _class_names(data))


def _class_names(data: Any) -> tuple[str, ...] | None:
    """The names of classes as torchvision (`classes`) and Hugging Face (`features`) keep them."""
    names = getattr(data, "classes", None)
    features = getattr(data, "features", None)
    if names is None and isinstance(features, Mapping):
        for key in _LABEL_KEYS:
            names = names or getattr(features.get(key), "names", None)
    if not isinstance(names, list | tuple):
        return None
    return tuple(map(str, names))


def _example(item: Any, k: int) -> tuple[Any, Any]:
    """Input and label of one example."""
    if isinstance(item, Mapping):
        found_inputs = [key for key in _INPUT_KEYS if key in item]
        found_labels = [key for key in _LABEL_KEYS if key in item]
        if found_inputs and found_labels:
            return item[found_inputs[0]], item[found_labels[0]]
        raise DataError(
            f"example {k} has the keys {', '.join(map(str, item))}; expected image "
            "and label among them"
        )
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise DataError(
        f"example {k} is {type(item).__name__}, expected (input, label) or a "
        "dictionary with image and label"
    )


def _tensor(x: Any, k: int) -> Tensor:
    """An image of PIL, an array or numbers as a tensor; channels of a coloured image of PIL come first."""
    if isinstance(x, Tensor):
        return x
    try:
        array = np.asarray(x)
        tensor = torch.from_numpy(array.copy())
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the input of example {k} is {type(x).__name__}, expected an "
            "image or numbers"
        ) from error
    # Arrays are taken as they are; only an image of PIL is known to be (H, W) or (H, W,
    # C).
    if isinstance(x, np.ndarray | list | tuple):
        return tensor
    return tensor[None] if tensor.ndim == 2 else tensor.movedim(-1, 0)


def _label(label: Any, k: int) -> int:
    try:
        number = int(label)
        # int(2.7) is 2: what is no whole number is no label.
        if number >= 0 and number == label:
            return number
    except (TypeError, ValueError, RuntimeError):  # several numbers, or none
        pass
    raise DataError(
        f"the label of example {k} is {label!r}, expected the number of a class, from 0"
    )
