"""The learning rate: the paper's schedule, or a linear decay."""

from __future__ import annotations

from lipcert.training.config_parts import ScheduleConfig


def learning_rate(
    schedule: ScheduleConfig, epoch: int, epochs: int, step: int = 0, steps: int = 1
) -> float:
    """The learning rate of a step of an epoch, both counted from 0, after a warm-up if there is one.

    "exponential", the paper's (lr_0, lr_f, lr_decay): lr_0 for the first `decay_epoch`
    epochs, then times a constant γ each epoch, reaching lr_f in the last one: γ =
    (lr_f/lr_0)^(1/(epochs − decay_epoch)). "linear": the same for the first epochs,
    then linearly to zero, step by step.
    """
    warm = 1.0
    if schedule.warmup_steps:
        # Steps of the whole run; the first one is 1/warmup_steps of the rate, not 0.
        warm = min(1.0, (epoch * steps + step + 1) / schedule.warmup_steps)
    if schedule.decay == "linear":
        # In epochs, with fractions.
        left = epochs - epoch - step / steps
        return warm * schedule.lr0 * min(1.0, left / (epochs - schedule.decay_epoch))
    # In the last epoch late = epochs − decay_epoch, so that the power is 1 and the rate
    # lr_f.
    late = epoch + 1 - schedule.decay_epoch
    if late <= 0:
        return warm * schedule.lr0
    return float(
        warm
        * schedule.lr0
        * (schedule.lrf / schedule.lr0) ** (late / (epochs - schedule.decay_epoch))
    )
