"""Models by name, factory, checkpoint or folder; and the messages when there is none."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lipcert import zoo
from lipcert.errors import LipcertError, ModelError
from lipcert.loading import load_model, save_checkpoint
from models import dense_chain

SHAPE = (1, 12, 12)


@pytest.fixture
def checkpoint(tmp_path):
    model = zoo.build("4C3F", SHAPE, 5, seed=3)
    save_checkpoint(model, tmp_path / "model.safetensors", "4C3F", SHAPE, 5)
    return tmp_path / "model.safetensors", model


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_checkpoint_by_file_and_by_folder(checkpoint):
    path, model = checkpoint
    for spec in (str(path), str(path.parent)):
        loaded = load_model(spec)
        assert same_weights(loaded.model, model)
        assert loaded.input_shape == SHAPE
        assert not loaded.model.training
        assert loaded.name.endswith("model.safetensors")


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
    assert isinstance(load_model("nets_for_loading:ready", input_shape=(3,)).model, nn.Linear)
    with pytest.raises(ModelError, match=r"input shape of nets_for_loading:plain is not known; give --input-shape"):
        load_model("nets_for_loading:plain")
    with pytest.raises(ModelError, match=r"nets_for_loading:number returns int, expected a torch.nn.Module"):
        load_model("nets_for_loading:number", input_shape=(3,))
    with pytest.raises(ModelError, match=r"nets_for_loading:missing cannot be imported"):
        load_model("nets_for_loading:missing")
    with pytest.raises(ModelError, match=r"no_such_module:net cannot be imported: No module named"):
        load_model("no_such_module:net")


def test_names_that_are_no_model():
    with pytest.raises(ModelError, match=r"'5C3F' is not a model: give a .safetensors checkpoint, .* or one of 4C3F"):
        load_model("5C3F")


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
        ({"lipcert.model": "4C3F"}, "does not describe its model completely .'input_shape'"),
        ({"lipcert.model": "4C3F", "input_shape": "1,x", "classes": "5"}, "does not describe its model completely"),
        ({"lipcert.model": "4C9F", "input_shape": "1,12,12", "classes": "5"}, "zoo name is '4C9F', expected one of"),
        ({"lipcert.model": "4C3F", "input_shape": "1,12,12", "classes": "7"}, "does not fit the model: size mismatch"),
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
    with pytest.raises(ModelError, match=r"other.safetensors does not fit the model"):
        load_model("4C3F", weights=other)
    with pytest.raises(ModelError, match=r"holds weights already; give either it or --weights"):
        load_model(str(path), weights=other)
