"""Drawn graphs with skip connections against their exact minima: a linear program for every activation pattern."""

from itertools import product
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor, nn

import lipcert
from helpers import examples

SIZES = (2, 2, 3, 3)
"""Inputs, first and second nonlinearities, classes."""


class Graph(nn.Module):
    """h = φ(Ax), g = φ(Bh + Cx), y = Dg + Eh + Fx, with offsets; `kept` says which of C, E, F are there."""

    def __init__(self, seed: int, kept: tuple[bool, bool, bool], leak: float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        inputs, first, second, classes = SIZES
        self.a, self.b, self.d = (
            nn.Linear(inputs, first),
            nn.Linear(first, second),
            nn.Linear(second, classes),
        )
        self.c, self.e, self.f = (
            nn.Linear(inputs, second),
            nn.Linear(first, classes),
            nn.Linear(inputs, classes),
        )
        self.kept, self.leak = kept, leak

    def phi(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(x, self.leak)

    def forward(self, x: Tensor) -> Tensor:
        h = self.phi(self.a(x))
        z = self.b(h)
        if self.kept[0]:
            z = z + self.c(x)
        y = self.d(self.phi(z))
        if self.kept[1]:
            y = y + self.e(h)
        if self.kept[2]:
            y = y + self.f(x)
        return y


Affine = tuple[Tensor, Tensor]


def after(layer: nn.Linear, x: Affine) -> Affine:
    return layer.weight @ x[0], layer.weight @ x[1] + layer.bias


def plus(a: Affine, b: Affine) -> Affine:
    return a[0] + b[0], a[1] + b[1]


@torch.no_grad()
def exact_minimum(model: Graph, x: Tensor, radius: float, row: Tensor) -> float:
    """The smallest value of row·f over an l∞ ball around x."""
    smallest = inf
    box = [(float(v) - radius, float(v) + radius) for v in x]
    for bits in product((0.0, 1.0), repeat=SIZES[1] + SIZES[2]):
        sides, limits = [], []

        def gated(
            z: Affine,
            gate: Tensor,
            sides: list[Tensor] = sides,
            limits: list[Tensor] = limits,
        ) -> Affine:
            sign = 2 * gate - 1  # sign·z ≥ 0
            sides.append(-sign[:, None] * z[0])
            limits.append(sign * z[1])
            slope = gate + (1 - gate) * model.leak
            return slope[:, None] * z[0], slope * z[1]

        first, second = torch.tensor(bits, dtype=torch.float64).split(SIZES[1:3])
        start = (
            torch.eye(len(x), dtype=torch.float64),
            torch.zeros(len(x), dtype=torch.float64),
        )
        h = gated(after(model.a, start), first)
        z = after(model.b, h)
        if model.kept[0]:
            z = plus(z, after(model.c, start))
        y = after(model.d, gated(z, second))
        if model.kept[1]:
            y = plus(y, after(model.e, h))
        if model.kept[2]:
            y = plus(y, after(model.f, start))
        solved = linprog(
            (row @ y[0]).numpy(),
            torch.cat(sides).numpy(),
            torch.cat(limits).numpy(),
            bounds=box,
        )
        if solved.status == 0:
            smallest = min(smallest, solved.fun + float(row @ y[1]))
    return smallest


@given(
    seed=st.integers(0, 10**6),
    kept=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    leak=st.sampled_from([0.0, 0.2]),
)
@examples(0.5)
def test_proved_radii_are_below_exact_ones_of_drawn_graphs(seed, kept, leak):
    """The exact margin at the proved radius is positive; that at radius 0 is the margin of the certificate."""
    model = Graph(seed, kept, leak).double().eval()
    x = 0.5 * torch.randn(1, 2, dtype=torch.float64)
    certificates = lipcert.certify_local(model, x, norm=inf)
    radius, label = float(certificates.radius[0]), int(certificates.prediction[0])
    assert radius > 0
    unit = torch.eye(3, dtype=torch.float64)
    rows = [unit[label] - unit[other] for other in {0, 1, 2} - {label}]
    assert min(exact_minimum(model, x[0], radius, row) for row in rows) > 0
    assert min(exact_minimum(model, x[0], 0.0, row) for row in rows) == pytest.approx(
        float(certificates.margin[0])
    )
