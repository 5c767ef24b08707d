"""Writes a multi-layer perceptron as ONNX, sparse weights in coordinate form.

    input [N, 784] -> Gemm(fc1.weight [out, in], fc1.bias; transB = 1) -> Relu -> ... -> logits

A weight becomes a `sparse_initializer` where that takes fewer bytes than the dense one, in the
index form that the caller asks for. Both forms of SparseTensorProto are offered; "linear" is always
the smaller one, "pairs" is there so that readers meet it in a real file:

    "linear"   indices [nnz],    row * in + col, stored as variable-length integers (int64_data)
    "pairs"    indices [nnz, 2], (row, col),     stored as raw little-endian int64 (raw_data)

Indices ascend. Values are float32, in raw_data. Zeros are +0.0: the sign that `w * mask` leaves on
a zero is dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

IR_VERSION = 8
OPSET = 17
INDEX_FORMS = ("linear", "pairs")


def sparse_tensor(name: str, weight: np.ndarray, index_form: str) -> onnx.SparseTensorProto:
    """Returns `weight` as a SparseTensorProto in the given index form."""
    flat = np.flatnonzero(weight)
    values = numpy_helper.from_array(weight.reshape(-1)[flat], name)
    if index_form == "linear":
        indices = helper.make_tensor(f"{name}.indices", TensorProto.INT64, [len(flat)], flat)
    elif index_form == "pairs":
        pairs = np.stack(np.unravel_index(flat, weight.shape), axis=1).astype(np.int64)
        indices = numpy_helper.from_array(pairs, f"{name}.indices")
    else:
        raise ValueError(f"index form {index_form!r} is none of {INDEX_FORMS}")
    return helper.make_sparse_tensor(values, indices, list(weight.shape))


def mlp_model(
    name: str, layers: Sequence[tuple[np.ndarray, np.ndarray]], index_form: str
) -> onnx.ModelProto:
    """Builds the ONNX model of a perceptron with ReLU between its layers.

    Args:
      name: the graph's name.
      layers: (weight [out, in], bias [out]) in order, float32.
      index_form: "linear" or "pairs", for the weights that are stored sparse.

    Returns:
      The model; input `input` float32 [N, in], output `logits` float32 [N, out].
    """
    nodes, dense, sparse = [], [], []
    tensor = "input"
    for number, (weight, bias) in enumerate(layers, start=1):
        weight = weight.astype(np.float32) + np.float32(0.0)  # -0.0 + 0.0 is +0.0
        as_dense = numpy_helper.from_array(weight, f"fc{number}.weight")
        as_sparse = sparse_tensor(f"fc{number}.weight", weight, index_form)
        if as_sparse.ByteSize() < as_dense.ByteSize():
            sparse.append(as_sparse)
        else:
            dense.append(as_dense)
        dense.append(numpy_helper.from_array(bias.astype(np.float32), f"fc{number}.bias"))
        last = number == len(layers)
        out = "logits" if last else f"fc{number}.out"
        inputs = [tensor, f"fc{number}.weight", f"fc{number}.bias"]
        nodes.append(helper.make_node("Gemm", inputs, [out], name=f"fc{number}", transB=1))
        tensor = out
        if not last:
            nodes.append(helper.make_node("Relu", [out], [f"relu{number}.out"], f"relu{number}"))
            tensor = f"relu{number}.out"
    features_in, features_out = layers[0][0].shape[1], layers[-1][0].shape[0]
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", features_in])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", features_out])],
        initializer=dense,
        sparse_initializer=sparse,
    )
    return helper.make_model(
        graph,
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET)],
        producer_name="espalier-training",
    )


def write_model(model: onnx.ModelProto, repository: Path, name: str) -> Path:
    """Checks the model and writes it as `<repository>/<name>/1/model.onnx`."""
    onnx.checker.check_model(model)
    path = repository / name / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def read_weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Returns every initializer of the model as a dense array, whatever form it is stored in."""
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for tensor in model.graph.sparse_initializer:
        values = numpy_helper.to_array(tensor.values)
        indices = numpy_helper.to_array(tensor.indices)
        full = np.zeros(tuple(tensor.dims), dtype=values.dtype)
        if indices.ndim == 1:
            full.reshape(-1)[indices] = values
        else:
            full[tuple(indices.T)] = values
        weights[tensor.values.name] = full
    return weights
