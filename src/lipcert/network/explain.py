"""Why a model could not be captured, in words that say what to change."""

from __future__ import annotations

import importlib
from pathlib import Path
from traceback import walk_tb

import torch
from torch import Tensor, nn

from lipcert.errors import ShapeError, UnsupportedError, UnsupportedNode
from lipcert.network.states import evaluated

_NOT_USERS = {
    Path(torch.__file__).parent,
    Path(importlib.__file__).parent,
    Path(__file__).parents[1],
}
"""Folders of code that is not the user's."""


def unsupported(model: nn.Module, kind: str, remedy: str) -> UnsupportedError:
    """An error about a model as a whole."""
    return UnsupportedError([UnsupportedNode(type(model).__name__, kind, remedy)])


def explained(error: Exception, model: nn.Module, x: Tensor) -> Exception:
    """Why torch.export failed: the input does not fit, a name is missing, or the code cannot be followed."""
    if isinstance(error, UnsupportedError):
        return error
    # If the model fails by itself, outside of torch.export, its own error says more. In
    # eval mode no statistics change.
    try:
        with torch.no_grad(), evaluated(model):
            model(x)
    except (AttributeError, NameError) as undefined:
        return unsupported(
            model,
            "forward",
            f"its forward uses a name that is not defined ({described(undefined)})",
        )
    except Exception as failure:
        shape = tuple(x.shape[1:])
        return ShapeError(
            f"the model does not accept inputs of shape {shape} (one input, "
            "without the batch axis): "
            f"{first_line(failure)}"
        )
    remedy = (
        "torch.export cannot follow its forward; write it without control flow "
        "that depends on values"
    )
    if "specialized it to be a constant" in str(error):
        remedy = (
            "its forward fixes the number of rows of a batch, or mixes them; "
            "keep the batch axis in front"
        )
    return unsupported(model, "torch.export", f"{remedy} ({described(error)})")


def described(error: Exception) -> str:
    """The type of an error, the line of the user's code that it went through, and what it says first."""
    return f"{type(error).__name__}{user_line(error)}: {first_line(error)}"


def first_line(error: Exception) -> str:
    """The first line of an error's message; its type if it has none."""
    lines = str(error).strip().splitlines()
    return (lines or [type(error).__name__])[0]


def user_line(error: Exception) -> str:
    """ " at file:line", the last line of the user's code that an error went through; empty if there is none."""
    places = [
        (frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)
    ]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno or 0))
    # Innermost first: the last frame in a file that is neither torch's, nor Python's,
    # nor ours.
    for file, line in reversed(places):
        if not file.startswith("<") and _NOT_USERS.isdisjoint(Path(file).parents):
            return f" at {file}:{line}"
    return ""
