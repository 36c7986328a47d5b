"""What every estimate must satisfy, whatever the network."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from helpers import converged, examples, randn
from models import PaperResidual, RandomDag, dense_chain, gaussian, named_models

OPERATIONS = st.sampled_from(
    ["linear", "cat", "add", "relu", "relu", "gelu", "tanh", "leaky"]
)


@examples(0.4)
@given(
    plan=st.lists(
        st.tuples(OPERATIONS, st.integers(0, 9), st.integers(0, 9)),
        min_size=2,
        max_size=8,
    ),
    seed=st.integers(0, 99),
)
def test_liplt_is_at_most_naive_on_random_dags(plan, seed):
    model = gaussian(RandomDag(3, 3, plan), seed)
    with torch.no_grad():
        liplt, naive = (
            converged(model, (3,), method=method)() for method in ("liplt", "naive")
        )
    assert (liplt <= naive * (1 + 1e-9)).all()


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("chain", "network"),
        ("chain", "per-class"),
        ("chain", "last-layer"),
        ("prelu chain", "pairwise"),
        ("paper residual", "pairwise"),
        ("residual convolutions", "pairwise"),
        ("two branches", "network"),
    ],
)
def test_gradients_agree_with_finite_differences(name, target):
    """Along a random direction in the space of all parameters."""
    model, shape = named_models()[name]
    estimator = converged(model, shape, target=target)
    parameters = list(model.parameters())
    directions = [randn(*p.shape, seed=k) for k, p in enumerate(parameters)]
    gradients = torch.autograd.grad(
        _weighted(estimator()), parameters, materialize_grads=True
    )
    slope = sum(
        (g * d).sum() for g, d in zip(gradients, directions, strict=True)
    ).item()
    step = 1e-5
    values = []
    with torch.no_grad():
        for sign in (1, -2):
            for p, d in zip(parameters, directions, strict=True):
                p.add_(d, alpha=sign * step)
            for _ in range(3):
                estimate = _weighted(estimator())
            values.append(estimate.item())
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4)


def _weighted(estimate):
    return (
        (estimate * randn(*estimate.shape, seed=11)).sum()
        if estimate.dim()
        else estimate
    )


@cache
def traced_chain():
    """A chain and its network, which reads the weights whenever it is used."""
    model = dense_chain(3, 4, 4, 3)
    return model, lipcert.trace(model, (3,))


def estimate_afresh(network, method, target):
    """20 iterations from the first vectors."""
    estimator = lipcert.Estimator.of_network(network, method, target)
    estimator.power_iterations = 20
    return estimator.estimate()


@pytest.mark.parametrize("method", ["naive", "liplt"])
@pytest.mark.parametrize("target", ["network", "per-class", "last-layer", "pairwise"])
@given(factor=st.floats(1e-3, 1e3), layer=st.integers(0, 2))
def test_positive_homogeneity(method, target, factor, layer):
    """Scaling any layer of a chain scales the constants of what follows it; signs do not matter."""
    model, network = traced_chain()
    model.load_state_dict(dense_chain(3, 4, 4, 3).state_dict())
    before = estimate_afresh(network, method, target)
    model[2 * layer].weight.data *= -factor
    after = estimate_afresh(network, method, target)
    torch.testing.assert_close(after.value, factor * before.value, rtol=1e-9, atol=0)
    torch.testing.assert_close(
        after.prefix[:layer], before.prefix[:layer], rtol=1e-9, atol=0
    )
    torch.testing.assert_close(
        after.prefix[layer:], factor * before.prefix[layer:], rtol=1e-9, atol=0
    )


def test_biases_do_not_matter():
    model = dense_chain(3, 4, 3)
    before = lipcert.Estimator(model, (3,))()
    model[0].bias.data += 5
    model[2].bias.data -= 7
    assert torch.equal(lipcert.Estimator(model, (3,))(), before)


@given(seed=st.integers(0, 99))
def test_orthogonal_layers_make_the_bound_tight_in_the_last_layer(seed):
    """With orthogonal W_0 and ReLU, m_1 = 1, and LipLT is (‖W_1‖ + ‖W_1‖)/2 = ‖W_1‖, which is attained."""
    model = dense_chain(4, 4, 2, seed=seed)
    model[0].weight.data = torch.linalg.qr(model[0].weight.data).Q
    constant = converged(model, (4,), target="network")().item()
    assert constant == pytest.approx(
        torch.linalg.matrix_norm(model[2].weight, 2).item(), rel=1e-6
    )


def test_a_residual_branch_of_zero_leaves_the_skip_connection():
    model = gaussian(PaperResidual([4, 4], 5, 3, nn.ReLU))
    model.g[0].weight.data.zero_()
    constant = converged(model, (4,), target="network")().item()
    product = model.out.weight @ model.h[0].weight
    assert constant == pytest.approx(
        torch.linalg.matrix_norm(product, 2).item(), rel=1e-6
    )
