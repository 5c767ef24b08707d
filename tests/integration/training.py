"""Trains a shipped perceptron further, keeping its mask, as a trainer does between its pushes."""

from __future__ import annotations

import pathlib

import harness
import numpy as np
import onnx
from onnx import numpy_helper

BATCH = 128


class Mlp:
    """A shipped perceptron with its mask, trained on with Adam in fp32."""

    def __init__(self, name: str, rate: float, seed: int = 1):
        self.model = onnx.load(harness.model_path(name))
        self.parameters = {k: v.copy() for k, v in harness.weights(self.model).items()}
        self.masks = {k: (v != 0).astype(np.float32) for k, v in self.parameters.items()}
        for name_of in self.masks:
            if name_of.endswith("bias"):
                self.masks[name_of][...] = 1
        self.rate, self.step_count = np.float32(rate), 0
        self.moments = {k: (np.zeros_like(v), np.zeros_like(v)) for k, v in self.parameters.items()}
        self.random = np.random.default_rng(seed)
        digits = harness.read_digits()
        self.images, self.labels = digits.images, digits.labels

    def gradients(self) -> dict[str, np.ndarray]:
        """Returns the gradient of the cross entropy of one batch, dense, whatever the mask."""
        p = self.parameters
        chosen = self.random.integers(0, len(self.images), BATCH)
        x, label = self.images[chosen], self.labels[chosen]
        h1 = np.maximum(x @ p["fc1.weight"].T + p["fc1.bias"], 0)
        h2 = np.maximum(h1 @ p["fc2.weight"].T + p["fc2.bias"], 0)
        z = h2 @ p["fc3.weight"].T + p["fc3.bias"]
        e = np.exp(z - z.max(1, keepdims=True))
        d3 = e / e.sum(1, keepdims=True)
        d3[np.arange(BATCH), label] -= 1
        d3 /= BATCH
        d2 = (d3 @ p["fc3.weight"]) * (h2 > 0)
        d1 = (d2 @ p["fc2.weight"]) * (h1 > 0)
        return {
            "fc1.weight": d1.T @ x,
            "fc1.bias": d1.sum(0),
            "fc2.weight": d2.T @ h1,
            "fc2.bias": d2.sum(0),
            "fc3.weight": d3.T @ h2,
            "fc3.bias": d3.sum(0),
        }

    def train(self, steps: int) -> None:
        """Adam, beta 0.9 and 0.999, on the weights of the mask."""
        for _ in range(steps):
            self.step_count += 1
            for name, gradient in self.gradients().items():
                gradient = (gradient * self.masks[name]).astype(np.float32)
                first, second = self.moments[name]
                first += np.float32(0.1) * (gradient - first)
                second += np.float32(0.001) * (gradient * gradient - second)
                scale = self.rate / np.float32(1 - 0.9**self.step_count)
                root = np.sqrt(second / np.float32(1 - 0.999**self.step_count)) + np.float32(1e-8)
                self.parameters[name] -= scale * first / root * self.masks[name]

    def regrow(self, share: float = 0.01) -> None:
        """Drops the smallest non-zeros of each matrix and grows as many zeros, by one step."""
        gradients = self.gradients()
        for name, mask in self.masks.items():
            if not name.endswith("weight"):
                continue
            weight = self.parameters[name]
            on, off = np.flatnonzero(mask), np.flatnonzero(mask.reshape(-1) == 0)
            count = int(share * len(on))
            if count == 0 or count > len(off):
                continue
            dropped = on[np.argsort(np.abs(weight.reshape(-1)[on]))[:count]]
            grown = off[np.argsort(-np.abs(gradients[name].reshape(-1)[off]))[:count]]
            flat = weight.reshape(-1)
            flat[dropped] = 0
            flat[grown] = -self.rate * np.sign(gradients[name].reshape(-1)[grown])
            mask.reshape(-1)[dropped] = 0
            mask.reshape(-1)[grown] = 1

    def save_onnx(self, path: pathlib.Path) -> pathlib.Path:
        """Writes the model as it was shipped, mask included, with the weights as they are now."""
        model = onnx.ModelProto.FromString(self.model.SerializeToString())
        for tensor in model.graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(self.parameters[tensor.name], tensor.name))
        for sparse in model.graph.sparse_initializer:
            name = sparse.values.name
            indices = numpy_helper.to_array(sparse.indices)
            at = tuple(indices.T)
            if indices.ndim == 1:
                at = np.unravel_index(indices, tuple(sparse.dims))
            sparse.values.CopyFrom(numpy_helper.from_array(self.parameters[name][at], name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(model.SerializeToString())
        return path
