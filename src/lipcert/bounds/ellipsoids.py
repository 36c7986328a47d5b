"""LipSDP with multipliers that all outputs share, by elimination: ellipsoids that hold the values of all sites.

Let inputs differ by x, |x| ≤ 1. A loop-transformed network has z_j = B_j0 x + Σ_{i<j}
B_ji w_i and |w_i| ≤ |z_i|, entry by entry. For positive diagonals U_1, …, U_n let K be
the matrix of blocks K_jl that begins with B_j0 B_l0ᵀ, and for i = 1, …, n, as long as
U_i ≻ K_ii,

    K_jl  ←  K_jl + K_ji (U_i − K_ii)⁻¹ K_il + B_ji U_i B_liᵀ      for all j, l > i.

Then |cᵀy|² ≤ cᵀK c for every functional c of the output y, with the last block K: this
is the Schur complement of the matrix inequality of LipSDP (see `semidefinite`) with the
multipliers U_i⁻¹, divided by its ρ. So one elimination gives the constants of all
classes and of all their pairs, and it is differentiable. In a chain without linear
paths around the nonlinearities it is the product of norms in the coordinates U_i^½;
elsewhere it counts what linear paths and nonlinear ones have in common, which a sum of
norms cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipcert.bounds.targets import Target
from lipcert.errors import OptionError, TooLargeError
from lipcert.network.build import normal_form
from lipcert.network.normal_form import Network
from lipcert.network.rewrites import liplt_lines, loop_transform

LIMIT = 4096
"""Entries of all nonlinearities together: time grows with the cube."""
_TINY = 1e-200
_ZERO = 1e-20
"""A functional whose square is such a part of all is zero but for rounding."""


@dataclass(frozen=True)
class Ellipsoids:
    """What an elimination leaves.

    output: K of the output, (outputs, outputs).
    multipliers: U_1..U_n.
    sizes: the largest eigenvalue of every K_ii.
    shares: what the input and every nonlinearity add to the trace of the output's K.
    diagonals, slack: behind U.
    """

    output: Tensor
    multipliers: tuple[Tensor, ...]
    sizes: Tensor
    shares: Tensor
    diagonals: tuple[Tensor, ...]
    slack: Tensor

    def detached(self) -> Ellipsoids:
        """The same without derivatives."""
        multipliers = tuple(u.detach() for u in self.multipliers)
        diagonals = tuple(diagonal.detach() for diagonal in self.diagonals)
        output, shares, slack = (
            self.output.detach(),
            self.shares.detach(),
            self.slack.detach(),
        )
        return Ellipsoids(output, multipliers, self.sizes, shares, diagonals, slack)

    def values(self, target: Target) -> tuple[Tensor, Tensor]:
        """The constants of a target's functionals, and the part of their mean that each share has; differentiable."""
        unit = torch.eye(
            len(self.output), dtype=self.output.dtype, device=self.output.device
        )
        # K may be singular, for a class that is a combination of others. A shift
        # upwards only loosens the estimate.
        rows = torch.linalg.cholesky(
            self.output + (1e-12 * self.output.trace() + _TINY) * unit
        )  # rows·rowsᵀ is K
        # cᵀKc = |rowsᵀc|², so norms and distances of the rows are the constants of
        # classes and of their pairs.
        value: Tensor = (
            torch.linalg.matrix_norm(rows, 2)
            if target.whole_output
            else target.row_norms(rows)
        )
        return value, self.shares / self.shares.sum() * target.mean(value)


def pairs_apart(network: Network) -> Network:
    """The loop-transformed network with sorted pairs as means and differences, if the elimination can follow it."""
    # The network is a float64 copy of a float32 program, or has the program's own type.
    exact = network.dtype != network.program.dtype
    apart = normal_form(network.program, exact=exact, check=False, apart=True)
    size = sum(apart.in_size(site) for site in range(1, apart.depth + 1))
    if size > LIMIT:
        raise TooLargeError(
            f"the network has {size} neurons, method='ellipsoids' takes {LIMIT}; "
            "use method='rescaled'"
        )
    for site in apart.sites[1:-1]:
        assert site.slope is not None
        # |w_i| ≤ |z_i| entry by entry is what a diagonal U_i needs; a map that mixes
        # entries has it in the norm alone.
        if not site.slope.elementwise:
            raise OptionError(
                f"{site.name} mixes the entries of its input; use method='rescaled'"
            )
    return loop_transform(apart, liplt_lines(apart))


@dataclass(frozen=True)
class Maps:
    """What the elimination needs to know of a network.

    gram: K at the beginning, B_j0 B_l0ᵀ for all sites j, l behind the input.
    behind: for every nonlinearity i, the maps B_ji to all sites j > i, one below the
    other.
    outputs: how many of the last rows are outputs. For sites of 3 and 2 entries and one
    output, K has the rows 0 1 2 | 3 4 | 5, and the maps behind have 3 and 1 rows.
    """

    gram: Tensor
    behind: tuple[Tensor, ...]
    outputs: int

    @classmethod
    def of(cls, network: Network) -> Maps:
        """The maps in float64; differentiable."""
        rows = []
        for j in range(1, network.depth + 2):
            rows.append(_maps_to(network, j))
        # rows[j − 1][i] is B_ji. All B_j0, one below the other, from site 1 to the
        # output.
        first = torch.cat([row[0] for row in rows])
        # rows[i:] are those of the sites j > i: rows[0] belongs to site 1.
        behind = [
            torch.cat([row[i] for row in rows[i:]]) for i in range(1, network.depth + 1)
        ]
        return cls(first @ first.T, tuple(behind), len(rows[-1][0]))

    def weighted(self, weights: Tensor) -> Maps:
        """The same with weighted sums of the outputs in their place."""
        inner = len(self.gram) - self.outputs
        # With V for the weights, the output is Vy: K_ol becomes V K_ol, K_oo becomes V
        # K_oo Vᵀ.
        cross, last = (
            weights @ self.gram[inner:, :inner],
            weights @ self.gram[inner:, inner:] @ weights.T,
        )
        gram = torch.cat(
            [
                torch.cat([self.gram[:inner, :inner], cross.T], 1),
                torch.cat([cross, last], 1),
            ]
        )
        behind = []
        for rows in self.behind:
            behind.append(
                torch.cat([rows[: -self.outputs], weights @ rows[-self.outputs :]])
            )
        return Maps(gram, tuple(behind), len(weights))


def _maps_to(network: Network, j: int) -> list[Tensor]:
    """B_ji for i < j as matrices, zeros where no linear path leads."""
    size, shape = network.in_size(j), network.nodes[network.sites[j].source].shape
    # One adjoint pass of the unit vectors gives the rows of all B_ji at once.
    seed = torch.eye(size, dtype=network.dtype, device=network.device).reshape(
        size, *shape
    )
    maps = []
    for i, pulled in enumerate(network.pull(j, seed)[:j]):
        if pulled is None:
            maps.append(
                torch.zeros(
                    size,
                    network.out_size(i),
                    dtype=torch.float64,
                    device=network.device,
                )
            )
        else:
            maps.append(pulled.flatten(1).double())
    return maps


def eliminate(maps: Maps, diagonals: Sequence[Tensor], slack: Tensor) -> Ellipsoids:
    """Ellipsoids with U_i = (1 + slack_i)·ν_i·D_i², where ν_i is the smallest factor that K_ii allows."""
    k, outputs = maps.gram, maps.outputs
    shares, sizes, multipliers = [k[-outputs:, -outputs:].trace()], [], []
    for diagonal, extra, behind in zip(diagonals, slack, maps.behind, strict=True):
        size = len(diagonal)  # the rows of this site are the first ones that are left
        own, cross, rest = k[:size, :size], k[size:, :size], k[size:, size:]
        # U_i = ν·D² exceeds K_ii if and only if ν exceeds the largest eigenvalue of
        # D⁻¹K_ii D⁻¹.
        scaled = own / (diagonal[:, None] * diagonal)
        top = torch.linalg.eigh(scaled.detach())[1][:, -1]
        # dλ = uᵀ(dM)u with u fixed: no derivative of eigenvectors, which is infinite
        # where eigenvalues meet.
        smallest = (top @ scaled @ top).clamp(min=_TINY)
        u = (1 + extra) * smallest * diagonal.square()
        # K_ji (U_i − K_ii)⁻¹ K_il as halfᵀ·half, which stays symmetric and has no
        # negative eigenvalues.
        half = torch.linalg.solve_triangular(
            torch.linalg.cholesky(torch.diag(u) - own), cross.T, upper=False
        )
        k = rest + half.T @ half + (behind * u) @ behind.T
        # What this site adds to the trace of K at the output; with the first one they
        # sum to it.
        shares.append(
            k[-outputs:, -outputs:].trace() - rest[-outputs:, -outputs:].trace()
        )
        sizes.append(torch.linalg.eigvalsh(own.detach())[-1])
        multipliers.append(u)
    stacked = torch.stack(sizes) if sizes else k.new_zeros(0)
    return Ellipsoids(
        k, tuple(multipliers), stacked, torch.stack(shares), tuple(diagonals), slack
    )


@torch.enable_grad()
def sharpened(maps: Maps, start: Ellipsoids, steps: int, lr: float) -> Ellipsoids:
    """Ellipsoids for one output alone, by gradient descent from some that are good for many."""
    # Logarithms: a step can make neither diagonals nor slack negative, so every choice
    # is valid.
    logs = [diagonal.detach().log().requires_grad_() for diagonal in start.diagonals]
    slack = start.slack.detach().log().requires_grad_()
    parameters = [*logs, slack]
    optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.99))
    found = eliminate(maps, start.diagonals, start.slack)
    best = found.detached()
    if not logs or float(best.output) <= _ZERO * float(start.output.trace()):
        return best  # there is nothing to choose, or nothing to win
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        try:
            found = eliminate(maps, [log.exp() for log in logs], slack.exp())
            # There is one output, so K is a number, (1, 1); steps are relative to it.
            gradients = torch.autograd.grad(found.output.log().sum(), parameters)
        except RuntimeError:  # of LAPACK, as far as float64 goes
            break
        if found.output[0, 0] < best.output[0, 0]:
            best = found.detached()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return best
