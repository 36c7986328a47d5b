"""The matrices of LipSDP: the maps between sites in reduced and scaled coordinates, put together for one output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import frexp, inf, ldexp, sqrt

import numpy as np
import torch

from lipcert.bounds.inequality import KAPPA, Problem
from lipcert.bounds.recursion import bound_between, bound_prefix, norm_matrix
from lipcert.bounds.weighted_rows import weighted_rows
from lipcert.errors import NonFiniteError, TooLargeError
from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair, Sweep
from lipcert.norms.gram import all_matrices, bound_matrix_norm, bound_spectral_norm
from lipcert.norms.product_errors import ProductErrors
from lipcert.progress import Progress
from lipcert.rounding import UNDERFLOW, gamma, round_up

_RANK = 1e-12  # directions of the input that count less than this are left to the error bound
_DEAD = 1e-12  # the least multiplier to begin with, of sites that do not count


class System:
    """The maps B_ji in reduced and scaled coordinates, and everything else that all targets share."""

    def __init__(self, network: Network, limit: int, progress: Progress) -> None:
        self.last = last = network.depth + 1
        self.sizes = [network.out_size(i) for i in range(last)]
        self.heights = [network.in_size(j) for j in range(1, last)]
        self.single = [
            not (site.slope and site.slope.elementwise) for site in network.sites[1:-1]
        ]
        # Before any work, with the least that can be left of the input: one direction.
        _check_size(sum(self.sizes[1:]) + 1, limit)
        self._read_maps(network, progress)
        self._reduce_input()
        # Again, now that the rank of the input is known.
        _check_size(sum(self.sizes), limit)
        pairs = [pair for pair in self.norms if pair[0] < last]
        values = torch.tensor([self.norms[pair] for pair in pairs], dtype=torch.float64)
        # Never 0: units divide by them, also at sites that no path from the input
        # reaches.
        self.prefix = (
            bound_prefix(norm_matrix(pairs, values, last)) + UNDERFLOW
        ).tolist()
        # v and z are measured in LipLT's constants; by powers of two, so that dividing
        # by them is exact.
        self.units = [1.0, *map(_power_of_two, self.prefix[1:])]
        self.blocks = {
            (j, i): self._scale(i, self.maps[j, i], self.errors[j, i]) for j, i in pairs
        }

    def _read_maps(self, network: Network, progress: Progress) -> None:
        """All maps as matrices, bounds on the Frobenius norms of their errors, and on their norms."""
        joined = Sweep(network, self.last).pairs
        self.maps = all_matrices(network, joined, progress)
        self.errors: dict[Pair, float] = {}
        errors = ProductErrors(network)
        # Near pairs first: the errors of far ones are bounded by their norms.
        for j, i in sorted(joined, key=lambda pair: pair[0] - pair[1]):
            self.errors[j, i] = round_up(sqrt(self.sizes[i]) * errors.error((j, i)))
            norm = bound_matrix_norm(self.maps[j, i].T) + self.errors[j, i]
            if not norm < inf:
                raise NonFiniteError(
                    f"the map between sites {i} and {j} is too large or not a number"
                )
            errors.know((j, i), norm)
        self.norms = errors.known

    def _reduce_input(self) -> None:
        """An orthonormal basis of the directions of the input that count; `stretch` bounds its norm."""
        self.basis: np.ndarray | None = None
        self.stretch = 1.0
        # All maps that read the input, each of norm 1: a direction counts if one of
        # them sees it.
        rows = [
            self.maps[j, 0] / (self.norms[j, 0] + UNDERFLOW)
            for j, i in self.maps
            if i == 0
        ]
        if not rows:
            rows = [np.zeros((1, self.sizes[0]))]
        _, weights, directions = np.linalg.svd(
            np.concatenate(rows), full_matrices=False
        )
        rank = max(1, int((weights > _RANK * weights[0]).sum()))
        # 784 pixels and 30 neurons: P has 30 columns for the input, not 784.
        if rank < self.sizes[0]:
            self.basis = directions[:rank].T
            # The rows of an SVD are orthonormal but for rounding: |Vᵀx| ≤ stretch·|x|
            # is what is proved.
            self.stretch = bound_spectral_norm(directions[:rank])
            self.sizes[0] = rank

    def _scale(
        self, i: int, block: np.ndarray, error: float
    ) -> tuple[np.ndarray, float]:
        """κ·B_ji in the coordinates of v, before z_j is scaled, and a bound on its error."""
        if i == 0 and self.basis is not None:
            # Bx = (BV)(Vᵀx) + (B − BVVᵀ)x. The second part is an error, as is the
            # rounding of both products.
            reduced = block @ self.basis
            roundoff = gamma(self.basis.shape[1] + 4) * float(
                np.linalg.norm(reduced) * np.linalg.norm(self.basis)
            )
            error += 2 * roundoff + float(
                np.linalg.norm(block - reduced @ self.basis.T)
            ) * (1 + 1e-9)
            block = reduced
        # κ pays for the errors: |a + b|² ≤ κ²|a|² + κ²/(κ²−1)·|b|² (see
        # `inequality.proved`).
        scaled = block * (KAPPA * self.units[i])
        error = self.units[i] * error + gamma(8) * float(np.linalg.norm(scaled))
        return scaled, error * (1 + 1e-8)

    def problem(self, weights: np.ndarray | None) -> tuple[Problem, float, float]:
        """The problem for the output, or for a weighted sum of its entries; the scale of its result; LipLT."""
        last = self.last
        output = self._output_blocks(weights)
        height, constant = 0, 0.0
        for i, (block, _, norm) in output.items():
            height = block.shape[0]
            # m_{n+1} = Σ_i ‖B_{n+1,i}‖ m_i, with the functional in place of the output.
            constant += norm * self.prefix[i]
        constant += UNDERFLOW
        blocks, norms = dict(self.blocks), dict(self.norms)
        for i, (block, error, norm) in output.items():
            blocks[last, i] = self._scale(i, block, error)
            norms[last, i] = norm
        # The output is measured in LipLT's constant, too, so that LipLT's ρ is about 1,
        # whatever the weights.
        units = [*self.units, _power_of_two(constant)]
        heights = [*self.heights, height]
        z, drift = self._assembled(blocks, heights, units)
        scaled_norms = np.zeros((last + 1, last + 1))
        for j, i in blocks:
            scaled_norms[j, i] = units[i] / units[j] * norms[j, i]
        # Rows and columns are in the order of sites from here on: (x, w_1, …, w_n)
        # across, (z_1, …, z_n, y) down.
        coordinate, row, start = self._multipliers(_liplt(scaled_norms), height)
        site_row = np.repeat(np.arange(1, last + 1), heights)
        site_column = np.repeat(np.arange(last), self.sizes)
        problem = Problem(z, coordinate, row, site_row, site_column, drift, start)
        return problem, units[last], constant * (1 + 1e-9)

    def _output_blocks(
        self, weights: np.ndarray | None
    ) -> dict[int, tuple[np.ndarray, float, float]]:
        """By site i: the map from there to the output, or to the weighted sum, and bounds on its error and its norm."""
        output = {}
        for i in range(self.last):
            if (self.last, i) not in self.maps:
                continue
            block, error, norm = (
                self.maps[self.last, i],
                self.errors[self.last, i],
                self.norms[self.last, i],
            )
            if weights is not None:
                block, error = weighted_rows(weights, block, error)
                # A difference of rows is far shorter than the whole map: its own norm,
                # with the error of the rows.
                norm = bound_matrix_norm(block) * (1 + gamma(4)) + error
            output[i] = block, error, norm
        return output

    def _assembled(
        self,
        blocks: Mapping[Pair, tuple[np.ndarray, float]],
        heights: Sequence[int],
        units: Sequence[float],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Z with the scaled block of (j, i) in the rows of z_j and the columns of w_i, and bounds on its errors.

        z_j begins at rows[j]. Site 0, the input, has columns and no rows, so rows[0] =
        rows[1] = 0. For two inputs, a site of three coordinates and one output: sizes
        (2, 3) give columns 0 2 5, heights (3, 1) give rows 0 0 3 4, and the block (2,
        1) from the site to the output is z[3:4, 2:5].
        """
        columns, rows = np.cumsum([0, *self.sizes]), np.cumsum([0, 0, *heights])
        z = np.zeros((rows[-1], columns[-1]))
        drift = np.zeros((self.last + 1, self.last + 1))
        for (j, i), (block, error) in blocks.items():
            z[rows[j] : rows[j + 1], columns[i] : columns[i + 1]] = block / units[j]
            drift[j, i] = error / units[j]
        return z, drift

    def _multipliers(
        self, liplt: np.ndarray, height: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The entry of (ρ, t, 1) of each column of P and of each row of Z, and the first values of (ρ, t).

        For two inputs, a site of two coordinates, one of three that it mixes, and one
        output: columns 0 0 1 2 3 3 3, rows 1 2 3 3 3 4, where ρ is entry 0, the t are
        1, 2 and 3, and 4 is the 1 of the output.
        """
        columns, rows, start = [0] * self.sizes[0], [], [liplt[0]]
        for i, single in enumerate(self.single, start=1):
            first, size = len(start), self.sizes[i]
            # |w_i|² ≤ |z_i|² holds for the site as a whole: one multiplier for all of
            # its coordinates.
            if single:
                columns += [first] * size
                rows += [first] * self.heights[i - 1]  # heights begin with site 1
                start.append(liplt[i])
            else:
                columns += range(first, first + size)
                rows += range(first, first + size)
                start += [liplt[i]] * size
        # Behind all t comes the 1 of −|y|².
        rows += [len(start)] * height
        return np.array(columns), np.array(rows), np.array(start)


def _liplt(norms: np.ndarray) -> np.ndarray:
    """(ρ, t_1, …, t_n) of LipLT with strict inequalities: t_i = m_{n+1}·T_i/m_i, larger by a factor from site to site.

    They are feasible, for (Σ_i ‖B_ji‖|w_i|)² ≤ m_j Σ_i ‖B_ji‖|w_i|²/m_i.
    """
    last = len(norms) - 1
    resolvent = bound_between(torch.from_numpy(norms)).numpy()
    # Column 0 of R is m, its last row the constants T from the sites to the output.
    prefix, tails = (
        np.maximum(resolvent[:, 0], _DEAD),
        np.maximum(resolvent[last], _DEAD),
    )
    # Sites nearer to the input get larger factors: each pays for those behind it and
    # something is left over.
    growth = (1 + 1 / last) ** np.arange(last, 0, -1)
    return np.asarray(prefix[last] * tails[:last] / prefix[:last] * growth)


def _power_of_two(value: float) -> float:
    # frexp(0.3) = (0.6, −1): the next power of two above, 0.5.
    return ldexp(1.0, frexp(value)[1])


def _check_size(order: int, limit: int) -> None:
    if order > limit:
        raise TooLargeError(
            f"LipSDP needs a matrix inequality of order {order} or more for this "
            f"network, the limit is {limit}; "
            "use method='rescaled', or a larger limit="
        )
