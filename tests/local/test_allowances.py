"""What linear nodes are off by: sums in orders that lose much, and executions beside exact values."""

from math import inf

import pytest
import torch
from torch import Tensor, nn

import lipcert
from lipcert.local.allowances import Roundings
from lipcert.local.centres import executed_values
from lipcert.local.certify_local import LocalCertifier
from lipcert.local.deviations import follow
from lipcert.local.pulling import Ball
from lipcert.rounding import gamma
from local.test_deviations import points_in_ball

UNIT = 2.0**-24


def summed(terms: Tensor) -> Tensor:
    """One after the other, in float32."""
    total = torch.zeros(())
    for term in terms.float():
        total = total + term
    return total.double()


def allowed(terms: Tensor, value: Tensor) -> Tensor:
    """What a sum of products may be off by, if its value is known."""
    count = len(terms) + 1
    sums, none = terms.abs().sum()[None], torch.zeros(1, dtype=torch.float64)
    relative = gamma(count, torch.float32)
    return Roundings(none, sums, relative, count, 0.0).allowance(value.abs()[None])[0]


@pytest.mark.parametrize("count", [10, 200, 2000])
def test_sums_in_the_worst_order_lose_no_more_and_hardly_less(count):
    # Each of the small terms is lost beside 1, to which it is less than half an ulp;
    # at last the 1 cancels, so that nothing but the error is left.
    small = torch.full((count,), 0.999 * UNIT, dtype=torch.float64).float().double()
    one = torch.ones(1, dtype=torch.float64)
    for terms in (torch.cat([one, small]), torch.cat([one, small, -one])):
        off = (summed(terms) - terms.sum()).abs()
        bound = allowed(terms, summed(terms))
        assert off <= bound
        assert off > (0.9 - 4 / count) * bound


def test_sums_of_random_terms_stay_within_their_allowance():
    generator = torch.Generator().manual_seed(0)
    for count in (3, 50, 700):
        terms = torch.randn(count, generator=generator).double()
        for order in (terms, terms.sort().values, terms.sort(descending=True).values):
            off = (summed(order) - order.sum()).abs()
            assert off <= allowed(order, summed(order))


NETWORKS = {
    "dense": (nn.Sequential(nn.Linear(400, 30), nn.ReLU(), nn.Linear(30, 3)), (400,)),
    "convolution": (
        nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3)
        ),
        (3, 10, 10),
    ),
}


@pytest.mark.parametrize("norm", [2, inf])
@pytest.mark.parametrize("name", NETWORKS)
def test_executions_differ_from_exact_maps_by_no_more_than_allowances(name, norm):
    model, shape = NETWORKS[name]
    certifier = LocalCertifier(model.eval(), shape, norm)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(3))
    values, _ = executed_values(certifier.network, x)
    radius = torch.tensor([0.01, 0.3], dtype=torch.float64)
    state = follow(certifier.prepared, Ball(norm, radius), dict(values))
    moved, _ = executed_values(certifier.network, points_in_ball(x, norm, radius, 50))
    seen = 0
    for v, rounding in state.roundings.items():
        if not rounding.count:
            continue
        seen += 1
        (edge,) = certifier.prepared.exact.nodes[v].edges
        change = moved[edge.source].unflatten(0, (50, 2)) - values[edge.source]
        expected = edge.op.apply(change.flatten(0, 1)).unflatten(0, (50, 2))
        off = (moved[v].unflatten(0, (50, 2)) - values[v] - expected).abs()
        eta = rounding.allowance(state.magnitude(v))
        assert (off <= eta).all()
        # Both points by the plain bound would be much more than that.
        plain = 2 * rounding.relative * rounding.sums
        assert (eta < 0.9 * plain).float().mean() > 0.9
    assert seen == 2


def test_only_sums_that_torch_makes_itself_count_as_one_sum():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten())
    network = lipcert.trace(model.eval(), (1, 5, 5))
    known = [node.added is not None for node in network.nodes if node.edges]
    assert known == [True, False, False]
    constants = network.nodes[1].added
    bias = model[0].bias.detach().reshape(2, 1, 1).expand(2, 3, 3)
    torch.testing.assert_close(constants().detach(), bias)
