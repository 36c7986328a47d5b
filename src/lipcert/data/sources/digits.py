"""The digits that scikit-learn carries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lipcert.data.dataset import Dataset, split_by_seed, split_from_arrays, split_note
from lipcert.data.sources.source import Source, register_source


@register_source
class Digits(Source):
    """1,797 digits of 8×8 pixels with 17 levels of grey."""

    name = "digits"
    rank = 0

    def load(self, folders: Sequence[Path], *, seed: int, download: bool) -> Dataset:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        # Floats from 0 to 16 that are whole numbers: as bytes nothing is lost.
        images = bunch.images.astype(np.uint8)[:, None]
        train, test = split_by_seed(
            split_from_arrays(images, bunch.target, maximum=16), seed
        )
        note = f"scikit-learn's digits, {split_note(seed, train, test)}"
        return Dataset("digits", "digits", train, test, tuple("0123456789"), note)
