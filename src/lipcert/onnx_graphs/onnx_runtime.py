"""onnxruntime as the judge: a module and an ONNX file have to agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipcert.errors import ModelError
from lipcert.network.explain import first_line

TOLERANCE = 1e-4
"""Of the largest output: float32 in another order of sums differs by less, another operator by more."""


def needed(name: str) -> ModuleType:
    """A package of the extra `onnx`."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise ModelError(
            f"ONNX needs the package {name}; pip install 'lipcert[onnx]'"
        ) from None


def open_session(path: Path) -> Any:
    """onnxruntime on one thread of the CPU, with the graph as it is: nothing fused."""
    runtime: Any = needed("onnxruntime")
    options = runtime.SessionOptions()
    # Fused operators round differently: what is compared is the graph that was read.
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return runtime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime has many kinds
        reason = first_line(error)
        raise ModelError(
            f"{path} cannot be executed by onnxruntime ({reason}); export it again"
        ) from None


def run_session(
    session: Any, x: Tensor, outputs: Sequence[str], rows: int | None = None
) -> list[Tensor]:
    """The outputs by name; `rows` at a time, if the graph has a fixed batch size."""
    name = session.get_inputs()[0].name
    pieces: list[list[Any]] = []
    for batch in torch.split(x, rows or len(x)):
        try:
            pieces.append(session.run(list(outputs), {name: batch.numpy()}))
        except Exception as error:  # onnxruntime has many kinds
            reason = first_line(error)
            raise ModelError(
                f"onnxruntime cannot run the graph on {len(batch)} inputs ({reason})"
            ) from None
    return [
        torch.from_numpy(np.concatenate(results))
        for results in zip(*pieces, strict=True)
    ]


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest expected value; infinite for other shapes and NaN."""
    # NaN on both sides would compare as no difference at all.
    if found.shape != expected.shape or not bool(
        (torch.isfinite(found) & torch.isfinite(expected)).all()
    ):
        return float("inf")
    largest = max(float(expected.abs().max()), 1e-6)
    return float((found.double() - expected.double()).abs().max()) / largest


def sample_inputs(rows: int, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Pixels, numbers around 0 and large ones, always the same."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(rows, *shape, generator=generator, dtype=dtype)
    numbers = torch.randn(rows, *shape, generator=generator, dtype=dtype)
    # Large numbers reach the ends of saturated activations, where a wrong one differs
    # most.
    return [pixels, numbers, 20 * numbers.flip(0)]
