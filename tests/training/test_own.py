"""Training with what one has: a model, data and a loss of one's own, by name and as objects."""

import numpy as np
import pytest
import torch
from PIL import Image
from runs import tiny
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lipcert
from lipcert.errors import ConfigError, DataError, ModelError
from lipcert.losses import Loss, hard_radius
from lipcert.runs.folder import read_run

QUICK = {"epochs": 2, "batch_size": 256, "attack_inputs": 0, "eval_every": 2}

SOURCE = """
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.pool, self.dense = nn.MaxPool2d(2), nn.Linear(128, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.norm(self.conv(x))))
        return self.dense(x.view(x.size(0), -1))


def hinge(logits, labels, constants, r0=0.5):
    from lipcert.losses import hard_radius
    return F.cross_entropy(logits, labels) + (r0 - hard_radius(logits, labels, constants)).clamp(min=0).mean()
"""


@pytest.fixture(scope="module")
def arrays():
    digits = load_digits()
    return (digits.images / 16).astype(np.float32)[:, None], digits.target


@pytest.fixture
def folder(tmp_path, monkeypatch, arrays):
    """A folder as a new user has it: code and arrays."""
    (tmp_path / "own_nets.py").write_text(SOURCE)
    np.savez(tmp_path / "arrays.npz", x=arrays[0], y=arrays[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_three_lines_of_toml(folder, capsys):
    (folder / "mine.toml").write_text(
        'model = "own_nets:Net"\ndata = "arrays.npz"\nepochs = 6\n'
    )
    config = lipcert.TrainConfig.from_toml("mine.toml").with_overrides(
        ["attack_inputs=0"]
    )
    assert (config.epsilons, config.loss.type) == ((0.25,), "signed-radius")
    run = lipcert.train(config, "runs/mine")
    assert run.summary.clean > 0.3
    assert lipcert.TrainConfig.from_toml("runs/mine/config.toml").batch_size == 64
    assert run.summary.data_title == "arrays.npz"
    again = lipcert.load_model("runs/mine")
    certificates = lipcert.certify(
        again.model, lipcert.data.load("arrays.npz").test.pixels(slice(0, 9))
    )
    assert torch.equal(
        certificates.radius, read_run(folder / "runs/mine").certificates.radius[:9]
    )
    assert lipcert.resume("runs/mine").summary == run.summary
    with pytest.raises(
        ModelError,
        match=r"names code, own_nets:Net, .*; give own_nets:Net and --weights",
    ):
        lipcert.load_model("runs/mine/model.safetensors")
    named = lipcert.load_model(
        "own_nets:Net", weights="runs/mine/model.safetensors", input_shape=(1, 8, 8)
    )
    assert torch.equal(named.model.dense.weight, again.model.dense.weight)


def test_a_folder_of_images(folder, arrays):
    for k, (image, label) in enumerate(
        zip(arrays[0][:100], arrays[1][:100], strict=True)
    ):
        place = folder / f"pictures/{label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * image[0]).astype(np.uint8)).save(place / f"{k}.png")
    (folder / "mine.toml").write_text(
        'model = "mlp-64"\ndata = "pictures"\nepochs = 1\nattack_inputs = 0\n'
    )
    run = lipcert.train("mine.toml")
    assert run.folder.name == "mine-1"
    assert (run.summary.data, run.summary.inputs) == ("pictures", 20)


def test_objects(folder, arrays):
    from own_nets import Net

    torch.manual_seed(0)
    model = Net()
    before = model.dense.weight.detach().clone()
    run = lipcert.train(
        {**QUICK, "compare_standard": True}, "runs/objects", model=model, data=arrays
    )
    assert not torch.equal(model.dense.weight, before)
    assert not model.training
    assert run.summary.model == "Net (given in Python)"
    loaded = lipcert.load_model("runs/objects", model=Net())
    assert torch.equal(loaded.model.dense.weight, model.dense.weight)
    twin = lipcert.load_model("runs/objects/standard", model=Net())
    assert not torch.equal(twin.model.dense.weight, model.dense.weight)
    with pytest.raises(
        ModelError,
        match=r"weights of Net, which was given in Python; name its code, module:factory",
    ):
        lipcert.load_model("runs/objects")
    with pytest.raises(
        DataError,
        match=r"the data tuple were given in Python and are not stored; give them again as",
    ):
        lipcert.resume("runs/objects")
    assert (
        lipcert.resume("runs/objects", model=Net(), data=arrays).summary == run.summary
    )


def test_an_interrupted_run_of_objects_goes_on(folder, arrays, monkeypatch):
    from own_nets import Net, hinge

    torch.manual_seed(0)
    whole, stopped = Net(), Net()
    stopped.load_state_dict(whole.state_dict())
    pair = TensorDataset(*map(torch.tensor, arrays))
    lipcert.train(QUICK, "runs/whole", model=whole, data=pair, loss=hinge)

    def stop(what, fraction, figures=""):
        if fraction > 0.5 and what == "training":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lipcert.train(
            QUICK, "runs/stopped", model=stopped, data=pair, loss=hinge, progress=stop
        )
    other = Net()
    with pytest.raises(
        ModelError,
        match=r"the model Net was given in Python and is not stored; give it again as model=",
    ):
        lipcert.resume("runs/stopped", data=pair, loss=hinge)
    with pytest.raises(
        ConfigError,
        match=r"the loss hinge was given in Python .* give it again as loss=",
    ):
        lipcert.resume("runs/stopped", data=pair, model=Net())
    lipcert.resume("runs/stopped", data=pair, model=other, loss=hinge)
    assert torch.equal(other.dense.weight, whole.dense.weight)


def test_losses_of_ones_own(folder, arrays):
    loss = {"type": "own_nets:hinge", "r0": 0.3}
    config = lipcert.TrainConfig(
        **{**QUICK, "model": "mlp-64", "data": "digits", "epochs": 1, "loss": loss}
    )
    by_name = lipcert.train(config, "runs/by-name")
    assert lipcert.TrainConfig.from_toml(
        "runs/by-name/config.toml"
    ).loss == lipcert.losses.OwnLoss(**loss)

    def same(logits, labels, constants):
        base = F.cross_entropy(logits, labels)
        robust = (0.3 - hard_radius(logits, labels, constants)).clamp(min=0).mean()
        return Loss(base + robust, base, robust)

    by_object = lipcert.train(
        {**QUICK, "model": "mlp-64", "epochs": 1},
        data=lipcert.data.load("digits"),
        loss=same,
    )
    assert by_object.summary.clean == by_name.summary.clean
    assert by_object.metrics[0]["robust"] > 0
    assert by_object.summary.loss == "same (given in Python)"
    wrong = {
        r"returns float, expected a tensor of shape \(\) or a Loss": lambda *_: 1.5,
        r"returns Tensor \(2, 10\), expected a tensor of shape": lambda logits, *_: (
            logits
        ),
        r"returns a number that has no gradient with respect to the logits": lambda *_: (
            torch.tensor(1.0)
        ),
        r"fails as a function of logits, labels and constants \(TypeError.*takes 3 pos": nn.CrossEntropyLoss(),
    }
    for message, function in wrong.items():
        with pytest.raises(ConfigError, match=rf"the loss .* {message}"):
            lipcert.train(
                {**QUICK, "model": "mlp-64", "data": "digits"},
                "runs/wrong",
                loss=function,
            )
    assert not (folder / "runs/wrong").exists()
    with pytest.raises(ConfigError, match=r"own_nets:missing cannot be imported"):
        lipcert.train(
            {**QUICK, "model": "mlp-64", "data": "digits", "loss": "own_nets:missing"}
        )


def test_fine_tuning_begins_with_the_weights_of_a_file(folder, arrays):
    from own_nets import Net

    torch.manual_seed(1)
    first = Net()
    torch.save(
        {"model_state_dict": {f"module.{k}": v for k, v in first.state_dict().items()}},
        "plain.pt",
    )
    values = {
        **QUICK,
        "model": "own_nets:Net",
        "data": "arrays.npz",
        "epochs": 1,
        "init_from": "plain.pt",
    }
    values["schedule"] = {"lr0": 1e-9, "lrf": 1e-9}
    lipcert.train(values, "runs/tuned")
    tuned = lipcert.load_model("runs/tuned").model
    assert torch.allclose(tuned.conv.weight, first.conv.weight, atol=1e-6)
    lipcert.train({**values, "init_from": "runs/tuned"}, "runs/again")
    with pytest.raises(ModelError, match=r"none.pt does not exist"):
        lipcert.train({**values, "init_from": "none.pt"}, "runs/none")
    assert not (folder / "runs/none").exists()


def test_epochs_alone(folder):
    preset = lipcert.TrainConfig.preset("digits")
    one, more = (preset.with_overrides(f"epochs={epochs}") for epochs in (1, 80))
    assert (one.schedule.decay_epoch, one.warmup_epochs) == (0, 0)
    assert (more.schedule.decay_epoch, more.warmup_epochs) == (30, 3)
    for name in ("mnist-4c3f", "cifar10-6c2f", "tiny-imagenet-8c2f"):
        assert lipcert.TrainConfig.preset(name).with_overrides("epochs=1").epochs == 1
    assert (
        preset.with_overrides(
            ["epochs=80", "schedule.decay_epoch=15"]
        ).schedule.decay_epoch
        == 15
    )


def test_what_does_not_fit_is_named(arrays, tmp_path):
    with pytest.raises(
        ModelError,
        match=r"Sequential .given in Python. has 3 outputs, expected 10: as many as",
    ):
        lipcert.train(
            QUICK,
            tmp_path / "a",
            model=nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
            data="digits",
        )
    with pytest.raises(ModelError, match=r"model is str, expected a torch.nn.Module"):
        lipcert.train(tiny(), tmp_path / "a", model="net")
    with pytest.raises(
        ConfigError,
        match=r"^the key 'model' is missing; the key 'data' is missing; the key 'epochs'",
    ):
        lipcert.TrainConfig()
    with pytest.raises(
        ConfigError,
        match=r"config is int, expected a TrainConfig, a dictionary, or the name",
    ):
        lipcert.train(7)
    with pytest.raises(ConfigError, match=r"loss is int, expected a function"):
        lipcert.train(tiny(), tmp_path / "a", loss=7)
    assert not (tmp_path / "a").exists()
