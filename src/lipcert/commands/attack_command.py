"""`lipcert attack`: accuracy under PGD."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipcert.commands.options import (
    AsJson,
    Data,
    DataDir,
    Eps,
    InputShape,
    Limit,
    Model,
    Quiet,
    Weights,
    checked_epsilons,
    named_data,
    named_model,
    print_json,
    print_table,
    sentence,
)
from lipcert.commands.progress_bar import progress_bar
from lipcert.progress import Progress

if TYPE_CHECKING:
    from lipcert.data import Split
    from lipcert.models import LoadedModel

_BATCH = 256

Steps = Annotated[int, typer.Option(help="PGD iterations.")]
Step = Annotated[
    str, typer.Option(help="relative (ε/10), or paper (0.001, as it states).")
]
Restarts = Annotated[
    int, typer.Option(help="PGD runs, all but the first from random points.")
]


def attack(
    model: Model,
    data: Data,
    eps: Eps,
    weights: Weights = None,
    input_shape: InputShape = None,
    data_dir: DataDir = None,
    steps: Steps = 100,
    step: Step = "relative",
    restarts: Restarts = 2,
    limit: Limit = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Clean accuracy and accuracy under l2 PGD."""
    from lipcert.display import TextTable

    loaded = named_model(model, weights, input_shape)
    epsilons = checked_epsilons(eps)
    loaded, dataset, count = named_data(loaded, data, data_dir, limit)
    # The first ones, so that the figures belong to those that `lipcert certify --limit`
    # gives.
    test = dataset.test.take(slice(0, count))
    settings = {"steps": steps, "step": step, "restarts": restarts}
    with progress_bar(hidden=quiet or as_json) as progress:
        results = [_accuracies(loaded, test, e, settings, progress) for e in epsilons]
    if as_json:
        what = {"model": loaded.name, "data": dataset.name, "inputs": count}
        print_json({**what, **settings, "at": results})
        return
    rows = []
    for at in results:
        accuracies = f"{at['clean']:.2%}", f"{at['attacked']:.2%}"
        rows.append([f"{at['epsilon']:g}", *accuracies])
    title = f"{loaded.name} on {dataset.name}, {count} test inputs"
    caption = (
        f"l2 PGD, {steps} iterations, step {step}, {restarts} runs. "
        f"{sentence(dataset.note)}"
    )
    print_table(TextTable(title, ("ε (l2)", "clean", "attacked"), rows, caption))


def _accuracies(
    loaded: LoadedModel,
    test: Split,
    epsilon: float,
    settings: dict[str, Any],
    progress: Progress,
) -> dict[str, float]:
    """Shares of inputs that are classified correctly, before and after the attack."""
    import torch

    from lipcert import attacks

    clean = survived = 0
    for first in range(0, len(test), _BATCH):
        x = test.pixels(slice(first, first + _BATCH))
        label = test.labels[first : first + _BATCH]
        with torch.no_grad():
            right = loaded.model(x).argmax(1) == label
        # Away from the label, so that inputs that are wrong already count as found and
        # are masked by `right`.
        attacked = attacks.pgd(loaded.model, x, label, epsilon, **settings)
        clean += int(right.sum())
        survived += int((right & ~attacked.success).sum())
        # The last batch may be shorter.
        progress(f"attacking, ε = {epsilon:g}", min(1.0, (first + _BATCH) / len(test)))
    shares = {"clean": clean / len(test), "attacked": survived / len(test)}
    return {"epsilon": epsilon, **shares}
