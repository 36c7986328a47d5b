"""The values of the executed program at inputs: the points around which everything is bounded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from lipcert.network.normal_form import Network


@torch.no_grad()
def executed_values(network: Network, x: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    """The values of the nodes that the program computes, in float64 without loss, and the logits."""
    values: dict[int, Tensor] = {}
    produced = network.produced

    def observe(node: fx.Node, value: Any) -> Any:
        if node in produced and produced[node] not in values:
            values[produced[node]] = value.double()
        return value

    logits = network.program.run(x, observe)
    return values, logits
