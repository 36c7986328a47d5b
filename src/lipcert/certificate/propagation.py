"""From the rounding errors of each stage to errors of logit differences, at a point and over a ball around it.

Let d⁰_k be the error made at the output of site k for the input x (from `error_pass`) and T_k the constants from there
to the logit differences. Then the computed difference z_a − z_b at x is off by at most e_a + e_b + Σ_k T_k d⁰_k. At a
point at distance R the errors d_k are larger by what the values can grow: with Λ_il bounding the map from the output
of site l to the output of site i, q_ki how much the error at the input of site k grows when û_i changes (see `stages`),
and U_i how much û_i changes per unit of R,

    d ≤ d⁰ + g·R + S·(d⁰ + d),     g_k = Lip_k Σ_i q_ki U_i,     S_kl = Lip_k Σ_i q_ki Λ_il,

because û itself carries the errors made before. S is triangular and tiny.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipcert.bounds.bound import Bound, pairwise_upper
from lipcert.certificate.error_pass import Execution
from lipcert.certificate.stages import Stages
from lipcert.network.normal_form import Network
from lipcert.rounding import gamma

LARGEST = {torch.float32: 1e16, torch.float64: 1e100}
"""Values up to this leave room for everything that operators compute on the way: sums of many, squares, factors."""


@dataclass(frozen=True)
class RoundingModel:
    """The constants with which errors of a bounded network travel; all float64.

    tails: (n, K, K), T + q: effect of an error at each site on each logit difference.
    last_stage: (K, n), q: the part of it that comes from larger errors in the last stage, for each logit.
    amplify: (n, n), D = amplify·d⁰ covers the errors at the centre and at any point of the ball together.
    ball: (n, n), d = ball·d⁰ covers those at a point of the ball alone (for R = 0).
    growth: (K, K), κ: how fast the error of a difference can grow with the distance.
    reach: how far from an input nothing can overflow, whatever its values up to `LARGEST`.
    """

    tails: Tensor
    last_stage: Tensor
    amplify: Tensor
    ball: Tensor
    growth: Tensor
    reach: float

    def errors(self, execution: Execution, predictions: Tensor) -> Tensor:
        """(B, K): bound on the errors of z_y − z_i at the input and at any point near it together."""
        spread = execution.sites @ self.amplify.T  # (B, n)
        travelled = torch.einsum("bk,bki->bi", spread, self.tails.transpose(0, 1)[predictions])
        last = execution.output.gather(1, predictions[:, None]) + execution.output
        return (2 * last + travelled) * (1 + 1e-9)

    def errors_from(self, reference: Execution) -> Tensor:
        """(K, K): bound on the errors of z_a − z_b at the reference input; at distance r add r·growth."""
        at_sites = (reference.sites @ self.ball.T)[0]
        travelled = torch.einsum("k,kab->ab", at_sites, self.tails)
        last = _pairs(reference.output[0])
        return (last + travelled + _pairs(self.last_stage @ reference.sites[0])) * (1 + 1e-9)


def rounding_model(network: Network, exact: Network, stages: Stages, bound: Bound) -> RoundingModel:
    """The constants for `network` as executed in its dtype; `exact` is its float64 copy."""
    n, classes = network.depth, network.classes
    lipschitz = torch.ones(n + 1, dtype=torch.float64)  # Lip_k, sites 0..n
    ulps = torch.zeros(n, dtype=torch.float64)
    for k, site in enumerate(exact.sites[1:-1], start=1):
        if site.slope is not None:
            lipschitz[k] = float(site.slope.lipschitz())
            ulps[k - 1] = site.slope.roundings(max(exact.in_size(k), exact.out_size(k)))
    made = 2 * gamma(1, network.dtype) * ulps  # relative to the values, by the nonlinearity itself
    between = bound.between.cpu()  # (n+1, n+1)
    to_output = lipschitz[:, None] * between + torch.eye(n + 1, dtype=torch.float64)  # Λ_il, sites 0..n
    stage = stages.errors  # q_ki, sites k = 1..n, i = 0..n
    grown = to_output[:, 0]  # U_i
    reach = LARGEST[network.dtype] / max(1.0, float((stages.norms @ grown).max()))
    slope = lipschitz[1:, None]
    g = (slope * (stage @ grown[:, None]))[:, 0] + 2 * made * grown[1:]
    s = slope * (stage @ to_output[:, 1:]) + 2 * made[:, None] * to_output[1:, 1:]
    s = torch.tril(s) * 1.01
    identity = torch.eye(n, dtype=torch.float64)
    inverse = torch.linalg.inv(identity - s).clamp(min=0)
    ball = inverse @ (identity + s) * (1 + 1e-4)
    spread = inverse @ g * (1 + 1e-4)
    last_stage = stages.logits @ to_output[:, 1:]
    tails = torch.zeros(n, classes, classes, dtype=torch.float64)
    for k in range(n):
        tails[k] = pairwise_upper(bound.tails[k + 1].cpu(), bound.target, classes)
    tails = tails + last_stage.T[:, :, None] + last_stage.T[:, None, :]
    growth = torch.einsum("k,kab->ab", spread, tails) + _pairs(stages.logits @ grown)
    return RoundingModel(tails, last_stage, identity + ball, ball, growth * (1 + 1e-9), reach)


def _pairs(values: Tensor) -> Tensor:
    """(K, K): the sums of two entries."""
    return values[:, None] + values[None, :]
