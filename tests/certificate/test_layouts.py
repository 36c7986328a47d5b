"""What functions return is a view or a copy, depending on strides: in-place operations reach through views only."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lipcert
from lipcert.errors import LipcertError, UnsupportedError
from models import Op


class ReadAgain(nn.Module):
    """Features that a ReLU changes through a view, in some layouts only, are read again."""

    def __init__(self, spelling, convolution):
        super().__init__()
        self.spelling = spelling
        self.convolution = convolution
        self.layer = nn.LazyLinear(3)

    def forward(self, x):
        features = self.convolution(x)
        flat = self.spelling(features).relu_()
        return self.layer(flat + features.flatten(1))


SPELLINGS = {
    "flatten": lambda x: x.flatten(1),
    "reshape": lambda x: x.reshape(x.shape[0], -1),
    "contiguous": lambda x: x.contiguous().flatten(1),
}


@pytest.mark.parametrize("size", [6, 24])
@pytest.mark.parametrize("name", SPELLINGS)
def test_views_of_the_features_of_one_channel(name, size):
    model = ReadAgain(SPELLINGS[name], nn.Conv2d(1, 8, 3)).eval()
    model(torch.zeros(1, 1, size, size))
    with pytest.raises(UnsupportedError, match="memory layout"):
        lipcert.bound(model, (1, size, size))


def test_views_of_volumes_of_one_channel():
    model = ReadAgain(SPELLINGS["flatten"], nn.Conv3d(1, 4, 2)).eval()
    model(torch.zeros(1, 1, 3, 4, 5))
    with pytest.raises(UnsupportedError, match="memory layout"):
        lipcert.bound(model, (1, 3, 4, 5))


class Tripled(nn.Module):
    """Three times as steep where `lay_out` returns its argument."""

    def __init__(self, lay_out, before=torch.relu):
        super().__init__()
        self.lay_out, self.before = lay_out, before
        self.layer = nn.Linear(12, 3)

    def forward(self, x):
        features = self.before(x)
        self.lay_out(features).mul_(3)
        return self.layer(features.flatten(1))


LAID_OUT = {
    "to channels last": lambda x: x.to(memory_format=torch.channels_last),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "contiguous": lambda x: x.contiguous(),
    "reshaped": lambda x: x.reshape(x.shape[0], -1),
}


@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 2, 2), (12, 1, 1)])
@pytest.mark.parametrize("name", LAID_OUT)
def test_functions_that_return_their_argument_in_some_layout(name, shape):
    with pytest.raises(UnsupportedError, match="memory layout"):
        lipcert.bound(Tripled(LAID_OUT[name]).eval(), shape)


@pytest.mark.parametrize("name", LAID_OUT)
def test_where_nobody_looks_at_the_original_layouts_do_not_matter(name):
    class Unread(Tripled):
        def forward(self, x):
            y = self.lay_out(torch.relu(x))
            return self.layer(y.mul_(3).flatten(1))

    model = Unread(LAID_OUT[name]).eval()
    exact = 3 * torch.linalg.matrix_norm(model.layer.weight.detach().double(), 2)
    bound = lipcert.bound(model, (1, 3, 4), target="network", method="naive")
    assert float(bound.value) == pytest.approx(float(exact), rel=1e-6)


class Remembering(nn.Module):
    """Keeps the features of the tensor that it has seen last."""

    def __init__(self, key):
        super().__init__()
        self.key, self.seen = key, (None, None)
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        if self.seen[0] != self.key(x):
            self.seen = (self.key(x), self.layer(x))
        return self.seen[1]


@pytest.mark.parametrize("key", [id, weakref.ref])
def test_features_of_a_tensor_that_was_seen_before(key):
    with pytest.raises(UnsupportedError):
        lipcert.bound(Remembering(key).eval(), (4,))


def test_windows_that_share_their_memory():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x.sub_(0.5))

    model = Centred().eval()
    bound = lipcert.bound(model, (6,))
    windows = torch.rand(20).unfold(0, 6, 1)
    with pytest.raises(UnsupportedError, match="share their memory"):
        lipcert.certify(model, windows, bound)
    with pytest.raises(UnsupportedError, match="share their memory"):
        lipcert.certify_local(model, windows)
    assert len(lipcert.certify(model, windows.clone(), bound)) == 15


def test_a_slice_of_nothing_that_is_changed_in_place():
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            features = 1 * x
            features[..., 1:].mul_(2)
            return self.layer(features.flatten(1))

    model = Doubled().eval()
    bound = lipcert.bound(model, (4, 1), target="network")
    exact = torch.linalg.matrix_norm(model.layer.weight.detach().double(), 2)
    assert float(bound.value) == pytest.approx(float(exact), rel=1e-6)
    assert (lipcert.certify(model, torch.rand(3, 4, 1), bound).radius > 0).all()


REACHES = {
    "reshape": lambda h: h.reshape(h.shape[0], -1).mul_(3),
    "flatten": lambda h: h.flatten(2).clamp_(min=0),
    "relu": lambda h: F.relu(torch.flatten(h, 1), inplace=True),
    "channels last": lambda h: h.to(memory_format=torch.channels_last).relu_(),
    "contiguous": lambda h: h.contiguous().mul_(2),
    "transposed": lambda h: h.transpose(2, 3).reshape(h.shape[0], -1).mul_(3),
}


# What is transposed behind a convolution is a view in no layout.
@pytest.mark.parametrize(
    ("name", "convolves"),
    [(name, False) for name in REACHES]
    + [(name, True) for name in REACHES if name != "transposed"],
)
def test_in_place_operations_that_reach_through_views_of_some_layouts_only(
    name, convolves
):
    def forward(m, x):
        h = m.c(x) if convolves else x * 2
        REACHES[name](h)
        return m.l(h.flatten(1))

    parts = {"c": nn.Conv2d(3, 3, 3, padding=1), "l": nn.Linear(48, 3)}
    with pytest.raises(LipcertError, match="memory layout"):
        lipcert.bound(Op(forward, **parts).eval(), (3, 4, 4), target="network")


def test_in_place_operations_on_what_nobody_reads_later_are_no_matter():
    layers = nn.Conv2d(3, 2, 3), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(8, 3)
    lipcert.bound(nn.Sequential(*layers).eval(), (3, 4, 4))


def test_a_model_that_refuses_other_layouts_itself_is_accepted():
    def forward(m, x):
        return m.l(m.c(x).view(x.size(0), -1))

    model = Op(forward, c=nn.Conv2d(3, 2, 3), l=nn.Linear(8, 3)).eval()
    lipcert.bound(model, (3, 4, 4))


def test_what_only_a_contiguous_tensor_allows():
    def shuffled(m, x):
        halves = x.view(x.shape[0], 2, 2, 4).transpose(1, 2)
        return m.l(halves.contiguous().view(x.shape[0], 16))

    model = Op(shuffled, l=nn.Linear(16, 3)).eval()
    exact = torch.linalg.matrix_norm(model.l.weight.detach().double(), 2)
    bound = lipcert.bound(model, (4, 4), target="network")
    assert float(bound.value) == pytest.approx(float(exact), rel=1e-6)
