"""Radii over balls: attacks find nothing inside, exact minima are not passed, options and refusals."""

from itertools import product
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor, nn

import drawn
import lipcert
from helpers import examples, randn
from lipcert.attacks import minimum_norm, pgd
from lipcert.errors import NonFiniteError, OptionError, ShapeError, UnsupportedError
from lipcert.local.centres import executed_values
from lipcert.local.certify_local import LocalCertifier
from lipcert.local.sharpening import Effort
from models import Op, dense_chain, named_models


def inputs(shape: tuple[int, ...], count: int, model: nn.Module) -> Tensor:
    dtype = next(model.parameters()).dtype
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(2)).to(
        dtype
    )


def check_attacks(
    model: nn.Module, shape: tuple[int, ...], norm: float = 2, count: int = 8
) -> Tensor:
    """Neither DDN, nor PGD at each radius, nor steps along gradients find another class inside the radii."""
    x = inputs(shape, count, model)
    certificates = lipcert.certify_local(model, x, norm=norm)
    radius = certificates.radius
    assert (radius >= 0).all()
    if norm == 2:
        found = minimum_norm(
            model, x, certificates.prediction, steps=40, pixels=(-4.0, 5.0)
        )
        assert (found.distance >= radius).all()
        for k in range(count):
            if radius[k] > 0:
                found = pgd(
                    model,
                    x[k : k + 1],
                    certificates.prediction[k : k + 1],
                    float(radius[k]),
                    steps=10,
                )
                assert float(found.distance) >= float(radius[k])
    check_steps(model, x, certificates, norm)
    return radius


def check_steps(
    model: nn.Module, x: Tensor, certificates: lipcert.Certificates, norm: float
) -> None:
    """Towards every other class, by the gradient and by its signs, to just inside the radius."""
    classes = model(x[:1]).shape[1]
    for k, radius in enumerate(certificates.radius.tolist()):
        label = int(certificates.prediction[k])
        for other in range(classes):
            if other == label:
                continue
            point = x[k : k + 1].clone()
            for _ in range(8):
                point.requires_grad_()
                logits = model(point)
                (gradient,) = torch.autograd.grad(
                    logits[0, other] - logits[0, label], point
                )
                step = (
                    gradient.sign()
                    if norm == inf
                    else gradient / gradient.norm().clamp(min=1e-30)
                )
                moved = (point.detach() + 0.5 * radius * step).double() - x[k].double()
                length = float(moved.abs().max() if norm == inf else moved.norm())
                point = (
                    x[k].double()
                    + moved * min(1.0, 0.999999 * radius / max(length, 1e-300))
                ).to(x.dtype)
                away = (point - x[k : k + 1]).double()
                if float(away.abs().max() if norm == inf else away.norm()) < radius:
                    assert int(model(point).argmax(1)) == label


@pytest.mark.parametrize("norm", [2, inf])
@pytest.mark.parametrize("name", named_models())
def test_attacks_find_nothing_inside_the_radii_of_named_networks(name, norm):
    model, shape = named_models()[name]
    assert (check_attacks(model.float(), shape, norm, count=2) > 0).any()


@given(network=drawn.networks, norm=st.sampled_from([2, inf]))
@examples(0.6)
def test_attacks_find_nothing_inside_the_radii_of_drawn_networks(network, norm):
    model, shape = network
    check_attacks(model.float(), shape, norm, count=3)


def exact_minimum(model: nn.Sequential, x: Tensor, radius: float, row: Tensor) -> float:
    """The smallest value of row·f over an l∞ ball around x, for ReLU chains: a linear program for every pattern."""
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    smallest = inf
    widths = [layer.out_features for layer in layers[:-1]]
    for bits in product((0.0, 1.0), repeat=sum(widths)):
        gates = torch.tensor(bits, dtype=torch.float64).split(widths)
        matrix, offset = (
            torch.eye(len(x), dtype=torch.float64),
            torch.zeros(len(x), dtype=torch.float64),
        )
        sides, limits = [], []
        for layer, gate in zip(layers, [*gates, None], strict=True):
            matrix, offset = layer.weight @ matrix, layer.weight @ offset + layer.bias
            if gate is not None:  # sign·(matrix x + offset) ≥ 0
                sign = 2 * gate - 1
                sides.append(-sign[:, None] * matrix)
                limits.append(sign * offset)
                matrix, offset = gate[:, None] * matrix, gate * offset
        box = [(float(v) - radius, float(v) + radius) for v in x]
        solved = linprog(
            (row @ matrix).numpy(),
            torch.cat(sides).numpy(),
            torch.cat(limits).numpy(),
            bounds=box,
        )
        if solved.status == 0:
            smallest = min(smallest, solved.fun + float(row @ offset))
    return smallest


@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_proved_radii_are_below_exact_ones_of_tiny_networks(seed):
    """The exact margin at the proved radius is positive."""
    model = dense_chain(2, 3, 4, 3, seed=seed)
    x = 0.5 * torch.randn(2, 2, generator=torch.Generator().manual_seed(seed)).double()
    certificates = lipcert.certify_local(model, x, norm=inf)
    for k, radius in enumerate(certificates.radius.tolist()):
        label = int(certificates.prediction[k])
        assert radius > 0
        for other in {0, 1, 2} - {label}:
            row = (
                torch.eye(3, dtype=torch.float64)[label]
                - torch.eye(3, dtype=torch.float64)[other]
            )
            assert exact_minimum(model, x[k], radius, row) > 0


@torch.no_grad()
def test_a_linear_model_has_its_exact_radius():
    model = nn.Linear(6, 4).double().eval()
    x = torch.randn(20, 6, dtype=torch.float64)
    logits = model(x)
    label = logits.argmax(1)
    rows = model.weight[label][:, None] - model.weight
    margins = logits.gather(1, label[:, None]) - logits
    for norm, lengths in ((2, rows.norm(dim=2)), (inf, rows.abs().sum(2))):
        exact = (margins / lengths).nan_to_num(inf).amin(1)
        found = lipcert.certify_local(nn.Sequential(model), x, norm=norm).radius
        assert (found <= exact).all()
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)
        some = lipcert.certify_local(nn.Sequential(model), x, 0.01, norm=norm).radius
        assert ((some >= 0.01) == (exact > 0.01)).all()


def test_float32_roundings_near_the_boundary_are_covered():
    """Large weights that cancel: margins of the executed model are rounding noise, which no radius may rest on."""
    torch.manual_seed(0)
    first, last = nn.Linear(40, 60), nn.Linear(60, 2)
    with torch.no_grad():
        first.weight.mul_(3e3)
        last.weight[1] = last.weight[0] + 1e-5 * torch.randn(60)
    model = nn.Sequential(first, nn.ReLU(), last).eval()
    x = torch.rand(64, 40)
    certificates = lipcert.certify_local(model, x)
    shuffled = torch.randperm(64)
    for k in range(200):
        step = torch.randn(64, 40).double()
        step = (
            step
            / step.norm(dim=1, keepdim=True)
            * certificates.radius[:, None]
            * (k % 10)
            / 10
        )
        moved = (x.double() + step).float()
        inside = (moved.double() - x.double()).norm(dim=1) < certificates.radius
        with torch.no_grad():
            changed = model(moved).argmax(1) != certificates.prediction
            other = (
                model(moved[shuffled]).argmax(1) != certificates.prediction[shuffled]
            )
        assert not (changed & inside).any()
        assert not (other & inside[shuffled]).any()


def test_radii_reach_epsilon_exactly_where_it_is_proved():
    model, shape = named_models()["chain"]
    x = inputs(shape, 30, model)
    free = lipcert.certify_local(model, x)
    fixed = lipcert.certify_local(model, x, epsilon=0.05, labels=free.prediction)
    assert ((fixed.radius == 0.05) | (fixed.radius < 0.05)).all()
    assert (fixed.radius == 0.05).any()
    assert (fixed.radius < 0.05).any()
    assert (free.radius >= 0.05 / 1.05)[fixed.radius == 0.05].all()
    assert fixed.certified_accuracy(0.05) == float(
        (fixed.radius >= 0.05).double().mean()
    )
    assert (free.guarantee, free.norm) == ("deterministic", 2.0)


def test_radii_are_never_below_those_of_a_bound():
    for name in ("chain", "paper residual", "relu then max-pool"):
        model, shape = named_models()[name]
        x = inputs(shape, 12, model)
        bound = lipcert.bound(model, shape)
        known = lipcert.certify(model, x, bound).radius
        for epsilon in (None, 1e-3):
            assert (
                lipcert.certify_local(model, x, epsilon, bound=bound).radius >= known
            ).all()
        spread = known / x[0].numel() ** 0.5
        assert (
            lipcert.certify_local(model, x, norm=inf, bound=bound).radius
            >= spread * (1 - 1e-9)
        ).all()


def test_batches_and_chunks_do_not_change_radii(monkeypatch):
    model, shape = named_models()["residual convolutions"]
    x = inputs(shape, 6, model)
    whole = lipcert.certify_local(model, x, 0.02).radius
    torch.testing.assert_close(
        lipcert.certify_local(model, x, 0.02, batch_size=2).radius, whole
    )
    monkeypatch.setattr("lipcert.local.refining._ROWS_BYTES", 1)
    torch.testing.assert_close(lipcert.certify_local(model, x, 0.02).radius, whole)


def test_empty_batches_have_no_radii():
    model, shape = named_models()["chain"]
    x = inputs(shape, 2, model)
    bound = lipcert.bound(model, shape)
    for known in (None, bound):
        certifier = LocalCertifier(model, shape, bound=known)
        assert (
            certifier.certify(x[:0], 0.1).radius.shape
            == certifier.certify(x[:0]).radius.shape
            == (0,)
        )
        some = lipcert.certify_local(model, [x, x[:0]], 0.01, bound=known)
        assert some.radius.shape == (2,)


def test_more_effort_proves_more():
    model, shape = named_models()["gelu chain"]
    x = inputs(shape, 20, model)
    radii = []
    for effort in (
        Effort(last_steps=0),
        Effort(),
        Effort(last_steps=20, inner_steps=5),
    ):
        certifier = LocalCertifier(model, shape, effort=effort)
        radii.append(certifier.certify(x).radius.mean())
    assert radii[0] < radii[1] < radii[2]


def test_values_that_could_overflow_are_not_certified():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        model[0].weight.mul_(1e19)
    radius = lipcert.certify_local(model, torch.rand(5, 4), 1e-3).radius
    assert (radius == 0).all()


def test_refusals():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    x = torch.rand(2, 4)
    with pytest.raises(OptionError, match="norm is 1, expected 2 or inf"):
        lipcert.certify_local(model, x, norm=1)
    with pytest.raises(OptionError, match="epsilon is -1"):
        lipcert.certify_local(model, x, -1.0)
    for epsilon in (
        "0.1",
        [0.1, 0.2],
        torch.tensor([0.1, 0.2]),
        True,
        float("nan"),
        float("inf"),
        10**400,
        1j,
    ):
        with pytest.raises(
            OptionError, match=r"epsilon is .*, expected a positive number"
        ):
            lipcert.certify_local(model, x, epsilon)
    assert torch.equal(
        lipcert.certify_local(model, x, torch.tensor(0.5)).radius,
        lipcert.certify_local(model, x, 0.5).radius,
    )
    with pytest.raises(OptionError, match="batch_size"):
        lipcert.certify_local(model, x, batch_size=0)
    with pytest.raises(ShapeError, match="dtype"):
        lipcert.certify_local(model, x.double())
    with pytest.raises(NonFiniteError, match="input 1"):
        lipcert.certify_local(
            model, torch.tensor([[0.0] * 4, [0.0, 0.0, 0.0, float("nan")]])
        )
    with pytest.raises(UnsupportedError, match="frac"):
        lipcert.certify_local(Op(lambda m, x: torch.frac(x)), x)


def test_executed_values_are_those_of_the_program():
    model, shape = named_models()["two branches"]
    x = inputs(shape, 3, model.float())
    network = lipcert.trace(model, shape)
    values, logits = executed_values(network, x)
    assert torch.equal(logits, model(x))
    assert torch.equal(values[network.sites[-1].source], model(x).double())


class Numbers(nn.Module):
    """Rows that are single numbers: products with a vector, sums over all entries."""

    def __init__(self):
        super().__init__()
        self.first, self.vector = nn.Linear(4, 5), nn.Parameter(torch.randn(5))

    def forward(self, x):
        z = torch.tanh(self.first(x))
        return torch.stack([torch.tanh(z @ self.vector), z.logsumexp(-1), z[:, 0]], 1)


@pytest.mark.parametrize("norm", [2, float("inf")])
def test_rows_that_are_single_numbers(norm):
    torch.manual_seed(0)
    model, x = Numbers().eval(), torch.randn(4, 4)
    radius = lipcert.certify_local(model, x, norm=norm).radius
    assert (radius > 0).all()
    with torch.no_grad():
        for k in range(4):
            moves = torch.randn(2000, 4)
            moves = moves / (
                moves.norm(dim=1, keepdim=True)
                if norm == 2
                else moves.abs().amax(1, keepdim=True)
            )
            near = model(x[k] + 0.999 * radius[k].float() * moves)
            assert (near.argmax(1) == model(x[k : k + 1]).argmax(1)).all()


@pytest.mark.parametrize("norm", [2, inf])
def test_inputs_that_are_single_numbers(norm):
    torch.manual_seed(0)
    model = Op(
        lambda m, x: m.layer(torch.sin(x[:, None])), layer=nn.Linear(1, 3)
    ).eval()
    x = torch.rand(5)
    certificates = lipcert.certify_local(model, x, norm=norm)
    assert (certificates.radius > 0).all()
    for share in torch.linspace(-0.999, 0.999, 201):
        moved = model(x + share * certificates.radius.float())
        assert torch.equal(moved.argmax(1), certificates.prediction)


def test_a_model_with_one_logit():
    """Its sign is the class, as for `lipcert.certify`; of a linear one the radius is |z| over its norm."""
    torch.manual_seed(0)
    x = torch.randn(30, 5)
    linear = nn.Linear(5, 1).eval()
    found = lipcert.certify_local(linear, x)
    z = linear(x)[:, 0]
    assert torch.equal(found.prediction, (z > 0).long())
    exact = (z.abs() / linear.weight.norm()).double().detach()
    assert (found.radius <= exact * (1 + 1e-6)).all()
    assert found.radius == pytest.approx(exact, rel=1e-2)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
    bound = lipcert.bound(model, (5,), target="network")
    certificates, globally = (
        lipcert.certify_local(model, x, bound=bound),
        lipcert.certify(model, x, bound),
    )
    assert (certificates.radius >= globally.radius).all()
    assert torch.equal(certificates.prediction, globally.prediction)
    moves = torch.randn(500, 1, 5)
    moves = (
        0.999
        * certificates.radius.float()[:, None]
        * moves
        / moves.norm(dim=2, keepdim=True)
    )
    assert torch.equal(
        model(x + moves)[..., 0] > 0, (certificates.prediction == 1).expand(500, 30)
    )


@pytest.mark.parametrize("norm", [2, inf])
def test_a_linear_network_has_nothing_to_search(norm):
    torch.manual_seed(0)
    model = nn.Linear(6, 3).eval()
    x = torch.rand(4, 6)
    effort = lipcert.Effort(last_steps=5, inner_steps=2)
    found = lipcert.certify_local(model, x, 5.0, norm=norm, effort=effort)
    assert bool((found.radius < 5.0).all())


def test_inference_mode_changes_nothing():
    model = dense_chain(4, 8, 3)
    x = randn(5, 4)
    expected = lipcert.certify_local(model, x, 0.01).radius
    with torch.inference_mode():
        found = lipcert.certify_local(model, x + 0, 0.01).radius
        searched = lipcert.certify_local(model, x + 0).radius
    assert torch.equal(found, expected)
    assert (searched > 0).any()


def test_a_list_of_numbers_is_refused():
    with pytest.raises(ShapeError, match="inputs are float, expected a tensor"):
        lipcert.certify_local(dense_chain(2, 3), [[1.0, 2.0]])
