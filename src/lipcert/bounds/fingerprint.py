"""A hash of everything a bound depends on: the weights and the structure of a model."""

from __future__ import annotations

import re
from hashlib import sha256
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.errors import NonFiniteError
from lipcert.network.normal_form import Network


def fingerprint(model: nn.Module, network: Network) -> str:
    """SHA-256 over the names, types and bytes of all weights and buffers, and over the normal form's structure."""
    digest = sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("num_batches_tracked"):
            continue
        _add(digest, name, tensor)
    for call in network.graph.graph.nodes:  # options and constants that are written in the code
        target = call.target if isinstance(call.target, str) else call.target.__name__
        digest.update(_unnumbered(f"{call.op} {target} {call.args} {call.kwargs};").encode())
        if call.op == "get_attr":  # also tensors that are neither parameters nor buffers
            _add(digest, _unnumbered(call.target), attrgetter(call.target)(network.graph))
        if call.op == "call_module":
            module = network.graph.get_submodule(call.target)
            digest.update(f"{type(module).__name__}({module.extra_repr()});".encode())
    for node in network.nodes:
        digest.update(f"{node.shape} {[(e.source, type(e.op).__name__, e.op.in_shape) for e in node.edges]};".encode())
    for site in network.sites:
        fixed = site.slope and [v if isinstance(v, float) else "learned" for v in (site.slope.alpha, site.slope.beta)]
        digest.update(f"{site.source} {site.output} {fixed};".encode())
    return digest.hexdigest()


def _unnumbered(text: str) -> str:
    """Without the numbers of constants that are written in forward: each has a node of its own, in order."""
    return re.sub(r"_tensor_constant\d+", "_tensor_constant", text)


def _add(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
    digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def check_finite(model: nn.Module) -> None:
    """Refuse weights and buffers with NaN or infinity, naming the first."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(f"{name} contains NaN or infinity; restore the last good weights")
