"""From a captured program to the normal form: one rule per operator, and a list of everything that has none."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from lipcert.errors import TrainingModeError, UnsupportedError, UnsupportedNode, check_choice
from lipcert.network.capture import capture, check_state, compare, evaluated
from lipcert.network.checks import check_node, check_passed, check_site
from lipcert.network.linear import Identity, LinearOp, Scale
from lipcert.network.normal_form import Edge, Network, Node, Site
from lipcert.network.program import Live, Program, Shape, packet_name
from lipcert.network.rules.call import BatchSize, Call, Constant, Extremum, Input, Refusal, Sum, broadcast
from lipcert.network.rules.refusals import DEFAULT, MODULES
from lipcert.network.rules.registry import VIEWS, find_rule, operator_name
from lipcert.network.slopes import ABS, Slope

_BATCH = BatchSize()
_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError)
_UNINITIALISED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_ROWS_ALIKE = (
    "expand", "expand_as", "repeat", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "zeros_like",
    "ones_like", "full_like", "fill", "copy", "to", "_to_copy", "type_as", "clone", "view_as", "reshape_as",
    "lift_fresh_copy", "contiguous", "detach", "alias",
)  # fmt: skip
"""Operators whose result has equal rows if their arguments have."""


def trace(model: nn.Module, input_shape: Shape, *, training: bool = False, view: str = "residual") -> Network:
    """Trace a model into a `Network` that shares the model's parameters.

    The model is captured by torch.export in the mode it is in, and the captured program is compared with the model.

    Args:
        model: any feed-forward module whose forward takes one tensor.
        input_shape: shape of one input, without the batch axis.
        training: put the model into eval mode meanwhile, so that BatchNorm and Dropout may be in training mode.
        view: how layers that are Lipschitz by construction (`layers.RhoLipschitzLinear`, …) appear: in their "residual"
            form, or "certified", as one site with the constant that is proved for their present weights.

    Raises:
        UnsupportedError: lists every operation without a rule, with its remedy.
        TrainingModeError: BatchNorm or Dropout is in training mode.
        ShapeError: the model does not accept inputs of this shape.

    Example:
        >>> lipcert.trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), (4,))
        Network((4,) → (3,), 1 nonlinearities: 1)
    """
    check_choice("view", view, VIEWS)
    if training and isinstance(model, nn.Module):
        with evaluated(model):
            return _traced(model, input_shape, view)
    return _traced(model, input_shape, view)


def _traced(model: nn.Module, input_shape: Shape, view: str) -> Network:
    program = capture(model, input_shape, view)
    network = normal_form(program)
    check_state(program, model)
    compare(program, model)
    return network


@torch.no_grad()
def normal_form(program: Program, *, exact: bool = False, check: bool = True) -> Network:
    """The normal form of a program; `exact` in float64, with the values of all constants as the program computes them.

    Rules are tried out unless `check` is False, for a program whose rules have been tried out already.
    """
    return _Builder(program, exact, check).build()


class _Builder:
    """Walks the program once, applies the rules, collects everything that has none."""

    def __init__(self, program: Program, exact: bool, check: bool) -> None:
        self.program, self.exact, self.check = program, exact, check
        self.dtype = torch.float64 if exact else program.dtype
        self.batch = program.input.meta["val"].shape[0]
        self.nodes: list[Node] = []
        self.sites: list[Site] = []
        self.values: dict[fx.Node, Input] = {}
        self.unsupported: dict[tuple[str, str], UnsupportedNode] = {}
        self.refused: set[fx.Node] = set()
        self.training: TrainingModeError | None = None

    def build(self) -> Network:
        self.sites.append(Site("input", -1, 0))
        self.values[self.program.input] = self._add(Node("input", self.program.input_shape))
        for node in self.program.graph.nodes:
            kind = self.program.kinds.get(node)
            if kind == "constant":
                self._check_constant(node)
            elif kind == "dependent" and node is not self.program.input:
                self._operation(node)
        if self.unsupported:
            raise UnsupportedError(list(self.unsupported.values()))
        if self.training is not None:
            raise self.training
        self._finish()
        produced = {node: value.source for node, value in self.values.items()}
        return Network(tuple(self.nodes), tuple(self.sites), self.dtype, self.program.device, self.program, produced)

    def _finish(self) -> None:
        output = self.values.get(self.program.output)
        if output is None:
            remedy = "the model must return one tensor that depends on its input"
            raise UnsupportedError([UnsupportedNode("output", "output", remedy)])
        if output.source in {site.output for site in self.sites}:  # the output site needs a linear node of its own
            output = self._add(Node("output", output.shape, (Edge(output.source, Identity(output.shape)),), exact=True))
            self.values[self.program.output] = output
        self.sites.append(Site("output", output.source, -1))

    def _operation(self, node: fx.Node) -> None:
        """Apply the rule of one operation; a result of several tensors waits for those that pick one of them."""
        value = node.meta.get("val")
        if isinstance(value, tuple | list):
            if any(source in self.refused for source in node.all_input_nodes):
                self.refused.add(node)
            return
        name, kind = self._name(node)
        shape = tuple(getattr(value, "shape", ()))
        row_shape = tuple(int(n) if isinstance(n, int) else 1 for n in shape[1:])
        broken = any(source in self.refused for source in _producer(node).all_input_nodes)
        try:
            call = self._call(node, name, row_shape)
            result = self._rule(call, node)
            if not broken:
                self._check_result(node)
                self.values[node] = self._apply(call, result)
                return
        except Refusal as error:
            self._refuse(node, name, kind, str(error))
        except TrainingModeError as error:
            self.training = self.training or error
        except _ERRORS as error:  # of torch, while the rule or its trial computes
            if not broken:
                self._refuse(node, name, kind, f"{DEFAULT} ({str(error).splitlines()[0]})")
        # What follows is looked at too, so that all that is refused can be named at once.
        self.refused.add(node)
        self.values[node] = Input(0, row_shape)

    def _rule(self, call: Call, node: fx.Node) -> Any:
        producer = _producer(node)
        if producer in self.program.opaque:
            rule = self.program.opaque[producer].rule
        else:
            named = hasattr(producer.target, "_schema") or producer.target is torch.nn.functional.softsign
            rule = find_rule(operator_name(producer.target)) if named else None
        if rule is None:
            raise Refusal(DEFAULT)
        _check_batch_size(call)
        return rule(call, *call.args, **call.kwargs)

    def _check_result(self, node: fx.Node) -> None:
        """The first axis is that of the batch, no other one is, and entries are of the model's type."""
        value = node.meta["val"]
        if not value.shape or not isinstance(value.shape[0], torch.SymInt) or value.shape[0] != self.batch:
            raise Refusal("it does not keep the batch axis in front")
        if any(isinstance(n, torch.SymInt) for n in value.shape[1:]):
            raise Refusal("it puts the rows of the batch beside each other")
        if value.dtype != self.program.dtype:
            raise Refusal(
                f"it computes in {value.dtype} inside a model in {self.program.dtype}; use one type throughout"
            )

    def _check_constant(self, node: fx.Node) -> None:
        """Constants must be the same in every run and for every row of a batch."""
        name = packet_name(node)
        tags = getattr(node.target, "tags", ())
        value = node.meta.get("val")
        shape: list[Any] = list(getattr(value, "shape", ()))
        unset = name in _UNINITIALISED and 0 not in shape
        if unset or (torch.Tag.nondeterministic_seeded in tags and not _is_inactive_dropout(node)):
            self._refuse(node, *self._name(node), "its result depends on chance; use a parameter or a buffer")
        elif self._reads_size(node):
            self._refuse(node, *self._name(node), "it depends on the number of rows of the batch")
        elif any(isinstance(n, torch.SymInt) for n in shape):
            alike = name in _ROWS_ALIKE or torch.Tag.pointwise in tags
            in_front = not any(isinstance(n, torch.SymInt) for n in shape[1:]) and shape[0] == self.batch
            if not alike or not in_front:
                self._refuse(node, *self._name(node), "it depends on the number of rows of the batch")

    def _reads_size(self, node: fx.Node) -> bool:
        """Whether a constant uses the number of rows as anything but the first axis of a shape."""
        for value in (*node.args, *node.kwargs.values()):
            items: list[Any] = list(value) if isinstance(value, list | tuple) else [None, value]
            for place, item in enumerate(items):
                if not isinstance(item, fx.Node) or self.program.kinds[item] != "size":
                    continue
                if place > 0 or item.target is not torch.ops.aten.sym_size.int:
                    return True
        return False

    def _apply(self, call: Call, result: Any) -> Input:
        """Append what a rule returned to the network."""
        if isinstance(result, Input):
            if result.shape != call.out_shape:
                raise Refusal(f"its rule passes on a tensor of shape {result.shape}, its result has {call.out_shape}")
            if self.check:
                check_passed(call, result)
            return result
        if isinstance(result, Slope):
            return self._nonlinearity(call, result)
        if isinstance(result, Extremum):
            return self._extremum(call, result)
        terms = result.terms if isinstance(result, Sum) else [(call.inputs[0], result)]
        edges = []
        for source, chain in terms:
            edges.append(self._edge(call, source, [chain] if isinstance(chain, LinearOp) else list(chain)))
        if any(edge.op.out_shape != call.out_shape for edge in edges):
            raise Refusal(f"its rule gives a result of another shape than {call.out_shape}")
        node = Node(call.name, call.out_shape, tuple(edges), _offset(call, tuple(edges)))
        if self.check:
            check_node(call, node, result, self.dtype)
        return self._add(node)

    def _nonlinearity(self, call: Call, slope: Slope) -> Input:
        source = call.inputs[0]
        if slope.elementwise and source.shape != call.out_shape:
            copies = Edge(source.source, broadcast(source.shape, call.out_shape))
            source = self._add(Node(call.name, call.out_shape, (copies,), exact=True))
        if self.check:
            check_site(call, slope, source.shape, self.dtype)
        value = self._add(Node(call.name, call.out_shape))
        self.sites.append(Site(call.name, source.source, value.source, slope))
        return value

    def _extremum(self, call: Call, pair: Extremum) -> Input:
        """(a + b)/2 ± |a − b|/2: a difference, its absolute value, and a sum, none of which the program computes."""
        shape = call.out_shape
        sides = []
        for side in (pair.first, pair.second):
            if side.shape == shape:
                sides.append(side.source)
            else:
                copies = Edge(side.source, broadcast(side.shape, shape))
                sides.append(self._add(Node(call.name, shape, (copies,), exact=True)).source)
        difference = (Edge(sides[0], Identity(shape)), Edge(sides[1], Identity(shape, sign=-1)))
        source = self._add(Node(f"{call.name} difference", shape, difference, exact=True)).source
        absolute = self._add(Node(call.name, shape)).source
        self.sites.append(Site(call.name, source, absolute, ABS))
        halves = [(sides[0], 0.5), (sides[1], 0.5), (absolute, 0.5 * pair.sign)]
        edges = tuple(Edge(node, Scale(_number(factor), shape, terms=1)) for node, factor in halves)
        return self._add(Node(f"{call.name} sum", shape, edges, exact=True))

    def _edge(self, call: Call, source: Input, chain: list[LinearOp]) -> Edge:
        """The last operation of a chain as an edge; the ones before it become nodes."""
        *inner, last = chain or [Identity(source.shape)]
        for op in inner:
            source = self._add(Node(call.name, op.out_shape, (Edge(source.source, op),)))
        return Edge(source.source, last)

    def _call(self, node: fx.Node, name: str, out_shape: Shape) -> Call:
        producer = _producer(node)
        index: Any = node.args[1] if producer is not node else None
        opaque = self.program.opaque.get(producer)
        args = tuple(fx.map_arg(producer.args, self._resolve))
        kwargs = {key: self._cast(value) for key, value in fx.map_arg(dict(producer.kwargs), self._resolve).items()}
        if opaque is None:
            target: Any = producer.target
            return Call(
                name, target, args, kwargs, out_shape, self.dtype, self.program.typed, node=producer, index=index
            )
        module = deepcopy(opaque.module).requires_grad_(False).double() if self.exact else opaque.module
        invoke = partial(run_as, opaque.program, self.dtype) if self.exact else opaque.program.run
        return Call(name, invoke, args[:1], kwargs, out_shape, self.dtype, self.program.typed, producer, module)

    def _cast(self, value: Any) -> Any:
        """A type that the program asks for is, in the exact network, float64."""
        return self.dtype if isinstance(value, torch.dtype) and value == self.program.dtype else value

    def _resolve(self, node: fx.Node) -> Any:
        """What a rule gets to see in place of a node among the arguments."""
        if node in self.values:
            return self.values[node]
        if self.program.kinds[node] == "size":
            if packet_name(node) == "item":
                raise Refusal("it reads a number from a tensor with .item(); use the tensor itself")
            is_batch = node.target is torch.ops.aten.sym_size.int and node.meta["val"] == self.batch
            return _BATCH if is_batch else _OTHER
        if self.program.kinds[node] == "dependent":
            raise Refusal("it reads several results of one operation at once; pick one of them first")
        if isinstance(node.meta["val"], Tensor) and node.meta["val"].is_complex():
            raise Refusal("complex numbers are not supported; use real and imaginary parts")
        return Constant(self._reader(node), self.program.is_batched(node))

    def _reader(self, node: fx.Node) -> Live:
        if not self.exact:
            return partial(self.program.constant, node)
        value = self.program.constant(node).detach()
        value = value.double() if value.is_floating_point() else value
        return lambda: value

    def _name(self, node: fx.Node) -> tuple[str, str]:
        """The qualified name and the type of a layer, or of a call within the module that makes it."""
        stack = [(path, kind) for path, kind in (node.meta.get("nn_module_stack") or {}).values() if path]
        own = [(path, _class_name(kind)) for path, kind in stack if path.split(".")[0] == "model"]
        for path, kind in own:  # the outermost module that is refused as a whole
            if kind.split(".")[-1] in MODULES and kind.startswith("torch.nn."):
                return path.removeprefix("model").removeprefix(".") or kind.split(".")[-1], kind.split(".")[-1]
        path, kind = own[-1] if own else ("model", "")
        path = path.removeprefix("model").removeprefix(".")
        operator = packet_name(_producer(node))
        if kind.startswith(("torch.nn.modules", "lipcert.layers")) or node in self.program.opaque:
            return path or kind.split(".")[-1].lower(), kind.split(".")[-1]
        return (f"{path}.{node.name}" if path else node.name), operator

    def _refuse(self, node: fx.Node, name: str, kind: str, remedy: str) -> None:
        self.refused.add(node)
        self.unsupported.setdefault((name, kind), UnsupportedNode(name, kind, MODULES.get(kind, remedy)))

    def _add(self, node: Node) -> Input:
        self.nodes.append(node)
        return Input(len(self.nodes) - 1, node.shape)


class _OtherSize:
    """Stands for a number computed from the number of rows."""


_OTHER = _OtherSize()


def run_as(program: Program, dtype: torch.dtype, x: Tensor) -> Tensor:
    """A program executed in another type, with the constants that it computes in its own."""
    constants = {}
    for node in program.graph.nodes:
        if program.kinds.get(node) == "constant" and not program.is_batched(node):
            constants[node] = program.constant(node)
    cast = {
        n: (lambda v=v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v)
        for n, v in constants.items()
    }
    return replace(program, dtype=dtype, tensors=cast).run(x)


def _producer(node: fx.Node) -> fx.Node:
    """The operation itself, or the one of whose results a node picks one."""
    if node.target is getitem and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return node


def _check_batch_size(call: Call) -> None:
    """The number of rows may only be part of a shape."""
    if call.node is not None and packet_name(call.node) in ("slice", "slice_scatter"):  # judged by their results
        return
    for value in (*call.args, *call.kwargs.values()):
        items = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, BatchSize) or any(isinstance(item, _OtherSize) for item in items):
            raise Refusal("it reads the number of rows of the batch, so each row depends on the whole batch")


def _offset(call: Call, edges: tuple[Edge, ...]) -> Live | None:
    """How to read the magnitude of the constants that an operation adds; None if it only moves entries."""
    for edge in edges:
        if isinstance(edge.op, Scale) and edge.op.offset is not None:
            return edge.op.offset
    exact = len(edges) == 1 and edges[0].op.terms == 0 and not edges[0].op.adds
    return None if exact else lambda: call.at_zero().abs()


def _is_inactive_dropout(node: fx.Node) -> bool:
    return "dropout" in packet_name(node) and node.args[-1] is False


def _number(value: float) -> Live:
    number = torch.tensor(value, dtype=torch.float64)
    return lambda: number


def _class_name(kind: Any) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
