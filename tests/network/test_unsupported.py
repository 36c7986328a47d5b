"""Whatever cannot be bounded is refused: every culprit by its qualified name, with its type and a remedy."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lipcert
from lipcert.errors import UnsupportedError
from models import Op


def refusal(model, shape=(4,)):
    with pytest.raises(UnsupportedError) as caught:
        lipcert.trace(model.eval(), shape)
    assert all(str(node) in str(caught.value) for node in caught.value.nodes)
    return caught.value


def test_every_unsupported_node_is_listed_by_qualified_name_type_and_remedy():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            return torch.exp(self.norm(x)).cumsum(1)

    model = nn.Sequential(nn.Linear(4, 4), nn.Hardshrink(), nn.Sequential(Block(), nn.ReLU()), nn.GLU())
    error = refusal(model)
    assert [(node.name, node.kind) for node in error.nodes] == [
        ("1", "Hardshrink"),
        ("2.0.norm", "LayerNorm"),
        ("2.0.exp", "exp"),
        ("2.0.cumsum", "Tensor.cumsum"),
        ("3", "GLU"),
    ]
    assert "5 operations" in str(error)
    assert error.nodes[1].remedy.endswith("use BatchNorm, which is fixed in eval mode")
    assert "@lipcert.register_rule" in error.nodes[0].remedy


ONE = {
    "product of two inputs": (lambda m, x: x * x.relu(), "mul", "not Lipschitz"),
    "division by an input": (lambda m, x: 1 / (x.abs() + 1), "truediv", "division by a constant"),
    "division with rounding": (lambda m, x: torch.div(x, 2, rounding_mode="floor"), "div", "without rounding"),
    "matrix from the input": (lambda m, x: torch.matmul(x[:, None], x[:, :, None]), "matmul", "not linear"),
    "constant matrix on the left": (lambda m, x: torch.matmul(m.square, x[:, :, None]), "matmul", "functional.linear"),
    "vector instead of a matrix": (lambda m, x: x @ m.row[0], "matmul", "constant matrix"),
    "bias from the input": (lambda m, x: F.linear(x, m.square, x), "linear", "add it afterwards"),
    "addmm of the input": (lambda m, x: torch.addmm(x, x, m.square), "addmm", "add it afterwards"),
    "addmm with a factor": (lambda m, x: torch.addmm(m.row, x, m.square, alpha=2), "addmm", "alpha must be 1"),
    "comparison": (lambda m, x: x[x > 0], "gt", "register a rule"),
    "attention": (lambda m, x: F.scaled_dot_product_attention(x[:, None], m.row[None], m.row[None]), "", "Lipschitz"),
    "bicubic": (lambda m, x: F.interpolate(x[:, None, None], scale_factor=2, mode="bicubic"), "interpolate", "bicubic"),
    "chunk": (lambda m, x: x + torch.cat([x.chunk(2, 1)[1], x[:, :2]], 1), "Tensor.chunk", "slices"),
    "split": (lambda m, x: x + torch.cat(torch.split(x, 2, 1)[::-1], 1), "split", "slices"),
    "largest entry and index": (lambda m, x: x - torch.max(x, 1, keepdim=True)[0], "max", "MaxMin"),
    "sorted entries and indices": (lambda m, x: x.sort(1)[0], "Tensor.sort", "several tensors"),
    "dropout that is always on": (lambda m, x: F.dropout(x, 0.1), "dropout", "training=self.training"),
}


@pytest.mark.parametrize("name", ONE)
def test_operation(name):
    function, kind, remedy = ONE[name]
    error = refusal(Op(function, square=torch.eye(4), row=torch.ones(1, 4)))
    assert kind in error.nodes[0].kind
    with pytest.raises(UnsupportedError, match=remedy):
        raise error


MIXING = {
    "mean over the batch": lambda m, x: x - x.mean(0, keepdim=True),
    "sum over everything": lambda m, x: x + x.sum(),
    "softmax over the batch": lambda m, x: torch.softmax(x, 0),
    "softmax over the implicit axis": lambda m, x: F.softmax(x[:, :, None], dim=0),
    "flip": lambda m, x: x.flip(0),
    "roll": lambda m, x: torch.roll(x, 1, 0),
    "roll without axes": lambda m, x: x.roll(1),
    "first row": lambda m, x: x + x[0],
    "shuffled rows": lambda m, x: x.reshape(2, -1),
    "batch axis away": lambda m, x: x.flatten(),
    "transposed": lambda m, x: x.transpose(0, 1),
    "concatenated batch": lambda m, x: torch.cat([x, x]),
    "new first axis": lambda m, x: x.unsqueeze(0),
    "scaled by the batch size": lambda m, x: x * x.shape[0],
    "all rows with all rows": lambda m, x: x + x[:, None],
    "batch statistics": lambda m, x: F.batch_norm(x, None, None, training=True),
    "batch statistics of a module": lambda m, x: m.norm(x),
}


@pytest.mark.parametrize("name", MIXING)
def test_operation_that_mixes_the_rows_of_a_batch(name):
    error = refusal(Op(MIXING[name], norm=nn.BatchNorm1d(4, track_running_stats=False)))
    assert any(word in error.nodes[0].remedy for word in ("batch", "rows"))


def test_only_the_culprit_of_mixed_rows_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(0), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    (node,) = refusal(model).nodes
    assert (node.name, node.kind) == ("1", "Softmax")
    assert "whole batch" in node.remedy


def test_hooks_on_a_layer_a_container_or_the_model():
    def double(module, inputs, output):
        return 2 * output

    for culprit in (lambda m: m[0], lambda m: m):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        handle = culprit(model).register_forward_hook(double)
        assert "remove them" in refusal(model).nodes[0].remedy
        handle.remove()
        assert lipcert.trace(model, (4,)).depth == 1
    with pytest.warns(FutureWarning, match="weight_norm"):
        old = nn.utils.weight_norm(nn.Linear(4, 4))
    assert "parametrizations" in refusal(old).nodes[0].remedy
    bare = nn.Linear(4, 4)
    bare.register_forward_pre_hook(lambda module, inputs: (3 * inputs[0],))
    assert len(refusal(bare).nodes) == 1


def test_hooks_on_a_container_are_traced_like_code():
    model = nn.Sequential(nn.Sequential(nn.Identity()), nn.Linear(4, 2, bias=False))
    model[0].register_forward_hook(lambda module, inputs, output: 3 * output)
    (columns,) = lipcert.trace(model, (4,)).push(0, torch.eye(4), [0.0])
    assert torch.equal(columns, model(torch.eye(4)))


def test_in_place_operation_on_a_value_used_elsewhere():
    (node,) = refusal(Op(lambda m, x: (y := m.first(x)) + m.relu(y), first=nn.Linear(4, 4), relu=nn.ReLU(True))).nodes
    assert node.kind == "in-place"
    assert "out-of-place" in node.remedy
    (node,) = refusal(Op(lambda m, x: x.mul_(2) + x)).nodes
    assert node.kind == "in-place"


def test_in_place_operation_on_a_value_used_once_is_accepted():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    assert lipcert.trace(model, (4,)).depth == 1


def test_several_inputs_or_none():
    class Two(nn.Module):
        def forward(self, x, y, z):
            return x + y + z

    nodes = refusal(Two()).nodes
    assert [node.name for node in nodes] == ["y", "z"]
    assert "more than one input" in nodes[0].remedy
    assert "depends on its input" in refusal(Op(lambda m, x: m.w, w=nn.Parameter(torch.ones(3)))).nodes[0].remedy


def test_several_outputs():
    assert "must return one tensor" in refusal(Op(lambda m, x: (x, 2 * x))).nodes[0].remedy
    assert "must return one tensor" in refusal(Op(lambda m, x: {"logits": x})).nodes[0].remedy


@pytest.mark.parametrize(
    "function",
    [lambda m, x: x if x.sum() > 0 else -x, lambda m, x: sum(row for row in x), lambda m, x: x * float(x[0, 0])],
    ids=["if", "for", "float"],
)
def test_control_flow(function):
    (node,) = refusal(Op(function)).nodes
    assert (node.name, node.kind) == ("Op", "torch.fx")
    assert "control flow" in node.remedy


def test_the_line_where_forward_cannot_be_followed_is_named():
    def forward(m, x):
        assert x.shape[1] == 4
        return x

    line = f"test_unsupported.py:{forward.__code__.co_firstlineno + 1}: "
    assert line in refusal(Op(forward)).nodes[0].remedy
    (node,) = refusal(Op(lambda m, x: m.missing(x))).nodes
    assert "its forward uses a name that is not defined (AttributeError at " in node.remedy
    assert "control flow" not in node.remedy


@pytest.mark.parametrize(
    ("layer", "remedy"),
    [
        (nn.MultiheadAttention(4, 1, batch_first=True), "attention is not globally Lipschitz"),
        (nn.LSTM(4, 4, batch_first=True), "recurrent layers are not supported"),
        (nn.MaxPool1d(2, return_indices=True), "register a rule"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_modules_with_several_results(layer, remedy):
    inputs = 3 if isinstance(layer, nn.MultiheadAttention) else 1
    (node,) = refusal(Op(lambda m, x: m.layer(*[x] * inputs)[0], layer=layer), (3, 4)).nodes
    assert remedy in node.remedy


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda m, x: F.dropout(x), "dropout"),
        (lambda m, x: x + torch.rand_like(x), "rand_like"),
        (lambda m, x: x * torch.rand_like(m.w), "mul"),
    ],
    ids=["dropout", "noise", "random factors"],
)
def test_what_is_random_is_not_called_in_place(function, kind):
    (node,) = refusal(Op(function, w=nn.Parameter(torch.ones(4)))).nodes
    assert node.kind == kind


WRAPPERS = {
    "script": (torch.jit.script, "pass the original module"),
    "compile": (torch.compile, r"its \._orig_mod"),
    "DataParallel": (nn.DataParallel, r"its \.module"),
    "AveragedModel": (torch.optim.swa_utils.AveragedModel, r"its \.module"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_models_are_to_be_unwrapped(name):
    wrapper, remedy = WRAPPERS[name]
    wrapped = wrapper(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    for model, culprit in ((wrapped, "the model"), (nn.Sequential(nn.ReLU(), wrapped), "1")):
        error = refusal(model)
        assert error.nodes[0].name == culprit
        with pytest.raises(UnsupportedError, match=remedy):
            raise error


def test_unsupported_layers_are_reported_before_training_mode():
    with pytest.raises(UnsupportedError, match="LayerNorm"):
        lipcert.trace(nn.Sequential(nn.LayerNorm(4), nn.Dropout()).train(), (4,))


def test_transposed_convolution_with_output_size():
    model = Op(lambda m, x: m.up(x, output_size=[6]), up=nn.ConvTranspose1d(1, 1, 3, 2))
    assert "output_padding" in refusal(model, (1, 2)).nodes[0].remedy
