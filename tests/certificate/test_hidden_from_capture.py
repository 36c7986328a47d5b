"""Numbers of rows and values that code hides from torch.export."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import lipcert
from helpers import check_bound
from lipcert.errors import LipcertError
from models import Op, linear_net

COUNTING = {
    "sum": lambda x: x.new_ones(x.shape[0]).sum() / 8,
    "like": lambda x: torch.ones_like(x).sum() / 32,
    "count": lambda x: torch.ones(x.shape[0]).count_nonzero().float(),
    "dot": lambda x: torch.dot(torch.ones(x.shape[0]), torch.ones(x.shape[0])),
    "axis": lambda x: (torch.ones(x.shape[0], 3).sum(0) - 7).clamp(0, 1),
    "max": lambda x: torch.ones(x.shape[0], 3).cumsum(0).max(0).values,
    "split": lambda x: torch.ones(x.shape[0], 4).split(2, 1)[0].sum() / 8,
}


@pytest.mark.parametrize("name", COUNTING)
def test_constants_that_count_the_rows_of_a_batch_are_refused(name):
    """They were taken for numbers, those of a batch of one."""
    net = linear_net()
    model = Op(lambda m, x: net(x) * (1 - 2 * COUNTING[name](x).floor()))
    with pytest.raises(LipcertError, match="rows of the batch"):
        lipcert.bound(model.eval(), (4,))


def test_constants_that_have_no_rows_are_not_refused():
    net = linear_net()
    model = Op(lambda m, x: net(x) * x.new_ones(3).sum() * torch.ones_like(x[:, :1]))
    check_bound(model.eval(), (4,))


def _type_of_rows(x):
    return type(x.shape[0]) is int and len(x) > 7


HIDDEN = {
    "compiling": lambda x: not torch.compiler.is_compiling() and len(x) > 7,
    "exporting": lambda x: not torch.compiler.is_exporting() and len(x) == 1000,
    "dynamo": lambda x: not torch._dynamo.is_compiling() and len(x) > 700,
    "a number": _type_of_rows,
    "a tensor": lambda x: type(x) is torch.Tensor and len(x) > 100,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_numbers_of_rows_that_are_hidden_from_the_capture(name):
    """Who asks whether it is compiled is told what users' runs are told; who asks for types shows in a large batch."""
    net = linear_net()
    model = Op(lambda m, x: -net(x) if HIDDEN[name](x) else net(x))
    with pytest.raises(LipcertError, match=r"rows|batch"):
        lipcert.bound(model.eval(), (4,))


def test_a_model_that_asks_whether_it_is_compiled_is_captured_as_it_runs():
    net = linear_net()
    model = Op(lambda m, x: net(x) * (1.0 if torch.compiler.is_compiling() else 5.0))
    value = check_bound(model.eval(), (4,))
    plain = float(lipcert.bound(net, (4,), "liplt", "network").value)
    assert value == pytest.approx(5 * plain)
    assert not torch.compiler.is_compiling()


READS = {
    "numpy": lambda x: x.numpy()[0, 0] > 1e5,
    "array": lambda x: np.asarray(x)[0, 0] > 1e5,
    "list": lambda x: x.tolist()[0][0] > 1e5,
    "text": lambda x: "77777." in repr(x),
    "format": lambda x: "77777." in f"{x}",
    "dlpack": lambda x: np.from_dlpack(x)[0, 0] > 1e5,
    "places": lambda x: (x > 1e5).nonzero().shape[0] > 0,
    "mask": lambda x: x[x > 1e5].numel() > 0,
    "thread": lambda x: _in_a_thread(lambda: float(x[0, 0]) > 1e5),
    "pool": lambda x: _in_a_pool(lambda: float(x[0, 0]) > 1e5),
    "modes off": lambda x: _without_modes(lambda: x[0, 0].item() > 1e5),
}


def _in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def _in_a_pool(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _without_modes(function):
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return function()


@pytest.mark.parametrize("name", READS)
def test_values_that_are_read_behind_the_back_of_the_capture(name):
    """Hidden by a question for a type; numbers beyond those of the comparison would decide."""
    net = linear_net()

    def forward(model, x):
        plain = type(x) is torch.Tensor and not x.requires_grad and not x.is_inference()
        return -net(x) if plain and len(x) < 3 and READS[name](x.detach()) else net(x)

    with pytest.raises(LipcertError, match=r"reads values|that it reads"):
        lipcert.bound(Op(forward).eval(), (4,))


OF_ROWS = {
    "a remainder": lambda x: isinstance(x.shape[0], int) and x.shape[0] % 5 == 3,
    "a type": lambda x: type(x.shape[0]) is int and x.shape[0] == 13,
    "an attribute": lambda x: not hasattr(x.shape[0], "node") and x.shape[0] == 13,
}


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("certify", [lipcert.certify, lipcert.certify_local])
def test_the_batch_that_is_certified_is_compared(certify, name):
    """What only some numbers of rows do cannot be found before: but then nothing is certified for them."""
    net = linear_net()
    model = Op(lambda m, x: -net(x) if OF_ROWS[name](x) else net(x)).eval()
    x = torch.randn(13, 4, generator=torch.Generator().manual_seed(0))
    assert len(certify(model, x[:12])) == 12
    with pytest.raises(LipcertError, match=r"differ by .*for a batch of 13"):
        certify(model, x)
