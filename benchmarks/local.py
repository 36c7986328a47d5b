"""Local certificates of ordinary networks, side by side with auto_LiRPA's CROWN in one run.

auto_LiRPA is no dependency: put it on PYTHONPATH (with its own requirements) and its columns are filled; without it
they stay empty. It computes in float32 and counts no rounding. LIPCERT_DATA_DIR has to name the data sets. The two
methods that spend time on slopes are measured at the largest ε of each norm only, on fewer images, and try only what
the quick method of the same library has not proved; their times include the latter. Times are those of the processor
(one thread), which others on the same machine disturb less than those of a clock. What a method prepares once for a
network and a norm is prepared before, on one batch. Every row is stored at once, with when and where it was measured;
`--networks` measures some of the networks and keeps the rows of the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from logging import getLogger
from math import inf
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import lipcert
from benchmarks.local_networks import CASES, Case, test_images, trained
from benchmarks.measure import RESULTS, store
from lipcert.attacks import pgd
from lipcert.local.certify_local import LocalCertifier
from lipcert.local.sharpening import Effort
from lipcert_experiments.facts import environment

NAMES = ["global", "local", "local, searched", "CROWN", "α-CROWN", "PGD"]
SLOW = ("local, searched", "α-CROWN")
_BATCH = 10
_FEW = 2
"""Inputs at a time for α-CROWN, whose slopes need much memory."""
Prove = Callable[[Tensor, Tensor, float], Tensor]
"""Which inputs with these labels are proved to keep their class at ε."""


def _crown(model: nn.Module, x: Tensor, norm: float, batch: int) -> dict[str, Prove]:
    """auto_LiRPA's methods; empty where it is not installed."""
    try:
        from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm
    except ImportError:
        return {}
    options = {"optimize_bound_args": {"iteration": 20, "lr_alpha": 0.1}}
    bounded = BoundedModule(model, x[:2], bound_opts=options, verbose=False)

    def bound(x: Tensor, y: Tensor, epsilon: float, method: str, batch: int) -> Tensor:
        proved = torch.zeros(len(x), dtype=torch.bool)
        for index in torch.arange(len(x)).split(batch):
            others = torch.eye(10)[y[index]][:, None] - torch.eye(10)
            rows = others[torch.arange(10) != y[index][:, None]].reshape(-1, 9, 10)
            ball = BoundedTensor(x[index], PerturbationLpNorm(norm=norm, eps=epsilon))
            with torch.set_grad_enabled(method != "CROWN"):
                low, _ = bounded.compute_bounds(
                    x=(ball,), C=rows, method=method, bound_upper=False
                )
            proved[index] = (low > 0).all(1)
        return proved

    def crown(x: Tensor, y: Tensor, epsilon: float) -> Tensor:
        return bound(x, y, epsilon, "CROWN", batch)

    def alpha_crown(x: Tensor, y: Tensor, epsilon: float) -> Tensor:
        proved = crown(x, y, epsilon)
        left = (~proved & (model(x).argmax(1) == y)).nonzero().flatten()
        if len(left):
            few = min(batch, _FEW)
            proved[left] = bound(x[left], y[left], epsilon, "CROWN-Optimized", few)
        return proved

    return {"CROWN": crown, "α-CROWN": alpha_crown}


def _ours(model: nn.Module, x: Tensor, norm: float) -> dict[str, Prove]:
    shape = tuple(x.shape[1:])

    def method(effort: Effort) -> Prove:
        certifier = LocalCertifier(model, shape, norm, effort=effort)

        def prove(x: Tensor, y: Tensor, epsilon: float) -> Tensor:
            proved = []
            for index in torch.arange(len(x)).split(_BATCH):
                found = certifier.certify(x[index], epsilon, label=y[index])
                proved.append(found.correct & (found.radius >= epsilon))
            return torch.cat(proved)

        return prove

    careful = Effort(last_steps=20, inner_steps=20)
    return {"local": method(Effort()), "local, searched": method(careful)}


def _global(
    model: nn.Module, radius: Tensor, x: Tensor, norm: float
) -> dict[str, Prove]:
    root = x[0].numel() ** 0.5 if norm == inf else 1.0

    def prove(x: Tensor, y: Tensor, epsilon: float) -> Tensor:
        return (model(x).argmax(1) == y) & (radius[: len(x)] >= epsilon * root)

    return {"global": prove}


def _attack(model: nn.Module, x: Tensor, norm: float) -> dict[str, Prove]:
    if norm == inf:
        return {}

    def prove(x: Tensor, y: Tensor, epsilon: float) -> Tensor:
        found = pgd(model, x, y, epsilon, steps=20)
        return (model(x).argmax(1) == y) & ~found.success

    return {"PGD": prove}


def _measured(
    prove: Prove, x: Tensor, y: Tensor, epsilon: float, tried: Tensor
) -> dict[str, Any]:
    """The share, milliseconds per image, and which images: so that methods can be compared on the same ones.

    x and y are the images that are tried, `tried` is which ones of all these are; the others are not proved.
    """
    began = time.process_time()
    try:
        proved = torch.zeros_like(tried).masked_scatter(tried, prove(x, y, epsilon))
    except (RuntimeError, MemoryError) as problem:  # auto_LiRPA may need more memory
        return {"failed": str(problem)[:80]}
    spent = 1000 * (time.process_time() - began) / max(1, len(x))
    bits = "".join("01"[int(bit)] for bit in proved)
    return {"share": bits.count("1") / len(bits), "ms": spent, "proved": bits}


def _rows(title: str, case: Case) -> Any:
    """The figures of one network, one norm and ε after the other."""
    model, data = trained(title)
    x, y = test_images(case, data)
    tried = torch.ones(len(x), dtype=torch.bool)
    if case.correct_only:
        tried = model(x).argmax(1) == y
        x, y = x[tried], y[tried]
    radius = lipcert.certify(model, x).radius  # in l2, once for both norms
    for norm, epsilons in case.balls.items():
        methods = {
            **_global(model, radius, x, norm),
            **_ours(model, x, norm),
            **_crown(model, x, norm, case.batch),
            **_attack(model, x, norm),
        }
        if not case.searched:
            methods = {k: v for k, v in methods.items() if k not in SLOW}
        first = min(case.batch, _BATCH, len(x))
        every = torch.ones(first, dtype=torch.bool)
        for method in methods.values():
            _measured(method, x[:first], y[:first], min(epsilons), every)
        for epsilon in epsilons:
            named = "l∞" if norm == inf else "l2"
            row: dict[str, Any] = {"network": title, "norm": named, "epsilon": epsilon}
            for name, method in methods.items():
                count = case.searched if name in SLOW else case.images
                some = tried[:count]
                images = x[: int(some.sum())], y[: int(some.sum())]
                if name not in SLOW or epsilon == max(epsilons):
                    row[name] = _measured(method, *images, epsilon, some)
                    getLogger(__name__).info("%s %s", name, row[name])
            yield row


def compare_local(
    repeats: int, networks: Sequence[str] = tuple(CASES)
) -> tuple[list[dict[str, Any]], Table]:
    """Certified shares and milliseconds per image of every method, network, norm and ε; the same images for all."""
    table = Table("network", "norm", "ε", *NAMES, title="Proved, ms per image")
    figures = _rows_of_others(networks)
    for title in networks:
        for row in _rows(title, CASES[title]):
            figures.append({**row, "measured": _where(environment())})
            store("local", "python -m benchmarks local", figures)
            getLogger(__name__).warning("%s", row)
            cells = (_cell(row.get(name)) for name in NAMES)
            table.add_row(title, row["norm"], f"{row['epsilon']:g}", *cells)
    return figures, table


def _rows_of_others(networks: Sequence[str]) -> list[dict[str, Any]]:
    """What is stored of networks that are not measured now."""
    path = RESULTS / "local.json"
    if not path.exists():
        return []
    stored = json.loads(path.read_text())
    where = {"measured": _where(stored["environment"])}
    rows = [row for row in stored["figures"] if row["network"] not in networks]
    return [{**where, **row} for row in rows]


def _where(found: dict[str, Any]) -> str:
    return f"{found['date']}, {found['commit']}, {found['hardware']}"


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "–"
    if "share" not in entry:
        return "failed"
    count = len(entry["proved"])
    return f"{entry['proved'].count('1')}/{count}, {entry['ms']:.0f} ms"
