"""Networks that hypothesis draws: small enough for dense references, with every kind of layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import nn

from lipcert.models.zoo import residual
from models import PaperResidual, RandomDag, dense_chain, gaussian

Drawn = tuple[nn.Module, tuple[int, ...]]
_ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda _: nn.ReLU(),
    "leaky": lambda _: nn.LeakyReLU(0.2),
    "gelu": lambda _: nn.GELU(),
    "prelu": nn.PReLU,
    "tanh": lambda _: nn.Tanh(),
}
activations = st.sampled_from(sorted(_ACTIVATIONS))
seeds = st.integers(0, 10_000)


@st.composite
def chains(draw: st.DrawFn) -> Drawn:
    """Dense layers with one kind of activation between them."""
    inputs, width, depth = (
        draw(st.integers(1, 6)),
        draw(st.integers(1, 6)),
        draw(st.integers(0, 3)),
    )
    activation = _ACTIVATIONS[draw(activations)]
    widths = [inputs, *[width] * depth, draw(st.integers(2, 4))]
    return dense_chain(
        *widths, activation=lambda: activation(width), seed=draw(seeds)
    ), (inputs,)


@st.composite
def residuals(draw: st.DrawFn) -> Drawn:
    """The paper's residual layers, or a residual convolutional network with batch normalisation."""
    seed = draw(seeds)
    if draw(st.booleans()):
        width, hidden = draw(st.integers(2, 5)), draw(st.integers(1, 6))
        activation = _ACTIVATIONS[draw(activations)]
        return gaussian(
            PaperResidual([width, width, 4], hidden, 3, lambda: activation(hidden)),
            seed,
        ), (width,)
    side = draw(st.integers(2, 4))
    return gaussian(
        residual([2, 3], [1, draw(st.integers(0, 1))], (1, side, side), 3), seed
    ), (1, side, side)


@st.composite
def convolutions(draw: st.DrawFn) -> Drawn:
    """Two convolutions with any stride, padding, dilation and groups, BatchNorm, an activation and max-pooling."""
    channels, size = draw(st.sampled_from([1, 2])), draw(st.integers(4, 6))
    shape = (channels, size, size)
    layers: list[nn.Module] = []
    for filters in (2, 4):
        groups = draw(st.sampled_from([1, 2])) if channels % 2 == 0 else 1
        layers.append(
            nn.Conv2d(
                channels,
                filters,
                (draw(st.integers(1, 3)), draw(st.integers(1, 3))),
                stride=draw(st.integers(1, 2)),
                padding=draw(st.integers(0, 1)),
                dilation=draw(st.integers(1, 2)),
                groups=groups,
                bias=draw(st.booleans()),
                padding_mode=draw(
                    st.sampled_from(["zeros", "zeros", "circular", "reflect"])
                ),
            )
        )
        if draw(st.booleans()):
            layers.append(nn.BatchNorm2d(filters))
        layers.append(_ACTIVATIONS[draw(activations)](filters))
        channels = filters
    if draw(st.booleans()):
        layers.insert(-1, nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.Flatten())
    try:
        features = model.eval()(torch.zeros(1, *shape)).shape[1]
    except RuntimeError:  # the image has become smaller than a kernel
        features = 0
    assume(features > 0)
    return gaussian(nn.Sequential(*model, nn.Linear(features, 3)), draw(seeds)), shape


@st.composite
def dags(draw: st.DrawFn) -> Drawn:
    """Any directed acyclic graph of dense layers, concatenations, sums and activations."""
    kinds = st.sampled_from(["linear", "cat", "add", "relu", "gelu", "tanh", "leaky"])
    plan = draw(
        st.lists(
            st.tuples(kinds, st.integers(0, 9), st.integers(0, 9)),
            min_size=2,
            max_size=7,
        )
    )
    return gaussian(RandomDag(3, 3, plan), draw(seeds)), (3,)


networks = st.one_of(chains(), residuals(), convolutions(), dags())
