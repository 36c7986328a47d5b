"""A model with what is known about it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lipcert.bounds.bound import Bound
from lipcert.certificate.binary import TwoLogits, has_one_logit
from lipcert.errors import ShapeError
from lipcert.network.build import trace
from lipcert.network.normal_form import Network
from lipcert.network.program import Shape
from lipcert.network.splitting import PRODUCTS, split_sums


class ChannelsLast(nn.Module):
    """(B, C, H, W) as (B, H, W, C), for networks that were made with TensorFlow."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, the shape of its inputs, and where it comes from.

    earlier: the bound that is stored beside the weights, as in a run folder: at least a
    good start for another.
    longest_sum: if given, what is executed sums in parts of at most so many products.

    Example:
        >>> loaded = lipcert.load_model("mlp-64")
        >>> loaded.input_shape, loaded.network.depth
        ((1, 28, 28), 1)
    """

    model: nn.Module
    input_shape: Shape
    name: str
    earlier: Bound | None = None
    longest_sum: int | None = None

    @property
    def scales(self) -> Mapping[str, Tensor] | None:
        """The coordinates of the earlier bound."""
        if self.earlier is None:
            return None
        return self.earlier.scales

    @cached_property
    def network(self) -> Network:
        """The captured model, for all bounds and certificates; captured once."""
        return trace(self.model, self.input_shape)

    @cached_property
    def executed(self) -> nn.Module:
        """What runs, and what certificates are about."""
        if self.longest_sum is None:
            return self.model
        # Attacks have to be on this program: another order of sums may have other
        # predictions.
        return split_sums(self.network.program, self.longest_sum).module().eval()

    def executed_in(self, execution: str) -> LoadedModel:
        """A copy in "float64", the model with sums in parts ("float32-split"), or as it is ("float32")."""
        # `replace` makes a new object, whose network is captured anew.
        if execution == "float64":
            return replace(self, model=deepcopy(self.model).double())
        if execution == "float32-split":
            return replace(self, longest_sum=PRODUCTS)
        return self

    def for_images(self, shape: Shape) -> LoadedModel:
        """The model for images (C, H, W), also if it takes them as (H, W, C): radii are the same in any order."""
        if has_one_logit(self.network):
            # The earlier bound is of another program, here and below.
            return replace(
                self, model=TwoLogits(self.model).eval(), earlier=None
            ).for_images(shape)
        if shape == self.input_shape:
            return self
        if len(shape) == 3 and self.input_shape == (*shape[1:], shape[0]):
            model = nn.Sequential(
                OrderedDict(channels_last=ChannelsLast(), network=self.model)
            )
            return replace(self, model=model.eval(), input_shape=shape, earlier=None)
        raise ShapeError(
            f"the data have inputs of shape {shape}, the model takes {self.input_shape}"
        )

    @property
    def execution(self) -> str:
        """The arithmetic that certificates are for."""
        return str(self.dtype).removeprefix("torch.") + (
            "-split" if self.longest_sum else ""
        )

    @property
    def dtype(self) -> torch.dtype:
        """In which the model computes."""
        # Buffers too: a network read from ONNX has no parameters.
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.float32
