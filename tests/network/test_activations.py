"""Every spelling of an activation gets the slopes of its module."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lipcert
from helpers import jacobian_at, randn
from lipcert.network import slopes
from lipcert.network.slopes import leaky
from models import Op


def single(number):
    """A number as torch computes with it in float32."""
    return float(torch.tensor(number, dtype=torch.float32))


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
    "F.leaky_relu": (leaky(single(0.01)), lambda m, x: F.leaky_relu(x)),
    "F.leaky_relu-slope": (
        leaky(single(0.3)),
        lambda m, x: F.leaky_relu(x, negative_slope=0.3),
    ),
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
    "F.rrelu": (leaky(single((1 / 8 + 1 / 3) / 2)), lambda m, x: F.rrelu(x)),
    "F.threshold": (slopes.CLIP, lambda m, x: F.threshold(x, 0.1, 0.1)),
    "F.elu_": (slopes.elu(0.5), lambda m, x: F.elu(x, 0.5, inplace=True)),
    "F.leaky_relu_": (leaky(single(0.2)), lambda m, x: F.leaky_relu(x, 0.2, True)),
    "F.silu_": (slopes.SILU, lambda m, x: F.silu(x, inplace=True)),
    "F.mish_": (slopes.MISH, lambda m, x: F.mish(x, inplace=True)),
    "F.hardswish_": (slopes.HARD_SWISH, lambda m, x: F.hardswish(x, inplace=True)),
    "F.hardsigmoid_": (
        slopes.HARD_SIGMOID,
        lambda m, x: F.hardsigmoid(x, inplace=True),
    ),
    "x.tanh_": (slopes.SMOOTH, lambda m, x: x.tanh_()),
    "x.clamp_": (slopes.CLIP, lambda m, x: x.clamp_(min=0)),
    "x.clip": (slopes.CLIP, lambda m, x: x.clip(0, 1)),
    "x.clamp_min": (slopes.CLIP, lambda m, x: x.clamp_min(0)),
    "clamp to tensors": (slopes.CLIP, lambda m, x: torch.clamp(x, m.zero - 1, m.zero)),
    "minimum": (slopes.CLIP, lambda m, x: torch.minimum(m.zero, x)),
    "max": (slopes.CLIP, lambda m, x: torch.max(x, m.zero)),
    "x.abs_": (slopes.ABS, lambda m, x: x.abs_()),
    "absolute": (slopes.ABS, lambda m, x: torch.absolute(x)),
    "sin": (slopes.WAVE, lambda m, x: torch.sin(x)),
    "x.cos": (slopes.WAVE, lambda m, x: x.cos()),
    "atan": (slopes.SMOOTH, lambda m, x: torch.atan(x)),
    "arctan": (slopes.SMOOTH, lambda m, x: torch.arctan(x)),
    "asinh": (slopes.SMOOTH, lambda m, x: torch.asinh(x)),
    "special.expit": (slopes.SIGMOID, lambda m, x: torch.special.expit(x)),
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


IN_PLACE = [
    "F.relu",
    *(name for name in SPELLINGS if name.endswith("_")),
]  # programs with operators in place are rewritten as a whole
OTHERS = [name for name in SPELLINGS if name not in IN_PLACE]


def described(slope):
    return slope.interval(), slope.elementwise, slope.ulps


@pytest.mark.parametrize("names", [IN_PLACE, OTHERS], ids=["in place", "others"])
def test_spellings(names):
    """All of them side by side in one model, each with a site of its own."""
    model = Op(
        lambda m, x: torch.cat(
            [SPELLINGS[name][1](m, m.first(x)).flatten(1) for name in names], 1
        ),
        first=nn.Linear(3, 4),
        zero=torch.zeros(1),
        softmax=nn.Softmax2d(),
    )
    network = lipcert.trace(model.eval(), (3,))
    slopes_found = [described(site.slope) for site in network.sites[1:-1]]
    assert dict(zip(names, slopes_found, strict=True)) == {
        name: described(SPELLINGS[name][0]) for name in names
    }


@pytest.mark.parametrize("alpha", [0.5, 2.0])
@pytest.mark.parametrize("function", [F.selu_, F.celu_], ids=["selu_", "celu_"])
def test_activations_that_torch_writes_as_elu_in_place(function, alpha):
    """scale·x, or scale·alpha·(exp(input_scale·x) − 1): in place, torch computes SELU and CELU so."""
    options = {"alpha": alpha} if function is F.celu_ else {}
    model = Op(
        lambda m, x: function(m.first(x), **options), first=nn.Linear(1, 1)
    ).double()
    slope = lipcert.trace(model, (1,)).sites[1].slope
    expected = slopes.SELU.interval() if function is F.selu_ else (0.0, 1.0)
    assert slope.interval() == pytest.approx(
        expected, rel=2.0**-21
    )  # with room for numbers in float32
    assert slope.beta >= expected[1] * (1 - 2.0**-21)
    check_sampled(Op(lambda m, x: function(x.clone(), **options)), slope, (3,))


def pairs(shape):
    """Inputs at many distances, at several scales."""
    x = torch.cat(
        [
            scale * randn(100, *shape, seed=k)
            for k, scale in enumerate((0.01, 1.0, 30.0))
        ]
    )
    return x, x + torch.cat(
        [
            step * randn(100, *shape, seed=9 + k)
            for k, step in enumerate((1.0, 1e-3, 1.0))
        ]
    )


def check_sampled(model, slope, shape):
    """Between sampled inputs, the slopes of a model without linear layers lie in the interval of its only site."""
    x, y = pairs(shape)
    centre, radius = slope.sector()
    change, gain = x - y, model(x) - model(y)
    noise = 1e-12 * (x.abs().amax() + 1)
    if slope.elementwise:
        assert ((gain - centre * change).abs() <= radius * change.abs() + noise).all()
    else:
        gain = gain - centre * change if centre else gain
        assert (lengths(gain) <= radius * lengths(change) + noise).all()


def lengths(rows):
    return rows.reshape(len(rows), -1).norm(dim=1)


NOT_ELEMENTWISE = {
    "sort": lambda m, x: torch.sort(x, 1).values,
    "x.sort of the last axis": lambda m, x: x.sort()[0],
    "sort downwards": lambda m, x: x.sort(dim=-2, descending=True, stable=True).values,
    "topk": lambda m, x: x.topk(2, 1).values,
    "topk smallest": lambda m, x: torch.topk(x, 1, largest=False)[0],
    "kthvalue": lambda m, x: x.kthvalue(2, 1).values,
    "median": lambda m, x: x.median(1, keepdim=True).values,
    "max(dim)": lambda m, x: x.max(1).values,
    "min(dim)": lambda m, x: torch.min(x, dim=2, keepdim=True)[0],
    "amax": lambda m, x: torch.amax(x, (1, 2)),
    "amin": lambda m, x: x.amin(-1, keepdim=True),
    "logsumexp": lambda m, x: torch.logsumexp(x, 1),
    "logsumexp of two axes": lambda m, x: x.logsumexp((1, 2), keepdim=True),
    "x.norm": lambda m, x: x.norm(dim=1),
    "norm of two axes": lambda m, x: torch.norm(x, dim=(1, 2)),
    "linalg.vector_norm": lambda m, x: torch.linalg.vector_norm(
        x, dim=-1, keepdim=True
    ),
    "linalg.norm": lambda m, x: torch.linalg.norm(x, dim=1),
    "largest entry in size": lambda m, x: x.norm(torch.inf, dim=1),
    "Frobenius norm": lambda m, x: torch.linalg.matrix_norm(x),
    "softmax": lambda m, x: x.softmax(2),
    "MaxMin": lambda m, x: x.unflatten(1, (-1, 2)).sort(2).values.flatten(1, 2),
}


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_nonlinearity_of_several_entries(name):
    model = Op(NOT_ELEMENTWISE[name])
    network = lipcert.trace(model, (4, 3))
    (site,) = network.sites[1:-1]
    assert not site.slope.elementwise
    assert site.slope.lipschitz() == (0.5 if name == "softmax" else 1.0)
    check_sampled(model, site.slope, (4, 3))
    x, y = pairs((4, 3))
    steepest = (lengths(model(x) - model(y)) / lengths(x - y)).max()
    assert steepest > 0.3  # of at most 1: the inputs tell something


EXTREMA = {
    "maximum": (torch.maximum, 1),
    "max": (torch.max, 1),
    "x.minimum": (lambda a, b: a.minimum(b), -1),
    "min of another shape": (lambda a, b: torch.min(a, b[:, :1]), -1),
}


@pytest.mark.parametrize("name", EXTREMA)
def test_the_larger_or_smaller_of_two_branches(name):
    """(a + b)/2 ± |a − b|/2: linear paths, and one site for the difference."""
    function, sign = EXTREMA[name]
    model = Op(
        lambda m, x: function(m.a(x), m.b(x)), a=nn.Linear(3, 4), b=nn.Linear(3, 4)
    ).double()
    network = lipcert.trace(model, (3,))
    (site,) = network.sites[1:-1]
    assert site.slope.interval() == (-1.0, 1.0)
    a, b = model.a.weight, model.b.weight
    b = b[:1].expand(4, 3) if "shape" in name else b
    into, past = network.push(0, torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(into.T, a - b)
    torch.testing.assert_close(past.T, (a + b) / 2)
    torch.testing.assert_close(
        network.push(1, torch.eye(4, dtype=torch.float64))[1],
        sign * torch.eye(4).double() / 2,
    )
    bound = lipcert.bound(model, (3,), target="network").value
    steepest = torch.linalg.matrix_norm(
        torch.stack([jacobian_at(model, randn(3, seed=k)) for k in range(20)]), 2
    ).max()
    assert steepest <= bound


@pytest.mark.parametrize(
    "function", [F.prelu, torch.prelu], ids=["F.prelu", "torch.prelu"]
)
def test_functional_prelu_reads_the_weight(function):
    weight = nn.Parameter(torch.tensor([0.5, -0.5, 0.25]))
    slope = (
        lipcert.trace(Op(lambda m, x: function(x, m.w), w=weight), (3,)).sites[1].slope
    )
    assert [end.item() for end in slope.interval()] == [-0.5, 1.0]
    weight.data[1] = 2.0
    assert [end.item() for end in slope.interval()] == [0.25, 2.0]


REFUSED = {
    "softplus with a low threshold": (nn.Softplus(threshold=5), "threshold=5"),
    "softplus with negative beta": (nn.Softplus(beta=-1), "beta=-1"),
    "celu with negative alpha": (nn.CELU(-1.0), "alpha=-1.0"),
    "layer norm": (nn.LayerNorm(3), "only bounded by 1/√eps.*BatchNorm"),
    "group norm": (nn.GroupNorm(1, 3), "BatchNorm"),
    "rms norm": (nn.RMSNorm(3), "BatchNorm"),
    "log-softmax": (nn.LogSoftmax(1), "certify the logits; inside of one there is no rule"),
    "jump": (nn.Hardshrink(), "it jumps.*register a rule"),
    "jump of a threshold": (nn.Threshold(0.1, 20), "it jumps from 20 to 0.1"),
    "sign": (Op(lambda m, x: x.sign()), "it jumps"),
    "remainder": (Op(lambda m, x: x % 2), "it jumps"),
    "square": (Op(lambda m, x: x**2), "its slope is not bounded"),
    "logarithm": (Op(lambda m, x: torch.log1p(x.abs())), "its slope is not bounded"),
    "gate": (Op(lambda m, x: F.glu(torch.cat([x, x], 1))), "not Lipschitz; use a network without gating"),
    "condition": (Op(lambda m, x: torch.where(x > 0, x, 0.1 * x)), "its mask depends on the network's input"),
    "normalisation": (Op(lambda m, x: F.normalize(x)), "quotient of two tensors.*divide by a constant"),
    "largest entry of all": (Op(lambda m, x: x - x.max()), "over everything"),
    "median of all": (Op(lambda m, x: x - x.median()), "over everything"),
    "largest entry of the batch": (Op(lambda m, x: x - x.amax(0)), "batch axis"),
    "sorted batch": (Op(lambda m, x: x.sort(0).values), "batch axis"),
    "position of the largest entry": (Op(lambda m, x: x + x.max(1)[1].float()[:, None]), "positions .* not continuous"),
    "unsorted topk": (Op(lambda m, x: x.topk(2, sorted=False).values), "the order of its entries is not defined"),
    "l1 norm": (Op(lambda m, x: x.norm(1, dim=1)), "only l2 and l∞ norms along given axes"),
    "another l1 norm": (Op(lambda m, x: torch.linalg.norm(x, 1, dim=1)), "only l2 norms along given axes"),
    "norm of everything": (Op(lambda m, x: x / x.norm()), "along given axes"),
    "limit that depends on the input": (
        Op(lambda m, x: torch.clamp(x, max=x.mean(1, keepdim=True))), "use torch.maximum or torch.minimum",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_nonlinearity_without_bounded_slopes_is_refused(name):
    module, remedy = REFUSED[name]
    with pytest.raises(lipcert.UnsupportedError, match=remedy):
        lipcert.trace(nn.Sequential(nn.Linear(3, 3), module).eval(), (3,))


def test_random_relu_is_fixed_in_eval_mode_only():
    with pytest.raises(
        lipcert.errors.TrainingModeError,
        match=r"1 \(RReLU\) is in training mode, where it is random",
    ):
        lipcert.trace(nn.Sequential(nn.Linear(3, 3), nn.RReLU()), (3,))
