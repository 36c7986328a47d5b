"""Targets and methods that a user registers are found by their names, and bound what they say."""

import pytest
import torch

import lipcert
from helpers import jacobians, reference
from lipcert.bounds.fit import FitOptions
from lipcert.bounds.methods import METHODS, Method, register_method
from lipcert.bounds.targets import TARGETS, Target, register_target
from lipcert.bounds.targets.distances import bound_class_norms, class_norms
from lipcert.errors import OptionError
from models import dense_chain

MODEL = dense_chain(4, 6, 6, 3)
QUICK = FitOptions(steps=5)


@pytest.fixture
def against_first():
    """A target of K constants: each logit minus the first one."""

    class AgainstFirst(Target):
        name = "against-first"

        def shape(self, classes):
            return (classes,)

        def row_norms(self, rows):
            return class_norms(rows - rows[:1])

        def bound_row_norms(self, rows, error):
            return bound_class_norms(rows - rows[:1], 2 * error) * (1 + 1e-12)

        def pairwise(self, value, classes):
            return (value[:, None] + value[None]) * (
                1 - torch.eye(classes, dtype=value.dtype)
            )

        def functionals(self, classes):
            unit = torch.eye(classes, dtype=torch.float64)
            return [((a,), unit[a : a + 1] - unit[:1]) for a in range(classes)]

    register_target(AgainstFirst)
    yield
    del TARGETS["against-first"]


@pytest.fixture
def smaller():
    """A method: the smaller one of the naive bound and LipLT, and a value found by other means."""

    class Smaller(Method):
        name = "smaller"

        def forms(self, task, target):
            return [task.form("naive"), task.form("liplt")]

        def values(self, task, target):
            return {
                "trivial": torch.full(
                    target.shape(task.network.classes), 1e6, dtype=torch.float64
                )
            }

    register_method(Smaller)
    yield
    del METHODS["smaller"]


@pytest.mark.usefixtures("against_first")
@pytest.mark.parametrize(
    "method", ["naive", "liplt", "rescaled", "lt-sdp", "lipsdp", "best"]
)
def test_a_target(method, tmp_path):
    bound = lipcert.bound(MODEL, (4,), method, "against-first", fit=QUICK)
    known = lipcert.bound(MODEL, (4,), method, fit=QUICK).value
    assert bound.target == "against-first"
    assert bound.value.shape == (3,)
    assert bound.value[0] <= 1e-9
    local = jacobians(MODEL, (4,), 8)
    assert ((local - local[:, :1]).norm(dim=2) <= bound.value + 1e-12).all()
    assert sum(bound.contributions.values()) == pytest.approx(bound.mean)
    fitted = method in ("rescaled", "best")
    if not fitted:  # whose coordinates are fitted to the mean of the target
        torch.testing.assert_close(bound.value[1:], known[0, 1:], rtol=1e-5, atol=0)
    assert (bound.pairwise(3) >= known * (1 - 1e-9)).all() or fitted
    bound.save(tmp_path / "bound")
    assert torch.equal(lipcert.Bound.load(tmp_path / "bound").value, bound.value)
    bound.check_belongs(MODEL)


@pytest.mark.usefixtures("against_first")
def test_the_best_of_all_methods_is_no_worse_than_any_for_a_target_that_none_of_them_knows():
    best = lipcert.bound(MODEL, (4,), "best", "against-first", fit=QUICK)
    for method in ("liplt", "lt-sdp", "lipsdp"):
        assert (
            best.value
            <= lipcert.bound(MODEL, (4,), method, "against-first").value * (1 + 1e-12)
        ).all()
    exact = lipcert.bound(MODEL, (4,), "lipsdp").value[0]
    torch.testing.assert_close(best.value[1:], exact[1:], rtol=1e-6, atol=0)


@pytest.mark.usefixtures("against_first")
def test_estimates_and_slopes_of_a_target():
    with torch.no_grad():
        estimate = lipcert.Estimator(
            MODEL, (4,), target="against-first", power_iterations=200
        )()
    torch.testing.assert_close(
        estimate,
        reference(MODEL, (4,), target="pairwise")[0].detach(),
        rtol=1e-6,
        atol=1e-12,
    )
    slopes = lipcert.estimate_sampled(MODEL, (4,), "against-first", samples=8, steps=5)
    assert (slopes <= estimate * (1 + 1e-6)).all()


@pytest.mark.usefixtures("smaller")
def test_a_method():
    bound, naive, liplt = (
        lipcert.bound(MODEL, (4,), method) for method in ("smaller", "naive", "liplt")
    )
    assert bound.method == "smaller"
    assert (bound.value <= torch.minimum(naive.value, liplt.value) * (1 + 1e-12)).all()
    torch.testing.assert_close(bound.value, liplt.value, rtol=1e-9, atol=0)
    assert set(bound.winners) == {"1", "3", "pairwise"}
    assert bound.winners["pairwise"] == "liplt"


@pytest.mark.usefixtures("smaller", "against_first")
def test_a_method_and_a_target_that_know_nothing_of_each_other():
    bound = lipcert.bound(MODEL, (4,), "smaller", "against-first")
    torch.testing.assert_close(
        bound.value[1:], lipcert.bound(MODEL, (4,)).value[0, 1:], rtol=1e-6, atol=0
    )


def test_they_are_gone():
    with pytest.raises(OptionError, match="method is 'smaller', expected one of"):
        lipcert.bound(MODEL, (4,), "smaller")
    with pytest.raises(OptionError, match="target is 'against-first', expected one of"):
        lipcert.bound(MODEL, (4,), target="against-first")
