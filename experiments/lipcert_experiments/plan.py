"""From the paper's settings to training configurations that fit a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lipcert.errors import OptionError, check_choice
from lipcert.training import TrainConfig

BUDGETS = ("tiny", "hour", "paper")
PROTOCOLS = ("lipcert", "authors")
DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10", "tiny-imagenet": "Tiny-ImageNet"}
_PRESETS = {
    "mnist": "mnist-4c3f",
    "cifar10": "cifar10-6c2f",
    "tiny-imagenet": "tiny-imagenet-8c2f",
}
_EPOCHS = {"mnist": 3, "cifar10": 4, "tiny-imagenet": 2}
_TINY = (
    "model=mlp-64",
    "epochs=40",
    "batch_size=64",
    "compare_standard=false",
    "epsilons=[0.25]",
)
_TINY_EPOCHS = 4
_FEWEST = 2
_OWN_ATTACKS = "attack_inputs=0"  # a table makes its attacks itself
ATTACKED = {"tiny": 40, "hour": 200, "paper": 10_000}
"""How many test inputs are attacked."""
STEPS = {"tiny": 20, "hour": 100, "paper": 100}
"""Iterations of PGD; the paper's are 100."""
RESTARTS = {"tiny": 1, "hour": 1, "paper": 2}


@dataclass(frozen=True)
class Plan:
    """A budget and a protocol.

    budget: "paper" is the paper's in full, "hour" fits one hour on two cores, "tiny" trains small networks on the
    embedded digits in place of every data set.
    protocol: "authors" has CIFAR-10 in [−1, 1] with ε in those units, and the authors' PGD.
    epochs: of every run, instead of those of the budget.
    seed: of every run.
    """

    budget: str
    protocol: str = "lipcert"
    epochs: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("budget", self.budget, BUDGETS)
        check_choice("protocol", self.protocol, PROTOCOLS)
        if self.epochs is not None and self.epochs < _FEWEST:
            raise OptionError(
                f"epochs is {self.epochs}, expected {_FEWEST} or more: a warm-up and CRM"
            )

    @property
    def name(self) -> str:
        """The budget, with what differs from its usual settings."""
        authors = "-authors" if self.protocol == "authors" else ""
        epochs = f"-{self.epochs}-epochs" if self.epochs else ""
        return f"{self.budget}{authors}{epochs}" + (
            f"-seed-{self.seed}" if self.seed else ""
        )

    @property
    def note(self) -> str:
        """How trainings differ from the paper's; "" if they do not."""
        if self.budget == "paper" and self.epochs is None:
            return ""
        return (
            "Trainings are compressed to the epochs stated: warm-up and decay in proportion, the learning rate full in "
            "the first epoch after the warm-up and falling by a factor of ten at most. Rows and data sets of the paper "
            "that are missing here were left out to save time."
        )

    def datasets(self, *wanted: str) -> tuple[str, ...]:
        """The data sets that the budget has time for."""
        return wanted if self.budget == "paper" else wanted[:1]

    def title(self, data: str) -> str:
        """What rows of that data set are called."""
        return f"digits for {DATA[data]}" if self.budget == "tiny" else DATA[data]

    def config(self, data: str, *overrides: str) -> TrainConfig:
        """CRM as in the paper, in the epochs of the budget, with overrides."""
        base = self._base(data)
        epochs = self.epochs or {"tiny": _TINY_EPOCHS, "hour": _EPOCHS[data]}.get(
            self.budget
        )
        config = (compressed(base, epochs) if epochs else base).with_overrides(
            [_OWN_ATTACKS, f"seed={self.seed}", *overrides]
        )
        return config.with_overrides([f"name={run_name(config)}"])

    def standard(self, data: str) -> TrainConfig:
        """The same network by cross-entropy alone."""
        return self.config(data, "loss.type=standard", "warmup_epochs=0")

    def gloro(self, data: str) -> TrainConfig:
        """GloRo at the ε of the evaluation, with naive constants of the pairs, as Leino et al. compute them."""
        epsilon = self._base(data).epsilons[0]
        return self.config(data, "loss.type=gloro", f"loss.epsilon={epsilon!r}", "estimator.method=naive",
                           "estimator.target=pairwise")  # fmt: skip

    def ablation(self, data: str, row: dict[str, Any]) -> TrainConfig:
        """CRM with the (t, λ, r0) of the paper, in the units of this plan: in proportion to the usual setting."""
        usual: Any = TrainConfig.preset(_PRESETS[data]).loss
        ours: Any = self._base(data).loss
        factors = {
            name: row[name] / getattr(usual, name) for name in ("t", "weight", "r0")
        }
        return self.config(
            data,
            *(
                f"loss.{name}={getattr(ours, name) * f:.10g}"
                for name, f in factors.items()
            ),
        )

    def _base(self, data: str) -> TrainConfig:
        if self.budget == "tiny":
            return TrainConfig.preset("digits").with_overrides(_TINY)
        authors = self.protocol == "authors" and data == "cifar10"
        return TrainConfig.preset(
            _PRESETS[data] + ("-authors-units" if authors else "")
        )


def compressed(config: TrainConfig, epochs: int) -> TrainConfig:
    """The same training in fewer epochs: warm-up and decay in proportion, but at least one epoch of warm-up, if any.

    So that there are epochs to learn in, the first one after the warm-up has the full learning rate, and the rate
    decays by a factor of ten at most, not by the paper's five decades.
    """
    share = epochs / config.epochs
    warmup = max(1, round(config.warmup_epochs * share)) if config.warmup_epochs else 0
    decay = max(round(config.schedule.decay_epoch * share), warmup + 1)
    return config.with_overrides([
        f"epochs={epochs}",
        f"warmup_epochs={min(warmup, epochs - 1)}",
        f"schedule.decay_epoch={min(decay, epochs - 1)}",
        f"schedule.lrf={max(config.schedule.lrf, config.schedule.lr0 / 10)!r}",
        f"eval_every={epochs}",
    ])  # fmt: skip


def run_name(config: TrainConfig) -> str:
    """A folder name that is the same for the same training: readable, then a digest of what determines the weights."""
    return (
        f"{config.data}-{config.model}-{config.loss.type}-{config.weights_digest()[:8]}"
    )
