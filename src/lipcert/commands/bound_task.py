"""What `lipcert bound` computes: a constant for every method and target, or the reason why there is none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lipcert.bounds.bound import Bound
from lipcert.bounds.compute import bound_targets, promised_constants
from lipcert.bounds.estimator import METHODS as ESTIMATES
from lipcert.bounds.estimator import Estimator
from lipcert.bounds.fit import FitOptions, fit_scales
from lipcert.bounds.methods import METHODS
from lipcert.bounds.sampled import estimate_sampled
from lipcert.bounds.targets import find_target
from lipcert.commands.kept_bounds import KeptBounds
from lipcert.errors import OptionError, TooLargeError
from lipcert.models import LoadedModel
from lipcert.norms.norm_options import NormOptions
from lipcert.progress import Progress

FLOOR = "sampled"
PROMISED = "promised"


@dataclass(frozen=True)
class ConstantRow:
    """One constant; without a value, `guarantee` says why the method refuses the network."""

    method: str
    target: str
    value: float | None
    seconds: float
    guarantee: str


@dataclass(frozen=True)
class BoundTask:
    """Some targets for a model: estimates if a number of iterations is given, guaranteed bounds otherwise."""

    loaded: LoadedModel
    targets: Sequence[str]
    iterations: int | None
    options: NormOptions
    kept: KeptBounds
    progress: Progress

    def some(self, methods: Sequence[str]) -> list[ConstantRow]:
        """Target by target, so that methods stand below each other."""
        rows = []
        for method in methods:
            # All targets of a method at once: they share its norms.
            rows += (
                self.estimates(method)
                if self.iterations
                else self.bounds(method, self.targets)
            )
        # Stable: within a target methods keep the order in which they were given.
        return sorted(rows, key=lambda row: self.targets.index(row.target))

    def everything(self) -> list[ConstantRow]:
        """Method by method; one that cannot treat the network says so in its rows."""
        rows: list[ConstantRow] = []
        for method in ESTIMATES if self.iterations else METHODS:
            rows += (
                self.estimates(method)
                if self.iterations
                else self.bounds_or_reasons(method, self.targets)
            )
        # The floor is last, below all bounds.
        return rows + self.promised() + self.floor()

    def bounds(self, method: str, targets: Sequence[str]) -> list[ConstantRow]:
        bounds = self.kept.find(method, targets)
        # All or none: what is missing shares its norms with what is there.
        if len(bounds) < len(targets):
            bounds = self.computed(method, targets)
            self.kept.add(method, bounds)
        return [
            ConstantRow(method, name, b.mean, b.seconds, b.guarantee)
            for name, b in bounds.items()
        ]

    def computed(self, method: str, targets: Sequence[str]) -> dict[str, Bound]:
        # Coordinates that were learned in training are a better start than the
        # identity.
        loaded, fit = self.loaded, FitOptions(start=self.loaded.scales)
        return bound_targets(
            loaded.model, loaded.input_shape, method, targets, options=self.options, fit=fit, network=loaded.network,
            progress=self.progress,
        )  # fmt: skip

    def bounds_or_reasons(
        self, method: str, targets: Sequence[str]
    ) -> list[ConstantRow]:
        try:
            return self.bounds(method, targets)
        except (TooLargeError, OptionError) as error:
            # Messages are "what is wrong; what to do". A table has room for the first
            # half.
            reason = str(error).split(";")[0]
            # Too large for one target is too large for all; an option may be wrong for
            # one of them.
            if isinstance(error, TooLargeError) or len(targets) == 1:
                return [
                    ConstantRow(method, target, None, 0.0, reason) for target in targets
                ]
        rows = []
        for target in targets:  # perhaps it has only some of the targets
            rows += self.bounds_or_reasons(method, [target])
        return rows

    def estimates(self, method: str) -> list[ConstantRow]:
        rows = []
        for target in self.targets:
            self.progress(f"{method} {target}", 0.0)
            began = time.perf_counter()
            value = self.estimate(method, target)
            rows.append(
                ConstantRow(
                    method, target, value, time.perf_counter() - began, "estimate"
                )
            )
        return rows

    def estimate(self, method: str, target: str) -> float:
        loaded = self.loaded
        estimator = Estimator(
            loaded.model, loaded.input_shape, method, target, self.iterations or 1, accelerated=True,
            network=loaded.network,
        )  # fmt: skip
        if estimator.scales is not None:
            estimator.begin_with(loaded.scales or {})
            # An estimator begins with plain coordinates or with those of the model;
            # without fitting it says little.
            fit_scales(
                estimator,
                progress=lambda fraction: self.progress(f"{method} {target}", fraction),
            )
        with torch.no_grad():
            # Contributions sum to the mean of the value, whatever the target.
            return float(estimator.estimate().contributions.sum())

    def promised(self) -> list[ConstantRow]:
        """What layers that are Lipschitz by construction promise, if there are any."""
        began = time.perf_counter()
        values = promised_constants(
            self.loaded.model, self.loaded.input_shape, self.targets, self.progress
        )
        seconds = time.perf_counter() - began
        rows = []
        for target, value in values.items():
            rows.append(
                ConstantRow(
                    PROMISED,
                    target,
                    float(find_target(target).mean(value)),
                    seconds,
                    "by construction, proved",
                )
            )
        return rows

    def floor(self) -> list[ConstantRow]:
        """The steepest slopes found: no bound can be smaller."""
        rows = []
        for target in self.targets:
            began = time.perf_counter()
            value = estimate_sampled(
                self.loaded.model,
                self.loaded.input_shape,
                target,
                progress=self.progress,
            )
            rows.append(
                ConstantRow(
                    FLOOR,
                    target,
                    float(find_target(target).mean(value)),
                    time.perf_counter() - began,
                    "from below",
                )
            )
        return rows
