"""CertifiedClassifier: logits as they are, radii that certify agrees with, and no other weights."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

import lipcert
from helpers import bounded, certifier_of, randn, traced
from lipcert.errors import BoundError, OptionError, ShapeError, TrainingModeError
from models import dense_chain, gaussian, named_models

MODELS = named_models()


def make(model, shape):
    network = traced(model, shape)
    return lipcert.CertifiedClassifier(network, bounded(model, shape)).eval()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in MODELS),
        ("chain", torch.float64),
        ("residual convolutions", torch.float64),
    ],
)
def test_radii_are_below_those_of_certify_and_close(name, dtype):
    model, shape = MODELS[name]
    model = gaussian(model).to(dtype)
    x = randn(40, *shape).to(dtype)
    classifier = make(model, shape)
    with torch.no_grad():
        logits, radius = classifier(x)
    certificates = certifier_of(model, shape).certify(x)
    assert torch.equal(logits, model(x))
    assert radius.dtype == torch.float64
    assert (radius <= certificates.radius * (1 + 1e-6) + 1e-9).all()
    assert (
        radius
        >= certificates.radius * (1 - 1e-2) - (1e-3 if dtype == torch.float32 else 1e-9)
    ).all()
    assert classifier.guarantee == "deterministic"


@pytest.mark.parametrize("name", ["chain", "residual convolutions"])
def test_export(name):
    model, shape = MODELS[name]
    classifier = make(gaussian(model).float(), shape)
    x = randn(5, *shape).float()
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(
        classifier, (x,), dynamic_shapes=({0: batch},)
    ).module()
    for inputs in (x, randn(9, *shape, seed=1).float()):
        logits, radius = exported(inputs)
        expected_logits, expected = classifier(inputs)
        torch.testing.assert_close(logits, expected_logits)
        torch.testing.assert_close(radius, expected, rtol=1e-5, atol=1e-7)


def test_inputs_and_arithmetic_that_the_bound_is_not_for_are_refused():
    """A mean over a smaller image has a larger constant; fewer bits have larger errors."""
    pooled = nn.Sequential(
        nn.Conv2d(1, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
    )
    classifier = make(gaussian(pooled).float(), (1, 8, 8))
    assert (classifier(randn(2, 1, 8, 8).float())[1] > 0).any()
    for wrong in (randn(2, 1, 4, 4).float(), randn(2, 1, 8, 8), randn(1, 8, 8).float()):
        with pytest.raises(ShapeError):
            classifier(wrong)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(OptionError, match="autocast computes with fewer bits"),
    ):
        classifier(randn(2, 1, 8, 8).float())


class Shifting(nn.Module):
    """Changes its input in place."""

    def __init__(self):
        super().__init__()
        self.linear = gaussian(nn.Linear(4, 3)).float()

    def forward(self, x):
        x -= 100.0
        return self.linear(x)


def test_models_that_change_their_input():
    """The allowance for rounding is that of the input as it was given."""
    model, x = Shifting().eval(), 100 + randn(20, 4).float()
    classifier = make(model, (4,))
    with torch.no_grad():
        radius = classifier(x.clone())[1]
    assert (radius <= lipcert.certify(model, x).radius * (1 + 1e-6)).all()


def test_copies_and_pickles():
    classifier, x = make(dense_chain(4, 5, 3).float(), (4,)), randn(7, 4).float()
    for other in (copy.deepcopy(classifier), pickle.loads(pickle.dumps(classifier))):
        assert torch.equal(other(x)[1], classifier(x)[1])


def test_kept_as_weights_and_bound(tmp_path):
    model = dense_chain(4, 5, 3).float()
    classifier = make(model, (4,))
    save_model(model, tmp_path / "model.safetensors")
    lipcert.bound(model, (4,)).save(tmp_path / "bound")
    other = dense_chain(4, 5, 3, seed=9).float()
    load_model(other, tmp_path / "model.safetensors")
    again = lipcert.CertifiedClassifier(
        other, lipcert.Bound.load(tmp_path / "bound")
    ).eval()
    x = randn(7, 4).float()
    assert all(torch.equal(a, b) for a, b in zip(classifier(x), again(x), strict=True))


def test_other_weights_are_refused_at_the_start():
    with pytest.raises(BoundError, match="made for other weights"):
        lipcert.CertifiedClassifier(
            dense_chain(4, 5, 3, seed=1), lipcert.bound(dense_chain(4, 5, 3), (4,))
        )


def change_in_place(model):
    with torch.no_grad():
        model[0].weight[0, 0] += 1


def change_data(model):
    model[0].weight.data.mul_(20)


def change_buffer(model):
    model[1].running_var.mul_(1e-3)


def change_eps(model):
    model[1].eps = 100.0


def load_others(model):
    other = gaussian(
        nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5), nn.LeakyReLU(), nn.Linear(5, 3)
        ),
        7,
    ).float()
    model.load_state_dict(other.state_dict())


def replace_parameter(model):
    model[3].weight = nn.Parameter(2 * model[3].weight.detach())


def replace_activation(model):
    model[2] = nn.LeakyReLU(20.0)


def change_slope(model):
    model[2].negative_slope = 20.0


def append_layer(model):
    model.append(nn.Linear(3, 3))


def hook(model):
    model[0].register_forward_hook(lambda module, inputs, output: 20 * output)


def patch(model):
    model[0].forward = lambda x: 20 * nn.functional.linear(x, model[0].weight)


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), 1e-1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def to_training_mode(model):
    model.train()


CHANGES = (
    change_in_place, change_data, change_buffer, change_eps, load_others, replace_parameter, replace_activation,
    change_slope, append_layer, hook, patch, train, to_training_mode,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_done_to_the_model_changes_the_classifier(change):
    model = gaussian(
        nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5), nn.LeakyReLU(), nn.Linear(5, 3)
        )
    ).float()
    bound = lipcert.bound(model, (4,))
    classifier, x = (
        lipcert.CertifiedClassifier(model, bound).eval(),
        randn(9, 4).float(),
    )
    before = [tensor.detach().clone() for tensor in classifier(x)]
    expected = model(x).detach().clone()
    change(model)
    after = classifier(x)
    assert torch.equal(before[0], expected)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.equal(model(x), expected)
    with pytest.raises(
        (BoundError, TrainingModeError)
    ):  # and the bound is not one of the changed model
        lipcert.certify(model, x, bound)


def test_what_the_classifier_shows_is_a_copy():
    classifier, x = make(dense_chain(4, 5, 3).float(), (4,)), randn(3, 4).float()
    before = classifier(x)[1].clone()
    classifier.constants.mul_(1e-3)
    assert classifier.state_dict() == {}
    assert torch.equal(classifier(x)[1], before)


def test_conversions_change_nothing():
    model = dense_chain(4, 5, 3).float()
    classifier = make(model, (4,))
    constants, before = classifier.constants, classifier(randn(3, 4).float())[1]
    for converted in (
        classifier.to("cpu"),
        classifier.double(),
        classifier.half(),
        classifier.to(torch.bfloat16),
    ):
        assert torch.equal(converted.constants, constants)
        assert torch.equal(converted(randn(3, 4).float())[1], before)


def test_inputs_that_are_not_finite_or_overflow_have_radius_zero():
    classifier = make(dense_chain(4, 5, 3).float(), (4,))
    x = torch.ones(4, 4)
    x[0, 0], x[1, 0], x[2] = torch.nan, torch.inf, 3e38
    radius = classifier(x)[1]
    assert radius[:3].tolist() == [0.0, 0.0, 0.0]
    assert radius[3] > 0


def test_works_under_inference_mode_and_differentiates():
    model = dense_chain(4, 5, 3)
    classifier = make(model, (4,))
    with torch.inference_mode():
        inferred = classifier(randn(3, 4))[1]
    x = randn(3, 4).requires_grad_()
    _, radius = classifier(x)
    assert torch.equal(inferred, radius.detach())
    radius.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (
        x.grad.norm(dim=1) <= 1 + 1e-9
    ).all()  # a radius cannot grow faster than the distance
