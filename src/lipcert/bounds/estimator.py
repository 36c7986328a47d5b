"""Differentiable Lipschitz estimates that follow a network through its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.bounds.coordinates import coordinates
from lipcert.bounds.ellipsoids import Ellipsoids, Maps, eliminate
from lipcert.bounds.estimates import (
    Estimate,
    culprit,
    estimate_of_ellipsoids,
    estimate_of_norms,
    iterated_norms,
)
from lipcert.bounds.recursion import norm_matrix
from lipcert.bounds.scales import LIMIT, SLACK
from lipcert.bounds.targets import find_target
from lipcert.errors import NonFiniteError, OptionError, check_choice
from lipcert.network.build import trace
from lipcert.network.normal_form import Network
from lipcert.network.program import constants_computed_once
from lipcert.network.rewrites import liplt_lines
from lipcert.network.sweep import Pair, Sweep, joined_pairs
from lipcert.norms.chunks import chunks
from lipcert.norms.estimate import Vectors, random_vectors
from lipcert.norms.far import FarPairs, passing_ratios
from lipcert.resources import share_of_memory

METHODS = ("naive", "liplt", "rescaled", "ellipsoids")
_VECTORS = "vectors_"


class Estimator(nn.Module):
    """Estimates the Lipschitz constants of a model by power iteration, differentiably.

    The singular vectors are buffers: they are saved, loaded and moved with the
    estimator and start the next estimate, so that a few iterations per training step
    are enough. Gradients reach the model's own parameters. The model is not part of the
    estimator's state. BatchNorm and Dropout are treated as in eval mode.

    Args:
        model: any model that `lipcert.trace` accepts.
        input_shape: shape of one input, without the batch axis.
        method: "naive" (product of norms), "liplt" (loop transformation) or "rescaled" (LipLT in the coordinates
            `scales`, whose logarithms are parameters of the estimator: train them along, or call `fit_scales`), or
            "ellipsoids" (LipSDP with shared multipliers, which are parameters too; dense networks of moderate size).
        target: "network", "per-class", "last-layer" (LipLT up to the last layer, then its norm) or "pairwise".
        power_iterations: per call; maps across more than four nonlinearities take part in some only (see `Rotation`).
        seed: of the first vectors.
        accelerated: locally optimal conjugate gradients instead of power iteration; fewer iterations are needed, but
            each costs up to half as much again.
        span: estimate the norms of maps across at most so many nonlinearities, and those of others by products: an
            estimate from above, with which the work grows with the depth of a network, not with its square.
        memory: bytes that the rows of a differentiable estimate may take; 60 % of what is free by default. If they take
            more, they travel in chunks, and what the derivative needs is computed again for it.
        per_neuron: "rescaled" scales every entry of a convolutional site on its own, not only every channel.
        network: the trace of this model in eval mode, if it is there already.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> lipcert.Estimator(model, (4,))().shape
        torch.Size([3, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        input_shape: tuple[int, ...],
        method: str = "liplt",
        target: str = "pairwise",
        power_iterations: int = 5,
        *,
        seed: int = 0,
        accelerated: bool = False,
        span: int | None = None,
        memory: int | None = None,
        per_neuron: bool = False,
        network: Network | None = None,
    ) -> None:
        super().__init__()
        _check_options(method, target, power_iterations, span)
        self.method, self.target = method, target
        self.power_iterations, self.accelerated = power_iterations, accelerated
        # A tuple, so that its parameters do not become the estimator's.
        self._model = (model,)
        self._modules_of_model = tuple(model.modules())
        self._fixed: dict[str, Any] = {"input_shape": input_shape, "seed": seed}
        self._fixed |= {"per_neuron": per_neuron, "span": span, "memory": memory}
        network = network or trace(model, input_shape, training=True)
        seen = coordinates(network, method, target, per_neuron)
        self.network, self._last_network = seen.network, seen.last
        self.scales, self.slack = seen.scales, seen.slack
        self._memory = memory
        self._send(network, seed, span)

    @classmethod
    def of_network(
        cls, network: Network, method: str, target: str, *, per_neuron: bool = False
    ) -> Estimator:
        """An estimator of a captured network, whatever becomes of its model."""
        model, shape = nn.Module(), network.input_shape
        return cls(model, shape, method, target, per_neuron=per_neuron, network=network)

    def _send(self, base: Network, seed: int, span: int | None) -> None:
        """The vectors that travel through the network, and in which chunks."""
        self._pairs: list[Pair] = []
        self._period = 1
        if self.method == "ellipsoids":
            return  # its maps are matrices
        last = base.depth + find_target(self.target).whole_output
        near: set[Pair] | None = None
        self._far: FarPairs | None = None
        if span is not None and self.method != "naive":
            ratios = passing_ratios(base, liplt_lines(base))
            far = self._far = FarPairs(ratios, base.depth + 2, span)
            pairs = joined_pairs(self.network, last)
            near = {pair for pair in pairs if pair not in far}
        sweep = Sweep(self.network, last, only=near)
        self._chunks = chunks(sweep, self._memory or share_of_memory(base.device))
        for chunk in self._chunks:
            self._pairs += chunk.sweep.pairs
            self._period = max(self._period, chunk.rotation.period)
        for i, x in random_vectors(sweep, seed).items():
            self.register_buffer(f"{_VECTORS}{i}", x)
        if self._period > 1:
            # Far maps take turns; which is next is saved with the vectors.
            self.register_buffer("turn", torch.zeros((), dtype=torch.long))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy belongs to a copy of the model: to the same one if both are copied or pickled together."""
        options = dict(self._fixed)
        for name in ("method", "target", "power_iterations", "accelerated"):
            options[name] = getattr(self, name)
        return _rebuilt, (type(self), self._model[0], options), self.state_dict()

    def __setstate__(self, state: Mapping[str, Tensor]) -> None:
        self.load_state_dict(state)

    def forward(self) -> Tensor:
        """The estimate's value: () for the network, (K,) per class, (K, K) for last-layer and pairwise."""
        return self.estimate().value

    def pairwise(self) -> Tensor:
        """(K, K) constants of the logit differences, whatever the target."""
        return find_target(self.target).pairwise(self.forward(), self.network.classes)

    def estimate(self) -> Estimate:
        """The value together with the constants of all principal sub-networks and the share of every site."""
        self._follow_model()
        if self.network.dtype not in (torch.float32, torch.float64):
            raise OptionError(
                f"estimates need float32 or float64, the model is in {self.network.dtype}; convert a copy"
            )
        full_precision = torch.autocast(self.network.device.type, enabled=False)
        with full_precision, constants_computed_once():
            estimate = self._estimate()
        if not bool(torch.isfinite(estimate.value).all()):
            problem = culprit(self._model[0])
            raise NonFiniteError(f"the Lipschitz estimate is not finite: {problem}")
        return estimate

    def diagonals(self) -> dict[str, Tensor]:
        """What coordinates or multipliers are made of, by the names of sites, for `FitOptions(start=…)`."""
        made = self.scales.diagonals() if self.scales is not None else {}
        if self.slack is not None:
            made[SLACK] = self.slack.detach().exp().double().cpu()
        return made

    @torch.no_grad()
    def begin_with(self, diagonals: Mapping[str, Tensor]) -> None:
        """Take over diagonals by the names of their sites."""
        if self.scales is not None:
            self.scales.begin_with(diagonals)
        slack, own = diagonals.get(SLACK), self.slack
        if slack is not None and own is not None and slack.shape == own.shape:
            own.copy_(slack.log())

    def ellipsoids(self) -> Ellipsoids:
        """The ellipsoids of all sites and of the output, with the present diagonals."""
        if self.scales is None or self.slack is None:
            problem = "the estimator has no ellipsoids"
            raise OptionError(f"{problem}; use method='ellipsoids'")
        slack = self.slack.clamp(-LIMIT, LIMIT).exp().double()
        return eliminate(Maps.of(self.network), self.scales.flat_diagonals(), slack)

    def _estimate(self) -> Estimate:
        target = find_target(self.target)
        if self.method == "ellipsoids":
            return estimate_of_ellipsoids(self.ellipsoids(), target, self.network.dtype)
        norms = norm_matrix(self._pairs, self._norms(), self.network.depth + 2)
        if self._far is not None:
            norms = self._far.filled(norms)
        networks = self.network, self._last_network
        return estimate_of_norms(norms, target, *networks, self._far, self._memory)

    def _norms(self) -> Tensor:
        """‖B_ji‖ of all pairs, after some iterations."""
        if not self._pairs:
            return torch.zeros(0, dtype=self.network.dtype, device=self.network.device)
        vectors: Vectors = {}
        for name, buffer in self.named_buffers():
            if name.startswith(_VECTORS):
                vectors[int(name.removeprefix(_VECTORS))] = buffer
        turn = int(self.get_buffer("turn")) if self._period > 1 else 0
        norms, done = iterated_norms(
            self._chunks, vectors, self.power_iterations, turn, self.accelerated
        )
        if self._period > 1 and done:
            self.get_buffer("turn").fill_((turn + done) % self._period)
        return norms

    def _follow_model(self) -> None:
        """Move to the model's device and dtype if it has been moved since; refuse it if it has other layers now."""
        model = self._model[0]
        if tuple(model.modules()) != self._modules_of_model:
            raise OptionError(
                "layers of the model were replaced since the estimator was made; make a new one"
            )
        like = next((p for p in model.parameters() if p.is_floating_point()), None)
        if like is None:
            return
        if (like.dtype, like.device) != (self.network.dtype, self.network.device):
            self.network = replace(self.network, dtype=like.dtype, device=like.device)
            self.to(like.device, like.dtype)

    def extra_repr(self) -> str:
        return f"method={self.method!r}, target={self.target!r}, power_iterations={self.power_iterations}"


def _check_options(
    method: str, target: str, power_iterations: int, span: int | None
) -> None:
    check_choice("method", method, METHODS)
    find_target(target)
    if power_iterations < 0:
        raise OptionError(f"power_iterations is {power_iterations}, expected 0 or more")
    if span is not None and span < 1:
        raise OptionError(f"span is {span}, expected 1 or more, or None for all maps")


def _rebuilt(
    kind: type[Estimator], model: nn.Module, options: Mapping[str, Any]
) -> Estimator:
    return kind(model, **options)
