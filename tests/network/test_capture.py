"""What is captured is what the model computes when it is called: hooks, in-place operations, aliases, modes."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import lipcert
from helpers import check_linear, eye, jacobian, randn
from lipcert.errors import UnsupportedError
from lipcert.network import digest
from lipcert.network.rewrites import liplt_lines, loop_transform
from models import Op, dense_chain, gaussian


def doubled(module, inputs, output):
    return 2 * output


def halved(module, inputs):
    return (inputs[0] / 2,)


HOOKED = {
    "layer": lambda m: m[1].register_forward_hook(doubled),
    "container": lambda m: m[0].register_forward_hook(doubled),
    "model": lambda m: m.register_forward_hook(doubled),
    "layer, before": lambda m: m[1].register_forward_pre_hook(halved),
    "model, before": lambda m: m.register_forward_pre_hook(halved),
    "keyword arguments": lambda m: m[1].register_forward_hook(
        lambda module, args, kwargs, output: 3 * output, with_kwargs=True
    ),
}


@pytest.mark.parametrize("place", HOOKED)
def test_hooks_are_part_of_the_model(place):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 5)), nn.Linear(5, 3))
    plain = lipcert.bound(model, (4,), target="network").value
    handle = HOOKED[place](model)
    check_linear(model, (4,))
    factor = {"layer, before": 0.5, "model, before": 0.5, "keyword arguments": 3.0}.get(
        place, 2.0
    )
    hooked = lipcert.bound(model.float(), (4,), target="network")
    torch.testing.assert_close(hooked.value, factor * plain, rtol=1e-5, atol=0.0)
    handle.remove()
    assert not hooked.belongs_to(model)


def test_global_hooks_are_part_of_the_model():
    model = nn.Sequential(nn.Linear(4, 3))
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: (
            2 * output if isinstance(module, nn.Linear) else None
        )
    )
    try:
        (columns,) = lipcert.trace(model, (4,)).push(0, torch.eye(4))
    finally:
        handle.remove()
    torch.testing.assert_close(columns.T, 2 * model[0].weight)


def test_hooks_that_only_look_change_nothing():
    seen = []
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    model[0].register_forward_hook(
        lambda module, inputs, output: seen.append(output.shape)
    )
    assert lipcert.trace(model, (4,)).depth == 1
    assert seen


def test_patched_forward():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    model[0].forward = lambda x: 5 * nn.functional.linear(x, model[0].weight)
    (columns, _) = lipcert.trace(model, (4,)).push(0, torch.eye(4))
    torch.testing.assert_close(columns.T, 5 * model[0].weight)
    assert "forward" in vars(model[0])


class Called(nn.Linear):
    """A __call__ of its own."""

    def __call__(self, x):
        return 2 * super().__call__(x)


def test_own_call():
    check_linear(nn.Sequential(Called(4, 3)), (4,))
    check_linear(Called(4, 3), (4,))


def in_place_on_a_view(m, x):
    y = m.first(x)
    y[:, :2].mul_(3)
    y.view(-1, 2, 2)[:, 1] += y[:, :2]
    return y


def in_place_on_a_transpose(m, x):
    y = m.first(x).reshape(-1, 2, 2)
    y.mT[:, 0] *= 2
    return y


def written_to_an_alias(m, x):
    z = y = m.first(x)
    z += y
    return y - 0.5 * z


IN_PLACE = {
    "used before and after": lambda m, x: (y := m.first(x)) + y.mul_(2),
    "view": in_place_on_a_view,
    "transpose": in_place_on_a_transpose,
    "alias": written_to_an_alias,
    "operators": lambda m, x: m.first(x).add_(1).mul_(2).neg_(),
    "zeros_": lambda m, x: (y := m.first(x)) - y.clone().zero_() + y.clone().fill_(3),
    "copied": lambda m, x: torch.zeros_like(y := m.first(x)).copy_(y) * 2,
    "reshaped": lambda m, x: m.first(x).unsqueeze_(1).transpose_(1, 2),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operations_are_linear_maps_like_others(name):
    check_linear(Op(IN_PLACE[name], first=nn.Linear(4, 4)), (4,))


def test_in_place_activation_of_a_value_used_elsewhere():
    """y + relu_(y) is 2·relu(y): what reads y reads what has been written."""
    model = Op(
        lambda m, x: (y := m.first(x)) + m.relu(y),
        first=nn.Linear(4, 4),
        relu=nn.ReLU(True),
    )
    network = lipcert.trace(model, (4,))
    assert network.depth == 1
    into, past = network.push(0, torch.eye(4))
    torch.testing.assert_close(into.T, model.first.weight)
    assert past is None
    assert torch.equal(network.push(1, torch.eye(4))[1], 2 * torch.eye(4))


def test_in_place_operation_on_the_input():
    (columns,) = lipcert.trace(Op(lambda m, x: x.mul_(2) + x), (4,)).push(
        0, torch.eye(4)
    )
    assert torch.equal(columns, 4 * torch.eye(4))
    x = torch.full((1, 4), -1.0)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)).eval()
    assert lipcert.trace(model, (4,)).depth == 1
    lipcert.certify(model, x)
    assert torch.equal(x, torch.full((1, 4), -1.0))


def test_the_branch_of_the_present_mode_is_captured():
    model = Op(
        lambda m, x: 3 * x if m.training else 5 * x, w=nn.Parameter(torch.ones(1))
    )
    for mode, factor in [(True, 3.0), (False, 5.0)]:
        (columns,) = lipcert.trace(model.train(mode), (2,)).push(0, torch.eye(2))
        assert torch.equal(columns, factor * torch.eye(2))
    (columns,) = lipcert.trace(model.train(), (2,), training=True).push(0, torch.eye(2))
    assert torch.equal(columns, 5 * torch.eye(2))


def test_shared_layers_are_used_twice():
    layer = nn.Linear(4, 4)
    model = gaussian(nn.Sequential(layer, nn.ReLU(), layer))
    network = loop_transform(
        lipcert.trace(model, (4,)), liplt_lines(lipcert.trace(model, (4,)))
    )
    weight = layer.weight.detach()
    torch.testing.assert_close(
        network.push(0, eye((4,)))[1].detach().T, weight @ weight / 2
    )


def test_checkpoints_and_nested_functions_are_followed():
    inner = dense_chain(4, 5, 3)
    model = Op(
        lambda m, x: torch.utils.checkpoint.checkpoint(m.inner, x, use_reentrant=False),
        inner=inner,
    )
    assert lipcert.trace(model, (4,)).depth == 1


def test_no_grad_inside_forward_does_not_hide_an_operation():
    @torch.no_grad()
    def tripled(x):
        return 3 * x

    (columns,) = lipcert.trace(Op(lambda m, x: tripled(x) + x.detach()), (2,)).push(
        0, torch.eye(2)
    )
    assert torch.equal(columns, 4 * torch.eye(2))


DIFFERENT = {
    "with gradients": lambda m, x: x if torch.is_grad_enabled() else 2 * x,
    "for one row": lambda m, x: x.squeeze(),
    # While it is captured, a model sees tensors of another type.
    "when called": lambda m, x: 2 * x if type(x) is torch.Tensor else x,
    "far away": lambda m, x: (
        torch.where(x > 1000, 2 * x, x) if type(x) is torch.Tensor else x
    ),
    "by chance": lambda m, x: x * torch.rand(1) if type(x) is torch.Tensor else x,
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_models_that_compute_something_else_when_they_are_called(name):
    with pytest.raises(
        UnsupportedError,
        match=r"what torch.export captures is not what the model returns",
    ):
        lipcert.trace(Op(DIFFERENT[name]), (4,))


def test_mixed_precision_is_refused():
    def forward(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.first(x)

    with pytest.raises(UnsupportedError, match="use one type throughout"):
        lipcert.trace(Op(forward, first=nn.Linear(4, 3)), (4,))


def test_the_captured_map_is_that_of_the_model_for_a_mixture_of_everything():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
            self.register_buffer("order", torch.tensor([2, 0, 1]))

        def forward(self, x):
            left, right = self.first(x).chunk(2, 1)
            left = left + 0.5 * right.roll(1, 1)
            left *= 2
            y = torch.stack([left, right[:, self.order]], 1)
            y[:, 0, 1:] = y[:, 1, :2]
            return (
                torch.einsum("bij,ij->bj", y, torch.ones(2, 3, dtype=x.dtype))
                .unflatten(1, (3, 1))
                .squeeze(2)
            )

    model = Mixture().double()
    check_linear(model, (4,))
    assert torch.linalg.matrix_norm(jacobian(model, (4,)), 2) == pytest.approx(
        float(lipcert.bound(model, (4,), target="network").value), rel=1e-6
    )
    assert model(randn(2, 4)).shape == (2, 3)


def test_the_digest_of_a_program_has_no_addresses(monkeypatch):
    hashed = []

    class Recorder:
        def update(self, content):
            hashed.append(content)

        def hexdigest(self):
            return ""

    monkeypatch.setattr(digest, "sha256", Recorder)
    digest.program_digest(lipcert.trace(nn.Softsign(), (2,)).program)
    assert any(b"softsign" in content for content in hashed)
    assert not any(b"0x" in content for content in hashed)


def test_a_split_of_the_rows_is_refused():
    with pytest.raises(UnsupportedError, match="depends on the number of rows"):
        lipcert.trace(Op(lambda m, x: x.tensor_split(2)[0]), (3, 4))


def test_a_constant_shape_that_reads_the_rows_twice_is_refused():
    with pytest.raises(UnsupportedError, match="depends on the number of rows"):
        lipcert.trace(
            Op(lambda m, x: x + torch.ones(x.shape[0], x.shape[0]).sum()), (3,)
        )


class Kept(nn.Module):
    """Computes its weight at the first call and keeps it."""

    def __init__(self, memory):
        super().__init__()
        self.layer, self.memory, self.inside = nn.Linear(6, 3), [memory], {"deep": [{}]}

    def forward(self, x):
        memory = (
            self.memory[0] if self.memory[0] is not None else self.inside["deep"][0]
        )
        if "weight" not in memory:
            memory["weight"] = self.layer.weight.detach() * 3
        return nn.functional.linear(x, memory["weight"])


@pytest.mark.parametrize("memory", [None, {}], ids=["nested", "plain"])
def test_a_weight_that_is_kept_at_the_first_call(memory):
    """It was a tensor of torch.export, without values, in the user's model afterwards."""
    model = Kept(memory).eval()
    value = float(lipcert.bound(model, (6,), target="network").value)
    expected = 3 * float(torch.linalg.matrix_norm(model.layer.weight.double(), 2))
    assert value == pytest.approx(expected, rel=1e-6)
    assert not model.inside["deep"][0]
    assert not memory
    assert type(model(torch.zeros(1, 6))) is torch.Tensor
    weight = (memory or model.inside["deep"][0])["weight"]
    assert float(lipcert.bound(model, (6,), target="network").value) == pytest.approx(
        expected, rel=1e-6
    )
    assert (memory or model.inside["deep"][0])["weight"] is weight


def test_a_weight_that_is_kept_elsewhere_is_refused():
    memory = {}

    def forward(module, x):
        if "weight" not in memory:
            memory["weight"] = module.layer.weight.detach() * 3
        return nn.functional.linear(x, memory["weight"])

    model = Op(forward, layer=nn.Linear(6, 3)).eval()
    with pytest.raises(UnsupportedError, match="call the model once before"):
        lipcert.bound(model, (6,))


def test_sparse_tensors_are_refused_by_name():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.eye(4).to_sparse())

        def forward(self, x):
            return x @ self.mask.to_dense()

    with pytest.raises(UnsupportedError, match=r"mask is sparse; use dense tensors"):
        lipcert.trace(Sparse().eval(), (4,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_division_by_a_temperature_that_is_computed(shape, dtype):
    class Cooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.temperature = nn.Parameter(torch.full(shape, 0.7))

        def forward(self, x):
            return self.layer(x) / self.temperature.exp()

    model = Cooled().eval().to(dtype)
    weight = model.layer.weight.detach() / model.temperature.detach().exp().max()
    exact = float(torch.linalg.matrix_norm(weight.double(), 2))
    bound = lipcert.bound(model, (4,), target="network")
    assert float(bound.value) == pytest.approx(exact, rel=1e-6)
