"""ONNX files made node by node, as other tools write them."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save_model

RANDOM = np.random.default_rng(0)


def array(*shape):
    return (RANDOM.standard_normal(shape) / 3).astype(np.float32)


def node(kind, inputs, output, **attributes):
    outputs = output if isinstance(output, list) else [output]
    return helper.make_node(
        kind, inputs.split(), outputs, name=f"{kind}_{outputs[0]}", **attributes
    )


def write(
    path,
    nodes,
    shape,
    *,
    opset=18,
    batch="N",
    output="y",
    dtype=TensorProto.FLOAT,
    **constants,
):
    """A file with the input x, the output y and these constants."""
    stored = []
    for name, value in constants.items():
        stored.append(numpy_helper.from_array(np.asarray(value), name))
    x = helper.make_tensor_value_info("x", dtype, [batch, *shape])
    y = helper.make_empty_tensor_value_info(output)
    y.type.tensor_type.elem_type = dtype
    graph = helper.make_graph(nodes, "graph", [x], [y], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 9
    save_model(model, str(path))
    return path


def ints(*values):
    return np.array(values, np.int64)


def tensorflow_net(path):
    """(N, 8, 8, 1), SAME padding between transpositions, a Reshape from Shape: as tf2onnx writes."""
    nodes = [
        node("Transpose", "x", "a", perm=[0, 3, 1, 2]),
        node(
            "Conv",
            "a w1 b1",
            "c",
            auto_pad="SAME_UPPER",
            strides=[2, 2],
            kernel_shape=[3, 3],
        ),
        node("Relu", "c", "d"),
        node("Transpose", "d", "e", perm=[0, 2, 3, 1]),
        node("Add", "e shift", "f"),
        node("Shape", "f", "s"),
        node("Slice", "s zero one zero", "rows"),
        node("Concat", "rows minus", "target", axis=0),
        node("Reshape", "f target", "g"),
        node("MatMul", "g w2", "h"),
        node("Add", "h b2", "y"),
    ]
    return write(
        path, nodes, (8, 8, 1), w1=array(6, 1, 3, 3), b1=array(6), shift=array(6), zero=ints(0), one=ints(1),
        minus=ints(-1), w2=array(96, 10), b2=array(10),
    )  # fmt: skip
