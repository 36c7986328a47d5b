"""The normal form of whole networks: sites, and every B_ji, against matrices found by cutting the model open."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from helpers import dense_maps, eye, randn
from lipcert.network.rewrites import liplt_lines, loop_transform, naive_lines
from lipcert.network.sweep import Sweep
from models import Op, RandomDag, dense_chain, gaussian, named_models

MODELS = named_models()
PLANS = st.lists(
    st.tuples(
        st.sampled_from(
            ["linear", "cat", "add", "relu", "relu", "gelu", "tanh", "leaky"]
        ),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    min_size=2,
    max_size=8,
)


def check_maps(model, shape):
    """push, pull and both directions of the batched sweep agree with the dense B_ji, zero where there is none.

    After the loop transformation B_ji contains the radius of site i: φ = C·z + S·ψ(z), and ψ is the site.
    """
    network = lipcert.trace(model, shape)
    lines = liplt_lines(network)
    dense = dense_maps(model, shape)
    radii = [
        1.0,
        *(float(s().detach() if callable(s) else s) for _, s in lines.values()),
    ]
    assert radii == pytest.approx(dense.radii)
    maps = {(j, i): radii[i] * matrix for (j, i), matrix in dense.maps.items()}
    network = loop_transform(network, lines)
    assert all(site.slope.interval() == (-1.0, 1.0) for site in network.sites[1:-1])
    for i in range(network.depth + 1):
        start = network.nodes[network.sites[i].output].shape
        with torch.no_grad():
            pushed = network.push(i, eye(start))
        for j in range(i + 1, network.depth + 2):
            columns = pushed[j - 1]
            found = (
                torch.zeros_like(maps[j, i])
                if columns is None
                else columns.flatten(1).T
            )
            torch.testing.assert_close(found, maps[j, i], rtol=1e-9, atol=1e-9)
    for j in range(1, network.depth + 2):
        end = network.nodes[network.sites[j].source].shape
        with torch.no_grad():
            pulled = network.pull(j, eye(end))
        for i, rows in enumerate(pulled[:j]):
            found = torch.zeros_like(maps[j, i]) if rows is None else rows.flatten(1)
            torch.testing.assert_close(found, maps[j, i], rtol=1e-9, atol=1e-9)
    check_sweep(network, maps)


def check_sweep(network, maps):
    sweep = Sweep(network, network.depth + 1)
    joined = {pair for pair, matrix in maps.items() if matrix.count_nonzero()}
    assert joined <= set(sweep.pairs)
    start_shapes = {
        i: network.nodes[network.sites[i].output].shape for i in sweep.starts
    }
    end_shapes = {j: network.nodes[network.sites[j].source].shape for j in sweep.ends}
    x = {
        i: randn(len(rows), *start_shapes[i], seed=i)
        for i, rows in sweep.starts.items()
    }
    y = {j: randn(len(rows), *end_shapes[j], seed=j) for j, rows in sweep.ends.items()}
    with torch.no_grad():
        forward, adjoint = sweep.forward(x), sweep.adjoint(y)
    for pair in sweep.pairs:
        j, i = pair
        start, end = sweep.starts[i].index(pair), sweep.ends[j].index(pair)
        image = maps[pair] @ x[i][start].flatten()
        preimage = maps[pair].T @ y[j][end].flatten()
        torch.testing.assert_close(
            forward[j][end].flatten(), image, rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(
            adjoint[i][start].flatten(), preimage, rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("name", MODELS)
def test_all_maps_of_a_network(name):
    check_maps(*MODELS[name])


@given(plan=PLANS, seed=st.integers(0, 99))
def test_all_maps_of_a_random_dag(plan, seed):
    check_maps(gaussian(RandomDag(3, 2, plan), seed), (3,))


SITES = {
    "chain": ["1", "3"],
    "densely connected": ["relu", "relu", "relu"],
    "two branches": ["relu", "gelu"],
    "relu then max-pool": ["1", "2", "4"],
    "residual convolutions": ["2", "3.relu", "3.relu", "4.relu", "4.relu"],
    "ends in a nonlinearity": ["1", "3"],
    "purely linear": [],
}


@pytest.mark.parametrize("name", SITES)
def test_sites_are_the_nonlinearities_in_order(name):
    network = lipcert.trace(*MODELS[name])
    assert [site.name for site in network.sites] == ["input", *SITES[name], "output"]
    assert network.depth == len(SITES[name])
    assert network.classes == 3


def test_identity_model():
    network = lipcert.trace(nn.Identity(), (2, 3))
    assert network.depth == 0
    (columns,) = network.push(0, eye((2, 3)))
    assert torch.equal(columns, eye((2, 3)))
    with pytest.raises(lipcert.errors.OptionError, match="expected a vector of logits"):
        _ = network.classes


def test_sizes_of_sites():
    network = lipcert.trace(*MODELS["relu then max-pool"])
    assert [network.in_size(j) for j in range(1, 5)] == [32, 32, 2, 3]
    assert [network.out_size(i) for i in range(4)] == [36, 32, 8, 2]


def test_without_loop_transformation_sites_have_their_lipschitz_constants():
    network = lipcert.trace(*MODELS["gelu chain"])
    lines = naive_lines(network)
    assert list(lines.values()) == [(0.0, network.sites[1].slope.beta)] * 2
    moved = loop_transform(network, lines)
    assert [
        j
        for j, columns in enumerate(moved.push(0, eye((4,))), start=1)
        if columns is not None
    ] == [1]


def test_an_activation_reached_twice_counts_once():
    """x ↦ h + h with h = relu(x): one site, and its output enters twice."""
    network = lipcert.trace(Op(lambda m, x: twice(x.relu())), (2,))
    assert network.depth == 1
    assert network.pull(2, eye((2,)))[0] is None
    assert torch.equal(network.pull(2, eye((2,)))[1], 2 * eye((2,)))


def twice(h):
    return h + h


def test_the_representation_is_a_summary():
    shown = repr(lipcert.trace(dense_chain(4, *(5 for _ in range(30)), 3), (4,)))
    assert shown.startswith("Network((4,) → (3,), 30 nonlinearities: ")
    assert shown.endswith(" and 26 more)")
    assert len(shown) < 120
    assert (
        repr(lipcert.trace(dense_chain(4, 3), (4,)))
        == "Network((4,) → (3,), 0 nonlinearities)"
    )
    assert (
        repr(lipcert.trace(dense_chain(4, 5, 3), (4,)))
        == "Network((4,) → (3,), 1 nonlinearity: 1)"
    )
