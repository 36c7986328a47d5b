"""What a run folder holds besides certificates, for a report that computes nothing: attacks, constants, images."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lipcert.attacks import check_certificates, cross_check, fooled, minimum_norm
from lipcert.bounds.bound import Bound
from lipcert.bounds.compute import bound_network
from lipcert.bounds.methods import find_method
from lipcert.bounds.targets import find_target
from lipcert.certificate import Certificates
from lipcert.certificate.certificates import take
from lipcert.data import Split
from lipcert.errors import DataError
from lipcert.files import replace_file, write_json
from lipcert.layout import ATTACKS, CONSTANTS, GALLERY
from lipcert.models import LoadedModel
from lipcert.processes import of_first, process_rank
from lipcert.progress import Progress
from lipcert.runs.summary import Example

_SHOWN, _SHOWN_WRONG = 8, 4


def attack_inputs(
    model: nn.Module,
    test: Split,
    certificates: Certificates,
    epsilons: Sequence[float],
    count: int,
    folder: Path,
    progress: Progress,
) -> list[float | None]:
    """Attack `count` inputs and write attacks.csv; returns the share left standing at every ε, None without attacks.

    The inputs are evenly spread, because data sets may be ordered by class.
    """
    if count == 0:
        return [None] * len(epsilons)
    # 3 of 10 inputs: 0, 3, 6.
    index = torch.arange(count) * len(test) // count
    attacked = take(certificates, index)
    # Raises if a certificate is contradicted; attacks.csv is then not written.
    distance = cross_check(
        model, test.take(index), attacked, epsilons, folder, index, progress
    )
    write_attacks(folder / ATTACKS, index, distance, epsilons)
    return [
        attacked_accuracy(attacked.correct, distance, epsilon) for epsilon in epsilons
    ]


def attacked_accuracy(correct: Tensor, distance: Tensor, epsilon: float) -> float:
    """Share of the attacked inputs that are classified correctly and for which no attack has succeeded within ε."""
    return float((correct & ~fooled(distance, epsilon)).double().mean())


def write_attacks(
    path: Path, index: Tensor, distance: Tensor, epsilons: Sequence[float]
) -> None:
    """One row per attacked input: how far the closest image found is, and whether there is one within each ε."""
    header = ["idx", "distance"]
    columns = [index.tolist(), distance.tolist()]
    for epsilon in epsilons:
        # repr, so that 36/255 is found again by its value.
        header.append(f"fooled at {epsilon!r}")
        columns.append(fooled(distance, epsilon).int().tolist())
    with replace_file(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(zip(*columns, strict=True))


def read_attacks(path: Path) -> tuple[Tensor, Tensor]:
    """Which inputs were attacked, and the distances found, from an attacks.csv."""
    header, *rows = list(csv.reader(path.read_text().splitlines())) or [[]]
    index, distances = [], []
    try:
        for row in rows:
            index.append(int(row[0]))
            distances.append(float(row[1]))
        # Ascending, so that the last index is the largest: readers compare it with the
        # number of certificates.
        if (
            header[:2] != ["idx", "distance"]
            or not rows
            or index != sorted(set(index))
            or index[0] < 0
        ):
            raise ValueError(
                "expected the columns idx and distance, and rows of ascending idx"
            )
        if any(map(isnan, distances)):
            raise ValueError("a distance is not a number")
    except (ValueError, IndexError) as error:
        raise DataError(
            f"{path} is damaged ({error}); certify the model again"
        ) from None
    return torch.tensor(index), torch.tensor(distances, dtype=torch.float64)


def write_constants(
    loaded: LoadedModel, bound: Bound, folder: Path, progress: Progress
) -> None:
    """The mean pairwise constant and the contribution of every site, by the naive method and by that of the bound.

    Both are guaranteed. What is there already is kept if it belongs to the same weights
    and method. Processes that share work divide the norms; the first one writes.
    """
    path = folder / CONSTANTS
    # The naive bound of a large network takes minutes. It is not computed again for the
    # same weights.
    identity = {"fingerprint": bound.facts.fingerprint, "method": bound.method}
    # Processes may not see the same files: all of them follow the first one.
    if of_first(_has_constants(path, identity)):
        return
    target = find_target("pairwise")
    naive = bound_network(
        loaded.network, find_method("naive"), [target], progress=progress
    )[target.name]
    sites = {name: _site_kind(loaded.model, name) for name in bound.facts.sites}
    methods = {naive.method: _constant(naive), bound.method: _constant(bound)}
    if process_rank() == 0:
        write_json(path, {**identity, "sites": sites, "methods": methods})


def _has_constants(path: Path, identity: dict[str, str]) -> bool:
    """Whether the constants of these weights and this method are there already."""
    try:
        stored = json.loads(path.read_text())
        return {name: stored[name] for name in identity} == identity
    # Missing, damaged or of an earlier version: computed anew.
    except (OSError, ValueError, KeyError):
        return False


def _constant(bound: Bound) -> dict[str, Any]:
    return {
        "mean": bound.mean,
        "guarantee": bound.guarantee,
        "target": bound.target,
        "seconds": bound.seconds,
        "contributions": bound.contributions,
    }


def _site_kind(model: nn.Module, site: str) -> str:
    """What a site is: the class of its module, if it is one."""
    try:
        # relu#2 is the second use of the module relu.
        return type(model.get_submodule(site.partition("#")[0])).__name__
    except AttributeError:
        return ""


def write_gallery(
    model: nn.Module, test: Split, certificates: Certificates, folder: Path
) -> list[Example]:
    """The images of the most and the least robust correct predictions, and of wrong ones with large radii.

    Each with the closest image with another prediction that DDN finds, in the range of
    pixels.
    """
    chosen = _choose(certificates)
    # Grey or coloured: nothing else can be shown.
    are_pictures = test.images.ndim == 4 and test.images.shape[1] in (1, 3)
    if not chosen or not are_pictures:
        return []
    index = torch.tensor([place for place, _ in chosen])
    x, shown = test.pixels(index), take(certificates, index)
    assert shown.label is not None
    # Another success of an attack, so another chance to contradict a certificate.
    attack = minimum_norm(model, x, shown.prediction)
    check_certificates(x, shown, attack, folder, index)
    with torch.no_grad():
        other = model(attack.adversarial).argmax(1)
    examples = []
    for k, (place, group) in enumerate(chosen):
        numbers = (
            int(shown.label[k]),
            int(shown.prediction[k]),
            float(shown.radius[k]),
        )
        nearest = (
            (float(attack.distance[k]), int(other[k])) if attack.success[k] else ()
        )
        examples.append(Example(group, place, *numbers, *nearest))
    with replace_file(folder / GALLERY) as temporary:
        save_file(
            {"images": x.contiguous(), "adversarial": attack.adversarial.contiguous()},
            temporary,
        )
    return examples


def _choose(certificates: Certificates) -> list[tuple[int, str]]:
    """Indices of the images to show, with the group each belongs to."""
    # Stable: of equal radii the first stays first, and the gallery is the same every
    # time.
    order = certificates.radius.argsort(descending=True, stable=True)
    # Both lists fall in radius; what is most robust is left out of the least.
    right = order[certificates.correct[order]].tolist()
    wrong = order[~certificates.correct[order]].tolist()
    most, others = right[:_SHOWN], right[_SHOWN:]
    groups = {
        "most robust": most,
        "least robust": others[::-1][:_SHOWN],
        "wrong": wrong[:_SHOWN_WRONG],
    }
    chosen = []
    for group, members in groups.items():
        for index in members:
            chosen.append((index, group))
    return chosen
