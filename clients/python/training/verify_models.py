#!/usr/bin/env python3
"""Checks the shipped MNIST models and prints the figures of tests/data/models/README.md.

For every `<models>/<name>/1/model.onnx`: onnx's checker accepts it, and its shape inference accepts
a copy with dense weights (it refuses a Gemm over a sparse initializer); no weight is -0.0 or
subnormal; every weight is stored dense or sparse, whichever takes fewer bytes in the index form
of its file; onnxruntime runs it on all 10,000 test images. Needs numpy, onnx and onnxruntime, not
torch.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

import export
import mnist_data


def occupied_diagonals(weight: np.ndarray, block: int) -> int:
    """Returns how many block-diagonals hold a non-zero; the index map is that of diagonal.py."""
    blocks = occupied_blocks(weight, block)
    rows, columns = blocks.shape
    row, col = np.nonzero(blocks)
    return len(np.unique((row - col) % rows if rows >= columns else (col - row) % columns))


def occupied_blocks(weight: np.ndarray, block: int) -> np.ndarray:
    """Returns bool [ceil(out / b), ceil(in / b)]: which blocks hold a non-zero."""
    edge = [(0, -size % block) for size in weight.shape]
    padded = np.pad(weight != 0, edge)
    rows, columns = padded.shape[0] // block, padded.shape[1] // block
    return padded.reshape(rows, block, columns, block).any(axis=(1, 3))


def structure(weight: np.ndarray) -> str:
    """Returns the counts that tell the layouts apart."""
    parts = []
    for block in (1, 16):
        blocks = occupied_blocks(weight, block)
        diagonals = occupied_diagonals(weight, block)
        parts.append(f"{diagonals}/{max(blocks.shape)} diagonals of {block}")
    blocks = occupied_blocks(weight, 16)
    parts.append(f"{np.count_nonzero(blocks)}/{blocks.size} blocks of 16")
    return ", ".join(parts)


def check_storage(model: onnx.ModelProto) -> list[str]:
    """Returns what is wrong with how the weights are stored; empty if nothing is."""
    faults = []
    tiny = np.finfo(np.float32).tiny
    for name, weight in export.read_weights(model).items():
        zero = weight == 0
        if np.signbit(weight[zero]).any():
            faults.append(f"{name} holds -0.0")
        if (np.abs(weight[~zero]) < tiny).any():
            faults.append(f"{name} holds subnormal values")
    in_pairs = any(len(tensor.indices.dims) == 2 for tensor in model.graph.sparse_initializer)
    index_form = "pairs" if in_pairs else "linear"
    for tensor in model.graph.initializer:
        weight = numpy_helper.to_array(tensor)
        if weight.ndim == 2:
            sparse = export.sparse_tensor(tensor.name, weight, index_form)
            if sparse.ByteSize() < tensor.ByteSize():
                faults.append(f"{tensor.name} is dense and would be smaller sparse")
    for tensor in model.graph.sparse_initializer:
        flat = numpy_helper.to_array(tensor.indices)
        if flat.ndim == 2:
            flat = flat[:, 0] * tensor.dims[1] + flat[:, 1]
        if (np.diff(flat) <= 0).any():
            faults.append(f"{tensor.values.name} has indices that do not ascend")
        if tensor.ByteSize() >= 4 * np.prod(tensor.dims):
            faults.append(f"{tensor.values.name} is sparse and would be smaller dense")
    return faults


def densified(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy of the model with every sparse initializer made dense."""
    weights = export.read_weights(model)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in model.graph.sparse_initializer:
        name = tensor.values.name
        copy.graph.initializer.append(numpy_helper.from_array(weights[name], name))
    copy.graph.ClearField("sparse_initializer")
    return copy


def verify(path: Path, images: np.ndarray, labels: np.ndarray) -> tuple[str, list[str]]:
    """Checks one file.

    Args:
      path: the model file.
      images: float32 [count, 784].
      labels: int64 [count].

    Returns:
      The lines about this model, and what is wrong with it.
    """
    model = onnx.load(path)
    onnx.checker.check_model(model)
    onnx.checker.check_model(densified(model), full_check=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"input": images})
    right = int(np.count_nonzero(logits.argmax(axis=1) == labels))
    weights = {n: w for n, w in export.read_weights(model).items() if w.ndim == 2}
    nonzero = sum(np.count_nonzero(w) for w in weights.values())
    total = sum(w.size for w in weights.values())
    stored = {
        tensor.values.name: f"sparse with indices {list(tensor.indices.dims)}"
        for tensor in model.graph.sparse_initializer
    }
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    lines = [
        f"{path.parts[-3]}: {right}/{len(labels)} right,"
        f" sparsity {100 * (1 - nonzero / total):.3f} % ({nonzero} of {total} left),"
        f" {path.stat().st_size} bytes, sha256 {digest}..."
    ]
    for name, weight in sorted(weights.items()):
        share = 1 - np.count_nonzero(weight) / weight.size
        lines.append(
            f"    {name} {list(weight.shape)} {np.count_nonzero(weight)} non-zeros,"
            f" sparsity {100 * share:.2f} %, {stored.get(name, 'dense')}, {structure(weight)}"
        )
    return "\n".join(lines), check_storage(model)


def main(arguments: list[str]) -> int:
    """Checks every model of a repository; returns 1 if anything is wrong."""
    data = Path(__file__).resolve().parents[3] / "tests" / "data"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=data / "models", help="model repository")
    parser.add_argument(
        "--test_data", type=Path, default=data / "mnist", help="folder with t10k-... idx files"
    )
    options = parser.parse_args(arguments)
    images, labels = mnist_data.read_mnist(options.test_data, "t10k")
    paths = sorted(options.models.glob("*/1/model.onnx"))
    failed = not paths
    for path in paths:
        text, faults = verify(path, images, labels)
        print(text)
        for fault in faults:
            print(f"    FAULT: {fault}")
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
