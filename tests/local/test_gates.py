"""Products of branches, LayerNorm and attention: refused globally, bounded over balls."""

from math import inf

import pytest
import torch
from test_certify_local import check_attacks
from test_deviations import check_intervals
from torch import Tensor, nn

import lipcert
from lipcert.errors import UnsupportedError
from lipcert.local.certify_local import LocalCertifier
from lipcert.network.rewrites import liplt_lines
from models import Op


class Squeeze(nn.Module):
    """A block of MobileNetV3: expansion, depthwise convolution, squeeze-and-excitation, projection, with a skip."""

    def __init__(self, channels: int, wide: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
        )
        self.depth = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(wide, 4, 1),
            nn.ReLU(),
            nn.Conv2d(4, wide, 1),
            nn.Hardsigmoid(),
        )
        self.project = nn.Conv2d(wide, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        return x + self.project(y * self.gate(y))


class Encoder(nn.Module):
    """A pre-norm transformer layer with attention written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = self.split(self.q(y)), self.split(self.k(y)), self.split(self.v(y))
        scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
        x = x + self.out((scores.softmax(3) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


def mobile() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Hardswish())
    return nn.Sequential(
        stem, Squeeze(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )


def vit() -> nn.Module:
    patches = nn.Sequential(nn.Conv2d(1, 16, 4, stride=4), nn.Flatten(2))
    return nn.Sequential(
        patches,
        Op(lambda m, x: x.transpose(1, 2)),
        Encoder(16, 2),
        nn.LayerNorm(16),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


GATED = {
    "gate": (
        Op(
            lambda m, x: m.c(m.a(x) * torch.sigmoid(m.b(x))),
            a=nn.Linear(6, 5),
            b=nn.Linear(6, 5),
            c=nn.Linear(5, 3),
        ),
        (6,),
    ),
    "square": (
        Op(lambda m, x: m.b(m.a(x) * m.a(x)), a=nn.Linear(6, 5), b=nn.Linear(5, 3)),
        (6,),
    ),
    "layer norm": (
        nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)),
        (6,),
    ),
    "plain layer norm": (
        nn.Sequential(nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3)),
        (6,),
    ),
    "softmax": (nn.Sequential(nn.Linear(6, 8), nn.Softmax(1), nn.Linear(8, 3)), (6,)),
    "encoder": (nn.Sequential(Encoder(4, 2), nn.Flatten(), nn.Linear(12, 3)), (3, 4)),
    "mobile": (mobile(), (1, 8, 8)),
    "vit": (vit(), (1, 8, 8)),
}


@pytest.mark.parametrize("norm", [2, inf])
@pytest.mark.parametrize("name", GATED)
def test_executed_values_stay_inside_intervals(name, norm):
    model, shape = GATED[name]
    check_intervals(model.float().eval(), shape, norm)
    if name in ("gate", "layer norm", "encoder"):
        check_intervals(model.double(), shape, norm)
        model.float()


@pytest.mark.parametrize("name", GATED)
def test_attacks_find_nothing_inside_the_radii(name):
    model, shape = GATED[name]
    assert (check_attacks(model.float().eval(), shape, count=2) > 0).any()


@pytest.mark.parametrize("name", ["gate", "layer norm", "encoder", "mobile"])
def test_the_global_refusal_says_that_local_certificates_exist(name):
    model, shape = GATED[name]
    with pytest.raises(UnsupportedError, match="certify_local"):
        lipcert.bound(model.float().eval(), shape)


def test_what_is_bounded_locally_cannot_be_bounded_globally():
    model, shape = GATED["gate"]
    network = LocalCertifier(model.float().eval(), shape).network
    with pytest.raises(UnsupportedError, match="no global constant"):
        network.sites[2].slope.lipschitz()
    with pytest.raises(UnsupportedError, match="no global constant"):
        liplt_lines(network)


def trained(model: nn.Module) -> nn.Module:
    """On the embedded digits, for a few seconds."""
    data = lipcert.data.load("digits")
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    x, y = data.train.pixels(slice(None)), data.train.labels
    for _ in range(10):
        for index in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
    return model.eval()


@pytest.mark.parametrize("make", [mobile, vit])
def test_trained_on_digits_they_get_radii_that_are_not_zero(make):
    torch.manual_seed(0)
    model = trained(make())
    test = lipcert.data.load("digits").test
    certificates = lipcert.certify_local(
        model, test.pixels(slice(0, 12)), 0.003, labels=test.labels[:12]
    )
    assert certificates.clean_accuracy > 0.5
    assert float((certificates.radius >= 0.003).double().mean()) > 0.5
