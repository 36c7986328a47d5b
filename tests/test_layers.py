"""Layers with constants known by construction."""

import pytest
import torch
from torch import nn

import lipcert
from lipcert.errors import OptionError, ShapeError
from lipcert.layers import GroupSort, MaxMin, Mirrored, Normalize, Patches, Shift
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
    with pytest.raises(OptionError, match="size is 0"):
        Patches(0)


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


def test_patches_are_the_pixels_of_pixel_unshuffle_in_another_order():
    x = torch.randn(2, 3, 8, 12)
    # Channels (patch row, patch column, colour) instead of (colour, row, column).
    expected = nn.functional.pixel_unshuffle(x, 4).unflatten(1, (3, 16))
    assert torch.equal(Patches(4)(x), expected.transpose(1, 2).flatten(1, 2))


@pytest.mark.parametrize("size", [1, 2])
def test_patches_keep_channels_last(size):
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert Patches(size)(x).is_contiguous(memory_format=torch.channels_last)


def test_mirrored_is_the_mean_in_eval_mode_and_the_model_in_training():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    both, x = Mirrored(model).double(), torch.randn(4, 1, 5, 8, dtype=torch.float64)
    assert torch.equal(both.train()(x), model(x))
    assert torch.equal(both.eval()(x), (model(x) + model(x.flip(-1))) / 2)
    assert torch.allclose(both(x), both(x.flip(-1)), rtol=1e-12)


def test_mirrored_has_the_constants_of_its_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    model = model.double().eval()
    alone = lipcert.bound(model, (3, 2, 2)).value
    both = lipcert.bound(Mirrored(model).eval(), (3, 2, 2)).value
    assert (both <= alone * (1 + 1e-6)).all()
