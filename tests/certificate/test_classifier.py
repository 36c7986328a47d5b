"""CertifiedClassifier: logits as they are, radii that certify agrees with, and no other weights."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

import lipcert
from helpers import randn
from lipcert.errors import BoundError, OptionError, ShapeError
from models import dense_chain, gaussian, named_models

MODELS = named_models()


def make(model, shape):
    return lipcert.CertifiedClassifier(model, lipcert.bound(model, shape)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_radii_are_below_those_of_certify_and_close(name, dtype):
    model, shape = MODELS[name]
    model = gaussian(model).to(dtype)
    x = randn(40, *shape).to(dtype)
    classifier = make(model, shape)
    with torch.no_grad():
        logits, radius = classifier(x)
    certificates = lipcert.certify(model, x, lipcert.bound(model, shape))
    assert torch.equal(logits, model(x))
    assert radius.dtype == torch.float64
    assert (radius <= certificates.radius * (1 + 1e-6) + 1e-9).all()
    assert (radius >= certificates.radius * (1 - 1e-2) - (1e-3 if dtype == torch.float32 else 1e-9)).all()
    assert classifier.guarantee == "deterministic"


@pytest.mark.parametrize("name", ["chain", "residual convolutions"])
def test_export(name):
    model, shape = MODELS[name]
    classifier = make(gaussian(model).float(), shape)
    x = randn(5, *shape).float()
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(classifier, (x,), dynamic_shapes=({0: batch},)).module()
    for inputs in (x, randn(9, *shape, seed=1).float()):
        logits, radius = exported(inputs)
        expected_logits, expected = classifier(inputs)
        torch.testing.assert_close(logits, expected_logits)
        torch.testing.assert_close(radius, expected, rtol=1e-5, atol=1e-7)


def test_inputs_and_arithmetic_that_the_bound_is_not_for_are_refused():
    """A mean over a smaller image has a larger constant; fewer bits have larger errors."""
    pooled = nn.Sequential(nn.Conv2d(1, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    classifier = make(gaussian(pooled).float(), (1, 8, 8))
    assert (classifier(randn(2, 1, 8, 8).float())[1] > 0).any()
    for wrong in (randn(2, 1, 4, 4).float(), randn(2, 1, 8, 8), randn(1, 8, 8).float()):
        with pytest.raises(ShapeError):
            classifier(wrong)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(OptionError, match="autocast computes with fewer bits"):
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
    classifier, x = make(Shifting().eval(), (4,)), 100 + randn(20, 4).float()
    with torch.no_grad():
        radius = classifier(x.clone())[1]
    assert (radius <= lipcert.certify(classifier.model, x).radius * (1 + 1e-6)).all()


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
    again = lipcert.CertifiedClassifier(other, lipcert.Bound.load(tmp_path / "bound")).eval()
    x = randn(7, 4).float()
    assert all(torch.equal(a, b) for a, b in zip(classifier(x), again(x), strict=True))


def test_other_weights_are_refused_at_the_start():
    with pytest.raises(BoundError, match="made for other weights"):
        lipcert.CertifiedClassifier(dense_chain(4, 5, 3, seed=1), lipcert.bound(dense_chain(4, 5, 3), (4,)))


def change_in_place(model):
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-6


def change_buffer(model):
    model[1].running_var.mul_(1.0001)


def load_others(model):
    other = gaussian(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), 7).float()
    model.load_state_dict(other.state_dict())


def replace_parameter(model):
    model[3].weight = nn.Parameter(2 * model[3].weight.detach())


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("change", [change_in_place, change_buffer, load_others, replace_parameter, train])
def test_changed_weights_are_refused(change):
    model = gaussian(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))).float()
    classifier = make(model, (4,))
    x = randn(2, 4).float()
    before = classifier(x)[1]
    change(model)
    for _ in range(2):  # not only once
        with pytest.raises(BoundError, match="the model has changed since"):
            classifier(x)
    assert before.shape == (2,)


def test_reloading_the_same_weights_is_accepted():
    model = dense_chain(4, 5, 3)
    classifier = make(model, (4,))
    before = classifier(randn(2, 4))[1]
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert torch.equal(classifier(randn(2, 4))[1], before)


def test_training_mode_is_refused_anywhere_in_the_model():
    model = gaussian(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)))
    classifier = make(model, (4,))
    model[1].train()
    with pytest.raises(BoundError, match=r"in training mode; call eval\(\) on the classifier first"):
        classifier(randn(2, 4))
    assert classifier.eval()(randn(2, 4))[1].shape == (2,)


def test_conversions_keep_the_constants_in_float64_or_are_refused():
    model = dense_chain(4, 5, 3).float()
    classifier = make(model, (4,))
    constants, before = classifier.constants.clone(), classifier(randn(3, 4).float())[1]
    classifier.to("cpu").to(torch.float32).float()
    assert torch.equal(classifier.constants, constants)
    assert torch.equal(classifier(randn(3, 4).float())[1], before)
    classifier.double()
    with pytest.raises(BoundError, match="made for other weights"):
        classifier(randn(3, 4))


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
    assert (x.grad.norm(dim=1) <= 1 + 1e-9).all()  # a radius cannot grow faster than the distance
