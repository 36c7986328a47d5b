"""A hash of everything a bound depends on: the captured program, its tensors, and what rules say of it."""

from __future__ import annotations

from hashlib import sha256

import torch
from torch import Tensor

from lipcert.errors import NonFiniteError
from lipcert.network.digest import program_digest
from lipcert.network.normal_form import Network
from lipcert.network.program import Program


def fingerprint(network: Network) -> str:
    """SHA-256 over the program with all its tensors, and over the normal form that rules gave it."""
    digest = sha256(program_digest(network.program).encode())
    # Other rules, of a user or of another version, may give the same program another
    # normal form with other sites.
    for node in network.nodes:
        edges = [
            (e.source, type(e.op).__name__, e.op.in_shape, e.op.terms, e.op.covered)
            for e in node.edges
        ]
        digest.update(f"{node.shape} {edges};".encode())
    for site in network.sites:
        slope = site.slope
        # Learned slopes are tensors of the program, whose values are in its digest
        # already.
        described = slope and (
            slope.alpha if isinstance(slope.alpha, float) else "learned",
            slope.beta if isinstance(slope.beta, float) else "learned",
            slope.elementwise,
            slope.ulps,
            slope.group,
        )
        digest.update(f"{site.source} {site.output} {described};".encode())
    return digest.hexdigest()


def check_finite(program: Program) -> None:
    """Refuse weights, buffers and what is computed from them with NaN or infinity, naming the first."""
    for node, read in program.tensors.items():
        # What the program holds but never reads makes nothing infinite.
        if not node.users:
            continue
        tensor = read()
        if (
            isinstance(tensor, Tensor)
            and tensor.is_floating_point()
            and not bool(torch.isfinite(tensor).all())
        ):
            raise NonFiniteError(
                f"{program.names.get(node, node.name)} contains NaN or infinity; "
                "restore the last good weights"
            )
    # Layers that are one operation by a rule have programs with tensors of their own.
    for call in program.opaque.values():
        check_finite(call.program)
