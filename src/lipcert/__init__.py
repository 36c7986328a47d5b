"""Certified robustness of PyTorch classifiers: LipLT Lipschitz bounds and what follows from them."""

from lipcert import data, errors, layers, losses, zoo
from lipcert.bounds.bound import Bound
from lipcert.bounds.compute import bound
from lipcert.bounds.estimator import Estimate, Estimator
from lipcert.bounds.fit import FitOptions
from lipcert.bounds.sampled import estimate_sampled
from lipcert.certificate import Certificates, CertifiedClassifier, certify
from lipcert.errors import LipcertError, UnsupportedError
from lipcert.network import Call, Network, Slope, register_rule, trace
from lipcert.norms.certified import NormOptions
from lipcert.training import Run, TrainConfig, train

__version__ = "0.1.0"

__all__ = [
    "Bound",
    "Call",
    "Certificates",
    "CertifiedClassifier",
    "Estimate",
    "Estimator",
    "FitOptions",
    "LipcertError",
    "Network",
    "NormOptions",
    "Run",
    "Slope",
    "TrainConfig",
    "UnsupportedError",
    "bound",
    "certify",
    "data",
    "errors",
    "estimate_sampled",
    "layers",
    "losses",
    "register_rule",
    "trace",
    "train",
    "zoo",
]
