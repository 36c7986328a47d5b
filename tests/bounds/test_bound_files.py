"""Bounds belong to one model, and are kept in two files without code."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lipcert
from lipcert.bounds.bound_files import checksum
from lipcert.bounds.fingerprint import fingerprint
from lipcert.bounds.fit import FitOptions
from lipcert.errors import BoundError
from models import Op, dense_chain, gaussian, named_models

OTHER = (
    r"made for other weights or another program: the model has changed since, .*; "
    r"compute it again with lipcert\.bound"
)


def belongs(bound, model):
    """Whether the bound is accepted for the model; it is refused with the right words."""
    network = lipcert.trace(model, bound.facts.input_shape)
    if bound.facts.fingerprint == fingerprint(network):
        bound.check_belongs(model)
        assert bound.belongs_to(network)
        return True
    assert not bound.belongs_to(network)
    with pytest.raises(BoundError, match=OTHER):
        bound.check_belongs(model)
    return False


@pytest.mark.parametrize("name", ["chain", "purely linear", "residual convolutions"])
def test_round_trip(name, tmp_path):
    model, shape = named_models()[name]
    bound = lipcert.bound(model, shape)
    bound.save(tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "b.json",
        "b.safetensors",
    ]
    for spelling in ("b", "b.json", "b.safetensors"):
        loaded = lipcert.Bound.load(tmp_path / spelling)
        assert loaded.facts == bound.facts
        assert loaded.contributions == bound.contributions
        for numbers in ("tails", "between", "shares"):
            assert torch.equal(getattr(loaded, numbers), getattr(bound, numbers))
    loaded.check_belongs(model)


def test_the_facts_are_readable(tmp_path):
    bound = lipcert.bound(dense_chain(4, 5, 3), (4,))
    bound.save(tmp_path / "deep" / "b.json")
    facts = json.loads((tmp_path / "deep" / "b.json").read_text())
    assert facts["guarantee"] == "deterministic"
    assert facts["contributions"] == bound.contributions
    model = dense_chain(4, 5, 3)
    assert facts["fingerprint"] == fingerprint(lipcert.trace(model, (4,)))


def test_an_interrupted_save_leaves_the_old_files(tmp_path, monkeypatch):
    old, new = (lipcert.bound(dense_chain(4, 5, 3, seed=seed), (4,)) for seed in (0, 1))
    old.save(tmp_path / "b")

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("lipcert.bounds.bound_files.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        new.save(tmp_path / "b")
    assert torch.equal(lipcert.Bound.load(tmp_path / "b").value, old.value)
    assert len(list(tmp_path.iterdir())) == 2


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def in_json(**changes):
    """Facts that are replaced, or removed where the new value is None."""

    def edit(path):
        facts = json.loads(path.read_text()) | changes
        path.write_text(
            json.dumps(
                {name: value for name, value in facts.items() if value is not None}
            )
        )

    return edit


def in_numbers(change):
    def edit(path):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return edit


def scaled(name, factor):
    return in_numbers(lambda tensors: tensors[name].mul_(factor))


def other_shape(tensors):
    tensors["tails"] = torch.ones(2, 2, 2, dtype=torch.float64)


def other_view(tensors):
    tensors["between"] = tensors["between"].reshape(1, -1)


def other_type(tensors):
    tensors["shares"] = tensors["shares"].view(torch.int64)


def renamed_scales(tensors):
    tensors["scales of other"] = tensors.pop("scales of 1")


EDITED = r"the bound .*b was edited or is damaged; compute it again with lipcert\.bound"
EARLIER = r"the bound .*b was written by another version of lipcert \(format {}, expected 3\); compute it again with"
DAMAGE = {
    "json cut": ("b.json", truncate, "is damaged"),
    "json binary": ("b.json", lambda p: p.write_bytes(b"\xff\xfe\x00"), "is damaged"),
    "json list": (
        "b.json",
        lambda p: p.write_text("[1]"),
        "is damaged .expected a JSON object",
    ),
    "json without sites": ("b.json", in_json(sites=None), EDITED),
    "json without checksum": ("b.json", in_json(checksum=None), EDITED),
    "json without format": ("b.json", in_json(format=None), EARLIER.format("None")),
    "json of the format before": (
        "b.json",
        in_json(format=2, checksum=None),
        EARLIER.format(2),
    ),
    "another guarantee": ("b.json", in_json(guarantee="proved"), EDITED),
    "another fingerprint": ("b.json", in_json(fingerprint="0"), EDITED),
    "other contributions": ("b.json", in_json(contributions={"input": 1.0}), EDITED),
    "one more fact": ("b.json", in_json(note="checked"), EDITED),
    "numbers cut": ("b.safetensors", truncate, "is damaged"),
    "numbers missing": (
        "b.safetensors",
        lambda p: save_file({"tails": torch.zeros(1)}, p),
        EDITED,
    ),
    "one more tensor": (
        "b.safetensors",
        in_numbers(lambda t: t.update(more=torch.zeros(1))),
        EDITED,
    ),
    "smaller tails": ("b.safetensors", scaled("tails", 1e-3), EDITED),
    "negative tails": ("b.safetensors", scaled("tails", -1), EDITED),
    "tails of another shape": ("b.safetensors", in_numbers(other_shape), EDITED),
    "same bytes of another shape": ("b.safetensors", in_numbers(other_view), EDITED),
    "same bytes of another type": ("b.safetensors", in_numbers(other_type), EDITED),
    "smaller between": ("b.safetensors", scaled("between", 0.5), EDITED),
    "smaller shares": ("b.safetensors", scaled("shares", 0.5), EDITED),
    "other scales": ("b.safetensors", scaled("scales of 1", 2), EDITED),
    "renamed scales": ("b.safetensors", in_numbers(renamed_scales), EDITED),
    "json gone": (
        "b.json",
        lambda p: p.unlink(),
        r"b\.json does not exist; a bound is a .json and a .safetensors",
    ),
    "numbers gone": (
        "b.safetensors",
        lambda p: p.unlink(),
        r"b\.safetensors does not exist",
    ),
}


@pytest.fixture(scope="module")
def rescaled():
    return lipcert.bound(
        dense_chain(4, 5, 3), (4,), "rescaled", fit=FitOptions(steps=1)
    )


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_and_edited_files(rescaled, name, tmp_path):
    rescaled.save(tmp_path / "b")
    file, damage, message = DAMAGE[name]
    damage(tmp_path / file)
    with pytest.raises(BoundError, match=message):
        lipcert.Bound.load(tmp_path / "b")
    assert lipcert.Bound.find(tmp_path / "b") is None


def test_the_files_of_two_bounds_do_not_mix(rescaled, tmp_path):
    rescaled.save(tmp_path / "b")
    replace(rescaled, tails=0.5 * rescaled.tails).save(tmp_path / "other")
    (tmp_path / "other.safetensors").replace(tmp_path / "b.safetensors")
    with pytest.raises(BoundError, match=EDITED):
        lipcert.Bound.load(tmp_path / "b")


def test_scales_are_kept(rescaled, tmp_path):
    rescaled.save(tmp_path / "b")
    loaded = lipcert.Bound.load(tmp_path / "b")
    assert list(loaded.scales) == list(rescaled.scales) == ["1"]
    assert torch.equal(loaded.scales["1"], rescaled.scales["1"])


def entry(tensor, value):
    """The tensor with another first entry."""
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


BAD = {
    "negative tails": (
        "tails",
        lambda t: -t,
        "the tails of the bound contain negative numbers; compute it again",
    ),
    "negative between": (
        "between",
        lambda t: entry(t, -1e-300),
        "the between of the bound contain negative numbers",
    ),
    "infinite tails": (
        "tails",
        lambda t: entry(t, torch.inf),
        "the tails of the bound contain NaN or infinity",
    ),
    "shares not a number": (
        "shares",
        lambda t: entry(t, torch.nan),
        "the shares of the bound contain NaN or infinity",
    ),
    "float32 tails": (
        "tails",
        lambda t: t.float(),
        r"the tails of the bound are torch.float32, expected torch.float64",
    ),
    "tails of other sites": (
        "tails",
        lambda t: t[:1],
        r"tails of the bound have the shape \(1, 3, 3\), which does not",
    ),
    "tails of other targets": (
        "tails",
        lambda t: t[..., 0],
        r"the shape \(2, 3\), .* 2 sites and the target pairwise",
    ),
    "tails that are not square": (
        "tails",
        lambda t: t[..., :2],
        r"the tails of the bound have the shape \(2, 3, 2\)",
    ),
    "between of other sites": (
        "between",
        lambda t: t[:1],
        r"the between of the bound have the shape \(1, 2\)",
    ),
    "shares of other sites": (
        "shares",
        lambda t: t[:1],
        r"the shares of the bound have the shape \(1,\)",
    ),
    "zero scales": (
        "scales",
        lambda s: {"1": entry(s["1"], 0)},
        "scales of 1 of the bound .* that are not positive",
    ),
    "infinite scales": (
        "scales",
        lambda s: {"1": entry(s["1"], torch.inf)},
        "scales of 1 of the bound contain NaN or",
    ),
    "float32 scales": (
        "scales",
        lambda s: {"1": s["1"].float()},
        "scales of 1 of the bound are torch.float32",
    ),
    "another target": (
        "facts",
        lambda f: replace(f, target="all"),
        "target of the bound is 'all', expected one of network, per-class, last-layer, pairwise",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_values_that_are_no_bound_are_refused(rescaled, name):
    part, change, message = BAD[name]
    with pytest.raises(BoundError, match=message):
        replace(rescaled, **{part: change(getattr(rescaled, part))})


def test_values_are_checked_even_if_the_checksum_is_right(rescaled, tmp_path):
    rescaled.save(tmp_path / "b")
    scaled("tails", -1)(tmp_path / "b.safetensors")
    facts = json.loads((tmp_path / "b.json").read_text())
    del facts["checksum"]
    facts["checksum"] = checksum(facts, load_file(tmp_path / "b.safetensors"))
    (tmp_path / "b.json").write_text(json.dumps(facts))
    with pytest.raises(
        BoundError, match="the tails of the bound contain negative numbers"
    ):
        lipcert.Bound.load(tmp_path / "b")


@pytest.mark.parametrize(("classes", "sites"), [(1, 2), (2, 2), (3, 1)])
def test_values_for_another_number_of_classes_or_sites_are_refused_with_the_model(
    rescaled, classes, sites
):
    smaller = replace(
        rescaled,
        facts=replace(rescaled.facts, sites=rescaled.facts.sites[:sites]),
        tails=rescaled.tails[:sites, :classes, :classes],
        between=rescaled.between[:sites, :sites],
        shares=rescaled.shares[:sites],
    )
    message = rf"tails of the bound have the shape \({sites}, {classes}, {classes}\), the model needs \(2, 3, 3\)"
    with pytest.raises(BoundError, match=message):
        smaller.check_belongs(dense_chain(4, 5, 3))


def test_constants_that_overflow_are_refused():
    model = dense_chain(*[4] * 13, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e30)
    with pytest.raises(
        BoundError,
        match="of the bound contain NaN or infinity: the weights are too large",
    ):
        lipcert.bound(model, (4,), "naive")


def test_changed_weights_and_buffers_are_refused():
    model = gaussian(
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
    )
    bound = lipcert.bound(model, (4,))
    assert belongs(bound, model)
    for tensor in (model[0].weight, model[3].bias, model[1].running_var):
        before = tensor.detach().clone()
        tensor.data.view(-1)[0] += 1e-12
        assert not belongs(bound, model)
        tensor.data.copy_(before)
    model[1].num_batches_tracked += 1  # a counter that changes nothing
    assert belongs(bound, model)
    assert not belongs(bound, model.float())


def conv(**options):
    return nn.Sequential(
        nn.Conv2d(2, 2, 3, **options), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2)
    )


def test_a_tensor_that_is_no_parameter_counts_too():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.scale = torch.ones(3, dtype=torch.float64)

        def forward(self, x):
            return super().forward(x * self.scale)

    model = gaussian(Scaled())
    bound = lipcert.bound(model, (3,))
    assert belongs(bound, model)
    model.scale *= 2
    assert not belongs(bound, model)


def test_a_bound_of_the_same_weights_in_another_type_is_refused():
    model = dense_chain(3, 4, 2).float()
    bound = lipcert.bound(model, (3,))
    with pytest.raises(
        BoundError,
        match=r"made for other weights or another program: .* or was in another dtype or mode",
    ):
        bound.check_belongs(model.double())


SAME_WEIGHTS = {
    "slope": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.1)),
        nn.LeakyReLU(0.2),
        (3,),
    ),
    "activation": (lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.GELU(), (3,)),
    "dilation": (lambda: conv(padding=1), conv(padding=2, dilation=2), (2, 3, 3)),
    "padding mode": (
        lambda: conv(padding=1, padding_mode="circular"),
        conv(padding=1, padding_mode="reflect"),
        (2, 3, 3),
    ),
    "constant factor": (
        lambda: Op(lambda m, x: 2 * m.a(x), a=nn.Linear(3, 3)),
        lambda m, x: 3 * m.a(x),
        (3,),
    ),
    "mean or sum": (lambda: Op(lambda m, x: x.mean(2)), lambda m, x: x.sum(2), (3, 2)),
    "eps": (
        lambda: nn.Sequential(nn.BatchNorm1d(3, eps=1e-5)),
        nn.BatchNorm1d(3, eps=1e-7),
        (3,),
    ),
}


@pytest.mark.parametrize("name", SAME_WEIGHTS)
def test_another_network_with_the_same_weights_is_refused(name):
    build, change, shape = SAME_WEIGHTS[name]
    model, other = gaussian(build()), gaussian(build())
    assert belongs(lipcert.bound(model, shape), other)
    if isinstance(change, nn.Sequential):
        other = gaussian(change)
    elif isinstance(change, nn.BatchNorm1d):
        other[0].eps = change.eps
    elif isinstance(change, nn.Module):
        other[1] = change
    else:
        other.function = change
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert not belongs(lipcert.bound(model, shape), other)
