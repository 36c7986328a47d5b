"""A captured model: a functional graph of ATen operators, and the tensors that it reads.

The program is what is analysed, what is executed and what a bound belongs to. Constants
(see `kinds`) are read when they are needed: they follow the model's own tensors, and
gradients reach them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from threading import local
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from lipcert.network.kinds import is_torchs, node_kinds, recorded_shape
from lipcert.network.states import bare

Shape = tuple[int, ...]
Live = Callable[[], Tensor]
"""A tensor of the model, read at the moment it is needed."""
Observer = Callable[[fx.Node, Any], Any]


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
        return node_kinds(self.graph, self.tensors)

    @cached_property
    def input(self) -> fx.Node:
        """The placeholder of the model's input."""
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        (node,) = (n for n in placeholders if n not in self.tensors)
        assert isinstance(node, fx.Node)
        return node

    @cached_property
    def output(self) -> fx.Node:
        """The node whose value the model returns."""
        (result,) = next(n for n in self.graph.nodes if n.op == "output").args[0]
        assert isinstance(result, fx.Node)
        return result

    @property
    def typed(self) -> bool:
        """Whether tensors determine the type in which the program runs; others run in that of their input."""
        values = [node.meta["val"] for node in self.tensors]
        tensors = [value for value in values if isinstance(value, Tensor)]
        return any(tensor.is_floating_point() for tensor in tensors)

    def is_batched(self, node: fx.Node) -> bool:
        """Whether the first axis of a tensor is that of the batch."""
        shape = recorded_shape(node)
        return len(shape) > 0 and isinstance(shape[0], torch.SymInt)

    def constant(self, node: fx.Node) -> Any:
        """The present value of a constant, one row of it if it has a batch axis."""
        known = _memory.values
        if known is None:
            return self._compute_constant(node)
        # A value that was computed without gradients has no graph, and must not be
        # given to whoever wants one.
        key = (self, node, torch.is_grad_enabled())
        if key not in known:
            known[key] = self._compute_constant(node)
        return known[key]

    def _compute_constant(self, node: fx.Node) -> Any:
        if node in self.tensors:
            return self.tensors[node]()
        # A constant with a batch axis is read as one row, for all its rows are equal
        # (`constant_problem`).
        if self.kinds[node] == "size":
            return 1
        if self.kinds[node] == "dependent":  # of which only the shape is read
            like = node.meta["val"]
            return torch.zeros(1, *like.shape[1:], dtype=like.dtype, device=self.device)
        return self._call(node, self.constant)

    def _call(self, node: fx.Node, read: Callable[[fx.Node], Any]) -> Any:
        arguments: Any = map_arg((node.args, node.kwargs), read)
        args, kwargs = arguments
        if node in self.opaque:
            return self.opaque[node].program.run(args[0])
        target: Any = node.target
        return target(*args, **kwargs)

    def run(self, x: Tensor, observe: Observer | None = None) -> Tensor:
        """Execute the program; `observe` sees every dependent value, and what it returns takes the value's place."""
        values: dict[fx.Node, Any] = {self.input: x}
        if observe is not None:
            values[self.input] = observe(self.input, x)

        # Dependent values and constants with a batch axis are in `values`; other
        # constants do not depend on this batch.
        def read(node: fx.Node) -> Any:
            if node in values:
                return values[node]
            if self.kinds[node] == "size":
                return len(x)
            return self.constant(node)

        for node in self._steps:
            value = self._call(node, read)
            if observe is not None and self.kinds[node] == "dependent":
                value = observe(node, value)
            values[node] = value
            # Deep networks would otherwise keep every value of a batch until the end.
            for done in self._last_uses.get(node, ()):
                values.pop(done, None)
        result: Tensor = read(self.output)
        return result

    @cached_property
    def _steps(self) -> dict[fx.Node, None]:
        """What has to be computed for every batch, in order: constants with a batch axis have as many rows as x."""
        steps: dict[fx.Node, None] = {}
        for node in self.graph.nodes:
            if node.op != "call_function" or node.target is torch.ops.aten.sym_size.int:
                continue
            if self.kinds[node] != "constant" or self.is_batched(node):
                steps[node] = None
        return steps

    @property
    def operators_of_others(self) -> list[fx.Node]:
        """Steps that are neither torch's own nor modules with a rule: what they compute is not in the program."""
        others = [node for node in self._steps if not is_torchs(node)]
        return [node for node in others if node not in self.opaque]

    @cached_property
    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """The values that are not needed any more after a step."""
        # Seen from the end, the first step that reads a value is its last reader.
        needed = {self.output}
        uses: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(self._steps):
            uses[node] = [read for read in node.all_input_nodes if read not in needed]
            needed.update(uses[node])
        return uses

    @torch.no_grad()
    def frozen(self) -> Program:
        """The same program with tensors of its own, which nothing done to the model can change.

        What depends on tensors only is computed here, once.
        """
        tensors, opaque = {}, {}
        for node, read in self.tensors.items():
            tensors[node] = _fixed(read().detach().clone())
        for node, call in self.opaque.items():
            opaque[node] = replace(call, program=call.program.frozen())
        program = replace(self, tensors=tensors, opaque=opaque)
        # At the border, which steps read: what they were computed from is not needed.
        computed = {}
        for step in self._steps:
            for node in step.all_input_nodes:
                is_fixed = self.kinds[node] == "constant" and not self.is_batched(node)
                is_tensor = isinstance(node.meta.get("val"), Tensor)
                if is_fixed and is_tensor and node not in tensors:
                    computed[node] = _fixed(program.constant(node).clone())
        # A node among the tensors is read, not computed: the value is the one that the
        # model computes today.
        return replace(program, tensors={**tensors, **computed})

    def cast(self, dtype: torch.dtype) -> Program:
        """The frozen program in another type, with the constants that it computes in its own."""
        # Constants are computed first, in the program's own type: a weight norm in float64 is another weight.
        frozen = self.frozen()
        tensors = {}
        for node, read in frozen.tensors.items():
            tensor = read()
            if tensor.is_floating_point():
                tensor = tensor.to(dtype)
            tensors[node] = _fixed(tensor)
        return replace(frozen, dtype=dtype, tensors=tensors)

    def module(self) -> nn.Module:
        """A module that runs this program with its present tensors, which become buffers; no hook runs around it."""
        graph, root = fx.Graph(), nn.Module()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            name = f"value_{len(copies)}"
            if node is self.input:
                copies[node] = graph.placeholder("x")
            elif node in self.tensors:
                # Tensors that only constants read are in these constants already (see
                # `frozen`).
                if node is self.output or not self._steps.keys().isdisjoint(node.users):
                    root.register_buffer(name, self.tensors[node](), persistent=False)
                    copies[node] = graph.get_attr(name)
            elif node in self.opaque:
                root.add_module(name, self.opaque[node].program.module())
                copies[node] = graph.call_module(name, (copies[node.args[0]],))
            elif node in self._steps or self.kinds.get(node) == "size":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(copies[self.output])
        return bare(fx.GraphModule(root, graph))


def _fixed(tensor: Tensor) -> Live:
    return lambda: tensor


class _Memory(local):
    values: dict[tuple[Program, fx.Node, bool], Any] | None = None


_memory = _Memory()


@contextmanager
def constants_computed_once() -> Iterator[None]:
    """Within, the tensors of models do not change: what is computed from them is computed once."""
    # Begins empty even within another such context, on which both passes of a
    # checkpoint rely (`norms.chunks`).
    before, _memory.values = _memory.values, {}
    try:
        yield
    finally:
        _memory.values = before
