"""Models by name: from the zoo, from a Python factory, or from a checkpoint."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lipcert import zoo
from lipcert.bounds.bound import Bound
from lipcert.bounds.scales import fits
from lipcert.errors import ModelError, OptionError
from lipcert.files import replace_file
from lipcert.network.build import trace
from lipcert.network.explain import user_line
from lipcert.network.normal_form import Network

Shape = tuple[int, ...]
_PYTORCH = (".pt", ".pth", ".bin", ".ckpt")
"""Files that torch.save has written."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, the shape of its inputs, and where it comes from.

    earlier: the bound that is stored beside a checkpoint, as in a run folder: at least a good start for another.
    """

    model: nn.Module
    input_shape: Shape
    name: str
    earlier: Bound | None = None

    @property
    def scales(self) -> Mapping[str, Tensor] | None:
        """The coordinates of the earlier bound."""
        return self.earlier.scales if self.earlier is not None else None

    @cached_property
    def network(self) -> Network:
        """The captured model, for all bounds and certificates; captured once."""
        return trace(self.model, self.input_shape)

    def in_float64(self) -> LoadedModel:
        """The same weights, executed in float64."""
        return replace(self, model=self.model.double())

    @property
    def execution(self) -> str:
        """The arithmetic that certificates are for."""
        return str(self.dtype).removeprefix("torch.")

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

    Weights are a .safetensors file or a state dict in a .pt, .pth, .bin or .ckpt file. Without them, a network of the
    zoo or of a factory is initialised with seed 0. A factory's model must have `input_shape` as an attribute, unless it
    is given.
    """
    path = Path(spec)
    if path.is_dir():
        path = _finished(path)
    if path.suffix == ".safetensors":
        if weights is not None:
            raise ModelError(f"{path} holds weights already; give either it or --weights {weights} with a model")
        loaded = _from_checkpoint(path)
        if input_shape not in (None, loaded.input_shape):
            raise ModelError(
                f"{path} is for inputs of shape {loaded.input_shape}, not {input_shape}; leave --input-shape out"
            )
        return loaded
    if path.suffix in _PYTORCH:
        raise ModelError(f"{spec} holds weights only; give their model as module:factory and --weights {spec}")
    if ":" in spec:
        model = _from_factory(spec)
        shape = input_shape or getattr(model, "input_shape", None)
        if shape is None:
            raise ModelError(f"the input shape of {spec} is not known; give --input-shape, such as 3,32,32")
    elif len(path.parts) > 1 and not path.exists():
        raise ModelError(f"{spec!r} is not a model: this folder does not exist")
    else:
        model = _from_zoo(spec, input_shape, classes)
        shape = input_shape or zoo.ZOO[spec].input_shape
    if weights is not None:
        _load_weights(model, Path(weights))
    return LoadedModel(model.eval(), tuple(shape), spec)


def _finished(folder: Path) -> Path:
    """The checkpoint at the end of a run."""
    path = folder / "model.safetensors"
    if not path.exists() and any((folder / name).exists() for name in ("config.toml", "checkpoint.safetensors")):
        raise ModelError(f"the run in {folder} is not finished; continue it with lipcert train --resume {folder}")
    return path


def _from_zoo(name: str, shape: Shape | None, classes: int | None) -> nn.Module:
    try:
        return zoo.build(name, shape, classes, seed=0)
    except OptionError as error:
        others = "no .safetensors checkpoint, no run folder, not module:factory"
        raise ModelError(f"{name!r} is not a model: {others}; {error}") from error
    except (IndexError, RuntimeError) as error:
        raise ModelError(f"{name} cannot be built for inputs of shape {shape} ({error}); choose another") from error


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
    model.eval()
    earlier = Bound.find(path.with_name("bound"))
    loaded = LoadedModel(model, shape, str(path))
    if earlier is None or earlier.facts.input_shape != shape or not fits(earlier.scales, loaded.network):
        return loaded
    return replace(loaded, earlier=earlier)


def _from_factory(spec: str) -> nn.Module:
    module_name, _, attribute = spec.partition(":")
    problem = "cannot be imported"
    sys.path.insert(0, str(Path.cwd()))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            factory: Any = getattr(importlib.import_module(module_name), attribute)
            problem = "fails when it is called without arguments"
            model = factory if isinstance(factory, nn.Module) else factory()
    except Exception as error:  # whatever the user's code raises
        raise ModelError(f"{spec} {problem} ({type(error).__name__}{user_line(error)}: {error})") from error
    finally:
        sys.path.pop(0)
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
        if path.suffix in _PYTORCH:
            return {}, _state_dict(path)
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist") from error
    except SafetensorError as error:
        raise ModelError(f"{path} is not a complete safetensors file ({error})") from error


def _state_dict(path: Path) -> dict[str, Any]:
    """The weights that torch.save has written, alone or under "state_dict" or "model"."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # what a pickle raises that is damaged, or that holds more than tensors
        stored = None
    for key in ("state_dict", "model"):
        if isinstance(stored, dict) and isinstance(stored.get(key), dict):
            stored = stored[key]
    if not isinstance(stored, dict) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise ModelError(f"{path} holds no state dict, or is damaged; write it with torch.save(model.state_dict(), …)")
    return dict(stored)
