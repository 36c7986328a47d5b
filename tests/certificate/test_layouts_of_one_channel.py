"""With one channel both memory formats are contiguous, and what convolutions return depends on strides alone."""

import pytest
import torch
from torch import nn

import lipcert
from lipcert.errors import UnsupportedError


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
