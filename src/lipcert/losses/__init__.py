"""Training losses: CRM, signed radius, GloRo, LMT and the standard ones, as functions of logits, labels and constants.

Every loss takes logits z (B, K) and labels y (B,); the robust ones also take constants
L (K, K), where L_ij bounds the Lipschitz constant of z_i − z_j. Row y of L is read, its
diagonal is ignored. Gradients reach logits and constants. Everything is computed in the
wider dtype of logits and constants, at least float32. NaN logits give a NaN loss.

Adding a loss is a file of its own: a `TrainingLoss` with its options, under the name of
`loss.type` in configurations.
"""

from importlib import import_module
from pkgutil import iter_modules

from lipcert.losses.known_losses import (
    RADII,
    CrmLoss,
    GloroLoss,
    LmtLoss,
    SignedRadiusLoss,
    crm,
    gloro,
    lmt,
    signed_radius,
)
from lipcert.losses.loss import LOSSES, Loss, TrainingLoss, register_loss
from lipcert.losses.own_loss import OwnLoss
from lipcert.losses.radii import hard_radius, soft_radius
from lipcert.losses.standard_loss import BASES, StandardLoss, standard

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "BASES",
    "LOSSES",
    "RADII",
    "CrmLoss",
    "GloroLoss",
    "LmtLoss",
    "Loss",
    "OwnLoss",
    "SignedRadiusLoss",
    "StandardLoss",
    "TrainingLoss",
    "crm",
    "gloro",
    "hard_radius",
    "lmt",
    "register_loss",
    "signed_radius",
    "soft_radius",
    "standard",
]
