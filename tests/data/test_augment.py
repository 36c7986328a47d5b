"""Augmentation: what moves, how far, and that it can be repeated."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lipcert.data import Augmentation
from lipcert.errors import OptionError, ShapeError


def images(count: int = 4, channels: int = 3, size: int = 12) -> Tensor:
    return torch.rand(
        count, channels, size, size, generator=torch.Generator().manual_seed(0)
    )


@given(
    degrees=st.floats(0, 180),
    translate=st.floats(0, 1),
    flip=st.booleans(),
    further=st.tuples(*3 * [st.floats(0, 1)]),
    channels=st.sampled_from([1, 3]),
)
def test_shape_dtype_and_range_stay(
    degrees: float,
    translate: float,
    flip: bool,
    further: tuple[float, float, float],
    channels: int,
) -> None:
    x = images(channels=channels)
    ratios = dict(zip(("zoom", "colour", "erase"), further, strict=True))
    y = Augmentation(degrees, translate, flip, **ratios)(x)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert bool(((y >= 0) & (y <= 1 + 1e-6)).all())


def test_nothing_to_do_is_the_identity_and_draws_nothing() -> None:
    x, state = images(), torch.get_rng_state()
    assert Augmentation(0, 0)(x) is x
    assert torch.equal(torch.get_rng_state(), state)


def test_repeatable_from_torchs_generator_and_from_a_given_one() -> None:
    move, x = Augmentation(20, 0.2, flip=True), images()
    torch.manual_seed(5)
    first = move(x)
    second = move(x)
    torch.manual_seed(5)
    assert torch.equal(move(x), first)
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    given_one = move(x, torch.Generator().manual_seed(7))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(move(x, generator), given_one)
    assert not torch.equal(move(x, generator), given_one)


def test_every_image_moves_on_its_own_in_training_and_eval_mode() -> None:
    x = images(1).expand(6, -1, -1, -1)
    for move in (Augmentation(20, 0.2), Augmentation(20, 0.2).eval()):
        y = move(x)
        assert all(not torch.equal(y[i], x[i]) for i in range(6))
        assert all(not torch.equal(y[i], y[j]) for i in range(6) for j in range(i))


def centres(x: Tensor) -> Tensor:
    """(B, 2): the centre of mass of each image in pixels, right and down from the middle."""
    axis = torch.arange(x.shape[-1]) - (x.shape[-1] - 1) / 2
    mass = x.sum((1, 2, 3))
    return torch.stack(
        [(x.sum((1, 2)) * axis).sum(1) / mass, (x.sum((1, 3)) * axis).sum(1) / mass], 1
    )


def test_translations_reach_the_ratio_and_not_further() -> None:
    x = torch.zeros(400, 1, 41, 41)
    x[:, :, 18:23, 18:23] = 1
    shift = centres(Augmentation(0, 0.2)(x))
    assert bool((shift.abs() <= 0.2 * 41 + 0.6).all())
    assert bool((shift.abs().amax(0) > 0.17 * 41).all())
    assert bool((shift.mean(0).abs() < 1).all())


def test_rotations_reach_the_angle_and_not_further() -> None:
    x = torch.zeros(400, 1, 41, 41)
    x[:, :, 19:22, 34:37] = 1  # 15 pixels to the right of the middle
    centre = centres(Augmentation(30, 0)(x))
    angle = torch.rad2deg(torch.atan2(centre[:, 1], centre[:, 0]))
    assert bool((angle.abs() <= 30 + 3).all())
    assert angle.max() > 26
    assert angle.min() < -26
    torch.testing.assert_close(
        centre.norm(dim=1), torch.full((400,), 15.0), atol=0.6, rtol=0
    )


def test_what_comes_in_is_black_and_nearest_makes_no_new_values() -> None:
    x = torch.full((8, 1, 16, 16), 0.75)
    assert Augmentation(45, 0.3)(x).unique().tolist() == [0.0, 0.75]


def test_flips_mirror_about_half_of_the_images_and_are_off_by_default() -> None:
    x = images(1).expand(200, -1, -1, -1)
    y = Augmentation(0, 0, flip=True)(x)
    mirrored = (y == x.flip(3)).flatten(1).all(1)
    kept = (y == x).flatten(1).all(1)
    assert bool((mirrored | kept).all())
    assert 60 < int(mirrored.sum()) < 140
    assert (
        repr(Augmentation(5, 0.1))
        == "Augmentation(degrees=5, translate=0.1, flip=False)"
    )


def test_moving_to_a_device_or_dtype_does_not_move_the_random_numbers() -> None:
    x = images()
    torch.manual_seed(1)
    expected = Augmentation(20, 0.2)(x)
    torch.manual_seed(1)
    torch.testing.assert_close(
        Augmentation(20, 0.2).double()(x.double()).float(), expected
    )
    assert list(Augmentation(20, 0.2, flip=True).state_dict()) == []


def test_the_last_batch_may_be_of_one_and_an_empty_one_stays_empty() -> None:
    assert Augmentation(20, 0.2)(images(1)).shape == (1, 3, 12, 12)
    assert Augmentation(20, 0.2)(images(0)).shape == (0, 3, 12, 12)


@pytest.mark.parametrize(
    ("degrees", "translate", "message"),
    [
        (-1, 0, "degrees is -1, expected a number from 0 to 180"),
        (inf, 0, "degrees is inf, expected"),
        (nan, 0, "degrees is nan, expected"),
        (0, 1.5, "translate is 1.5, expected a ratio from 0 to 1"),
        (0, nan, "translate is nan, expected a ratio from 0 to 1"),
    ],
)
def test_bad_options(degrees: float, translate: float, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Augmentation(degrees, translate)


@pytest.mark.parametrize("name", ["zoom", "colour", "erase"])
def test_bad_ratios(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} is -0.1, expected a ratio"):
        Augmentation(0, 0, **{name: -0.1})


def test_a_zoomed_square_is_larger_or_smaller_by_up_to_the_ratio() -> None:
    x = torch.zeros(200, 1, 40, 40)
    x[:, :, 10:30, 10:30] = 1
    torch.manual_seed(0)
    sides = Augmentation(0, 0, zoom=0.2)(x).sum((1, 2, 3)).sqrt()
    assert 15.9 < sides.min() < 16.5
    assert 23.5 < sides.max() < 24.1


def test_colours_change_by_up_to_the_ratio_each_and_differ_by_image() -> None:
    torch.manual_seed(0)
    change = Augmentation(0, 0, colour=0.2)
    # A plain grey image has neither contrast nor saturation: brightness is left.
    grey = change(torch.full((200, 3, 4, 4), 0.5))
    assert torch.allclose(grey, grey[:, :1, :1, :1].expand_as(grey), atol=1e-6)
    means = grey.mean((1, 2, 3))
    assert 0.4 <= means.min() < 0.41
    assert 0.59 < means.max() <= 0.6
    # Two greys of equal number: the distance is that of brightness times contrast.
    x = torch.full((200, 3, 4, 4), 0.4)
    x[..., 2:] = 0.6
    y = change(x)
    distance = (y[:, 0, 0, 3] - y[:, 0, 0, 0]) / y.mean((1, 2, 3)) / 0.4
    assert 0.8 <= distance.min() < 0.82
    assert 1.18 < distance.max() <= 1.2 + 1e-6


def test_one_grey_square_is_erased() -> None:
    torch.manual_seed(0)
    x = torch.ones(300, 3, 16, 16)
    erased = Augmentation(0, 0, erase=0.25)(x) == 0.5
    assert torch.equal(erased[:, 0], erased[:, 2])
    rows, columns = erased[:, 0].any(2).sum(1), erased[:, 0].any(1).sum(1)
    assert torch.equal(erased[:, 0].sum((1, 2)), rows * columns)
    # 4 pixels, fewer at the border; everywhere in the image.
    assert set(rows.tolist()) == {2, 3, 4}
    assert bool(erased.any(0).all())


def test_bad_images() -> None:
    with pytest.raises(
        ShapeError,
        match=r"images: expected floating-point \(B, C, H, W\), got torch.uint8",
    ):
        Augmentation(1, 0)(images().to(torch.uint8))
    with pytest.raises(ShapeError, match=r"images: expected .*\(3, 12, 12\)"):
        Augmentation(1, 0)(images()[0])
