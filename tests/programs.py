"""Programs that hypothesis draws, in the style in which people write PyTorch.

Aliases, in-place operations, views, chunks, functions and modules, tied and computed weights, hooks, parametrisations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import lipcert

WIDTH = 8
Values = list[Tensor]


@dataclass(frozen=True)
class Step:
    """One statement: what it does, and which earlier values it takes."""

    kind: str
    first: int
    second: int


class Program(nn.Module):
    """Executes its statements on a growing list of values of WIDTH entries; the last two are read out."""

    def __init__(self, steps: list[Step], seed: int, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.steps = steps
        self.layers = nn.ModuleList(
            [_LAYERS.get(step.kind, nn.Identity)() for step in steps]
        )
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.rand(WIDTH) < 0.5)
        self.register_buffer("order", torch.randperm(WIDTH))
        self.register_buffer("factor", torch.randn(WIDTH))
        self.mean = nn.Parameter(torch.randn(1, WIDTH))
        self.plain = torch.randn(WIDTH)  # neither a parameter nor a buffer
        self.out = nn.Linear(2 * WIDTH, classes)
        for layer, step in zip(self.layers, steps, strict=True):
            if step.kind == "hooked":
                layer.register_forward_hook(lambda module, inputs, output: 0.5 * output)
                layer.register_forward_pre_hook(
                    lambda module, inputs: (inputs[0].flip(1),)
                )
            if isinstance(layer, nn.BatchNorm1d):
                layer.running_var.uniform_(0.5, 2.0)
                layer.running_mean.normal_()

    def forward(self, x: Tensor) -> Tensor:
        values = [x * 1.0]
        for step, layer in zip(self.steps, self.layers, strict=True):
            a, b = values[step.first % len(values)], values[step.second % len(values)]
            function = _FUNCTIONS.get(step.kind)
            values.append(layer(a) if function is None else function(self, layer, a, b))
        return self.out(torch.cat([values[-1], values[len(values) // 2]], 1))


def _augmented(m: Program, layer: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    kept = a  # the same tensor: it changes too
    a += 0.5 * b
    return kept


def _write_slice(m: Program, layer: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    y = a.clone()
    y[:, 2:5] = b[:, :3]
    y[:, 7] = 0.25
    return y


def _through_a_view(m: Program, layer: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    y = layer(a)
    half = y.view(-1, 2, WIDTH // 2)[:, 0]
    half.mul_(2).add_(b[:, : WIDTH // 2])
    return y


def _image(m: Program, layer: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    image = layer(a.view(a.size(0), 2, 2, 2))
    return torch.flatten(
        F.avg_pool2d(image, 2, 1, padding=1)[:, :, :2, :2]
        - image.amax((2, 3), keepdim=True),
        1,
    )


def _rearranged(m: Program, layer: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    left, right = a.chunk(2, dim=1)
    first, *others = torch.stack([right, left], 2).unbind(2)
    return torch.cat([first.flip(-1), *(other.roll(1, 1) for other in others)], dim=1)


_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "in-place relu": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)
    ),
    "hooked": lambda: nn.Linear(WIDTH, WIDTH),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "gelu": nn.GELU,
    "maxmin": lipcert.layers.MaxMin,
    "prelu": lambda: nn.PReLU(WIDTH),
    "softmax": lambda: nn.Softmax(1),
    "through a view": lambda: nn.Linear(WIDTH, WIDTH),
    "image": lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
    "branches": lambda: nn.Linear(WIDTH, WIDTH),
}
_FUNCTIONS: dict[str, Callable[[Program, nn.Module, Tensor, Tensor], Tensor]] = {
    "tied": lambda m, layer, a, b: F.linear(a, m.shared.weight.T, m.shared.bias),
    "matmul": lambda m, layer, a, b: (
        a @ m.shared.weight - m.mean.expand(a.shape[0], -1).to(a)
    ),
    "computed weight": lambda m, layer, a, b: torch.einsum(
        "bi,oi->bo", a, m.shared.weight * m.factor.sigmoid()
    ),
    "relu": lambda m, layer, a, b: torch.relu(a - m.mean),
    "relu_": lambda m, layer, a, b: (0.7 * a).relu_(),
    "tanh": lambda m, layer, a, b: a.tanh() * m.plain,
    "sum": lambda m, layer, a, b: a - b / 3,
    "augmented": _augmented,
    "write slice": _write_slice,
    "through a view": _through_a_view,
    "image": _image,
    "rearranged": _rearranged,
    "maximum": lambda m, layer, a, b: torch.maximum(a, b[:, :1]),
    "minimum": lambda m, layer, a, b: torch.min(a, 0.5 * b),
    "sorted": lambda m, layer, a, b: a.sort(dim=-1, descending=True)[0],
    "top": lambda m, layer, a, b: torch.cat([a.topk(3, 1).values, b[:, 3:]], 1),
    "masked": lambda m, layer, a, b: torch.where(m.mask, a, b).masked_fill(
        m.order > 6, -1.0
    ),
    "permuted": lambda m, layer, a, b: a[:, m.order] + b.index_select(1, m.order),
    "log-sum-exp": lambda m, layer, a, b: b + a.logsumexp(1, keepdim=True),
    "branches": lambda m, layer, a, b: (
        layer(a).abs() - F.leaky_relu(b, 0.2, inplace=False)
    ),
    "waves": lambda m, layer, a, b: torch.sin(a) + torch.cos(b).mul(0.5),
}
_KINDS = sorted(set(_LAYERS) | set(_FUNCTIONS))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A program of two to eight statements, in eval mode and float32."""
    place = st.integers(0, 20)
    kinds = draw(st.lists(st.sampled_from(_KINDS), min_size=2, max_size=8))
    steps = [Step(kind, draw(place), draw(place)) for kind in kinds]
    return Program(steps, draw(st.integers(0, 10_000))).eval()
