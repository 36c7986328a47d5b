"""A teacher: a network trained for accuracy alone, which says how probable the labels of training images are.

Images that even it finds hard are not worth a margin. It is used as it is at its last
epoch and never certified. It is asked in every step about the very images that its pupil
sees, moved and mixed as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lipcert.data import Dataset
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


class Teacher:
    """What a trained network says of images: how probable the classes are."""

    def __init__(self, fabric: Fabric, model: nn.Module) -> None:
        self._fabric = fabric
        self._model: nn.Module = fabric.to_device(model.eval())

    @torch.no_grad()
    def probabilities(self, x: Tensor) -> Tensor:
        """(B, K)."""
        with self._fabric.autocast():
            logits: Tensor = self._model(x)
        return logits.float().softmax(1)


def trained_teacher(
    fabric: Fabric,
    config: TrainConfig,
    dataset: Dataset,
    folder: Path,
    progress: Progress,
) -> Teacher:
    """The configured teacher, trained in the folder `teacher` of the run, from its last checkpoint if there is one."""
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
    model = training.model
    if fabric.is_global_zero:
        shape, classes = dataset.input_shape, dataset.classes
        pixels = teacher.input_range
        save_model(
            model, folder / MODEL, teacher.model, shape, classes, input_range=pixels
        )
    return Teacher(fabric, model)
