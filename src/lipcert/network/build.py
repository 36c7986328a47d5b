"""From a captured program to the normal form: one rule per operator, and a list of everything that has none."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn

from lipcert.errors import (
    TrainingModeError,
    UnsupportedError,
    UnsupportedNode,
    check_choice,
)
from lipcert.network.assembly import Assembly
from lipcert.network.call_reader import CallReader
from lipcert.network.capture import CAPTURE_LOCK, capture
from lipcert.network.capture_comparison import check_capture
from lipcert.network.constant_refusals import constant_problem
from lipcert.network.explain import first_line
from lipcert.network.kinds import recorded_shape
from lipcert.network.linear import Identity
from lipcert.network.names import layer_name, producer
from lipcert.network.normal_form import NO_NODE, Edge, Network, Site
from lipcert.network.program import Program, Shape
from lipcert.network.rules.call import Call, check_batch_size
from lipcert.network.rules.refusals import DEFAULT, MODULES
from lipcert.network.rules.registry import VIEWS, find_rule, operator_name
from lipcert.network.rules.values import Input, Refusal
from lipcert.network.states import evaluated

# Of torch, while a rule or its trial computes.
_ERRORS: tuple[type[Exception], ...] = (RuntimeError, TypeError, ValueError)
_ERRORS += (LookupError, AttributeError, AssertionError, ArithmeticError)


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
        self.program = program
        self.dtype = torch.float64 if exact else program.dtype
        self.batch = recorded_shape(program.input)[0]
        self.assembly = Assembly(self.dtype, check)
        self.values: dict[fx.Node, Input] = {}
        self.reader = CallReader(program, self.values, self.dtype, exact, local, apart)
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
        nodes, sites = tuple(assembly.nodes), tuple(assembly.sites)
        return Network(nodes, sites, self.dtype, program.device, program, produced)

    def _finish(self) -> None:
        output, sites = self.values.get(self.program.output), self.assembly.sites
        if output is None:
            remedy = "the model must return one tensor that depends on its input"
            raise UnsupportedError([UnsupportedNode("output", "output", remedy)])
        if 0 in output.shape:
            remedy = (
                f"the model returns no numbers, rows of shape {output.shape}; "
                "it needs a logit for every class"
            )
            raise UnsupportedError([UnsupportedNode("output", "output", remedy)])
        # The output site needs a linear node of its own.
        if output.source in [site.output for site in sites]:
            edge = Edge(output.source, Identity(output.shape))
            output = self.assembly.add("output", output.shape, edge, exact=True)
        sites.append(Site("output", output.source, NO_NODE))

    def _refuse(self, node: fx.Node, remedy: str) -> None:
        name, kind = self._name(node)
        self.refused.add(node)
        refused = UnsupportedNode(name, kind, MODULES.get(kind, remedy))
        self.unsupported.setdefault((name, kind), refused)

    def _name(self, node: fx.Node) -> tuple[str, str]:
        return layer_name(node, node in self.program.opaque)

    def _operation(self, node: fx.Node) -> None:
        """Apply the rule of one operation; a result of several tensors waits for those that pick one of them."""
        broken = not self.refused.isdisjoint(producer(node).all_input_nodes)
        if isinstance(node.meta.get("val"), tuple | list):
            if broken:
                self.refused.add(node)
            return
        sizes = recorded_shape(node)[1:]
        row_shape = tuple(size if isinstance(size, int) else 1 for size in sizes)
        try:
            call = self.reader.call(node, row_shape)
            result = self._result_of_rule(call)
            if not broken:
                self._check_result(node)
                self.values[node] = self.assembly.append(call, result)
                return
        except Refusal as error:
            self._refuse(node, str(error))
        except TrainingModeError as error:
            self.training = self.training or error
        except _ERRORS as error:
            if not broken:
                reason = first_line(error)
                has_own = producer(node) in self.program.opaque
                remedy = "its rule fails" if has_own else DEFAULT
                self._refuse(node, f"{remedy} ({type(error).__name__}: {reason})")
        # What follows is looked at too, so that all that is refused can be named at
        # once.
        self.refused.add(node)
        self.values[node] = Input(0, row_shape)

    def _result_of_rule(self, call: Call) -> Any:
        target: Any = call.node.target
        rule = None
        if call.node in self.program.opaque:
            rule = self.program.opaque[call.node].rule
        elif hasattr(target, "_schema") or target is torch.nn.functional.softsign:
            rule = find_rule(operator_name(target))
        if rule is None:
            raise Refusal(DEFAULT)
        check_batch_size(call)
        return rule(call, *call.args, **call.kwargs)

    def _check_result(self, node: fx.Node) -> None:
        """The first axis is that of the batch, no other one is, and entries are of the model's type."""
        value = node.meta["val"]
        has_rows = value.shape and isinstance(value.shape[0], torch.SymInt)
        if not has_rows or value.shape[0] != self.batch:
            raise Refusal("it does not keep the batch axis in front")
        if any(isinstance(n, torch.SymInt) for n in value.shape[1:]):
            raise Refusal("it puts the rows of the batch beside each other")
        if value.dtype != self.program.dtype:
            raise Refusal(
                f"it computes in {value.dtype} inside a model in "
                f"{self.program.dtype}; use one type throughout"
            )
