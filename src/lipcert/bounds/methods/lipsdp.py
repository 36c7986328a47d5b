"""LipSDP (Fazlyab et al. 2019), the reference for small networks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lipcert.bounds.forms import Form
from lipcert.bounds.methods.method import Method, Task, register_method
from lipcert.bounds.semidefinite import lipsdp_constants
from lipcert.bounds.targets import Target


@register_method
class LipSDP(Method):
    """A semidefinite program for every functional; LipLT gives the constants between sites."""

    name = "lipsdp"
    rank = 4

    def forms(self, task: Task, target: Target) -> list[Form]:
        return [task.form("liplt")]

    def values(self, task: Task, target: Target) -> Mapping[str, Tensor]:
        return {self.name: lipsdp_constants(task.network, target.name, progress=task.progress)}
