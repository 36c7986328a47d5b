"""The methods that are one recursion or program: naive, LipLT, LipLT in other coordinates, LT-SDP and LipSDP."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lipcert.bounds.forms import Form
from lipcert.bounds.methods.method import Method, MethodTask, register_method
from lipcert.bounds.semidefinite import constants_of_ellipsoids, lipsdp_constants
from lipcert.bounds.targets import Target


@register_method
class Naive(Method):
    """The product of the norms of all layers, and its sum over branches: no loop transformation."""

    name = "naive"
    rank = 0

    def forms(self, task: MethodTask, target: Target) -> list[Form]:
        return [task.form("naive")]


@register_method
class LipLT(Method):
    """The paper's bound (thm:multiLayerLipschitz): the loop transformation at every nonlinearity, and the recursion."""

    name = "liplt"
    rank = 1

    def forms(self, task: MethodTask, target: Target) -> list[Form]:
        return [task.form("liplt")]


@register_method
class Rescaled(Method):
    """LipLT, and LipLT with ‖D_j⁻¹B_ji D_i‖ in place of ‖B_ji‖, for the best positive diagonals D that are found."""

    name = "rescaled"
    rank = 2

    def forms(self, task: MethodTask, target: Target) -> list[Form]:
        # LipLT first: its constants between sites are in the units of the network,
        # those of the other are not.
        return [task.form("liplt"), task.rescaled_form(target)]

    def scales(self, task: MethodTask, target: Target) -> Mapping[str, Tensor]:
        return task.scales(target)


@register_method
class LTSDP(Method):
    """LipLT, and its terms refined by diagonal multipliers (thm:multiLayerLipschitz-Sdp), where matrices fit."""

    name = "lt-sdp"
    rank = 3

    def forms(self, task: MethodTask, target: Target) -> list[Form]:
        return [task.form("liplt"), task.refined_form()]


@register_method
class EllipsoidBound(Method):
    """LipSDP with multipliers from gradient descent, first for all functionals together, then for each, and proved."""

    name = "ellipsoids"
    rank = 3

    def forms(self, task: MethodTask, target: Target) -> list[Form]:
        return [task.form("liplt")]

    def values(self, task: MethodTask, target: Target) -> Mapping[str, Tensor]:
        shared, _ = task.ellipsoids(target)
        fit = task.fit
        # Multipliers were fitted in floating point without allowances. Here they are a
        # proposal, which is proved.
        values = constants_of_ellipsoids(
            task.apart,
            target.name,
            shared,
            steps=fit.each,
            lr=fit.lr,
            progress=task.progress,
        )
        return {self.name: values}

    def scales(self, task: MethodTask, target: Target) -> Mapping[str, Tensor]:
        return task.ellipsoids(target)[1]


@register_method
class LipSDP(Method):
    """A semidefinite program for every functional (Fazlyab et al. 2019); LipLT gives the constants between sites."""

    name = "lipsdp"
    rank = 4

    def forms(self, task: MethodTask, target: Target) -> list[Form]:
        return [task.form("liplt")]

    def values(self, task: MethodTask, target: Target) -> Mapping[str, Tensor]:
        return {
            self.name: lipsdp_constants(task.apart, target.name, progress=task.progress)
        }
