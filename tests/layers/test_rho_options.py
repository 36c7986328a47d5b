"""What a √ρ-Lipschitz layer learns and keeps, and the options it refuses."""

import pytest
import torch
from rho import single
from torch import nn

import lipcert
from lipcert.errors import OptionError
from lipcert.layers import RhoLipschitzConv2d, RhoLipschitzLinear
from lipcert.models import load_model, save_model, zoo
from models import Op


def test_rho_is_learned_and_stays_positive():
    layer = RhoLipschitzLinear(3, 3, rho=2.0, learn_rho=True)
    assert "log_rho" in dict(layer.named_parameters())
    assert "log_rho" in dict(RhoLipschitzLinear(3, 3, rho=2.0).named_buffers())
    optimizer = torch.optim.SGD(layer.parameters(), lr=10.0)
    for _ in range(5):
        optimizer.zero_grad()
        layer.lipschitz().backward()
        optimizer.step()
    assert 0 < layer.lipschitz().item() < 1
    assert "learn_rho=True" in repr(layer)


def test_state_dicts_and_checkpoints_restore_the_layers(tmp_path):
    for name, shape in [("rho-mlp", (1, 8, 8)), ("rho-mlp-256", (1, 8, 8))]:
        model = zoo.build(name, shape, 10, seed=3).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        save_model(model, tmp_path / "m.safetensors", name, shape, 10)
        loaded = load_model(str(tmp_path / "m.safetensors")).model
        x = torch.rand(4, *shape)
        assert torch.equal(loaded(x), model(x))
        lipcert.bound(model, shape, target="network").check_belongs(loaded)
    first, second = (
        RhoLipschitzConv2d(2, 3, rescaling="sn", rho=rho) for rho in (2.0, 1.0)
    )
    second.load_state_dict(first.state_dict())
    x = torch.rand(2, 2, 4, 4)
    assert torch.equal(first.eval()(x), second.eval()(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rescaling": "aoll"}, "rescaling is 'aoll'.*did you mean 'aol'"),
        ({"activation": "gelu"}, "activation is 'gelu', expected one of relu"),
        (
            {"activation": nn.GELU()},
            r"GELU has slopes in \[-0.128904, 1.1289\], expected none below 0",
        ),
        ({"activation": nn.PReLU()}, "PReLU has learned slopes"),
        ({"activation": nn.Softmax(1)}, "Softmax has no rule with elementwise slopes"),
        ({"activation": nn.Linear(2, 2)}, "Linear has no rule with elementwise slopes"),
        (
            {"activation": nn.Tanhshrink()},
            "Tanhshrink has no rule with elementwise slopes",
        ),
        (
            {"activation": Op(lambda m, x: 2 * x.tanh())},
            "Op has no rule with elementwise slopes",
        ),
        (
            {"activation": Op(lambda m, x: -x.tanh())},
            "Op has no rule with elementwise slopes",
        ),
        (
            {"activation": Op(lambda m, x: (2 * x).tanh())},
            "Op has no rule with elementwise slopes",
        ),
        ({"activation": nn.Hardshrink()}, "activation Hardshrink: it jumps"),
        (
            {"activation": nn.Softplus(threshold=2)},
            "activation Softplus: threshold=2 makes a jump",
        ),
        ({"rho": 0.0}, "rho is 0.0, expected a positive number"),
        ({"rho": float("nan")}, "rho is nan"),
    ],
)
def test_bad_options_are_refused(options, message):
    for kind in ("dense", "conv"):
        with pytest.raises(OptionError, match=message):
            single(kind, **options)


def test_bad_sizes_are_refused():
    with pytest.raises(OptionError, match="kernel_size is 2, expected an odd number"):
        RhoLipschitzConv2d(2, 3, 2)
    with pytest.raises(OptionError, match="expected sizes of 1 or more"):
        RhoLipschitzLinear(3, 0)
