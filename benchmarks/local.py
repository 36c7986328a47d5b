"""Local certificates of ordinary networks, side by side with auto_LiRPA's CROWN in one run.

auto_LiRPA is no dependency: put it on PYTHONPATH (with its own requirements) and its columns are filled; without it
they stay empty. It computes in float32 and counts no rounding. LIPCERT_DATA_DIR has to name the data sets. The two
methods that spend time on slopes are measured at the largest ε of each norm only, and not on all networks. Times are
those of the processor (one thread), which others on the same machine disturb less than those of a clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import getLogger
from math import inf
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import lipcert
from lipcert.attacks import pgd
from lipcert.local.certify_local import LocalCertifier
from lipcert.local.sharpening import Effort
from lipcert.models.zoo import ZOO

IMAGES, BATCH = 20, 10
SLOW = ("local, searched", "α-CROWN")


def _mlp(width: int, depth: int, activation: Callable[[], nn.Module]) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(784, width), activation()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _conv(channels: int) -> nn.Module:
    side, first, second = (7, 8, 16) if channels == 1 else (8, 8, 16)
    return nn.Sequential(
        nn.Conv2d(channels, first, 4, 2, 1), nn.ReLU(), nn.Conv2d(first, second, 4, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(second * side * side, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def _resnet() -> nn.Module:
    return ZOO["resnet-small"].build((3, 32, 32), 10)


@dataclass(frozen=True)
class Case:
    """A network, its data, how long it is trained, and the sizes of the balls in l2 and l∞.

    thorough: whether the methods that spend time on slopes are measured; they take seconds per image on some networks.
    attack: the size in l2 of the perturbations of adversarial training; 0 for training on accuracy alone.
    """

    build: Callable[[], nn.Module]
    data: str
    epochs: int
    balls: dict[float, tuple[float, ...]]
    thorough: bool = True
    attack: float = 0.0


_MNIST = {2.0: (0.05, 0.1, 0.2), inf: (0.002, 0.005, 0.01)}
_WIDE = {2.0: (0.2, 0.5, 1.0), inf: (0.01, 0.02, 0.04)}
_CIFAR = {2.0: (0.01, 0.03, 0.06), inf: (0.0005, 0.001, 0.002)}
CASES = {
    "784-256×2-10": Case(lambda: _mlp(256, 2, nn.ReLU), "mnist", 2, _MNIST),
    "784-256×4-10": Case(lambda: _mlp(256, 4, nn.ReLU), "mnist", 2, _MNIST),
    "784-200×8-10": Case(lambda: _mlp(200, 8, nn.ReLU), "mnist", 2, _MNIST),
    "sigmoid 784-200×5-10": Case(
        lambda: _mlp(200, 5, nn.Sigmoid), "mnist", 6, _MNIST, thorough=False
    ),
    "conv 1×28×28": Case(lambda: _conv(1), "mnist", 1, _MNIST, thorough=False),
    "conv 3×32×32": Case(lambda: _conv(3), "cifar10", 1, _CIFAR, thorough=False),
    "resnet-small": Case(_resnet, "cifar10", 1, _CIFAR, thorough=False),
    "784-256×4-10, adversarially": Case(
        lambda: _mlp(256, 4, nn.ReLU), "mnist", 2, _WIDE, attack=1.0
    ),
    "conv 1×28×28, adversarially": Case(
        lambda: _conv(1), "mnist", 1, _WIDE, thorough=False, attack=1.0
    ),
    "conv 3×32×32, adversarially": Case(
        lambda: _conv(3), "cifar10", 1, _CIFAR, thorough=False, attack=0.25
    ),
}


def train_ordinarily(case: Case) -> tuple[nn.Module, lipcert.data.Dataset]:
    """Cross-entropy alone, on images or on what three steps of an attack make of them."""
    torch.manual_seed(0)
    data = lipcert.data.load(case.data, os.environ.get("LIPCERT_DATA_DIR"))
    model = case.build()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(case.epochs):
        for index in torch.randperm(len(data.train)).split(128):
            x, y = data.train.pixels(index), data.train.labels[index]
            if case.attack:
                x = _attacked(model, x, y, case.attack)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval(), data


def _attacked(model: nn.Module, x: Tensor, y: Tensor, size: float) -> Tensor:
    """Three steps up the loss, inside an l2 ball and between 0 and 1."""
    moved = x
    for _ in range(3):
        moved = moved.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(
            nn.functional.cross_entropy(model(moved), y), moved
        )
        gradient = (
            gradient
            / gradient.flatten(1).norm(dim=1).clamp(min=1e-12)[:, None, None, None]
        )
        step = moved.detach() + 0.5 * size * gradient - x
        length = step.flatten(1).norm(dim=1)[:, None, None, None]
        moved = (x + step * (size / length.clamp(min=1e-12)).clamp(max=1.0)).clamp(0, 1)
    return moved.detach()


def _crown(
    model: nn.Module, x: Tensor, y: Tensor, norm: float
) -> dict[str, Callable[[float], Tensor]]:
    """Which inputs auto_LiRPA proves, by method; empty where it is not installed."""
    try:
        from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm
    except ImportError:
        return {}
    options = {"optimize_bound_args": {"iteration": 20, "lr_alpha": 0.1}}
    bounded = BoundedModule(model, x[:2], bound_opts=options, verbose=False)

    def prove(method: str, epsilon: float) -> Tensor:
        proved = []
        for first in range(0, len(x), BATCH):
            label = y[first : first + BATCH]
            others = torch.eye(10)[label][:, None] - torch.eye(10)
            rows = others[torch.arange(10) != label[:, None]].reshape(len(label), 9, 10)
            ball = BoundedTensor(
                x[first : first + BATCH], PerturbationLpNorm(norm=norm, eps=epsilon)
            )
            with torch.set_grad_enabled(method != "CROWN"):
                low, _ = bounded.compute_bounds(
                    x=(ball,), C=rows, method=method, bound_upper=False
                )
            proved.append((low > 0).all(1))
        return torch.cat(proved)

    return {
        "CROWN": lambda epsilon: prove("CROWN", epsilon),
        "α-CROWN": lambda epsilon: prove("CROWN-Optimized", epsilon),
    }


def _ours(
    model: nn.Module, x: Tensor, y: Tensor, norm: float
) -> dict[str, Callable[[float], Tensor]]:
    shape = tuple(x.shape[1:])
    plain = LocalCertifier(model, shape, norm)
    careful = LocalCertifier(
        model, shape, norm, effort=Effort(last_steps=20, inner_steps=20)
    )

    def prove(certifier: LocalCertifier, epsilon: float) -> Tensor:
        proved = []
        for first in range(0, len(x), BATCH):
            some = slice(first, first + BATCH)
            certificates = certifier.certify(x[some], epsilon, label=y[some])
            proved.append(certificates.correct & (certificates.radius >= epsilon))
        return torch.cat(proved)

    return {
        "local": lambda epsilon: prove(plain, epsilon),
        "local, searched": lambda epsilon: prove(careful, epsilon),
    }


def _global(
    model: nn.Module, x: Tensor, y: Tensor, norm: float
) -> Callable[[float], Tensor]:
    certificates = lipcert.certify(model, x, labels=y)
    root = x[0].numel() ** 0.5 if norm == inf else 1.0
    return lambda epsilon: (
        certificates.correct & (certificates.radius >= epsilon * root)
    )


def compare_local(
    repeats: int, networks: Sequence[str] = tuple(CASES)
) -> tuple[list[dict[str, Any]], Table]:
    """Certified shares and milliseconds per image of every method, network, norm and ε; the same images for all."""
    table = Table(
        "network",
        "norm",
        "ε",
        title=f"Certified share of {IMAGES} images, ms per image",
    )
    names = ["global", "local", "local, searched", "CROWN", "α-CROWN", "PGD"]
    for name in names:
        table.add_column(name)
    figures: list[dict[str, Any]] = []
    for title in networks:
        case = CASES[title]
        model, data = train_ordinarily(case)
        x, y = data.test.pixels(slice(0, IMAGES)), data.test.labels[:IMAGES]
        for norm, epsilons in case.balls.items():
            methods = {
                "global": _global(model, x, y, norm),
                **_ours(model, x, y, norm),
                **_crown(model, x, y, norm),
            }
            for epsilon in epsilons:
                row: dict[str, Any] = {
                    "network": title,
                    "norm": "l∞" if norm == inf else "l2",
                    "epsilon": epsilon,
                }
                for name, method in methods.items():
                    if name in SLOW and (epsilon < max(epsilons) or not case.thorough):
                        continue
                    began = time.process_time()
                    share = float(method(epsilon).double().mean())
                    row[name] = {
                        "share": share,
                        "ms": 1000 * (time.process_time() - began) / IMAGES,
                    }
                if norm == 2:
                    standing = (model(x).argmax(1) == y) & ~pgd(
                        model, x, y, epsilon, steps=20
                    ).success
                    row["PGD"] = {"share": float(standing.double().mean()), "ms": None}
                figures.append(row)
                getLogger(__name__).warning("%s", row)
                table.add_row(
                    title,
                    row["norm"],
                    f"{epsilon:g}",
                    *(_cell(row.get(name)) for name in names),
                )
    return figures, table


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "–"
    if entry["ms"] is None:
        return f"{entry['share']:.0%}"
    return f"{entry['share']:.0%}, {entry['ms']:.0f} ms"
