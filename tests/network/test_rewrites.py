"""The loop transformation and other coordinates: the maps they leave, and that the function stays the same."""

from functools import partial
from itertools import pairwise

import pytest
import torch

import lipcert
from helpers import dense_maps, eye, jacobians, randn
from lipcert.bounds.recursion import norm_matrix, prefix_constants
from lipcert.network.rewrites import liplt_lines, loop_transform, naive_lines, rescale
from lipcert.network.sweep import Sweep
from models import dense_chain, named_models

MODELS = named_models()


def chain(seed=0):
    """A small MLP, its matrices and its network."""
    model = dense_chain(3, 4, 5, 2, seed=seed).requires_grad_(False)
    return model, [layer.weight for layer in model[::2]], lipcert.trace(model, (3,))


def dense(network):
    """All maps of a network as matrices, by pushing and by pulling; both agree."""
    last = network.depth + 1
    maps = {}
    for i in range(last):
        shape = network.nodes[network.sites[i].output].shape
        for j, columns in enumerate(network.push(i, eye(shape)), start=1):
            if columns is not None and j > i:
                maps[j, i] = columns.reshape(len(columns), -1).T
    for j in range(1, last + 1):
        shape = network.nodes[network.sites[j].source].shape
        for i, rows in enumerate(network.pull(j, eye(shape))):
            if rows is not None and i < j:
                torch.testing.assert_close(
                    rows.reshape(len(rows), -1), maps[j, i], rtol=1e-12, atol=1e-12
                )
    assert sorted(maps) == Sweep(network, last).pairs
    return maps


def check(found, expected):
    assert found.keys() == expected.keys()
    for pair, matrix in expected.items():
        torch.testing.assert_close(found[pair], matrix, rtol=1e-12, atol=1e-12)


def by_hand(weights, centres, radii):
    """B_ji of W_2 φ(W_1 φ(W_0 x)) with φ_i = C_i z + S_i ψ_i: layers with C between them, and S at the end."""
    maps = {}
    for i in range(3):
        matrix = torch.eye(weights[i].shape[1], dtype=torch.float64) * (
            radii[i - 1] if i else 1.0
        )
        for j in range(i + 1, 4):
            matrix = weights[j - 1] @ (
                torch.as_tensor(centres[j - 2]).reshape(-1, 1) * matrix
                if j > i + 1
                else matrix
            )
            maps[j, i] = matrix
    return maps


def constant(network):
    """LipLT: the recursion over the norms of all maps."""
    maps = dense(network)
    norms = torch.stack(
        [torch.linalg.matrix_norm(matrix, 2) for matrix in maps.values()]
    )
    return prefix_constants(norm_matrix(list(maps), norms, network.depth + 2))[
        -1
    ].item()


def reading(value):
    return partial(lambda tensor: tensor, value)


def test_numbers():
    _, weights, network = chain()
    lines = {1: (0.5, 0.5), 2: (0.25, 2.0)}
    w0, w1, w2 = weights
    maps = dense(loop_transform(network, lines))
    check(maps, by_hand(weights, [0.5, 0.25], [0.5, 2.0]))
    torch.testing.assert_close(maps[3, 0], w2 @ w1 @ w0 / 8)
    torch.testing.assert_close(maps[3, 2], 2 * w2)


@pytest.mark.parametrize("seed", range(4))
def test_a_line_for_every_neuron(seed):
    """With |slope − C| ≤ S for both slopes of ReLU the recursion stays valid, whatever C is."""
    model, weights, network = chain(seed)
    centres = [0.5 + 0.5 * randn(n, seed=seed + n) for n in (4, 5)]
    radii = [torch.maximum(c.abs(), (1 - c).abs()) for c in centres]
    lines = {k + 1: (reading(centres[k]), reading(radii[k])) for k in range(2)}
    transformed = loop_transform(network, lines)
    maps, (w0, w1, w2) = dense(transformed), weights
    check(maps, by_hand(weights, centres, radii))
    torch.testing.assert_close(maps[2, 0], w1 @ torch.diag(centres[0]) @ w0)
    torch.testing.assert_close(
        maps[3, 1], w2 @ torch.diag(centres[1]) @ w1 @ torch.diag(radii[0])
    )
    assert torch.linalg.matrix_norm(jacobians(model, (3,), 12), 2).max() <= constant(
        transformed
    ) * (1 + 1e-12)


def test_only_some_sites():
    """The others keep their slopes and let nothing through."""
    _, (w0, w1, w2), network = chain()
    transformed = loop_transform(network, {2: (0.5, 0.5)})
    check(
        dense(transformed),
        {(1, 0): w0, (2, 1): w1, (3, 1): w2 @ w1 / 2, (3, 2): w2 / 2},
    )
    assert [site.slope.interval() for site in transformed.sites[1:-1]] == [
        (0.0, 1.0),
        (-1.0, 1.0),
    ]
    check(dense(loop_transform(network, {})), dense(network))


def test_lines_are_read_when_they_are_used():
    _, (w0, w1, _), network = chain()
    centre, radius = (
        torch.full((4,), 0.5, dtype=torch.float64),
        torch.ones(4, dtype=torch.float64),
    )
    transformed = loop_transform(network, {1: (reading(centre), reading(radius))})
    centre.mul_(3)
    radius.mul_(2)
    maps = dense(transformed)
    torch.testing.assert_close(maps[2, 0], 1.5 * w1 @ w0)
    torch.testing.assert_close(maps[2, 1], 2 * w1)


@pytest.mark.parametrize("name", MODELS)
def test_naive_lines_leave_no_path_and_give_the_product_bound(name):
    model, shape = MODELS[name]
    network = lipcert.trace(model, shape)
    transformed = loop_transform(network, naive_lines(network))
    expected = dense_maps(model, shape, naive=True).transformed
    with torch.no_grad():
        found = dense(transformed)
        assert found.keys() == dense(network).keys()
    check(found, {pair: expected[pair].detach() for pair in found})
    assert all(
        matrix.count_nonzero() == 0
        for pair, matrix in expected.items()
        if pair not in found
    )


def test_the_product_bound():
    _, weights, network = chain()
    product = (
        torch.stack([torch.linalg.matrix_norm(weight, 2) for weight in weights])
        .prod()
        .item()
    )
    assert constant(loop_transform(network, naive_lines(network))) == pytest.approx(
        product, rel=1e-12
    )
    assert constant(loop_transform(network, liplt_lines(network))) < product


@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_lines_cover_the_slopes(name, up):
    """C − S ≤ α and β ≤ C + S, exactly if the lines are rounded up, and closely."""
    network = lipcert.trace(*MODELS[name])
    lines = liplt_lines(network, up)
    assert list(lines) == list(range(1, network.depth + 1))
    for site, line in lines.items():
        alpha, beta = (float(end) for end in network.sites[site].slope.interval())
        centre, radius = (
            value if isinstance(value, float) else value().item() for value in line
        )
        slack = 0.0 if up else 1e-15
        assert centre - radius <= alpha + slack
        assert beta <= centre + radius + slack
        assert radius <= (beta - alpha) / 2 * (1 + 1e-14) + 1e-14 * abs(centre)


@pytest.mark.parametrize("name", MODELS)
def test_transformed_maps_are_those_of_the_dense_reference(name):
    model, shape = MODELS[name]
    network = lipcert.trace(model, shape)
    expected = dense_maps(model, shape).transformed
    with torch.no_grad():
        found = dense(loop_transform(network, liplt_lines(network)))
    check(found, {pair: expected[pair].detach() for pair in found})
    assert all(
        matrix.count_nonzero() == 0
        for pair, matrix in expected.items()
        if pair not in found
    )


@pytest.mark.parametrize("before", [False, True])
def test_other_coordinates(before):
    """D_j⁻¹ B_ji D_i; the transformation and the coordinates may come in any order, for C and S are numbers."""
    _, weights, network = chain()
    diagonals = {1: (randn(4, seed=5)).exp(), 2: (randn(5, seed=6)).exp()}
    readers = {site: reading(diagonal) for site, diagonal in diagonals.items()}
    lines = liplt_lines(network)
    if before:
        rescaled = loop_transform(rescale(network, readers), lines)
    else:
        rescaled = rescale(loop_transform(network, lines), readers)
    d = [
        torch.ones(3, dtype=torch.float64),
        *diagonals.values(),
        torch.ones(2, dtype=torch.float64),
    ]
    plain = by_hand(weights, [0.5, 0.5], [0.5, 0.5])
    check(
        dense(rescaled),
        {(j, i): matrix * d[i] / d[j][:, None] for (j, i), matrix in plain.items()},
    )


def test_other_coordinates_of_some_sites_only():
    _, (w0, w1, w2), network = chain()
    d = randn(5, seed=6).exp()
    check(
        dense(rescale(network, {2: reading(d)})),
        {(1, 0): w0, (2, 1): w1 / d[:, None], (3, 2): w2 * d},
    )


def test_names_shapes_and_values_are_kept():
    model, _, network = chain()
    for rewritten in (
        loop_transform(network, liplt_lines(network)),
        rescale(network, {1: reading(torch.ones(4))}),
    ):
        assert rewritten.site_names() == network.site_names()
        assert (rewritten.input_shape, rewritten.output_shape, rewritten.depth) == (
            (3,),
            (2,),
            2,
        )
        assert [rewritten.in_size(j) for j in (1, 2, 3)] == [4, 5, 2]
        for key, v in network.produced.items():
            assert (
                rewritten.nodes[rewritten.produced[key]].shape == network.nodes[v].shape
            )
        for earlier, later in pairwise(rewritten.sites[1:-1]):
            assert earlier.source < earlier.output < later.output
    assert model(randn(1, 3)).shape == (1, 2)
