"""What tracing leaves alone: parameters are shared, modes and statistics stay, the model is read live."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lipcert
from helpers import eye, randn
from lipcert.errors import OptionError, ShapeError, TrainingModeError, UnsupportedError
from models import DenselyConnected, Op, gaussian


def matrix(network):
    """B_{1,0} of a network without nonlinearities."""
    (columns,) = network.push(0, eye(network.input_shape).to(network.dtype))
    return columns.flatten(1).T


class Stochastic(nn.Module):
    """BatchNorm and Dropout as modules, and dropout as a function."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return F.dropout(self.drop(self.norm(x)), training=self.training)


@pytest.mark.parametrize(
    ("model", "culprit"),
    [
        (
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
            r"1 \(BatchNorm\) is in training mode",
        ),
        (
            nn.Sequential(nn.Linear(3, 3), nn.Dropout()),
            r"1 \(dropout\) is in training mode",
        ),
        (
            Op(lambda m, x: F.dropout(x, training=m.training)),
            r"dropout \(dropout\) is in training mode",
        ),
    ],
    ids=["BatchNorm", "Dropout", "F.dropout"],
)
def test_training_mode_is_refused_with_the_remedy(model, culprit):
    with pytest.raises(
        TrainingModeError, match=culprit + r".*call model\.eval\(\) first"
    ):
        lipcert.trace(model.train(), (3,))
    assert lipcert.trace(model.eval(), (3,)).depth == 0


def test_training_mode_of_other_layers_does_not_matter():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3)).train()
    model[2].eval()
    assert lipcert.trace(model, (3,)).depth == 1


def test_modes_statistics_and_gradients_stay_as_they_are():
    model = gaussian(nn.Sequential(Stochastic()))
    model.train()
    model[0].drop.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = {name: module.training for name, module in model.named_modules()}
    lipcert.trace(model, (3,), training=True)
    with pytest.raises(TrainingModeError):
        lipcert.trace(model, (3,))
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert all(
        torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()
    )
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_modes_are_restored_after_a_failure():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).train()
    with pytest.raises(UnsupportedError):
        lipcert.trace(model, (3,))
    with pytest.raises(ShapeError):
        lipcert.trace(model, (4,))
    assert all(module.training for module in model.modules())


def test_batch_norm_follows_its_running_statistics():
    model = nn.BatchNorm1d(2, eps=0.0, affine=False).double().eval()
    network = lipcert.trace(model, (2,))
    model.running_var.copy_(torch.tensor([4.0, 25.0]))
    torch.testing.assert_close(
        matrix(network), torch.diag(torch.tensor([0.5, 0.2], dtype=torch.float64))
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.linear(x, m.table),
        lambda m, x: F.linear(x, m.table * 1.0),
        lambda m, x: x @ m.table.T,
        lambda m, x: F.linear(x, m.inner(m.table)),
    ],
    ids=["directly", "computed", "transposed", "through a module"],
)
def test_buffers_are_read_live_and_followed_through_changes_of_type(function):
    model = Op(function, table=torch.ones(2, 3), inner=nn.Identity())
    network = lipcert.trace(model, (3,))
    model.double()
    model.table.copy_(randn(2, 3))
    object.__setattr__(network, "dtype", torch.float64)
    torch.testing.assert_close(matrix(network), model.table)
    model.load_state_dict({"table": randn(2, 3, seed=1)})
    torch.testing.assert_close(matrix(network), randn(2, 3, seed=1))


def test_buffers_of_a_nested_module_are_read_live():
    inner = Op(lambda m, x: x / (m.std * 2), std=torch.ones(2))
    model = nn.Sequential(inner)
    network = lipcert.trace(model, (2,))
    model.to(torch.float64)
    inner.std.fill_(5.0)
    torch.testing.assert_close(matrix(network), 0.1 * torch.eye(2), check_dtype=False)


def test_gradients_reach_parameters_used_by_functions():
    model = Op(
        lambda m, x: F.linear(x, m.w * m.mask),
        w=nn.Parameter(randn(2, 3)),
        mask=torch.tensor([1.0, 0.0, 2.0]),
    )
    network = lipcert.trace(model, (3,))
    network.push(0, eye((3,)))[0].sum().backward()
    assert torch.equal(
        model.w.grad, torch.tensor([[1.0, 0.0, 2.0]] * 2, dtype=torch.float64)
    )


class Normalised(nn.Module):
    """Constants that are written in forward; and an attribute that it sets."""

    def __init__(self, std=0.5):
        super().__init__()
        self.std, self.seen = std, None
        self.dense = nn.Linear(3, 2)

    def forward(self, x):
        self.seen = (x - torch.tensor([0.1, 0.2, 0.3])) / torch.tensor(
            [self.std, 0.6, 0.7]
        )
        return self.dense(self.seen)


def test_constants_in_forward_leave_the_model_as_it_is_and_count_by_their_values():
    model = Normalised().eval()
    before = dict(vars(model))
    bound = lipcert.bound(model, (3,))
    assert len(lipcert.certify(model, torch.rand(2, 3), bound)) == 2
    assert vars(model) == before
    expected = model.dense.weight / torch.tensor([0.5, 0.6, 0.7])
    torch.testing.assert_close(matrix(lipcert.trace(model, (3,))), expected)
    torch.fx.symbolic_trace(
        model
    )  # which sets attributes, so that the next constants have other names
    assert "_tensor_constant0" in vars(model)
    model.seen = None
    bound.check_belongs(model)
    other = Normalised(std=0.4).eval()
    other.load_state_dict(model.state_dict())
    assert not bound.belongs_to(other)


def test_random_constants_are_refused():
    model = Op(lambda m, x: m.dense(x) + torch.rand(10), dense=nn.Linear(3, 10)).eval()
    with pytest.raises(
        UnsupportedError, match=r"rand \(rand\): its result depends on chance"
    ):
        lipcert.certify(model, torch.rand(2, 3))


@pytest.mark.parametrize(
    ("shape", "shown"),
    [(64, "64"), (torch.rand(1, 3), "a Tensor"), ((0, 3), r"\(0, 3\)")],
)
def test_what_an_input_shape_is(shape, shown):
    for function in (lipcert.trace, lipcert.bound, lipcert.Estimator):
        with pytest.raises(
            ShapeError,
            match=rf"input_shape is {shown}, expected a tuple without the batch axis, such",
        ):
            function(nn.Linear(3, 3), shape)


def test_a_function_is_no_model():
    with pytest.raises(
        OptionError, match=r"model is a function, expected a torch.nn.Module"
    ):
        lipcert.bound(F.relu, (3,))


def test_type_and_device_are_those_of_the_model():
    assert lipcert.trace(nn.Linear(2, 2), (2,)).dtype == torch.float32
    assert lipcert.trace(nn.Linear(2, 2).double(), (2,)).dtype == torch.float64


@pytest.mark.parametrize("shape", [(4,), (1, 3, 3), ()], ids=str)
def test_wrong_input_shape(shape):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with pytest.raises(
        ShapeError, match=r"does not accept inputs of shape .*without the batch axis"
    ):
        lipcert.trace(model, (*shape, 5))


def test_a_batch_axis_in_the_input_shape_is_noticed():
    with pytest.raises(ShapeError, match=r"\(8, 3, 5, 5\)"):
        lipcert.trace(nn.Conv2d(3, 2, 3), (8, 3, 5, 5))


@pytest.mark.parametrize("verb", ["apply", "adjoint", "magnitude"])
def test_operations_check_their_input(verb):
    op = lipcert.trace(nn.Linear(3, 2), (3,)).nodes[1].edges[0].op
    with pytest.raises(ShapeError, match=rf"Dense\.{verb} expects rows of shape"):
        getattr(op, verb)(torch.ones(1, 7))


def test_default_arguments_are_constants():
    class Scaled(nn.Module):
        def forward(self, x, factor=3.0, *others, **options):
            return x * factor

    assert torch.equal(matrix(lipcert.trace(Scaled(), (2,))), 3 * torch.eye(2))


def test_tracing_twice_gives_the_same_network():
    model = gaussian(DenselyConnected())
    first, second = lipcert.trace(model, (1, 3, 4)), lipcert.trace(model, (1, 3, 4))
    assert [node.name for node in first.nodes] == [node.name for node in second.nodes]
    assert [site.name for site in first.sites] == [site.name for site in second.sites]
