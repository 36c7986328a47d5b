"""Layers whose Lipschitz constants are known by construction, as modules with their rules."""

from lipcert.layers.rho import RhoLipschitzConv2d, RhoLipschitzLinear
from lipcert.layers.simple import (
    Abs,
    GroupSort,
    MaxMin,
    Mirrored,
    Normalize,
    Patches,
    Shift,
)

__all__ = [
    "Abs",
    "GroupSort",
    "MaxMin",
    "Mirrored",
    "Normalize",
    "Patches",
    "RhoLipschitzConv2d",
    "RhoLipschitzLinear",
    "Shift",
]
