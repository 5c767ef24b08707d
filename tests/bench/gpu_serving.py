#!/usr/bin/env python3
"""Serving on a GPU, measured over gRPC on one machine: run from the bundle that deploy/bundle makes.

    tests/bench/gpu_serving.py --bin espalier/bin --out serving.json [--commit ID]

Starts espalierd with the MNIST models and a generated MLP (eight layers of 4096, bf16, 90 % of the blocks of 64 zero) on
the CPU and on the GPU, checks that answers and accuracies agree, then measures on the GPU: the latency of one client over
a bare gRPC echo of the same machine (echo_bench, in the bundle too), and throughput and the GPU's own account of how busy
it is at saturation, with tensors in the messages and with tensors in shared memory. Needs numpy, onnx and nvidia-smi.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request

import numpy as np
import onnx
from onnx import TensorProto, helper

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/data"
WIDTH, LAYERS, BLOCK, DENSITY, MAX_BATCH = 4096, 8, 64, 0.1, 256
INSTANCES = 10  # each copies what a batch brings and takes through host memory, which takes longer than the GPU
FEW_CPUS = ("taskset", "-c", "0-3")  # what is compared with an echo runs on the same few CPUs
SHIPPED = ("mnist_dense", "mnist_diagonal", "mnist_diagonal16", "mnist_block16", "mnist_unstructured")


def bf16(values: np.ndarray) -> bytes:
    """Float32 rounded to bf16, as raw bytes."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    return (np.frombuffer(bf16(values), np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(values.shape)


def make_wide(path: pathlib.Path, x: np.ndarray) -> np.ndarray:
    """x [batch, WIDTH] f32, through Gemm + Relu layers of bf16 block-pruned weights, to y f32.

    Returns the answer to `x`, summed in f32 and rounded to bf16 after every layer.
    """
    random = np.random.default_rng(7)
    nodes = [helper.make_node("Cast", ["x"], ["h0"], to=TensorProto.BFLOAT16)]
    weights = []
    side = WIDTH // BLOCK
    y = round_to_bf16(x)
    for i in range(LAYERS):
        mask = np.kron(random.random((side, side)) < DENSITY, np.ones((BLOCK, BLOCK), dtype=bool))
        # Relu halves the variance that a layer passes on; this keeps it the same.
        scale = np.sqrt(2 / (WIDTH * DENSITY))
        weight = random.standard_normal((WIDTH, WIDTH), dtype=np.float32) * scale * mask
        y = round_to_bf16(np.maximum(y @ round_to_bf16(weight).T, 0))
        weights.append(helper.make_tensor(f"w{i}", TensorProto.BFLOAT16, (WIDTH, WIDTH), bf16(weight), raw=True))
        nodes.append(helper.make_node("Gemm", [f"h{i}", f"w{i}"], [f"g{i}"], transB=1))
        nodes.append(helper.make_node("Relu", [f"g{i}"], [f"h{i + 1}"]))
    nodes.append(helper.make_node("Cast", [f"h{LAYERS}"], ["y"], to=TensorProto.FLOAT))
    value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH])
    graph = helper.make_graph(nodes, "wide", [value("x")], [value("y")], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True)
    path.write_bytes(model.SerializeToString())
    (path.parents[1] / "config.pbtxt").write_text(
        f"max_batch_size: {MAX_BATCH}\ndynamic_batching {{ }}\ninstance_group {{ count: {INSTANCES} }}\n"
    )
    return y


def make_ops(path: pathlib.Path) -> None:
    """u [batch, 16, 40] of bytes through every op that has a kernel of its own on a GPU, and a residual, to z f32."""
    random = np.random.default_rng(3)
    constant = lambda name, *shape: helper.make_tensor(
        name, TensorProto.FLOAT, shape, random.standard_normal(shape, dtype=np.float32))  # fmt: skip
    nodes = [
        helper.make_node("Cast", ["u"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("LayerNormalization", ["f", "scale", "shift"], ["n"]),
        helper.make_node("Transpose", ["n"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["t", "w"], ["m"]),
        helper.make_node("Sigmoid", ["m"], ["s"]),
        helper.make_node("Mul", ["m", "s"], ["p"]),
        helper.make_node("Sub", ["p", "row"], ["q"]),
        helper.make_node("MatMul", ["q", "v"], ["r"]),
        helper.make_node("Add", ["q", "r"], ["residual"]),
        helper.make_node("Softmax", ["residual"], ["columns"], axis=1),
        helper.make_node("Add", ["columns", "m"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["h"]),
        helper.make_node("Softmax", ["h"], ["z"], axis=-1),
    ]
    weights = [constant("scale", 40), constant("shift", 40), constant("w", 16, 27), constant("row", 27),
               constant("v", 27, 27)]
    graph = helper.make_graph(
        nodes, "ops", [helper.make_tensor_value_info("u", TensorProto.UINT8, ["batch", 16, 40])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 40, 27])], weights)  # fmt: skip
    path.parent.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())


class Server:
    """espalierd on one device, until it is left."""

    def __init__(self, binaries: pathlib.Path, repositories: str, device: str, folder: pathlib.Path) -> None:
        self.ready, self.log = folder / f"ready_{device}.json", folder / f"{device}.log"
        self.command = [
            binaries / "espalierd", f"--model_repository={repositories}", f"--device={device}",
            "--address=127.0.0.1:0", "--metrics_address=127.0.0.1:0", f"--ready_file={self.ready}",
            "--allow_system_shared_memory",
        ]  # fmt: skip

    def __enter__(self) -> Server:
        self.ready.unlink(missing_ok=True)  # of a server before
        started = time.monotonic()
        self.process = subprocess.Popen([str(part) for part in self.command], stderr=self.log.open("wb"))
        while not self.ready.exists():
            if self.process.poll() is not None or time.monotonic() - started > 120:
                raise RuntimeError(f"exit code {self.process.poll()}\n{self.log.read_text()}")
            time.sleep(0.01)
        self.seconds_to_ready = time.monotonic() - started
        ports = json.loads(self.ready.read_text())
        self.url = f"127.0.0.1:{ports['grpc_port']}"
        self.metrics = f"http://127.0.0.1:{ports['metrics_port']}/metrics"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        print(f"--- {self.log.name}\n{self.log.read_text()[-6000:]}")


class GpuLoad:
    """nvidia-smi's utilisation and power while it is entered."""

    def __enter__(self) -> GpuLoad:
        self.samples: list[tuple[float, float]] = []
        self.process = subprocess.Popen(
            ["nvidia-smi", "--query-gpu=utilization.gpu,power.draw", "--format=csv,noheader,nounits", "-lms", "100"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        for line in self.process.stdout:
            busy, watts = line.split(",")
            self.samples.append((float(busy), float(watts)))

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def median(self) -> dict[str, float]:
        samples = np.array(self.samples[len(self.samples) // 3 :] or [(0, 0)])
        return {"gpu_busy_percent": float(np.median(samples[:, 0])), "watts": float(np.median(samples[:, 1]))}


def run(binaries: pathlib.Path, *arguments: object) -> str:
    done = subprocess.run(
        [str(binaries / "espalier"), *map(str, arguments)], capture_output=True, text=True, timeout=200
    )
    if done.returncode != 0:
        raise RuntimeError(f"espalier {arguments}: {done.stderr}")
    return done.stdout


def compare(binaries: pathlib.Path, server: Server, folder: pathlib.Path, device: str) -> dict:
    """Accuracy of the MNIST models, and the wide model's answer to a fixed input."""
    output = folder / f"{device}.npy"
    run(binaries, "infer", "wide", "--url", server.url, "--input", f"x={folder / 'x.npy'}", "--output", f"y={output}")
    ops = folder / f"ops_{device}.npy"
    run(binaries, "infer", "ops", "--url", server.url, "--input", f"u={folder / 'u.npy'}", "--output", f"z={ops}")
    evaluated = json.loads(
        run(binaries, "evaluate", *SHIPPED, "--url", server.url, "--batch", 100, "--json",
            "--images", DATA / "mnist/t10k-images-idx3-ubyte.gz", "--labels", DATA / "mnist/t10k-labels-idx1-ubyte.gz")
    )  # fmt: skip
    return {"y": np.load(output), "ops": np.load(ops), "evaluated": evaluated}


def load(binaries: pathlib.Path, server: Server, folder: pathlib.Path, model: str, concurrency: int, batch: int,
         shared: bool) -> dict:  # fmt: skip
    path = folder / "bench.json"
    with GpuLoad() as gpu:
        run(binaries, "bench", model, "--url", server.url, "--concurrency", concurrency, "--batch", batch,
            "--duration", 4, "--warmup", 1, "--threads", min(8, concurrency), "--channels", min(16, concurrency), "--json", path,
            *(("--shared_memory", "system") if shared else ()))  # fmt: skip
    row = {"model": model, "concurrency": concurrency, "batch": batch, "shared_memory": shared, **gpu.median()}
    level = json.loads(path.read_text())["levels"][0]
    del level["histogram_us"]
    row.update(level)
    return row


def serve(options, device: str, repositories: str, folder: pathlib.Path, result: dict, answers: dict) -> None:
    """One server: its answers, and on the GPU its speed."""
    with Server(options.bin, repositories, device, folder) as server:
        result[f"{device}_seconds_to_ready"] = server.seconds_to_ready
        answers[device] = compare(options.bin, server, folder, device)
        if device == "cpu" or options.answers_only:
            print(run(options.bin, "models", "--url", server.url))
            return
        print(run(options.bin, "models", "--url", server.url))
        (options.out.parent / "metrics.txt").write_bytes(urllib.request.urlopen(server.metrics).read())
        for model, concurrency, batch in (
            ("wide", 1, 1), ("wide", 16, 256), ("wide", 32, 256), ("mnist_diagonal16", 1, 1), ("mnist_diagonal16", 64, 256),
            ("mnist_diagonal16", 160, 256), ("mnist_dense", 160, 256),
        ):  # fmt: skip
            for shared in (False, True):
                result["rows"].append(load(options.bin, server, folder, model, concurrency, batch, shared))
            options.out.write_text(json.dumps(result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--answers_only", action="store_true", help="check, do not measure")
    options = parser.parse_args()
    name = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                          capture_output=True, text=True).stdout.strip()  # fmt: skip
    result: dict = {"device": name, "cpus": os.cpu_count(), "commit": options.commit,
                    "date": datetime.date.today().isoformat(),
                    "command": "tests/bench/gpu_serving.py", "rows": []}  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        x = np.random.default_rng(1).standard_normal((33, WIDTH), dtype=np.float32)
        np.save(folder / "x.npy", x)
        np.save(folder / "u.npy", np.random.default_rng(2).integers(0, 256, (33, 16, 40), dtype=np.uint8))
        make_ops(folder / "models/ops/1/model.onnx")
        expected = make_wide(folder / "models/wide/1/model.onnx", x)
        for name in SHIPPED:
            shutil.copytree(DATA / "models" / name, folder / "models" / name)
            with (folder / "models" / name / "config.pbtxt").open("a") as config:
                config.write(f"instance_group {{ count: {INSTANCES} }}\n")
        repositories = folder / "models"
        answers = {}
        for device in ("cpu", "cuda"):
            try:
                serve(options, device, repositories, folder, result, answers)
            except RuntimeError as error:
                result[f"{device}_error"] = str(error)[-500:]
        for device, answer in answers.items():
            difference = answer["y"] - expected
            result[f"{device}_wide_rms_difference"] = float(np.sqrt(np.mean(difference**2) / np.mean(expected**2)))
        if len(answers) == 2:
            difference = np.abs(answers["cuda"]["ops"] / answers["cpu"]["ops"] - 1)
            result["ops_largest_relative_difference"] = float(difference.max())
        result["evaluated"] = {device: answers[device]["evaluated"] for device in answers}
        options.out.write_text(json.dumps(result, indent=1))
        if options.answers_only:
            print(json.dumps(result, indent=1))
            return
        echo = folder / "echo.json"
        subprocess.run([*FEW_CPUS, str(options.bin / "echo_bench"), "--server", str(options.bin / "espalierd"), "--models",
                        str(DATA / "models"), "--rounds", "9", "--requests", "300", "--out", str(echo)],
                       timeout=120, check=False)  # fmt: skip
        if echo.exists():
            result["echo"] = json.loads(echo.read_text())["rows"]
    options.out.write_text(json.dumps(result, indent=1))
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1)[:6000])


if __name__ == "__main__":
    main()
