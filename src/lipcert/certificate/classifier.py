"""A classifier that returns its certified radius with every prediction."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor, nn

from lipcert.bounds.bound import Bound
from lipcert.certificate.certify import Certifier, certified_radius
from lipcert.certificate.propagation import LARGEST
from lipcert.certificate.requirements import check_arithmetic, check_input
from lipcert.errors import NonFiniteError
from lipcert.network.normal_form import Network


class CertifiedClassifier(nn.Module):
    """x ↦ (logits, radius), at the cost of the model alone.

    It owns the captured program and copies of its tensors: whatever is done to the model afterwards does not change it.
    The rounding errors at x are bounded from those at the zero input and the distance to it, instead of being followed
    through the network as `certify` does; so the radii are smaller than those of `certify`. The module can be exported
    by `torch.export`. To keep it, save the model's weights and the bound, and build it again from both.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> classifier = lipcert.CertifiedClassifier(model, lipcert.bound(model, (4,)))
        >>> logits, radius = classifier(torch.rand(2, 4))
    """

    def __init__(self, model: nn.Module | Network, bound: Bound) -> None:
        super().__init__()
        certifier = Certifier(model, bound)
        network = certifier.network
        zero = torch.zeros(1, *bound.facts.input_shape, dtype=network.dtype, device=network.device)
        with torch.no_grad():
            reference = certifier.error_pass.execute(zero)
        if not float(reference.largest) <= LARGEST[network.dtype]:
            raise NonFiniteError("the model overflows on the zero input, or comes near it; scale its biases down")
        errors = certifier.rounding.errors_from(reference)
        self._bound = bound
        self._dtype = network.dtype
        self._reach = certifier.rounding.reach
        # In tuples, not as parts of the module: a state dict could replace them, or a conversion make them too small.
        self._program = (network.program.module(),)
        numbers = (certifier.constants, errors, certifier.rounding.growth)
        self._numbers = tuple(number.to(network.device) for number in numbers)

    @property
    def guarantee(self) -> str:
        """The guarantee of the bound."""
        return self._bound.guarantee

    @property
    def constants(self) -> Tensor:
        """(K, K): the constants that margins are divided by; a copy."""
        return self._numbers[0].clone()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits as the program computes them, and certified radii in float64."""
        check_input(x, self._bound.facts.input_shape, self._dtype)
        if not torch.compiler.is_compiling():
            check_arithmetic(self._dtype, x.device)
        constants, reference_errors, growth = self._numbers
        distance = torch.linalg.vector_norm(x.reshape(x.shape[0], prod(x.shape[1:])).double(), dim=1)[:, None] * (
            1 + 1e-12
        )
        logits: Tensor = self._program[0](x)
        wide = logits.double()
        prediction = wide.argmax(1)
        margins = wide.gather(1, prediction[:, None]) - wide
        errors = 2 * (reference_errors[prediction] + growth[prediction] * distance)
        radius = certified_radius(margins, errors, constants[prediction], prediction).clamp(max=self._reach)
        in_range = torch.isfinite(wide).all(1) & (distance[:, 0] < self._reach)
        return logits, torch.where(in_range, radius, 0.0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CertifiedClassifier:
        """Moves to other devices; the types of all tensors stay, for the certificates are about them."""
        device = fn(torch.zeros(0)).device
        self._numbers = tuple(number.to(device) for number in self._numbers)
        self._program[0].to(device=device)
        return self
