"""From the configuration to a network, its estimators and its loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipcert.bounds.estimator import Estimator
from lipcert.data import Dataset
from lipcert.errors import ModelError
from lipcert.losses import Loss, OwnLoss
from lipcert.models.building import build_network
from lipcert.models.reading import weights_file
from lipcert.models.weights import load_weights
from lipcert.network.build import trace
from lipcert.network.normal_form import Network
from lipcert.network.states import fastest_layout
from lipcert.training.config import TrainConfig

_MONITOR_ITERATIONS = 10


def build_model(
    config: TrainConfig,
    input_shape: tuple[int, ...],
    classes: int,
    given: nn.Module | None = None,
) -> nn.Module:
    """The network at its initial weights, which depend on the seed only, unless it was given or has weights already."""
    model = build_network(
        config.model,
        input_shape,
        classes,
        seed=config.seed,
        input_range=config.input_range,
        given=given,
    )
    if config.init == "orthogonal":
        _initialise_orthogonally(model, config.seed)
    # After any other initialisation, which would overwrite the weights.
    if config.init_from:
        load_weights(model, weights_file(config.init_from))
    return model


@dataclass(frozen=True)
class Prepared:
    """The network at its initial weights, its capture, which all estimators share, and how inputs lie in memory."""

    model: nn.Module
    network: Network
    memory_format: torch.memory_format

    @classmethod
    def of(
        cls, config: TrainConfig, dataset: Dataset, given: nn.Module | None = None
    ) -> Prepared:
        model = build_model(config, dataset.input_shape, dataset.classes, given)
        memory_format = fastest_layout(model, dataset.input_shape)
        # Before any step and any folder: a network that cannot be followed should fail
        # within seconds.
        network = trace(model, dataset.input_shape, training=True)
        if network.classes != dataset.classes:
            outputs = f"{network.classes} output{'s' * (network.classes > 1)}"
            raise ModelError(
                f"{config.model} has {outputs}, expected {dataset.classes}: as many "
                "as the data have classes"
            )
        if isinstance(config.loss, OwnLoss):
            config.loss.try_out(dataset.classes)
        return cls(model, network, memory_format)


def build_estimators(config: TrainConfig, prepared: Prepared) -> dict[str, Estimator]:
    """ "estimator" gives the constants of the loss; "naive" and "liplt" are monitored once an epoch, pairwise."""
    model, network, chosen = prepared.model, prepared.network, config.estimator
    own = Estimator(
        model, network.input_shape, chosen.method, chosen.target, chosen.power_iterations,
        seed=config.seed, accelerated=chosen.accelerated, network=network,
    )  # fmt: skip
    estimators = {"estimator": own}
    # One capture for all three, and vectors of their own: monitoring leaves the
    # constants of the loss alone.
    for method in ("naive", "liplt"):
        estimators[method] = Estimator(
            model,
            network.input_shape,
            method,
            "pairwise",
            _MONITOR_ITERATIONS,
            seed=config.seed,
            network=network,
        )
    return estimators


def objective(
    config: TrainConfig, logits: Tensor, targets: Tensor, constants: Tensor | None
) -> Loss:
    """The configured loss; without constants, its first term alone (standard training and the warm-up)."""
    if constants is None:
        value = config.loss.first_term(logits, targets)
        return Loss(value, value, torch.zeros_like(value))
    return config.loss(logits, targets, constants)


@torch.no_grad()
def _initialise_orthogonally(model: nn.Module, seed: int) -> None:
    # Its own generator: the global one is the caller's.
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(module.weight, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
