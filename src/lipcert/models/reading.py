"""Models by name: from the zoo, from a Python factory, or from a file of weights."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipcert.bounds.bound import Bound
from lipcert.bounds.scales import fits
from lipcert.errors import ModelError, OptionError
from lipcert.layout import BOUND, CHECKPOINT, CONFIG, MODEL
from lipcert.models import zoo
from lipcert.models.loaded import LoadedModel, Shape
from lipcert.models.weights import PYTORCH, load_weights, read_weights
from lipcert.network.explain import user_line


def load_model(
    spec: str, *, weights: str | Path | None = None, input_shape: Shape | None = None, classes: int | None = None
) -> LoadedModel:
    """A model from a zoo name, `module:factory`, a .safetensors file, or a run folder with model.safetensors.

    Weights are a .safetensors file or a state dict in a .pt, .pth, .bin or .ckpt file. Without them, a network of the
    zoo or of a factory is initialised with seed 0. A factory's model must have `input_shape` as an attribute, unless it
    is given.
    """
    path = Path(spec)
    if path.is_dir():
        path = _trained_weights(path)
    if path.suffix == ".safetensors":
        if weights is not None:
            raise ModelError(f"{path} holds weights already; give either it or --weights {weights} with a model")
        return _from_file(path, input_shape)
    if path.suffix in PYTORCH:
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
        load_weights(model, Path(weights))
    return LoadedModel(model.eval(), tuple(shape), spec)


def _trained_weights(folder: Path) -> Path:
    """The weights at the end of a run."""
    path = folder / MODEL
    if path.exists():
        return path
    for sign_of_a_run in (CONFIG, CHECKPOINT):
        if (folder / sign_of_a_run).exists():
            raise ModelError(f"the run in {folder} is not finished; continue it with lipcert train --resume {folder}")
    return path


def _from_zoo(name: str, shape: Shape | None, classes: int | None) -> nn.Module:
    try:
        return zoo.build(name, shape, classes, seed=0)
    except OptionError as error:
        others = "no .safetensors file, no run folder, not module:factory"
        raise ModelError(f"{name!r} is not a model: {others}; {error}") from error
    except (IndexError, RuntimeError) as error:
        raise ModelError(f"{name} cannot be built for inputs of shape {shape} ({error}); choose another") from error


def _from_file(path: Path, expected_shape: Shape | None) -> LoadedModel:
    """The zoo network that a file of weights describes, with the bound that is stored beside it."""
    metadata, _ = read_weights(path)
    name = metadata.get("lipcert.model")
    if name is None:
        raise ModelError(f"{path} does not say which model it belongs to; give the model and --weights {path}")
    try:
        shape = tuple(map(int, metadata["input_shape"].split(",")))
        classes = int(metadata["classes"])
        low, high = map(float, metadata.get("input_range", "0,1").split(","))
    except (KeyError, ValueError) as error:
        raise ModelError(f"{path} does not describe its model completely ({error}); write it again") from error
    model = zoo.build(name, shape, classes, seed=0, input_range=(low, high))
    load_weights(model, path)
    if expected_shape not in (None, shape):
        raise ModelError(f"{path} is for inputs of shape {shape}, not {expected_shape}; leave --input-shape out")
    loaded = LoadedModel(model.eval(), shape, str(path))
    earlier = Bound.find(path.with_name(BOUND))
    if earlier is None or earlier.facts.input_shape != shape or not fits(earlier.scales, loaded.network):
        return loaded
    return replace(loaded, earlier=earlier)


def _from_factory(spec: str) -> nn.Module:
    """What the user's function returns, called without arguments with seed 0."""
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
