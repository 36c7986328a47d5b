"""Whatever cannot be bounded is refused: every culprit by its qualified name, with its type and a remedy."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lipcert
from lipcert.errors import OptionError, TrainingModeError, UnsupportedError
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

    model = nn.Sequential(
        nn.Linear(4, 4), nn.Hardshrink(), nn.Sequential(Block(), nn.ReLU()), nn.GLU()
    )
    error = refusal(model)
    assert [(node.name, node.kind) for node in error.nodes] == [
        ("1", "Hardshrink"),
        ("2.0.norm", "LayerNorm"),
        ("2.0.exp", "exp"),
        ("2.0.cumsum", "cumsum"),
        ("3", "GLU"),
    ]
    assert "5 operations" in str(error)
    assert error.nodes[1].remedy.endswith(
        "lipcert.certify_local, which bounds it over a ball"
    )
    assert "@lipcert.register_rule" in error.nodes[0].remedy


ONE = {
    "product of two inputs": (lambda m, x: x * x.relu(), "mul", "not Lipschitz"),
    "bilinear": (
        lambda m, x: F.bilinear(x, x, m.square[None]),
        "bilinear",
        "not Lipschitz",
    ),
    "addcmul of two inputs": (
        lambda m, x: torch.addcmul(m.row, x, x),
        "addcmul",
        "not Lipschitz",
    ),
    "interpolation by the input": (
        lambda m, x: torch.lerp(x, m.row, x),
        "lerp",
        "its weight depends",
    ),
    "division by an input": (
        lambda m, x: 1 / (x.abs() + 1),
        "reciprocal",
        "its slope is not bounded",
    ),
    "constant over input": (
        lambda m, x: m.row / (x.abs() + 1),
        "div",
        "division by a constant",
    ),
    "quotient of inputs": (
        lambda m, x: x / (x.abs() + 2),
        "div",
        "divide by a constant",
    ),
    "quotient with itself": (lambda m, x: x / x, "div", "not continuous at zero"),
    "division with rounding": (
        lambda m, x: torch.div(x, 2, rounding_mode="floor"),
        "div",
        "without rounding",
    ),
    "matrix from the input": (
        lambda m, x: torch.matmul(x[:, None], x[:, :, None]),
        "matmul",
        "not Lipschitz",
    ),
    "einsum of two inputs": (
        lambda m, x: torch.einsum("bi,bi->b", x, x),
        "einsum",
        "not linear",
    ),
    "einsum without output": (
        lambda m, x: torch.einsum("bi,ij", x, m.square),
        "einsum",
        "'bi,oi->bo'",
    ),
    "bias from the input": (
        lambda m, x: F.linear(x, m.square, x),
        "linear",
        "add it afterwards",
    ),
    "weight from the input": (
        lambda m, x: F.conv1d(m.row[None], x[:, None]).mT[0],
        "conv1d",
        "depends on the network's",
    ),
    "addmm of the input": (
        lambda m, x: torch.addmm(x, x, m.square),
        "addmm",
        "add it afterwards",
    ),
    "addmm with a factor": (
        lambda m, x: torch.addmm(m.row, x, m.square, alpha=2),
        "addmm",
        "alpha must be 1",
    ),
    "baddbmm": (
        lambda m, x: torch.baddbmm(
            m.row[None], x[:, None], m.square.expand(x.shape[0], 4, 4)
        ),
        "baddbmm",
        "sum",
    ),
    "comparison": (lambda m, x: x * (x > 0), "gt", "register a rule"),
    "entries that it picks itself": (
        lambda m, x: x.gather(1, x.argsort(1)),
        "argsort",
        "register a rule",
    ),
    "positive entries": (lambda m, x: x[x > 0], "gt", "register a rule"),
    "entries by a mask": (lambda m, x: x[:, m.mask], "index", "use positions"),
    "attention": (
        lambda m, x: F.scaled_dot_product_attention(
            x[:, None], m.row[None], m.row[None]
        ),
        "",
        "Lipschitz",
    ),
    "bicubic": (
        lambda m, x: F.interpolate(x[:, None, None], scale_factor=2, mode="bicubic"),
        "upsample",
        "bicubic",
    ),
    "unset memory": (
        lambda m, x: torch.empty_like(x) + x,
        "empty_like",
        "use torch.zeros_like",
    ),
    "another type": (lambda m, x: x.double().float(), "to", "use one type throughout"),
    "numbers of entries": (
        lambda m, x: x.long().float(),
        "to",
        "use one type throughout",
    ),
    "negative divisor": (
        lambda m, x: F.avg_pool2d(x[:, None, None], 1, divisor_override=-1),
        "avg_pool2d",
        "negative",
    ),
    "complex numbers": (lambda m, x: torch.fft.fft(x).abs(), "fft", "register a rule"),
}


@pytest.mark.parametrize("name", ONE)
def test_operation(name):
    function, kind, remedy = ONE[name]
    mask = torch.tensor([True, False, True, True])
    error = refusal(Op(function, square=torch.eye(4), row=torch.ones(1, 4), mask=mask))
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
    "transposed by T": lambda m, x: x.T,
    "transposed by t": lambda m, x: x.t(),
    "transposed by mT": lambda m, x: x.mT,
    "stacked": lambda m, x: torch.vstack([x, x]),
    "stacked in front": lambda m, x: torch.stack([x, x]),
    "flipped up and down": lambda m, x: x.flipud(),
    "raveled": lambda m, x: x.ravel(),
    "split": lambda m, x: x.split(1)[0] + x,
    "sum of rows": lambda m, x: x + x.sum(0),
    "moved": lambda m, x: x.movedim(0, 1),
    "moved twice": lambda m, x: x[:, None].movedim((0, 1), (1, 0)),
    "repeated": lambda m, x: x.repeat(2, 1),
    "padded": lambda m, x: F.pad(x, (0, 0, 1, -1)),
    "sum of rows by einsum": lambda m, x: torch.einsum(
        "bi,bj->ij", m.square[:1].expand(x.shape[0], 4), x
    ),
    "einsum to another axis": lambda m, x: torch.einsum("bi,ij->jb", x, m.square),
    "first row overwritten": lambda m, x: overwritten(x, 0),
    "all but one row overwritten": lambda m, x: overwritten(x, slice(1, None)),
    "some rows": lambda m, x: x[[0, 0]],
    "triangle of the batch": lambda m, x: x.tril(),
    "diagonal of the batch": lambda m, x: x.diagonal(),
    "length of the batch": lambda m, x: x / len(x),
    "numbers of rows": lambda m, x: x + torch.arange(x.shape[0])[:, None],
    "batch statistics": lambda m, x: F.batch_norm(x, None, None, training=True),
    "batch statistics of a module": lambda m, x: m.norm(x),
}


def overwritten(x, rows):
    y = x.clone()
    y[rows] = 0
    return y


@pytest.mark.parametrize("name", MIXING)
def test_operation_that_mixes_the_rows_of_a_batch(name):
    error = refusal(
        Op(
            MIXING[name],
            norm=nn.BatchNorm1d(4, track_running_stats=False),
            square=torch.eye(4),
        )
    )
    assert any(word in error.nodes[0].remedy for word in ("batch", "rows"))


def test_only_the_culprit_of_mixed_rows_is_named():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Softmax(0), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)
    )
    (node,) = refusal(model).nodes
    assert (node.name, node.kind) == ("1", "Softmax")
    assert "whole batch" in node.remedy


def test_several_inputs_or_none():
    class Two(nn.Module):
        def forward(self, x, y, z):
            return x + y + z

    nodes = refusal(Two()).nodes
    assert [node.name for node in nodes] == ["y", "z"]
    assert "more than one input" in nodes[0].remedy
    assert (
        "depends on its input"
        in refusal(Op(lambda m, x: m.w, w=nn.Parameter(torch.ones(3)))).nodes[0].remedy
    )


def test_several_outputs():
    assert (
        "must return one tensor" in refusal(Op(lambda m, x: (x, 2 * x))).nodes[0].remedy
    )
    assert (
        "must return one tensor"
        in refusal(Op(lambda m, x: {"logits": x})).nodes[0].remedy
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x if x.sum() > 0 else -x,
        lambda m, x: sum(row for row in x),
        lambda m, x: x * float(x[0, 0]),
    ],
    ids=["if", "for", "float"],
)
def test_control_flow(function):
    (node,) = refusal(Op(function)).nodes
    assert node.name == "Op"
    assert any(word in node.remedy for word in ("control flow", "rows of a batch"))


def test_the_line_where_forward_cannot_be_followed_is_named():
    def forward(m, x):
        return x if x.sum() > 0 else -x

    line = f"test_unsupported.py:{forward.__code__.co_firstlineno + 1}: "
    assert line in refusal(Op(forward)).nodes[0].remedy
    (node,) = refusal(Op(lambda m, x: m.missing(x))).nodes
    assert (
        "its forward uses a name that is not defined (AttributeError at " in node.remedy
    )
    assert "control flow" not in node.remedy


def test_assertions_and_conditions_on_shapes_are_followed():
    def forward(m, x):
        assert x.shape[1] == 4
        return x.flatten(1) if x.dim() > 2 else 2 * x

    assert lipcert.trace(Op(forward), (4,)).depth == 0


@pytest.mark.parametrize(
    ("layer", "remedy"),
    [
        (
            nn.MultiheadAttention(4, 1, batch_first=True),
            "attention is not globally Lipschitz",
        ),
        (nn.LSTM(4, 4, batch_first=True), "recurrent layers are not supported"),
        (nn.GRU(4, 4, batch_first=True), "recurrent layers are not supported"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_modules_with_several_results(layer, remedy):
    inputs = 3 if isinstance(layer, nn.MultiheadAttention) else 1
    (node,) = refusal(
        Op(lambda m, x: m.layer(*[x] * inputs)[0], layer=layer), (3, 4)
    ).nodes
    assert remedy in node.remedy


@pytest.mark.parametrize(
    "layer",
    [nn.LSTMCell(4, 4), nn.GRUCell(4, 4), nn.RNNCell(4, 4)],
    ids=lambda layer: type(layer).__name__,
)
def test_recurrent_cells(layer):
    nodes = refusal(Op(lambda m, x: m.layer(x)[0], layer=layer)).nodes
    assert (nodes[0].name, nodes[0].kind) == ("layer", type(layer).__name__)
    assert "recurrent layers are not supported" in nodes[0].remedy


def test_transformers_are_refused_as_a_whole():
    (node,) = refusal(
        nn.Sequential(nn.TransformerEncoderLayer(4, 1, 8, batch_first=True)), (3, 4)
    ).nodes
    assert (node.name, node.kind) == ("0", "TransformerEncoderLayer")
    assert "attention is not globally Lipschitz" in node.remedy


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda m, x: x + torch.rand_like(x), "rand_like"),
        (lambda m, x: x * torch.rand_like(m.w), "rand_like"),
        (lambda m, x: x + torch.randn(4), "randn"),
        (lambda m, x: x + torch.empty(4), "empty"),
        (lambda m, x: x * torch.randint(1, 3, (4,)), "randint"),
        (lambda m, x: x * torch.bernoulli(m.w * 0.5), "bernoulli"),
        (lambda m, x: x + torch.normal(m.w), "normal"),
        (lambda m, x: x[:, torch.randperm(4)], "randperm"),
        (lambda m, x: x * F.dropout(m.w), "dropout"),
    ],
)
def test_what_is_random_is_named(function, kind):
    node = refusal(Op(function, w=nn.Parameter(torch.ones(4)))).nodes[0]
    assert kind in node.kind
    assert any(word in node.remedy for word in ("chance", "not set", "register a rule"))


def test_dropout_that_is_always_on():
    with pytest.raises(
        TrainingModeError, match=r"dropout \(dropout\) .*training=self.training"
    ):
        lipcert.trace(Op(lambda m, x: F.dropout(x, 0.1)).eval(), (4,))


class Counter(nn.Module):
    """Its result depends on how often it has been called."""

    def __init__(self, buffer):
        super().__init__()
        if buffer:
            self.register_buffer("calls", torch.zeros(()))
        else:
            self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class LateCounter(Counter):
    """It replaces its buffer, and no trial lasts until the result changes."""

    def forward(self, x):
        self.calls = self.calls + 1
        return x * torch.where(self.calls < 10**6, 1.0, 5.0)


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        (LateCounter(buffer=True), "it replaces calls whenever it runs"),
        (Counter(buffer=True), "it changes calls whenever it runs"),
        (Counter(buffer=False), "forward must not depend on .*earlier calls"),
        (
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            r"it changes .*_u, .*call model.eval\(\)",
        ),
    ],
    ids=["replaced", "buffer", "attribute", "spectral norm"],
)
def test_models_whose_results_depend_on_earlier_calls(model, remedy):
    with pytest.raises(UnsupportedError, match=remedy):
        lipcert.trace(model.train(), (4,))


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
    for model, culprit in (
        (wrapped, "the model"),
        (nn.Sequential(nn.ReLU(), wrapped), "1"),
    ):
        error = refusal(model)
        assert error.nodes[0].name == culprit
        with pytest.raises(UnsupportedError, match=remedy):
            raise error


def test_unsupported_layers_are_reported_before_training_mode():
    with pytest.raises(UnsupportedError, match="LayerNorm"):
        lipcert.trace(nn.Sequential(nn.LayerNorm(4), nn.Dropout()).train(), (4,))


def test_exported_programs_are_to_be_replaced_by_their_modules():
    exported = torch.export.export(
        nn.Sequential(nn.Linear(4, 3)).eval(), (torch.rand(2, 4),)
    )
    with pytest.raises(
        UnsupportedError,
        match="an exported program has lost its module; pass the one that was",
    ):
        lipcert.trace(exported.module(), (4,))
    with pytest.raises(
        OptionError,
        match=r"model is a ExportedProgram, .*; pass the module that was exported",
    ):
        lipcert.trace(exported, (4,))
