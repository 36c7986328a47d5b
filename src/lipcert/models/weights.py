"""Weights in files: safetensors with what is needed to build the network again, or state dicts of torch.save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lipcert.errors import ModelError
from lipcert.files import replace_file

Shape = tuple[int, ...]
PYTORCH = (".pt", ".pth", ".bin", ".ckpt")
"""Files that torch.save has written."""


def save_model(
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
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    with replace_file(Path(path)) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def load_weights(model: nn.Module, path: Path) -> None:
    """Put the weights of a file into a model."""
    _, tensors = read_weights(path)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(f"{path} does not fit the model: {str(error).splitlines()[-1].strip()}") from error


def read_weights(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
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
        raise ModelError(f"{path} is not a complete safetensors file ({error})") from error


def _read_state_dict(path: Path) -> dict[str, Any]:
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
