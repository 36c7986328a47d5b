"""Operators that may raise an error for some values of their arguments, and none for others.

A model can catch such an error and go on otherwise: `try: table[index]`. Where the
operator is part of the program, its rule refuses arguments that depend on the input; a
result that is not used leaves no trace in the program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TAGS = {
    getattr(torch.Tag, name)
    for name in ("pointwise", "reduction")
    if hasattr(torch.Tag, name)
}
_OF_INTEGERS = ("div", "floor_divide", "true_divide", "remainder", "fmod", "pow")
"""Pointwise operators that raise for some integers, such as 0, and for no floating-point numbers."""
# What these accept is a question of shapes and types.
_NAMES = """
addbmm addmm addmv baddbmm bmm dot matmul mm mv outer vdot convolution _convolution
mkldnn_convolution _slow_conv2d_forward thnn_conv2d _to_copy to clone contiguous copy
fill zero detach lift_fresh lift_fresh_copy alias empty empty_like empty_strided
new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones full
full_like new_full arange linspace eye scalar_tensor cat stack constant_pad_nd
reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
replication_pad3d flip roll repeat tril triu sort topk cumsum cumprod max min amax
amin aminmax argmax argmin sum mean prod var std var_mean std_mean norm
linalg_vector_norm any all logsumexp _softmax _log_softmax native_batch_norm
cudnn_batch_norm batch_norm _native_batch_norm_legit
_native_batch_norm_legit_no_training _batch_norm_no_update native_layer_norm
native_group_norm _fused_rms_norm max_pool2d_with_indices max_pool3d_with_indices
avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
adaptive_max_pool2d adaptive_max_pool3d pixel_shuffle pixel_unshuffle im2col col2im
channel_shuffle upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
_upsample_bilinear2d_aa _upsample_bicubic2d_aa _unsafe_view _reshape_alias
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math
_trilinear _cdist_forward slice_scatter select_scatter diagonal_scatter
as_strided_scatter squeeze unsqueeze transpose t swapaxes swapdims as_strided where
masked_fill _fft_r2c _fft_c2r _fft_c2c glu rrelu_with_noise _prelu_kernel
"""
_SHAPES_ONLY = frozenset(_NAMES.split())
_BY_INDEX = {"index", "_unsafe_index", "index_select", "gather", "take", "scatter"}
"""Operators that raise for some indices, whatever the entries are that they move."""


def may_raise(func: Any, args: Any, dependent: Any) -> bool:
    """Whether an operator raises an error for some values of its `dependent` arguments."""
    name = plain_name(func)
    if func.namespace != "aten":
        return True
    if name in _BY_INDEX:
        return any(not value.is_floating_point() for value in dependent)
    if name.startswith(_OF_INTEGERS):
        return not any(isinstance(a, Tensor) and a.is_floating_point() for a in args)
    if func.is_view or name in _SHAPES_ONLY or _TAGS.intersection(func.tags):
        return False
    # What works in place may lack the tags of what does not.
    packet = getattr(torch.ops.aten, name, func.overloadpacket)
    tags = {tag for each in packet.overloads() for tag in getattr(packet, each).tags}
    return not _TAGS.intersection(tags)


def plain_name(func: Any) -> str:
    """The name of an operator, without the "_" of what works in place."""
    name: str = func.overloadpacket.__name__
    return name if name == "_" else name.rstrip("_")
