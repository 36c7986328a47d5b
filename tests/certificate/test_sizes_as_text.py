"""The number of rows is a symbol while a model is captured: as text it is another one."""

import pytest
import torch
from torch import nn

import lipcert
from lipcert.errors import UnsupportedError


class Named(nn.Module):
    def __init__(self, text):
        super().__init__()
        self.text = text
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        factor = 3 if "11" in self.text(x) else 1
        return factor * self.layer(x)


TEXTS = {
    "str": lambda x: str(x.size(0)),
    "repr": lambda x: repr(x.shape[0]),
    "format": lambda x: f"{x.shape[0]}",
    "percent": lambda x: "%s" % x.shape[0],  # noqa: UP031
    "shape": lambda x: f"{x.shape}",
    "list": lambda x: str(list(x.shape)),
    "a part": lambda x: str(x[1:].shape),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_number_of_rows_as_text(name):
    with pytest.raises(UnsupportedError):
        lipcert.bound(Named(TEXTS[name]).eval(), (4,))


def test_other_sizes_as_text():
    model = Named(lambda x: f"{x.shape[1]} {list(x.shape[1:])}").eval()
    exact = torch.linalg.matrix_norm(model.layer.weight.detach().double(), 2)
    bound = lipcert.bound(model, (4,), target="network")
    assert float(bound.value) == pytest.approx(float(exact), rel=1e-6)
