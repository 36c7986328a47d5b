"""A classifier that returns its certified radius with every prediction."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from lipcert.bounds.bound import Bound
from lipcert.certificate.certify import Certifier
from lipcert.certificate.propagation import LARGEST
from lipcert.certificate.radius import certified_radius
from lipcert.certificate.requirements import (
    check_arithmetic,
    check_input,
    check_operators,
)
from lipcert.errors import ModelError, NonFiniteError
from lipcert.network.normal_form import Network

# A tensor, because exporters write the numbers of Python in float32.
_ROUND_UP = torch.tensor(1 + 1e-12, dtype=torch.float64)


class CertifiedClassifier(nn.Module):
    """x ↦ (logits, radius), at the cost of the model alone.

    It owns the captured program and copies of its tensors: whatever is done to the
    model afterwards does not change it. The rounding errors at x are bounded from those
    at the zero input and the distance to it, instead of being followed through the
    network as `certify` does; so the radii are smaller than those of `certify`. The
    module can be exported by `torch.export`; what is exported does not look at the
    arithmetic it runs in, such as autocast. `torch.compile` leaves it as it is, with
    its checks. To keep it, save the model's weights and the bound, and build it again
    from both. `longest_sum` is that of `lipcert.certify`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> classifier = lipcert.CertifiedClassifier(model, lipcert.bound(model, (4,)))
        >>> logits, radius = classifier(torch.rand(2, 4))
        >>> logits.shape, radius.shape
        (torch.Size([2, 3]), torch.Size([2]))
    """

    def __init__(
        self, model: nn.Module | Network, bound: Bound, longest_sum: int | None = None
    ) -> None:
        super().__init__()
        certifier = Certifier(model, bound, longest_sum)
        network = certifier.network
        # E(x) ≤ E(0) + κ·|x|: the error analysis of one input, made here once, serves
        # all others.
        zero = torch.zeros(
            1, *bound.facts.input_shape, dtype=network.dtype, device=network.device
        )
        with torch.no_grad():
            reference = certifier.error_pass.execute(zero)
        if not float(reference.largest) <= LARGEST[network.dtype]:
            raise NonFiniteError(
                "the model overflows on the zero input, or comes near it; "
                "scale its biases down"
            )
        errors = certifier.rounding.errors_from(reference)
        self._bound = bound
        self._dtype = network.dtype
        program, before = network.program, certifier.probes
        # None for most models, so that calls do not pay for what they cannot need.
        self._check_operators = (
            (lambda: check_operators(program, before)) if before else None
        )
        # In tuples, not as parts of the module: a state dict could replace them, or a
        # conversion make them too small.
        self._program = (network.program.module(),)
        reach = torch.tensor(certifier.rounding.reach, dtype=torch.float64)
        # L + κ, E(0), κ, (K, K) each, and how far from the zero input nothing
        # overflows.
        numbers = (certifier.constants, errors, certifier.rounding.growth, reach)
        self._numbers = tuple(number.to(network.device) for number in numbers)

    @property
    def guarantee(self) -> str:
        """The guarantee of the bound."""
        return self._bound.guarantee

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self._bound.facts.input_shape

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes; radii are float64."""
        return self._dtype

    @property
    def fingerprint(self) -> str:
        """That of the program and the weights that the bound was made for."""
        return self._bound.facts.fingerprint

    def to_onnx(self, path: str | Path) -> Path:
        """Write an ONNX file (opset 18) with the input `input` and the outputs `logits` and `radius`; returns its path.

        It is compared with this module by onnxruntime. Its radii hold in IEEE
        arithmetic whatever the order of sums; a runtime with fused or reduced-precision
        kernels is not covered.
        """
        from lipcert.certificate.onnx_writing import write_onnx

        write_onnx(self, Path(path))
        return Path(path)

    @property
    def constants(self) -> Tensor:
        """(K, K): the constants that margins are divided by; a copy."""
        return self._numbers[0].clone()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits as the program computes them, and certified radii in float64."""
        self._check_hooks()
        check_input(x, self._bound.facts.input_shape, self._dtype)
        # A graph has no place for checks of the machine's state: what can be checked is
        # checked while exporting.
        if torch.compiler.is_exporting():
            if not torch.compiler.is_dynamo_compiling():
                check_arithmetic(self._dtype, x.device)
            return self._certified(x)
        result: tuple[Tensor, Tensor] = self._checked(x)
        return result

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same as `forward`: hooks for all modules of torch could change inputs, and do not run here."""
        # Not an attribute of this name that somebody gave it.
        return type(self).forward(self, x)

    def _check_hooks(self) -> None:
        """Refuse hooks, which were registered to change what goes in or comes out, or to see it."""
        if self._forward_pre_hooks or self._forward_hooks:
            raise ModelError(
                "a CertifiedClassifier has hooks: they could change its inputs, and "
                "radii would be about others; put them around a module that calls it"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _checked(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same with the arithmetic and the operators checked, never compiled: compilers choose other arithmetic."""
        check_arithmetic(self._dtype, x.device)
        result = self._certified(x)
        if self._check_operators:
            self._check_operators()
        return result

    def _certified(self, x: Tensor) -> tuple[Tensor, Tensor]:
        constants, reference_errors, growth, reach = self._numbers
        rows = x.reshape(x.shape[0], prod(x.shape[1:])).double()
        # Rounded up: a distance that is too small would leave errors out.
        distance = torch.linalg.vector_norm(rows, dim=1)[:, None] * _ROUND_UP
        logits: Tensor = self._program[0](x)
        wide = logits.double()
        prediction = wide.argmax(1)
        margins = wide.gather(1, prediction[:, None]) - wide
        # At x and at a point x′ of the ball together. By κ·|x − x′| the latter may be
        # larger: that is in `constants`.
        errors = 2 * (reference_errors[prediction] + growth[prediction] * distance)
        radius = certified_radius(margins, errors, constants[prediction], prediction)
        # Comparisons with NaN are false: an input with NaN has no distance below
        # `reach`, and the radius 0.
        in_range = torch.isfinite(wide).all(1) & (distance[:, 0] < reach)
        return logits, torch.where(in_range, torch.minimum(radius, reach), 0.0)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> CertifiedClassifier:
        """Moves to other devices; the types of all tensors stay, for the certificates are about them."""
        # `fn` may convert as well, as in .half(): all that is taken from it is where it
        # moves an empty tensor.
        device = fn(torch.zeros(0)).device
        self._numbers = tuple(number.to(device) for number in self._numbers)
        self._program[0].to(device=device)
        return self
