"""The smallest constant of all methods at every site and for every functional."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from lipcert.bounds.forms import Form
from lipcert.bounds.methods.method import (
    Method,
    MethodTask,
    find_method,
    register_method,
)
from lipcert.bounds.refine import refinable, refine
from lipcert.bounds.targets import Target
from lipcert.errors import OptionError, SolverError

_SMALL = 300
"""The largest number of neurons for which semidefinite programs are solved too; up to _DENSE, ellipsoids are fitted."""
_DENSE = 1024
"""The largest number of neurons for which terms are refined by LT-SDP."""


@register_method
class Best(Method):
    """All forms together, refined where matrices are small, and LipSDP for small networks, or ellipsoids."""

    name = "best"
    rank = 5

    def forms(self, task: MethodTask, target: Target) -> list[Form]:
        plain = task.form("liplt")
        rescaled = task.rescaled_form(target)
        # The first form's tails and constants between sites become those of the bound:
        # LipLT's are in plain units.
        forms = [plain, task.form("naive"), rescaled]
        if self._refines(task, plain):
            forms.append(task.refined_form())
            # Refined forms share the norms of what they refine, so that they cost no
            # further failure probability.
            forms.append(refine(rescaled, task.options, progress=task.progress))
        for method in ("liplt", "naive"):
            promised = task.promised_form(method)
            if promised is not None:
                forms.append(promised)
        return forms

    def _refines(self, task: MethodTask, plain: Form) -> bool:
        half = replace(
            task.options, memory=task.options.memory // 2
        )  # two refined forms at a time
        return task.neurons() <= min(_DENSE, task.options.dense_limit) and refinable(
            plain, half
        )

    def values(self, task: MethodTask, target: Target) -> Mapping[str, Tensor]:
        # A matrix inequality has no such thing as stopping before the last layer.
        if not target.transforms_last or task.neurons() > _DENSE:
            return {}
        name = "lipsdp" if task.neurons() <= _SMALL else "ellipsoids"
        try:
            return find_method(name).values(task, target)
        except (SolverError, OptionError):  # the others do without
            return {}

    def scales(self, task: MethodTask, target: Target) -> Mapping[str, Tensor]:
        return task.scales(target)
