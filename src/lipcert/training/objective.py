"""From the configuration to a network, its estimators and its loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipcert.bounds.estimator import Estimator
from lipcert.data import Dataset
from lipcert.losses import Loss
from lipcert.models import zoo
from lipcert.network.build import trace
from lipcert.network.normal_form import Network
from lipcert.training.config import TrainConfig

_MONITOR_ITERATIONS = 10


def build_model(config: TrainConfig, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network at its initial weights, which depend on the seed only; channels last if it has convolutions."""
    model = zoo.build(config.model, input_shape, classes, seed=config.seed, input_range=config.input_range)
    if config.init == "orthogonal":
        _initialise_orthogonally(model, config.seed)
    if has_convolutions(model):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


@dataclass(frozen=True)
class Prepared:
    """The network at its initial weights, and its capture, which all estimators share."""

    model: nn.Module
    network: Network

    @classmethod
    def of(cls, config: TrainConfig, dataset: Dataset) -> Prepared:
        model = build_model(config, dataset.input_shape, dataset.classes)
        return cls(model, trace(model, dataset.input_shape, training=True))


def build_estimators(config: TrainConfig, prepared: Prepared) -> dict[str, Estimator]:
    """ "estimator" gives the constants of the loss; "naive" and "liplt" are monitored once an epoch, pairwise."""
    model, network, chosen = prepared.model, prepared.network, config.estimator
    own = Estimator(
        model, network.input_shape, chosen.method, chosen.target, chosen.power_iterations,
        seed=config.seed, accelerated=chosen.accelerated, network=network,
    )  # fmt: skip
    estimators = {"estimator": own}
    for method in ("naive", "liplt"):
        estimators[method] = Estimator(
            model, network.input_shape, method, "pairwise", _MONITOR_ITERATIONS, seed=config.seed, network=network
        )
    return estimators


def objective(config: TrainConfig, logits: Tensor, labels: Tensor, constants: Tensor | None) -> Loss:
    """The configured loss; without constants, its first term alone (standard training and the warm-up)."""
    if constants is None:
        value = config.loss.first_term(logits, labels)
        return Loss(value, value, torch.zeros_like(value))
    return config.loss(logits, labels, constants)


@torch.no_grad()
def _initialise_orthogonally(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(module.weight, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
