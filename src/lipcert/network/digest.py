"""The digest of a program, to which a bound belongs."""

from __future__ import annotations

from hashlib import sha256
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from lipcert.network.kinds import is_torchs
from lipcert.network.probes import probed
from lipcert.network.program import Program


def program_digest(program: Program) -> str:
    """SHA-256 of everything that is computed: operators with all arguments, shapes, types and tensors.

    Of operators that are not torch's own, it contains what they compute at fixed inputs
    (see `probes`).
    """
    digest = sha256()
    numbers: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and not node.users:  # a tensor that is not read
            continue
        # Names of nodes differ from capture to capture; their numbers do not.
        numbers[node] = len(numbers)
        arguments = map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        value = node.meta.get("val")
        digest.update(
            f"{node.op} {_operator(node)} {arguments} {_described(value)};".encode()
        )
        if node.op == "placeholder" and node in program.tensors:
            # The header tells where a tensor ends: without it, [1, 2], [3] and [1], [2,
            # 3] would have the same bytes.
            tensor = program.tensors[node]()
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(
                tensor.detach()
                .cpu()
                .contiguous()
                .reshape(-1)
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
        if node in program.opaque:
            digest.update(program_digest(program.opaque[node].program).encode())
        # Operators of torch are known by their names. What others compute, nobody
        # promises, so it is looked at.
        elif not is_torchs(node):
            digest.update(probed(program, node).encode())
    return digest.hexdigest()


def _operator(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return ""
    if isinstance(node.target, FunctionType):  # whose text has an address
        return node.target.__name__
    return str(node.target)


def _described(value: Any) -> str:
    """The shapes and types of a result; the batch axis has a name of its own in every capture."""
    if isinstance(value, Tensor):
        sizes = []
        for size in value.shape:
            sizes.append(str(size) if isinstance(size, int) else "batch")
        return f"{value.dtype}[{','.join(sizes)}]"
    if isinstance(value, tuple | list):
        return f"({' '.join(_described(item) for item in value)})"
    return type(value).__name__
