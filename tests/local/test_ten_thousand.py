"""Ordinary networks on the embedded digits, attacked at their local radii; ten thousand pairs in the full run."""

import os

import pytest
import torch
from torch import Tensor, nn

import lipcert
from lipcert.attacks import minimum_norm, pgd


def trained_digits(activation: type[nn.Module], seed: int) -> nn.Module:
    """An ordinary network for the embedded digits."""
    torch.manual_seed(seed)
    data = lipcert.data.load("digits")
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 40),
        activation(),
        nn.Linear(40, 40),
        activation(),
        nn.Linear(40, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    x, y = data.train.pixels(slice(None)), data.train.labels
    for _ in range(15):
        for index in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
    return model.eval()


def check_withstands(model: nn.Module, count: int) -> None:
    """Neither the closest input of another class that is found, nor PGD at each radius, is inside of a radius."""
    x = lipcert.data.load("digits").test.pixels(slice(0, count))
    certificates = lipcert.certify_local(model, x, batch_size=160)
    assert float(certificates.radius.median()) > 0.02
    for pixels in ((0.0, 1.0), (-4.0, 5.0)):
        found = minimum_norm(model, x, certificates.prediction, steps=60, pixels=pixels)
        assert (found.distance >= certificates.radius).all()
    for share in (0.999, 1.01):
        for radius, index in group_by_radius(certificates.radius):
            found = pgd(
                model,
                x[index],
                certificates.prediction[index],
                share * radius,
                steps=20,
            )
            assert (found.distance >= certificates.radius[index]).all()


def group_by_radius(radius: Tensor) -> list[tuple[float, Tensor]]:
    """Inputs of about the same radius, with the smallest of them."""
    order = radius.argsort()
    return [
        (float(radius[index[0]]), index)
        for index in order.split(20)
        if float(radius[index[0]]) > 0
    ]


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_some_pairs_withstand_ddn_and_pgd(activation):
    check_withstands(trained_digits(activation, 0), 40)


@pytest.mark.full
@pytest.mark.skipif(
    os.environ.get("LIPCERT_FULL") != "1",
    reason="ten thousand pairs of a network and an input",
)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid])
def test_ten_thousand_pairs_withstand_ddn_and_pgd(activation, seed):
    """32 networks with 320 inputs each."""
    check_withstands(trained_digits(activation, seed), 320)
