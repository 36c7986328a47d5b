"""From a captured program to the normal form: one rule per operator, and a list of everything that has none."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from lipcert.errors import (
    TrainingModeError,
    UnsupportedError,
    UnsupportedNode,
    check_choice,
)
from lipcert.network.assembly import Assembly
from lipcert.network.capture import CAPTURE_LOCK, capture
from lipcert.network.capture_comparison import check_capture
from lipcert.network.constant_refusals import constant_problem
from lipcert.network.executed_numbers import as_executed
from lipcert.network.kinds import packet_name, recorded_shape
from lipcert.network.linear import Identity
from lipcert.network.names import layer_name, producer
from lipcert.network.normal_form import NO_NODE, Edge, Network, Site
from lipcert.network.program import Program, Shape
from lipcert.network.rules.call import BatchSize, Call, Constant, Input, Refusal
from lipcert.network.rules.refusals import DEFAULT, MODULES
from lipcert.network.rules.registry import VIEWS, find_rule, operator_name
from lipcert.network.states import evaluated

_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)


class _OtherSize:
    """Stands for a number computed from the number of rows."""


def trace(
    model: nn.Module,
    input_shape: Shape,
    *,
    training: bool = False,
    view: str = "residual",
    local: bool = False,
) -> Network:
    """Trace a model into a `Network` that shares the model's parameters.

    The model is captured by torch.export in the mode it is in, and the captured program
    is compared with the model.

    Args:
        model: any feed-forward module whose forward takes one tensor.
        input_shape: shape of one input, without the batch axis.
        training: put the model into eval mode meanwhile, so that BatchNorm and Dropout may be in training mode.
        view: how layers that are Lipschitz by construction (`layers.RhoLipschitzLinear`, …) appear: in their "residual"
            form, or "certified", as one site with the constant that is proved for their present weights.
        local: allow operations that are only bounded over balls (see `lipcert.certify_local`).

    Raises:
        UnsupportedError: lists every operation without a rule, with its remedy.
        TrainingModeError: BatchNorm or Dropout is in training mode.
        ShapeError: the model does not accept inputs of this shape.

    Example:
        >>> lipcert.trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), (4,))
        Network((4,) → (3,), 1 nonlinearity: 1)
    """
    check_choice("view", view, VIEWS)
    mode: Any = nullcontext()
    if training and isinstance(model, nn.Module):
        mode = evaluated(model)
    with CAPTURE_LOCK, mode:
        program = capture(model, input_shape, view)
        network = normal_form(program, local=local)
        check_capture(program, model)
    return network


@torch.no_grad()
def normal_form(
    program: Program,
    *,
    exact: bool = False,
    check: bool = True,
    local: bool = False,
    apart: bool = False,
) -> Network:
    """The normal form of a program; `exact` in float64, with the values of all constants as the program computes them.

    Rules are tried out unless `check` is False, for a program whose rules have been
    tried out already. With `apart`, pairs that are sorted (MaxMin) are means, which
    pass linearly, and absolute values of differences.
    """
    with CAPTURE_LOCK:  # another thread's capture would see the symbolic number of rows
        return _Builder(program, exact, check, local, apart).build()


class _Builder:
    """Walks the program once, applies the rules, collects everything that has none."""

    def __init__(
        self, program: Program, exact: bool, check: bool, local: bool, apart: bool
    ) -> None:
        self.program, self.exact, self.local, self.apart = program, exact, local, apart
        self.dtype = torch.float64 if exact else program.dtype
        self.batch = recorded_shape(program.input)[0]
        self.assembly = Assembly(self.dtype, check)
        self.values: dict[fx.Node, Input] = {}
        self.unsupported: dict[tuple[str, str], UnsupportedNode] = {}
        self.refused: set[fx.Node] = set()
        self.training: TrainingModeError | None = None

    def build(self) -> Network:
        program, assembly = self.program, self.assembly
        assembly.sites.append(Site("input", NO_NODE, 0))
        self.values[program.input] = assembly.add("input", program.input_shape)
        for node in program.graph.nodes:
            kind = program.kinds.get(node)
            if kind == "dependent" and node is not program.input:
                self._operation(node)
            if kind == "constant":
                problem = constant_problem(program, node)
                if problem:
                    self._refuse(node, problem)
        if self.unsupported:
            raise UnsupportedError(list(self.unsupported.values()))
        if self.training is not None:
            raise self.training
        self._finish()
        produced = {node: value.source for node, value in self.values.items()}
        return Network(
            tuple(assembly.nodes),
            tuple(assembly.sites),
            self.dtype,
            program.device,
            program,
            produced,
        )

    def _finish(self) -> None:
        output, sites = self.values.get(self.program.output), self.assembly.sites
        if output is None:
            remedy = "the model must return one tensor that depends on its input"
            raise UnsupportedError([UnsupportedNode("output", "output", remedy)])
        if 0 in output.shape:
            remedy = f"the model returns no numbers, rows of shape {output.shape}; it needs a logit for every class"
            raise UnsupportedError([UnsupportedNode("output", "output", remedy)])
        if output.source in [
            site.output for site in sites
        ]:  # the output site needs a linear node of its own
            edge = Edge(output.source, Identity(output.shape))
            output = self.assembly.add("output", output.shape, edge, exact=True)
        sites.append(Site("output", output.source, NO_NODE))

    def _refuse(self, node: fx.Node, remedy: str) -> None:
        name, kind = self._name(node)
        self.refused.add(node)
        self.unsupported.setdefault(
            (name, kind), UnsupportedNode(name, kind, MODULES.get(kind, remedy))
        )

    def _name(self, node: fx.Node) -> tuple[str, str]:
        return layer_name(node, node in self.program.opaque)

    def _operation(self, node: fx.Node) -> None:
        """Apply the rule of one operation; a result of several tensors waits for those that pick one of them."""
        broken = not self.refused.isdisjoint(producer(node).all_input_nodes)
        if isinstance(node.meta.get("val"), tuple | list):
            if broken:
                self.refused.add(node)
            return
        row_shape = tuple(
            size if isinstance(size, int) else 1 for size in recorded_shape(node)[1:]
        )
        try:
            call = self._call(node, row_shape)
            result = self._result_of_rule(call)
            if not broken:
                self._check_result(node)
                self.values[node] = self.assembly.append(call, result)
                return
        except Refusal as error:
            self._refuse(node, str(error))
        except TrainingModeError as error:
            self.training = self.training or error
        except _ERRORS as error:  # of torch, while the rule or its trial computes
            if not broken:
                reason = (str(error).strip().splitlines() or [""])[0]
                remedy = (
                    "its rule fails"
                    if producer(node) in self.program.opaque
                    else DEFAULT
                )
                self._refuse(node, f"{remedy} ({type(error).__name__}: {reason})")
        # What follows is looked at too, so that all that is refused can be named at
        # once.
        self.refused.add(node)
        self.values[node] = Input(0, row_shape)

    def _call(self, node: fx.Node, out_shape: Shape) -> Call:
        """What a rule gets to see of an operation."""
        operation = producer(node)
        index: Any = None if operation is node else node.args[1]
        given: Any = fx.map_arg((operation.args, operation.kwargs), self._resolve)
        args, kwargs = as_executed(operation, given[0], given[1], self.program.dtype)
        for key, value in kwargs.items():
            if isinstance(value, torch.dtype) and value == self.program.dtype:
                kwargs[key] = self.dtype  # float64 in the exact network
        invoke: Any = operation.target
        module = None
        opaque = self.program.opaque.get(operation)
        if opaque is not None:
            args = args[:1]
            module, invoke = opaque.module, opaque.program.run
            if self.exact:
                module = deepcopy(module).requires_grad_(False).double()
                invoke = opaque.program.cast(self.dtype).run
        name, _ = self._name(node)
        typed = self.program.typed
        return Call(
            name,
            invoke,
            args,
            kwargs,
            out_shape,
            self.dtype,
            typed,
            operation,
            module,
            index,
            self.local,
            self.apart,
        )

    def _resolve(self, node: fx.Node) -> Any:
        """What a rule gets to see in place of a node among the arguments."""
        kind = self.program.kinds[node]
        if node in self.values:
            return self.values[node]
        if kind == "dependent":
            raise Refusal(
                "it reads several results of one operation at once; pick one of them first"
            )
        if kind == "constant":
            return self._constant(node)
        if packet_name(node) == "item":
            raise Refusal(
                "it reads a number from a tensor with .item(); use the tensor itself"
            )
        if (
            node.target is torch.ops.aten.sym_size.int
            and node.meta["val"] == self.batch
        ):
            return BatchSize()
        return _OtherSize()

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

    def _result_of_rule(self, call: Call) -> Any:
        target: Any = call.node.target
        rule = None
        if call.node in self.program.opaque:
            rule = self.program.opaque[call.node].rule
        elif hasattr(target, "_schema") or target is torch.nn.functional.softsign:
            rule = find_rule(operator_name(target))
        if rule is None:
            raise Refusal(DEFAULT)
        _check_batch_size(call)
        return rule(call, *call.args, **call.kwargs)

    def _check_result(self, node: fx.Node) -> None:
        """The first axis is that of the batch, no other one is, and entries are of the model's type."""
        value = node.meta["val"]
        if (
            not value.shape
            or not isinstance(value.shape[0], torch.SymInt)
            or value.shape[0] != self.batch
        ):
            raise Refusal("it does not keep the batch axis in front")
        if any(isinstance(n, torch.SymInt) for n in value.shape[1:]):
            raise Refusal("it puts the rows of the batch beside each other")
        if value.dtype != self.program.dtype:
            raise Refusal(
                f"it computes in {value.dtype} inside a model in {self.program.dtype}; use one type throughout"
            )


def _check_batch_size(call: Call) -> None:
    """The number of rows may only be part of a shape."""
    if call.operator in ("slice", "slice_scatter"):  # judged by their results
        return
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, BatchSize) or any(
            isinstance(leaf, _OtherSize) for leaf in tree_leaves(value)
        ):
            raise Refusal(
                "it reads the number of rows of the batch, so each row depends on the whole batch"
            )
