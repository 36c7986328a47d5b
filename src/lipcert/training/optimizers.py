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
        matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    # By identity, because `in` would compare entries.
    moved = {id(matrix) for matrix in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in moved]
    groups: list[dict[str, Any]] = [{"params": others, "pace": 1.0}] if others else []
    # Scales live on a logarithmic axis and may move faster than weights.
    if scales:
        groups.append({"params": scales, "pace": config.estimator.scale_lr})
    optimizers: list[Optimizer] = []
    if groups:
        betas = (options.beta1, options.beta2)
        optimizers.append(torch.optim.Adam(groups, betas=betas, eps=options.eps))
    if matrices:
        muon = KernelMuon(
            [{"params": matrices, "pace": options.muon_lr}],
            weight_decay=options.weight_decay,
            momentum=options.momentum,
            orthogonal=options.orthogonal,
            iterations=options.muon_iterations,
            coarse=config.precision == "bf16-mixed",
        )
        optimizers.append(muon)
    return optimizers
