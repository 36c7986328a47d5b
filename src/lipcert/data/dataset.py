"""Data sets as plain tensors in memory: bytes as stored, float pixels in [0, 1] on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipcert.errors import DataError, OptionError

SPLITS = {
    "train": "train",
    "test": "test",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
}
"""What splits are called in folders, files and dictionaries."""
TEST_FRACTION = 0.2
"""The part of each class that becomes the test split where a data set has none of its own."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images, or other inputs, and labels of one split.

    images: uint8 (N, …), usually (N, C, H, W); the pixel value is images / maximum, in
    [0, 1], never normalised. Or the pixel values themselves, as float32.
    labels: int64 (N,).
    dtype: of the pixels.
    """

    images: Tensor
    labels: Tensor
    maximum: int = 255
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        kinds = (torch.uint8, torch.float32)
        if (
            self.images.dtype not in kinds
            or self.images.ndim < 2
            or 0 in self.images.shape
        ):
            found = f"{self.images.dtype} {tuple(self.images.shape)}"
            raise DataError(
                f"images: expected uint8 or float32 (N, C, H, W), got {found}"
            )
        if (
            self.labels.dtype != torch.int64
            or self.labels.shape != self.images.shape[:1]
        ):
            raise DataError(
                f"labels: expected int64 ({len(self.images)},), got "
                f"{self.labels.dtype} {tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return f"Split({len(self):,} images of {tuple(self.images.shape[1:])})"

    def pixels(self, index: Tensor | slice | None = None) -> Tensor:
        """Pixels in [0, 1] of the images at the index, or of all."""
        if index is None:
            index = slice(None)
        # Converted after indexing: all of CIFAR-10 in float32 would be four times the
        # size of its bytes.
        chosen = self.images[index].to(self.dtype)
        if self.images.is_floating_point():
            return chosen
        # Divided in the final dtype: k/255 is rounded once, and differently in float32 and in float64.
        return chosen / self.maximum

    def take(self, index: Tensor | slice) -> Split:
        """The images and labels at the index, as a split of their own."""
        return replace(self, images=self.images[index], labels=self.labels[index])


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set.

    name: the name it is loaded by.
    title: what figures made from it have to be called, such as "CIFAR-10 (JPEG)".
    note: where the images come from and how they were split, in one sentence.
    validation: a third split, if the data set comes with one; it is in neither of the
    others.
    """

    name: str
    title: str
    train: Split
    test: Split
    class_names: tuple[str, ...]
    note: str
    validation: Split | None = None

    def __post_init__(self) -> None:
        for name, split in self.splits.items():
            # A label beyond the classes would index past the logits, in the middle of
            # training.
            outside = split.labels[(split.labels < 0) | (split.labels >= self.classes)]
            if len(outside):
                raise DataError(
                    f"{self.title}: a label of the {name} split is "
                    f"{int(outside[0])}, expected 0 to {self.classes - 1}"
                )

    def in_dtype(self, dtype: torch.dtype) -> Dataset:
        """The same data, with pixels of another dtype in the test split."""
        # Training stays in float32; what is certified may be float64.
        return replace(self, test=replace(self.test, dtype=dtype))

    def holding_out(self, count: int) -> Dataset:
        """The same data, with about so many training images kept aside as the validation split, evenly by class.

        Which ones is the same for every run.
        """
        if not count:
            return self
        if count >= len(self.train):
            raise OptionError(
                f"validation is {count}, expected less than the "
                f"{len(self.train)} training images"
            )
        # Seed 0 and not the run's: runs with different seeds are compared on the same
        # images.
        train, validation = split_by_seed(self.train, 0, count / len(self.train))
        note = (
            f"{self.note}; {len(validation):,} training images kept "
            "aside for validation"
        )
        return replace(self, train=train, validation=validation, note=note)

    @property
    def splits(self) -> dict[str, Split]:
        """The splits by name: train, test and, if there is one, validation."""
        splits = {"train": self.train, "test": self.test}
        if self.validation is not None:
            splits["validation"] = self.validation
        return splits

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) of one image."""
        return tuple(self.train.images.shape[1:])

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @cached_property
    def checksum(self) -> str:
        """SHA-256 over all pixels and labels: the same for the same data in any file format."""
        return content_checksum(self.splits)


def content_checksum(splits: Mapping[str, Split]) -> str:
    """SHA-256 over names, shapes, pixels and labels of splits, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(splits):
        split = splits[name]
        unit = "float" if split.images.is_floating_point() else split.maximum
        # Shapes and units are part of it: the same bytes as 28 × 28 or 784, or out of
        # 16 or 255, are other data.
        digest.update(f"{name} {tuple(split.images.shape)} {unit}\n".encode())
        digest.update(split.images.contiguous().numpy().data)
        # Little-endian on every machine.
        digest.update(split.labels.numpy().astype("<i8").data)
    return digest.hexdigest()


def split_from_arrays(
    images: NDArray[np.uint8], labels: NDArray[np.integer], maximum: int = 255
) -> Split:
    """A split from arrays of numpy, (N, C, H, W) and (N,)."""
    # torch warns about arrays that cannot be written to, as those of np.frombuffer.
    contiguous = np.require(images, requirements=["C", "W"])
    return Split(
        torch.from_numpy(contiguous),
        torch.from_numpy(np.array(labels, np.int64)),
        maximum,
    )


def split_by_seed(
    split: Split, seed: int, test_fraction: float = TEST_FRACTION
) -> tuple[Split, Split]:
    """(train, test): of every class, the same fraction goes to the test split, and at least one image to each."""
    if seed < 0:
        raise OptionError(f"seed is {seed}, expected 0 or more")
    generator = np.random.default_rng(seed)
    labels = split.labels.numpy()
    for_testing = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        if len(members) < 2:
            raise DataError(
                f"class {label} has a single image; a split into train and test "
                "needs two or more"
            )
        # Of 2 members one, of 10 two, of 1000 two hundred.
        count = min(max(round(test_fraction * len(members)), 1), len(members) - 1)
        for_testing[members[:count]] = True
    mask = torch.from_numpy(for_testing)
    return split.take(~mask), split.take(mask)


def split_note(seed: int, train: Split, test: Split) -> str:
    """How `split_by_seed` has split, in words."""
    return (
        f"split by seed {seed} into {len(train):,} to train on and "
        f"{len(test):,} to test on"
    )
