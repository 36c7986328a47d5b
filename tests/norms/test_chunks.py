"""Estimates in bounded memory, and far maps by products: the same values and gradients, or a stated difference."""

import pytest
import torch

import lipcert
from helpers import dense_maps, reference
from lipcert.errors import OptionError, TooLargeError
from lipcert.norms.chunks import row_bytes
from models import dense_chain, named_models

MODELS = named_models()


def value_and_gradients(model, shape, **options):
    estimator = lipcert.Estimator(model, shape, power_iterations=3, **options)
    model.zero_grad()
    value = estimator()
    value.sum().backward()
    gradients = {
        name: p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return value.detach(), gradients, estimator


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_change_neither_values_nor_gradients(name, accelerated):
    model, shape = MODELS[name]
    options = {"target": "network", "accelerated": accelerated}
    value, gradients, whole = value_and_gradients(model, shape, **options)
    sizes = row_bytes(whole.network, whole._pairs)
    again, recomputed, chunked = value_and_gradients(
        model, shape, memory=max(sizes.values()), **options
    )
    if len(sizes) > 2:
        assert len(chunked._chunks) > 1
    torch.testing.assert_close(again, value, rtol=1e-10, atol=0)
    assert recomputed.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(
            recomputed[parameter], gradient, rtol=1e-8, atol=1e-10
        )
    torch.testing.assert_close(
        chunked(), whole(), rtol=1e-8, atol=0
    )  # the vectors were kept


def test_saved_tensors_are_those_of_one_chunk():
    """What the graph of an estimate keeps until its backward pass."""
    model = dense_chain(*[64] * 12)

    def kept(**options):
        estimator = lipcert.Estimator(
            model, (64,), target="network", power_iterations=1, **options
        )
        weights = {
            parameter.untyped_storage().data_ptr() for parameter in model.parameters()
        }
        sizes = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            estimator()
        return sum(sizes.values())

    little, much = kept(memory=40_000), kept()
    assert little < 0.3 * much, (little, much)


def test_without_room_for_one_norm_there_is_no_derivative():
    estimator = lipcert.Estimator(
        dense_chain(8, 8, 8, 3), (8,), target="network", memory=100
    )
    with pytest.raises(
        TooLargeError,
        match=r"the derivative of one norm takes .* 100 B may be used; .*span=4",
    ):
        estimator()
    with torch.no_grad():
        assert torch.isfinite(estimator())


@pytest.mark.parametrize("span", [1, 2, 3])
def test_far_maps_are_products_of_near_ones(span):
    """Against the recursion over the dense maps, N_ji = N_jk N_ki with k = j − span for far pairs (ρ = 1 for ReLU)."""
    model = dense_chain(6, 7, 5, 8, 6, 7, 3).double()
    maps = dense_maps(model, (6,)).transformed
    constants, norms = [1.0], {}
    for j in range(1, 7):
        for i in reversed(range(j)):
            if j - i <= span:
                norms[j, i] = float(torch.linalg.matrix_norm(maps[j, i], 2))
            else:
                norms[j, i] = norms[j, j - span] * norms[j - span, i]
        constants.append(sum(norms[j, i] * constants[i] for i in range(j)))
    estimator = lipcert.Estimator(
        model, (6,), target="network", span=span, power_iterations=300
    )
    assert len(estimator._pairs) == sum(min(j, span) for j in range(1, 7))
    value = estimator().detach()
    assert float(value) == pytest.approx(constants[-1], rel=1e-6)
    assert value >= reference(model, (6,)).detach() * (1 - 1e-6)


@pytest.mark.parametrize("span", [1, 2, 3])
@pytest.mark.parametrize("target", ["per-class", "pairwise", "last-layer"])
def test_rows_of_logits_at_far_sites_are_products(span, target):
    """‖rows at i‖ ≤ ‖rows at k‖ N_ki for sites i further away than k: against the dense maps."""
    model = dense_chain(6, 7, 5, 8, 6, 7, 3).double()
    maps = dense_maps(model, (6,)).transformed
    near = lipcert.Estimator(
        model, (6,), target=target, span=span, power_iterations=300
    )
    exact = lipcert.Estimator(model, (6,), target=target, power_iterations=300)
    assert bool((near() >= exact() * (1 - 1e-6)).all())
    if target != "per-class":
        return
    constants, norms = [1.0], {}
    for j in range(1, 6):
        for i in reversed(range(j)):
            norms[j, i] = float(torch.linalg.matrix_norm(maps[j, i], 2))
            if j - i > span:
                norms[j, i] = norms[j, j - span] * norms[j - span, i]
        constants.append(sum(norms[j, i] * constants[i] for i in range(j)))
    value = torch.zeros(3, dtype=torch.float64)
    for i in range(6):
        if 6 - i <= span:
            value += maps[6, i].norm(dim=1) * constants[i]
        else:
            value += maps[6, 6 - span].norm(dim=1) * norms[6 - span, i] * constants[i]
    assert torch.allclose(near().detach(), value, rtol=1e-6)


def test_rows_of_logits_without_room_are_refused():
    estimator = lipcert.Estimator(dense_chain(8, 8, 8, 30), (8,), memory=4000)
    with pytest.raises(
        TooLargeError,
        match=r"the rows of 30 logits take about .* may be used; .*span=4",
    ):
        estimator()


def test_gradients_of_products():
    """Against finite differences."""
    model = dense_chain(4, 5, 4, 5, 3).double()
    estimator = lipcert.Estimator(
        model, (4,), target="network", span=1, power_iterations=200
    )
    (gradient,) = torch.autograd.grad(estimator(), [model[0].weight])
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            before = estimator()
            model[0].weight[1, 2] += step
            change = (estimator() - before) / step
            model[0].weight[1, 2] -= step
        assert float(change) == pytest.approx(float(gradient[1, 2]), rel=1e-3)


def test_skip_connections_are_not_cut():
    """Inside a residual block no site lies on all paths: its maps stay."""
    model, shape = MODELS["residual convolutions"]
    exact = lipcert.Estimator(model, shape, target="network", power_iterations=300)
    near = lipcert.Estimator(
        model, shape, target="network", span=1, power_iterations=300
    )
    assert near() >= exact() * (1 - 1e-6)


def test_a_span_is_at_least_one():
    with pytest.raises(OptionError, match="span is 0, expected 1 or more"):
        lipcert.Estimator(dense_chain(4, 5, 3), (4,), span=0)
