"""Data sets in memory, with pixels in [0, 1]: loading, batches, augmentation."""

from lipcert.data.augment import Augmentation
from lipcert.data.batching import batch_indices
from lipcert.data.dataset import Dataset, Split
from lipcert.data.decoded import cache_dir
from lipcert.data.lookup import NAMES, load
from lipcert.data.sources import Source, register_source

__all__ = [
    "NAMES",
    "Augmentation",
    "Dataset",
    "Source",
    "Split",
    "batch_indices",
    "cache_dir",
    "load",
    "register_source",
]
