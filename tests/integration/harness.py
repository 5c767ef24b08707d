"""Starts the server as a process and talks about models, images and tolerances."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import pathlib
import random
import signal
import socket
import struct
import subprocess
import tempfile
import time

import numpy as np
import onnx
from onnx import numpy_helper

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("ESPALIER_BIN", ROOT / "build/release/bin"))
DATA = ROOT / "tests/data"
MODELS = DATA / "models"
SHIPPED = (
    "mnist_dense",
    "mnist_diagonal",
    "mnist_diagonal16",
    "mnist_block16",
    "mnist_unstructured",
)
# A sanitizer build is several times slower; bounds on time do not apply to it.
SANITIZED = any(part.endswith(("asan", "tsan")) for part in BIN.parts)


class Espalierd:
    """A server process on free ports; its log goes to a file.

    Use as a context manager: entering waits until all models are loaded, leaving stops it.
    """

    def __init__(
        self,
        repository: pathlib.Path,
        *flags: str,
        state_dir: pathlib.Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="espalierd-")
        folder = pathlib.Path(self._folder.name)
        self.ready_file = folder / "ready.json"
        self.log_file = folder / "log"
        defaults = [
            f"--model_repository={repository}",
            "--address=127.0.0.1:0",
            "--metrics_address=127.0.0.1:0",
            f"--ready_file={self.ready_file}",
            *([f"--state_dir={state_dir}"] if state_dir else []),
        ]
        given = {flag.partition("=")[0] for flag in flags}
        self.command = [
            str(BIN / "espalierd"),
            *(flag for flag in defaults if flag.partition("=")[0] not in given),
            *flags,
        ]
        self.environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen | None = None
        self.url = self.metrics_url = self.update_url = ""
        self.seconds_to_ready = 0.0

    def __enter__(self) -> Espalierd:
        started = time.monotonic()
        self.spawn()
        while not self.ready_file.exists():
            if self.process.poll() is not None:
                raise RuntimeError(f"espalierd ended with {self.process.returncode}:\n{self.log()}")
            if time.monotonic() - started > 120:
                self.process.kill()
                raise RuntimeError(f"espalierd was not ready after 120 s:\n{self.log()}")
            time.sleep(0.005)
        self.seconds_to_ready = time.monotonic() - started - self._waited_seconds()
        ports = json.loads(self.ready_file.read_text())
        self.url = f"127.0.0.1:{ports['grpc_port']}"
        self.metrics_url = f"http://127.0.0.1:{ports['metrics_port']}"
        self.update_url = f"127.0.0.1:{ports.get('update_port', 0)}"  # port 0: none
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        log = self.log()
        self._folder.cleanup()
        assert "Sanitizer" not in log, log

    def _waited_seconds(self) -> float:
        """How long a thread of it has waited for a processor that others had, the one that waited most."""
        tasks = pathlib.Path(f"/proc/{self.process.pid}/task").iterdir()
        try:
            return max(int((task / "schedstat").read_text().split()[1]) for task in tasks) * 1e-9
        except OSError:  # a thread that has just ended, or a kernel that does not count
            return 0.0

    def spawn(self) -> subprocess.Popen:
        """Starts the process without waiting for it."""
        self.process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=self.log_file.open("wb"),
            start_new_session=True,
        )
        return self.process

    def log(self) -> str:
        """What the server has written so far."""
        return self.log_file.read_text(errors="replace")


def free_ports(count: int) -> list[int]:
    """Of those that Linux does not give to whoever asks for any: a server that is down keeps its own."""
    with contextlib.ExitStack() as stack:
        probes = []
        for port in random.sample(range(20000, 32000), 100):
            with contextlib.suppress(OSError):
                probes.append(stack.enter_context(socket.create_server(("127.0.0.1", port))))
            if len(probes) == count:
                break
        return [probe.getsockname()[1] for probe in probes]


def espalier(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    """Runs the command line tool."""
    done = subprocess.run(
        [str(BIN / "espalier"), *arguments], capture_output=True, text=True, cwd=ROOT, timeout=280
    )
    assert not check or done.returncode == 0, f"exit code {done.returncode}:\n{done.stderr}"
    assert "Sanitizer" not in done.stderr, done.stderr
    return done


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Returns the array of an IDX file of unsigned bytes, gzipped."""
    content = gzip.decompress(path.read_bytes())
    rank = content[3]
    assert content[:3] == b"\0\0\x08"
    shape = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Digits:
    """The shipped test set, as models take it: float32 [10000, 784], byte / 255, and labels."""

    images: np.ndarray
    labels: np.ndarray


def read_digits() -> Digits:
    """Returns the shipped test set."""
    images = read_idx(DATA / "mnist/t10k-images-idx3-ubyte.gz")
    labels = read_idx(DATA / "mnist/t10k-labels-idx1-ubyte.gz")
    return Digits(images.reshape(len(images), -1).astype(np.float32) / np.float32(255), labels)


def model_path(name: str) -> pathlib.Path:
    """Returns the file of a shipped model."""
    return MODELS / name / "1" / "model.onnx"


def perceptron(sizes: list[int], weight_of=None, edit=None) -> bytes:
    """Returns an ONNX file x [N, sizes[0]] -> y [N, sizes[-1]] of Gemm layers.

    Args:
      sizes: of the layers' inputs, and of the last one's output.
      weight_of: makes the weight [out, in] that all layers of a size share; all ones by default.
      edit: changes the model before it is serialized.
    """
    nodes, constants = [], {}
    for layer, (size, out) in enumerate(zip(sizes, sizes[1:]), start=1):
        name = f"w{size}x{out}"
        if name not in constants:
            weight = weight_of(out, size) if weight_of else np.ones((out, size))
            constants[name] = numpy_helper.from_array(weight.astype(np.float32), name)
        result = "y" if layer == len(sizes) - 1 else f"h{layer}"
        source = "x" if layer == 1 else f"h{layer - 1}"
        nodes.append(
            onnx.helper.make_node("Gemm", [source, name], [result], f"gemm_{layer}", transB=1)
        )
    float_type = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes,
        "perceptron",
        [onnx.helper.make_tensor_value_info("x", float_type, ["N", sizes[0]])],
        [onnx.helper.make_tensor_value_info("y", float_type, ["N", sizes[-1]])],
        list(constants.values()),
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )
    if edit:
        edit(model)
    return model.SerializeToString()


def slow_model() -> bytes:
    """Returns a model x [N, 1024] that takes some 0.2 to 1 s for 256 items (64 GFLOP)."""
    rng = np.random.default_rng(11)
    return perceptron(
        [1024] * 121, lambda out, size: rng.normal(scale=size**-0.5, size=(out, size))
    )


SLOW_INPUT = np.ones((256, 1024), np.float32)


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Returns all constants of a model, sparse ones expanded."""
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for sparse in model.graph.sparse_initializer:
        dense = np.zeros(int(np.prod(sparse.dims)), numpy_helper.to_array(sparse.values).dtype)
        indices = numpy_helper.to_array(sparse.indices)
        if indices.ndim == 2:
            indices = np.ravel_multi_index(tuple(indices.T), tuple(sparse.dims))
        dense[indices] = numpy_helper.to_array(sparse.values)
        arrays[sparse.values.name] = dense.reshape(tuple(sparse.dims))
    return arrays


def evaluate(
    model: onnx.ModelProto, x: np.ndarray, weight_dtype: type = np.float64
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluates a perceptron in float64; returns its outputs and the tolerance for each.

    The tolerance is how far two float32 evaluations, the server's and a reference's, may differ.
    A sum of n products in float32 is off by a random walk of roundings: its standard deviation is
    at most sqrt(n) u sum |w| |x|, u = 2^-24, in any order, with or without fused multiply-add, and
    it stays within lambda of them with probability 1 - 2 exp(-lambda^2 / 2) (Higham and Mary, A New
    Approach to Probabilistic Rounding Error Analysis, 2019). n counts the non-zeros of a row and
    the bias, since adding an exact zero is exact. Errors of a layer's input add in quadrature
    through the weights, Relu does not enlarge them, two evaluations double the variance, and
    lambda = 6 leaves 3e-8.

    Args:
      weight_dtype: rounds the weights to this type first.
    """
    arrays = weights(model)
    value = x.astype(np.float64)
    variance = np.zeros_like(value)
    for node in model.graph.node:
        if node.op_type == "Relu":
            value = np.maximum(value, 0)
            continue
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert node.op_type == "Gemm" and set(attributes) <= {"transB", "alpha", "beta"}, node
        assert attributes.get("alpha", 1) == 1 and attributes.get("beta", 1) == 1
        weight = arrays[node.input[1]].astype(weight_dtype).astype(np.float64)
        weight = weight if attributes.get("transB") else weight.T
        bias = arrays[node.input[2]].astype(np.float64)
        terms = np.count_nonzero(weight, axis=1) + 1
        magnitude = np.abs(value) @ np.abs(weight).T + np.abs(bias)
        variance = variance @ (weight**2).T + terms * (2.0**-24 * magnitude) ** 2
        value = value @ weight.T + bias
    return value, 6 * np.sqrt(2 * variance)
