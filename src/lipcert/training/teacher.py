"""A teacher: a network trained for accuracy alone, which says how probable the labels of training images are.

Images that even it finds hard are not worth a margin. It is used as it is at its last
epoch and never certified.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lipcert.data import Dataset, Split
from lipcert.errors import ConfigError
from lipcert.files import write_text
from lipcert.layout import CONFIG, MODEL, TEACHER
from lipcert.models import save_model
from lipcert.progress import Progress
from lipcert.training.config import TrainConfig
from lipcert.training.loop import Training
from lipcert.training.objective import Prepared

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_BATCH = 512


def teacher_config(config: TrainConfig) -> TrainConfig:
    """The teacher's configuration, with the data, the seed and the validation split of its pupil."""
    teacher = TrainConfig.named(config.teacher)
    if teacher.loss.robust or teacher.teacher:
        raise ConfigError(
            f"teacher {config.teacher}: expected a configuration with loss.type standard "
            "and no teacher of its own"
        )
    same = {"data": config.data, "seed": config.seed, "validation": config.validation}
    return teacher.model_copy(update=same)


def check_teacher(config: TrainConfig) -> None:
    """Refuse a teacher that does not exist or is none, before any folder is made."""
    if config.teacher:
        teacher_config(config)


def taught_probabilities(
    fabric: Fabric,
    config: TrainConfig,
    dataset: Dataset,
    folder: Path,
    progress: Progress,
) -> Tensor:
    """(N, K), the probabilities of the classes of all training images by the configured teacher.

    It is trained in the folder `teacher` of the run, from its last checkpoint if there is
    one.
    """
    folder = folder / TEACHER
    teacher = teacher_config(config).for_inputs(len(dataset.train))
    if fabric.is_global_zero and not (folder / CONFIG).exists():
        write_text(folder / CONFIG, teacher.to_toml())
    fabric.barrier()
    teacher = TrainConfig.from_toml(folder / CONFIG)
    prepared = Prepared.of(teacher, dataset)
    digest = teacher.weights_digest()
    training = Training(fabric, teacher, digest, dataset, folder, prepared)

    def of_teacher(what: str, fraction: float, figures: str = "") -> None:
        progress(f"{what} the teacher", fraction, figures)

    training.run(of_teacher)
    model = training.model.eval()
    if fabric.is_global_zero:
        shape, classes = dataset.input_shape, dataset.classes
        pixels = teacher.input_range
        save_model(
            model, folder / MODEL, teacher.model, shape, classes, input_range=pixels
        )
    mirrored = teacher.augmentation.flip
    with fabric.autocast():
        return class_probabilities(model, dataset.train, fabric.device, mirrored)


@torch.no_grad()
def class_probabilities(
    model: nn.Module, split: Split, device: torch.device, mirrored: bool
) -> Tensor:
    """(N, K), on the CPU: the softmax of the logits; if asked for, its mean with that at the mirror image."""
    found = []
    for index in torch.split(torch.arange(len(split)), _BATCH):
        x = split.pixels(index).to(device)
        probabilities = model(x).float().softmax(1)
        if mirrored:
            probabilities = (probabilities + model(x.flip(-1)).float().softmax(1)) / 2
        found.append(probabilities.cpu())
    return torch.cat(found)
