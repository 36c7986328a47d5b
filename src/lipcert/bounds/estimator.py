"""Differentiable Lipschitz estimates that follow a network through its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.bounds.liplt import prefix_constants
from lipcert.bounds.scales import Scales
from lipcert.bounds.targets import TARGETS, pairwise_matrix, weighted_norms
from lipcert.errors import NonFiniteError, OptionError, check_choice
from lipcert.network.normal_form import Network
from lipcert.network.slopes import check_norm
from lipcert.network.sweep import Sweep
from lipcert.network.trace import trace
from lipcert.norms.dense import dense_norms
from lipcert.norms.estimate import Rotation, Vectors, estimate_norms, random_vectors

METHODS = ("naive", "liplt", "rescaled")


@dataclass(frozen=True)
class Estimate:
    """A Lipschitz estimate. It may lie below the true bound while the power iteration has not converged.

    value: () for the target network, (K,) per class, (K, K) for last-layer and pairwise.
    prefix: m_1..m_n, the constants of the maps from the input to the input of each nonlinearity.
    contributions: how much each site 0..n adds to the (mean) value; they sum to it.
    """

    value: Tensor
    prefix: Tensor
    contributions: Tensor


class Estimator(nn.Module):
    """Estimates the Lipschitz constants of a model by power iteration, differentiably.

    The singular vectors are buffers: they are saved, loaded and moved with the estimator and start the next estimate,
    so that a few iterations per training step are enough. Gradients reach the model's own parameters. The model is not
    part of the estimator's state. BatchNorm and Dropout are treated as in eval mode.

    Args:
        model: any model that `lipcert.trace` accepts.
        input_shape: shape of one input, without the batch axis.
        method: "naive" (product of norms), "liplt" (loop transformation) or "rescaled" (LipLT in the coordinates
            `scales`, whose logarithms are parameters of the estimator: train them along, or call `fit_scales`).
        target: "network", "per-class", "last-layer" (LipLT up to the last layer, then its norm) or "pairwise".
        power_iterations: per call; maps across more than four nonlinearities take part in some only (see `Rotation`).
        norm: 2, or 1 or inf for networks small enough to form dense matrices.
        seed: of the first vectors.
        accelerated: locally optimal conjugate gradients instead of power iteration; fewer iterations are needed, but
            each costs up to half as much again.
        per_neuron: "rescaled" scales every entry of a convolutional site on its own, not only every channel.
    """

    coordinates: type[Scales] = Scales
    """What "rescaled" fits."""

    def __init__(
        self,
        model: nn.Module,
        input_shape: tuple[int, ...],
        method: str = "liplt",
        target: str = "pairwise",
        power_iterations: int = 5,
        *,
        norm: float = 2.0,
        seed: int = 0,
        accelerated: bool = False,
        per_neuron: bool = False,
    ) -> None:
        super().__init__()
        check_choice("method", method, METHODS)
        check_choice("target", target, TARGETS)
        check_norm(norm)
        if power_iterations < 0:
            raise OptionError(f"power_iterations is {power_iterations}, expected 0 or more")
        self.method, self.target, self.power_iterations, self.norm = method, target, power_iterations, float(norm)
        self.accelerated = accelerated
        self._model = (model,)  # in a tuple, so that the model's parameters do not become the estimator's
        self._parts = tuple(model.modules())
        self._fixed = {"input_shape": input_shape, "norm": norm, "seed": seed, "per_neuron": per_neuron}
        self.network: Network = trace(model, input_shape, training=True)
        if target != "network":
            _ = self.network.classes
        if method == "rescaled" and self.norm != 2.0:
            raise OptionError(f"method is 'rescaled' with norm {norm}, expected norm 2; use method='liplt'")
        self.scales = self.coordinates(self.network, per_neuron) if method == "rescaled" else None
        if self.scales is not None:
            self.network = self.scales.rescaled()
        sites = self.network.sites[:-1]
        self._passing = [
            method != "naive" and site.slope is not None and site.slope.shifts(self.norm) for site in sites
        ]
        self._sweep = Sweep(self.network, self._passing, len(sites) if target == "network" else len(sites) - 1)
        if self.norm == 2.0:
            self._rotation = Rotation(self._sweep, self._passing)
            for i, x in random_vectors(self._sweep, seed).items():
                self.register_buffer(f"vectors_{i}", x)
            if self._rotation.period > 1:
                self.register_buffer("turn", torch.zeros((), dtype=torch.long))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy belongs to a copy of the model: to the same one if both are copied or pickled together."""
        free = {name: getattr(self, name) for name in ("method", "target", "power_iterations", "accelerated")}
        return _rebuilt, (type(self), self._model[0], {**self._fixed, **free}), self.state_dict()

    def __setstate__(self, state: Mapping[str, Tensor]) -> None:
        self.load_state_dict(state)

    def forward(self) -> Tensor:
        """The estimate's value: () for the network, (K,) per class, (K, K) for last-layer and pairwise."""
        return self.estimate().value

    def pairwise(self) -> Tensor:
        """(K, K) constants of the logit differences, whatever the target."""
        return pairwise_matrix(self.forward(), self.target, self.network.classes, self.norm)

    def estimate(self) -> Estimate:
        """The value together with the constants of all principal sub-networks and the share of every site."""
        self._follow_model()
        if self.network.dtype not in (torch.float32, torch.float64):
            raise OptionError(
                f"estimates need float32 or float64, the model is in {self.network.dtype}; convert a copy"
            )
        with torch.autocast(self.network.device.type, enabled=False):
            estimate = self._estimate()
        if not bool(torch.isfinite(estimate.value).all()):
            raise NonFiniteError(f"the Lipschitz estimate is not finite: {_culprit(self._model[0])}")
        return estimate

    def _estimate(self) -> Estimate:
        sectors = (
            self.network.lipschitz_sectors(self.norm) if self.method == "naive" else self.network.sectors(self.norm)
        )
        centres, radii = [c for c, _ in sectors], self._tensor([s for _, s in sectors])
        norms = self._norms(centres)
        prefix = prefix_constants(self._sweep.pairs, norms, radii)
        if self.target == "network":
            last = len(sectors)
            weights = torch.zeros_like(radii)
            for k, (j, i) in enumerate(self._sweep.pairs):
                if j == last:
                    weights = weights.index_put((torch.tensor(i),), norms[k])
            return Estimate(prefix[-1], prefix[1:-1], weights * radii * prefix[:-1])
        if self.target == "last-layer":
            sectors = self.network.lipschitz_sectors(self.norm)
            centres, radii = [c for c, _ in sectors], self._tensor([s for _, s in sectors])
        seed = torch.eye(self.network.classes, dtype=norms.dtype, device=norms.device)
        rows = self.network.pullback(seed, centres)
        value, contributions = weighted_norms(rows, radii * prefix, self.target, self.norm)
        return Estimate(value, prefix[1:], contributions)

    def _norms(self, centres: list[float | Tensor]) -> Tensor:
        if not self._sweep.pairs:
            return torch.zeros(0, dtype=self.network.dtype, device=self.network.device)
        if self.norm != 2.0:
            return dense_norms(self.network, self._sweep.pairs, centres, self.norm)
        vectors: Vectors = {i: self.get_buffer(f"vectors_{i}") for i in self._sweep.starts}
        turn = int(self.get_buffer("turn")) if self._rotation.period > 1 else 0
        vectors = self._rotation.iterate(vectors, centres, self.power_iterations, turn, self.accelerated)
        norms = estimate_norms(self._sweep, vectors, centres)
        if self.power_iterations > 0 and bool(torch.isfinite(norms).all()):
            for i, x in vectors.items():
                self.get_buffer(f"vectors_{i}").copy_(x)
            if self._rotation.period > 1:
                self.get_buffer("turn").fill_((turn + self.power_iterations) % self._rotation.period)
        return norms

    def _tensor(self, values: list[float | Tensor]) -> Tensor:
        dtype, device = self.network.dtype, self.network.device
        return torch.stack([torch.as_tensor(value, dtype=dtype, device=device) for value in values])

    def _follow_model(self) -> None:
        """Move to the model's device and dtype if it has been moved since; refuse it if it has other layers now."""
        if tuple(self._model[0].modules()) != self._parts:
            raise OptionError("layers of the model were replaced since the estimator was made; make a new one")
        like = next((p for p in self._model[0].parameters() if p.is_floating_point()), None)
        if like is not None and (like.dtype, like.device) != (self.network.dtype, self.network.device):
            object.__setattr__(self.network, "dtype", like.dtype)
            object.__setattr__(self.network, "device", like.device)
            self.to(like.device, like.dtype)

    def extra_repr(self) -> str:
        return f"method={self.method!r}, target={self.target!r}, power_iterations={self.power_iterations}"


def _rebuilt(kind: type[Estimator], model: nn.Module, options: Mapping[str, Any]) -> Estimator:
    return kind(model, **options)


def _culprit(model: nn.Module) -> str:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} contains NaN or infinity; restore the last good weights"
    return "the weights are finite but their product overflows; scale them down"
