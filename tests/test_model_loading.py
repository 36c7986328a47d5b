"""Models by name, factory, checkpoint or folder; and the messages when there is none."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import lipcert
from lipcert.bounds.bound import Bound
from lipcert.bounds.fit import FitOptions
from lipcert.bounds.stored import stored_bound
from lipcert.errors import LipcertError, ModelError
from lipcert.models import load_model, save_model, zoo
from models import dense_chain

SHAPE = (1, 12, 12)


@pytest.fixture
def checkpoint(tmp_path):
    model = zoo.build("4C3F", SHAPE, 5, seed=3)
    save_model(model, tmp_path / "model.safetensors", "4C3F", SHAPE, 5)
    return tmp_path / "model.safetensors", model


def same_weights(a, b):
    return all(
        torch.equal(x, y)
        for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def test_checkpoint_by_file_and_by_folder(checkpoint):
    path, model = checkpoint
    for spec in (str(path), str(path.parent)):
        loaded = load_model(spec)
        assert same_weights(loaded.model, model)
        assert loaded.input_shape == SHAPE
        assert not loaded.model.training
        assert loaded.name.endswith("model.safetensors")


def test_the_bound_beside_a_checkpoint_is_used_again(tmp_path):
    model = zoo.build("maxmin-512-512", (4,), 3, seed=0)
    save_model(model, tmp_path / "model.safetensors", "maxmin-512-512", (4,), 3)
    assert load_model(str(tmp_path)).earlier is None
    first = lipcert.bound(model, (4,), "rescaled", fit=FitOptions(steps=3, lr=0.1))
    first.save(tmp_path / "bound")
    loaded = load_model(str(tmp_path))
    network = lipcert.trace(loaded.model, (4,))
    same = stored_bound(
        loaded.model, network, tmp_path / "a", method="rescaled", earlier=loaded.earlier
    )
    assert same.facts == first.facts
    assert Bound.load(tmp_path / "a").facts == first.facts
    with torch.no_grad():
        loaded.model.get_parameter("1.weight").mul_(1.5)
    fit = FitOptions(steps=0, start=loaded.scales)
    other = stored_bound(
        loaded.model,
        network,
        tmp_path / "b",
        method="rescaled",
        fit=fit,
        earlier=loaded.earlier,
    )
    assert other.mean > 1.1 * first.mean
    assert all(
        torch.allclose(other.scales[name], first.scales[name]) for name in first.scales
    )
    (tmp_path / "bound.json").write_text("{")
    assert load_model(str(tmp_path)).earlier is None


def test_zoo_names_are_reproducible():
    first, second = (load_model("4C3F", input_shape=SHAPE, classes=3) for _ in range(2))
    assert same_weights(first.model, second.model)
    assert first.name == "4C3F"
    assert load_model("4C3F").input_shape == (1, 28, 28)


def test_zoo_name_with_weights(checkpoint):
    path, model = checkpoint
    loaded = load_model("4C3F", weights=path, input_shape=SHAPE, classes=5)
    assert same_weights(loaded.model, model)


def test_factories(tmp_path, monkeypatch):
    (tmp_path / "nets_for_loading.py").write_text(
        "from torch import nn\n"
        "def plain(): return nn.Linear(3, 2)\n"
        "def shaped():\n    model = nn.Linear(3, 2)\n    model.input_shape = (3,)\n    return model\n"
        "ready = nn.Linear(3, 2)\n"
        "def number(): return 7\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load_model("nets_for_loading:plain", input_shape=(3,)).input_shape == (3,)
    assert load_model("nets_for_loading:shaped").input_shape == (3,)
    assert isinstance(
        load_model("nets_for_loading:ready", input_shape=(3,)).model, nn.Linear
    )
    with pytest.raises(
        ModelError,
        match=r"input shape of nets_for_loading:plain is not known; give --input-shape",
    ):
        load_model("nets_for_loading:plain")
    with pytest.raises(
        ModelError,
        match=r"nets_for_loading:number returns int, expected a torch.nn.Module",
    ):
        load_model("nets_for_loading:number", input_shape=(3,))
    with pytest.raises(
        ModelError, match=r"nets_for_loading:missing cannot be imported"
    ):
        load_model("nets_for_loading:missing")
    with pytest.raises(
        ModelError,
        match=r"no_such_module:net cannot be imported .ModuleNotFoundError: No module named",
    ):
        load_model("no_such_module:net")


def test_factories_are_called_with_seed_0(tmp_path, monkeypatch):
    (tmp_path / "random_nets.py").write_text(
        "from torch import nn\ndef net(): return nn.Linear(3, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    state = torch.get_rng_state()
    first = load_model("random_nets:net", input_shape=(3,)).model
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert same_weights(first, load_model("random_nets:net", input_shape=(3,)).model)


def test_factories_that_fail(tmp_path, monkeypatch):
    (tmp_path / "failing_nets.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Linear(3, 1 // 0)\n"
    )
    (tmp_path / "unfinished_nets.py").write_text("\ndef net(:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ModelError,
        match=r"net fails .*ZeroDivisionError at .*failing_nets.py:3: integer division",
    ):
        load_model("failing_nets:net", input_shape=(3,))
    with pytest.raises(
        ModelError,
        match=r"net cannot be imported .SyntaxError at .*unfinished_nets.py:2: invalid",
    ):
        load_model("unfinished_nets:net", input_shape=(3,))
    with pytest.raises(
        ModelError,
        match=r"Linear fails when it is called without arguments .TypeError: Linear.__init__",
    ):
        load_model("torch.nn:Linear", input_shape=(3,))


def test_names_that_are_no_model(tmp_path):
    with pytest.raises(
        ModelError,
        match=r"'4C3FF' is not a model: no .safetensors.*; did you mean '4C3F'\?",
    ):
        load_model("4C3FF")
    with pytest.raises(
        ModelError, match=r"runs/nope' is not a model: this folder does not exist"
    ):
        load_model(str(tmp_path / "runs/nope"))
    with pytest.raises(
        ModelError,
        match=r"w.pt holds weights only; give their model as module:factory and --weights w.pt",
    ):
        load_model("w.pt")


def test_a_run_that_is_not_finished(tmp_path):
    (tmp_path / "config.toml").touch()
    with pytest.raises(
        ModelError, match=r"is not finished; continue it with lipcert train --resume "
    ):
        load_model(str(tmp_path))


def test_shapes_that_do_not_fit_the_model(checkpoint):
    path, _ = checkpoint
    assert load_model(str(path), input_shape=SHAPE).input_shape == SHAPE
    with pytest.raises(
        ModelError, match=r"is for inputs of shape \(1, 12, 12\), not \(3, 9, 9\)"
    ):
        load_model(str(path), input_shape=(3, 9, 9))
    with pytest.raises(
        ModelError, match=r"4C3F cannot be built for inputs of shape \(28,\)"
    ):
        load_model("4C3F", input_shape=(28,))


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
@pytest.mark.parametrize("key", [None, "state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "_orig_mod.module.", "model."]
)
def test_weights_of_pytorch(tmp_path, suffix, key, prefix):
    model = zoo.build("mlp-64", (4,), 3, seed=5)
    stored = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    if key is not None:
        stored = {
            key: stored,
            "epoch": 3,
            "optimizer_state_dict": {"state": {}, "param_groups": [{"lr": 0.1}]},
        }
    torch.save(stored, tmp_path / f"w{suffix}")
    assert same_weights(
        load_model(
            "mlp-64", weights=tmp_path / f"w{suffix}", input_shape=(4,), classes=3
        ).model,
        model,
    )


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (
            nn.Linear(3, 2),
            "holds code, torch.nn.modules.linear.Linear, which is not executed",
        ),
        (
            {"epoch": 3, "net_g": {}},
            r"holds epoch \(int\), net_g \(dict\); expected a state dict, alone or under model_",
        ),
        ([1], "holds no state dict but list"),
        (b"no pickle", "is damaged, or was not written by torch"),
    ],
    ids=["module", "other", "list", "damaged"],
)
def test_files_of_pytorch_without_weights(tmp_path, stored, message):
    torch.save(stored, tmp_path / "w.pt")
    if isinstance(stored, bytes):
        (tmp_path / "w.pt").write_bytes(stored)
    with pytest.raises(
        ModelError,
        match=rf"w.pt {message}.*; write it with torch.save\(model.state_dict\(\)",
    ):
        load_model("mlp-64", weights=tmp_path / "w.pt")
    with pytest.raises(ModelError, match=r"none.pt does not exist"):
        load_model("mlp-64", weights=tmp_path / "none.pt")


def test_missing_and_damaged_checkpoints(checkpoint):
    path, _ = checkpoint
    with pytest.raises(ModelError, match=r"other.safetensors does not exist"):
        load_model(str(path.with_name("other.safetensors")))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"is not a complete safetensors file"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "does not say which model it belongs to; give the model and --weights"),
        (
            {"lipcert.model": "4C3F"},
            "does not describe its model completely .'input_shape'",
        ),
        (
            {"lipcert.model": "4C3F", "input_shape": "1,x", "classes": "5"},
            "does not describe its model completely",
        ),
        (
            {"lipcert.model": "4C9F", "input_shape": "1,12,12", "classes": "5"},
            "zoo name is '4C9F', expected one of",
        ),
        (
            {"lipcert.model": "4C3F", "input_shape": "1,12,12", "classes": "7"},
            "does not fit the model: .* has the shape",
        ),
    ],
)
def test_checkpoints_that_do_not_describe_their_model(checkpoint, metadata, message):
    path, model = checkpoint
    save_file(model.state_dict(), path, metadata=metadata)
    with pytest.raises(LipcertError, match=message):
        load_model(str(path))


def test_weights_that_do_not_fit(checkpoint, tmp_path):
    path, _ = checkpoint
    other = tmp_path / "other.safetensors"
    save_file(dense_chain(3, 4, 2).state_dict(), other)
    with pytest.raises(
        ModelError,
        match=r"other.safetensors does not fit the model: .* is missing; it holds .*weight",
    ):
        load_model("4C3F", weights=other)
    with pytest.raises(
        ModelError, match=r"holds weights already; give either it or --weights"
    ):
        load_model(str(path), weights=other)


def test_weights_beyond_the_range_of_a_type_are_not_written(tmp_path):
    model, path = nn.Linear(2, 2), tmp_path / "m.safetensors"
    nn.init.constant_(model.weight, 1e5)
    with pytest.raises(ModelError, match="weight has entries beyond the range of"):
        save_model(model, path, "mlp-64", (2,), 2, dtype=torch.float16)
    assert not list(tmp_path.iterdir())
