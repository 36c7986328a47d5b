"""Rules that users add: the documented way, and what is refused."""

import pytest
import torch
from torch import nn

import lipcert
from helpers import check_linear, randn
from lipcert.errors import OptionError
from lipcert.network import assembly
from lipcert.network.build import normal_form
from lipcert.network.linear import Function
from lipcert.network.rules import registry
from lipcert.network.rules.registry import find_module_rule, find_rule
from models import Op


@pytest.fixture(autouse=True)
def _own_rules(monkeypatch):
    """Rules registered in a test are gone after it."""
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    monkeypatch.setattr(
        registry,
        "MODULE_RULES",
        {view: dict(own) for view, own in registry.MODULE_RULES.items()},
    )


class ClippedCube(nn.Module):
    """x ↦ x³ for x clipped to [−1, 1]: slopes in [0, 3]."""

    def forward(self, x):
        return torch.clamp(x, -1, 1) ** 3


class Blur(nn.Module):
    """Multiplication by a circulant matrix with learned entries, by the Fourier transform; and a bias."""

    def __init__(self, n):
        super().__init__()
        self.kernel = nn.Parameter(randn(n))

    def forward(self, x):
        return (
            torch.fft.irfft(
                torch.fft.rfft(x) * torch.fft.rfft(self.kernel), n=x.shape[-1]
            )
            + 1
        )


def test_documented_example_of_an_activation():
    model = nn.Sequential(nn.Linear(3, 3), ClippedCube(), nn.Linear(3, 2)).double()
    with pytest.raises(lipcert.UnsupportedError, match=r"1\.pow_1 \(pow\)"):
        lipcert.trace(model, (3,))

    @lipcert.register_rule(ClippedCube)
    def clipped_cube(call, x):
        return lipcert.Slope(0.0, 3.0)

    network = lipcert.trace(model, (3,))
    assert [site.name for site in network.sites] == ["input", "1", "output"]
    estimate = lipcert.Estimator(model, (3,), target="network", power_iterations=200)()
    w0, w1 = model[0].weight, model[2].weight
    norm = torch.linalg.matrix_norm
    expected = 1.5 * norm(w1 @ w0, 2) + 1.5 * norm(w1, 2) * norm(w0, 2)
    assert estimate.item() == pytest.approx(expected.item(), rel=1e-6)


def test_documented_example_of_a_linear_operation_with_adjoint_by_differentiation():
    @lipcert.register_rule(Blur)
    def blur(call, x):
        return call.linear(lambda t: call.module(t) - call.module(torch.zeros_like(t)))

    model = nn.Sequential(Blur(5), nn.Linear(5, 2)).double()
    network = lipcert.trace(model, (5,))
    circulant = torch.autograd.functional.jacobian(
        lambda t: model[0](t[None])[0], randn(5)
    )
    op = network.nodes[1].edges[0].op
    torch.testing.assert_close(op.as_matrix(like=circulant), circulant)
    torch.testing.assert_close(op.adjoint(torch.eye(5, dtype=torch.float64)), circulant)
    op.adjoint(torch.eye(5, dtype=torch.float64))[:, 0].sum().backward()
    torch.testing.assert_close(model[0].kernel.grad, torch.ones(5, dtype=torch.float64))
    with pytest.raises(NotImplementedError):
        op.magnitude(randn(1, 5))


@pytest.mark.parametrize(
    "key",
    [
        torch.cumsum,
        torch.Tensor.cumsum,
        torch.ops.aten.cumsum,
        torch.ops.aten.cumsum.default,
    ],
    ids=["function", "method", "packet", "overload"],
)
def test_rule_for_an_operator_covers_its_function_and_its_method(key):
    @lipcert.register_rule(key)
    def cumulative_sum(call, x, dim):
        return call.linear(terms=x.shape[dim - 1], nonnegative=True)

    assert find_rule("aten::cumsum") is cumulative_sum
    check_linear(Op(lambda m, x: torch.cumsum(x, 1)), (4,))
    check_linear(Op(lambda m, x: x.cumsum(dim=2)), (2, 3))
    check_linear(Op(lambda m, x: (2 * x).cumsum_(1)), (4,))


@torch.library.custom_op("lipcert_tests::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return 3 * x.clamp(min=0)


@tripled.register_fake
def _(x):
    return torch.empty_like(x)


def test_rule_for_a_custom_operator():
    model = nn.Sequential(nn.Linear(3, 4), Op(lambda m, x: tripled(x)), nn.Linear(4, 2))
    with pytest.raises(
        lipcert.UnsupportedError, match=r"1\.tripled \(tripled\): register a rule"
    ):
        lipcert.trace(model, (3,))

    @lipcert.register_rule(tripled)
    def rule(call, x):
        return lipcert.Slope(0, 3, ulps=2)

    assert lipcert.trace(model, (3,)).sites[1].slope.interval() == (0.0, 3.0)
    assert (lipcert.certify(model, torch.rand(4, 3)).radius >= 0).all()
    lipcert.register_rule(torch.ops.lipcert_tests.tripled)(
        lambda call, x: lipcert.Slope(0, 4)
    )
    assert lipcert.trace(model, (3,)).sites[1].slope.interval() == (0.0, 4.0)


@pytest.mark.parametrize(
    "key",
    ["no_such_operator", 7, lambda x: x, nn.Linear(2, 2)],
    ids=["text", "number", "lambda", "module"],
)
def test_what_is_no_operator_cannot_have_a_rule(key):
    with pytest.raises(OptionError, match=r"a rule for .*torch\.library\.custom_op"):
        lipcert.register_rule(key)(lambda call, x: x)


def test_a_rule_for_one_view():
    @lipcert.register_rule(ClippedCube, view="certified")
    def clipped_cube(call, x):
        return lipcert.Slope(0.0, 3.0)

    assert find_module_rule(ClippedCube(), "certified") is clipped_cube
    assert find_module_rule(ClippedCube(), "residual") is None
    with pytest.raises(OptionError, match="view is 'opaque'"):
        lipcert.register_rule(ClippedCube, view="opaque")


def test_a_chain_of_operations_and_a_call_passed_through():
    class Annotated(nn.Module):
        def forward(self, x):
            return x

    class Total(nn.Module):
        def forward(self, x):
            return 2 * x.flatten(1).sum(1, keepdim=True)

    @lipcert.register_rule(Annotated)
    def annotated(call, x):
        return x

    @lipcert.register_rule(Total)
    def total(call, x):
        flatten = lipcert.network.linear.Reshape(x.shape, (6,))
        add = lipcert.network.linear.Function(
            lambda t: 2 * t.sum(1, keepdim=True), (6,), (1,), 7, True
        )
        return [flatten, add]

    check_linear(nn.Sequential(Annotated(), Total()), (2, 3))


class WrongBackward(torch.autograd.Function):
    """3x, but the gradient says 2."""

    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Scaled(nn.Module):
    """3x."""

    def forward(self, x):
        return 3.0 * x


WRONG = {
    "nonlinear": (torch.relu, "is not linear"),
    "nonlinear and small": (lambda t: 1e-7 * torch.relu(t), "is not linear"),
    "quadratic": (lambda t: t * t, "is not linear"),
    "nearly linear": (
        lambda t: 3 * t + 0.01 * torch.relu(t),
        "(is not linear|an adjoint that is not its transpose)",
    ),
    "affine": (lambda t: 3 * t + 1, "does not map zero to zero"),
    "mixes rows": (lambda t: 3 * (t - t.mean(0)), "mixes the rows"),
    "shifts rows": (lambda t: 3 * t.roll(1, 0), "mixes the rows"),
    "wrong shape": (
        lambda t: t[:, :1],
        r"maps a batch of 3 to the shape \(3, 1\), expected \(3, 4\)",
    ),
    "off by a percent": (
        lambda t: 3.03 * t,
        "is not what the call computes: an entry of its result is",
    ),
    "off in one entry": (
        lambda t: 3 * t * torch.tensor([1, 1, 1, 1.01]).to(t),
        "is not what the call computes",
    ),
    "of the other sign": (lambda t: -3 * t, "is not what the call computes"),
    "false adjoint": (
        WrongBackward.apply,
        "has an adjoint that is not its transpose: ⟨Ax, v⟩ = ",
    ),
    "no adjoint": (
        lambda t: 3 * t.detach(),
        "cannot be differentiated, so it has no adjoint",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_false_linear_rule_is_refused(name, dtype):
    function, problem = WRONG[name]

    @lipcert.register_rule(Scaled)
    def wrong(call, x):
        return call.linear(function)

    with pytest.raises(lipcert.UnsupportedError, match=r"1 \(Scaled\): .*" + problem):
        lipcert.trace(nn.Sequential(nn.Linear(3, 4), Scaled()).to(dtype), (3,))


def test_a_linear_rule_is_exact_in_float64():
    lipcert.register_rule(Scaled)(
        lambda call, x: call.linear(lambda t: 3 * (1 + 1e-9) * t)
    )
    with pytest.raises(lipcert.UnsupportedError, match="is not what the call computes"):
        lipcert.trace(nn.Sequential(nn.Linear(3, 4), Scaled()).double(), (3,))


def test_a_false_link_of_a_chain_is_refused():
    @lipcert.register_rule(Scaled)
    def wrong(call, x):
        half = Function(lambda t: t / 2, (4,), (4,))
        return [
            half,
            Function(WrongBackward.apply, (4,), (4,)),
            Function(lambda t: 2 * t, (4,), (4,)),
        ]

    with pytest.raises(
        lipcert.UnsupportedError, match="has an adjoint that is not its transpose"
    ):
        lipcert.trace(nn.Sequential(Scaled()), (4,))


class Shifted(nn.Module):
    """relu of the neighbour: not elementwise."""

    def forward(self, x):
        return torch.relu(x.roll(1, -1))


class Far(nn.Module):
    """The identity, and twice as steep beyond 50."""

    def forward(self, x):
        return x + torch.relu(x - 50)


class Steep(nn.Module):
    """The identity, and five times as steep within 1e-2 of zero."""

    def forward(self, x):
        return x + 4 * x.clamp(-1e-2, 1e-2)


class Jump(nn.Module):
    def forward(self, x):
        return x + 0.1 * x.sign()


class Sum(nn.Module):
    """(x_1 + … + x_n)·(1, …, 1): n-Lipschitz."""

    def forward(self, x):
        return x.sum(-1, keepdim=True).expand(x.shape)


FALSE_SLOPES = {
    "too small": (
        Op(lambda m, x: 3 * x.relu()),
        (0, 1),
        True,
        r"slopes in \[0, 1\], but between two inputs the slope is \d",
    ),
    "a percent too small": (
        Op(lambda m, x: 1.01 * x.relu()),
        (0, 1),
        True,
        "the slope is 1.01",
    ),
    "too large from below": (nn.LeakyReLU(0.1), (0.2, 1), True, "the slope is 0.1"),
    "of the other sign": (Op(lambda m, x: -x), (0, 1), True, "the slope is -1"),
    "steep far away": (Far(), (0, 1), True, r"the slope is \d"),
    "steep near zero": (Steep(), (0, 1), True, r"the slope is \d"),
    "jump": (Jump(), (0, 1), True, r"the slope is \d"),
    "quadratic": (Op(lambda m, x: x * x), (-10, 10), True, r"the slope is -?\d"),
    "not elementwise": (
        Shifted(),
        (-1e9, 1e9),
        True,
        "entries of its result depend on others",
    ),
    "of a neighbour": (
        Op(lambda m, x: x.roll(1, -1)),
        (-1e9, 1e9),
        True,
        "depend on others",
    ),
    "not elementwise, too small": (
        Sum(),
        (-2, 2),
        False,
        "a slope of at most 2, but between two inputs",
    ),
    "not around the centre": (
        Op(lambda m, x: -x),
        (0, 1),
        False,
        "a slope of at most 1",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FALSE_SLOPES)
def test_false_slopes_are_refused(name, dtype):
    module, (alpha, beta), elementwise, problem = FALSE_SLOPES[name]
    lipcert.register_rule(type(module))(
        lambda call, x: lipcert.Slope(alpha, beta, elementwise)
    )
    with pytest.raises(
        lipcert.UnsupportedError, match=r"1 \(\w+\): its rule .*" + problem
    ):
        lipcert.trace(nn.Sequential(nn.Linear(4, 6), module).to(dtype), (4,))


@pytest.mark.parametrize("entries", [1, 2, 4, 30])
@pytest.mark.parametrize("name", ["hardswish", "one channel of many", "wave"])
def test_slopes_that_are_false_on_a_short_interval_are_refused_at_few_entries(
    name, entries
):
    """The steepest slope of hardswish is 1.5, next to 3 only; a rule that says 1.35 is false on 0.45 of the line."""
    factors = torch.ones(entries)
    factors[-1] = 1.1
    functions = {
        "hardswish": (nn.functional.hardswish, (-0.5, 1.35)),
        "one channel of many": (lambda x: factors * x.tanh(), (0.0, 1.0)),
        "wave": (lambda x: torch.sin(x) + 0.1 * torch.sin(9 * x), (-1.7, 1.7)),
    }
    function, (alpha, beta) = functions[name]
    module = Op(lambda m, x: function(x))
    lipcert.register_rule(Op)(lambda call, x: lipcert.Slope(alpha, beta))
    with pytest.raises(
        lipcert.UnsupportedError, match="but between two inputs the slope is"
    ):
        lipcert.trace(nn.Sequential(nn.Linear(4, entries), module), (4,))


class Turned(nn.Module):
    """Steeper than 1 in one direction of all, which no drawn pair of inputs points to."""

    def __init__(self, n, factor):
        super().__init__()
        axis = randn(n).float()
        self.axis, self.factor = axis / axis.norm(), factor

    def forward(self, x):
        return x + ((self.factor - 1) * (x @ self.axis))[:, None] * self.axis


def test_a_map_that_is_too_steep_in_one_direction_is_refused():
    lipcert.register_rule(Turned)(
        lambda call, x: lipcert.Slope(-1.1, 1.1, elementwise=False)
    )
    lipcert.trace(
        nn.Sequential(nn.Linear(4, 50), Turned(50, 1.0), nn.Linear(50, 2)), (4,)
    )
    with pytest.raises(
        lipcert.UnsupportedError,
        match=r"a slope of at most 1\.1, but between two inputs",
    ):
        lipcert.trace(
            nn.Sequential(nn.Linear(4, 50), Turned(50, 1.4), nn.Linear(50, 2)), (4,)
        )


class Joint(nn.Module):
    """relu, but seven times that where all entries are between 0.1 and 0.2."""

    def forward(self, x):
        inside = ((x > 0.1) & (x < 0.2)).all(1, keepdim=True)
        return torch.relu(x) * torch.where(inside, 7.0, 1.0)


def test_a_map_that_is_too_steep_where_entries_are_alike_is_refused():
    lipcert.register_rule(Joint)(
        lambda call, x: lipcert.Slope(0.0, 1.0, elementwise=False)
    )
    with pytest.raises(
        lipcert.UnsupportedError, match="a slope of at most 1, but between two inputs"
    ):
        lipcert.trace(nn.Sequential(nn.Linear(4, 8), Joint(), nn.Linear(8, 2)), (4,))


FALSE_FACTS = {
    "sin is curved": (
        torch.sin,
        {"curvature": 0.0},
        r"curvature=0, but its slope changes (0\.99|1)",
    ),
    "the chain rule forgotten": (
        lambda x: torch.sin(20 * x) / 20,
        {"curvature": 1.0},
        "its slope changes 20 times",
    ),
    "curved a little more": (torch.sin, {"curvature": 0.9}, r"curvature=0\.9, but"),
    "a kink that is not named": (
        lambda x: (x - 0.3337).abs(),
        {"curvature": 0.0},
        "the rule names no kink",
    ),
    "one kink of two": (
        lambda x: x.clamp(-1, 2),
        {"curvature": 0.0, "kinks": (-1.0,)},
        "the rule names no kink",
    ),
    "a kink far away": (
        lambda x: torch.minimum(x, x * 0 + 700),
        {"curvature": 0.0},
        "the rule names no kink",
    ),
    "it falls": (
        lambda x: -x.roll(1, 1),
        {"monotone": True},
        "monotone=True, but an entry of its result falls",
    ),
    "it falls in places": (
        lambda x: x.roll(1, 1).abs(),
        {"monotone": True},
        "monotone=True, but",
    ),
    "moved channels": (
        lambda x: -x.flip(1),
        {"group": 1},
        r"group=1, but entries of channel \d",
    ),
    "sorted channels": (
        lambda x: x.sort(1).values,
        {"group": 2},
        "group=2, but entries of channel",
    ),
    "fewer channels": (
        lambda x: x.view(-1, 3, 2).amin(2),
        {"group": 1},
        "as many channels in both",
    ),
    "groups that do not fit": (
        lambda x: x.sort(1).values,
        {"group": 4},
        "in groups of 4",
    ),
    "smallest for largest": (
        lambda x: x.view(-1, 3, 2).amin(2),
        {"extremum": 1},
        "extremum=1, but an entry",
    ),
    "largest for smallest": (
        lambda x: x.view(-1, 3, 2).amax(2),
        {"extremum": -1},
        "extremum=-1, but an entry",
    ),
    "half of it": (
        lambda x: x.view(-1, 3, 2).amax(2) / 2,
        {"extremum": 1},
        "is no entry of its input",
    ),
    "sets that meet": (
        lambda x: torch.nn.functional.max_pool1d(x, 2, 1) / 1,
        {"extremum": 1},
        "decided by entry",
    ),
    "the median": (
        lambda x: x.view(-1, 2, 3).median(2).values,
        {"extremum": 1},
        "extremum=1, but an entry",
    ),
}


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = [function]

    def forward(self, x):
        return self.function[0](x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FALSE_FACTS)
def test_false_facts_about_a_nonlinearity_are_refused(name, dtype):
    function, facts, problem = FALSE_FACTS[name]
    slope = lipcert.Slope(
        -1.5, 1.5, ulps=16.0, elementwise="curvature" in facts, **facts
    )
    lipcert.register_rule(Applied)(lambda call, x: slope)
    with pytest.raises(
        lipcert.UnsupportedError, match=r"1 \(Applied\): its rule .*" + problem
    ):
        lipcert.trace(nn.Sequential(nn.Linear(4, 6), Applied(function)).to(dtype), (4,))


def test_facts_of_a_rule_for_an_operator_of_torch_are_tried_out_too():
    lipcert.register_rule(torch.erf)(
        lambda call, x: lipcert.Slope(0.0, 1.13, ulps=4.0, curvature=0.5)
    )
    with pytest.raises(
        lipcert.UnsupportedError, match=r"curvature=0\.5, but its slope changes"
    ):
        lipcert.trace(nn.Sequential(nn.Linear(4, 6), Applied(torch.erf)), (4,))
    lipcert.register_rule(torch.erf)(
        lambda call, x: lipcert.Slope(0.0, 1.13, ulps=4.0, curvature=0.97)
    )
    lipcert.trace(nn.Sequential(nn.Linear(4, 6), Applied(torch.erf)), (4,))


TRUE_FACTS = [
    nn.ReLU(),
    nn.ReLU6(),
    nn.Tanh(),
    nn.LogSigmoid(),
    nn.SELU(),
    nn.Sigmoid(),
    nn.Hardsigmoid(),
    nn.SiLU(),
]
TRUE_FACTS += [
    nn.Mish(),
    nn.Hardswish(),
    nn.Softsign(),
    nn.Hardtanh(-2, 0.7),
    nn.Softshrink(0.3),
    nn.LeakyReLU(-0.3),
]
TRUE_FACTS += [
    nn.PReLU(2),
    nn.ELU(0.7),
    nn.CELU(0.3),
    nn.Softplus(3.0, 40),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.RReLU(),
]
TRUE_FACTS += [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, 1, 1),
    nn.MaxPool2d((1, 2), padding=(0, 1)),
    nn.Softmax(1),
]
TRUE_FUNCTIONS = [
    torch.sin,
    torch.atan,
    torch.asinh,
    torch.abs,
    lambda x: x.sort(1).values,
    lambda x: x.sort(2).values,
]
TRUE_FUNCTIONS += [lambda x: x.amax(3), lambda x: x.amin((2, 3))]
TRUE_FUNCTIONS += [
    lambda x: torch.clamp(
        x, min=torch.tensor([[0.1]]), max=torch.tensor([[[0.5]], [[0.7]]])
    )
]


@pytest.mark.parametrize(
    "module", TRUE_FACTS + [Op(lambda m, x, f=f: f(x)) for f in TRUE_FUNCTIONS], ids=str
)
def test_the_facts_of_our_own_rules_pass_these_trials(module, monkeypatch):
    monkeypatch.setattr(assembly, "is_users", lambda call: True)
    program = lipcert.trace(
        nn.Sequential(nn.Conv2d(1, 2, 1), module).eval(), (1, 4, 4)
    ).program
    normal_form(program.frozen(), exact=True)


def test_a_rule_for_an_operator_is_tried_out_too():
    lipcert.register_rule(torch.tanh)(lambda call, x: lipcert.Slope(0.0, 0.9))
    with pytest.raises(
        lipcert.UnsupportedError,
        match=r"1 \(Tanh\): its rule states slopes in \[0, 0.9\]",
    ):
        lipcert.trace(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), (4,))


CHANGED_SOMEWHERE = {
    "clamp": lambda x: x.clamp(-2, 2),
    "a kink far away": lambda x: x + (x - 1e4).relu(),
    "a kink nearby": lambda x: x + (x - 3).relu(),
    "a jump": lambda x: torch.where(x > 5, -x, x),
    "rows": lambda x: x + (x.flip(0) - 6).relu(),
}


@pytest.mark.parametrize("name", CHANGED_SOMEWHERE)
def test_a_rule_that_passes_on_what_is_changed_at_some_scale_is_refused(name):
    lipcert.register_rule(Applied)(lambda call, x: x)
    with pytest.raises(lipcert.UnsupportedError, match="the call changes"):
        lipcert.trace(Applied(CHANGED_SOMEWHERE[name]), (4,))


def test_a_rule_that_passes_on_what_stays_is_believed():
    lipcert.register_rule(Applied)(lambda call, x: x)
    model = nn.Sequential(Applied(lambda x: x.clone()), nn.Linear(4, 3)).eval()
    assert lipcert.trace(model, (4,)).depth == 0


def test_a_linear_rule_that_is_false_on_an_interval_is_refused():
    lipcert.register_rule(Applied)(lambda call, x: call.linear(lambda v: v))
    bump = Applied(lambda x: x + (10 - (x - 200).abs()).relu())
    with pytest.raises(lipcert.UnsupportedError, match="linear operation that is fal"):
        lipcert.trace(bump, (64,))


def test_a_rule_that_passes_on_what_it_changes_is_refused():
    lipcert.register_rule(Scaled)(lambda call, x: x)
    with pytest.raises(
        lipcert.UnsupportedError, match=r"0 \(Scaled\): its rule passes on its input"
    ):
        lipcert.trace(nn.Sequential(Scaled(), nn.Linear(4, 2)), (4,))


def test_modules_that_mix_rows_cannot_have_a_rule():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    @lipcert.register_rule(Centred)
    def linear(call, x):
        return call.linear()

    with pytest.raises(lipcert.UnsupportedError, match="mixes the rows of a batch"):
        lipcert.trace(nn.Sequential(Centred(), nn.Linear(4, 2)), (4,))
    lipcert.register_rule(Centred)(
        lambda call, x: lipcert.Slope(-2.0, 2.0, elementwise=False)
    )
    with pytest.raises(lipcert.UnsupportedError):
        lipcert.trace(nn.Sequential(Centred(), nn.Linear(4, 2)), (4,))


def test_rule_with_a_signature_that_does_not_fit_is_reported_with_the_node():
    @lipcert.register_rule(ClippedCube)
    def without_arguments(call):
        return lipcert.Slope(0.0, 3.0)

    with pytest.raises(
        lipcert.UnsupportedError,
        match=r"0 \(ClippedCube\).*takes 1 positional argument",
    ):
        lipcert.trace(nn.Sequential(ClippedCube()), (4,))


def test_rules_hold_for_subclasses_that_keep_forward():
    class Named(nn.ReLU):
        pass

    class Changed(nn.ReLU):
        def forward(self, x):
            return 3 * super().forward(x)

    @lipcert.register_rule(nn.ReLU)
    def relu(call, x):
        return lipcert.Slope(0.0, 1.0)

    patched = nn.ReLU()
    patched.forward = lambda x: 3 * torch.relu(x)
    assert find_module_rule(Named(), "residual") is relu
    assert find_module_rule(Changed(), "residual") is None
    assert find_module_rule(patched, "residual") is None
    for module in (Changed(), patched):
        network = lipcert.trace(nn.Sequential(module, nn.Linear(2, 2)), (2,))
        assert network.depth == 1
        torch.testing.assert_close(
            network.push(1, torch.eye(2))[1].T, 3 * module_weight(network)
        )


def module_weight(network):
    """The weight of the only dense layer."""
    (weight,) = [
        e.op.weight()
        for node in network.nodes
        for e in node.edges
        if hasattr(e.op, "weight")
    ]
    return weight
