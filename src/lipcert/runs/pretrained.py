"""Certified classifiers that come with lipcert, with their figures."""

from __future__ import annotations

from pathlib import Path

from lipcert.certificate import CertifiedClassifier
from lipcert.errors import ModelError, check_choice
from lipcert.layout import MODEL
from lipcert.models import LoadedModel
from lipcert.models.reading import load_trained
from lipcert.models.shipped import shipped_folder, shipped_names
from lipcert.runs.summary import Summary, read_summary


class Pretrained(CertifiedClassifier):
    """A certified classifier that was trained here: x ↦ (logits, radius), for pixels in [0, 1].

    name: that of its preset.
    summary: what it reached on the test split, by guaranteed bounds.
    """

    def __init__(self, name: str, loaded: LoadedModel, summary: Summary) -> None:
        if loaded.earlier is None:
            raise ModelError(
                f"the bound of {name} is missing from this installation; "
                "install lipcert again"
            )
        # Checks that the shipped bound belongs to the shipped weights.
        super().__init__(loaded.network, loaded.earlier, loaded.longest_sum)
        self.name, self.summary = name, summary

    @property
    def command(self) -> str:
        """What trains it again."""
        return f"lipcert train {self.name} --set seed={self.summary.seed}"


def pretrained(name: str) -> Pretrained:
    """A trained network of lipcert with its guaranteed radii; `lipcert pretrained` lists all.

    Example:
        >>> classifier = lipcert.pretrained("digits")
        >>> logits, radius = classifier(torch.rand(2, 1, 8, 8, dtype=classifier.dtype))
        >>> classifier.summary.clean
        0.9...
    """
    folder = pretrained_folder(name)
    summary = read_summary(folder)
    # The figures of the summary are of this arithmetic.
    loaded = load_trained(folder / MODEL).executed_in(summary.execution)
    return Pretrained(name, loaded, summary)


def pretrained_folder(name: str) -> Path:
    """The run folder of a trained network that comes with lipcert."""
    check_choice("name", name, shipped_names())
    folder = shipped_folder(name)
    assert folder is not None
    return folder


def shipped_summary(name: str) -> Summary | None:
    """The figures of a trained network that comes with lipcert; None if there is none of this name."""
    folder = shipped_folder(name)
    # A folder of the user's with this name comes first.
    if folder is None or Path(name).exists():
        return None
    return read_summary(folder)
