"""The √ρ-Lipschitz residual layers: never steeper than promised, and traced in the paper's residual form."""

from copy import deepcopy
from math import prod, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipcert
from helpers import converged, examples, eye, jacobian, randn, reference
from lipcert import zoo
from lipcert.bounds.certified import promised_constants
from lipcert.bounds.scales import FitOptions
from lipcert.certificate.certify import Certifier
from lipcert.errors import OptionError
from lipcert.layers import RhoLipschitzConv2d, RhoLipschitzLinear, proof
from lipcert.loading import load_model, save_checkpoint
from lipcert.network.rules import Constant
from lipcert.norms.certified import bound_norms

RESCALINGS = ("sn", "aol", "sll")
ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky": lambda: nn.LeakyReLU(0.3),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "elu": nn.ELU,
    "softshrink": nn.Softshrink,
}


def randomise(module, seed=0, scale=1.0):
    """Gaussian weights, biases and q for all layers of a float64 model, with power iterations done."""
    module.double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            if not name.endswith("log_rho"):
                tensor.copy_(scale * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    return settle(module)


def settle(module):
    """Power iterations for the present weights."""
    for layer in module.modules():
        if isinstance(layer, RhoLipschitzConv2d):
            layer.iterate(300)
    return module


@st.composite
def layers(draw, rescalings=RESCALINGS):
    """A layer with drawn sizes, weights and options, and the shape of its inputs."""
    channels, hidden = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    options = {
        "activation": ACTIVATIONS[draw(st.sampled_from(sorted(ACTIVATIONS)))](),
        "rescaling": draw(st.sampled_from(rescalings)),
        "rho": draw(st.floats(0.1, 5.0)),
        "learn_rho": draw(st.booleans()),
        "bias": draw(st.booleans()),
    }
    if draw(st.booleans()):
        shape = (channels, draw(st.integers(1, 5)), draw(st.integers(1, 5)))
        layer = RhoLipschitzConv2d(channels, hidden, draw(st.sampled_from([1, 3, 5])), **options)
    else:
        shape = (channels,)
        layer = RhoLipschitzLinear(channels, hidden, **options)
    randomise(layer, draw(st.integers(0, 999)), draw(st.sampled_from([1e-3, 0.3, 1.0, 30.0])))
    if draw(st.booleans()):
        with torch.no_grad():
            layer.weight[0] = 0
        settle(layer)
    return layer, shape


def promised(layer):
    return float(layer.lipschitz().detach()) * (1 + 1e-9)


def hidden_matrix(layer, shape):
    """W as a dense matrix, (hidden, inputs)."""
    weight = layer.weight.detach()
    if weight.dim() == 2:
        return weight
    images = torch.nn.functional.conv2d(eye(shape), weight, padding=layer.reach)
    return images.reshape(prod(shape), -1).T


def steepest(layer, shape, steps=40):
    """The largest slope found: of the Jacobian at random points, and of secants, improved by gradient ascent."""
    n = prod(shape)
    largest = 0.0
    for seed, scale in enumerate([1e-2, 1.0, 10.0]):
        x = scale * randn(*shape, seed=seed)
        matrix = torch.autograd.functional.jacobian(lambda t: layer(t[None])[0], x).reshape(n, n)
        largest = max(largest, float(torch.linalg.matrix_norm(matrix, 2)))
    pair = torch.cat([randn(20, *shape, seed=8), randn(20, *shape, seed=9)]).requires_grad_()
    optimizer = torch.optim.Adam([pair], lr=0.1)
    for _ in range(steps):
        a, b = pair[:20], pair[20:]
        slope = (layer(a) - layer(b)).flatten(1).norm(dim=1) / (a - b).flatten(1).norm(dim=1)
        largest = max(largest, float(slope.detach().max()))
        (gradient,) = torch.autograd.grad(-slope.sum(), pair)
        pair.grad = gradient
        optimizer.step()
    return largest


@examples(2)
@given(layers())
def test_no_slope_exceeds_root_rho(drawn):
    layer, shape = drawn
    assert steepest(layer, shape) <= promised(layer)
    assert promised(layer) <= layer.certified_lipschitz() * (1 + 1e-9)


@examples(4)
@given(layers())
def test_the_inequality_of_the_proposition_holds_for_the_dense_matrix(drawn):
    layer, shape = drawn
    total, rho = layer.alpha + layer.beta, float(layer.lipschitz().detach()) ** 2
    matrix = hidden_matrix(layer, shape)
    diagonal = (layer.factors().detach() * sqrt(rho) / total).expand(layer.weight.shape[0], *shape[1:]).flatten()  # T
    assert (diagonal > 0).all()
    assert torch.isfinite(diagonal).all()
    scaled = diagonal.sqrt()[:, None] * matrix
    kappa = float(torch.linalg.matrix_norm(scaled, 2)) ** 2 * total**2 / (2 * rho)
    assert kappa <= 1
    assert layer.certified_lipschitz() == pytest.approx(sqrt(rho), rel=1e-12)


@pytest.mark.parametrize("rescaling", RESCALINGS)
def test_the_inequality_is_not_wasteful(rescaling):
    """Orthogonal weights reach the constant: with all slopes at β the layer is a reflection."""
    layer = RhoLipschitzLinear(6, 6, rescaling=rescaling, rho=2.0).double().eval()
    with torch.no_grad():
        nn.init.orthogonal_(layer.weight)
        layer.bias.fill_(100.0)
    singular = torch.linalg.svdvals(jacobian(layer, (6,)))
    torch.testing.assert_close(singular, torch.full_like(singular, sqrt(2.0)), rtol=1e-4, atol=0)


@pytest.mark.parametrize("layer", [RhoLipschitzLinear(3, 4), RhoLipschitzConv2d(3, 4, 3, rescaling="sn")])
def test_zero_weights_give_the_scaled_identity_and_finite_gradients(layer):
    nn.init.zeros_(layer.weight)
    layer.eval()
    x = torch.rand(2, 3) if isinstance(layer, RhoLipschitzLinear) else torch.rand(2, 3, 4, 4)
    y = layer(x)
    assert torch.equal(y, x)
    y.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("rescaling", RESCALINGS)
@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_the_factors_in_float32_are_one_rounding_from_those_in_float64(kind, rescaling):
    options = {"rescaling": rescaling, "rho": 1.7, "learn_rho": True}
    layer = RhoLipschitzLinear(7, 9, **options) if kind == "dense" else RhoLipschitzConv2d(3, 5, 3, **options)
    with torch.no_grad():
        layer.weight.normal_()
    exact = deepcopy(layer).double()
    for single, double in [(layer.factors(), exact.factors()), (layer.lipschitz(), exact.lipschitz())]:
        assert single.dtype == torch.float32
        assert ((single.double() - double).abs() <= double * 2.0**-24 * (1 + 1e-6)).all()


def stack(kind, rescaling="aol", activation=nn.ReLU, seed=0):
    """Such layers among ordinary ones, in float64, and the input shape."""
    options = {"rescaling": rescaling, "learn_rho": True}
    if kind == "dense":
        inner = [
            nn.Linear(4, 5), RhoLipschitzLinear(5, 3, activation(), rho=1.4, **options), nn.Linear(5, 5), activation(),
            RhoLipschitzLinear(5, 6, activation(), rho=0.7, **options), nn.Linear(5, 3),
        ]  # fmt: skip
        return randomise(nn.Sequential(*inner), seed, 0.6), (4,)
    inner = [
        nn.Conv2d(1, 2, 3, 2, 1), RhoLipschitzConv2d(2, 3, 3, activation(), rho=1.4, **options), activation(),
        RhoLipschitzConv2d(2, 4, 1, activation(), rho=0.7, **options), nn.Flatten(), nn.Linear(8, 3),
    ]  # fmt: skip
    return randomise(nn.Sequential(*inner), seed, 0.6), (1, 4, 4)


@pytest.mark.parametrize("kind", ["dense", "conv"])
@pytest.mark.parametrize("rescaling", RESCALINGS)
def test_the_layer_is_traced_as_the_papers_residual_form(kind, rescaling):
    options = {"rescaling": rescaling, "rho": 1.6}
    layer = RhoLipschitzLinear(4, 3, nn.LeakyReLU(0.2), **options)
    shape = (4,)
    if kind == "conv":
        layer, shape = RhoLipschitzConv2d(2, 3, 3, nn.LeakyReLU(0.2), **options), (2, 3, 4)
    network = lipcert.trace(randomise(layer), shape)
    assert [site.name for site in network.sites] == ["input", "activation", "output"]
    (_, whole), hidden = network.push(0, eye(shape), [0.0, 0.6]), hidden_matrix(layer, shape)
    n = prod(shape)
    factors = layer.factors().detach().expand(layer.weight.shape[0], *shape[1:]).flatten()
    linear = sqrt(1.6) * torch.eye(n, dtype=torch.float64) - 0.6 * hidden.T @ (factors[:, None] * hidden)
    torch.testing.assert_close(whole.reshape(n, n).T, linear, rtol=1e-6, atol=1e-7)  # ρ is kept in float32 at first
    linearised = deepcopy(layer)
    linearised.activation = nn.LeakyReLU(1.0)  # φ = id
    (_, whole) = network.push(0, eye(shape), [0.0, 1.0])
    torch.testing.assert_close(whole.reshape(n, n).T, jacobian(linearised, shape), rtol=1e-10, atol=1e-10)
    pulled = network.pullback(eye(shape), [0.0, 0.6])
    torch.testing.assert_close(pulled[1].reshape(n, -1).T, -factors[:, None] * hidden, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["dense", "conv"])
@pytest.mark.parametrize("method", ["naive", "liplt"])
def test_estimates_agree_with_dense_references(kind, method):
    model, shape = stack(kind, "sll")
    for target in ("network", "pairwise"):
        value = converged(model, shape, method=method, target=target)()
        torch.testing.assert_close(value.detach(), reference(model, shape, method, target), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["dense", "conv"])
@pytest.mark.parametrize("rescaling", RESCALINGS)
def test_gradients_of_estimates_reach_all_parameters(kind, rescaling):
    model, shape = stack(kind, rescaling)
    lipcert.Estimator(model, shape, power_iterations=50)().sum().backward()
    for name, parameter in model.named_parameters():
        if not name.endswith("bias"):
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("rescaling", RESCALINGS)
@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_gradients_of_the_layer_are_those_of_finite_differences(kind, rescaling):
    model, _ = stack(kind, rescaling, nn.Tanh)
    layer = model[1]
    x = randn(2, *((5,) if kind == "dense" else (2, 2, 2)))
    parameters = {k: p for k, p in layer.named_parameters() if not (rescaling == "sn" and kind == "conv" and p.dim())}

    def value(*tensors):
        return torch.func.functional_call(layer, dict(zip(parameters, tensors, strict=True)), (x,))

    inputs = tuple(p.detach().clone().requires_grad_() for p in parameters.values())
    assert torch.autograd.gradcheck(value, inputs)


def view_bound(model, shape, view, naive=False):
    """The recursion over proved norms of the network as a view shows it."""
    network = lipcert.trace(deepcopy(model).double(), shape, view=view)
    with torch.no_grad():
        sectors = network.lipschitz_sectors() if naive else network.sectors()
        sectors = [(float(c), float(s)) for c, s in sectors]
    norms = bound_norms(network, [c for c, _ in sectors], network.depth + 1).bounds
    m = [1.0]
    for j in range(1, network.depth + 2):
        m.append(sum(norms.get((j, i), 0.0) * sectors[i][1] * m[i] for i in range(j)))
    return m[-1]


@examples(0.5)
@given(
    st.sampled_from(["dense", "conv"]),
    st.sampled_from(RESCALINGS),
    st.sampled_from(sorted(ACTIVATIONS)),
    st.integers(0, 999),
)
def test_all_bounds_of_mixed_stacks_hold(kind, rescaling, activation, seed):
    model, shape = stack(kind, rescaling, ACTIVATIONS[activation], seed)
    sampled = 0.0
    for k in range(30):
        x = randn(*shape, seed=k)
        matrix = torch.autograd.functional.jacobian(lambda t: model(t[None])[0], x).reshape(3, -1)
        sampled = max(sampled, float(torch.linalg.matrix_norm(matrix, 2)))
    liplt = view_bound(model, shape, "residual")
    naive = view_bound(model, shape, "residual", naive=True)
    opaque = view_bound(model, shape, "opaque")
    certified = view_bound(model, shape, "certified")
    assert sampled <= min(liplt, naive, opaque, certified) * (1 + 1e-9)
    assert liplt <= naive * (1 + 1e-9)
    assert opaque == pytest.approx(certified, rel=1e-9)
    assert float(lipcert.bound(model, shape, target="network").value) == pytest.approx(liplt, rel=1e-6)


def test_the_opaque_view_of_a_chain_is_the_product_of_the_constants():
    rhos = (0.5, 2.0, 1.7)
    model = nn.Sequential(*(RhoLipschitzLinear(4, 6, rho=rho, learn_rho=True) for rho in rhos)).double()
    network = lipcert.trace(model, (4,), view="opaque")
    assert [site.name for site in network.sites] == ["input", "0", "1", "2", "output"]
    assert view_bound(model, (4,), "opaque") == pytest.approx(sqrt(prod(rhos)), rel=1e-6)
    assert network.sectors()[1][0] == 0.0
    assert not network.sites[1].slope.shifts()
    with torch.no_grad():
        model[0].log_rho.zero_()
    assert network.sites[1].slope.lipschitz().item() == 1.0  # read anew
    network.sites[2].slope.lipschitz().backward()
    assert model[1].log_rho.grad == pytest.approx(model[1].lipschitz().item() / 2)


def test_a_bare_layer_has_all_views():
    layer = RhoLipschitzConv2d(2, 3, rho=4.0)
    for view, name in [("residual", "activation"), ("opaque", "0"), ("certified", "0")]:
        network = lipcert.trace(layer, (2, 5, 5), view=view)
        assert [site.name for site in network.sites[1:-1]] == [name]
    assert float(network.sites[1].slope.lipschitz()) == pytest.approx(2.0, rel=1e-6)
    with pytest.raises(OptionError, match=r"view is 'opak'.*did you mean 'opaque'"):
        lipcert.trace(layer, (2, 5, 5), view="opak")


def test_a_power_iteration_that_lags_behind_costs_what_it_must():
    torch.manual_seed(1)
    layer = randomise(RhoLipschitzConv2d(2, 3, 3, rescaling="sn", rho=1.5))
    with torch.no_grad():
        layer.weight.copy_(randn(*layer.weight.shape, seed=77))  # the vector is that of other weights
        layer.bias.fill_(100.0)  # all slopes 1, the worst case
    constant = layer.certified_lipschitz()
    slope = float(torch.linalg.matrix_norm(jacobian(layer, (2, 12, 12)), 2))
    assert slope > promised(layer)
    assert slope <= constant <= 1.1 * slope
    layer.iterate(300)
    assert layer.certified_lipschitz() == pytest.approx(sqrt(1.5), rel=1e-6)
    assert steepest(layer, (2, 5, 5)) <= promised(layer)


def test_the_power_iteration_follows_training():
    layer = RhoLipschitzConv2d(2, 3, 3, rescaling="sn")
    before = layer.vector.clone()
    layer.eval()(torch.rand(1, 2, 4, 4))
    assert torch.equal(layer.vector, before)
    with torch.no_grad():
        layer.weight.normal_()
    layer.train()
    for _ in range(300):
        layer(torch.rand(1, 2, 4, 4))
    assert layer.certified_lipschitz() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(("alpha", "kappa"), [(0.0, 1.0), (0.0, 1.3), (0.0, 3.0), (0.2, 1.1), (0.2, 2.0), (1.0, 5.0)])
def test_the_constant_for_a_failed_inequality_is_attained_by_a_scalar_layer(alpha, kappa):
    """w = 1, T = κ·2ρ/(α+β)²: the slope is √ρ(1 − 2κd/(α+β)), d ∈ {α, β}, and √ρ where the row is zero."""
    expected = sqrt(2.0) * max(1.0, *(abs(1 - 2 * kappa * d / (alpha + 1)) for d in (alpha, 1.0)))
    constant = proof.lipschitz_constant(torch.tensor(2.0, dtype=torch.float64).log().item(), alpha, 1.0, kappa)
    assert constant >= expected * (1 - 1e-15)
    assert constant == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_proofs_bound_the_norm_of_a_convolution_of_any_size_closely(size):
    weight, factors = randn(3, 2, size, size), randn(3, seed=1).abs() + 0.1
    layer = RhoLipschitzConv2d(2, 3, size).double()
    with torch.no_grad():
        layer.weight.copy_(weight * factors.sqrt().reshape(-1, 1, 1, 1))
    dense = float(torch.linalg.matrix_norm(hidden_matrix(layer, (2, 16, 16)), 2)) ** 2
    symbols = torch.fft.fft2(layer.weight.detach(), (128, 128)).permute(2, 3, 0, 1)
    largest = float(torch.linalg.matrix_norm(symbols, 2).max()) ** 2
    assert max(dense, largest) <= proof.kernel_norm(weight, factors) <= 1.006 * largest
    assert dense <= proof.gershgorin(weight, randn(3, seed=2), factors)
    matrix = randn(5, 4)
    exact = float(torch.linalg.matrix_norm(matrix * factors[[0, 1, 2, 0, 1], None].sqrt(), 2)) ** 2
    assert exact <= proof.dense_norm(matrix, factors[[0, 1, 2, 0, 1]]) <= exact * (1 + 1e-6)
    assert exact <= proof.gershgorin(matrix, None, factors[[0, 1, 2, 0, 1]])


@pytest.mark.parametrize("rescaling", RESCALINGS)
@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_certificates_cover_the_rounding_of_the_layers(kind, rescaling):
    model, shape = stack(kind, rescaling)
    model.float()
    bound = lipcert.bound(model, shape)
    certifier = Certifier(model, bound)
    x = torch.rand(200, *shape)
    certificates = certifier.certify(x)
    assert (certificates.radius > 0).any()
    execution = certifier._pass.execute(x)
    exact = deepcopy(model).double()(x.double()).detach()
    prediction = execution.logits.argmax(1)
    errors = certifier.rounding.errors(execution, prediction)

    def margins(z):
        return z.double().gather(1, prediction[:, None]) - z.double()

    made = (margins(execution.logits) - margins(exact)).abs()
    assert (made <= errors).all()
    assert made.max() > 0
    directions = nn.functional.normalize(torch.randn(200, prod(shape)).double(), dim=1)
    steps = 0.999 * certificates.radius[:, None] * directions
    moved = (x.double() + steps.reshape(x.shape)).float()
    assert torch.equal(model(moved).argmax(1), certificates.prediction)


def test_factors_that_are_used_as_constants_are_read_anew():
    model, shape = stack("dense")
    network = lipcert.trace(model, shape)
    (scale,) = [edge.op for node in network.nodes if node.name == "1.mul_1" for edge in node.edges]
    with torch.no_grad():
        model[1].weight.mul_(2.0)
    torch.testing.assert_close(scale.factor(), model[1].factors())
    assert Constant(model[1].factors)().requires_grad


def test_rho_is_learned_and_stays_positive():
    layer = RhoLipschitzLinear(3, 3, rho=2.0, learn_rho=True)
    assert "log_rho" in dict(layer.named_parameters())
    assert "log_rho" in dict(RhoLipschitzLinear(3, 3, rho=2.0).named_buffers())
    optimizer = torch.optim.SGD(layer.parameters(), lr=10.0)
    for _ in range(5):
        optimizer.zero_grad()
        layer.lipschitz().backward()
        optimizer.step()
    assert 0 < layer.lipschitz().item() < 1
    assert "learn_rho=True" in repr(layer)


def test_state_dicts_and_checkpoints_restore_the_layers(tmp_path):
    for name, shape in [("rho-mlp", (1, 8, 8)), ("rho-conv", (1, 8, 8))]:
        model = zoo.build(name, shape, 10, seed=3).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        save_checkpoint(model, tmp_path / "m.safetensors", name, shape, 10)
        loaded = load_model(str(tmp_path / "m.safetensors")).model
        x = torch.rand(4, *shape)
        assert torch.equal(loaded(x), model(x))
        lipcert.bound(model, shape, target="network").check_belongs(loaded)
    first, second = (RhoLipschitzConv2d(2, 3, rescaling="sn", rho=rho) for rho in (2.0, 1.0))
    second.load_state_dict(first.state_dict())
    x = torch.rand(2, 2, 4, 4)
    assert torch.equal(first.eval()(x), second.eval()(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rescaling": "aoll"}, "rescaling is 'aoll'.*did you mean 'aol'"),
        ({"activation": "gelu"}, "activation is 'gelu', expected one of relu"),
        ({"activation": nn.GELU()}, r"GELU has slopes in \[-0.128904, 1.1289\], expected none below 0"),
        ({"activation": nn.PReLU()}, "PReLU has learned slopes"),
        ({"activation": nn.Softmax(1)}, "Softmax has no rule with elementwise slopes"),
        ({"activation": nn.Linear(2, 2)}, "Linear has no rule with elementwise slopes"),
        ({"activation": nn.RReLU()}, "RReLU has no rule with elementwise slopes"),
        ({"activation": nn.Softplus(threshold=2)}, "activation Softplus: threshold=2 makes a visible jump"),
        ({"rho": 0.0}, "rho is 0.0, expected a positive number"),
        ({"rho": float("nan")}, "rho is nan"),
    ],
)
def test_bad_options_are_refused(options, message):
    for make in (lambda: RhoLipschitzLinear(3, 4, **options), lambda: RhoLipschitzConv2d(3, 4, **options)):
        with pytest.raises(OptionError, match=message):
            make()


def test_bad_sizes_are_refused():
    with pytest.raises(OptionError, match="kernel_size is 2, expected an odd number"):
        RhoLipschitzConv2d(2, 3, 2)
    with pytest.raises(OptionError, match="expected sizes of 1 or more"):
        RhoLipschitzLinear(3, 0)


def test_promised_constants_and_the_best_of_all():
    """∏√ρ between two dense layers; `best` is not above it where LipLT is."""
    torch.manual_seed(0)
    layers = [RhoLipschitzLinear(12, 12, rho=rho) for rho in (0.5, 1.0, 2.0, 1.0, 1.5, 1.0)]
    model = nn.Sequential(nn.Linear(6, 12), *layers, nn.Linear(12, 3)).eval()
    promised = promised_constants(model, (6,), ("network", "pairwise"))
    first, last = (torch.linalg.matrix_norm(model[k].weight.double(), 2) for k in (0, -1))
    assert float(promised["network"]) == pytest.approx(float(first * last) * 1.5**0.5, rel=1e-6)
    liplt = lipcert.bound(model, (6,), "liplt", "network").value
    best = lipcert.bound(model, (6,), "best", "network", fit=FitOptions(steps=5))
    assert liplt > promised["network"]
    assert best.value <= promised["network"] * (1 + 1e-9)
    assert lipcert.estimate_sampled(model, (6,)) <= best.value * (1 + 1e-9)
    assert promised_constants(nn.Sequential(nn.Linear(3, 2)), (3,), ("network",)) == {}
