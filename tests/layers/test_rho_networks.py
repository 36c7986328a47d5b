"""Networks with √ρ-Lipschitz layers: traced in the paper's residual form or as one map, bounded and certified."""

from copy import deepcopy
from math import prod, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rho import (
    ACTIVATIONS,
    RESCALINGS,
    both_kinds,
    every_rescaling,
    factors_of,
    matrix_of,
    randomise,
    single,
    stack,
)
from torch import nn

import lipcert
from helpers import converged, examples, eye, jacobian, jacobian_at, randn, reference
from lipcert.bounds.compute import promised_constants
from lipcert.bounds.fit import FitOptions
from lipcert.certificate.certify import Certifier
from lipcert.errors import OptionError
from lipcert.layers import RhoLipschitzConv2d, RhoLipschitzLinear
from lipcert.network.linear import Scale
from lipcert.network.rewrites import liplt_lines, loop_transform, naive_lines
from lipcert.network.rules import Constant
from lipcert.norms.certified import bound_norms


@both_kinds
@every_rescaling
def test_the_layer_is_traced_as_the_papers_residual_form(kind, rescaling):
    layer, shape = single(kind, nn.LeakyReLU(0.2), rescaling=rescaling, rho=1.6)
    network = lipcert.trace(randomise(layer), shape)
    assert [site.name for site in network.sites] == ["input", "activation", "output"]
    opened, hidden = loop_transform(network, {1: (0.6, 1.0)}), matrix_of(layer, shape)
    n, factors = prod(shape), factors_of(layer, shape)
    linear = sqrt(1.6) * torch.eye(n, dtype=torch.float64) - 0.6 * hidden.T @ (
        factors[:, None] * hidden
    )
    (_, whole) = opened.push(0, eye(shape))
    torch.testing.assert_close(
        whole.reshape(n, n).T, linear, rtol=1e-6, atol=1e-7
    )  # ρ is kept in float32 at first
    linearised = deepcopy(layer)
    linearised.activation = nn.LeakyReLU(1.0)  # φ = id
    (_, whole) = loop_transform(network, {1: (1.0, 1.0)}).push(0, eye(shape))
    torch.testing.assert_close(
        whole.reshape(n, n).T, jacobian(linearised, shape), rtol=1e-10, atol=1e-10
    )
    pulled = opened.pull(2, eye(shape))
    torch.testing.assert_close(
        pulled[1].reshape(n, -1).T, -factors[:, None] * hidden, rtol=1e-10, atol=1e-10
    )
    assert network.push(0, eye(shape))[0] is not None


@both_kinds
@pytest.mark.parametrize("method", ["naive", "liplt"])
def test_estimates_agree_with_dense_references(kind, method):
    model, shape = stack(kind, "sll")
    for target in ("network", "pairwise"):
        value = converged(model, shape, method=method, target=target)()
        torch.testing.assert_close(
            value.detach(),
            reference(model, shape, method, target),
            rtol=1e-6,
            atol=1e-9,
        )


@both_kinds
@every_rescaling
def test_gradients_of_estimates_reach_all_parameters(kind, rescaling):
    model, shape = stack(kind, rescaling)
    lipcert.Estimator(model, shape, power_iterations=50)().sum().backward()
    for name, parameter in model.named_parameters():
        if not name.endswith("bias"):
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.abs().sum() > 0, name


def proved(network, naive=False):
    """The recursion over proved norms of a network."""
    with torch.no_grad():
        network = loop_transform(
            network, naive_lines(network) if naive else liplt_lines(network)
        )
        norms = bound_norms(network, network.depth + 1).bounds
    m = [1.0]
    for j in range(1, network.depth + 2):
        m.append(sum(norms.get((j, i), 0.0) * m[i] for i in range(j)))
    return m[-1]


@examples(0.5)
@given(
    st.sampled_from(["dense", "conv"]),
    st.sampled_from(RESCALINGS),
    st.sampled_from(sorted(ACTIVATIONS)),
    st.integers(0, 999),
)
def test_all_bounds_of_mixed_stacks_hold(kind, rescaling, activation, seed):
    model, shape = stack(kind, rescaling, ACTIVATIONS[activation], seed)
    jacobians = torch.stack(
        [jacobian_at(model, randn(*shape, seed=k)) for k in range(30)]
    )
    sampled = float(torch.linalg.matrix_norm(jacobians, 2).max())
    network = lipcert.trace(model, shape)
    liplt, naive = proved(network), proved(network, naive=True)
    certified = proved(lipcert.trace(model, shape, view="certified"))
    assert sampled <= min(liplt, naive, certified) * (1 + 1e-9)
    assert liplt <= naive * (1 + 1e-9)
    assert float(lipcert.bound(model, shape, target="network").value) == pytest.approx(
        liplt, rel=1e-6
    )


def test_the_certified_view_of_a_chain_is_the_product_of_the_constants():
    rhos = (0.5, 2.0, 1.7)
    model = nn.Sequential(
        *(RhoLipschitzLinear(4, 6, rho=rho, learn_rho=True) for rho in rhos)
    ).double()
    network = lipcert.trace(model, (4,), view="certified")
    assert [site.name for site in network.sites] == ["input", "0", "1", "2", "output"]
    assert proved(network) == pytest.approx(sqrt(prod(rhos)), rel=1e-6)
    for site, layer in zip(network.sites[1:-1], model, strict=True):
        assert site.slope.sector() == (0.0, layer.certified_lipschitz())
        assert site.slope.sector()[0] == 0
        assert not site.slope.elementwise


def test_a_bare_layer_has_both_views():
    layer = RhoLipschitzConv2d(2, 3, rho=4.0)
    names = []
    for view in ("residual", "certified"):
        network = lipcert.trace(layer, (2, 5, 5), view=view)
        names.append([site.name for site in network.sites[1:-1]])
    assert names[0] == ["activation"]
    assert len(names[1]) == 1
    assert float(network.sites[1].slope.lipschitz()) == pytest.approx(2.0, rel=1e-6)
    with pytest.raises(
        OptionError, match=r"view is 'certifed'.*did you mean 'certified'"
    ):
        lipcert.trace(layer, (2, 5, 5), view="certifed")
    with pytest.raises(
        OptionError, match=r"view is 'opaque', expected one of residual, certified"
    ):
        lipcert.trace(layer, (2, 5, 5), view="opaque")


def test_a_subclass_with_another_forward_promises_nothing():
    class Doubled(RhoLipschitzLinear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(4, 6)).double()
    assert [
        site.name for site in lipcert.trace(model, (4,), view="certified").sites
    ] == [
        "input",
        "0.activation",
        "output",
    ]
    steepest = torch.linalg.matrix_norm(jacobian(model, (4,)), 2)
    assert (
        steepest
        <= lipcert.bound(model, (4,), "best", "network", fit=FitOptions(steps=2)).value
    )


@every_rescaling
@both_kinds
def test_certificates_cover_the_rounding_of_the_layers(kind, rescaling):
    model, shape = stack(kind, rescaling)
    model.float()
    bound = lipcert.bound(model, shape)
    certifier = Certifier(model, bound)
    x = torch.rand(200, *shape)
    certificates = certifier.certify(x)
    assert (certificates.radius > 0).any()
    execution = certifier.error_pass.execute(x)
    exact = deepcopy(model).double()(x.double()).detach()
    prediction = execution.logits.argmax(1)
    errors = certifier.rounding.errors(execution, prediction)

    def margins(z):
        return z.double().gather(1, prediction[:, None]) - z.double()

    made = (margins(execution.logits) - margins(exact)).abs()
    assert (made <= errors).all()
    assert made.max() > 0
    directions = nn.functional.normalize(torch.randn(200, prod(shape)).double(), dim=1)
    steps = 0.999 * certificates.radius[:, None] * directions
    moved = (x.double() + steps.reshape(x.shape)).float()
    assert torch.equal(model(moved).argmax(1), certificates.prediction)


def test_factors_that_are_used_as_constants_are_read_anew():
    model, shape = stack("dense")
    network = lipcert.trace(model, shape)
    scales = [
        e.op
        for node in network.nodes
        if node.name == "1"
        for e in node.edges
        if isinstance(e.op, Scale)
    ]
    (scale,) = [op for op in scales if op.factor().dim()]  # the other one is √ρ
    with torch.no_grad():
        model[1].weight.mul_(2.0)
    torch.testing.assert_close(scale.factor(), model[1].factors())
    assert Constant(model[1].factors)().requires_grad


class Functional(nn.Module):
    """relu_1 with the operations of the layer, relu with the layer as one: and relu_1 is another one there."""

    def __init__(self):
        super().__init__()
        self.rho = RhoLipschitzLinear(6, 6)
        self.small, self.large = (
            nn.Linear(6, 6, bias=False),
            nn.Linear(6, 6, bias=False),
        )
        self.last = nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.last(torch.relu(self.large(torch.relu(self.small(self.rho(x))))))


def test_constants_of_one_program_are_not_those_of_another():
    """Sites are known by names, which differ between programs: 79 of 92 radii were false."""
    torch.manual_seed(0)
    model = Functional().eval()
    with torch.no_grad():
        model.small.weight.mul_(1e-3)
        model.large.weight.mul_(1e3)
    best = lipcert.bound(model, (6,), "best", "network", fit=FitOptions(steps=5))
    assert lipcert.estimate_sampled(model, (6,)) <= best.value * (1 + 1e-9)


def test_promised_constants_and_the_best_of_all():
    """∏√ρ between two dense layers; `best` is not above it where LipLT is."""
    torch.manual_seed(0)
    layers = [
        RhoLipschitzLinear(12, 12, rho=rho) for rho in (0.5, 1.0, 2.0, 1.0, 1.5, 1.0)
    ]
    model = nn.Sequential(nn.Linear(6, 12), *layers, nn.Linear(12, 3)).eval()
    promised = promised_constants(model, (6,), ("network", "pairwise"))
    first, last = (
        torch.linalg.matrix_norm(model[k].weight.detach().double(), 2) for k in (0, -1)
    )
    assert float(promised["network"]) == pytest.approx(
        float(first * last) * 1.5**0.5, rel=1e-6
    )
    liplt = lipcert.bound(model, (6,), "liplt", "network").value
    best = lipcert.bound(model, (6,), "best", "network", fit=FitOptions(steps=5))
    assert liplt > promised["network"]
    assert best.value <= promised["network"] * (1 + 1e-9)
    assert lipcert.estimate_sampled(model, (6,)) <= best.value * (1 + 1e-9)
    assert promised_constants(nn.Sequential(nn.Linear(3, 2)), (3,), ("network",)) == {}
