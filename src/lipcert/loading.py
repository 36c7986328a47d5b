"""Models by name: from the zoo, from a Python factory, or from a checkpoint."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from lipcert import zoo
from lipcert.errors import ModelError
from lipcert.files import replace_file

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, the shape of its inputs, and where it comes from."""

    model: nn.Module
    input_shape: Shape
    name: str

    def in_float64(self) -> LoadedModel:
        """The same weights, executed in float64."""
        return replace(self, model=self.model.double())

    @property
    def dtype(self) -> torch.dtype:
        """In which the model computes."""
        return next((t.dtype for t in self.model.state_dict().values() if t.is_floating_point()), torch.float32)


def save_checkpoint(
    model: nn.Module,
    path: str | Path,
    architecture: str,
    input_shape: Shape,
    classes: int,
    *,
    input_range: tuple[float, float] = (0.0, 1.0),
) -> None:
    """Write the weights of a zoo network with what is needed to build it again."""
    metadata = {
        "lipcert.model": architecture,
        "input_shape": ",".join(map(str, input_shape)),
        "classes": str(classes),
        "input_range": ",".join(map(repr, input_range)),
    }
    with replace_file(Path(path)) as temporary:
        save_file({name: t.contiguous() for name, t in model.state_dict().items()}, temporary, metadata=metadata)


def load_model(
    spec: str, *, weights: str | Path | None = None, input_shape: Shape | None = None, classes: int | None = None
) -> LoadedModel:
    """A model from a zoo name, `module:factory`, a checkpoint file, or a run folder with model.safetensors.

    Without weights, a zoo network is initialised with seed 0. A factory's model must have `input_shape` as an
    attribute, unless it is given.
    """
    path = Path(spec)
    if path.is_dir():
        path = path / "model.safetensors"
    if path.suffix == ".safetensors":
        if weights is not None:
            raise ModelError(f"{path} holds weights already; give either it or --weights {weights} with a model")
        return _from_checkpoint(path)
    if ":" in spec:
        model = _from_factory(spec)
        shape = input_shape or getattr(model, "input_shape", None)
        if shape is None:
            raise ModelError(f"the input shape of {spec} is not known; give --input-shape, such as 3,32,32")
    elif spec in zoo.ZOO:
        shape = input_shape or zoo.ZOO[spec].input_shape
        model = zoo.build(spec, shape, classes, seed=0)
    else:
        names = ", ".join(zoo.names())
        raise ModelError(
            f"{spec!r} is not a model: give a .safetensors checkpoint, a run folder, module:factory, or one of {names}"
        )
    if weights is not None:
        _load_weights(model, Path(weights))
    return LoadedModel(model.eval(), tuple(shape), spec)


def _from_checkpoint(path: Path) -> LoadedModel:
    metadata, _ = _read(path)
    name = metadata.get("lipcert.model")
    if name is None:
        raise ModelError(f"{path} does not say which model it belongs to; give the model and --weights {path}")
    try:
        shape, classes = tuple(int(n) for n in metadata["input_shape"].split(",")), int(metadata["classes"])
        low, high = (float(n) for n in metadata.get("input_range", "0,1").split(","))
    except (KeyError, ValueError) as error:
        raise ModelError(f"{path} does not describe its model completely ({error}); write it again") from error
    model = zoo.build(name, shape, classes, seed=0, input_range=(low, high))
    _load_weights(model, path)
    return LoadedModel(model.eval(), shape, str(path))


def _from_factory(spec: str) -> nn.Module:
    module_name, _, attribute = spec.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"{spec} cannot be imported: {error}") from error
    finally:
        sys.path.pop(0)
    model = factory if isinstance(factory, nn.Module) else factory()
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec} returns {type(model).__name__}, expected a torch.nn.Module")
    return model


def _load_weights(model: nn.Module, path: Path) -> None:
    _, tensors = _read(path)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(f"{path} does not fit the model: {str(error).splitlines()[-1].strip()}") from error


def _read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist") from error
    except SafetensorError as error:
        raise ModelError(f"{path} is not a complete safetensors file ({error})") from error
