"""Muon for kernels of any shape: a convolution's is a matrix with one row per filter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class KernelMuon(Optimizer):
    """Momentum (Nesterov's), made nearly orthogonal as a matrix (Jordan et al. 2024), is the step of a kernel.

    A step has the length lr·√max(1, rows/columns) in the spectral norm. Unlike
    `torch.optim.Muon` it takes kernels of convolutions, can keep them orthogonal, and
    computes in bfloat16, which not every processor has, only if it is told to.

    Args:
        params: kernels, or groups of them.
        lr: the learning rate.
        momentum: the share of the old momentum.
        weight_decay: the weights shrink by lr·weight_decay in every step.
        orthogonal: whether kernels that are orthogonal stay so.
        iterations: how near to orthogonal the steps become: after 5, singular values that
            were above 1/500 of the matrix's norm are about 1, after 3 those above 1/40.
        coarse: whether directions are computed in bfloat16; weights never are.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        orthogonal: bool = False,
        iterations: int = 5,
        coarse: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        )
        self._orthogonal, self._coarse = orthogonal, coarse
        self._iterations = iterations

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for kernel in group["params"]:
                if kernel.grad is not None:
                    self._move(kernel, group)
        return loss

    def _move(self, kernel: Tensor, group: dict[str, Any]) -> None:
        state = self.state[kernel]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(kernel)
        average, momentum = state["momentum_buffer"], group["momentum"]
        average.mul_(momentum).add_(kernel.grad)
        # Nesterov: the gradient as if the momentum had moved on once more.
        ahead = kernel.grad + momentum * average
        matrix = ahead.reshape(len(kernel), -1)
        direction = orthogonalised(matrix, self._iterations, self._coarse)
        rows, columns = direction.shape
        # Decoupled from the gradient, as in AdamW.
        kernel.mul_(1 - group["lr"] * group["weight_decay"])
        kernel.sub_(
            direction.reshape(kernel.shape),
            alpha=group["lr"] * sqrt(max(1.0, rows / columns)),
        )
        if self._orthogonal:
            nearer = nearer_to_orthogonal(kernel.reshape(rows, columns), self._coarse)
            kernel.copy_(nearer.reshape(kernel.shape))


def nearer_to_orthogonal(matrix: Tensor, coarse: bool = False) -> Tensor:
    """A matrix whose singular values are 1 up to δ becomes one whose are up to 3/2·δ², by Newton and Schulz.

    If coarse, δ ends at about 10⁻⁵, and products may be of bfloat16 numbers, as the processor likes.
    """
    wide = _wide(matrix)
    if coarse and matrix.dtype == torch.float32:
        # Only how far W is from orthogonal has to be precise: with W = H + L, WWᵀ is HHᵀ + HLᵀ
        # + LHᵀ up to LLᵀ, and H has as many digits as the products take.
        high = wide.bfloat16().float()
        with _products_may_be_coarse():
            cross = high @ (wide - high).T
            gram = high @ high.T + cross + cross.T
            error = torch.eye(len(wide), device=wide.device) - gram
            wide = wide + 0.5 * error @ wide
    else:
        # Each singular value σ becomes (3σ − σ³)/2.
        wide = 1.5 * wide - 0.5 * (wide @ wide.T) @ wide
    return wide if wide.shape == matrix.shape else wide.T


@contextmanager
def _products_may_be_coarse() -> Iterator[None]:
    """Within, torch may round the factors of float32 products to bfloat16, and uses other libraries for them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _wide(matrix: Tensor) -> Tensor:
    """The matrix, or its transpose if that has fewer rows: x xᵀ is the smaller one of both Gram matrices."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def orthogonalised(matrix: Tensor, iterations: int = 5, coarse: bool = False) -> Tensor:
    """A matrix with the same singular vectors and singular values between about 0.7 and 1.2, by Newton and Schulz."""
    wide = _wide(matrix)
    # The iteration needs singular values of at most 1, which the Frobenius norm makes
    # sure of.
    x: Tensor = wide / (torch.linalg.matrix_norm(wide) + 1e-30)
    if coarse:
        x = x.bfloat16()
    a, b, c = _NEWTON_SCHULZ
    for _ in range(iterations):
        gram = x @ x.T
        # Each singular value σ becomes aσ + bσ³ + cσ⁵, which pushes it towards 1; the
        # vectors stay.
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.to(matrix.dtype)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def kernels(model: nn.Module) -> list[Tensor]:
    """The weights of dense layers and convolutions."""
    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            found.append(module.weight)
    return found
