"""A captured model: a functional graph of ATen operators, and the tensors that it reads.

The program is what is analysed, what is executed and what a bound belongs to. Its nodes are of three kinds:

    dependent   values that depend on the values of the input x,
    constant    values that depend on parameters, buffers and numbers only (a weight norm, a factor, zeros),
    size        the number of rows of a batch, and what is computed from it.

Constants are read when they are needed: they follow the model's own tensors, and gradients reach them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from operator import getitem
from threading import local
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

Shape = tuple[int, ...]
Live = Callable[[], Tensor]
"""A tensor of the model, read at the moment it is needed."""
Observer = Callable[[fx.Node, Any], Any]

aten = torch.ops.aten
_LIKE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "fill", "copy"}
"""Operators that read only the shape and the type of their first argument."""
_AS = {"view_as", "reshape_as", "expand_as", "type_as"}
"""Operators that read only the shape and the type of their second argument."""


@dataclass(frozen=True)
class Opaque:
    """A call of a module that has a rule of its own: the module, its rule, and what it computes."""

    module: nn.Module
    rule: Any
    program: Program


@dataclass(frozen=True, eq=False)
class Program:
    """The graph of a model with one input; `tensors` says how the other placeholders are read, `names` their names."""

    graph: fx.Graph
    input_shape: Shape
    dtype: torch.dtype
    device: torch.device
    tensors: Mapping[fx.Node, Live]
    names: Mapping[fx.Node, str]
    opaque: Mapping[fx.Node, Opaque]
    changed: tuple[str, ...] = ()
    """Buffers that the model changes when it runs."""

    @cached_property
    def kinds(self) -> dict[fx.Node, str]:
        """ "dependent", "constant" or "size", for every node but the output."""
        kinds: dict[fx.Node, str] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                kinds[node] = "constant" if node in self.tensors else "dependent"
            elif node.op == "call_function":
                kinds[node] = _kind(node, kinds)
        return kinds

    @cached_property
    def input(self) -> fx.Node:
        (node,) = (n for n in self.graph.nodes if n.op == "placeholder" and n not in self.tensors)
        assert isinstance(node, fx.Node)
        return node

    @cached_property
    def output(self) -> fx.Node:
        (result,) = next(n for n in self.graph.nodes if n.op == "output").args[0]
        assert isinstance(result, fx.Node)
        return result

    @property
    def typed(self) -> bool:
        """Whether tensors determine the type in which the program runs; others run in that of their input."""
        return any(
            node.meta["val"].is_floating_point() for node in self.tensors if isinstance(node.meta["val"], Tensor)
        )

    def is_batched(self, node: fx.Node) -> bool:
        """Whether the first axis of a tensor is that of the batch."""
        shape: list[Any] = list(getattr(node.meta.get("val"), "shape", ()))
        return len(shape) > 0 and isinstance(shape[0], torch.SymInt)

    def constant(self, node: fx.Node) -> Any:
        """The present value of a constant, one row of it if it has a batch axis."""
        known = _memory.values
        key = (self, node, torch.is_grad_enabled())
        if known is not None and key in known:
            return known[key]
        value = self._compute_constant(node)
        if known is not None:
            known[key] = value
        return value

    def _compute_constant(self, node: fx.Node) -> Any:
        if node in self.tensors:
            return self.tensors[node]()
        if self.kinds[node] == "size":
            return 1
        if self.kinds[node] == "dependent":  # of which only the shape is read
            return torch.zeros(1, *node.meta["val"].shape[1:], dtype=node.meta["val"].dtype, device=self.device)
        args, kwargs = map_arg((node.args, node.kwargs), self.constant)
        return self._call(node, args, kwargs)

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node in self.opaque:
            return self.opaque[node].program.run(args[0])
        target: Any = node.target
        return target(*args, **kwargs)

    def run(self, x: Tensor, observe: Observer | None = None) -> Tensor:
        """Execute the program; `observe` sees every dependent value, and what it returns takes the value's place."""
        values: dict[fx.Node, Any] = {self.input: x if observe is None else observe(self.input, x)}

        def read(node: fx.Node) -> Any:
            if node in values:
                return values[node]
            return len(x) if self.kinds[node] == "size" else self.constant(node)

        for node in self._steps:
            args, kwargs = map_arg((node.args, node.kwargs), read)
            values[node] = self._call(node, args, kwargs)
            if observe is not None and self.kinds[node] == "dependent":
                values[node] = observe(node, values[node])
            for done in self._last_uses.get(node, ()):
                del values[done]
        result: Tensor = read(self.output)
        return result

    @cached_property
    def _steps(self) -> list[fx.Node]:
        """What has to be computed for every batch, in order."""
        size = aten.sym_size.int
        return [
            node
            for node in self.graph.nodes
            if node.op == "call_function" and self._is_run(node) and node.target is not size
        ]

    def _is_run(self, node: fx.Node) -> bool:
        if self.kinds[node] == "constant":  # one with a batch axis has as many rows as x
            return self.is_batched(node)
        return True

    @cached_property
    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """After which step a value is not needed any more."""
        last: dict[fx.Node, fx.Node] = {}
        steps = set(self._steps)
        for node in self._steps:
            for source in node.all_input_nodes:
                if source in steps or source is self.input:
                    last[source] = node
        last.pop(self.output, None)
        uses: dict[fx.Node, list[fx.Node]] = {}
        for source, node in last.items():
            uses.setdefault(node, []).append(source)
        return uses

    @torch.no_grad()
    def frozen(self) -> Program:
        """The same program with tensors of its own, which nothing done to the model can change.

        What depends on tensors only is computed here, once.
        """
        own = {node: read().detach().clone() for node, read in self.tensors.items()}
        inner = {node: replace(call, program=call.program.frozen()) for node, call in self.opaque.items()}
        program = replace(self, tensors={node: _Fixed(tensor) for node, tensor in own.items()}, opaque=inner)
        computed = {}
        for node in self._constants_for_steps:
            computed[node] = _Fixed(program.constant(node).clone())
        return replace(program, tensors={**program.tensors, **computed})

    @cached_property
    def _constants_for_steps(self) -> list[fx.Node]:
        """Constants that dependent operations read."""
        found = {}
        for node in self._steps:
            for source in node.all_input_nodes:
                if self.kinds[source] == "constant" and not self.is_batched(source) and source.op == "call_function":
                    found[source] = isinstance(source.meta.get("val"), Tensor)
        return [node for node, is_tensor in found.items() if is_tensor]

    def module(self) -> nn.Module:
        """A module that runs this program with its present tensors, which become buffers."""
        graph, root, copies = fx.Graph(), nn.Module(), {}
        for node in self.graph.nodes:
            if node is self.input:
                copies[node] = graph.placeholder("x")
            elif node in self.tensors:
                if any(user in self._steps for user in node.users) or node is self.output:
                    root.register_buffer(f"tensor_{len(copies)}", self.tensors[node](), persistent=False)
                    copies[node] = graph.get_attr(f"tensor_{len(copies)}")
            elif node in self.opaque:
                root.add_module(f"opaque_{len(copies)}", self.opaque[node].program.module())
                copies[node] = graph.call_module(f"opaque_{len(copies)}", (copies[node.args[0]],))
            elif node in self._steps or self.kinds.get(node) == "size":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(copies[self.output])
        return fx.GraphModule(root, graph)

    def digest(self) -> str:
        """SHA-256 of everything that is computed: operators with all arguments, shapes, types and tensors."""
        digest = sha256()
        numbers: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder" and not node.users:  # a tensor that is not read
                continue
            numbers[node] = len(numbers)
            arguments = map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
            value = node.meta.get("val")
            digest.update(f"{node.op} {_operator_name(node)} {arguments} {_described(value)};".encode())
            if node.op == "placeholder" and node in self.tensors:
                _add_tensor(digest, self.tensors[node]())
            if node in self.opaque:
                digest.update(self.opaque[node].program.digest().encode())
        return digest.hexdigest()


class _Fixed:
    """Reads a tensor that does not change."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> Tensor:
        return self.tensor


class _Memory(local):
    values: dict[tuple[Program, fx.Node, bool], Any] | None = None


_memory = _Memory()


@contextmanager
def constants_computed_once() -> Iterator[None]:
    """Within, the tensors of models do not change: what is computed from them is computed once."""
    before, _memory.values = _memory.values, {}
    try:
        yield
    finally:
        _memory.values = before


def _kind(node: fx.Node, kinds: Mapping[fx.Node, str]) -> str:
    value = node.meta.get("val")
    if isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool):
        return "size"
    sources = node.all_input_nodes
    if packet_name(node) in _LIKE:
        sources = [source for source in sources if source is not node.args[0]]
    if packet_name(node) in _AS:
        sources = sources[:1]
    return "dependent" if any(kinds[source] == "dependent" for source in sources) else "constant"


def packet_name(node: fx.Node) -> str:
    """The name of an operator without its overload: "add" for aten.add.Tensor."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is not None:
        return str(packet.__name__)
    return "getitem" if node.target is getitem else getattr(node.target, "__name__", str(node.target))


def _operator_name(node: fx.Node) -> str:
    return "" if node.op in ("placeholder", "output") else str(node.target)


def _described(value: Any) -> str:
    """The shapes and types of a result; the batch axis has a name of its own in every capture."""
    if isinstance(value, Tensor):
        sizes: list[Any] = list(value.shape)
        sizes = ["batch" if isinstance(n, torch.SymInt) else str(n) for n in sizes]
        return f"{value.dtype}[{','.join(sizes)}]"
    if isinstance(value, tuple | list):
        return f"({' '.join(_described(item) for item in value)})"
    return type(value).__name__


def _add_tensor(digest: Any, tensor: Tensor) -> None:
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
