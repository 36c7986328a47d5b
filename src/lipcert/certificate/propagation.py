"""From the rounding errors of each stage to errors of logit differences, at a point and over a ball around it.

Let d⁰_k be the error made at the output of site k for the input x (from `node_errors`)
and T_k the constants from there to the logit differences. Then the computed difference
z_a − z_b at x is off by at most e_a + e_b + Σ_k T_k d⁰_k. At a point at distance R the
errors d_k are larger by what the values can grow: with Λ_il bounding the map from the
output of site l to the output of site i, q_ki how much the error at the input of site k
grows when û_i changes (see `stages`), and U_i how much û_i changes per unit of R,

    d ≤ d⁰ + g·R + S·(d⁰ + d),     g_k = Lip_k Σ_i q_ki U_i,     S_kl = Lip_k Σ_i q_ki Λ_il,

because û itself carries the errors made before. S is triangular and tiny.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipcert.bounds.bound import Bound
from lipcert.bounds.bound_numbers import pairwise_upper
from lipcert.certificate.error_pass import Execution
from lipcert.certificate.stages import Stages
from lipcert.errors import NonFiniteError
from lipcert.network.normal_form import Network
from lipcert.rounding import gamma

LARGEST = {torch.float32: 1e16, torch.float64: 1e100}
"""Values up to this leave room for everything that operators compute on the way: sums of many, squares, factors."""
_LARGEST_FEEDBACK = 0.5
"""Of S_kk: how much an error at a site may enlarge the errors of the same site."""


@dataclass(frozen=True)
class RoundingModel:
    """The constants with which errors of a bounded network travel; all float64.

    tails: (n, K, K), T + q: effect of an error at each site on each logit difference.
    last_stage: (K, n), q: the part of it that comes from larger errors in the last
    stage, for each logit.
    amplify: (n, n), D = amplify·d⁰ covers the errors at the centre and at any point of
    the ball together.
    ball: (n, n), d = ball·d⁰ covers those at a point of the ball alone (for R = 0).
    growth: (K, K), κ: how fast the error of a difference can grow with the distance.
    reach: how far from an input nothing can overflow, whatever its values up to
    `LARGEST`.
    """

    tails: Tensor
    last_stage: Tensor
    amplify: Tensor
    ball: Tensor
    growth: Tensor
    reach: float

    def errors(self, execution: Execution, predictions: Tensor) -> Tensor:
        """(B, K): bound on the errors of z_y − z_i at the input and at any point near it together."""
        # D = d⁰ + d of all sites, for errors at both points together.
        spread = execution.sites @ self.amplify.T  # (B, n)
        # Row y of (T + q)_k for the predicted class y of each input: (B, n, K).
        travelled = torch.einsum(
            "bk,bki->bi", spread, self.tails.transpose(0, 1)[predictions]
        )
        # e_y + e_i, which the last stage makes at the centre and, up to κ·R and q·D, at
        # the other point.
        last = execution.output.gather(1, predictions[:, None]) + execution.output
        return (2 * last + travelled) * (1 + 1e-9)

    def errors_at(self, execution: Execution, predictions: Tensor) -> Tensor:
        """(B, K): bound on the errors of z_y − z_i at the input alone."""
        travelled = torch.einsum(
            "bk,bki->bi", execution.sites, self.tails.transpose(0, 1)[predictions]
        )
        last = execution.output.gather(1, predictions[:, None]) + execution.output
        return (last + travelled) * (1 + 1e-9)

    def errors_from(self, reference: Execution) -> Tensor:
        """(K, K): bound on the errors of z_a − z_b at the reference input; at distance r add r·growth."""
        # Errors at one point only: the classifier doubles what it makes of them.
        at_sites = (reference.sites @ self.ball.T)[0]
        travelled = torch.einsum("k,kab->ab", at_sites, self.tails)
        # d at x is in `tails` already, with T + q; q·d⁰ of the reference is what is
        # added here.
        last = _pairs(reference.output[0])
        grown = _pairs(self.last_stage @ reference.sites[0])
        return (last + travelled + grown) * (1 + 1e-9)


def rounding_model(
    network: Network, exact: Network, stages: Stages, bound: Bound
) -> RoundingModel:
    """The constants for `network` as executed in its dtype; `exact` is its float64 copy.

    Arrays over all sites begin with site 0, the input, which makes no error; those over
    the sites that do, 1..n, begin with site 1. For n = 2:

        lipschitz = (Lip_0, Lip_1, Lip_2),  lipschitz[1:] = (Lip_1, Lip_2);  d⁰ = (d⁰_1, d⁰_2)
        stages.errors[0] = (q_10, q_11, q_12): the error at the input of site 1, by the site whose output changes
        to_output[:, 1:]: the columns l = 1, 2 of Λ_il, for errors that sites 1 and 2 have made
    """
    n = network.depth
    lipschitz, made = _site_constants(network, exact)
    # Λ_il, sites 0..n: Lip_i times the constant up to the input of site i, and 1 for
    # what a site itself has made.
    itself = torch.eye(n + 1, dtype=torch.float64)
    to_output = lipschitz[:, None] * bound.between.cpu() + itself
    # U_i, and Λ_il with l = 1..n.
    from_input, from_sites = to_output[:, 0], to_output[:, 1:]
    # Sums of absolute products grow by at most norms·U per unit of distance.
    reach = LARGEST[network.dtype] / max(1.0, float((stages.norms @ from_input).max()))
    slope = lipschitz[1:, None]
    stage = stages.errors  # q_ki, sites k = 1..n, i = 0..n
    g = (slope * (stage @ from_input[:, None]))[:, 0] + 2 * made * from_input[1:]
    s = slope * (stage @ from_sites) + 2 * made[:, None] * from_sites[1:]
    ball, spread = _solved(s, g)
    last_stage = stages.logits @ from_sites
    tails = _site_tails(bound, n, network.classes)
    # An error at site k reaches z_a − z_b by T_k, and makes the last stage err more in
    # z_a and in z_b.
    tails = tails + last_stage.T[:, :, None] + last_stage.T[:, None, :]
    # κ_ab: by way of the sites, and in the last stage because its own inputs grow with
    # R.
    by_sites = torch.einsum("k,kab->ab", spread, tails)
    growth = (by_sites + _pairs(stages.logits @ from_input)) * (1 + 1e-9)
    amplify = torch.eye(n, dtype=torch.float64) + ball
    return RoundingModel(tails, last_stage, amplify, ball, growth, reach)


def _solved(s: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """d ≤ d⁰ + gR + S(d⁰ + d), solved for d: (I − S) d ≤ (I + S) d⁰ + gR. The factors of d⁰ and of R."""
    # Site k sees only what sites l ≤ k have made.
    s = torch.tril(s) * 1.01
    if bool((s.diagonal() >= _LARGEST_FEEDBACK).any()):
        raise NonFiniteError(
            "rounding errors of a nonlinearity feed themselves; scale the weights "
            "down, or use float64"
        )
    # (I − S)⁻¹ = I + S + S² + … by forward substitution, in which nothing cancels: all
    # terms are positive.
    identity = torch.eye(len(s), dtype=torch.float64)
    inverse = torch.linalg.solve_triangular(identity - s, identity, upper=False)
    # ((I − S)⁻¹g)_k: by how much the error at site k grows per unit of distance.
    return inverse @ (identity + s) * (1 + 1e-4), inverse @ g * (1 + 1e-4)


def _site_constants(network: Network, exact: Network) -> tuple[Tensor, Tensor]:
    """Lip_k for the sites 0..n, and for 1..n what the nonlinearity itself rounds, relative to its values."""
    n = network.depth
    lipschitz = torch.ones(n + 1, dtype=torch.float64)
    ulps = torch.zeros(n, dtype=torch.float64)
    for k, site in enumerate(exact.sites[1:-1], start=1):
        if site.slope is not None:
            lipschitz[k] = float(site.slope.lipschitz())
            ulps[k - 1] = site.slope.roundings(max(exact.in_size(k), exact.out_size(k)))
    return lipschitz, 2 * gamma(1, network.dtype) * ulps


def _site_tails(bound: Bound, n: int, classes: int) -> Tensor:
    """(n, K, K): T_k for the sites k = 1..n; the bound's own begin with site 0, the input."""
    tails = torch.zeros(n, classes, classes, dtype=torch.float64)
    for k in range(1, n + 1):
        tails[k - 1] = pairwise_upper(bound.tails[k].cpu(), bound.target, classes)
    return tails


def _pairs(values: Tensor) -> Tensor:
    """(K, K): the sums of two entries."""
    return values[:, None] + values[None, :]
