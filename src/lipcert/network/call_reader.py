"""The operations of a program as rules see them: with `Input` and `Constant` in place of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from lipcert.network.executed_numbers import as_executed
from lipcert.network.kinds import packet_name, recorded_shape
from lipcert.network.names import layer_name, producer
from lipcert.network.program import Program, Shape
from lipcert.network.rules.call import Call
from lipcert.network.rules.values import BatchSize, Constant, Input, OtherSize, Refusal


@dataclass(frozen=True)
class CallReader:
    """Reads operations of a program whose dependent values are known so far.

    `exact`: in float64, with the constants that the program computes in its own type.
    `local`, `apart`: see `Call`.
    """

    program: Program
    values: Mapping[fx.Node, Input]
    dtype: torch.dtype
    exact: bool
    local: bool
    apart: bool

    def call(self, node: fx.Node, out_shape: Shape) -> Call:
        """What a rule gets to see of an operation."""
        operation = producer(node)
        index: Any = None if operation is node else node.args[1]
        given: Any = fx.map_arg((operation.args, operation.kwargs), self._resolve)
        args, kwargs = as_executed(operation, given[0], given[1], self.program.dtype)
        for key, value in kwargs.items():
            if isinstance(value, torch.dtype) and value == self.program.dtype:
                # Float64 in the exact network.
                kwargs[key] = self.dtype
        invoke: Any = operation.target
        module = None
        opaque = self.program.opaque.get(operation)
        if opaque is not None:
            args = args[:1]
            module, invoke = opaque.module, opaque.program.run
            if self.exact:
                module = deepcopy(module).requires_grad_(False).double()
                invoke = opaque.program.cast(self.dtype).run
        name, _ = layer_name(node, node in self.program.opaque)
        typed = self.program.typed
        called = name, invoke, args, kwargs, out_shape, self.dtype, typed, operation
        return Call(*called, module, index, self.local, self.apart)

    def _resolve(self, node: fx.Node) -> Any:
        """What a rule gets to see in place of a node among the arguments."""
        kind = self.program.kinds[node]
        if node in self.values:
            return self.values[node]
        if kind == "dependent":
            raise Refusal(
                "it reads several results of one operation at once; pick "
                "one of them first"
            )
        if kind == "constant":
            return self._constant(node)
        if packet_name(node) == "item":
            raise Refusal(
                "it reads a number from a tensor with .item(); use the tensor itself"
            )
        is_size = node.target is torch.ops.aten.sym_size.int
        if is_size and node.meta["val"] == recorded_shape(self.program.input)[0]:
            return BatchSize()
        return OtherSize()

    def _constant(self, node: fx.Node) -> Constant:
        recorded = node.meta["val"]
        if isinstance(recorded, Tensor) and recorded.is_complex():
            raise Refusal(
                "complex numbers are not supported; use real and imaginary parts"
            )
        batched = self.program.is_batched(node)
        if not self.exact:
            return Constant(partial(self.program.constant, node), batched)
        # As the program computes it, in its own type: the exact network has the constants that are executed.
        value = self.program.constant(node).detach()
        if value.is_floating_point():
            value = value.double()
        return Constant(lambda: value, batched)
