"""What a program gives to a run as objects: a model, data and a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from lipcert import data as datasets
from lipcert.errors import ConfigError, DataError, ModelError
from lipcert.losses import OwnLoss
from lipcert.own_code import GIVEN, given_name
from lipcert.training.config import TrainConfig

Config = TrainConfig | Mapping[str, Any] | str | Path


@dataclass(frozen=True)
class Given:
    """The objects, each None if the configuration names it; `initial` has the weights that the model came with."""

    model: nn.Module | None = None
    dataset: datasets.Dataset | None = None
    loss: Callable[..., Any] | None = None
    initial: nn.Module | None = None

    @classmethod
    def of(
        cls, model: nn.Module | None, data: object, loss: Callable[..., Any] | None
    ) -> Given:
        if model is not None and not isinstance(model, nn.Module):
            raise ModelError(
                f"model is {type(model).__name__}, expected a torch.nn.Module"
            )
        dataset = None
        if data is not None:
            dataset = datasets.load(data)
        # The copy is for the twin: the model itself is trained in place.
        return cls(model, dataset, loss, deepcopy(model))

    def names(self) -> dict[str, Any]:
        """What stands for the objects in a configuration."""
        names: dict[str, Any] = {}
        if self.model is not None:
            names["model"] = given_name(self.model)
        if self.dataset is not None:
            name = self.dataset.name
            # A name that `lipcert.data.load` finds needs no object when the run is
            # continued.
            is_found_again = name in datasets.NAMES or Path(name).exists()
            names["data"] = name if is_found_again else f"{name}{GIVEN}"
        if self.loss is not None:
            names["loss"] = OwnLoss.of(self.loss)
        return names

    def configured(self, config: Any) -> TrainConfig:
        """The configuration of a new run with these objects."""
        if isinstance(config, Mapping):
            return TrainConfig.parse({**config, **self.names()}, "config")
        if isinstance(config, str | Path):
            config = TrainConfig.named(config)
        if not isinstance(config, TrainConfig):
            kinds = (
                "a TrainConfig, a dictionary, or the name of a preset or of a TOML file"
            )
            raise ConfigError(f"config is {type(config).__name__}, expected {kinds}")
        return config.model_copy(update=self.names())

    def continued(self, config: TrainConfig) -> TrainConfig:
        """The configuration of a run that is continued: its names stay, its loss is the given one."""
        if self.loss is None:
            return config
        own = OwnLoss.of(self.loss)
        # Functions cannot be compared, their names can: half a run with each of two
        # losses is no run at all.
        if config.loss.type != own.type:
            expected = config.loss.type.removesuffix(GIVEN)
            raise ConfigError(
                f"the run was begun with the loss {expected}, not "
                f"{own.type.removesuffix(GIVEN)}"
            )
        return config.model_copy(update={"loss": own})

    def load(
        self, config: TrainConfig, data_dir: str | Path | None
    ) -> datasets.Dataset:
        """The given data, or those that the configuration names."""
        if self.dataset is not None:
            return self.dataset
        if config.data.endswith(GIVEN):
            name = config.data.removesuffix(GIVEN)
            raise DataError(
                f"the data {name} were given in Python and are not stored; give "
                "them again as data="
            )
        return datasets.load(config.data, data_dir)

    def for_twin(self) -> Given:
        """For the same network, trained again from its first weights."""
        return replace(self, model=deepcopy(self.initial), loss=None)
