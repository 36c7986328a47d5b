"""Bounds belong to one model, and are kept in two files without code."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lipcert
from lipcert.bounds.fingerprint import fingerprint
from lipcert.errors import BoundError
from models import Op, dense_chain, gaussian, named_models


def belongs(bound, model):
    """Whether the bound is accepted for the model; it is refused with the right words."""
    if bound.facts.fingerprint == fingerprint(model, lipcert.trace(model, bound.facts.input_shape)):
        bound.check_belongs(model)
        return True
    with pytest.raises(BoundError, match="made for other weights: the model has changed since; compute it again"):
        bound.check_belongs(model)
    return False


@pytest.mark.parametrize("name", named_models())
def test_round_trip(name, tmp_path):
    model, shape = named_models()[name]
    bound = lipcert.bound(model, shape)
    bound.save(tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "b.safetensors"]
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
    assert facts["fingerprint"] == fingerprint(model, lipcert.trace(model, (4,)))


def test_an_interrupted_save_leaves_the_old_files(tmp_path, monkeypatch):
    old, new = (lipcert.bound(dense_chain(4, 5, 3, seed=seed), (4,)) for seed in (0, 1))
    old.save(tmp_path / "b")
    monkeypatch.setattr("lipcert.bounds.bound.save_file", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        new.save(tmp_path / "b")
    assert torch.equal(lipcert.Bound.load(tmp_path / "b").value, old.value)
    assert len(list(tmp_path.iterdir())) == 2


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without(key):
    def damage(path):
        facts = json.loads(path.read_text())
        del facts[key]
        path.write_text(json.dumps(facts))

    return damage


DAMAGE = {
    "json cut": ("b.json", truncate, "is damaged"),
    "json binary": ("b.json", lambda p: p.write_bytes(b"\xff\xfe\x00"), "is damaged"),
    "json list": ("b.json", lambda p: p.write_text("[1]"), "is damaged"),
    "json without sites": ("b.json", without("sites"), "is damaged .'sites'"),
    "json of another format": ("b.json", without("format"), "do not belong together"),
    "numbers cut": ("b.safetensors", truncate, "is damaged"),
    "numbers missing": ("b.safetensors", lambda p: save_file({"tails": torch.zeros(1)}, p), "is damaged"),
    "json gone": ("b.json", lambda p: p.unlink(), r"b\.json does not exist; a bound is a .json and a .safetensors"),
    "numbers gone": ("b.safetensors", lambda p: p.unlink(), r"b\.safetensors does not exist"),
    "numbers of another": ("b.safetensors", lambda p: save_file(load_file(p), p), "do not belong together"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files(name, tmp_path):
    lipcert.bound(dense_chain(4, 5, 3), (4,)).save(tmp_path / "b")
    file, damage, message = DAMAGE[name]
    damage(tmp_path / file)
    with pytest.raises(BoundError, match=message):
        lipcert.Bound.load(tmp_path / "b")


def test_changed_weights_and_buffers_are_refused():
    model = gaussian(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)))
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
    return nn.Sequential(nn.Conv2d(2, 2, 3, **options), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2))


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


def test_a_bound_of_the_same_weights_in_another_type_names_the_type():
    model = dense_chain(3, 4, 2).float()
    bound = lipcert.bound(model, (3,))
    with pytest.raises(BoundError, match=r"made for other weights: the model was in torch.float32 then"):
        bound.check_belongs(model.double())


SAME_WEIGHTS = {
    "slope": (lambda: nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.1)), nn.LeakyReLU(0.2), (3,)),
    "activation": (lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.GELU(), (3,)),
    "dilation": (lambda: conv(padding=1), conv(padding=2, dilation=2), (2, 3, 3)),
    "padding mode": (
        lambda: conv(padding=1, padding_mode="circular"),
        conv(padding=1, padding_mode="reflect"),
        (2, 3, 3),
    ),
    "constant factor": (lambda: Op(lambda m, x: 2 * m.a(x), a=nn.Linear(3, 3)), lambda m, x: 3 * m.a(x), (3,)),
    "mean or sum": (lambda: Op(lambda m, x: x.mean(2)), lambda m, x: x.sum(2), (3, 2)),
    "eps": (lambda: nn.Sequential(nn.BatchNorm1d(3, eps=1e-5)), nn.BatchNorm1d(3, eps=1e-7), (3,)),
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
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert not belongs(lipcert.bound(model, shape), other)
