"""Runs a program and bounds, input by input, the rounding errors that it makes (see `node_errors`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lipcert.certificate.node_errors import BatchErrors
from lipcert.certificate.stages import Stages
from lipcert.network.normal_form import Network


@dataclass(frozen=True)
class Execution:
    """One batch as the program executed it, with bounds on the rounding errors made in each stage.

    logits: (B, K), as the program returned them.
    sites: (B, n), l2 norm of the error made at the output of each nonlinearity,
    float64.
    output: (B, K), error made in the last stage, per logit, float64.
    largest: (), the largest absolute value anywhere in the batch; of `NormPass` (B,).
    """

    logits: Tensor
    sites: Tensor
    output: Tensor
    largest: Tensor

    def cpu(self) -> Execution:
        sites, output = self.sites.cpu(), self.output.cpu()
        return Execution(self.logits.cpu(), sites, output, self.largest.cpu())


class ErrorPass:
    """Executes the program of a network and follows the errors alongside."""

    @torch.no_grad()
    def __init__(self, network: Network, stages: Stages) -> None:
        self.network, self.stages = network, stages
        self.nothing = torch.zeros((), dtype=network.dtype, device=network.device)
        self.offsets: dict[int, Tensor] = {}
        for v, node in enumerate(network.nodes):
            if node.offset is not None:
                self.offsets[v] = node.offset().to(network.device, network.dtype)

    @torch.no_grad()
    def execute(self, x: Tensor) -> Execution:
        """Run one batch."""
        values: dict[int, Tensor] = {}
        largest: list[Tensor] = []
        produced = self.network.produced

        def observe(node: fx.Node, value: Any) -> Any:
            if node in produced:
                values.setdefault(produced[node], value)
                largest.extend(_extremes(value))
            return value

        logits = self.network.program.run(x, observe)
        errors = BatchErrors(self.network, self.stages, self.offsets, values, len(x))
        sites, output = errors.errors_of(logits)
        extreme = torch.stack([self.nothing, *largest]).abs().max()
        return Execution(logits, sites, output, extreme)


class NormPass(ErrorPass):
    """The same by norms alone, for stages that are bounded `by_norms`: `largest` is (B,), a bound for every row."""

    @torch.no_grad()
    def execute(self, x: Tensor) -> Execution:
        values: dict[int, Tensor] = {}
        produced = self.network.produced

        def observe(node: fx.Node, value: Any) -> Any:
            if node in produced:
                values.setdefault(produced[node], value)
            return value

        logits = self.network.program.run(x, observe)
        errors = BatchErrors(self.network, self.stages, self.offsets, values, len(x))
        sites, output = errors.errors_of(logits)
        sizes = [errors.size(v) for v in range(len(self.network.nodes))]
        return Execution(logits, sites, output, torch.stack(sizes).amax(0))


def _extremes(x: Tensor) -> tuple[Tensor, ...]:
    """The smallest and the largest entry; several times faster in the order in which they lie in memory."""
    if x.numel() == 0:
        return ()
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return tuple(torch.aminmax(x.permute(order).reshape(-1)))
