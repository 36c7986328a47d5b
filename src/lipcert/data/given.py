"""Data of one's own: arrays and tensors, .npz files, and data sets of torch, torchvision and Hugging Face."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lipcert.data.dataset import SPLITS, Dataset, Split, split_by_seed, split_note
from lipcert.data.examples import Examples, is_array, read_examples
from lipcert.data.given_arrays import checked_inputs, checked_labels
from lipcert.errors import DataError

_INPUTS = ("images", "image", "x", "inputs", "data")
_LABELS = ("labels", "label", "y", "targets")
_WHOLE = "whole"  # the only split of data that are not split
_FORMS = (
    "a lipcert.data.Dataset, a pair (inputs, labels) of arrays or tensors, a "
    "torch.utils.data.Dataset of such pairs, a "
    "pair (train, test) of those, or a dictionary of them by train, test and validation"
)


@dataclass(frozen=True)
class _Part:
    """One split of what was given."""

    split: Split
    class_names: tuple[str, ...] | None
    remark: str


def read_given(given: object, *, name: str = "", seed: int = 0) -> Dataset:
    """The data set that an object holds; without a test split, one is cut off by the seed.

    Inputs are bytes, or numbers in [0, 1]; labels count from 0. With train and val
    only, val is the test split.
    """
    if isinstance(given, Dataset):
        return given
    name = name or type(given).__name__
    parts = {}
    for split, examples in _examples_by_split(given).items():
        what = name if split == _WHOLE else f"{name}, {split}"
        parts[split] = _part(examples, what)
    splits = {split: part.split for split, part in parts.items()}
    # What was done to several splits alike is said once.
    remarks = dict.fromkeys(part.remark for part in parts.values() if part.remark)
    if len(splits) == 1:
        (only,) = splits.values()
        splits["train"], splits["test"] = split_by_seed(only, seed)
        remarks[split_note(seed, splits["train"], splits["test"])] = None
    # Something has to be tested on. Beside a test split, validation stays what it is.
    elif "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    if "train" not in splits or "test" not in splits:
        raise DataError(
            f"{name} has the splits {', '.join(splits)}; expected train and test"
        )
    title, classes, note = Path(name).name, _class_names(parts), "; ".join(remarks)
    train, test = splits["train"], splits["test"]
    validation = splits.get("validation")
    return Dataset(name, title, train, test, classes, note, validation)


def read_npz(path: Path, seed: int = 0) -> Dataset:
    """The data set in an .npz file: the arrays x and y, or x_train, y_train, x_test and y_test; images, labels also."""
    try:
        # Pickles run code.
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise DataError(
            f"{path} is not an .npz file of plain arrays, or is damaged ({error})"
        ) from None
    return read_given(arrays, name=str(path), seed=seed)


def _examples_by_split(given: object) -> dict[str, Examples]:
    """What was given, taken apart into splits."""
    if isinstance(given, Mapping):
        # {"x": …, "y": …} are arrays, {"train": (x, y), …} are splits.
        if all(is_array(value) for value in given.values()):
            return _named_arrays(given)
        unknown = [str(key) for key in given if str(key).lower() not in SPLITS]
        if unknown or not given:
            raise DataError(
                f"the data have the split {(unknown or ['(none)'])[0]!r}, expected "
                f"{', '.join(SPLITS)}"
            )
        parts = {}
        for key, value in given.items():
            parts[SPLITS[str(key).lower()]] = read_examples(value, _FORMS)
        return parts
    if isinstance(given, tuple | list) and len(given) == 2 and not is_array(given[0]):
        train, test = (read_examples(part, _FORMS) for part in given)
        return {"train": train, "test": test}
    return {_WHOLE: read_examples(given, _FORMS)}


def _named_arrays(arrays: Mapping[str, Any]) -> dict[str, Examples]:
    """Arrays by name: "x" and "y", or "x_train", "train_images" and so on."""
    found: dict[str, dict[str, Any]] = {}
    for key, array in arrays.items():
        # x_train, train_images and X-train have the same words in some order.
        words = key.lower().replace("-", "_").split("_")
        split, kind = _WHOLE, ""
        for word in words:
            if word in SPLITS:
                split = SPLITS[word]
            elif word in _INPUTS:
                kind = "inputs"
            elif word in _LABELS:
                kind = "labels"
        if kind:
            found.setdefault(split, {})[kind] = array
    complete = {split: pair for split, pair in found.items() if len(pair) == 2}
    # Inputs without labels are a mistake in a name, not a split to be left out.
    if not complete or len(complete) < len(found):
        listed = ", ".join(map(str, arrays)) or "none"
        raise DataError(
            f"the arrays are {listed}; expected x and y, or x_train, y_train, "
            "x_test and y_test"
        )
    return {
        split: Examples(pair["inputs"], pair["labels"], None)
        for split, pair in complete.items()
    }


def _part(examples: Examples, what: str) -> _Part:
    inputs, remark = checked_inputs(examples.inputs, what)
    labels: Tensor = checked_labels(examples.labels, len(inputs), what)
    return _Part(Split(inputs, labels), examples.class_names, remark)


def _class_names(parts: Mapping[str, _Part]) -> tuple[str, ...]:
    """Those that the data come with, or numbers."""
    count = 1 + max(int(part.split.labels.max()) for part in parts.values())
    for part in parts.values():
        # Fewer names than labels belong to something else.
        if part.class_names is not None and len(part.class_names) >= count:
            return part.class_names
    return tuple(map(str, range(max(count, 2))))
