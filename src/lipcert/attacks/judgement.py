"""The judgement of certificates by attacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lipcert.attacks.searches import Attacked, minimum_norm, pgd
from lipcert.certificate.certificates import Certificates, take
from lipcert.data import Split
from lipcert.errors import CertificateViolation
from lipcert.files import replace_file
from lipcert.progress import Progress, Report, Work, no_progress

_BEYOND = (-4.0, 5.0)
"""Radii hold outside the range of pixels too: certificates are also judged there."""
ON_SPHERE = 1e-6
"""PGD ends on the sphere of radius ε, up to rounding."""
_BATCH = 256


def check_certificates(
    x: Tensor,
    certificates: Certificates,
    attacked: Attacked,
    folder: str | Path,
    index: Tensor | None = None,
) -> None:
    """Refuse certificates that an attack contradicts: an input within the radius with another prediction.

    The first such input is written to `folder`/violation.safetensors with what was
    found. `index` holds the places of the inputs in their data set, for the message.
    """
    # Strictly: a radius says nothing about its sphere.
    inside = (attacked.distance.cpu() < certificates.radius).nonzero().flatten()
    if len(inside) == 0:
        return
    k = int(inside[0])
    place = k if index is None else int(index[k])
    path = Path(folder) / "violation.safetensors"
    violation = {
        "input": x[k],
        "adversarial": attacked.adversarial[k],
        "prediction": certificates.prediction[k],
        "radius": certificates.radius[k],
        "distance": attacked.distance[k],
    }
    for name, value in violation.items():
        violation[name] = value.cpu().clone().contiguous()
    with replace_file(path) as temporary:
        save_file(violation, temporary)
    raise CertificateViolation(
        f"the certificate of input {place} does not hold: an input at distance "
        f"{float(attacked.distance[k]):.6g} "
        "is classified differently, inside the radius "
        f"{float(certificates.radius[k]):.6g}; it is saved in {path}"
    )


def cross_check(
    model: nn.Module,
    test: Split,
    certificates: Certificates,
    epsilons: Sequence[float],
    folder: str | Path,
    index: Tensor | None = None,
    progress: Progress = no_progress,
) -> Tensor:
    """Distances of the closest images found with another prediction than the certified one; infinite where none was.

    Attacks every input by DDN, and by PGD at each ε where DDN has found nothing that
    close; any success inside a certified radius is an error (see `check_certificates`).
    Always begins from the same seed.
    """
    if index is None:
        index = torch.arange(len(test))
    distances = []
    work = Work("attacking", len(test), progress)
    # Random starts from a fixed seed, and the caller's generator as it was.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for first in range(0, len(test), _BATCH):
            some = slice(first, first + _BATCH)
            x, batch, places = test.pixels(some), take(certificates, some), index[some]
            report = work.part(len(x))
            distances.append(
                _cross_check_batch(model, x, batch, epsilons, folder, places, report)
            )
    return torch.cat(distances)


def _cross_check_batch(
    model: nn.Module,
    x: Tensor,
    certificates: Certificates,
    epsilons: Sequence[float],
    folder: str | Path,
    index: Tensor,
    report: Report,
) -> Tensor:
    """The distances of one batch."""
    classes = certificates.prediction
    # First with pixels far beyond [0, 1], where certificates hold, too; its distances
    # are not those of images.
    beyond = minimum_norm(model, x, classes, pixels=_BEYOND)
    check_certificates(x, certificates, beyond, folder, index)
    closest = minimum_norm(model, x, classes)
    check_certificates(x, certificates, closest, folder, index)
    distance = closest.distance.cpu()
    for k, epsilon in enumerate(epsilons, start=1):
        report(k / (len(epsilons) + 1))
        # Where an image this close is known, there is nothing left to look for.
        left = (~fooled(distance, epsilon)).nonzero().flatten()
        if len(left):
            attacked = pgd(model, x[left], classes[left], epsilon)
            some = take(certificates, left)
            check_certificates(x[left], some, attacked, folder, index[left])
            distance[left] = torch.minimum(distance[left], attacked.distance.cpu())
    report(1.0)
    return distance


def fooled(distance: Tensor, epsilon: float) -> Tensor:
    """Which inputs have an image with another prediction within ε, given the distances of those that were found."""
    return distance <= epsilon * (1 + ON_SPHERE)
