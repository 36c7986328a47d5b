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

from lipcert.attacks import check_certificates, cross_check, fooled, minimum_norm, take
from lipcert.bounds.bound import Bound
from lipcert.bounds.compute import bound_network
from lipcert.bounds.methods import find_method
from lipcert.bounds.targets import find_target
from lipcert.certificate import Certificates
from lipcert.data import Dataset, Split
from lipcert.errors import DataError
from lipcert.files import replace_file
from lipcert.loading import LoadedModel
from lipcert.progress import Progress

ATTACKS, CONSTANTS, GALLERY = "attacks.csv", "constants.json", "gallery.safetensors"
_SHOWN, _SHOWN_WRONG = 8, 4


def write_evidence(
    loaded: LoadedModel,
    bound: Bound,
    dataset: Dataset,
    certificates: Certificates,
    epsilons: Sequence[float],
    attacked: int,
    folder: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Attack some inputs, bound by the naive method too, and pick images to show.

    The `attacked` inputs are evenly spread, because data sets may be ordered by class. `certificates` are those of the
    first test inputs. Writes attacks.csv, constants.json and gallery.safetensors, and returns what belongs into
    summary.json.
    """
    test = dataset.test.take(slice(0, len(certificates)))
    accuracies = certificates.certified_accuracy(list(epsilons))
    assert isinstance(accuracies, list)
    survived: list[float | None] = [None] * len(epsilons)
    attacked = min(attacked, len(test))
    if attacked:
        index = torch.arange(attacked) * len(test) // attacked
        part = take(certificates, index)
        distance = cross_check(loaded.model, test.take(index), part, epsilons, folder, index, progress)
        write_attacks(folder / ATTACKS, index, distance, epsilons)
        survived = [attacked_accuracy(part.correct, distance, epsilon) for epsilon in epsilons]
    _write_constants(loaded, bound, folder / CONSTANTS, progress)
    return {
        "class_names": list(dataset.class_names),
        "attacked_inputs": attacked,
        "at": [
            {"epsilon": epsilon, "certified": share, "attacked": left}
            for epsilon, share, left in zip(epsilons, accuracies, survived, strict=True)
        ],
        "gallery": _write_gallery(loaded.model, test, certificates, folder),
    }


def attacked_accuracy(correct: Tensor, distance: Tensor, epsilon: float) -> float:
    """Share of the attacked inputs that are classified correctly and for which no attack has succeeded within ε."""
    return float((correct & ~fooled(distance, epsilon)).double().mean())


def write_attacks(path: Path, index: Tensor, distance: Tensor, epsilons: Sequence[float]) -> None:
    """One row per attacked input: how far the closest image found is, and whether there is one within each ε."""
    with replace_file(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["idx", "distance", *(f"fooled at {epsilon!r}" for epsilon in epsilons)])
        marks = [fooled(distance, epsilon).int().tolist() for epsilon in epsilons]
        writer.writerows(zip(index.tolist(), distance.tolist(), *marks, strict=True))


def read_attacks(path: Path) -> tuple[Tensor, Tensor]:
    """Which inputs were attacked, and the distances found, from an attacks.csv."""
    header, *rows = list(csv.reader(path.read_text().splitlines())) or [[]]
    try:
        index, values = [int(row[0]) for row in rows], [float(row[1]) for row in rows]
        if header[:2] != ["idx", "distance"] or not rows or index != sorted(set(index)) or index[0] < 0:
            raise ValueError("expected the columns idx and distance, and rows of ascending idx")
        if any(isnan(value) for value in values):
            raise ValueError("a distance is not a number")
    except (ValueError, IndexError) as error:
        raise DataError(f"{path} is damaged ({error}); certify the model again") from None
    return torch.tensor(index), torch.tensor(values, dtype=torch.float64)


def _write_constants(loaded: LoadedModel, bound: Bound, path: Path, progress: Progress) -> None:
    """The mean pairwise constant and the contribution of every site, by the naive method and by that of the bound.

    Both are guaranteed. What is there already is kept if it belongs to the same weights and method.
    """
    mark = {"fingerprint": bound.facts.fingerprint, "method": bound.method}
    try:
        stored = json.loads(path.read_text())
        if {name: stored[name] for name in mark} == mark:
            return
    except (OSError, ValueError, KeyError):
        pass
    method, target = find_method("naive"), find_target("pairwise")
    naive = bound_network(loaded.network, method, [target], progress=progress)[target.name]
    facts = {
        **mark,
        "sites": {name: _kind(loaded.model, name) for name in bound.facts.sites},
        "methods": {
            found.method: {
                "mean": found.mean, "guarantee": found.guarantee, "target": found.target, "seconds": found.seconds,
                "contributions": found.contributions,
            }
            for found in (naive, bound)
        },
    }  # fmt: skip
    with replace_file(path) as temporary:
        temporary.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


def _kind(model: nn.Module, site: str) -> str:
    """What a site is: the class of its module, if it is one."""
    try:
        return type(model.get_submodule(site.partition("#")[0])).__name__
    except AttributeError:
        return ""


def _write_gallery(model: nn.Module, test: Split, certificates: Certificates, folder: Path) -> list[dict[str, Any]]:
    """The images of the most and the least robust correct predictions, and of wrong ones with large radii.

    Each with the closest image with another prediction that DDN finds, in the range of pixels.
    """
    chosen = _choose(certificates)
    if not chosen:
        return []
    index = torch.tensor([k for k, _ in chosen])
    x, part = test.pixels(index), take(certificates, index)
    assert part.label is not None
    found = minimum_norm(model, x, part.prediction)
    check_certificates(x, part, found, folder, index)
    with torch.no_grad():
        other = model(found.adversarial).argmax(1).tolist()
    entries = []
    for k, (place, group) in enumerate(chosen):
        success = bool(found.success[k])
        entries.append(
            {
                "group": group, "idx": place, "label": int(part.label[k]), "prediction": int(part.prediction[k]),
                "radius": float(part.radius[k]), "distance": float(found.distance[k]) if success else None,
                "adversarial_prediction": other[k] if success else None,
            }
        )  # fmt: skip
    with replace_file(folder / GALLERY) as temporary:
        save_file({"images": x.contiguous(), "adversarial": found.adversarial.contiguous()}, temporary)
    return entries


def _choose(certificates: Certificates) -> list[tuple[int, str]]:
    """Indices of the images to show, with the group each belongs to."""
    order = certificates.radius.argsort(descending=True, stable=True)
    right, wrong = order[certificates.correct[order]].tolist(), order[~certificates.correct[order]].tolist()
    most, rest = right[:_SHOWN], right[_SHOWN:]
    least = rest[::-1][:_SHOWN]
    groups = {"most robust": most, "least robust": least, "wrong": wrong[:_SHOWN_WRONG]}
    return [(index, group) for group, members in groups.items() for index in members]
