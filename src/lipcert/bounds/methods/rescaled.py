"""LipLT in better coordinates: ‖D_j⁻¹B_ji D_i‖ in place of ‖B_ji‖, for the best positive diagonals D that are found."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lipcert.bounds.forms import Form
from lipcert.bounds.methods.method import Method, Task, register_method
from lipcert.bounds.targets import Target


@register_method
class Rescaled(Method):
    """LipLT, and LipLT in coordinates fitted to the target."""

    name = "rescaled"
    rank = 2

    def forms(self, task: Task, target: Target) -> list[Form]:
        return [task.form("liplt"), task.rescaled_form(target)]

    def scales(self, task: Task, target: Target) -> Mapping[str, Tensor]:
        return task.scales(target)
