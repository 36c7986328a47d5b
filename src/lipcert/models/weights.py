"""Weights in files: safetensors with what is needed to build the network again, or state dicts of torch.save."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lipcert.errors import ModelError, nearest
from lipcert.files import replace_file
from lipcert.network.program import Shape

PYTORCH = (".pt", ".pth", ".bin", ".ckpt")
"""Files that torch.save has written."""
_HOLDERS = ("model_state_dict", "state_dict", "model", "net", "weights")
"""Under which names training scripts keep the state dict of the model."""
_PREFIXES = ("module.", "_orig_mod.", "model.")
"""What DataParallel, torch.compile and Lightning put before every name."""


def save_model(
    model: nn.Module,
    path: str | Path,
    architecture: str,
    input_shape: Shape,
    classes: int,
    *,
    input_range: tuple[float, float] = (0.0, 1.0),
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights of a network with what is needed to build it again; if a type is given, rounded to it."""
    metadata = {
        "lipcert.model": architecture,
        "input_shape": ",".join(map(str, input_shape)),
        "classes": str(classes),
        "input_range": ",".join(map(repr, input_range)),
    }
    # Clones: safetensors refuses tensors that share memory, as tied weights do.
    tensors = {}
    for name, tensor in model.state_dict().items():
        copy = tensor.detach().clone().contiguous()
        if dtype is not None and copy.is_floating_point():
            copy = copy.to(dtype)
            if not bool(copy.isfinite().all()):
                raise ModelError(
                    f"{name} has entries beyond the range of {dtype}; store the "
                    "weights as they are"
                )
        tensors[name] = copy
    with replace_file(Path(path)) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def load_weights(model: nn.Module, path: Path) -> None:
    """Put the weights of a file into a model; names may begin as DataParallel and torch.compile make them begin."""
    _, tensors = read_weights(path)
    wanted = model.state_dict()
    tensors = _without_prefixes(tensors, wanted.keys())
    # Names and shapes are compared before anything is loaded: a model with half of its
    # weights is worse than none.
    for name in sorted(wanted.keys() - tensors.keys()):
        found = f"it holds {_listed(tensors)}"
        raise ModelError(
            f"{path} does not fit the model: {name} is missing; "
            f"{found}{nearest(name, tensors)}"
        )
    for name in sorted(tensors.keys() - wanted.keys()):
        raise ModelError(
            f"{path} does not fit the model, which has no {name}{nearest(name, wanted)}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            shapes = f"{tuple(tensor.shape)}, expected {tuple(wanted[name].shape)}"
            raise ModelError(
                f"{path} does not fit the model: {name} has the shape {shapes}"
            )
    model.load_state_dict(tensors)


def _without_prefixes(tensors: Mapping[str, Tensor], wanted: Any) -> dict[str, Tensor]:
    """The tensors under the names of the model, if what all of them begin with is all that differs."""
    names = dict(tensors)
    # module._orig_mod.0.weight loses one prefix in each round.
    while names and not names.keys() & set(wanted):
        prefixes = [
            prefix
            for prefix in _PREFIXES
            if all(name.startswith(prefix) for name in names)
        ]
        if not prefixes:
            return dict(tensors)
        names = {
            name.removeprefix(prefixes[0]): tensor for name, tensor in names.items()
        }
    return names


def read_weights(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a file."""
    try:
        if path.suffix in PYTORCH:
            return {}, _read_state_dict(path)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return dict(file.metadata() or {}), tensors
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist") from error
    except SafetensorError as error:
        raise ModelError(
            f"{path} is not a complete safetensors file ({error})"
        ) from error


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    """The weights that torch.save has written, alone or in a checkpoint; nothing in the file is executed."""
    remedy = "write it with torch.save(model.state_dict(), …)"
    try:
        # weights_only: tensors and plain values, no code.
        stored: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except (
        Exception
    ) as error:  # what a pickle raises that is damaged, or that holds more than tensors
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = (
            f"holds code, {code[1]}, which is not executed"
            if code
            else "is damaged, or was not written by torch"
        )
        raise ModelError(f"{path} {reason}; {remedy}") from None
    # {"epoch": 3, "state_dict": {…}} is a checkpoint, whose weights are one level
    # below.
    for key in _HOLDERS:
        if isinstance(stored, Mapping) and isinstance(stored.get(key), Mapping):
            stored = stored[key]
            break
    if not isinstance(stored, Mapping):
        raise ModelError(f"{path} holds no state dict but {_kind(stored)}; {remedy}")
    others = {
        name: value for name, value in stored.items() if not isinstance(value, Tensor)
    }
    if others or not stored:
        listed = (
            ", ".join(
                f"{name} ({_kind(value)})" for name, value in list(stored.items())[:8]
            )
            or "nothing"
        )
        expected = f"expected a state dict, alone or under {', '.join(_HOLDERS)}"
        raise ModelError(f"{path} holds {listed}; {expected}; {remedy}")
    return {str(name): tensor for name, tensor in stored.items()}


def _listed(tensors: Mapping[str, Tensor]) -> str:
    names = list(tensors)
    if len(names) > 4:
        return f"{', '.join(names[:4])} and {len(names) - 4} more"
    return ", ".join(names) or "nothing"


def _kind(value: object) -> str:
    return type(value).__name__
