"""The authors' PGD: on the sphere, judged by its last point."""

import pytest
import torch
from torch import nn

from helpers import randn
from lipcert.errors import OptionError, TrainingModeError
from lipcert_experiments.authors_pgd import authors_pgd

PIXELS = (-50.0, 50.0)


@pytest.fixture(scope="module")
def linear():
    """A linear classifier of two classes, inputs, predictions, and the largest margin loss on a sphere of radius 1.

    On the sphere, signs of the gradient lead to the point sign(w)/‖sign(w)‖ at first and to w/‖w‖ in the limit.
    """
    model = nn.Linear(20, 2).eval().requires_grad_(False)
    model.weight.copy_(randn(2, 20))
    x = 0.3 * randn(60, 20, seed=1).float()
    logits = model(x)
    y = logits.argmax(1)
    difference = model.weight[0] - model.weight[1]
    margin = (logits[:, 0] - logits[:, 1]).abs()
    return model, x, y, margin, difference


def test_changes_end_on_the_sphere(linear):
    model, x, y, _, _ = linear
    found = authors_pgd(model, x, y, 1.0, pixels=PIXELS)
    assert found.success.any()
    torch.testing.assert_close(
        found.distance[found.success], torch.ones(int(found.success.sum())).double()
    )
    assert (model(found.adversarial).argmax(1) != y)[found.success].all()
    assert torch.equal(found.adversarial[~found.success], x[~found.success])


def test_one_step_is_the_sign_of_the_gradient_at_full_length(linear):
    """Of a linear classifier with two classes, the gradient is the difference of the rows."""
    model, x, y, margin, difference = linear
    reach = float(difference.abs().sum() / 20**0.5)  # of sign(w)/√n
    found = authors_pgd(model, x, y, 0.5, steps=1, pixels=PIXELS)
    assert torch.equal(found.success, margin < 0.5 * reach)


def test_never_succeeds_beyond_the_distance_to_the_boundary(linear):
    model, x, y, margin, difference = linear
    distance = margin / difference.norm()
    found = authors_pgd(model, x, y, 0.4, pixels=PIXELS)
    assert not found.success[distance > 0.4001].any()


def test_pixels_are_clipped(linear):
    model, x, *_ = linear
    inside = x.clamp(0, 1)
    found = authors_pgd(model, inside, model(inside).argmax(1), 3.0, pixels=(0.0, 1.0))
    assert found.success.any()
    assert found.adversarial.min() >= 0
    assert found.adversarial.max() <= 1
    assert (found.distance[found.success] <= 3.0001).all()


def test_no_gradient_leaves_the_input_alone():
    model = nn.Linear(4, 2).eval().requires_grad_(False)
    model.weight.zero_()
    x = torch.rand(3, 4)
    y = model(x).argmax(1)
    found = authors_pgd(model, x, y, 1.0)
    assert not found.success.any()
    assert found.adversarial.isfinite().all()


def test_refusals(linear):
    model, x, y, _, _ = linear
    with pytest.raises(OptionError, match="epsilon > 0, step > 0"):
        authors_pgd(model, x, y, 0.0)
    with pytest.raises(TrainingModeError, match=r"call model\.eval"):
        authors_pgd(nn.Linear(20, 2).train(), x, y, 1.0)
