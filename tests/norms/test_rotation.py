"""Far pairs take turns in the power iteration."""

import torch
from torch import nn

import lipcert
from helpers import transformed
from lipcert.network.sweep import Sweep
from lipcert.norms.estimate import random_vectors
from lipcert.norms.rotation import Rotation


def chain(depth, width=6, seed=0):
    torch.manual_seed(seed)
    layers = [
        layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.Linear(width, 3)).double().eval()


def rotation(depth):
    sweep = Sweep(transformed(chain(depth), (6,)), depth)
    return sweep, Rotation(sweep)


def test_shallow_networks_iterate_all_pairs_every_time():
    assert rotation(4)[1].period == 1


def test_every_pair_moves_within_a_period_and_near_pairs_always():
    sweep, turns = rotation(12)
    assert turns.period == Rotation.PERIOD
    moved = dict.fromkeys(sweep.pairs, 0)
    for turn in range(turns.period):
        before = random_vectors(sweep, 0)
        after = turns.iterate(before, 1, turn)
        for i, pairs in sweep.starts.items():
            for row, pair in enumerate(pairs):
                moved[pair] += int(not torch.equal(before[i][row], after[i][row]))
    for (j, i), count in moved.items():
        span = j - i
        assert count == (4 if span <= 4 else 2 if span <= 8 else 1)


def test_deep_estimates_converge_to_the_exact_constant():
    model = chain(11)
    weights = [layer.weight.detach() for layer in model[::2]]

    def norm(k, i):
        product = (
            torch.linalg.multi_dot(weights[i : k + 1][::-1]) if k > i else weights[i]
        )
        return torch.linalg.matrix_norm(product, 2)

    prefix = []
    for k in range(len(weights)):
        shares = [
            0.5 * 0.5 ** (k - i) * norm(k, i) * prefix[i - 1] for i in range(1, k + 1)
        ]
        prefix.append(sum(shares) + 0.5**k * norm(k, 0))
    estimator = lipcert.Estimator(
        model, (6,), target="network", power_iterations=300, accelerated=True
    )
    assert torch.allclose(estimator().detach(), prefix[-1], rtol=1e-6)


def test_a_loaded_estimator_continues_with_the_same_turn():
    model = chain(10)
    first = lipcert.Estimator(model, (6,), power_iterations=3)
    first()
    second = lipcert.Estimator(model, (6,), power_iterations=3, seed=5)
    second.load_state_dict(first.state_dict())
    assert int(second.turn) == int(first.turn) == 3
    assert torch.equal(first(), second())


def test_pairs_that_begin_later_than_others_do_not_disturb_them():
    """Several iterations at once, some of which are the first of their pairs, also at extreme scales."""
    for exponent in (-12, 12):
        model = chain(9).float()
        model[0].weight.data *= 10.0**exponent
        estimator = lipcert.Estimator(
            model, (6,), target="network", power_iterations=7, accelerated=True
        )
        values = torch.stack([estimator().detach() for _ in range(12)])
        reference = lipcert.Estimator(
            model.double(),
            (6,),
            target="network",
            power_iterations=80,
            accelerated=True,
        )()
        assert torch.allclose(values[-1].double(), reference.detach(), rtol=1e-4)
        assert (values <= values[-1] * (1 + 1e-4)).all()
