"""Certified radii: equal to the distance where that is known, the same for every way of asking, zero on ties."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from helpers import bounded, certifier_of, examples, randn, traced
from lipcert.certificate.certify import Certifier
from lipcert.norms.norm_options import NormOptions
from models import dense_chain, gaussian, named_models

MODELS = named_models()


def linear(weight, bias, dtype):
    layer = nn.Linear(weight.shape[1], weight.shape[0]).to(dtype).requires_grad_(False)
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)
    return layer.eval()


def wild_classifier(seed, dtype):
    """Rows and entries of very different magnitudes, from 1e-4 to 1e4, and an input."""
    generator = torch.Generator().manual_seed(seed)
    n, k = (
        int(torch.randint(1, 30, (), generator=generator)),
        int(torch.randint(2, 6, (), generator=generator)),
    )
    spread = 10 ** (8 * torch.rand(k, 1, generator=generator) - 4)
    inner = 10 ** (4 * torch.rand(1, n, generator=generator) - 2) if seed % 2 else 1.0
    weight, bias = (torch.randn(k, m, generator=generator) * spread for m in (n, 1))
    x = torch.randn(1, n, generator=generator)
    return linear(weight * inner, bias[:, 0], dtype), x.to(dtype)


def exact_distances(layer, x, y):
    """(margin, squared distance of rows) for every other class, in rational numbers."""
    rows = [[Fraction(v) for v in row] for row in layer.weight.tolist()]
    offsets, point = (
        [Fraction(v) for v in layer.bias.tolist()],
        [Fraction(v) for v in x[0].tolist()],
    )
    logits = [
        sum(w * v for w, v in zip(row, point, strict=True)) + b
        for row, b in zip(rows, offsets, strict=True)
    ]
    for i, row in enumerate(rows):
        if i != y:
            yield (
                logits[y] - logits[i],
                sum((a - b) ** 2 for a, b in zip(rows[y], row, strict=True)),
            )


@examples(2)
@given(seed=st.integers(0, 99))
def test_radius_of_a_linear_classifier_is_the_distance(seed):
    layer, x = wild_classifier(seed, torch.float64)
    certificate = lipcert.certify(layer, x)
    pairs = list(exact_distances(layer, x, int(certificate.prediction)))
    radius = Fraction(float(certificate.radius))
    assert all(radius**2 * square <= margin**2 for margin, square in pairs)
    magnitude = max(
        float((layer.weight.abs() @ x[0].abs() + layer.bias.abs()).max()), 1e-300
    )
    if min(margin for margin, _ in pairs) > 1e-5 * magnitude:
        closest = min(margin**2 / square for margin, square in pairs)
        assert radius**2 >= closest * Fraction(1 - 1e-6) ** 2
    else:  # so close to a tie that rounding is visible
        assert radius >= 0


@examples(2)
@given(seed=st.integers(0, 99))
def test_radius_of_a_float32_classifier_misses_the_distance_by_the_rounding_errors_alone(
    seed,
):
    layer, x = wild_classifier(seed, torch.float32)
    certificate = lipcert.certify(layer, x)
    y = int(certificate.prediction)
    pairs = list(exact_distances(layer, x, y))
    radius = Fraction(float(certificate.radius))
    assert (
        all(margin > 0 and radius**2 * square <= margin**2 for margin, square in pairs)
        or radius == 0
    )
    wide = layer.weight.double()
    sums = wide.abs() @ x[0].double().abs() + layer.bias.double().abs()
    roundings = (x.shape[1] + 4) * 2.0**-24
    logits = wide @ x[0].double() + layer.bias.double()
    largest = (
        wide.abs().sum(0).max() * wide.abs().sum(1).max()
    ).sqrt()  # errors may grow like those of any row
    allowed = [
        ((logits[y] - logits[i] - 4.1 * roundings * (sums[y] + sums[i])) / ((wide[y] - wide[i]).norm() * (1 + 1e-6)
            + 1.5 * roundings * largest)).item()
        for i in range(len(wide)) if i != y
    ]  # fmt: skip
    assert float(radius) >= min(allowed)


def test_typical_float32_classifiers_lose_less_than_a_hundredth():
    layer, x = (
        linear(randn(10, 50), randn(10, seed=1), torch.float32),
        randn(200, 50, seed=2).float(),
    )
    certificates = lipcert.certify(layer, x)
    w = layer.weight.double()
    logits = x.double() @ w.T + layer.bias.double()
    margins = logits.gather(1, certificates.prediction[:, None]) - logits
    ratios = margins / (w[certificates.prediction][:, None] - w[None]).norm(dim=2)
    exact = ratios.scatter(1, certificates.prediction[:, None], torch.inf).amin(1)
    assert (certificates.radius <= exact).all()
    assert (certificates.radius[exact > 0.01] >= 0.99 * exact[exact > 0.01]).all()


@pytest.mark.parametrize("target", ["network", "per-class", "last-layer", "pairwise"])
def test_every_target_gives_radii_and_pairwise_the_largest(target):
    model, shape = MODELS["two branches"]
    x = randn(20, *shape)
    network = traced(model, shape)
    pairwise = certifier_of(model, shape).certify(x)
    other = Certifier(network, bounded(model, shape, target=target)).certify(x)
    assert torch.equal(other.prediction, pairwise.prediction)
    assert (other.radius > 0).all()
    assert (other.radius <= pairwise.radius * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", ["chain", "densely connected", "purely linear"])
def test_tensor_loader_and_batch_sizes_agree(name):
    model, shape = MODELS[name]
    model = gaussian(model).float()
    x, labels = randn(23, *shape).float(), torch.arange(23) % 3
    bound = bounded(model, shape)
    whole = lipcert.certify(model, x, bound, labels=labels)
    assert torch.equal(whole.prediction, model(x).argmax(1))
    assert whole.radius.dtype == torch.float64
    pairs = [(x[k : k + 5], labels[k : k + 5]) for k in range(0, 23, 5)]
    others = [
        lipcert.certify(model, x, bound, labels=labels, batch_size=1),
        lipcert.certify(model, x, labels=labels, batch_size=7),
        lipcert.certify(model, pairs, bound),
        lipcert.certify(model, (pair for pair in pairs)),
    ]
    for other in others:
        assert torch.equal(other.prediction, whole.prediction)
        assert torch.equal(other.label, labels)
        torch.testing.assert_close(other.radius, whole.radius, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(other.margin, whole.margin, rtol=1e-4, atol=1e-6)
        assert other.clean_accuracy == whole.clean_accuracy
    unlabelled = lipcert.certify(model, [x[:4], x[4:]], bound)
    assert unlabelled.label is None
    assert len(unlabelled) == 23


def test_ties_certify_nothing():
    layer = linear(
        torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]),
        torch.zeros(3),
        torch.float64,
    )
    certificate = lipcert.certify(
        layer, torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    )
    assert certificate.radius.tolist() == [0.0]
    assert certificate.margin.tolist() == [0.0]


def test_margins_within_the_rounding_errors_certify_nothing():
    layer = linear(
        torch.tensor([[1.0, 1e4], [1.0 + 1e-6, 1e4]]), torch.zeros(2), torch.float32
    )
    certificate = lipcert.certify(layer, torch.tensor([[-1.0, 1.0]]))
    assert certificate.radius.tolist() == [0.0]


def test_accuracies():
    prediction, label = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, 2, 2])
    radius = torch.tensor([0.5, 1.0, 0.0, 2.0], dtype=torch.float64)
    certificates = lipcert.Certificates(
        prediction, radius, radius, "deterministic", label
    )
    assert certificates.correct.tolist() == [True, True, True, False]
    assert certificates.clean_accuracy == 0.75
    assert certificates.certified_accuracy(0.75) == 0.25
    assert certificates.certified_accuracy(1) == 0.25
    assert certificates.certified_accuracies([0.5, 0.75, 1.5]) == [0.5, 0.25, 0.0]
    assert (
        repr(certificates)
        == "Certificates(4 inputs, median radius 0.5, clean accuracy 75.00%, deterministic)"
    )


def test_the_guarantee_of_the_bound_is_passed_on():
    model = dense_chain(3, 4, 2)
    bound = lipcert.bound(model, (3,), options=NormOptions(dense_limit=0))
    assert (
        lipcert.certify(model, randn(2, 3), bound).guarantee
        == "holds with probability ≥ 1 − 1e-09"
    )


def test_progress_is_reported():
    seen = []
    lipcert.certify(
        dense_chain(3, 4, 2),
        randn(10, 3),
        batch_size=4,
        progress=lambda *report: seen.append(report),
    )
    assert [fraction for what, fraction in seen if what == "certifying"] == [
        1 / 3,
        2 / 3,
        1.0,
    ]
