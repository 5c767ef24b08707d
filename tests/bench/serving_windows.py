"""What the cases of serving_bench.py share: models, windows of `espalier bench`, and what is read from them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/integration"))

import harness  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
from onnx import numpy_helper  # noqa: E402


@dataclasses.dataclass
class Options:
    """How long and how often to look."""

    windows: int = 10
    seconds: float = 3
    warmup: float = 0.5
    soak_seconds: float = 600
    width: int = 4096
    layers: int = 4
    sparsity: tuple[float, ...] = (0.9, 0)
    peers: tuple[str, ...] = ()
    peer_envs: pathlib.Path = ROOT / "build/peers"


@dataclasses.dataclass
class Endpoint:
    """A model of a server that runs."""

    url: str
    model: str


# ---- models ----------------------------------------------------------------------------------------------------------


def block_sparse(rng: np.random.Generator, size: int, sparsity: float, block: int = 16) -> np.ndarray:
    """Returns [size, size] weights of unit gain whose zeros come in blocks."""
    grid = size // block
    keep = rng.random((grid, grid)) >= sparsity
    mask = np.kron(keep, np.ones((block, block), bool))
    scale = (size * (1 - sparsity)) ** -0.5
    return np.where(mask, rng.normal(scale=scale, size=(size, size)), 0).astype(np.float32)


def write_perceptron(path: pathlib.Path, width: int, layers: int, sparsity: float) -> None:
    """Writes x [N, width] -> y [N, width]: `layers` of Gemm, each with weights of its own, Relu between them."""
    rng = np.random.default_rng(4096)
    nodes, constants, source = [], [], "x"
    for layer in range(layers):
        result = "y" if layer == layers - 1 else f"g{layer}"
        constants.append(numpy_helper.from_array(block_sparse(rng, width, sparsity), f"w{layer}"))
        constants.append(numpy_helper.from_array(np.zeros(width, np.float32), f"b{layer}"))
        nodes.append(onnx.helper.make_node("Gemm", [source, f"w{layer}", f"b{layer}"], [result], f"gemm{layer}",
                                           transB=1))
        if layer < layers - 1:
            source = f"h{layer}"
            nodes.append(onnx.helper.make_node("Relu", [result], [source], f"relu{layer}"))
    tensor = lambda name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", width])  # noqa: E731
    graph = onnx.helper.make_graph(nodes, "wide", [tensor("x")], [tensor("y")], constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())


def add_model(repository: pathlib.Path, name: str, source: pathlib.Path, config: str = "") -> None:
    """Puts a model file into a repository under another name."""
    (repository / name / "1").mkdir(parents=True)
    shutil.copyfile(source, repository / name / "1/model.onnx")
    if config:
        (repository / name / "config.pbtxt").write_text(config)


def verify(endpoint: Endpoint, path: pathlib.Path, x: np.ndarray) -> None:
    """Ends the bench unless the endpoint's answers are right."""
    expected, tolerance = harness.evaluate(onnx.load(path), x)
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/x.npy", x)
        harness.espalier("infer", endpoint.model, f"--url={endpoint.url}", f"--input={folder}/x.npy",
                         f"--output={folder}/y.npy")
        got = np.load(f"{folder}/y.npy")
    worst = float(np.max(np.abs(got - expected) - tolerance))
    if worst > 0:
        sys.exit(f"{endpoint.model} at {endpoint.url} answers wrongly: {worst} beyond the tolerance")


# ---- measuring -------------------------------------------------------------------------------------------------------


def bench(endpoint: Endpoint, options: Options, *flags: str, seconds: float = 0, timeout: float = 0) -> dict:
    """One window of `espalier bench`; returns its level."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(harness.BIN / "espalier"), "bench", endpoint.model, f"--url={endpoint.url}",
                   f"--duration={seconds or options.seconds}", f"--warmup={options.warmup}",
                   f"--json={folder}/bench.json", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False,
                              timeout=timeout or 120 + 3 * options.seconds)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\nended with {done.returncode}: {done.stderr}")
        return json.loads(pathlib.Path(folder, "bench.json").read_text())["levels"][0]


def alternate(measure: dict[str, Callable[[], dict]], windows: int) -> dict[str, list[dict]]:
    """Measures all of them in turn, `windows` times; who begins changes, so that a drift hits all alike."""
    samples: dict[str, list[dict]] = {name: [] for name in measure}
    names = list(measure)
    for window in range(windows):
        for name in names[window % len(names):] + names[:window % len(names)]:
            samples[name].append(measure[name]())
    return samples


def median(levels: list[dict], *keys: str) -> float:
    def look(level: dict) -> float:
        for key in keys:
            level = level[key]
        return level

    return statistics.median(look(level) for level in levels)


def spread(levels: list[dict], *keys: str) -> list[float]:
    """The lowest and the highest window."""
    values = [median([level], *keys) for level in levels]
    return [min(values), max(values)]


def metric(server: harness.Espalierd, name: str, **labels: str) -> float:
    """The sum of the samples with these labels."""
    with urllib.request.urlopen(f"{server.metrics_url}/metrics", timeout=10) as response:
        text = response.read().decode()
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.M)
    return sum(float(value) for pairs, value in found if wanted <= set(pairs.split(",")))
