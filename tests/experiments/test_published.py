"""The paper's numbers, and how configurations follow from them."""

import pytest

from lipcert.errors import OptionError
from lipcert.training import TrainConfig
from lipcert_experiments import Plan
from lipcert_experiments.experiments import EXPERIMENTS
from lipcert_experiments.plan import compressed, run_name
from lipcert_experiments.published import published_row, published_rows
from lipcert_experiments.tables import ABLATIONS

TABLES = [
    experiment.label
    for experiment in EXPERIMENTS.values()
    if experiment.name.startswith("table")
]


@pytest.mark.parametrize("label", TABLES)
def test_published_accuracies_are_ordered(label):
    """Typing errors would mostly break this: certified ≤ attacked ≤ clean ≤ 100."""
    for row in published_rows(label):
        if "clean" in row:
            middle = row["attacked"] if row["attacked"] is not None else row["clean"]
            assert 0 <= row["certified"] <= middle <= row["clean"] <= 100
        elif row["method"] == "liplt":
            naive = published_row(label, data=row["data"], method="naive")
            assert all(
                row[target] < naive[target]
                for target in ("pairwise", "per-class", "network")
            )


def test_tables_that_repeat_a_number_agree():
    """The original settings of the ablations are rows of other tables too."""
    names = ("clean", "attacked", "certified")

    def numbers(label, **keys):
        return [published_row(label, **keys)[name] for name in names]

    for data, iterations in (("mnist", 10), ("cifar10", 5), ("tiny-imagenet", 5)):
        original = numbers(ABLATIONS[data], effect="original")
        assert (
            numbers("tab:numberOfPowerIterations", data=data, iterations=iterations)
            == original
        )
    for data in ("cifar10", "tiny-imagenet"):
        assert numbers("tab:l2Accuracies", data=data, method="CRM") == numbers(
            ABLATIONS[data], effect="original"
        )
    soft = numbers("tab:effectOfEachComponent", target="pairwise", variant="soft")
    assert soft == numbers("tab:l2Accuracies", data="cifar10", method="CRM")


def test_a_number_that_the_paper_does_not_give_is_none():
    assert (
        published_row("tab:l2Accuracies", method="AOL", model="Small")["attacked"]
        is None
    )
    assert published_row("tab:l2Accuracies", method="no such") == {}


@pytest.mark.parametrize("data", ABLATIONS)
def test_paper_budgets_have_the_presets_in_full(data):
    config = Plan("paper").config(data)
    preset = {
        "mnist": "mnist-4c3f",
        "cifar10": "cifar10-6c2f",
        "tiny-imagenet": "tiny-imagenet-8c2f",
    }[data]
    assert run_name(config) == run_name(TrainConfig.preset(preset)) == config.name
    original = published_row(ABLATIONS[data], effect="original")
    assert Plan("paper").ablation(data, original) == config
    for row in published_rows(ABLATIONS[data]):
        loss = Plan("paper").ablation(data, row).loss
        assert (loss.t, loss.weight, loss.r0) == pytest.approx(
            (row["t"], row["weight"], row["r0"]), rel=1e-9
        )


def test_the_authors_units_scale_an_ablation():
    row = {"t": 7, "weight": 20, "r0": 0.3}
    config = Plan("paper", "authors").ablation("cifar10", row)
    assert config.input_range == (-1, 1)
    assert (config.loss.t, config.loss.weight, config.loss.r0) == pytest.approx(
        (14, 40, 0.15)
    )
    assert config.epsilons == pytest.approx((18 / 255,))


def test_schedules_are_compressed_in_proportion():
    config = compressed(TrainConfig.preset("cifar10-6c2f"), 40)
    assert (config.epochs, config.warmup_epochs, config.schedule.decay_epoch) == (
        40,
        1,
        20,
    )
    assert (config.schedule.lr0, config.schedule.lrf) == (1e-3, 1e-4)
    shortest = compressed(TrainConfig.preset("mnist-4c3f"), 2)
    assert (shortest.epochs, shortest.warmup_epochs, shortest.schedule.decay_epoch) == (
        2,
        1,
        1,
    )


def test_every_experiment_has_valid_configurations_in_every_budget():
    for experiment in EXPERIMENTS.values():
        for plan in (
            Plan("tiny"),
            Plan("hour"),
            Plan("paper"),
            Plan("paper", "authors"),
            Plan("hour", epochs=7, seed=3),
        ):
            jobs = experiment.jobs(plan)
            assert bool(jobs) == (experiment.label not in RUN_TIMES)
            if plan.epochs:
                assert {
                    (job.config.epochs, job.config.seed) for job in jobs.values()
                } <= {(7, 3)}
    wanted = {
        "table-l2": 9,
        "table-power-iterations": 12,
        "table-ablation-cifar10": 14,
        "table-components": 9,
    }
    assert {
        name: len(EXPERIMENTS[name].jobs(Plan("paper"))) for name in wanted
    } == wanted


RUN_TIMES = (
    "fig:lipschitzRunTime",
    "fig:effectOfPowerIteration",
    "fig:effectOfDataset",
)


def test_names_of_runs_depend_on_what_is_trained_only():
    config = TrainConfig.preset("digits")
    same = config.with_overrides(["note=another", "checkpoint_seconds=5"])
    assert (
        run_name(same)
        == run_name(config)
        != run_name(config.with_overrides(["seed=1"]))
    )


def test_names_of_plans_tell_them_apart():
    plans = [
        Plan("hour"),
        Plan("hour", "authors"),
        Plan("hour", epochs=4),
        Plan("hour", epochs=4, seed=1),
    ]
    assert [plan.name for plan in plans] == [
        "hour",
        "hour-authors",
        "hour-4-epochs",
        "hour-4-epochs-seed-1",
    ]


def test_too_few_epochs_are_refused():
    with pytest.raises(OptionError, match="a warm-up and CRM"):
        Plan("paper", epochs=0)
