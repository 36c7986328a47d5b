"""Certified robustness of PyTorch classifiers: LipLT Lipschitz bounds and what follows from them."""

from lipcert import data, errors, layers, losses
from lipcert.bounds.bound import Bound
from lipcert.bounds.compute import bound
from lipcert.bounds.estimator import Estimate, Estimator
from lipcert.bounds.fit import FitOptions
from lipcert.bounds.sampled import estimate_sampled
from lipcert.certificate import Certificates, CertifiedClassifier, certify
from lipcert.errors import LipcertError, UnsupportedError
from lipcert.models import LoadedModel, load_model, zoo
from lipcert.network import Call, Network, Slope, register_rule, trace
from lipcert.norms.certified import NormOptions
from lipcert.runs import Run, Summary
from lipcert.training import TrainConfig, train
from lipcert.version import VERSION

__version__ = VERSION

__all__ = [
    "Bound",
    "Call",
    "Certificates",
    "CertifiedClassifier",
    "Estimate",
    "Estimator",
    "FitOptions",
    "LipcertError",
    "LoadedModel",
    "Network",
    "NormOptions",
    "Run",
    "Slope",
    "Summary",
    "TrainConfig",
    "UnsupportedError",
    "bound",
    "certify",
    "data",
    "errors",
    "estimate_sampled",
    "layers",
    "load_model",
    "losses",
    "register_rule",
    "trace",
    "train",
    "zoo",
]
