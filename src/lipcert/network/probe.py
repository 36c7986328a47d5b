"""Runs of a traced model that find out what its operations return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from lipcert.errors import ShapeError
from lipcert.network.linear import Shape


class OutOfPlace(fx.Interpreter):
    """Executes a graph with in-place operations working on copies, as the normal form understands them."""

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        in_place = getattr(module, "inplace", not type(module).__module__.startswith("torch.nn."))
        return super().call_module(target, *(_copies(args, kwargs) if in_place else (args, kwargs)))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_method(target, *_copies(args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(target, *_copies(args, kwargs))


def _copies(args: Any, kwargs: Any) -> tuple[Any, Any]:
    copied: tuple[Any, Any] = torch.utils._pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
    return copied


class TensorShape(tuple[int, ...]):
    """The shape of a result that is a tensor; other results are recorded as they are."""


class Probe(OutOfPlace):
    """Runs the graph and records what every node returns: the shape of a tensor, any other value itself; and the first
    row of every tensor that has one, which must not depend on the others.

    `faithful` says whether the model computes the same with its in-place operations.
    """

    def __init__(self, graph: fx.GraphModule, input_shape: Shape, batch: int) -> None:
        super().__init__(graph)
        self.results: dict[fx.Node, Any] = {}
        self.first_rows: dict[fx.Node, Tensor] = {}
        self.batch = batch
        generator = torch.Generator().manual_seed(0)
        dtype, device = type_of(graph)
        x = torch.randn(3, *input_shape, generator=generator).to(device, dtype)[:batch]
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                _seed(batch, device)
                output = self.run(x.clone())
                _seed(batch, device)  # what is random is the same again, but not in other batches
                expected = graph(x.clone())
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
            reason = str(error).split("\n\nWhile executing")[0].strip().splitlines()[0]
            raise ShapeError(
                f"the model does not accept inputs of shape {input_shape} (one input, without the batch axis): {reason}"
            ) from error
        self.faithful = not isinstance(output, Tensor) or torch.allclose(
            output, expected, rtol=1e-3, atol=1e-4, equal_nan=True
        )

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.results[n] = TensorShape(result.shape) if isinstance(result, Tensor) else result
        if isinstance(result, Tensor) and result.shape[:1] == (self.batch,):
            self.first_rows[n] = result[0].clone()
        return result


def _seed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def changing_rows(rows: dict[fx.Node, Tensor], others: dict[fx.Node, Tensor]) -> set[fx.Node]:
    """The nodes whose first row is not the same in a larger batch."""
    changing = set()
    for node, row in rows.items():
        other = others.get(node, row)
        tolerance = max(1e-3, torch.finfo(row.dtype).eps ** 0.5) if row.is_floating_point() else 0.0
        if row.shape == other.shape and (row.double() - other.double()).norm() > tolerance * row.double().norm():
            changing.add(node)
    return changing


def type_of(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    tensors = (*model.parameters(), *model.buffers())
    like = next((t for t in tensors if t.is_floating_point()), torch.zeros(()))
    return like.dtype, like.device
