"""Windows of convolutions and pools: strides, dilations and the four ways in which ONNX states padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from lipcert.onnx_graphs.onnx_node import OnnxNode, RefusalError


@dataclass(frozen=True)
class Window:
    """One entry per spatial axis."""

    kernel: list[int]
    stride: list[int]
    dilation: list[int]
    before: list[int]
    after: list[int]

    @property
    def is_symmetric(self) -> bool:
        return self.before == self.after and min(self.before, default=0) >= 0

    @property
    def torch_pads(self) -> list[int]:
        """As torch.nn.functional.pad takes them: from the last axis on."""
        pads: list[int] = []
        for before, after in zip(
            reversed(self.before), reversed(self.after), strict=True
        ):
            pads += [before, after]
        return pads


def padded(
    x: Tensor, function: Any, pads: list[int], value: float = 0.0, **options: Any
) -> Tensor:
    """The function of the padded input."""
    y: Tensor = function(F.pad(x, pads, value=value), **options)
    return y


def window(
    node: OnnxNode, kernel: list[int], transposed: list[int] | None = None
) -> Window:
    """The window of a node; of a transposed convolution with this output padding."""
    rank = len(kernel)
    if (
        list(node.attribute("kernel_shape", kernel)) != kernel
        or node.x.dim() != rank + 2
    ):
        raise RefusalError(
            f"kernel_shape is {node.attribute('kernel_shape')}, the weights and "
            "the input say otherwise"
        )
    stride = list(node.attribute("strides", [1] * rank))
    dilation = list(node.attribute("dilations", [1] * rank))
    pads = list(node.attribute("pads", [0] * 2 * rank))
    # ONNX: all beginnings, then all ends.
    before, after = pads[:rank], pads[rank:]
    mode = node.attribute("auto_pad", "NOTSET")
    wanted = node.attribute("output_shape")
    if mode not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        raise RefusalError(f"auto_pad is {mode}, which is not known")
    if mode == "VALID":
        before, after = [0] * rank, [0] * rank
    if mode in ("SAME_UPPER", "SAME_LOWER") or wanted is not None:
        for k in range(rank):
            # The extent of a kernel of 3 with dilation 2 is 5.
            size, extent = node.x.shape[k + 2], (kernel[k] - 1) * dilation[k] + 1
            if transposed is None:
                # SAME: ceil(size/stride) windows, which reach over (that − 1)·stride +
                # extent entries.
                total = max((-(-size // stride[k]) - 1) * stride[k] + extent - size, 0)
            else:
                result = size * stride[k] if wanted is None else wanted[-rank:][k]
                # What the convolution would give without padding, minus what is wanted.
                total = stride[k] * (size - 1) + transposed[k] + extent - result
            before[k], after[k] = _shared(total, mode, transposed is not None)
    return Window(kernel, stride, dilation, before, after)


def _shared(total: int, mode: str, transposed: bool) -> tuple[int, int]:
    """The padding before and after: an odd one is after with SAME_UPPER, before with SAME_LOWER."""
    smaller, larger = total // 2, total - total // 2
    if mode == "SAME_UPPER" or (not transposed and mode != "SAME_LOWER"):
        return smaller, larger
    return larger, smaller
