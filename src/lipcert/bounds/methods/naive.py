"""The naive bound: the product of the norms of all layers, and its sum over branches."""

from __future__ import annotations

from lipcert.bounds.forms import Form
from lipcert.bounds.methods.method import Method, Task, register_method
from lipcert.bounds.targets import Target


@register_method
class Naive(Method):
    """No loop transformation."""

    name = "naive"
    rank = 0

    def forms(self, task: Task, target: Target) -> list[Form]:
        return [task.form("naive")]
