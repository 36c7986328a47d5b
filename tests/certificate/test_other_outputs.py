"""Outputs that are not two or more logits, inputs in other forms, and certified accuracy as a metric."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lipcert
from helpers import randn
from lipcert.attacks import minimum_norm
from lipcert.certificate.binary import TwoLogits
from lipcert.errors import BoundError, OptionError, ShapeError
from models import dense_chain


class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x)[:, 0]


def test_a_linear_model_with_one_logit_has_the_distance_to_its_plane():
    for model in (nn.Linear(3, 1).double().eval(), Squeezed().double().eval()):
        weight = next(model.parameters()).detach()
        bias = list(model.parameters())[1].detach()
        x = randn(50, 3)
        z = x @ weight[0] + bias
        certificates = lipcert.certify(model, x)
        assert torch.equal(certificates.prediction, (z > 0).long())
        assert torch.allclose(certificates.radius, z.abs() / weight.norm(), rtol=1e-9)
        assert (certificates.radius <= z.abs() / weight.norm()).all()


def test_a_network_with_one_logit():
    model = dense_chain(4, 16, 16, 1).float()
    x = randn(40, 4).float()
    bound = lipcert.bound(model, (4,))
    assert bound.target == "network"
    certificates = lipcert.certify(model, x, bound, labels=(model(x)[:, 0] > 0).long())
    assert certificates.clean_accuracy == 1
    assert (certificates.radius > 0).all()
    assert torch.equal(
        lipcert.certify(model, x, lipcert.bound(model, (4,), target="per-class")).radius
        > 0,
        certificates.radius > 0,
    )
    two = TwoLogits(model).eval()
    assert torch.allclose(
        lipcert.certify(two, x).radius, certificates.radius, rtol=1e-6
    )
    attack = minimum_norm(two, x, certificates.prediction, pixels=(-9.0, 9.0))
    assert (attack.distance >= certificates.radius).all()
    assert attack.success.any()
    logits, radius = lipcert.CertifiedClassifier(model, bound)(x)
    assert logits.shape == (40, 2)
    assert (radius <= certificates.radius).all()
    with pytest.raises(
        BoundError,
        match=r"has the target pairwise, which says nothing about a model with one logit",
    ):
        lipcert.certify(model, x, lipcert.bound(model, (4,), target="pairwise"))


@pytest.mark.parametrize(
    "model",
    [
        dense_chain(8, 5, 1),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()).double().eval(),
    ],
)
def test_the_default_target_of_other_outputs_is_the_network(model, caplog):
    shape = (8,) if isinstance(model[0], nn.Linear) else (1, 5, 5)
    with caplog.at_level(logging.WARNING, "lipcert"):
        bound = lipcert.bound(model, shape)
    assert (
        "are no logits: the constant is that of the network as a whole" in caplog.text
    )
    assert bound.target == "network"
    assert float(bound) > 0
    x, y = randn(128, *shape).chunk(2)
    change = (model(x) - model(y)).detach().flatten(1).norm(dim=1) / (x - y).flatten(
        1
    ).norm(dim=1)
    assert float(change.max()) <= float(bound)


def test_a_bound_with_several_constants_is_no_number():
    with pytest.raises(
        OptionError,
        match=r"the bound has 9 constants, of shape \(3, 3\); take one from .value, or",
    ):
        float(lipcert.bound(dense_chain(4, 3), (4,)))


def test_inputs_and_labels_in_other_forms():
    model = dense_chain(4, 8, 3).float()
    x, labels = randn(10, 4).float(), torch.arange(10) % 3
    bound = lipcert.bound(model, (4,))
    expected = lipcert.certify(model, x, bound, labels=labels)
    pairs = [(x[k], int(labels[k])) for k in range(10)]

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, k):
            return pairs[k]

    forms = [
        lipcert.certify(model, x.numpy(), bound, labels=labels.numpy()),
        lipcert.certify(model, x.numpy().astype(np.float64), bound, labels=labels),
        lipcert.certify(model, TensorDataset(x, labels), bound, batch_size=4),
        lipcert.certify(model, Rows(), bound, batch_size=4),
    ]
    for form in forms:
        assert torch.allclose(form.radius, expected.radius, rtol=1e-6)
        assert form.clean_accuracy == expected.clean_accuracy
    with pytest.raises(
        ShapeError,
        match=r"inputs are a lipcert.data.Dataset; pass dataset.test.pixels\(\) and labels=",
    ):
        lipcert.certify(model, lipcert.data.load("digits"), bound)


def test_the_metric_is_the_accuracy_of_certificates():
    model = dense_chain(4, 8, 3).float()
    x, labels = randn(30, 4).float(), torch.arange(30) % 3
    classifier = lipcert.CertifiedClassifier(model, lipcert.bound(model, (4,)))
    metric = lipcert.CertifiedAccuracy([0.01, 0.1])
    with pytest.raises(
        OptionError, match="there is nothing to compute yet; call update first"
    ):
        metric.compute()
    for batch in torch.arange(30).split(7):
        metric.update(*classifier(x[batch]), labels[batch])
    logits, radius = classifier(x)
    correct = logits.argmax(1) == labels
    expected = {
        0.0: correct,
        0.01: correct & (radius >= 0.01),
        0.1: correct & (radius >= 0.1),
    }
    assert metric.compute() == {
        epsilon: float(mask.double().mean()) for epsilon, mask in expected.items()
    }
    metric.reset()
    metric(logits[:0], radius[:0], labels[:0])
    metric.update(logits[:1], radius[:1], labels[:1])
    assert metric.compute()[0.0] == float(correct[0])
    with pytest.raises(
        ShapeError, match=r"shapes \(30, 3\), \(30,\) and \(29,\), expected"
    ):
        metric.update(logits, radius, labels[:-1])
    with pytest.raises(
        OptionError, match=r"epsilons are \[-1\], expected positive numbers"
    ):
        lipcert.CertifiedAccuracy(-1)


def test_the_metric_counts_over_processes(monkeypatch):
    metric, other = lipcert.CertifiedAccuracy(0.5), lipcert.CertifiedAccuracy(0.5)
    logits, radius, labels = (
        torch.eye(2)[[0, 0, 0]],
        torch.tensor([1.0, 0.2, 0.7]),
        torch.tensor([0, 0, 1]),
    )
    metric.update(logits[:1], radius[:1], labels[:1])
    other.update(logits[1:], radius[1:], labels[1:])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda counts: counts.add_(other.counts)
    )
    assert metric.compute() == metric.compute() == {0.0: 2 / 3, 0.5: 1 / 3}


def test_one_logit_with_weights_that_are_computed():
    torch.manual_seed(0)
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 1)).eval()
    x = torch.rand(5, 4)
    certificates = lipcert.certify(model, x)
    expected = model(x)[:, 0].abs() / model.weight.norm()
    assert torch.allclose(certificates.radius, expected.double(), rtol=1e-4, atol=1e-6)
    assert torch.equal(certificates.prediction, (model(x)[:, 0] > 0).long())


def test_one_logit_is_not_counted():
    with pytest.raises(ShapeError, match="there is one logit"):
        lipcert.CertifiedAccuracy(0.2).update(
            torch.ones(3, 1), torch.ones(3), torch.ones(3, dtype=torch.long)
        )
