"""Rounding errors that reach the entries of an image, by rows: what zonotopes cannot follow by columns.

With one slope λ for every nonlinearity, e_v = Σ_w B_vw δ_w for the errors |δ_w| ≤ own_w
that nodes w make themselves. A row y of B_vw is pulled back from v, inside its window,
and pays |y|·own_w at every node w. Where windows become large it ends, and pays |y|·E_w
for all that comes before. Computed rows are off by γ|A|ᵀ|y|, which is part of own_w
too. All is in float32, for errors of errors are small.
"""

from __future__ import annotations

from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.local.window_rows import inner_products, through_edges
from lipcert.local.windows import Places, Scene
from lipcert.rounding import gamma

_LARGEST_WINDOW = 1024
"""Entries of a window; rows of larger ones end."""
_CHUNK_ENTRIES = 1 << 19
_VANISHED = 1e-25
"""More than what is lost where products in float32 underflow, 2⁻¹²⁶ each, per unit of the largest error."""

Images = dict[int, Tensor]
"""(C, H, W) for each node."""


def rounding_by_rows(
    scene: Scene, own: Images, total: Images, slopes: Images, wanted: Tensor
) -> Tensor:
    """(n,): bounds on |e| for the entries of an image that are wanted, in the order of `nonzero`."""
    entries = []
    for u, frame in scene.frames.items():
        entries.append(
            min(prod(frame.size) * scene.network.nodes[u].shape[0], _LARGEST_WINDOW)
        )
    bounds = []
    for some in torch.split(wanted.nonzero(), max(1, _CHUNK_ENTRIES // max(entries))):
        places = Places(torch.zeros_like(some[:, 0]), *some.unbind(1))
        bounds.append(_pulled(scene, own, total, slopes, places))
    largest = max(float(image.max()) for image in total.values())
    return torch.cat(bounds) + _VANISHED * (1 + largest)


def _pulled(
    scene: Scene, own: Images, total: Images, slopes: Images, places: Places
) -> Tensor:
    network = scene.network
    seed = F.one_hot(places.channel, network.nodes[scene.v].shape[0]).float()
    rows = {scene.v: seed[:, None, None, :]}
    paid = torch.zeros(len(seed), device=seed.device)
    summed = 4
    for w in range(scene.v, 0, -1):  # nothing is rounded at the input
        y = rows.pop(w, None)
        if y is None:
            continue
        index = network.site_of_output.get(w)
        # At the output of a nonlinearity, where E_w holds all errors that were made
        # before.
        ends = index is not None and prod(y.shape[1:]) > _LARGEST_WINDOW
        charge = total if ends else own
        paid = paid + inner_products(
            y.abs(), scene.look("charge", w, partial(_upwards, charge[w]), places)
        )
        summed += prod(y.shape[1:]) + 2
        if ends:
            continue
        if index is None:
            through_edges(scene, rows, w, y, places)
        else:
            source = network.sites[index].source
            pulled = scene.look("slope", w, partial(_exactly, slopes[w]), places).mul_(
                y
            )
            if source in rows:
                pulled = rows[source] + pulled
            rows[source] = pulled
    return paid.double() * (1 + gamma(summed, torch.float32))


def _upwards(image: Tensor) -> Tensor:
    # Conversion to float32 rounds by 2⁻²⁴ of a number, so that it stays above.
    return (image * (1 + 2.0**-22)).float()[None]


def _exactly(image: Tensor) -> Tensor:
    """Slopes are numbers of float32 already."""
    return image.float()[None]
