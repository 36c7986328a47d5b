"""Data sets in memory, with pixels in [0, 1]: loading, batches, augmentation."""

from lipcert.data.augment import Augmentation, augmentation
from lipcert.data.batching import batch_indices, batches
from lipcert.data.dataset import Dataset, Split
from lipcert.data.decoded import cache_dir
from lipcert.data.loading import NAMES, load

__all__ = [
    "NAMES",
    "Augmentation",
    "Dataset",
    "Split",
    "augmentation",
    "batch_indices",
    "batches",
    "cache_dir",
    "load",
]
