"""From a PyTorch module to a `Program`, by torch.export, and the proof by trial that both compute the same."""

from __future__ import annotations

import importlib
import inspect
import logging
import operator
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from threading import Lock
from traceback import walk_tb
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

from lipcert.errors import ModelError, OptionError, ShapeError, UnsupportedError, UnsupportedNode
from lipcert.network.program import Live, Opaque, Program, Shape, packet_name
from lipcert.network.rules.registry import Rule, find_module_rule

_NOT_USERS = {Path(torch.__file__).parent, Path(importlib.__file__).parent, Path(__file__).parents[1]}
"""Folders of code that is not the user's."""
_LOCK = Lock()
_TRIALS = (
    (1, "without gradients"), (1, "with gradients"), (2, "without gradients"), (2, "with gradients"),
    (7, "with gradients"), (2, "in inference mode"),
)  # fmt: skip
"""Numbers of rows, and how the model is called; what depends on them without gradients is in the graph's guards."""
_ROWS = (1, *range(2, 70), *(2**k + d for k in range(7, 31) for d in (-1, 0, 1)))
"""Numbers of rows for which conditions on them are tried out."""


class _Root(nn.Module):
    """Calls a model as users do, so that its hooks and its own __call__ are captured too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


_OPAQUE: list[nn.Module] = []
"""The modules that are single operations in the capture under way."""


@torch.library.custom_op("lipcert::opaque", mutates_args=())
def _opaque(x: Tensor, index: int) -> Tensor:
    result: Tensor = _OPAQUE[index](x)
    return result


@_opaque.register_fake
def _(x: Tensor, index: int) -> Tensor:
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad():
        like = torch.zeros(2, *(int(n) for n in x.shape[1:]), dtype=x.dtype, device=x.device)
        result = _OPAQUE[index](like)
    if not isinstance(result, Tensor) or len(result) != 2:
        raise TypeError("a module with a rule must return one tensor with the batch axis in front")
    return x.new_empty(x.shape[0], *result.shape[1:])


def capture(model: nn.Module, input_shape: Shape, view: str = "residual") -> Program:
    """The program of a model in the mode it is in; modules that have a rule in this view are single operations.

    Raises:
        UnsupportedError: torch.export cannot follow the model's code.
        ShapeError: the model does not accept inputs of this shape.
    """
    input_shape = checked_shape(input_shape)
    _check_model(model)
    dtype, device = type_of(model)
    x = torch.zeros(2, *input_shape, dtype=dtype, device=device)
    with _LOCK, unchanged(model), _rules_as_operations(model, view) as opaque:
        try:
            exported = _export(_Root(model), x)
        except Exception as error:  # torch.export raises whatever the model's code raises
            raise _explained(error, model, x) from error
        graph = exported.graph_module.graph
        _check_graph(exported, model)
        _check_signature(exported, model)
        names = _tensor_names(exported)
        changed = tuple(str(target) for target in exported.graph_signature.buffers_to_mutate.values())
        tensors = {node: _reader(model, name, exported.constants.get(f"model.{name}")) for node, name in names.items()}
    _simplify(graph)
    inner = {}
    for node in graph.nodes:
        if node.target is torch.ops.lipcert.opaque.default:
            module, rule = opaque[node.args[1]]
            shape = tuple(node.args[0].meta["val"].shape[1:])
            inner[node] = Opaque(module, rule, capture(module, shape, view=""))
    return Program(graph, input_shape, dtype, device, tensors, names, inner, changed)


def _export(root: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    batch = {0: torch.export.Dim.DYNAMIC}
    with _quiet(), torch.no_grad(), torch.inference_mode(False):
        exported = torch.export.export(root, (x,), dynamic_shapes={"x": batch}, strict=False)
        if not all(_is_functional(node) for node in exported.graph.nodes):
            exported = exported.run_decompositions({})
    return exported


def _is_functional(node: fx.Node) -> bool:
    """Whether a node is a plain operator that changes none of its arguments."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.is_mutable
    return not isinstance(node.target, torch._ops.HigherOrderOperator)


def _tensor_names(exported: torch.export.ExportedProgram) -> dict[fx.Node, str]:
    """The names of the tensors that the graph reads, as the model calls them."""
    signature = exported.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    targets |= signature.inputs_to_lifted_tensor_constants
    names = {}
    for node in exported.graph_module.graph.nodes:
        if node.op == "placeholder" and node.name in targets:
            names[node] = targets[node.name].removeprefix("model.")
    return names


def _reader(model: nn.Module, path: str, constant: Any) -> Live:
    """Reads a tensor from the model itself; tensors that are written in its code are constants."""
    get = operator.attrgetter(path)
    try:
        found = isinstance(get(model), Tensor)
    except AttributeError:
        found = False
    return (lambda: get(model)) if found else (lambda: constant)


def _simplify(graph: fx.Graph) -> None:
    """Remove assertions and what is not used, and put operators in the place of others that return the same.

    Views become reshapes, which do not depend on memory formats.
    """
    for node in list(graph.nodes):
        if packet_name(node) in ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size"):
            graph.erase_node(node)
        elif node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
        elif packet_name(node) == "copy" and node.args[1].meta["val"].dtype == node.meta["val"].dtype:
            node.target, node.args = torch.ops.aten.expand_as.default, (node.args[1], node.args[0])  # differentiable
        elif packet_name(node) == "div" and _is_softsign(node):
            node.target, node.args = torch.nn.functional.softsign, node.args[:1]
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


def _is_softsign(node: fx.Node) -> bool:
    """Whether a quotient is x/(|x| + 1), as torch writes F.softsign."""
    if len(node.args) != 2 or node.kwargs or not isinstance(node.args[1], fx.Node):
        return False
    total = node.args[1]
    if packet_name(total) != "add" or len(total.args) != 2 or total.args[1] != 1 or total.kwargs:
        return False
    size = total.args[0]
    return isinstance(size, fx.Node) and packet_name(size) == "abs" and size.args == node.args[:1]


def _check_graph(exported: torch.export.ExportedProgram, model: nn.Module) -> None:
    """Refuse programs that hold for some numbers of rows only, and operators that contain programs."""
    name = type(model).__name__
    for node in exported.graph_module.graph.nodes:
        if node.op == "get_attr" or isinstance(node.target, torch._ops.HigherOrderOperator):
            remedy = f"it uses {node.target}, whose inside is not looked into; write it without control flow"
            raise UnsupportedError([UnsupportedNode(name, "torch.export", remedy)])
    signature = exported.graph_signature
    inputs = [node for node in exported.graph_module.graph.nodes if node.name in signature.user_inputs]
    if len(inputs) != 1 or not isinstance(inputs[0].meta.get("val"), Tensor) or signature.inputs_to_lifted_custom_objs:
        remedy = "it takes something else than one tensor, such as a random generator; use parameters and buffers"
        raise UnsupportedError([UnsupportedNode(name, "input", remedy)])
    x = inputs[0]
    batch = x.meta["val"].shape[0].node
    for condition in {guard.expr for guard in batch.shape_env.guards}:
        holds = sympy.lambdify([batch.expr], condition)
        if not all(bool(holds(rows)) for rows in _ROWS):
            remedy = f"its forward depends on the number of rows of a batch, {batch.expr}: {condition}"
            raise UnsupportedError([UnsupportedNode(name, "torch.export", remedy)])


def _check_signature(exported: torch.export.ExportedProgram, model: nn.Module) -> None:
    """Refuse models that return anything but one tensor, and leave only that as output."""
    signature, name = exported.graph_signature, type(model).__name__
    (output,) = (node for node in exported.graph_module.graph.nodes if node.op == "output")
    results = list({r for r in output.args[0] if isinstance(r, fx.Node) and r.name in signature.user_outputs})
    spec = exported.call_spec.out_spec
    if len(signature.user_outputs) != 1 or len(results) != 1 or (spec is not None and not spec.is_leaf()):
        remedy = "the model must return one tensor that depends on its input"
        raise UnsupportedError([UnsupportedNode(name, "output", remedy)])
    output.args = ((results[0],),)


@contextmanager
def _rules_as_operations(model: nn.Module, view: str) -> Iterator[list[tuple[nn.Module, Rule]]]:
    """Within, modules with a rule are calls of one operator; yields them in the order of their numbers."""
    found = [(m, rule) for m in model.modules() if (rule := find_module_rule(m, view)) is not None]
    copies = [deepcopy(module).requires_grad_(False) for module, _ in found]
    _OPAQUE.extend(copies)
    for index, (module, _) in enumerate(found):
        module.forward = _call_of(index)
    try:
        yield found
    finally:
        _OPAQUE.clear()
        for module, _ in found:
            vars(module).pop("forward", None)


def _call_of(index: int) -> Any:
    def forward(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.lipcert.opaque(x, index)
        return result

    return forward


def check_state(program: Program, model: nn.Module) -> None:
    """Refuse models that change their own buffers."""
    if program.changed:
        shown = ", ".join(name.removeprefix("model.") for name in program.changed)
        remedy = f"it changes {shown} whenever it runs, so that results depend on what it has seen; call model.eval()"
        raise UnsupportedError([UnsupportedNode(type(model).__name__, "state", remedy)])


def compare(program: Program, model: nn.Module) -> None:
    """Refuse a program that does not compute, bit for bit, what the model computes.

    Batches of several sizes whose rows have several magnitudes; with and without gradients, in inference mode, in other
    memory layouts; and once with an eye on operators that read values, which a branch may hide from torch.export.
    """
    with unchanged(model):
        for batch, mode in _TRIALS:
            found, expected = _both(program, model, batch, mode)
            difference = _difference(found.detach(), expected, batch)
            if difference is not None:
                raise _differs(model, f"{difference}, for a batch of {batch} {mode}")
        with _ReadsValues() as reads, torch.no_grad():
            model(_example(program, 2))
    if reads.operator is not None:
        raise _differs(model, f"it reads values of tensors by {reads.operator}")


def _both(program: Program, model: nn.Module, batch: int, mode: str) -> tuple[Tensor, Any]:
    """What the program and the model return."""
    grad, inference = mode == "with gradients", mode == "in inference mode"
    with torch.inference_mode(inference), torch.set_grad_enabled(grad), _quiet():
        x, own = (_example(program, batch, strided=inference) for _ in range(2))  # it may work in place
        try:
            with torch.random.fork_rng([]):
                expected = model(own.requires_grad_() * 1 if grad else own)
            found = program.run(x)
        except Exception as error:  # whatever the model's code raises
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise _differs(model, f"it fails {mode}, {type(error).__name__}: {reason}") from error
        return found, expected


def _differs(model: nn.Module, difference: str) -> UnsupportedError:
    remedy = (
        f"what torch.export captures is not what the model returns: {difference}; forward must not depend on the batch "
        "size (x.squeeze() does), on gradients being recorded, on memory layouts, on values that it reads, on chance, "
        "on earlier calls or on how it is called"
    )
    return UnsupportedError([UnsupportedNode(type(model).__name__, "capture", remedy)])


class _ReadsValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators that read values of tensors into Python; raising would not help, for models may catch errors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            self.operator = func
        return func(*args, **(kwargs or {}))


def _example(program: Program, batch: int, strided: bool = False) -> Tensor:
    """Rows that look like images, like noise of several magnitudes, and zero; if `strided`, in an odd layout."""
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, *program.input_shape, generator=generator, dtype=torch.float64)
    for row, scale in zip(range(batch), (1.0, 0.0, 100.0, 1e-3, 1e4, 3.0, 0.0), strict=False):
        x[row] *= scale
    x[1:2] = torch.rand(program.input_shape, generator=generator, dtype=torch.float64)
    x = x.to(program.device, program.dtype)
    if strided:  # a view in which the rows of the batch lie side by side
        return x.movedim(0, -1).repeat_interleave(2, -1)[..., 1::2].movedim(-1, 0)
    return x


def _difference(found: Tensor, expected: Any, batch: int) -> str | None:
    if not isinstance(expected, Tensor):
        return f"it returns a {type(expected).__name__}"
    expected = expected.detach()
    if expected.shape[:1] != (batch,):
        return f"the shape of its result is {tuple(expected.shape)}, without the batch axis in front"
    if found.shape != expected.shape:
        return f"the shape is {tuple(expected.shape)} instead of {tuple(found.shape)}"
    if found.dtype != expected.dtype:
        return f"the type is {expected.dtype} instead of {found.dtype}"
    same = (found == expected) | (found.isnan() & expected.isnan())
    if found.device.type != "cpu":  # kernels may be chosen anew for every call
        same |= (found - expected).abs() <= 1e-4 * expected.abs().amax()
    if bool(same.all()):
        return None
    return f"entries differ by up to {float((found - expected).abs().nan_to_num().max()):.3g}"


def _check_model(model: nn.Module) -> None:
    """Refuse what cannot be followed at all: wrappers, several inputs, weights that are not there."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is a {type(model).__name__}, expected a torch.nn.Module; wrap functions in one")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            remedy = "TorchScript cannot be followed; pass the original module"
        elif "_orig_mod" in module._modules:  # torch.compile
            remedy = "compiled code cannot be followed; pass the original module, its ._orig_mod"
        elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel | AveragedModel):
            remedy = "it only wraps the model; pass the original module, its .module"
        else:
            continue
        raise UnsupportedError([UnsupportedNode(name or "the model", type(module).__name__, remedy)])
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ModelError(f"{name} has no shape yet; run the model once on an input before it is bounded")
        if tensor.is_meta:
            raise ModelError(f"{name} is on the meta device, which has no values; load the weights first")
        if tensor.is_inference():
            raise ModelError(
                f"{name} was made in torch.inference_mode, where it cannot be captured; make the model outside of it"
            )
    remedy = "the model takes more than one input; fix the others with functools.partial or a wrapper module"
    _, *others = inspect.signature(model.forward).parameters.values() or [None]
    required = [
        p.name for p in others if p and p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if required:
        raise UnsupportedError([UnsupportedNode(name, "input", remedy) for name in required])


def _explained(error: Exception, model: nn.Module, x: Tensor) -> Exception:
    """Why torch.export failed: the input does not fit, a name is missing, or the code cannot be followed."""
    if isinstance(error, UnsupportedError):
        return error
    name = type(model).__name__
    try:
        with torch.no_grad(), evaluated(model):
            model(x)
    except (AttributeError, NameError) as own:
        remedy = f"its forward uses a name that is not defined ({type(own).__name__}{user_line(own)}: {own})"
        return UnsupportedError([UnsupportedNode(name, "forward", remedy)])
    except Exception as own:
        shape, reason = tuple(x.shape[1:]), (str(own).strip().splitlines() or [type(own).__name__])[0]
        return ShapeError(
            f"the model does not accept inputs of shape {shape} (one input, without the batch axis): {reason}"
        )
    reason = (str(error).strip().splitlines() or [""])[0]
    remedy = "torch.export cannot follow its forward; write it without control flow that depends on values"
    if "specialized it to be a constant" in str(error):
        remedy = "its forward fixes the number of rows of a batch, or mixes them; keep the batch axis in front"
    remedy += f" ({type(error).__name__}{user_line(error)}: {reason})"
    return UnsupportedError([UnsupportedNode(name, "torch.export", remedy)])


def user_line(error: Exception) -> str:
    """ " at file:line", the last line of the user's code that an error went through; empty if there is none."""
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno or 0))
    files = [(file, line) for file, line in places if file[0] != "<" and _NOT_USERS.isdisjoint(Path(file).parents)]
    return " at {}:{}".format(*files[-1]) if files else ""


def checked_shape(input_shape: Any) -> Shape:
    """The shape as a tuple of positive integers."""
    try:
        sizes = tuple(operator.index(n) for n in input_shape)
    except TypeError:
        sizes = (0,)
    if min(sizes, default=1) < 1:
        shown = input_shape if isinstance(input_shape, int | tuple | list) else f"a {type(input_shape).__name__}"
        raise ShapeError(f"input_shape is {shown}, expected a tuple without the batch axis, such as (3, 32, 32)")
    return sizes


def type_of(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    """The type and the device of a model's first floating-point tensor."""
    tensors = (*model.parameters(), *model.buffers())
    like = next((t for t in tensors if t.is_floating_point()), torch.zeros(()))
    return like.dtype, like.device


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Within, all modules are in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards, modules have the attributes that they had before."""
    states = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, before in states:
            attributes.clear()
            attributes.update(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch.export's own messages: what matters of them becomes an error of ours."""
    loggers = [logging.getLogger(name) for name in ("torch.fx.experimental", "torch._export", "torch.export")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
