"""The run that the tests of reports are about."""

from lipcert.training import TrainConfig

CONFIG = TrainConfig.preset("digits").with_overrides(
    [
        "model=mlp-64",
        "epochs=6",
        "schedule.decay_epoch=3",
        "warmup_epochs=1",
        "attack_inputs=80",
        "eval_every=2",
    ]
)
