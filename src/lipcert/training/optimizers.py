"""Who moves which parameter: Adam, or Muon for the matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lipcert.training.config import TrainConfig
from lipcert.training.muon import KernelMuon, kernels


def build_optimizers(
    config: TrainConfig, model: nn.Module, scales: list[nn.Parameter]
) -> list[Optimizer]:
    """The optimizers of the weights and of the scales; each group has the "pace" that multiplies its learning rate.

    Muon makes every step of a weight matrix nearly orthogonal, so that all its singular
    values grow alike: what a Lipschitz bound charges for is the largest, what a margin
    needs is all of them. With type "muon" it moves the matrices of dense layers, with
    "muon-kernels" convolutions too; everything else stays with Adam.
    """
    options = config.optimizer
    matrices: list[Tensor] = []
    if options.type == "muon-kernels":
        matrices = kernels(model)
    elif options.type == "muon":
        matrices = [
            module.weight for module in model.modules() if isinstance(module, nn.Linear)
        ]
    # `is not`, because `in` would compare entries.
    others = [
        parameter
        for parameter in model.parameters()
        if all(parameter is not matrix for matrix in matrices)
    ]
    groups: list[dict[str, Any]] = [{"params": others, "pace": 1.0}] if others else []
    # Scales live on a logarithmic axis and may move faster than weights.
    if scales:
        groups.append({"params": scales, "pace": config.estimator.scale_lr})
    optimizers: list[Optimizer] = []
    if groups:
        optimizers.append(
            torch.optim.Adam(
                groups, betas=(options.beta1, options.beta2), eps=options.eps
            )
        )
    if matrices:
        group = {"params": matrices, "pace": options.muon_lr}
        optimizers.append(
            KernelMuon(
                [group], weight_decay=options.weight_decay, momentum=options.momentum
            )
        )
    return optimizers
