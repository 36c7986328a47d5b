"""LT-SDP, the paper's refinement of LipLT (thm:multiLayerLipschitz-Sdp), where matrices fit into memory."""

from __future__ import annotations

from lipcert.bounds.forms import Form
from lipcert.bounds.methods.method import Method, Task, register_method
from lipcert.bounds.refine import refine
from lipcert.bounds.targets import Target


@register_method
class LTSDP(Method):
    """LipLT, and its terms refined by diagonal multipliers."""

    name = "lt-sdp"
    rank = 3

    def forms(self, task: Task, target: Target) -> list[Form]:
        plain = task.form("liplt")
        return [plain, task.keep("lt-sdp", lambda: refine(plain, task.options, progress=task.progress))]
