"""Every network of the zoo builds, traces, and has consistent adjoints."""

import pytest
import torch
from torch import nn

import lipcert
from lipcert.models import zoo
from lipcert.network.convolution import Convolution
from lipcert.network.rewrites import loop_transform

# Nonlinearities: mCnF has m after convolutions and n − 1 after dense layers; a residual block has two.
SITES = {
    "4C3F": 6,
    "6C2F": 7,
    "8C2F": 9,
    "8C2F-original": 9,
    "7C2F": 8,
    "8C2F-depth": 9,
    "9C2F": 10,
    "9C3F": 11,
    "9C4F": 12,
    "10C4F": 13,
    "11C4F": 14,
    "2C2F": 3,
    "mlp-64": 1,
    "mlp-256": 1,
    "maxmin-1024": 1,
    "maxmin-512-512": 2,
    "patches-48": 8,
    "shifts-512-deep": 17,
    "shifts-512-tiny": 12,
    "conv-192": 9,
    "rho-mlp": 2,
    "rho-mlp-256": 4,
    "resnet-small": 7,
    "resnet18": 17,
}


def test_every_name_is_tested():
    assert set(zoo.names()) == set(SITES)
    assert set(zoo.DEPTH_FAMILY) <= set(SITES)


@pytest.mark.parametrize("name", SITES)
def test_network_traces_and_its_adjoint_sweep_is_the_adjoint(name):
    """⟨Bx, y⟩ = ⟨x, Bᵀy⟩ for the linearised network, in float32 as it is built."""
    architecture = zoo.ZOO[name]
    network = lipcert.trace(zoo.build(name, seed=0).eval(), architecture.input_shape)
    assert network.depth == SITES[name]
    assert network.classes == architecture.classes
    # Sorting has the centre 0, so 1 is taken.
    centres = {
        i: float(site.slope.sector()[0]) or 1.0
        for i, site in enumerate(network.sites[1:-1], start=1)
    }
    if any(network.in_size(i) != network.out_size(i) for i in centres):
        return  # no matrix stands for a pooling
    network = loop_transform(network, {i: (c, 1.0) for i, c in centres.items()})
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, *network.input_shape, generator=generator)
    y = torch.randn(1, network.classes, generator=generator)
    with torch.no_grad():
        image, preimage = network.push(0, x)[-1], network.pull(network.depth + 1, y)[0]
    left, right = (image * y).sum().item(), (x * preimage).sum().item()
    assert left == pytest.approx(
        right, rel=1e-3, abs=1e-5 * (image.norm() * y.norm()).item()
    )


def test_original_8c2f_leaves_a_remainder_on_64_columns():
    network = lipcert.trace(zoo.build("8C2F-original", seed=0).double(), (3, 64, 64))
    strided = [
        edge.op
        for node in network.nodes
        for edge in node.edges
        if isinstance(edge.op, Convolution) and edge.op.stride == (2, 2)
    ]
    sizes = [(op.in_shape[1], op.out_shape[1]) for op in strided]
    assert any((n - 4) % 2 for n, _ in sizes)
    for op in strided:
        u, v = (
            torch.randn(1, *op.in_shape).double(),
            torch.randn(1, *op.out_shape).double(),
        )
        with torch.no_grad():
            left, right = (
                (op.apply(u) * v).sum().item(),
                (u * op.adjoint(v)).sum().item(),
            )
        assert left == pytest.approx(right, rel=1e-9)


def test_seed_makes_the_weights_reproducible_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = zoo.build("4C3F", seed=3), zoo.build("4C3F", seed=3)
    assert torch.equal(torch.rand(1), expected)
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_other_sizes_and_numbers_of_classes():
    model = zoo.build("6C2F", (1, 28, 28), 7)
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 7)
    assert isinstance(model[-1], nn.Linear)


def test_unknown_name():
    with pytest.raises(
        lipcert.errors.OptionError, match=r"zoo name is '4C2F'.*did you mean"
    ):
        zoo.build("4C2F")
