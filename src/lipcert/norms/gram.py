"""Deterministic upper bounds on ‖B_ji‖: form the Gram matrix of the smaller side and prove θI − G ≻ 0 by Cholesky."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf, prod, sqrt

import numpy as np
import torch
from scipy.linalg import blas, lapack
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

from lipcert.network.normal_form import Network
from lipcert.network.sweep import Pair
from lipcert.progress import Progress, Report
from lipcert.rounding import gamma, round_up

Side = tuple[str, int]
"""("pull", j) is the input of site j, ("push", i) the output of site i."""
_BATCH_BYTES = 256 << 20


def bound_largest_eigenvalue(gram: np.ndarray) -> float:
    """A proved upper bound on the largest eigenvalue of a symmetric matrix, usually within 1e-8 of it.

    θ is guessed slightly above the largest eigenvalue. If the floating-point Cholesky
    factorisation of θI − G runs to completion, θI − G + cI is positive definite for
    every c ≥ γ_{n+2}/(1 − γ_{n+2})·trace(θI − G) (Rump 2006), hence λ_max(G) < θ + c.
    """
    n = gram.shape[0]
    diagonal = gram.diagonal()
    trace = float(diagonal.clip(min=0).sum())
    # Squares may vanish. The largest sum of a row's absolute values bounds all
    # eigenvalues of a symmetric matrix.
    if trace == 0.0:
        return round_up(float(np.abs(gram).sum(axis=1).max()), n)
    # The guess need not be right. One that is too small makes the factorisation fail,
    # and θ grows until it does not.
    guess = float(gram[0, 0]) if n == 1 else _largest_eigenvalue(gram)
    margin = 1e-9
    while True:
        theta = guess * (1 + margin) + 1e-300
        # θI − G. Only its lower triangle is read.
        shifted = -gram
        shifted[np.diag_indices(n)] += theta
        _, info = lapack.dpotrf(shifted, lower=1, overwrite_a=1)
        if info == 0:
            # trace(θI − G) ≤ nθ + trace, to which Rump's constant belongs; the last
            # term is the rounding of θ − G_ii.
            allowance = gamma(n + 2) / (1 - gamma(n + 2)) * (n * theta + trace)
            allowance += 2 * np.finfo(float).eps * theta
            return round_up(theta + allowance, 8)
        margin *= 10


def _largest_eigenvalue(gram: np.ndarray) -> float:
    if gram.shape[0] <= 64:
        return float(np.linalg.eigvalsh(gram)[-1])
    # From a fixed start, so that θ does not depend on chance.
    start = np.random.default_rng(0).standard_normal(gram.shape[0])
    try:
        found = eigsh(
            gram, k=1, which="LA", v0=start, tol=1e-10, return_eigenvectors=False
        )
        return float(found[0])
    except ArpackNoConvergence:
        return float(np.linalg.eigvalsh(gram)[-1])


def bound_spectral_norm(rows: np.ndarray) -> float:
    """A proved upper bound on ‖R‖₂: λ_max(RRᵀ) ≤ λ_max(Ĝ) + γ_n·‖R‖_F² for the computed Gram matrix Ĝ."""
    # An entry of RRᵀ sums n products.
    n = rows.shape[1]
    if not np.abs(rows).max(initial=0.0) < 1e150:  # also NaN
        return inf
    # rows.T is the same memory in the order that BLAS wants: no copy. Only the lower
    # triangle is made.
    gram = blas.dsyrk(1.0, rows.T, trans=1, lower=1)
    gram = gram + np.tril(gram, -1).T
    # |Ĝ − RRᵀ| ≤ γ_n|R||R|ᵀ, whose norm is at most γ_n·‖R‖_F². The trace, ‖R‖_F², is
    # itself rounded: hence twice.
    frobenius = float(gram.diagonal().sum())
    square = bound_largest_eigenvalue(gram) + 2 * gamma(n + 2) * frobenius
    return round_up(sqrt(square), 8)


def bound_matrix_norm(matrix: np.ndarray) -> float:
    """The same for a matrix with more rows than columns, or fewer."""
    if matrix.shape[0] > matrix.shape[1]:
        matrix = np.ascontiguousarray(matrix.T)
    return bound_spectral_norm(matrix)


def provable(
    network: Network, pairs: Sequence[Pair], limit: int, memory: int
) -> list[Pair]:
    """Pairs whose smaller side is within the limit and whose matrix fits into the memory."""
    small = []
    for j, i in pairs:
        smaller = min(network.in_size(j), network.out_size(i))
        if smaller <= limit and memory_of(network, (j, i)) <= memory:
            small.append((j, i))
    return small


def memory_of(network: Network, pair: Pair) -> int:
    """Bytes for the matrix of a pair."""
    j, i = pair
    return 8 * network.in_size(j) * network.out_size(i)


def proof_cost(network: Network, pair: Pair, path: float) -> float:
    """Multiplications of a proof: the matrix, by a path for each of its rows, its Gram matrix, its factors."""
    j, i = pair
    # The matrix has the smaller side as rows, so that its Gram matrix is the smaller
    # one of both.
    rows, columns = sorted((network.in_size(j), network.out_size(i)))
    return rows * path + rows**2 * columns / 2 + rows**3 / 3


def gram_plan(network: Network, pairs: Sequence[Pair]) -> dict[Side, list[Pair]]:
    """The side from which the matrix of each pair is formed: the smaller one."""
    plan: dict[Side, list[Pair]] = {}
    for j, i in pairs:
        side = ("pull", j) if network.in_size(j) <= network.out_size(i) else ("push", i)
        plan.setdefault(side, []).append((j, i))
    return plan


def dense_rows(
    network: Network,
    side: Side,
    pairs: Sequence[Pair],
    progress: Report,
    memory: int = _BATCH_BYTES,
) -> dict[Pair, np.ndarray]:
    """The matrices of the given pairs, all of one side: B_ji for ("pull", j), B_jiᵀ for ("push", i).

    Rows of the identity travel through the network in batches whose values take at most
    so much memory.
    """
    direction, site = side
    pulls = direction == "pull"
    start = network.sites[site].source if pulls else network.sites[site].output
    # Pulled back, unit vectors at the input of site j give rows of B_ji; pushed on,
    # those at the output of site i give columns, which are the rows of B_jiᵀ.
    shape = network.nodes[start].shape
    n = prod(shape)
    matrices = {}
    for j, i in pairs:
        width = network.out_size(i) if pulls else network.in_size(j)
        matrices[j, i] = np.zeros((n, width))
    widest = max(prod(node.shape) for node in network.nodes)
    batch = max(1, min(n, min(memory, _BATCH_BYTES) // (8 * widest)))
    for first in range(0, n, batch):
        last = min(n, first + batch)
        count = last - first
        # Rows first … last − 1 of the identity, (count, *shape).
        identity = torch.zeros(count, n, dtype=torch.float64, device=network.device)
        identity[:, first:last].fill_diagonal_(1.0)
        identity = identity.reshape(count, *shape)
        images = network.pull(site, identity) if pulls else network.push(site, identity)
        for j, i in pairs:
            image = images[i] if pulls else images[j - 1]  # of the sites 0..n or 1..n+1
            # Where no path leads, the matrix stays zero.
            if image is not None:
                matrices[j, i][first:last] = image.reshape(count, -1).cpu().numpy()
        progress(last / n)
    return matrices


def all_matrices(
    network: Network, pairs: Sequence[Pair], progress: Progress
) -> dict[Pair, np.ndarray]:
    """B_ji for all given pairs, each with the input of site j as rows."""
    maps = {}
    last = network.depth + 1
    for i in range(last):
        members = [pair for pair in pairs if pair[1] == i]
        if members:
            report = partial(progress, f"matrices {i + 1}/{last}")
            found = dense_rows(network, ("push", i), members, report)
            for pair, transposed in found.items():
                maps[pair] = transposed.T
    return maps
