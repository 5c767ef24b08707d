#!/usr/bin/env python3
"""Weight updates of a model that serves on a GPU, measured on one machine: run from the bundle that deploy/bundle makes.

    tests/bench/gpu_updates.py --bin espalier/bin --out updates.json [--width 8192] [--commit ID]

A generated MLP (eight layers, bf16, 90 % of the blocks of 64 zero; 1 GiB of file at the default width) is served with
`deterministic: true` while `espalier bench` asks it. Two signed deltas, each of a tenth of its non-zeros, 1 % of the file's
elements, are pushed: the first makes the second copy of the weights, the second finds it. Then the last one is rolled back
and activated again. Answers of all versions are compared bit for bit with those of servers that loaded the versions' files.
What a commit can block is the flip (espalier_update_flip_seconds_total).
Needs numpy, onnx and nvidia-smi.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import tempfile
import time
import urllib.request

import numpy as np
import onnx
from gpu_serving import Server, bf16, run
from onnx import TensorProto, helper

MODEL, LAYERS, BLOCK, DENSITY, BATCH = "wide", 8, 64, 0.1, 16
CONFIG = 'max_batch_size: 64\nparameters { key: "deterministic" value { string_value: "true" } }\n'


class Weights:
    """The layers of the MLP, of which `step` changes a tenth of the non-zeros."""

    def __init__(self, width: int) -> None:
        self.random, self.width = np.random.default_rng(7), width
        side, scale = width // BLOCK, np.float32((2 / (width * DENSITY)) ** 0.5)
        self.layers = []
        for _ in range(LAYERS):
            mask = np.kron(self.random.random((side, side)) < DENSITY, np.ones((BLOCK, BLOCK), dtype=bool))
            self.layers.append(self.random.standard_normal((width, width), dtype=np.float32) * scale * mask)

    def step(self) -> None:
        for layer in self.layers:
            at = np.flatnonzero(layer)
            at = at[self.random.random(len(at), np.float32) < 0.1]
            layer.reshape(-1)[at] *= 1 + np.float32(0.05) * self.random.standard_normal(len(at), np.float32)

    def save(self, path: pathlib.Path) -> None:
        nodes = [helper.make_node("Cast", ["x"], ["h0"], to=TensorProto.BFLOAT16)]
        tensors = []
        for i, layer in enumerate(self.layers):
            tensors.append(helper.make_tensor(f"w{i}", TensorProto.BFLOAT16, layer.shape, bf16(layer), raw=True))
            nodes.append(helper.make_node("Gemm", [f"h{i}", f"w{i}"], [f"g{i}"], transB=1))
            nodes.append(helper.make_node("Relu", [f"g{i}"], [f"h{i + 1}"]))
        nodes.append(helper.make_node("Cast", [f"h{LAYERS}"], ["y"], to=TensorProto.FLOAT))
        value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", self.width])  # noqa: E731
        graph = helper.make_graph(nodes, MODEL, [value("x")], [value("y")], tensors)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        path.parent.mkdir(parents=True)
        path.write_bytes(model.SerializeToString())
        (path.parents[1] / "config.pbtxt").write_text(CONFIG)


def metrics(server: Server) -> dict[str, float]:
    """The update metrics of the model by their names, and the process's and GPU's memory."""
    values = {}
    for line in urllib.request.urlopen(server.metrics).read().decode().splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(("espalier_update", "process_resident", "espalier_gpu_memory")):
            values[name] = float(value)
    return values


def total(values: dict[str, float], name: str) -> float:
    return sum(value for key, value in values.items() if key.startswith(name))


def answer(binaries: pathlib.Path, server: Server, folder: pathlib.Path) -> bytes:
    output = folder / "y.npy"
    run(binaries, "infer", MODEL, "--url", server.url, "--input", f"x={folder / 'x.npy'}", "--output", f"y={output}")
    return np.load(output).tobytes()


def timed(binaries: pathlib.Path, server: Server, *arguments: object) -> dict[str, float]:
    """Runs a command of the CLI: seconds until it returned, and what the server says of it."""
    before, began = metrics(server), time.monotonic()
    run(binaries, "delta", *arguments)
    seconds, after = time.monotonic() - began, metrics(server)
    row = {"seconds": seconds}
    for part in ("stage", "commit", "flip"):
        name = f"espalier_update_{part}_seconds_total"
        row[f"{part}_seconds"] = total(after, name) - total(before, name)
    return row


def file_of(folder: pathlib.Path, version: int) -> pathlib.Path:
    return folder / f"repository{version}" / MODEL / str(version) / "model.onnx"


def create(options: argparse.Namespace, folder: pathlib.Path, version: int) -> dict:
    """Makes the delta to a version from the one before."""
    began, delta = time.monotonic(), folder / f"{version}.espd"
    run(options.bin, "delta", "create", file_of(folder, version - 1), file_of(folder, version), "-o", delta,
        "--key", folder / "trainer.key", "--model", MODEL, "--base_version", version - 1, "--version", version)  # fmt: skip
    return {"seconds": time.monotonic() - began, "delta_bytes": delta.stat().st_size}


def updated(options: argparse.Namespace, folder: pathlib.Path) -> dict:
    """A server of version 1, updated under load to the last one, and back and forth."""
    run(options.bin, "keygen", folder / "trainer")
    result: dict = {"create": [create(options, folder, version) for version in (2, 3)], "push": [], "there_and_back": []}
    server = Server(options.bin, folder / "repository1", "cuda", folder)
    server.command += [f"--state_dir={folder / 'state'}", "--update_address=127.0.0.1:0",
                       f"--update_keys={folder / 'trainer.pub'}"]  # fmt: skip
    with server:
        update_url = f"127.0.0.1:{json.loads(server.ready.read_text())['update_port']}"
        result["seconds_to_ready"], result["before"] = server.seconds_to_ready, metrics(server)
        answers = {1: answer(options.bin, server, folder)}
        bench = subprocess.Popen(
            [str(options.bin / "espalier"), "bench", MODEL, "--url", server.url, "--concurrency", "4", "--batch", str(BATCH),
             "--duration", str(options.seconds), "--warmup", "1", "--json", str(folder / "bench.json")])  # fmt: skip
        time.sleep(2)
        for version in (2, 3):
            result["push"].append(timed(options.bin, server, "push", folder / f"{version}.espd", "--to", update_url))
            answers[version] = answer(options.bin, server, folder)
        for _ in range(options.cycles):
            for version, arguments in ((2, ("rollback", MODEL)), (3, ("activate", MODEL, 3))):
                result["there_and_back"].append(timed(options.bin, server, *arguments, "--url", update_url))
                if answer(options.bin, server, folder) != answers[version]:
                    raise RuntimeError(f"back at version {version}, the answer is not what it was")
        result["bench_exit_code"] = bench.wait(options.seconds + 60)
        result["after"] = metrics(server)
    result["load"] = json.loads((folder / "bench.json").read_text())["levels"][0]
    result["load"].pop("histogram_us", None)
    result["different_answers"] = len(set(answers.values()))
    result["equals_file"] = {}
    for version, expected in answers.items():
        with Server(options.bin, folder / f"repository{version}", "cuda", folder) as fresh:
            result["equals_file"][version] = answer(options.bin, fresh, folder) == expected
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--width", type=int, default=8192, help="a multiple of 64")
    parser.add_argument("--seconds", type=int, default=20, help="how long the load lasts")
    parser.add_argument("--cycles", type=int, default=10, help="rollbacks, each followed by an activation")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    device = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                            capture_output=True, text=True).stdout.strip()  # fmt: skip
    result = {"device": device, "cpus": os.cpu_count(), "commit": options.commit, "width": options.width,
              "date": datetime.date.today().isoformat(), "command": "tests/bench/gpu_updates.py"}  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        weights = Weights(options.width)
        for version in (1, 2, 3):
            weights.save(file_of(folder, version))
            weights.step()
        result["file_bytes"] = file_of(folder, 1).stat().st_size
        np.save(folder / "x.npy", np.random.default_rng(1).standard_normal((BATCH, options.width), dtype=np.float32))
        result.update(updated(options, folder))
    options.out.write_text(json.dumps(result, indent=1))
    print(json.dumps({key: value for key, value in result.items() if key != "there_and_back"}, indent=1))


if __name__ == "__main__":
    main()
