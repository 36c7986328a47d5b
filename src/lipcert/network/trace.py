"""From a PyTorch module to the normal form, by torch.fx."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from lipcert.errors import OptionError, ShapeError, TrainingModeError, UnsupportedError, UnsupportedNode, check_choice
from lipcert.network.linear import Function, Identity, LinearOp, Live, Scale, Shape
from lipcert.network.normal_form import Edge, Network, Node, Site
from lipcert.network.probe import Probe, TensorShape, changing_rows, type_of
from lipcert.network.rules import VIEWS, Call, Constant, Input, Refusal, Sum, find_rule
from lipcert.network.slopes import Slope
from lipcert.network.symbolic import trace_graph

_HOOKS = (
    "it has forward hooks, which may change what it computes; remove them "
    "(torch.nn.utils.parametrizations replaces the old weight_norm and spectral_norm)"
)
_DEFAULT_REMEDY = "register a rule with @lipcert.register_rule, or rewrite it with supported operations"


def exact_copy(model: nn.Module) -> nn.Module:
    """A float64 copy with the weights that the model executes: its parametrisations are evaluated in its own type."""
    copied = copy.deepcopy(model)
    for module in list(copied.modules()):
        if parametrize.is_parametrized(module):
            assert isinstance(module.parametrizations, nn.ModuleDict)
            tensors = {name: getattr(module, name).detach() for name in module.parametrizations}
            # Not remove_parametrizations: it would change the class, which the copy shares with the model.
            del module.parametrizations
            module.__class__ = type(module).__bases__[0]
            for name, tensor in tensors.items():
                module.register_parameter(name, nn.Parameter(tensor))
    return copied.double()


def trace(model: nn.Module, input_shape: Shape, *, training: bool = False, view: str = "residual") -> Network:
    """Trace a model into a `Network` that shares the model's parameters.

    Args:
        model: any feed-forward module whose forward takes one tensor.
        input_shape: shape of one input, without the batch axis.
        training: accept BatchNorm and Dropout in training mode and treat them as in eval mode.
        view: how layers that are Lipschitz by construction (`layers.RhoLipschitzLinear`, …) appear: in their "residual"
            form; "opaque", as one site with the constant they promise, read anew whenever it is used; or "certified",
            as one site with the constant that is proved for their present weights.

    Raises:
        UnsupportedError: lists every operation without a rule, with its remedy.
        TrainingModeError: BatchNorm or Dropout is in training mode.
        ShapeError: the model does not accept inputs of this shape.
    """
    check_choice("view", view, VIEWS)
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is a {type(model).__name__}, expected a torch.nn.Module; wrap functions in one")
    input_shape = _checked(input_shape)
    if find_rule(model, view) is None and _has_hooks(model):
        raise UnsupportedError([UnsupportedNode(type(model).__name__, "hooks", _HOOKS)])
    was_training = {module for module in model.modules() if module.training} if not training else set()
    with _eval_mode(model):
        graph = trace_graph(model, view)
        return _Builder(graph, model, input_shape, was_training, view).build(input_shape)


def _checked(input_shape: Any) -> Shape:
    try:
        sizes = tuple(operator.index(n) for n in input_shape)
    except TypeError:
        sizes = (0,)
    if min(sizes, default=1) < 1:
        shown = input_shape if isinstance(input_shape, int | tuple | list) else f"a {type(input_shape).__name__}"
        raise ShapeError(f"input_shape is {shown}, expected a tuple without the batch axis, such as (3, 32, 32)")
    return sizes


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


class _Builder:
    """Walks the graph once, applies the rules, collects everything that has none."""

    def __init__(
        self, graph: fx.GraphModule, model: nn.Module, input_shape: Shape, training: set[nn.Module], view: str
    ) -> None:
        self.graph, self.model, self.view = graph, model, view
        self.training = training
        first, second = (Probe(graph, input_shape, batch) for batch in (2, 3))
        self.results, self.results_other = first.results, second.results
        self.changing = changing_rows(first.first_rows, second.first_rows)
        self.faithful = first.faithful and second.faithful
        self.dtype, self.device = type_of(model)
        self.nodes: list[Node] = []
        self.sites: list[Site] = []
        self.values: dict[fx.Node, Input] = {}
        self.unsupported: list[UnsupportedNode] = []

    def build(self, input_shape: Shape) -> Network:
        output: Input | None = None
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, input_shape)
            elif node.op == "output":
                output = self._output(node)
            elif any(source in self.values for source in node.all_input_nodes):
                self._operation(node) if self._is_tensor(node) else self._other(node)
        if not self.faithful:
            remedy = "an in-place operation changes a tensor that is used elsewhere too; use the out-of-place version"
            self.unsupported.append(UnsupportedNode(type(self.model).__name__, "in-place", remedy))
        if self.unsupported:
            raise UnsupportedError(self.unsupported)
        assert output is not None
        self.sites.append(Site("output", output.source, -1))
        produced = {node: value.source for node, value in self.values.items()}
        return Network(tuple(self.nodes), tuple(self.sites), self.dtype, self.device, self.graph, produced)

    def _placeholder(self, node: fx.Node, input_shape: Shape) -> None:
        if self.values:  # an input with a default value, which is a constant
            return
        self.sites.append(Site("input", -1, 0))
        self.values[node] = self._add(Node("input", input_shape))

    def _output(self, node: fx.Node) -> Input | None:
        result = node.args[0]
        if not isinstance(result, fx.Node) or result not in self.values:
            if not self.unsupported:
                self._refuse(node, "the model must return one tensor that depends on its input")
            return None
        value = self.values[result]
        if value.source in {site.output for site in self.sites}:  # the output site needs a linear node of its own
            value = self._add(Node("output", value.shape, (Edge(value.source, Identity(value.shape)),)))
        return value

    def _operation(self, node: fx.Node) -> None:
        first, other = self.results[node], self.results_other[node]
        if not first or first[0] != 2 or other[0] != 3 or first[1:] != other[1:]:
            self._refuse(node, "it does not keep the batch axis in front")
            self.values[node] = Input(0, first[1:])
            return
        call = self._call(node, first[1:])
        rule, kind = self._rule(node)
        try:
            if call.module is not None and _has_hooks(call.module):
                raise Refusal(_HOOKS)
            if rule is None:
                raise Refusal(_DEFAULT_REMEDY)
            result = rule(call, *call.args, **call.kwargs)
            if node in self.changing and self.changing.isdisjoint(node.all_input_nodes):
                raise Refusal("each row of its result depends on the whole batch, or on chance; use another operation")
            self.values[node] = self._apply(call, result)
        except (Refusal, TypeError) as error:
            remedy = str(error) if isinstance(error, Refusal) else f"{_DEFAULT_REMEDY} ({error})"
            self.unsupported.append(UnsupportedNode(call.name, kind, remedy))
            self.values[node] = Input(0, first[1:])
        except TrainingModeError:
            if self.unsupported:
                raise UnsupportedError(self.unsupported) from None
            raise

    def _other(self, node: fx.Node) -> None:
        """A result that is not a tensor: sizes are constants, several tensors or numbers read from one are refused."""
        leaves = torch.utils._pytree.tree_leaves(self.results[node])
        if all(leaf is None or isinstance(leaf, int | str | torch.dtype | torch.device) for leaf in leaves):
            return
        slices = "use slices instead, x[:, :k] and x[:, k:]"
        remedy = f"it returns several tensors; {_DEFAULT_REMEDY if node.op == 'call_module' else slices}"
        rule, kind = self._rule(node)
        if rule is not None and isinstance(leaves[0], Tensor):
            call = self._call(node, tuple(leaves[0].shape[1:]))
            try:
                rule(call, *call.args, **call.kwargs)
            except (Refusal, TypeError) as error:
                remedy = str(error) if isinstance(error, Refusal) else remedy
        self.unsupported.append(UnsupportedNode(self._name(node), kind, remedy))
        for user in node.users:  # the parts, so that what follows from them is looked at too
            if self._is_tensor(user):
                self.values[user] = Input(0, self.results[user][1:])

    def _apply(self, call: Call, result: Any) -> Input:
        """Append what a rule returned to the network."""
        if isinstance(result, Input):
            return result
        if isinstance(result, Slope):
            source = call.inputs[0]
            value = self._add(Node(call.name, call.out_shape))
            self.sites.append(Site(call.name, source.source, value.source, result))
            return value
        terms = (
            result.terms
            if isinstance(result, Sum)
            else [(call.inputs[0], [result] if isinstance(result, LinearOp) else result)]
        )
        edges = tuple(self._edge(call, source, chain) for source, chain in terms)
        return self._add(Node(call.name, call.out_shape, edges, _offset(call, edges)))

    def _edge(self, call: Call, source: Input, chain: Any) -> Edge:
        """The last operation of a chain as an edge; the ones before it become nodes."""
        for op in chain:
            if isinstance(op, Function) and (problem := op.check(self.dtype, self.device)) is not None:
                raise Refusal(f"its rule gives a linear operation that {problem}")
        *inner, last = chain or [Identity(source.shape)]
        for op in inner:
            source = self._add(Node(call.name, op.out_shape, (Edge(source.source, op),)))
        return Edge(source.source, last)

    def _call(self, node: fx.Node, out_shape: Shape) -> Call:
        module = self.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        invoke: Any = module or (node.target if node.op == "call_function" else _method(str(node.target)))
        args, kwargs = fx.map_arg(node.args, self._resolve), fx.map_arg(node.kwargs, self._resolve)
        training = (module or self.model) in self.training
        return Call(self._name(node), module, invoke, tuple(args), kwargs, out_shape, training)

    def _name(self, node: fx.Node) -> str:
        """The qualified name of a module, or of a function call within the module that makes it."""
        if node.op == "call_module":
            return str(node.target)
        owners = list((node.meta.get("nn_module_stack") or {}).values())
        return f"{owners[-1][0]}.{node.name}" if owners and owners[-1][0] else node.name

    def _rule(self, node: fx.Node) -> tuple[Any, str]:
        if node.op == "call_module":
            module = self.graph.get_submodule(str(node.target))
            return find_rule(module, self.view), type(module).__name__
        if node.op == "call_method":
            return find_rule(str(node.target)), f"Tensor.{node.target}"
        target: Any = node.target
        return find_rule(target), getattr(target, "__name__", str(target))

    def _resolve(self, node: fx.Node) -> Any:
        if node in self.values:
            return self.values[node]
        return Constant(lambda: self._read(node)) if self._is_tensor(node) else self.results[node]

    def _read(self, node: fx.Node) -> Any:
        """The present value of a node that does not depend on the network's input."""
        if not self._is_tensor(node):
            return self.results[node]
        if node.op == "get_attr":
            target = str(node.target)
            written = "." not in target and not hasattr(self.model, target)  # a constant that is written in forward
            return operator.attrgetter(target)(self.graph if written else self.model)
        args, kwargs = fx.map_arg(node.args, self._read), fx.map_arg(node.kwargs, self._read)
        if node.op == "call_module":
            return self.graph.get_submodule(str(node.target))(*args, **kwargs)
        function: Any = node.target if node.op == "call_function" else _method(str(node.target))
        return function(*args, **kwargs)

    def _is_tensor(self, node: fx.Node) -> bool:
        return isinstance(self.results[node], TensorShape)

    def _refuse(self, node: fx.Node, remedy: str) -> None:
        kind = str(node.target) if node.op in ("call_method", "output", "placeholder") else self._rule(node)[1]
        self.unsupported.append(UnsupportedNode(self._name(node), kind, remedy))

    def _add(self, node: Node) -> Input:
        self.nodes.append(node)
        return Input(len(self.nodes) - 1, node.shape)


def _offset(call: Call, edges: tuple[Edge, ...]) -> Live | None:
    """How to read the magnitude of the constants that an operation adds; None if it only moves entries."""
    for edge in edges:
        if isinstance(edge.op, Scale) and edge.op.offset is not None:
            return edge.op.offset
    exact = len(edges) == 1 and edges[0].op.terms == 0 and not isinstance(edges[0].op, Identity)
    return None if exact else lambda: call.at_zero().abs()


def _method(name: str) -> Any:
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, name)(*args, **kwargs)

    return call
