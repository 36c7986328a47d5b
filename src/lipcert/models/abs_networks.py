"""Networks with |·| whose layers are matrices on separate patches or pixels; not the paper's."""

from __future__ import annotations

from torch import nn

from lipcert.layers import Abs, Patches, Shift
from lipcert.network.program import Shape


def patch_network(
    width: int, depth: int, input_shape: Shape, classes: int
) -> nn.Sequential:
    """2×2 patches that halve the image and double the channels, 3×3 convolutions between them, |·|.

    A stride as large as the kernel makes a convolution a matrix on separate patches, as
    orthogonal as the matrix is.
    """
    layers: list[nn.Module] = [nn.Conv2d(input_shape[0], width, 2, 2), Abs()]
    channels = width
    for _ in range(2):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, channels, 3, 1, 1), Abs()]
        layers += [nn.Conv2d(channels, 2 * channels, 2, 2), Abs()]
        channels *= 2
    # Three strides of 2.
    size = channels * (input_shape[1] // 8) * (input_shape[2] // 8)
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(size, 512), Abs(), nn.Linear(512, classes)
    )


def shift_network(
    widths: list[int],
    depths: list[int],
    input_shape: Shape,
    classes: int,
    first_patch: int = 2,
) -> nn.Sequential:
    """Stages of 1×1 convolutions of shifted channels with |·|, each begun by 2×2 patches.

    The first patches may be larger. Every layer is a matrix on separate pixels or patches: if the matrices are
    orthogonal, the network is 1-Lipschitz up to its last layer.
    """
    layers: list[nn.Module] = []
    channels, patch, shrunk = input_shape[0], first_patch, 1
    for width, depth in zip(widths, depths, strict=True):
        of_patch = nn.Conv2d(channels * patch**2, width, 1)
        layers += [Patches(patch), of_patch, Abs()]
        for _ in range(depth):
            layers += [Shift(width), nn.Conv2d(width, width, 1), Abs()]
        channels, patch, shrunk = width, 2, shrunk * patch
    size = channels * (input_shape[1] // shrunk) * (input_shape[2] // shrunk)
    dense = [nn.Linear(size, channels), Abs(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, nn.Flatten(), *dense)
