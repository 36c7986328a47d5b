"""Models by name: from the zoo, from a Python factory, or from a file of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn

from lipcert.bounds.bound import Bound
from lipcert.bounds.scales import fits
from lipcert.errors import ModelError, OptionError
from lipcert.layout import BOUND, CHECKPOINT, CONFIG, MODEL
from lipcert.models import zoo
from lipcert.models.building import build_network, from_factory
from lipcert.models.loaded import LoadedModel
from lipcert.models.shipped import shipped_folder
from lipcert.models.weights import PYTORCH, load_weights, read_weights
from lipcert.network.program import Shape
from lipcert.onnx_graphs import load_onnx
from lipcert.own_code import GIVEN, is_own


def load_model(
    spec: str | Path,
    *,
    weights: str | Path | None = None,
    input_shape: Shape | None = None,
    classes: int | None = None,
    model: nn.Module | None = None,
) -> LoadedModel:
    """A model from a zoo name, `module:factory`, a .safetensors or .onnx file, a run folder, or one that is shipped.

    Weights are a .safetensors file or a state dict in a .pt, .pth, .bin or .ckpt file.
    Without them, a network of the zoo or of a factory is initialised with seed 0. A
    factory's model must have `input_shape` as an attribute, unless it is given. `model`
    receives the weights of a run whose model was given in Python.

    Example:
        >>> loaded = lipcert.load_model("mlp-64", input_shape=(1, 8, 8))
        >>> lipcert.bound(loaded.model, loaded.input_shape).value.shape
        torch.Size([10, 10])
    """
    path, spec = Path(spec), str(spec)
    # A folder of the user's comes before a network of lipcert with the same name.
    shipped = None if path.exists() else shipped_folder(spec)
    if shipped is not None and weights is None:
        return replace(load_trained(shipped / MODEL, input_shape), name=spec)
    is_folder, path = path.is_dir(), weights_file(path)
    if path.suffix == ".safetensors":
        _refuse_both(path, weights)
        # The folder of a run is the user's own; a single file may come from anywhere
        # and must not name code to import.
        return load_trained(path, input_shape, given=model, imports=is_folder)
    if path.suffix == ".onnx":
        return _from_onnx(path, weights, input_shape)
    if path.suffix in PYTORCH:
        raise ModelError(
            f"{spec} holds weights only; give their model as module:factory and --weights {spec}"
        )
    if model is not None:
        raise ModelError(f"model= goes with the weights of a run, and {spec} is none")
    return _initialised(spec, weights, input_shape, classes)


def _refuse_both(path: Path, weights: str | Path | None) -> None:
    if weights is not None:
        raise ModelError(
            f"{path} holds weights already; give either it or --weights {weights} with a model"
        )


def _initialised(
    spec: str,
    weights: str | Path | None,
    input_shape: Shape | None,
    classes: int | None,
) -> LoadedModel:
    """A network of a factory or of the zoo, with weights if they are given."""
    stored, path = stored_range(weights), Path(spec)
    if is_own(spec):
        model = from_factory(spec, seed=0)
        # Asked before `ranged` wraps the model, which hides its attributes.
        shape = input_shape or getattr(model, "input_shape", None)
        model = zoo.ranged(model, stored)
        if shape is None:
            raise ModelError(
                f"the input shape of {spec} is not known; give --input-shape, such as 3,32,32"
            )
    elif len(path.parts) > 1 and not path.exists():
        raise ModelError(f"{spec!r} is not a model: this folder does not exist")
    else:
        model = zoo.ranged(_from_zoo(spec, input_shape, classes), stored)
        shape = input_shape or zoo.ZOO[spec].input_shape
    if weights is not None:
        load_weights(model, Path(weights))
    return LoadedModel(model.eval(), tuple(shape), spec)


def weights_file(path: str | Path) -> Path:
    """A file of weights, or that of a run folder."""
    path = Path(path)
    if path.is_dir():
        return _trained_weights(path)
    return path


def _trained_weights(folder: Path) -> Path:
    """The weights at the end of a run."""
    path = folder / MODEL
    if path.exists():
        return path
    for sign_of_a_run in (CONFIG, CHECKPOINT):
        if (folder / sign_of_a_run).exists():
            raise ModelError(
                f"the run in {folder} is not finished; continue it with lipcert train --resume {folder}"
            )
    return path


def _from_onnx(
    path: Path, weights: str | Path | None, expected_shape: Shape | None
) -> LoadedModel:
    if weights is not None:
        raise ModelError(f"{path} holds weights already; leave out --weights {weights}")
    model = load_onnx(path)
    if expected_shape not in (None, model.input_shape):
        raise ModelError(
            f"{path} is for inputs of shape {model.input_shape}, not {expected_shape}"
        )
    return LoadedModel(model, model.input_shape, str(path))


def _from_zoo(name: str, shape: Shape | None, classes: int | None) -> nn.Module:
    try:
        return zoo.build(name, shape, classes, seed=0)
    except OptionError as error:
        others = "no .safetensors or .onnx file, no run folder, not module:factory"
        raise ModelError(f"{name!r} is not a model: {others}; {error}") from error
    except (IndexError, RuntimeError) as error:
        raise ModelError(
            f"{name} cannot be built for inputs of shape {shape} ({error}); choose another"
        ) from error


def stored_range(weights: str | Path | None) -> tuple[float, float]:
    """The range that the first layer of the network maps pixels to, as a file of weights says."""
    if weights is None:
        return (0.0, 1.0)
    metadata, _ = read_weights(Path(weights))
    # A state dict of torch has no metadata: pixels as they are.
    low, high = map(float, metadata.get("input_range", "0,1").split(","))
    return low, high


def load_trained(
    path: Path,
    expected_shape: Shape | None = None,
    *,
    given: nn.Module | None = None,
    imports: bool = False,
) -> LoadedModel:
    """The network that a file of weights describes, with the bound that is stored beside it.

    imports: whether code that the file names may be imported; a file alone may come
    from anywhere.
    """
    # What to build comes from the file: name, shape, classes and range.
    metadata, _ = read_weights(path)
    name = _model_name(metadata, path)
    if given is None:
        _check_named(name, path, imports)
    shape, classes, input_range = _stored_sizes(metadata, path)
    # The seed does not matter: all weights are replaced.
    model = build_network(
        name, shape, classes, seed=0, input_range=input_range, given=given
    )
    load_weights(model, path)
    if expected_shape not in (None, shape):
        raise ModelError(
            f"{path} is for inputs of shape {shape}, not {expected_shape}; leave --input-shape out"
        )
    loaded = LoadedModel(model.eval(), shape, str(path))
    # Whether it belongs to these weights is asked by whoever uses it; its scales are a
    # start in any case.
    earlier = Bound.find(path.with_name(BOUND))
    if earlier is None or earlier.facts.input_shape != shape:
        return loaded
    if not fits(earlier.scales, loaded.network):
        return loaded
    return replace(loaded, earlier=earlier)


def _model_name(metadata: Mapping[str, str], path: Path) -> str:
    """The model that a file of weights belongs to."""
    name = metadata.get("lipcert.model")
    if name is None:
        raise ModelError(
            f"{path} does not say which model it belongs to; give the model and --weights {path}"
        )
    return name


def _stored_sizes(
    metadata: Mapping[str, str], path: Path
) -> tuple[Shape, int, tuple[float, float]]:
    """The shape of inputs, the number of classes and the range of pixels."""
    try:
        shape = tuple(map(int, metadata["input_shape"].split(",")))
        return shape, int(metadata["classes"]), stored_range(path)
    except (KeyError, ValueError) as error:
        raise ModelError(
            f"{path} does not describe its model completely ({error}); write it again"
        ) from error


def _check_named(name: str, path: Path, imports: bool) -> None:
    """Refuse a name that nothing can be built from, or that stands for code which may not be imported."""
    if name.endswith(GIVEN):
        kind = name.removesuffix(GIVEN)
        raise ModelError(
            f"{path} holds the weights of {kind}, which was given in Python; name its code, module:factory, and "
            f"--weights {path}, or use lipcert.load_model({str(path)!r}, model={kind}(…))"
        )
    if is_own(name) and not imports:
        raise ModelError(
            f"{path} names code, {name}, which files do not decide; give {name} and --weights {path}"
        )
