"""A node of an ONNX graph as an operator's function sees it, and the step of a module that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[Any]
Function = Callable[..., Any]


class RefusalError(Exception):
    """Why a node cannot be read, in words that follow its name."""


class Step(nn.Module):
    """A function of some activations; its constants are buffers, so that they are part of the model."""

    def __init__(
        self,
        kind: str,
        function: Function,
        tensors: dict[str, Tensor | None],
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        self.kind, self.function, self.options = kind, function, options
        self.names = list(tensors)
        for name, tensor in tensors.items():
            # In the state dict, hence in fingerprints, and converted by .double().
            self.register_buffer(name, tensor)

    def forward(self, *x: Tensor) -> Any:
        tensors = {name: getattr(self, name) for name in self.names}
        return self.function(*x, **tensors, **self.options)

    def extra_repr(self) -> str:
        words = [self.kind]
        for name, value in self.options.items():
            words.append(f"{name}={value}")
        return ", ".join(words)


@dataclass(frozen=True)
class OnnxNode:
    """A node with its inputs: constants as arrays, activations as samples with `batch` rows; None if left out."""

    name: str
    kind: str
    attributes: dict[str, Any]
    inputs: Sequence[Array | Tensor | None]
    opset: int
    batch: int

    @property
    def x(self) -> Tensor:
        """The sample of the first input, an activation."""
        first = self.inputs[0]
        if not isinstance(first, Tensor):
            raise RefusalError(
                "its first input is a constant and another one is not; write it "
                "the other way round"
            )
        return first

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def constant(self, place: int) -> Array | None:
        """The constant at a place; None if there is none."""
        if place >= len(self.inputs) or self.inputs[place] is None:
            return None
        value = self.inputs[place]
        if isinstance(value, Tensor):
            raise RefusalError(
                f"input {place} depends on the input of the network, "
                "expected a constant"
            )
        return value

    def tensor(self, place: int) -> Tensor | None:
        """The constant at a place as a tensor of the dtype of the activations."""
        array = self.constant(place)
        if array is None:
            return None
        # np.array copies: arrays of a protobuf cannot be written to.
        return torch.from_numpy(np.array(array)).to(self.x.dtype)

    def needed(self, place: int) -> Tensor:
        tensor = self.tensor(place)
        if tensor is None:
            raise RefusalError(f"input {place} is missing")
        return tensor

    def numbers(self, place: int, attribute: str) -> list[int] | None:
        """Whole numbers that are an input in newer versions of an operator and an attribute in older ones."""
        array = self.constant(place)
        if array is not None:
            return [int(value) for value in array.reshape(-1)]
        listed = self.attribute(attribute)
        return None if listed is None else [int(value) for value in listed]

    def axis(self, axis: int, rank: int | None = None) -> int:
        """An axis, counted from the front; never that of the batch."""
        rank = self.x.dim() if rank is None else rank
        # Axis 0 is the batch: a network whose rows depend on each other has no radius
        # for one of them.
        place = axis + rank if axis < 0 else axis
        if not 0 < place < rank:
            what = (
                "the batch axis" if place == 0 else f"axis {axis}, which does not exist"
            )
            raise RefusalError(
                f"it works on {what}; rows of a batch have to stay apart"
            )
        return place

    def only(self, **attributes: Any) -> None:
        """Refuse attributes with other values than these."""
        for name, value in attributes.items():
            if self.attribute(name, value) != value:
                raise RefusalError(
                    f"{name} is {self.attribute(name)}, expected {value}"
                )

    def step(
        self,
        function: Function,
        tensors: dict[str, Tensor | None] | None = None,
        /,
        **options: Any,
    ) -> Step:
        return Step(self.kind, function, tensors or {}, options)


Operator = Callable[[OnnxNode], Step]
OPERATORS: dict[str, Operator] = {}
"""How nodes are read, by their operator."""


def operator(*kinds: str) -> Callable[[Operator], Operator]:
    """Decorator: makes a function known that reads nodes of these operators."""

    def register(function: Operator) -> Operator:
        for kind in kinds:
            OPERATORS[kind] = function
        return function

    return register
