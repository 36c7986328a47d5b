"""What several tests share: dense references that know nothing of lipcert's normal form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from hypothesis import settings
from torch import Tensor, nn

import lipcert
from lipcert.bounds.compute import bound_targets
from lipcert.bounds.targets import TARGETS
from lipcert.certificate import Certifier
from lipcert.network.linear import Function, LinearOp
from lipcert.network.rewrites import liplt_lines, loop_transform, naive_lines

GELU_SLOPES = (-0.12890414518516, 1.12890414518516)


def examples(factor: float) -> settings:
    """As many examples as the profile says, times a factor."""
    return settings(max_examples=max(1, round(factor * settings.default.max_examples)))


def traced(
    model: nn.Module, shape: tuple[int, ...], local: bool = False
) -> lipcert.Network:
    """The network of a model in eval mode, traced once: it reads the weights whenever it is used."""
    dtype = next((p.dtype for p in model.parameters()), None)
    return _traced(model, shape, dtype, local)


@lru_cache(maxsize=64)
def _traced(
    model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype | None, local: bool
) -> lipcert.Network:
    return lipcert.trace(model, shape, local=local)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def eye(shape: tuple[int, ...]) -> Tensor:
    n = prod(shape)
    return torch.eye(n, dtype=torch.float64).reshape(n, *shape)


def jacobian(
    model: nn.Module, shape: tuple[int, ...], create_graph: bool = False
) -> Tensor:
    """The Jacobian of a model at a random input, (outputs, inputs)."""
    return jacobian_at(model, randn(*shape, seed=3), create_graph)


def jacobian_at(model: nn.Module, x: Tensor, create_graph: bool = False) -> Tensor:
    """The Jacobian of a model at an input, (outputs, inputs)."""
    full = torch.autograd.functional.jacobian(
        lambda t: model(t[None])[0], x, create_graph=create_graph
    )
    return full.reshape(-1, x.numel())


def jacobians(model: nn.Module, shape: tuple[int, ...], count: int) -> Tensor:
    """Jacobians at random points of several scales, (count, outputs, inputs)."""
    return torch.stack(
        [
            jacobian_at(model, randn(*shape, seed=k) * 10.0 ** (k % 3 - 1))
            for k in range(count)
        ]
    )


def check_jacobians(
    model: nn.Module,
    shape: tuple[int, ...],
    constants: Mapping[str, Tensor],
    count: int = 8,
) -> None:
    """No Jacobian at random points is steeper than the constants, by target."""
    local = jacobians(model, shape, count)
    pairs = (local[:, :, None] - local[:, None]).norm(dim=3)
    steepness = {"network": torch.linalg.matrix_norm(local, 2), "per-class": local.norm(dim=2),
                 "last-layer": pairs, "pairwise": pairs}  # fmt: skip
    for target, constant in constants.items():
        assert (steepness[target] <= constant).all(), target


def check_between(
    model: nn.Module, shape: tuple[int, ...], method: str, **options: object
) -> None:
    """A method's constants of all targets lie between Jacobians at random points and LipLT."""
    network = traced(model, shape)
    bounds, plain = (
        bound_targets(model, shape, name, list(TARGETS), network=network, **options)
        for name in (method, "liplt")
    )
    for target, bound in bounds.items():
        assert bound.method == method
        assert (bound.value <= plain[target].value).all(), target
    check_jacobians(
        model, shape, {target: bound.value for target, bound in bounds.items()}
    )


def operations(network: lipcert.Network) -> list[LinearOp]:
    return [edge.op for node in network.nodes for edge in node.edges]


def transformed(
    model: nn.Module, shape: tuple[int, ...], naive: bool = False
) -> lipcert.Network:
    """The network of a model with 1-Lipschitz nonlinearities, by LipLT's lines or without paths around them."""
    network = traced(model, shape)
    return loop_transform(
        network, naive_lines(network) if naive else liplt_lines(network)
    )


def bounded(
    model: nn.Module,
    shape: tuple[int, ...],
    method: str = "liplt",
    target: str | None = None,
    **options: object,
) -> lipcert.Bound:
    """lipcert.bound, where several bounds of one model share its trace."""
    network = traced(model, shape)
    made = bound_targets(model, shape, method, [target], network=network, **options)
    return next(iter(made.values()))


def certifier_of(
    model: nn.Module, shape: tuple[int, ...], longest_sum: int | None = None
) -> Certifier:
    """A certifier with the bound of its model, both by one trace."""
    return Certifier(traced(model, shape), bounded(model, shape), longest_sum)


def check_linear(model: nn.Module, shape: tuple[int, ...]) -> lipcert.Network:
    """A model without nonlinearities: forward sweep, adjoint sweep and every operation agree with the Jacobian."""
    model = model.double().eval()
    network = lipcert.trace(model, shape)
    assert network.depth == 0
    assert network.input_shape == shape
    expected = jacobian(model, shape, create_graph=True)
    (columns,) = network.push(0, eye(shape))
    (rows,) = network.pull(1, eye(network.output_shape))
    assert tuple(columns.shape[1:]) == network.output_shape
    assert tuple(rows.shape[1:]) == shape
    pushed, pulled = columns.reshape(prod(shape), -1).T, rows.reshape(-1, prod(shape))
    torch.testing.assert_close(pushed, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(pulled, expected, rtol=1e-10, atol=1e-10)
    for op in operations(network):
        check_operation(op)
    probe = randn(*expected.shape, seed=4)
    if list(model.parameters()):
        reference = _gradients(expected, probe, model)
        torch.testing.assert_close(
            _gradients(pushed, probe, model), reference, rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(
            _gradients(pulled, probe, model), reference, rtol=1e-9, atol=1e-9
        )
    return network


def _gradients(matrix: Tensor, probe: Tensor, model: nn.Module) -> list[Tensor]:
    parameters = list(model.parameters())
    return list(
        torch.autograd.grad(
            (matrix * probe).sum(),
            parameters,
            retain_graph=True,
            materialize_grads=True,
        )
    )


def check_operation(op: LinearOp) -> None:
    """⟨Au, v⟩ = ⟨u, Aᵀv⟩, apply and adjoint agree with the dense matrix, magnitude with its absolute value."""
    u, v = randn(2, *op.in_shape, seed=5), randn(2, *op.out_shape, seed=6)
    with torch.no_grad():
        matrix = op.as_matrix(like=u)
        image, preimage = op.apply(u), op.adjoint(v)
        assert image.shape == v.shape
        assert preimage.shape == u.shape
        left, right = (image * v).flatten(1).sum(1), (u * preimage).flatten(1).sum(1)
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
        assert tuple(matrix.shape) == (prod(op.out_shape), prod(op.in_shape))
        torch.testing.assert_close(
            image.reshape(2, -1), u.reshape(2, -1) @ matrix.T, rtol=1e-10, atol=1e-10
        )
        torch.testing.assert_close(
            preimage.reshape(2, -1), v.reshape(2, -1) @ matrix, rtol=1e-10, atol=1e-10
        )
        magnitude = op.magnitude(u.abs()).reshape(2, -1)
        torch.testing.assert_close(
            magnitude, u.abs().reshape(2, -1) @ matrix.abs().T, rtol=1e-10, atol=1e-10
        )
        assert op.terms >= 0 or isinstance(op, Function)  # unknown only for functions


def slopes_of(activation: nn.Module) -> tuple[float, float] | None:
    """[alpha, beta] of the activation modules used in test networks; None for modules that are not activations."""
    if isinstance(activation, nn.PReLU):
        low, high = activation.weight.amin().item(), activation.weight.amax().item()
        return min(low, 1.0), max(high, 1.0)
    if isinstance(activation, nn.LeakyReLU):
        return activation.negative_slope, 1.0
    if isinstance(activation, nn.MaxPool2d):  # only with windows that do not overlap
        assert activation.kernel_size == activation.stride
        return -1.0, 1.0
    table = {
        nn.ReLU: (0.0, 1.0),
        nn.Tanh: (0.0, 1.0),
        nn.Sigmoid: (0.0, 0.25),
        nn.GELU: GELU_SLOPES,
    }
    return table.get(type(activation))


class _Cut(nn.Module):
    """Stands for an activation: multiplies by the centre and adds a zero to differentiate with respect to."""

    def __init__(
        self,
        activation: nn.Module,
        naive: bool,
        tape: list[tuple[Tensor, Tensor, float]],
    ) -> None:
        super().__init__()
        self.activation, self.naive, self.tape = activation, naive, tape

    def forward(self, x: Tensor) -> Tensor:
        alpha, beta = slopes_of(self.activation)
        centre, radius = (
            (0.0, max(-alpha, beta))
            if self.naive
            else ((alpha + beta) / 2, (beta - alpha) / 2)
        )
        injection = torch.zeros_like(self.activation(x)).requires_grad_()
        self.tape.append((x, injection, radius))
        return injection if centre == 0 else centre * x + injection


@dataclass(frozen=True)
class DenseMaps:
    """B_ji for 0 ≤ i < j ≤ n+1 as dense matrices, and s_0..s_n."""

    maps: dict[tuple[int, int], Tensor]
    radii: list[float]

    @property
    def last(self) -> int:
        return len(self.radii)

    @property
    def transformed(self) -> dict[tuple[int, int], Tensor]:
        """B_ji·s_i: the maps of the network whose nonlinearities are 1-Lipschitz."""
        return {(j, i): matrix * self.radii[i] for (j, i), matrix in self.maps.items()}

    def prefix(self) -> list[float]:
        """m_0..m_n: thm:multiLayerLipschitz, term by term."""
        m = [1.0]
        for j in range(1, self.last):
            m.append(
                sum(self.radii[i] * _norm(self.maps[j, i]) * m[i] for i in range(j))
            )
        return m

    def combine(self, weigh: Callable[[Tensor], Tensor], m: list[float]) -> Tensor:
        """Σ_i s_i·weigh(B_{n+1,i})·m_i."""
        return sum(
            self.radii[i] * weigh(self.maps[self.last, i]) * m[i]
            for i in range(self.last)
        )


def _norm(matrix: Tensor) -> float:
    return torch.linalg.matrix_norm(matrix, ord=2).item()


def dense_maps(
    model: nn.Module, shape: tuple[int, ...], naive: bool = False
) -> DenseMaps:
    """All B_ji of a model whose activations are modules, by cutting it open at each activation and differentiating."""
    tape: list[tuple[Tensor, Tensor, float]] = []

    def cut(module: nn.Module) -> nn.Module:
        if slopes_of(module) is not None:
            return _Cut(module, naive, tape)
        for name, child in module.named_children():
            setattr(module, name, cut(child))
        return module

    linearised = cut(deepcopy(model))
    x = torch.zeros(1, *shape, dtype=torch.float64, requires_grad=True)
    output = linearised(x)
    ends, starts = [t for t, _, _ in tape] + [output], [x] + [e for _, e, _ in tape]
    maps, needed = (
        {},
        {len(ends)},
    )  # what the output does not depend on is no part of the network
    for j, end in reversed(list(enumerate(ends, start=1))):
        if j not in needed:
            continue
        seeds = eye(tuple(end.shape))
        gradients = torch.autograd.grad(
            end,
            starts[:j],
            seeds,
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )
        for i, gradient in enumerate(gradients):
            matrix = seeds.new_zeros(end.numel(), starts[i].numel())
            maps[j, i] = matrix if gradient is None else gradient.reshape(matrix.shape)
            needed |= set() if gradient is None else {i}
    number = {old: new for new, old in enumerate(sorted(needed | {0}))}
    kept = {(number[j], number[i]): maps[j, i] for j, i in sorted(maps) if i in number}
    return DenseMaps(
        kept,
        [1.0]
        + [radius for i, (_, _, radius) in enumerate(tape, start=1) if i in needed],
    )


def reference(
    model: nn.Module,
    shape: tuple[int, ...],
    method: str = "liplt",
    target: str = "network",
) -> Tensor:
    """The estimate that lipcert.Estimator converges to, from dense matrices, pair by pair."""
    dense = dense_maps(model, shape, naive=method == "naive")
    m = dense.prefix()
    if target == "last-layer":
        dense = dense_maps(model, shape, naive=True)
    if target == "network":
        return dense.combine(lambda b: torch.linalg.matrix_norm(b, ord=2), m)
    if target == "per-class":
        return dense.combine(lambda b: torch.linalg.vector_norm(b, dim=1), m)
    return dense.combine(
        lambda b: torch.linalg.vector_norm(b[:, None] - b[None, :], dim=2), m
    )


def converged(
    model: nn.Module, shape: tuple[int, ...], **options: object
) -> lipcert.Estimator:
    """An estimator whose value has stopped changing."""
    network = traced(model, shape)
    estimator = lipcert.Estimator(
        model, shape, power_iterations=40, network=network, **options
    )
    with torch.no_grad():
        previous = estimator()
        for _ in range(250):
            value = estimator()
            if torch.all((value - previous).abs() <= 1e-9 * value.abs().max()):
                estimator.power_iterations = 100
                return estimator
            previous = value
    raise AssertionError("the power iteration does not converge on this example")


def slope_found(model, shape, points=40):
    """The largest norm of Jacobians and of secants at random points, in the model's own arithmetic."""
    best = 0.0
    for k in range(points):
        x = torch.randn(*shape) * 10.0 ** (k % 3 - 1)
        jacobian = torch.autograd.functional.jacobian(
            lambda t: model(t[None])[0], x
        ).reshape(-1, x.numel())
        best = max(best, float(torch.linalg.matrix_norm(jacobian.double(), 2)))
    return best


def check_bound(model, shape, methods=("naive", "liplt")):
    found = slope_found(model, shape)
    for method in methods:
        value = float(lipcert.bound(model, shape, method, "network").value)
        assert found <= value * (1 + 1e-6), (method, found, value)
    assert value <= 20 * found + 1e-6  # and not beyond all measure
    return value
