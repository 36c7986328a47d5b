"""Training: configurations, the loop, checkpoints, runs."""

from lipcert.training.config import TrainConfig, presets
from lipcert.training.run import Run, resume, train

__all__ = ["Run", "TrainConfig", "presets", "resume", "train"]
