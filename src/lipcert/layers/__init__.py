"""Layers whose Lipschitz constants are known by construction, as modules with their rules."""

from lipcert.layers.rho import RhoLipschitzConv2d, RhoLipschitzLinear
from lipcert.layers.simple import Abs, GroupSort, MaxMin, Normalize, Shift

__all__ = [
    "Abs",
    "GroupSort",
    "MaxMin",
    "Normalize",
    "RhoLipschitzConv2d",
    "RhoLipschitzLinear",
    "Shift",
]
