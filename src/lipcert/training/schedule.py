"""The paper's learning-rate schedule."""

from __future__ import annotations

from lipcert.training.config import ScheduleConfig


def learning_rate(schedule: ScheduleConfig, epoch: int, epochs: int) -> float:
    """lr_0 for the first `decay_epoch` epochs, then times a constant γ each epoch, reaching lr_f in the last one.

    The paper's (lr_0, lr_f, lr_decay), with epochs counted from 0: γ = (lr_f/lr_0)^(1/(epochs − decay_epoch)).
    """
    late = epoch + 1 - schedule.decay_epoch
    if late <= 0:
        return schedule.lr0
    return float(schedule.lr0 * (schedule.lrf / schedule.lr0) ** (late / (epochs - schedule.decay_epoch)))
