"""Certified accuracy over batches and processes, in the form of a torchmetrics metric."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from lipcert.errors import OptionError, ShapeError


class CertifiedAccuracy(nn.Module):
    """The shares of inputs that are classified correctly, and certified at each ε besides.

    `update` takes what a `CertifiedClassifier` returns, and labels; `compute` gives
    {0.0: clean accuracy, ε: certified accuracy, …} over all batches and, where
    torch.distributed is at work, over all processes; `reset` begins anew.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> classifier = lipcert.CertifiedClassifier(model, lipcert.bound(model, (4,)))
        >>> metric = lipcert.CertifiedAccuracy([0.25, 0.5])
        >>> for x, labels in [(torch.rand(2, 4), torch.tensor([0, 1]))]:
        ...     metric.update(*classifier(x), labels)
        >>> list(metric.compute())
        [0.0, 0.25, 0.5]
    """

    counts: Tensor

    def __init__(self, epsilons: Sequence[float] | float) -> None:
        super().__init__()
        listed = [epsilons] if isinstance(epsilons, int | float) else list(epsilons)
        if not listed or not all(0 < epsilon < float("inf") for epsilon in listed):
            raise OptionError(
                f"epsilons are {listed}, expected positive numbers such as 0.25"
            )
        # A dictionary keeps each ε once and in its order; `compute` has them as keys.
        self.epsilons = [float(epsilon) for epsilon in dict.fromkeys(listed)]
        # How many inputs there were, are correct, and are certified at each ε.
        self.register_buffer(
            "counts",
            torch.zeros(2 + len(self.epsilons), dtype=torch.int64),
            persistent=False,
        )

    @torch.no_grad()
    def update(self, logits: Tensor, radius: Tensor, labels: Tensor) -> None:
        """Count a batch."""
        if (
            logits.dim() != 2
            or radius.shape != logits.shape[:1]
            or labels.shape != logits.shape[:1]
        ):
            shapes = (
                f"{tuple(logits.shape)}, {tuple(radius.shape)} and "
                f"{tuple(labels.shape)}"
            )
            raise ShapeError(
                f"logits, radius and labels have the shapes {shapes}, expected "
                "(B, K), (B,) and (B,)"
            )
        if logits.shape[1] < 2:
            raise ShapeError(
                "there is one logit; pass what CertifiedClassifier "
                "returns, which are two"
            )
        correct = logits.argmax(1) == labels.to(logits.device)
        # Counts instead of shares: they add up over batches of different sizes and over
        # processes.
        counts = [len(correct), int(correct.sum())]
        for epsilon in self.epsilons:
            counts.append(int((correct & (radius >= epsilon)).sum()))
        self.counts += torch.tensor(counts, device=self.counts.device)

    forward = update

    def compute(self) -> dict[float, float]:
        """The shares, by ε; that at 0 is the clean accuracy."""
        # A copy: reduced in place, a second call would count all processes twice.
        counts = self.counts.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(counts)
        total, *numbers = counts.tolist()
        if total == 0:
            raise OptionError("there is nothing to compute yet; call update first")
        return {
            epsilon: number / total
            for epsilon, number in zip([0.0, *self.epsilons], numbers, strict=True)
        }

    def reset(self) -> None:
        self.counts.zero_()
