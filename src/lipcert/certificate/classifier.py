"""A classifier that returns its certified radius with every prediction."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lipcert.bounds.bound import Bound
from lipcert.certificate.certify import Certifier, certified_radius, check_arithmetic, check_input
from lipcert.errors import BoundError


class CertifiedClassifier(nn.Module):
    """x ↦ (logits, radius), at the cost of the model alone.

    The rounding errors at x are bounded from those at the zero input and the distance to it, instead of being followed
    through the network as `certify` does; so the radii are smaller than those of `certify`. The module can be exported
    by `torch.export`. To keep it, save the model's weights and the bound, and build it again from both. Weights that
    have changed since the bound was made are refused.
    """

    constants: Tensor
    reference_errors: Tensor
    growth: Tensor

    def __init__(self, model: nn.Module, bound: Bound) -> None:
        super().__init__()
        certifier = Certifier(model, bound)
        zero = torch.zeros(1, *bound.facts.input_shape, dtype=certifier.network.dtype, device=certifier.network.device)
        with torch.no_grad():
            errors = certifier.rounding.errors_from(certifier._pass.execute(zero))
        self.model = model
        self._bound = bound
        self._dtype = certifier.network.dtype
        self._reach = certifier.rounding.reach
        device = certifier.network.device
        self.register_buffer("constants", certifier.constants.to(device))
        self.register_buffer("reference_errors", errors.to(device))
        self.register_buffer("growth", certifier.rounding.growth.to(device))
        self._versions = self._read_versions()

    @property
    def guarantee(self) -> str:
        """The guarantee of the bound."""
        return self._bound.guarantee

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits as the model computes them, and certified radii in float64."""
        if not torch.compiler.is_compiling():
            check_arithmetic(self._dtype, x.device)
            self._check_unchanged()
        check_input(x, self._bound.facts.input_shape, self._dtype)
        distance = torch.linalg.vector_norm(x.flatten(1).double(), dim=1)[:, None] * (1 + 1e-12)
        logits: Tensor = self.model(x)  # may work in place
        wide = logits.double()
        prediction = wide.argmax(1)
        margins = wide.gather(1, prediction[:, None]) - wide
        errors = 2 * (self.reference_errors[prediction] + self.growth[prediction] * distance)
        radius = certified_radius(margins, errors, self.constants[prediction], prediction).clamp(max=self._reach)
        in_range = torch.isfinite(wide).all(1) & (distance[:, 0] < self._reach)
        return logits, torch.where(in_range, radius, 0.0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CertifiedClassifier:
        """Moves to other devices, but keeps the constants in float64: rounding could make them too small."""
        kept = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            if buffer is not None:
                self._buffers[name] = buffer.to(getattr(self, name).device)
        return self

    def _read_versions(self) -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), tensor._version) for tensor in self._weights()]

    def _weights(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _check_unchanged(self) -> None:
        if any(module.training for module in self.model.modules()):
            raise BoundError("the model is in training mode; call eval() on the classifier first")
        versions = self._read_versions()
        if versions != self._versions:  # moved or reloaded, or really changed
            self._bound.check_belongs(self.model)
            self._versions = versions
