"""What operators that are not torch's own compute at fixed inputs.

Their code is not in a program: it may read a table of the module that it is written in,
or come in another version. Such a change is noticed by what they compute, as far as it
shows at these inputs.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from lipcert.network.kinds import recorded_shape
from lipcert.network.names import layer_name
from lipcert.network.program import Program

_MAGNITUDES = (1.0, 0.0, 100.0, 1e-3, 1e4, 10.0, 0.1)


@torch.no_grad()
def probed(program: Program, node: fx.Node) -> str:
    """SHA-256 of what an operation computes at inputs of several magnitudes, with the program's constants."""
    rows = len(_MAGNITUDES)

    # The operation by itself, with fixed numbers in place of what it would get from the
    # network.
    def read(source: fx.Node) -> Any:
        if program.kinds[source] == "size":
            return rows
        if program.kinds[source] == "dependent":
            return _example(source).to(program.device)
        value = program.constant(source)
        return (
            value.expand(rows, *value.shape[1:])
            if program.is_batched(source)
            else value
        )

    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), read)
    digest = sha256()
    for result in tree_leaves(target(*args, **kwargs)):
        if isinstance(result, Tensor):
            digest.update(f"{result.dtype} {tuple(result.shape)};".encode())
            digest.update(
                result.cpu()
                .contiguous()
                .reshape(-1)
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
        else:
            digest.update(f"{result};".encode())
    return digest.hexdigest()


def _example(node: fx.Node) -> Tensor:
    shape = [
        size if isinstance(size, int) else len(_MAGNITUDES)
        for size in recorded_shape(node)
    ]
    dtype = node.meta["val"].dtype
    # Positions and masks: zeros are valid whatever they are read as.
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    for row in range(min(len(x), len(_MAGNITUDES)) if shape else 0):
        x[row] *= _MAGNITUDES[row]
    return x.to(dtype)


def probes(program: Program) -> list[tuple[str, str]]:
    """All operators of others that run whenever the program does: their names, and what `probed` says of them."""
    found = []
    for node in program.operators_of_others:
        found.append(
            (f"{layer_name(node, False)[0]} ({node.target})", probed(program, node))
        )
    # Modules with a rule are programs of their own, in which there may be operators of
    # others, too.
    for node, call in program.opaque.items():
        for name, value in probes(call.program):
            found.append((f"{layer_name(node, True)[0]}: {name}", value))
    return found
