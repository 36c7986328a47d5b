"""Every spelling of an activation gets the slopes of its module."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lipcert
from helpers import randn
from lipcert.network import slopes
from lipcert.network.slopes import leaky
from models import Op

SPELLINGS = {
    "relu": (slopes.RELU, lambda m, x: torch.relu(x)),
    "F.relu": (slopes.RELU, lambda m, x: F.relu(x, inplace=True)),
    "x.relu": (slopes.RELU, lambda m, x: x.relu()),
    "x.relu_": (slopes.RELU, lambda m, x: x.relu_()),
    "F.relu6": (slopes.CLIP, lambda m, x: F.relu6(x)),
    "F.hardtanh": (slopes.CLIP, lambda m, x: F.hardtanh(x, -2, 3)),
    "clamp": (slopes.CLIP, lambda m, x: torch.clamp(x, min=0.0)),
    "x.clamp": (slopes.CLIP, lambda m, x: x.clamp(-1, 1)),
    "maximum": (slopes.CLIP, lambda m, x: torch.maximum(x, m.zero)),
    "F.leaky_relu": (leaky(0.01), lambda m, x: F.leaky_relu(x)),
    "F.leaky_relu-slope": (leaky(0.3), lambda m, x: F.leaky_relu(x, negative_slope=0.3)),
    "F.elu": (slopes.elu(2.0), lambda m, x: F.elu(x, 2.0)),
    "F.celu": (slopes.SMOOTH, lambda m, x: F.celu(x, 2.0)),
    "F.selu": (slopes.SELU, lambda m, x: F.selu(x)),
    "selu": (slopes.SELU, lambda m, x: torch.selu(x)),
    "F.softplus": (slopes.SMOOTH, lambda m, x: F.softplus(x, beta=2)),
    "sigmoid": (slopes.SIGMOID, lambda m, x: torch.sigmoid(x)),
    "F.sigmoid": (slopes.SIGMOID, lambda m, x: F.sigmoid(x)),
    "x.sigmoid": (slopes.SIGMOID, lambda m, x: x.sigmoid()),
    "tanh": (slopes.SMOOTH, lambda m, x: torch.tanh(x)),
    "x.tanh": (slopes.SMOOTH, lambda m, x: x.tanh()),
    "F.softsign": (slopes.SMOOTH, lambda m, x: F.softsign(x)),
    "F.logsigmoid": (slopes.SMOOTH, lambda m, x: F.logsigmoid(x)),
    "F.hardsigmoid": (slopes.HARD_SIGMOID, lambda m, x: F.hardsigmoid(x)),
    "F.gelu": (slopes.GELU, lambda m, x: F.gelu(x)),
    "F.gelu-tanh": (slopes.GELU_TANH, lambda m, x: F.gelu(x, approximate="tanh")),
    "F.silu": (slopes.SILU, lambda m, x: F.silu(x)),
    "F.mish": (slopes.MISH, lambda m, x: F.mish(x)),
    "F.hardswish": (slopes.HARD_SWISH, lambda m, x: F.hardswish(x)),
    "abs": (slopes.ABS, lambda m, x: torch.abs(x)),
    "abs-builtin": (slopes.ABS, lambda m, x: abs(x)),
    "F.softmax": (slopes.SOFTMAX, lambda m, x: F.softmax(x, dim=1)),
    "softmax": (slopes.SOFTMAX, lambda m, x: torch.softmax(x, -1)),
    "x.softmax": (slopes.SOFTMAX, lambda m, x: x.softmax(1)),
    "Softmax2d": (slopes.SOFTMAX, lambda m, x: m.softmax(x[:, :, None, None])),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name):
    expected, function = SPELLINGS[name]
    model = Op(lambda m, x: function(m, m.first(x)), first=nn.Linear(3, 4), zero=torch.zeros(1), softmax=nn.Softmax2d())
    network = lipcert.trace(model.eval(), (3,))
    assert network.depth == 1
    slope = network.sites[1].slope
    assert slope.interval() == expected.interval()
    assert (slope.elementwise, slope.l1, slope.linf) == (expected.elementwise, expected.l1, expected.linf)


@pytest.mark.parametrize("function", [F.prelu, torch.prelu], ids=["F.prelu", "torch.prelu"])
def test_functional_prelu_reads_the_weight(function):
    weight = nn.Parameter(torch.tensor([0.5, -0.5, 0.25]))
    slope = lipcert.trace(Op(lambda m, x: function(x, m.w), w=weight), (3,)).sites[1].slope
    assert [end.item() for end in slope.interval()] == [-0.5, 1.0]
    weight.data[1] = 2.0
    assert [end.item() for end in slope.interval()] == [0.25, 2.0]


REFUSED = {
    "softplus with a low threshold": (nn.Softplus(threshold=5), "threshold=5"),
    "softplus with negative beta": (nn.Softplus(beta=-1), "beta=-1"),
    "celu with negative alpha": (nn.CELU(-1.0), "alpha=-1.0"),
    "layer norm": (nn.LayerNorm(3), "unbounded"),
    "group norm": (nn.GroupNorm(1, 3), "BatchNorm"),
    "log-softmax": (nn.LogSoftmax(1), "certify the logits"),
    "random relu": (nn.RReLU(), "register a rule"),
    "jump": (nn.Hardshrink(), "register a rule"),
    "largest entry": (Op(lambda m, x: torch.amax(x, 1)), "register a rule"),
    "maximum of two inputs": (Op(lambda m, x: torch.maximum(x, -x)), "constant tensor"),
    "limit that depends on the input": (Op(lambda m, x: torch.clamp(x, max=x.mean(1, keepdim=True))), "2 inputs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nonlinearity_without_bounded_slopes_is_refused(name):
    module, remedy = REFUSED[name]
    with pytest.raises(lipcert.UnsupportedError, match=remedy):
        lipcert.trace(nn.Sequential(nn.Linear(3, 3), module).eval(), (3,))


def test_group_sort_by_a_registered_rule():
    class MaxMin(nn.Module):
        def forward(self, x):
            return x.unflatten(1, (-1, 2)).sort(2).values.flatten(1)

    @lipcert.register_rule(MaxMin)
    def max_min(call, x):
        return slopes.group_sort(2)

    model = nn.Sequential(nn.Linear(4, 4), MaxMin(), nn.Linear(4, 2)).double()
    network = lipcert.trace(model, (4,))
    assert network.sites[1].slope.sector() == (0.0, 1.0)
    x, y = randn(500, 4), randn(500, 4, seed=1)
    gap = (MaxMin()(x) - MaxMin()(y)).norm(dim=1)
    assert (gap <= (x - y).norm(dim=1) * (1 + 1e-12)).all()
