"""Whatever is written in ordinary PyTorch style is captured as it runs, bounded, and certified without a flip."""

import os

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import lipcert
from helpers import examples
from lipcert.bounds.compute import bound_network
from lipcert.bounds.methods import find_method
from lipcert.bounds.targets import find_target
from lipcert.certificate import Certifier
from programs import WIDTH, programs

FULL = os.environ.get("LIPCERT_FULL") == "1"  # 1,000 programs


def steepest(run, count, seed):
    """The largest norm of Jacobians at random points of several scales."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=generator) * 10.0 ** torch.randint(
        -1, 2, (count, 1), generator=generator
    )
    rows = []
    for k in range(3):
        x = x.detach().requires_grad_()
        rows.append(torch.autograd.grad(run(x)[:, k].sum(), x)[0])
    return torch.linalg.matrix_norm(torch.stack(rows, 1).double(), 2).max().item()


def flips(model, run, x, certificates):
    """How many inputs change their prediction somewhere on the way against the gradient of their margin.

    The captured program gives the gradient: operations in place keep autograd from differentiating the model itself.
    """
    prediction = certificates.prediction
    x = x.detach().requires_grad_()
    logits = run(x)
    other = logits.detach().scatter(1, prediction[:, None], -torch.inf).argmax(1)
    margin = logits.gather(1, prediction[:, None]) - logits.gather(1, other[:, None])
    direction = -torch.autograd.grad(margin.sum(), x)[0].double()
    direction = direction / direction.norm(dim=1, keepdim=True).clamp(min=1e-300)
    found = 0
    for part in (0.3, 0.7, 0.95, 0.999):
        radius = certificates.radius.clamp(max=1e6)[:, None]
        there = (x.double() + part * radius * direction).float()
        inside = (there.double() - x.double()).norm(dim=1) < certificates.radius
        with torch.no_grad():
            found += int((inside & (model(there).argmax(1) != prediction)).sum())
    return found


@settings(
    examples(2 if FULL else 0.6), phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # shrinking takes too long
@given(model=programs(), seed=st.integers(0, 1000))
def test_captured_is_executed_bounded_and_certified(model, seed):
    network = lipcert.trace(model, (WIDTH,))
    x = torch.randn(33, WIDTH, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        assert torch.equal(network.program.run(x), model(x))
    targets = [find_target("network"), find_target("pairwise")]
    whole, pairwise = bound_network(network, find_method("liplt"), targets).values()
    assert steepest(network.program.run, 20, seed) <= whole.value.item() * (1 + 1e-5)
    certificates = Certifier(network, pairwise).certify(x)
    assert flips(model, network.program.run, x, certificates) == 0
    with torch.no_grad():
        logits, radius = lipcert.CertifiedClassifier(network, pairwise)(x)
        assert torch.equal(logits, model(x))
    assert (radius <= certificates.radius * (1 + 1e-6) + 1e-9).all()
