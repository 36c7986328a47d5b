"""Training: configurations, the loop, checkpoints, runs."""

from lipcert.training.config import TrainConfig, presets
from lipcert.training.run import resume, train

__all__ = ["TrainConfig", "presets", "resume", "train"]
