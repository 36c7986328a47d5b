"""Logits, labels and constants, by hand and drawn, and all losses that use constants."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from lipcert.losses import crm, gloro, lmt, signed_radius

LOGITS = torch.tensor(
    [[3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, 0.5]], dtype=torch.float64
)
LABELS = torch.tensor([0, 1, 2])  # the third is misclassified
CONSTANTS = torch.tensor(
    [[9.0, 2.0, 1.0], [2.0, 9.0, 4.0], [1.0, 4.0, 9.0]], dtype=torch.float64
)
HARD = [1.0, 0.25, -0.5]  # their radii

ROBUST_LOSSES = {
    "crm": partial(crm, t=5.0, r0=2.2, weight=30.0),
    "crm-hard": partial(crm, t=5.0, r0=2.2, weight=30.0, radius="hard"),
    "crm-margin": partial(crm, t=5.0, r0=2.2, weight=3.0, base="soft-margin"),
    "crm-smoothing": partial(crm, t=5.0, r0=2.2, weight=3.0, base="label-smoothing"),
    "signed-radius": partial(signed_radius, t=5.0, r0=0.3),
    "gloro": partial(gloro, epsilon=0.3),
    "trades": partial(gloro, epsilon=0.3, weight=4.0),
    "lmt": partial(lmt, epsilon=0.3),
}
every_robust_loss = pytest.mark.parametrize(
    "loss", ROBUST_LOSSES.values(), ids=ROBUST_LOSSES.keys()
)

Problem = tuple[Tensor, Tensor, Tensor]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Logits, labels and constants of random size, float64; not symmetric, to tell rows from columns."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    size, classes = draw(st.integers(1, 8)), draw(st.integers(2, 12))
    logits = 5.0 * torch.randn(size, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (size,), generator=generator)
    constants = (
        torch.rand(classes, classes, generator=generator, dtype=torch.float64) + 0.05
    )
    return logits, labels, constants
