"""Data of one's own: arrays, tensors, .npz files and data sets of other libraries become the same data set."""

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import lipcert
from lipcert.data import load
from lipcert.errors import DataError

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.integers(0, 256, (20, 3, 5, 6), np.uint8)
LABELS = np.arange(20) % 4
NAMES = ("ant", "bee", "cat", "dog")


class Pictures(TorchDataset):
    """As torchvision gives them: an image of PIL, a number, and `classes`."""

    classes = NAMES

    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, k):
        return Image.fromarray(IMAGES[k].transpose(1, 2, 0)), int(LABELS[k])


class Rows(list):
    """As Hugging Face gives them: dictionaries, with the names of the classes in `features`."""

    features: ClassVar = {"label": SimpleNamespace(names=list(NAMES))}


def test_all_forms_are_the_same_data(tmp_path):
    np.savez(tmp_path / "mine.npz", images=IMAGES, labels=LABELS)
    rows = Rows(
        {"image": image[0], "label": int(label)}
        for image, label in zip(Pictures(), LABELS, strict=True)
    )
    forms = [
        (IMAGES, LABELS),
        (torch.tensor(IMAGES), torch.tensor(LABELS)[:, None]),
        TensorDataset(torch.tensor(IMAGES), torch.tensor(LABELS)),
        (IMAGES.transpose(0, 2, 3, 1), list(LABELS)),
        (IMAGES.astype(np.int64), LABELS.astype(np.int32)),
        tmp_path / "mine.npz",
        str(tmp_path / "mine.npz"),
        Pictures(),
        rows,
    ]
    first = load(forms[0])
    assert first.input_shape == (3, 5, 6)
    assert (len(first.train), len(first.test)) == (16, 4)
    for form in forms[1:]:
        assert load(form).checksum == first.checksum
    assert load(Pictures()).class_names == load(rows).class_names == NAMES
    assert first.class_names == ("0", "1", "2", "3")
    assert "channels moved" in load(forms[3]).note
    assert load(first) is first


def test_splits_of_ones_own(tmp_path):
    halves = {
        "x_train": IMAGES[:12],
        "y_train": LABELS[:12],
        "x_test": IMAGES[12:],
        "y_test": LABELS[12:],
    }
    np.savez(tmp_path / "split.npz", **halves)
    pairs = [
        ((IMAGES[:12], LABELS[:12]), (IMAGES[12:], LABELS[12:])),
        {"train": (IMAGES[:12], LABELS[:12]), "val": (IMAGES[12:], LABELS[12:])},
        tmp_path / "split.npz",
    ]
    for pair in pairs:
        dataset = load(pair)
        assert torch.equal(dataset.test.images, torch.tensor(IMAGES[12:]))
        assert dataset.validation is None


def test_numbers_in_the_unit_interval_of_any_shape():
    x = GENERATOR.random((20, 7))
    dataset = load((x, LABELS))
    assert dataset.input_shape == (7,)
    assert dataset.train.pixels().dtype == torch.float32
    assert bool(dataset.in_dtype(torch.float64).test.pixels().dtype == torch.float64)
    assert load((IMAGES[:, 0], LABELS)).input_shape == (1, 5, 6)
    assert load((x, LABELS)).checksum != load((np.sqrt(x), LABELS)).checksum


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((IMAGES / 1.0, LABELS), r"inputs of tuple are from 0 to 255, expected numbers in \[0, 1\]; divide by 255"),
        ((IMAGES - 0.5, LABELS), r"from -0.5 to 254.5, .*; scale them, and let the model undo it"),
        ((IMAGES * np.nan, LABELS), r"from nan to nan, expected numbers in \[0, 1\]"),
        ((IMAGES, LABELS / 1.0), r"labels of tuple are float64 \(20,\), expected integers \(20,\)"),
        ((IMAGES, LABELS[:7]), r"labels of tuple are int64 \(7,\), expected integers \(20,\)"),
        ((IMAGES, LABELS - 1), r"contain -1, expected 0 or more"),
        ((IMAGES[:0], LABELS[:0]), r"have the shape \(0, 3, 5, 6\), expected \(N, …\), not empty"),
        (IMAGES, r"data are ndarray, expected a lipcert.data.Dataset, a pair \(inputs, labels\)"),
        ((3, 4), r"data are int, expected a lipcert.data.Dataset"),
        (7, r"data are int, expected"),
        (DataLoader(Pictures()), r"data are a DataLoader; pass the data set that it draws from, its .dataset"),
        ([(IMAGES[0], 0), (IMAGES[0, :1], 1), (IMAGES[0], 1)], r"inputs of list differ: .*\(3, 5, 6\) and .*\(1, "),
        ([(IMAGES[0], "ant")] * 3, r"label of example 0 is 'ant', expected the number of a class"),
        ([{"picture": 1, "label": 2}] * 3, r"example 0 has the keys picture, label; expected image and label"),
        ({"a": IMAGES, "b": LABELS}, r"the arrays are a, b; expected x and y, or x_train"),
        ({"left": (IMAGES, LABELS)}, r"the data have the split 'left', expected train, test"),
        ({"test": (IMAGES, LABELS), "val": (IMAGES, LABELS)}, r"has the splits test, validation; expected train and"),
    ],
)  # fmt: skip
def test_what_is_no_data_is_named(given, message):
    with pytest.raises(DataError, match=message):
        load(given)


def test_a_damaged_file_and_a_file_that_holds_code_are_refused(tmp_path):
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 no more")
    with pytest.raises(
        DataError,
        match=r"broken.npz is not an .npz file of plain arrays, or is damaged",
    ):
        lipcert.data.load(tmp_path / "broken.npz")
    np.savez(tmp_path / "pickled.npz", x=np.array([{"a": 1}], dtype=object), y=LABELS)
    with pytest.raises(
        DataError, match=r"pickled.npz is not an .npz file of plain arrays"
    ):
        lipcert.data.load(tmp_path / "pickled.npz")
