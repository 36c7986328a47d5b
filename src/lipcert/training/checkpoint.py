"""The state of a run as one safetensors file: complete or absent, verified when it is read, never pickled."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from lipcert.errors import CheckpointError
from lipcert.files import replace_file, tensors_digest

_FORMAT = "1"


@dataclass(frozen=True)
class Position:
    """Where a run is: the next step of an epoch, and the sums over the epoch's steps so far."""

    epoch: int = 0
    step: int = 0
    sums: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TrainingState:
    """Everything that changes during training.

    Nothing else does: batches, augmentation and dropout are random functions of (seed,
    epoch, step).
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    estimators: Mapping[str, nn.Module]

    def tensors(self) -> dict[str, Tensor]:
        """All state by name: model.*, estimator name.*, optimizer.<parameter>.<quantity>."""
        result = self._module_tensors()
        for name, parameter in self._trained():
            for optimizer in self.optimizers:
                # By the name of the parameter: Adam's own state dict numbers them,
                # which other groups would renumber.
                for quantity, tensor in optimizer.state.get(parameter, {}).items():
                    result[f"optimizer.{name}.{quantity}"] = tensor
        return {
            name: tensor.detach().cpu().contiguous() for name, tensor in result.items()
        }

    def _module_tensors(self) -> dict[str, Tensor]:
        """Those of the model and of the estimators, not copied."""
        result = {}
        for prefix, module in {"model": self.model, **self.estimators}.items():
            for name, tensor in module.state_dict().items():
                result[f"{prefix}.{name}"] = tensor
        return result

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()
        for prefix, estimator in self.estimators.items():
            yield from estimator.named_parameters(prefix)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        """Put the state back in place, which keeps every memory format and so every later rounding."""
        wanted = self._module_tensors()
        moments = {name for name in tensors if name.startswith("optimizer.")}
        # The first name that only one of both has.
        for name in sorted(wanted.keys() ^ (tensors.keys() - moments)):
            raise CheckpointError(
                f"{path} does not fit the configuration: {name} is only on one side"
            )
        for name, tensor in wanted.items():
            if tensor.shape != tensors[name].shape:
                shapes = f"{tuple(tensors[name].shape)}, expected {tuple(tensor.shape)}"
                raise CheckpointError(
                    f"{path} does not fit the configuration: {name} has shape {shapes}"
                )
            # In place: parameters that the optimizers hold stay the same objects.
            tensor.copy_(tensors[name])
        for optimizer in self.optimizers:
            optimizer.state.clear()
        for name, parameter in self._trained():
            state = {}
            for stored in moments:
                # optimizer.0.weight.exp_avg: the parameter 0.weight, its quantity
                # exp_avg.
                owner, _, quantity = stored.removeprefix("optimizer.").rpartition(".")
                if owner == name:
                    state[quantity] = _like(tensors[stored], parameter)
            if state:
                self._optimizer_of(parameter).state[parameter] = state

    def _optimizer_of(self, parameter: nn.Parameter) -> Optimizer:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                # `is`, because == compares the entries of tensors.
                if any(parameter is other for other in group["params"]):
                    return optimizer
        raise KeyError("a parameter that no optimizer moves")


def _like(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """A copy, in the parameter's memory format if it has its shape."""
    if tensor.shape == parameter.shape:
        # Sums in another memory format are rounded in another order: a resumed run
        # would end with other weights.
        return torch.empty_like(parameter).copy_(tensor)
    return tensor.clone()


def write_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], position: Position, config: str
) -> None:
    """Replace the checkpoint as a whole; `config` is the digest of the configuration it belongs to."""
    where = {
        "epoch": position.epoch,
        "step": position.step,
        "sums": dict(position.sums),
    }
    metadata = {
        "lipcert.checkpoint": _FORMAT,
        "position": json.dumps(where),
        "config": config,
        "sha256": tensors_digest(tensors),
    }
    with replace_file(path) as temporary:
        # Position, configuration and tensors are one file, so that they cannot belong
        # to different moments.
        save_file(dict(tensors), temporary, metadata=metadata)
        with temporary.open("rb") as file:
            # Before the file takes the place of the last good one: after a power cut
            # one of both is complete.
            os.fsync(file.fileno())


def read_checkpoint(path: Path, config: str) -> tuple[dict[str, Tensor], Position]:
    """The tensors and the position; a file that is truncated, altered or of another run is refused by name."""
    remedy = "remove it to train from the start"
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a checkpoint ({error}); {remedy}"
        ) from None
    if metadata.get("lipcert.checkpoint") != _FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of this version of lipcert; {remedy}"
        )
    if metadata.get("sha256") != tensors_digest(tensors):
        raise CheckpointError(
            f"{path} is damaged: its contents do not have the checksum it "
            f"states; {remedy}"
        )
    # Tensors would fit, and training would go on with another loss or schedule than
    # config.toml says.
    if metadata.get("config") != config:
        raise CheckpointError(
            f"{path} belongs to another configuration than config.toml "
            f"beside it; {remedy}"
        )
    where = json.loads(metadata["position"])
    return tensors, Position(where["epoch"], where["step"], where["sums"])
