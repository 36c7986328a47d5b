"""LipLT, the paper's bound (thm:multiLayerLipschitz)."""

from __future__ import annotations

from lipcert.bounds.forms import Form
from lipcert.bounds.methods.method import Method, Task, register_method
from lipcert.bounds.targets import Target


@register_method
class LipLT(Method):
    """The loop transformation at every nonlinearity, and the recursion over the norms of the maps between them."""

    name = "liplt"
    rank = 1

    def forms(self, task: Task, target: Target) -> list[Form]:
        return [task.form("liplt")]
