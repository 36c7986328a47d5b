"""Small models for the tests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod, sqrt

import torch
from torch import Tensor, nn

from lipcert.layers import RhoLipschitzConv2d, RhoLipschitzLinear
from lipcert.models.zoo import residual


class Op(nn.Module):
    """A model from a function of (module, input); the other arguments become parameters, buffers or submodules."""

    def __init__(
        self, function: Callable[[Op, Tensor], Tensor], **attributes: nn.Module | Tensor
    ) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            if isinstance(value, nn.Module | nn.Parameter):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def dense_chain(
    *widths: int, activation: Callable[[], nn.Module] = nn.ReLU, seed: int = 0
) -> nn.Sequential:
    """Linear layers of these widths with activations between them, in float64 with Gaussian weights."""
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), activation()]
    return gaussian(nn.Sequential(*layers[:-1]), seed)


def gaussian(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in float64 and eval mode with Gaussian weights scaled by their fan-in, and BatchNorm statistics."""
    model.double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.copy_(noise / sqrt(max(prod(tensor.shape[1:]), 1)))
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.copy_(
                    torch.randn(module.num_features, generator=generator)
                )
                module.running_var.copy_(
                    0.5 + torch.rand(module.num_features, generator=generator)
                )
                module.weight.copy_(
                    0.5 + torch.rand(module.num_features, generator=generator)
                )
    return model


class PaperResidual(nn.Module):
    """The paper's x⁺ = Hx + Gφ(Wx), some layers of it, and a linear read-out."""

    def __init__(
        self,
        widths: list[int],
        hidden: int,
        classes: int,
        activation: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.h = nn.ModuleList([nn.Linear(n, m, bias=False) for n, m in pairs])
        self.w = nn.ModuleList([nn.Linear(n, hidden) for n, _ in pairs])
        self.g = nn.ModuleList([nn.Linear(hidden, m, bias=False) for _, m in pairs])
        self.activations = nn.ModuleList([activation() for _ in pairs])
        self.out = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        for h, w, g, activation in zip(
            self.h, self.w, self.g, self.activations, strict=True
        ):
            x = h(x) + g(activation(w(x)))
        return self.out(x)


class RandomDag(nn.Module):
    """A network from a plan: each step makes a new value of width d from earlier ones; the last two are read out."""

    def __init__(
        self, width: int, classes: int, plan: list[tuple[str, int, int]]
    ) -> None:
        super().__init__()
        self.plan = plan
        kinds = {
            "linear": lambda: nn.Linear(width, width),
            "cat": lambda: nn.Linear(2 * width, width),
        }
        kinds |= {
            "relu": nn.ReLU,
            "gelu": nn.GELU,
            "tanh": nn.Tanh,
            "leaky": lambda: nn.LeakyReLU(0.3),
        }
        self.steps = nn.ModuleList(
            [kinds[kind]() if kind in kinds else nn.Identity() for kind, _, _ in plan]
        )
        self.out = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for (kind, a, b), step in zip(self.plan, self.steps, strict=True):
            first, second = values[a % len(values)], values[b % len(values)]
            if kind == "add":
                values.append(first + 0.5 * second)
            else:
                values.append(
                    step(torch.cat([first, second], 1) if kind == "cat" else first)
                )
        return self.out(torch.cat([values[-1], values[-2]], 1))


class DenselyConnected(nn.Module):
    """Every convolution sees the concatenation of all earlier ones, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(n) for n in (1, 3, 5)])
        self.convs = nn.ModuleList(
            [nn.Conv2d(n, 2, 3, padding=1, bias=False) for n in (1, 3, 5)]
        )
        self.relu = nn.ReLU()
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(self.relu(norm(torch.cat(features, 1)))))
        return self.out(torch.cat(features, 1).mean((2, 3)))


def _branches(module: Op, x: Tensor) -> Tensor:
    h = module.relu(module.first(x))
    return module.last(module.left(h) + module.gelu(module.right(h)))


def named_models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Networks of many shapes, small enough for dense references."""
    linears = {name: nn.Linear(4, 4) for name in ("first", "left", "right")} | {
        "last": nn.Linear(4, 3)
    }
    models = {
        "chain": (dense_chain(4, 5, 5, 3), (4,)),
        "leaky chain": (dense_chain(4, 5, 5, 3, activation=lambda: nn.LeakyReLU(0.3)), (4,)),
        "gelu chain": (dense_chain(4, 5, 5, 3, activation=nn.GELU), (4,)),
        "prelu chain": (dense_chain(4, 5, 5, 3, activation=lambda: nn.PReLU(5)), (4,)),
        "sigmoid chain": (dense_chain(4, 5, 5, 3, activation=nn.Sigmoid), (4,)),
        "paper residual": (PaperResidual([4, 4, 5], 6, 3, nn.ReLU), (4,)),
        "densely connected": (DenselyConnected(), (1, 3, 4)),
        "two branches": (Op(_branches, relu=nn.ReLU(), gelu=nn.GELU(), **linears), (4,)),
        "relu then max-pool": (
            nn.Sequential(
                nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 2, 2), nn.ReLU(), nn.Flatten(),
                nn.Linear(2, 3),
            ),
            (1, 6, 6),
        ),
        "residual convolutions": (residual([2, 3], [1, 1], (1, 5, 5), 3), (1, 5, 5)),
        "ends in a nonlinearity": (nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.Tanh()), (4,)),
        "starts with a nonlinearity": (nn.Sequential(nn.ReLU(), nn.Linear(4, 3)), (4,)),
        "purely linear": (nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), (4,)),
    }  # fmt: skip
    seeds = {
        "residual convolutions": 5
    }  # well separated singular values, so that power iterations converge soon
    return {
        name: (gaussian(model, seeds.get(name, 0)), shape)
        for name, (model, shape) in models.items()
    }


def rho_conv(
    convolutions, depth: int, dense: int, rescaling: str, input_shape, classes: int
) -> nn.Sequential:
    """After each convolution some rho-Lipschitz convolutional layers; then the same with dense layers."""
    layers: list[nn.Module] = []
    channels, size = input_shape[0], input_shape[1]
    for filters, kernel, stride, padding in convolutions:
        layers.append(nn.Conv2d(channels, filters, kernel, stride, padding))
        layers += [
            RhoLipschitzConv2d(filters, filters, 3, rescaling=rescaling, learn_rho=True)
            for _ in range(depth)
        ]
        channels, size = filters, (size + 2 * padding - kernel) // stride + 1
    layers += [nn.Flatten(), nn.Linear(channels * size * size, dense)]
    layers += [
        RhoLipschitzLinear(dense, dense, rescaling=rescaling, learn_rho=True)
        for _ in range(depth)
    ]
    return nn.Sequential(*layers, nn.Linear(dense, classes))


def linear_net():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
