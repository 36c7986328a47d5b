"""ONNX: a reader that builds modules, and what onnxruntime says about both directions."""

from lipcert.onnx_graphs.reader import load_onnx

__all__ = ["load_onnx"]
