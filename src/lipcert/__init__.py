"""Certified robustness of PyTorch classifiers: LipLT Lipschitz bounds and what follows from them.

Names are imported when they are first used: `lipcert --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lipcert.version import VERSION

if TYPE_CHECKING:
    from lipcert import data, errors, layers, losses
    from lipcert.bounds.bound import Bound
    from lipcert.bounds.compute import bound
    from lipcert.bounds.estimates import Estimate
    from lipcert.bounds.estimator import Estimator
    from lipcert.bounds.fit import FitOptions
    from lipcert.bounds.sampled import estimate_sampled
    from lipcert.certificate import (
        Certificates,
        CertifiedAccuracy,
        CertifiedClassifier,
        SettledClassifier,
        certify,
    )
    from lipcert.errors import LipcertError, UnsupportedError
    from lipcert.local.certify_local import certify_local
    from lipcert.local.sharpening import Effort
    from lipcert.models import LoadedModel, load_model, zoo
    from lipcert.network import Call, Network, Slope, register_rule, trace
    from lipcert.norms.norm_options import NormOptions
    from lipcert.onnx_graphs import load_onnx
    from lipcert.runs import Run, Summary, pretrained
    from lipcert.training import TrainConfig, resume, train
    from lipcert.training.sweeping import sweep

__version__ = VERSION

__all__ = [
    "Bound",
    "Call",
    "Certificates",
    "CertifiedAccuracy",
    "CertifiedClassifier",
    "Effort",
    "Estimate",
    "Estimator",
    "FitOptions",
    "LipcertError",
    "LoadedModel",
    "Network",
    "NormOptions",
    "Run",
    "SettledClassifier",
    "Slope",
    "Summary",
    "TrainConfig",
    "UnsupportedError",
    "bound",
    "certify",
    "certify_local",
    "data",
    "errors",
    "estimate_sampled",
    "layers",
    "load_model",
    "load_onnx",
    "losses",
    "pretrained",
    "register_rule",
    "resume",
    "sweep",
    "trace",
    "train",
    "zoo",
]

_PLACES = {
    "Bound": "lipcert.bounds.bound",
    "Call": "lipcert.network",
    "Certificates": "lipcert.certificate",
    "CertifiedAccuracy": "lipcert.certificate",
    "CertifiedClassifier": "lipcert.certificate",
    "Effort": "lipcert.local.sharpening",
    "Estimate": "lipcert.bounds.estimates",
    "Estimator": "lipcert.bounds.estimator",
    "FitOptions": "lipcert.bounds.fit",
    "LipcertError": "lipcert.errors",
    "LoadedModel": "lipcert.models",
    "Network": "lipcert.network",
    "NormOptions": "lipcert.norms.norm_options",
    "Run": "lipcert.runs",
    "SettledClassifier": "lipcert.certificate",
    "Slope": "lipcert.network",
    "Summary": "lipcert.runs",
    "TrainConfig": "lipcert.training",
    "UnsupportedError": "lipcert.errors",
    "bound": "lipcert.bounds.compute",
    "certify_local": "lipcert.local.certify_local",
    "certify": "lipcert.certificate",
    "estimate_sampled": "lipcert.bounds.sampled",
    "load_model": "lipcert.models",
    "load_onnx": "lipcert.onnx_graphs",
    "pretrained": "lipcert.runs",
    "register_rule": "lipcert.network",
    "resume": "lipcert.training",
    "sweep": "lipcert.training.sweeping",
    "trace": "lipcert.network",
    "train": "lipcert.training",
    "zoo": "lipcert.models",
}
"""Where the names are defined; all others are modules of the package."""


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'lipcert' has no attribute {name!r}")
    if name in _PLACES:
        value = getattr(import_module(_PLACES[name]), name)
    else:
        try:
            value = import_module(f"lipcert.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"lipcert.{name}":
                raise
            raise AttributeError(
                f"module 'lipcert' has no attribute {name!r}"
            ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
