"""The activations of ρ-Lipschitz layers, and the slopes that their proposition needs."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lipcert.errors import OptionError, ShapeError, UnsupportedError, check_choice
from lipcert.network.build import trace

_ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], tuple[float, float]]] = {
    "relu": (nn.ReLU, (0.0, 1.0)),
    "leaky-relu": (lambda: nn.LeakyReLU(0.1), (0.1, 1.0)),
    "tanh": (nn.Tanh, (0.0, 1.0)),
    "sigmoid": (nn.Sigmoid, (0.0, 0.25)),
    "softplus": (lambda: nn.Softplus(threshold=40.0), (0.0, 1.0)),
}
"""By name: the module and its slopes [α, β]."""


def with_slopes(activation: str | nn.Module) -> tuple[nn.Module, tuple[float, float]]:
    """An activation, by its name or itself, and its slopes [α, β]."""
    if not isinstance(activation, str):
        return activation, _slopes(activation)
    check_choice("activation", activation, tuple(_ACTIVATIONS))
    make, slopes = _ACTIVATIONS[activation]
    return make(), slopes


def _slopes(activation: nn.Module) -> tuple[float, float]:
    """[α, β] of an activation, by its rule; α < 0 would break the proposition, for which 0 ≤ α is assumed."""
    name = type(activation).__name__
    no_rule = OptionError(
        f"activation {name} has no rule with elementwise slopes; "
        "register one, or use ReLU"
    )
    try:
        network = trace(activation, (1,), training=True)
    except UnsupportedError as error:
        raise OptionError(f"activation {name}: {error.nodes[0].remedy}") from None
    except ShapeError:
        raise no_rule from None
    # Its input, its value, and the output: anything else that is computed would change
    # the slopes.
    if network.depth != 1 or len(network.nodes) != 3 or not network.nodes[-1].exact:
        raise no_rule
    slope = network.sites[1].slope
    if slope is None or not slope.elementwise:
        raise no_rule
    alpha, beta = slope.alpha, slope.beta
    if not (isinstance(alpha, float) and isinstance(beta, float)):
        raise OptionError(
            f"activation {name} has learned slopes, expected fixed ones; use LeakyReLU"
        )
    if not (0 <= alpha <= beta and beta > 0):
        raise OptionError(
            f"activation {name} has slopes in [{alpha:g}, {beta:g}], expected none "
            "below 0: the layer would not be "
            "√rho-Lipschitz; use ReLU, LeakyReLU or Tanh"
        )
    return alpha, beta
