"""The estimator as a module: state, warm start, types, modes, errors."""

import copy
import pickle

import pytest
import torch
from torch import nn

import lipcert
from helpers import converged, traced
from lipcert.errors import NonFiniteError, OptionError, ShapeError, UnsupportedError
from models import dense_chain, gaussian, named_models

MODELS = named_models()
CHAIN = dense_chain(3, 4, 4, 2)
TARGETS = ["network", "per-class", "last-layer", "pairwise"]


def test_replaced_layers_are_noticed():
    model = dense_chain(4, 6, 3)
    estimator = lipcert.Estimator(model, (4,))
    model.load_state_dict(
        {name: 2 * tensor for name, tensor in model.state_dict().items()}, assign=True
    )
    assert (estimator() > 0).any()  # the same layers with other weights
    model[2] = nn.Linear(6, 3).double()
    with pytest.raises(
        OptionError,
        match="layers of the model were replaced since the estimator was made",
    ):
        estimator()


@pytest.mark.parametrize("method", ["liplt", "rescaled"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))]
)
def test_copies_belong_to_a_copy_of_the_model(method, copied):
    model = dense_chain(4, 6, 6, 6, 6, 6, 6, 3)
    estimator = lipcert.Estimator(
        model, (4,), method, "per-class", 3, seed=5, accelerated=True
    )
    estimator()
    if method == "rescaled":
        estimator.scales.begin_with({"1": torch.full((6,), 2.0)})
    other_model, other = copied((model, estimator))
    assert torch.equal(other(), estimator())
    assert (other.method, other.target, other.accelerated) == (
        method,
        "per-class",
        True,
    )
    before = estimator().detach()
    with torch.no_grad():
        other_model[0].weight.mul_(2)
    assert torch.allclose(estimator(), before, rtol=0.01)
    assert (other() > 1.2 * before).all()
    other().sum().backward()
    assert other_model[0].weight.grad is not None
    assert model[0].weight.grad is None


def test_shapes_of_the_value():
    model = dense_chain(3, 4, 5)
    shapes = {
        target: tuple(lipcert.Estimator(model, (3,), target=target)().shape)
        for target in TARGETS
    }
    assert shapes == {
        "network": (),
        "per-class": (5,),
        "last-layer": (5, 5),
        "pairwise": (5, 5),
    }
    assert all(
        lipcert.Estimator(model, (3,), target=target).pairwise().shape == (5, 5)
        for target in TARGETS
    )


def test_vectors_are_buffers_and_the_model_is_not_part_of_the_estimator():
    model = dense_chain(3, 4, 5)
    estimator = lipcert.Estimator(model, (3,))
    assert list(estimator.parameters()) == []
    assert list(estimator.children()) == []
    assert (
        estimator.state_dict().keys()
        == dict(estimator.named_buffers()).keys()
        == {"vectors_0"}
    )
    assert not any(buffer.requires_grad for buffer in estimator.buffers())


@pytest.mark.parametrize("name", ["chain", "paper residual", "densely connected"])
def test_a_loaded_estimator_continues_with_the_same_value(name):
    model, shape = MODELS[name]
    estimator = lipcert.Estimator(model, shape, power_iterations=1)
    for _ in range(7):
        estimator()
    restored = lipcert.Estimator(model, shape, power_iterations=1, seed=9)
    assert not torch.equal(restored(), estimator())
    restored.load_state_dict(copy.deepcopy(estimator.state_dict()))
    assert torch.equal(restored(), estimator())


@pytest.mark.parametrize("name", ["chain", "two branches"])
def test_one_iteration_per_call_converges_by_the_warm_start(name):
    model, shape = MODELS[name]
    expected = converged(model, shape, target="network")()
    estimator = lipcert.Estimator(model, shape, target="network", power_iterations=1)
    values = [estimator().item() for _ in range(600)]
    assert values[0] < 0.999 * expected.item()
    assert values[-1] == pytest.approx(expected.item(), rel=1e-6)


def test_the_estimate_follows_the_weights_through_training():
    model = dense_chain(4, 6, 6, 3)
    estimator = lipcert.Estimator(model, (4,), target="network", power_iterations=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    first = estimator().item()
    for _ in range(300):
        optimizer.zero_grad()
        estimator().backward()
        optimizer.step()
    fresh = lipcert.Estimator(model, (4,), target="network", power_iterations=1000)
    assert estimator().item() < 0.5 * first
    assert estimator().item() == pytest.approx(fresh().item(), rel=1e-3)


def test_calls_before_a_backward_pass_do_not_disturb_it():
    model = dense_chain(3, 4, 5)
    for iterations in (0, 3):
        estimator = lipcert.Estimator(model, (3,), power_iterations=iterations)
        total = estimator().sum() + estimator().sum()
        total.backward()
        assert model[0].weight.grad.count_nonzero() > 0


def test_no_iterations_leave_the_vectors_alone():
    estimator = lipcert.Estimator(dense_chain(3, 4, 5), (3,), power_iterations=0)
    before = estimator.vectors_0.clone()
    assert torch.equal(estimator(), estimator())
    assert torch.equal(estimator.vectors_0, before)


def test_the_seed_decides_the_first_vectors():
    model = dense_chain(3, 4, 5)
    first, same, other = (
        lipcert.Estimator(model, (3,), power_iterations=1, seed=seed)()
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_no_grad_and_inference_mode():
    model, shape = MODELS["densely connected"]
    expected = lipcert.Estimator(model, shape)().detach()
    for context in (torch.no_grad, torch.inference_mode):
        estimator = lipcert.Estimator(model, shape)
        with context():
            value = estimator()
        torch.testing.assert_close(value.clone(), expected)
        estimator().sum().backward()


@pytest.mark.parametrize("target", TARGETS)
def test_contributions_sum_to_the_value_and_prefixes_are_those_of_sub_networks(target):
    model, shape = MODELS["paper residual"]
    estimate = converged(model, shape, target=target).estimate()
    total = estimate.value
    if total.dim() == 2:
        total = total.sum() / (len(total) * (len(total) - 1))
    assert estimate.contributions.shape == (3,)
    assert estimate.contributions.sum().item() == pytest.approx(
        total.mean().item(), rel=1e-12
    )
    assert estimate.prefix.shape == (2,)


def test_prefixes_are_the_constants_of_the_networks_up_to_each_nonlinearity():
    model = dense_chain(4, 5, 6, 3)
    estimate = converged(model, (4,), target="network").estimate()
    for k, end in enumerate((1, 3)):
        prefix = converged(model[:end], (4,), target="network")()
        assert estimate.prefix[k].item() == pytest.approx(prefix.item(), rel=1e-6)


def noisy():
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.9), nn.Linear(4, 2)
    )


def test_training_mode_uses_the_running_statistics_and_changes_nothing():
    model = gaussian(noisy())
    expected = lipcert.Estimator(model, (3,))()
    model.train()
    state = copy.deepcopy(model.state_dict())
    assert torch.equal(lipcert.Estimator(model, (3,))(), expected)
    assert all(module.training for module in model.modules())
    assert all(
        torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items()
    )


def test_running_statistics_are_followed():
    model = noisy().double().train()
    estimator = lipcert.Estimator(model, (3,), target="network", power_iterations=100)
    before = estimator().item()
    model[1].running_var *= 4
    assert estimator().item() == pytest.approx(before / 2, rel=1e-3)


def test_the_estimator_follows_the_model_to_another_type():
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2))
    estimator = lipcert.Estimator(model, (3,), power_iterations=50)
    single = estimator()
    model.double()
    double = estimator()
    assert (single.dtype, double.dtype, estimator.vectors_0.dtype) == (
        torch.float32,
        torch.float64,
        torch.float64,
    )
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5)
    assert model.float() is model
    assert estimator().dtype == torch.float32


def test_autocast_has_no_effect():
    model = dense_chain(3, 8, 8, 4).float()
    expected = lipcert.Estimator(model, (3,))()
    estimator = lipcert.Estimator(model, (3,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = estimator()
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)


@pytest.mark.parametrize(
    ("layer", "bad", "target"),
    [
        (0, float("nan"), "network"),
        (2, float("inf"), "per-class"),
        (4, float("nan"), "last-layer"),
        (2, float("nan"), "pairwise"),
        (0, float("inf"), "pairwise"),
        (4, float("inf"), "network"),
    ],
)
def test_bad_weights_are_named_and_do_not_spoil_the_vectors(layer, bad, target):
    model, good = CHAIN, dense_chain(3, 4, 4, 2).state_dict()
    model.load_state_dict(good)
    network = traced(model, (3,))
    estimator = lipcert.Estimator(
        model, (3,), target=target, power_iterations=3, network=network
    )
    model[layer].weight.data[0, 0] = bad
    with pytest.raises(
        NonFiniteError, match=rf"{layer}\.weight contains NaN or infinity.*restore"
    ):
        estimator()
    assert all(torch.isfinite(buffer).all() for buffer in estimator.buffers())
    model.load_state_dict(good)
    fresh = lipcert.Estimator(
        model, (3,), target=target, power_iterations=300, network=network
    )()
    estimator.power_iterations = 300
    torch.testing.assert_close(estimator(), fresh, rtol=1e-6, atol=1e-9)


def test_overflow_of_finite_weights_is_an_error_of_its_own():
    model = dense_chain(3, 4, 2).float()
    model[0].weight.data *= 1e30
    model[2].weight.data *= 1e30
    with pytest.raises(NonFiniteError, match="overflows"):
        lipcert.Estimator(model, (3,))()


def test_large_finite_constants_survive_in_float32():
    model = dense_chain(3, 4, 2)
    expected = converged(model, (3,), target="network")().item()
    model.float()
    model[0].weight.data *= 1e15
    estimator = lipcert.Estimator(model, (3,), target="network", power_iterations=300)
    assert estimator().item() == pytest.approx(1e15 * expected, rel=1e-4)


OPTIONS = [
    (
        {"method": "lip-lt"},
        r"method is 'lip-lt', expected one of naive, liplt.*did you mean 'liplt'",
    ),
    ({"target": "pair-wise"}, r"target is 'pair-wise'.*did you mean 'pairwise'"),
    ({"power_iterations": -1}, r"power_iterations is -1, expected 0 or more"),
]


@pytest.mark.parametrize(
    ("options", "message"), OPTIONS, ids=[str(options) for options, _ in OPTIONS]
)
def test_wrong_options(options, message):
    with pytest.raises(OptionError, match=message):
        lipcert.Estimator(dense_chain(3, 4, 2), (3,), **options)


def test_wrong_models_and_shapes():
    with pytest.raises(ShapeError, match=r"\(4,\)"):
        lipcert.Estimator(dense_chain(3, 4, 2), (4,))
    with pytest.raises(UnsupportedError, match="LayerNorm"):
        lipcert.Estimator(nn.LayerNorm(3), (3,))
    with pytest.raises(
        OptionError, match=r"shape \(2, 5\) per input.*target='network'"
    ):
        lipcert.Estimator(nn.Linear(3, 5), (2, 3))
    assert lipcert.Estimator(nn.Linear(3, 5), (2, 3), target="network")().dim() == 0


def test_one_number_per_input():
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double()
    value = lipcert.Estimator(model, (3,), target="network")()
    assert value.item() == pytest.approx(model[0].weight.norm().item())


def test_repr_names_the_options():
    assert "method='liplt', target='pairwise', power_iterations=5" in repr(
        lipcert.Estimator(nn.Linear(2, 2), (2,))
    )


def test_types_with_too_few_bits():
    estimator = lipcert.Estimator(dense_chain(3, 4, 2).half(), (3,))
    with pytest.raises(
        OptionError,
        match=r"estimates need float32 or float64, the model is in torch.float16",
    ):
        estimator()
