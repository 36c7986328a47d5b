"""Models that go on after an error of torch are other models where it is not raised."""

import pytest
import torch
from torch import nn

import lipcert
from lipcert.errors import UnsupportedError


def tripled_on_error(x, what):
    try:
        what(x)
    except Exception:
        return 3 * x
    return x


class Guarded(nn.Module):
    """Linear; three times as steep where an operation fails whose result is not used."""

    def __init__(self, what):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.what = what

    def forward(self, x):
        return self.layer(tripled_on_error(x, self.what))


TABLE = torch.eye(60_000, 1)


def places(x):
    """Valid for moderate entries only."""
    return x.abs().amax(1).long()


# Errors that no trial of moderate inputs raises.
RARE = {
    "index_select": lambda x: TABLE.index_select(0, places(x)),
    "index": lambda x: TABLE[places(x)],
    "gather": lambda x: TABLE.gather(0, places(x)[:, None]),
    "take": lambda x: TABLE.take(places(x)),
    "embedding": lambda x: nn.functional.embedding(places(x), TABLE),
    "scatter": lambda x: TABLE.scatter(0, places(x)[:, None], 1.0),
    "loss": lambda x: nn.functional.nll_loss(TABLE.T.expand(len(x), -1), places(x)),
    "cholesky": lambda x: torch.linalg.cholesky(
        torch.eye(4) * (1e6 - x.abs().sum(1))[:, None, None]
    ),
    "inverse": lambda x: torch.linalg.inv(
        torch.eye(4) * (1e6 - x.abs().amax(1))[:, None, None]
    ),
    "assertion": lambda x: torch._assert_async((x.abs() < 1e6).all()),
    "integer division": lambda x: (
        torch.ones(4, dtype=torch.int64) // (x.long() - 3_000_000)
    ),
    "in place": lambda x: torch.zeros(60_000).index_fill_(0, places(x), 1.0),
}


@pytest.mark.parametrize("name", RARE)
def test_operations_that_fail_for_rare_values_and_are_not_used(name):
    with pytest.raises(UnsupportedError):
        lipcert.bound(Guarded(RARE[name]).eval(), (4,))


@pytest.mark.parametrize("inference", [True, False])
def test_operations_that_fail_in_one_mode(inference):
    def what(x):
        if torch.is_inference_mode_enabled() is inference:
            TABLE.index_select(0, places(x))

    with pytest.raises(UnsupportedError):
        lipcert.bound(Guarded(what).eval(), (4,))


@pytest.mark.parametrize(
    "what",
    [
        lambda x: x.view(5, 5),
        lambda x: x @ x,
        lambda x: torch.linalg.cholesky(-torch.eye(4) * x.abs().sum()),
    ],
)
def test_errors_that_are_caught_in_every_run(what):
    with pytest.raises(UnsupportedError):
        lipcert.bound(Guarded(what).eval(), (4,))


READS = {
    "apply_": lambda x: x.clone().apply_(lambda v: 1 / (v - 1e6)),
    "map_": lambda x: x.clone().map_(x, lambda v, _: 1 / (v - 1e6)),
    "tensor_split": lambda x: torch.arange(9).tensor_split(
        x.detach()[:1, 0].long().clamp(0, 2)
    ),
}


@pytest.mark.parametrize("name", READS)
def test_functions_that_read_values_in_python(name):
    with pytest.raises(UnsupportedError):
        lipcert.bound(Guarded(READS[name]).eval(), (4,))


@pytest.mark.parametrize(
    "what",
    [
        lambda x: x.sub_(1),
        lambda x: x.mul_(0.5),
        lambda x: x[:, :2].add_(1),
        lambda x: x.clamp_(-1, 1),
    ],
)
def test_changes_in_place_of_inputs_that_forbid_it(what):
    with pytest.raises(UnsupportedError, match="for an input that"):
        lipcert.bound(Guarded(what).eval(), (4,))


UNUSED = {
    "statistics": lambda x: (x.mean(), x.std(), x.norm()),
    "features": lambda x: nn.functional.conv1d(x[:, None], torch.ones(1, 1, 2)),
    "largest": lambda x: x.topk(2, 1).values.sort(1),
    "shape": lambda x: torch.zeros_like(x).reshape(-1),
    "constant places": lambda x: (x[:, [2, 0]], x.index_select(1, torch.tensor([1]))),
    "gathered": lambda x: x.gather(1, torch.zeros(1, 2).long().expand(x.shape[0], 2)),
    "parametric": lambda x: nn.functional.prelu(x, torch.ones(4)),
    "constant table": lambda x: TABLE.index_select(0, torch.tensor([1, 2])),
}


@pytest.mark.parametrize("name", UNUSED)
def test_what_is_not_used_and_cannot_fail_is_accepted(name):
    model = Guarded(UNUSED[name]).eval()
    exact = torch.linalg.matrix_norm(model.layer.weight.detach().double(), 2)
    bound = lipcert.bound(model, (4,), target="network")
    assert float(bound.value) == pytest.approx(float(exact), rel=1e-6)
