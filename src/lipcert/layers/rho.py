"""The residual layer that is √ρ-Lipschitz by construction (proposition:rhoLipLayer)."""

from __future__ import annotations

from copy import deepcopy
from math import isfinite, log, prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipcert.errors import OptionError, check_choice
from lipcert.layers import proof
from lipcert.layers.activation_slopes import with_slopes
from lipcert.layers.rescaling import (
    between_grid_points,
    circular,
    factor,
    gram,
    root,
    row_sums,
)
from lipcert.network import slopes
from lipcert.network.rules import Call, Input, Result, register_rule

RESCALINGS = ("sn", "aol", "sll")
_FIELD = 16
_STEADY = 1.005
"""SN of convolutions: the power iteration runs on a periodic image of `_FIELD` points per reach of the kernel, and may
lag behind the weights by this factor."""


class _RhoLipschitz(nn.Module):
    """What the dense and the convolutional layer have in common."""

    weight: nn.Parameter
    log_rho: Tensor
    log_q: nn.Parameter | None

    def __init__(
        self,
        shape: tuple[int, ...],
        activation: str | nn.Module,
        rescaling: str,
        rho: float,
        learn_rho: bool,
        bias: bool,
    ) -> None:
        super().__init__()
        check_choice("rescaling", rescaling, RESCALINGS)
        if min(shape) < 1:
            raise OptionError(
                f"the weight would have shape {shape}, expected sizes of 1 or more"
            )
        if not (isfinite(rho) and rho > 0):
            raise OptionError(f"rho is {rho}, expected a positive number")
        self.activation, (self.alpha, self.beta) = with_slopes(activation)
        self.rescaling = rescaling
        # Not orthogonal: I − WᵀW, the linear part of a square layer with ReLU, would
        # vanish and with it all long maps.
        self.weight = nn.Parameter(torch.randn(shape) / sqrt(prod(shape[1:])))
        self.bias = self.log_q = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(shape[0]))
        if rescaling == "sll":
            self.log_q = nn.Parameter(torch.zeros(shape[0]))
        log_rho = torch.tensor(log(rho))
        if learn_rho:
            self.log_rho = nn.Parameter(log_rho)
        else:
            self.register_buffer("log_rho", log_rho)

    def norm(self) -> Tensor:
        """‖W‖ in float64, for "sn"; differentiable."""
        raise NotImplementedError

    def factors(self) -> Tensor:
        """The diagonal of (α+β)/√ρ·T, shaped to multiply hidden values."""
        if self.rescaling == "sn":
            sums = self.norm().square().expand(len(self.weight))
        else:
            sums = row_sums(gram(self.weight), self.log_q)
        diagonal = factor(sums, self.log_rho, self.alpha + self.beta, self.weight.dtype)
        if self.weight.dim() == 4:
            return diagonal.reshape(-1, 1, 1)
        return diagonal

    def lipschitz(self) -> Tensor:
        """√ρ, differentiable in a learned ρ."""
        return root(self.log_rho)

    @torch.no_grad()
    def certified_lipschitz(self) -> float:
        """A proved constant of the layer with its weights and the factors computed in float64, for inputs of any size.

        It is √ρ, rounded up, if the inequality of the proposition is proved for these
        numbers. Where it fails (SN of a convolution whose power iteration lags behind),
        it is larger by what the failure can cost.
        """
        # A copy: neither the model's weights nor the vector of its power iteration may
        # change.
        exact = deepcopy(self).double().cpu()
        weight, log_q, factors = exact.weight, exact.log_q, exact.factors()
        squared = proof.squared_norm(weight, log_q, factors, self.rescaling)
        # With F = (α+β)/√ρ·T, ‖F^½W‖² ≤ κ·2√ρ/(α+β) is W Wᵀ ⪯ κ·2ρ/(α+β)²·T⁻¹.
        ratio = (self.alpha + self.beta) / 2 / float(root(exact.log_rho))
        kappa = ratio * squared * (1 + 1e-12)
        log_rho = float(exact.log_rho)
        return proof.lipschitz_constant(log_rho, self.alpha, self.beta, kappa)

    def extra_repr(self) -> str:
        sizes = ", ".join(map(str, self.weight.shape))
        learned = ", learn_rho=True" if isinstance(self.log_rho, nn.Parameter) else ""
        return (
            f"{sizes}, rescaling={self.rescaling!r}, "
            f"rho={float(self.log_rho.detach().exp()):.6g}{learned}"
        )


class RhoLipschitzLinear(_RhoLipschitz):
    """h(x) = √ρ·x − (α+β)/√ρ·WᵀTφ(Wx + b), which is √ρ-Lipschitz: T keeps W Wᵀ ⪯ 2ρ/(α+β)²·T⁻¹ for all weights W.

    It is traced in this residual form, with φ as its only site; `lipcert.trace(…,
    view="certified")` sees one map with the constant that is proved for its present
    weights instead.

    Args:
        features: of the input and of the output.
        hidden: rows of W.
        activation: a name, or any module with fixed elementwise slopes 0 ≤ α ≤ β that has a rule.
        rescaling: T from the norm of W ("sn"), from row sums of |W Wᵀ| ("aol"), or from weighted ones with learned
            weights ("sll").
        rho: the square of the layer's Lipschitz constant, or its first value.
        learn_rho: train log ρ along.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        activation: str | nn.Module = "relu",
        rescaling: str = "aol",
        rho: float = 1.0,
        learn_rho: bool = False,
        bias: bool = True,
    ) -> None:
        shape = (hidden, features)
        super().__init__(shape, activation, rescaling, rho, learn_rho, bias)

    def norm(self) -> Tensor:
        norm: Tensor = torch.linalg.matrix_norm(self.weight.double(), 2)
        return norm

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.activation(F.linear(x, self.weight, self.bias))
        return x * self.lipschitz() - (hidden * self.factors()) @ self.weight


class RhoLipschitzConv2d(_RhoLipschitz):
    """`RhoLipschitzLinear` with a convolution for W: stride 1, and zeros around the image that keep its size.

    T has one entry per hidden channel and holds for images of any size. For "sn" the
    norm comes from a power iteration that goes on with every forward pass in training
    mode: it is an estimate, and `certified_lipschitz` proves it.
    """

    vector: Tensor | None

    def __init__(
        self,
        channels: int,
        hidden: int,
        kernel_size: int = 3,
        activation: str | nn.Module = "relu",
        rescaling: str = "aol",
        rho: float = 1.0,
        learn_rho: bool = False,
        bias: bool = True,
    ) -> None:
        if kernel_size % 2 == 0:
            raise OptionError(
                f"kernel_size is {kernel_size}, expected an odd number, which keeps "
                "the size of images"
            )
        shape = (hidden, channels, kernel_size, kernel_size)
        super().__init__(shape, activation, rescaling, rho, learn_rho, bias)
        self.reach = kernel_size // 2
        side = max(_FIELD * self.reach, 1)
        self.enlarged = _STEADY * between_grid_points(self.reach, side)
        self.register_buffer("vector", None)
        if rescaling == "sn":
            self.vector = torch.randn(1, channels, side, side)
            self.iterate(100)

    @torch.no_grad()
    def iterate(self, steps: int) -> None:
        """Power iterations for the norm of W; nothing to do unless the rescaling is "sn"."""
        if self.vector is None:
            return
        # Channels exchanged and the kernel turned around: Wᵀ of a circular convolution.
        adjoint = self.weight.transpose(0, 1).flip(2, 3)
        for _ in range(steps):
            image = circular(adjoint, circular(self.weight, self.vector))
            norm = image.norm()
            if bool(norm > 0):
                self.vector.copy_(image / norm)

    def norm(self) -> Tensor:
        """‖Wv‖/‖v‖ for the vector of the power iteration, enlarged by what it can be short of."""
        assert self.vector is not None
        # A copy: the next `iterate` overwrites the vector, which the derivative still
        # needs.
        x = self.vector.to(torch.float64, copy=True)
        image = circular(self.weight.double(), x)
        norm: Tensor = image.norm() / x.norm() * self.enlarged
        return norm

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            # Weights move little in a step: one iteration follows them (`_STEADY`).
            self.iterate(1)
        inner = F.conv2d(x, self.weight, self.bias, padding=self.reach)
        scaled = self.activation(inner) * self.factors()
        kept = x * self.lipschitz()
        return kept - F.conv_transpose2d(scaled, self.weight, padding=self.reach)


@register_rule(RhoLipschitzLinear, RhoLipschitzConv2d, view="certified")
def certified_rule(call: Call, x: Input) -> Result:
    assert isinstance(call.module, _RhoLipschitz)
    # ulps=None: bounded, but not certified. Certificates follow the rounding of the
    # residual form.
    return slopes.lipschitz_map(call.module.certified_lipschitz(), ulps=None)
