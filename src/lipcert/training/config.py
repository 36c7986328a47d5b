"""What a training run consists of: a frozen, validated configuration, read from presets, TOML files and overrides."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from lipcert.errors import ConfigError, nearest
from lipcert.losses import SignedRadiusLoss
from lipcert.losses.loss import Epsilon
from lipcert.training.config_parts import (
    AugmentationConfig,
    EstimatorConfig,
    LossConfig,
    OptimizerConfig,
    Part,
    ScheduleConfig,
)
from lipcert.training.own_names import network_name
from lipcert.training.parsing import apply_overrides, explain, read_toml, toml_text


def _listed(value: Any) -> Any:
    """A single number, or several in one string, as a list."""
    if isinstance(value, str):
        return value.split(",")
    return [value] if isinstance(value, int | float) else value


def _distinct(values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(dict.fromkeys(values))


# How many an epoch has at least, where the size of batches is not set.
_STEPS = 16


class TrainConfig(Part):
    """Everything that determines a run.

    model: a network of the zoo, or module:factory.
    data: a name or path for `lipcert.data.load`.
    epsilons: in pixels in [0, 1].
    init_from: weights to begin with, a file or a run folder.
    teacher: a preset or a TOML file; its network is trained first, on the same training
    images, and says how probable the classes of augmented images are. The loss then
    expects labels that are drawn so.
    loss: also module:function, see `OwnLoss`.
    input_range: [−1, 1] adds a first layer that maps pixels there; radii stay in
    pixels.
    validation: so many training images are kept aside and watched in place of the test
    split.
    batch_size: if not set, 512, or less for small data.
    warmup_epochs: the first ones, trained by cross-entropy alone.
    classes_per_batch: 0 for no limit.
    clip_norm: largest norm of the gradient, 0 for no limit.
    precision: of the forward pass, never of the constants.
    compare_standard: also train a twin by cross-entropy alone.
    attack_inputs: how many test inputs are attacked at the end, evenly spread over the
    test split.
    execution: the arithmetic in which the trained model is certified and attacked; in
    float64 rounding costs nothing, in float32-split, with long sums in parts, little.
    stored: the type in which the trained weights are written; what is certified is what is
    written, so rounded weights cost a little, and half of the size.
    note: what a reader of the results has to know.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    note: str = ""
    model: Annotated[str, AfterValidator(network_name)]
    data: str
    seed: NonNegativeInt = 0
    epochs: PositiveInt
    warmup_epochs: NonNegativeInt = 0
    validation: NonNegativeInt = 0
    batch_size: PositiveInt = 512
    classes_per_batch: NonNegativeInt = 0
    input_range: tuple[FiniteFloat, FiniteFloat] = (0.0, 1.0)
    init: Literal["default", "orthogonal"] = "default"
    init_from: str = ""
    teacher: str = ""
    clip_norm: NonNegativeFloat = 0.0
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    epsilons: Annotated[
        tuple[Epsilon, ...],
        Field(min_length=1),
        BeforeValidator(_listed),
        AfterValidator(_distinct),
    ] = (0.25,)
    eval_every: PositiveInt = 1
    checkpoint_seconds: NonNegativeFloat = 60.0
    compare_standard: bool = False
    attack_inputs: NonNegativeInt = 1000
    execution: Literal["float32", "float32-split", "float64"] = "float32"
    stored: Literal["float32", "float16"] = "float32"
    tensorboard: bool = False
    loss: LossConfig = SignedRadiusLoss(type="signed-radius", t=5.0, r0=0.5)
    estimator: EstimatorConfig = EstimatorConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    augmentation: AugmentationConfig = AugmentationConfig()

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, type(self))) from None

    @model_validator(mode="after")
    def _check_epochs(self) -> TrainConfig:
        names = {
            "schedule.decay_epoch": self.schedule.decay_epoch,
            "warmup_epochs": self.warmup_epochs,
        }
        for name, value in names.items():
            if value and value >= self.epochs:
                raise ValueError(
                    f"{name} is {value}, expected less than epochs, "
                    f"{self.epochs}; set both"
                )
        probable = {"teacher": self.teacher, "augmentation.mix": self.augmentation.mix}
        for name, option in probable.items():
            if option and not self.loss.probable:
                raise ValueError(
                    f"{name} is {option}, but loss.type {self.loss.type} does not take "
                    f"probabilities; use signed-radius, or no {name}"
                )
        if self.input_range[0] >= self.input_range[1]:
            raise ValueError(
                f"input_range is {list(self.input_range)}, expected a smaller "
                "and a larger number"
            )
        return self

    @property
    def robust(self) -> bool:
        """Whether the loss uses Lipschitz constants."""
        return self.loss.robust

    @classmethod
    def parse(cls, values: dict[str, Any], source: str) -> TrainConfig:
        """A configuration from plain values; errors name `source`, the key and the nearest valid one."""
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def preset(cls, name: str) -> TrainConfig:
        """A configuration that comes with lipcert, by its name."""
        if name not in presets():
            listed = ", ".join(presets())
            raise ConfigError(
                f"there is no preset {name!r}, expected one of "
                f"{listed}{nearest(name, presets())}"
            )
        resource = files("lipcert") / "presets" / f"{name}.toml"
        return cls.parse(
            {"name": name, **read_toml(resource.read_text("utf-8"), name)},
            f"preset {name}",
        )

    @classmethod
    def named(cls, spec: str | Path) -> TrainConfig:
        """The configuration of a preset or of a TOML file."""
        is_file = Path(spec).suffix == ".toml" or Path(spec).is_file()
        return cls.from_toml(spec) if is_file else cls.preset(str(spec))

    @classmethod
    def from_toml(cls, path: str | Path) -> TrainConfig:
        """A configuration from a TOML file."""
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}); give a preset or a TOML file"
            ) from None
        return cls.parse(
            {"name": Path(path).stem, **read_toml(text, str(path))}, str(path)
        )

    def with_overrides(self, overrides: str | Sequence[str]) -> TrainConfig:
        """A copy with some values replaced, each given as "key=value", such as "loss.t=4".

        Another loss.type starts from that loss's own defaults. With other epochs, the
        schedule is stretched and the warm-up cut short, unless they are given too. The
        note is about the data and the model: with others, it is left out.
        """
        overrides = [overrides] if isinstance(overrides, str) else overrides
        values = self.model_dump()
        if "batch_size" not in self.model_fields_set:
            del values["batch_size"]
        changed = self.parse(apply_overrides(values, overrides), "override")
        if (changed.data, changed.model) != (
            self.data,
            self.model,
        ) and changed.note == self.note:
            return changed.model_copy(update={"note": ""})
        return changed

    def at_epsilon(self, epsilon: float) -> TrainConfig:
        """The same for another first ε: all other ε and the distances in the loss change in proportion."""
        if not (isfinite(epsilon) and epsilon > 0):
            raise ConfigError(
                f"epsilon is {epsilon}, expected a positive number such as 0.25"
            )
        factor = epsilon / self.epsilons[0]
        others = [factor * other for other in self.epsilons[1:]]
        return self.model_copy(
            update={"epsilons": (epsilon, *others), "loss": self.loss.in_units(factor)}
        )

    def for_inputs(self, count: int) -> TrainConfig:
        """With a batch size for so many training inputs, unless one is set: the power of two that makes 16 steps."""
        if "batch_size" in self.model_fields_set:
            return self
        size = 2 ** max(count // _STEPS, 1).bit_length() // 2
        return self.model_copy(update={"batch_size": min(max(size, 8), 512)})

    def standard_twin(self) -> TrainConfig:
        """The same run by cross-entropy alone."""
        values = self.model_dump()
        values |= {
            "name": "standard",
            "loss": {"type": "standard"},
            "teacher": "",
            "augmentation": {**values["augmentation"], "mix": 0.0},
            "warmup_epochs": 0,
            "compare_standard": False,
        }
        return self.parse(values, "standard twin")

    def weights_digest(self) -> str:
        """Of everything that determines the weights."""
        # A run may be resumed with another of these: the weights at its end are the same.
        left_out = {"name", "note", "attack_inputs", "execution", "stored"}
        left_out |= {"checkpoint_seconds", "tensorboard"}
        # Without defaults, so that new fields change nothing.
        relevant = self.model_dump_json(exclude=left_out, exclude_defaults=True)
        return hashlib.sha256(relevant.encode()).hexdigest()

    def to_toml(self) -> str:
        """TOML that `from_toml` reads back as an equal configuration."""
        return toml_text(self.model_dump())


def presets() -> list[str]:
    """The names of all presets."""
    folder = files("lipcert") / "presets"
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    )
