"""Layers with constants known by construction."""

import pytest
import torch
from torch import nn

import lipcert
from lipcert.errors import OptionError, ShapeError
from lipcert.layers import GroupSort, MaxMin, Normalize, Shift
from lipcert.network import slopes


@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 3, 2)])
def test_group_sort_sorts_channels_within_groups(shape):
    x = torch.randn(5, *shape, dtype=torch.float64)
    y = GroupSort(3)(x)
    assert y.shape == x.shape
    assert torch.equal(y[:, :3], x[:, :3].sort(dim=1).values)
    assert torch.equal(y[:, 3:], x[:, 3:].sort(dim=1).values)


def test_max_min_is_group_sort_of_two():
    x = torch.tensor([[3.0, 1.0, -2.0, 5.0]])
    assert MaxMin()(x).tolist() == [[1.0, 3.0, -2.0, 5.0]]


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_group_sort_does_not_increase_distances(order):
    a, b = torch.randn(2, 500, 8, dtype=torch.float64)
    moved = torch.linalg.vector_norm(
        GroupSort(4)(a) - GroupSort(4)(b), ord=order, dim=1
    )
    assert (
        moved <= torch.linalg.vector_norm(a - b, ord=order, dim=1) * (1 + 1e-12)
    ).all()


def test_networks_with_max_min_are_traced_bounded_and_certified():
    model = nn.Sequential(
        nn.Linear(10, 8), MaxMin(), nn.Linear(8, 8), GroupSort(4), nn.Linear(8, 3)
    ).eval()
    network = lipcert.trace(model, (10,))
    assert [site.slope for site in network.sites[1:-1]] == 2 * [
        slopes.lipschitz_map(1.0, group=1, monotone=True)
    ]
    bound = lipcert.bound(model, (10,), target="network")
    product = torch.stack(
        [
            torch.linalg.matrix_norm(layer.weight.detach().double(), 2)
            for layer in model[::2]
        ]
    ).prod()
    assert float(bound.value) == pytest.approx(float(product), rel=1e-6)
    radii = lipcert.certify(model, torch.rand(50, 10)).radius
    assert (radii > 0).any()


def test_channels_that_do_not_divide_are_refused():
    with pytest.raises(ShapeError, match="does not accept inputs of shape"):
        lipcert.trace(nn.Sequential(nn.Linear(4, 5), MaxMin(), nn.Linear(5, 2)), (4,))


def test_normalisation_inside_the_model_keeps_radii_in_input_units():
    inner = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double().eval()
    model = nn.Sequential(
        Normalize([0.5, 0.5, 0.5], [0.25, 0.5, 1.0]).double(), inner
    ).eval()
    weight = inner[1].weight.reshape(3, 3, 4) / model[0].std.reshape(1, 3, 1)
    expected = torch.cdist(weight.reshape(3, -1), weight.reshape(3, -1))
    assert torch.allclose(lipcert.bound(model, (3, 2, 2)).value, expected, rtol=1e-6)


@pytest.mark.parametrize(("mean", "std"), [([0.5], [0.0]), ([0.5, 0.5], [1.0])])
def test_bad_options_are_refused(mean, std):
    with pytest.raises(OptionError, match="one entry per channel"):
        Normalize(mean, std)
    with pytest.raises(OptionError, match="size is 0"):
        GroupSort(0)


def test_shift_moves_every_other_channel_by_a_pixel():
    x = torch.rand(2, 8, 4, 5)
    y = Shift(8)(x)
    assert torch.equal(y[:, 0::2], x[:, 0::2])
    assert torch.equal(y[:, 1, 1:], x[:, 1, :-1])
    assert torch.equal(y[:, 3, :-1], x[:, 3, 1:])
    assert torch.equal(y[:, 5, :, 1:], x[:, 5, :, :-1])
    assert torch.equal(y[:, 7, :, :-1], x[:, 7, :, 1:])
    for border in (y[:, 1, 0], y[:, 3, -1], y[:, 5, :, 0], y[:, 7, :, -1]):
        assert (border == 0).all()
    assert not Shift(8).state_dict()
