"""Rules that users add: the documented way, and what is refused."""

import pytest
import torch
from torch import nn

import lipcert
from helpers import check_linear, randn
from lipcert.network.rules import find_rule
from lipcert.network.rules.registry import _RULES
from models import Op


@pytest.fixture(autouse=True)
def _own_rules(monkeypatch):
    """Rules registered in a test are gone after it."""
    monkeypatch.setattr("lipcert.network.rules.registry._RULES", dict(_RULES))


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
        return torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(self.kernel), n=x.shape[-1]) + 1


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
    circulant = torch.autograd.functional.jacobian(lambda t: model[0](t[None])[0], randn(5))
    op = network.nodes[1].edges[0].op
    torch.testing.assert_close(op.as_matrix(like=circulant), circulant)
    torch.testing.assert_close(op.adjoint(torch.eye(5, dtype=torch.float64)), circulant)
    op.adjoint(torch.eye(5, dtype=torch.float64))[:, 0].sum().backward()
    torch.testing.assert_close(model[0].kernel.grad, torch.ones(5, dtype=torch.float64))
    with pytest.raises(NotImplementedError):
        op.magnitude(randn(1, 5))


def test_rule_for_a_function_and_for_a_method():
    @lipcert.register_rule(torch.cumsum, "cumsum")
    def cumulative_sum(call, x, dim):
        return call.linear(terms=x.shape[dim - 1], nonnegative=True)

    check_linear(Op(lambda m, x: torch.cumsum(x, 1)), (4,))
    check_linear(Op(lambda m, x: x.cumsum(dim=2)), (2, 3))


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
        add = lipcert.network.linear.Function(lambda t: 2 * t.sum(1, keepdim=True), (6,), (1,), 7, True)
        return [flatten, add]

    check_linear(nn.Sequential(Annotated(), Total()), (2, 3))


WRONG = {
    "nonlinear": (torch.relu, "is not linear"),
    "nonlinear and small": (lambda t: 1e-7 * torch.relu(t), "is not linear"),
    "quadratic": (lambda t: t * t, "is not linear"),
    "affine": (lambda t: t + 1, "does not map zero to zero"),
    "mixes rows": (lambda t: t - t.mean(0), "mixes the rows"),
    "wrong shape": (lambda t: t[:, :1], r"maps a batch of 3 to the shape \(3, 1\), expected \(3, 4\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rule_is_refused(name):
    function, problem = WRONG[name]

    @lipcert.register_rule(ClippedCube)
    def wrong(call, x):
        return call.linear(function)

    with pytest.raises(
        lipcert.UnsupportedError, match=r"0 \(ClippedCube\): its rule gives a linear operation that.*" + problem
    ):
        lipcert.trace(nn.Sequential(ClippedCube()), (4,))


def test_rule_with_a_signature_that_does_not_fit_is_reported_with_the_node():
    @lipcert.register_rule(ClippedCube)
    def without_arguments(call):
        return lipcert.Slope(0.0, 3.0)

    with pytest.raises(lipcert.UnsupportedError, match=r"0 \(ClippedCube\).*takes 1 positional argument"):
        lipcert.trace(nn.Sequential(ClippedCube()), (4,))


def test_rules_hold_for_subclasses_that_keep_forward():
    class Named(nn.ReLU):
        pass

    class Changed(nn.ReLU):
        def forward(self, x):
            return 3 * super().forward(x)

    assert find_rule(Named()) is find_rule(nn.ReLU())
    assert find_rule(Changed()) is None
    network = lipcert.trace(nn.Sequential(Changed(), nn.Linear(2, 2)), (2,))
    assert network.depth == 1
    assert network.push(1, torch.eye(2), [0.0, 0.0])[1].shape == (2, 2)
