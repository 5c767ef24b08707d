#!/usr/bin/env python3
"""Serving bars: what batching gains and costs, two times more load than fits, and other servers as peers.

    .venv/bin/python tests/bench/serving_bench.py                          all of it, with the bars' own lengths
    .venv/bin/python tests/bench/serving_bench.py batching overload --seconds 1 --windows 3 --soak_seconds 20
    .venv/bin/python tests/bench/serving_bench.py peers --peers pytriton

Cases
  batching   requests/s at concurrency 64, merged into batches over one by one (max_batch_size 1)
  latency    p50 at concurrency 1 through the batcher over run at once by the thread that brings the request
  overload   twice the load that fits, for --soak_seconds: nothing lost or answered twice, pending below its cap,
             memory and the latency of a single request as before
  load       p99 at 30 % load while another model is loaded and unloaded, over p99 while none is
  peers      throughput and p99 against other servers of the same protocol

Everything is driven by `espalier bench`. What is compared runs in alternating windows, and medians are compared. Before
anything is timed each model's answers are checked against float64. A peer is one entry in PEERS; one that is not
installed is left out, and said so. To install one:
    python3 -m venv build/peers/pytriton
    build/peers/pytriton/bin/pip install -r tests/bench/peers/requirements-pytriton.txt
--out tests/bench/results/cpu/serving_bars.json records.
Needs the Python of tests/integration/requirements.txt (./tests/run makes .venv) and a release build (ESPALIER_BIN).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import numpy as np
import tritonclient.grpc as triton
from serving_windows import (ROOT, Endpoint, Options, add_model, alternate, bench, harness, median, metric, spread,
                             verify, write_perceptron)

PEER_FOLDER = ROOT / "tests/bench/peers"
DIGITS = "mnist_block16"  # the model of latency and overload
PEER_MODEL = "mnist_dense"  # what all can run at their best
MIB = 1 << 20


# ---- peers -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another server. Its script is called with NAME MODEL.onnx GRPC_PORT and serves until it is ended."""

    description: str
    script: str
    throughput_bar: float  # ours over theirs at concurrency 64
    p99_bar: float  # ours over theirs, at each concurrency


PEERS = {
    "pytriton": Peer("nvidia-pytriton: Triton with an onnxruntime Python model", "pytriton_server.py", 4, 0.5),
    "kserve": Peer("KServe's Python model server with onnxruntime", "kserve_server.py", 1, 1),
}


# ---- cases -----------------------------------------------------------------------------------------------------------


def batching(options: Options) -> list[dict]:
    """Concurrency 64: the batcher against one request after the other."""
    return [batching_gain(sparsity, options) for sparsity in options.sparsity]


# Of a dense model, where one item reads all weights for itself. A model with 90 % zeros reads a tenth of them and has
# less to gain: its layers take 0.12 ms for one item and 1.7 ms for 64 (`espalier plan` on 2 cores of an AMD EPYC with
# AVX-512, 2026-11-30), 4.5 times as many a second at the very most. Its gain is recorded without a bar.
BATCHING_BAR = 5


def batching_gain(sparsity: float, options: Options) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        repository, model = pathlib.Path(folder, "models"), pathlib.Path(folder, "wide.onnx")
        write_perceptron(model, options.width, options.layers, sparsity)
        add_model(repository, "merged", model)
        add_model(repository, "single", model, "max_batch_size: 1\n")
        with harness.Espalierd(repository) as server:
            endpoints = {name: Endpoint(server.url, name) for name in ("merged", "single")}
            x = np.random.default_rng(1).random((16, options.width), np.float32)
            verify(endpoints["merged"], model, x)
            verify(endpoints["single"], model, x[:1])
            samples = alternate({name: lambda endpoint=endpoint: bench(endpoint, options, "--concurrency=64")
                                 for name, endpoint in endpoints.items()}, options.windows)
    rps = {name: median(levels, "requests_per_second") for name, levels in samples.items()}
    bar = BATCHING_BAR if sparsity == 0 else 0
    return {
        "case": "batching gain", "concurrency": 64, "width": options.width, "layers": options.layers,
        "sparsity": sparsity, "windows": options.windows,
        "requests_per_second": rps["merged"], "single_requests_per_second": rps["single"],
        "mean_batch": median(samples["merged"], "server", "mean_batch"),
        "p99_us": median(samples["merged"], "latency_us", "p99"),
        "single_p99_us": median(samples["single"], "latency_us", "p99"),
        "spread": spread(samples["merged"], "requests_per_second"),
        "gain": rps["merged"] / rps["single"], "bar": bar, "ok": rps["merged"] >= bar * rps["single"],
    }


# Not run by the thread that brings a request, since a batch may have to wait; closed at once, since one item is
# preferred.
THROUGH_BATCHER = "dynamic_batching { preferred_batch_size: [ 1, 8 ] max_queue_delay_microseconds: 1000 }\n"


def latency(options: Options) -> list[dict]:
    """Concurrency 1: through the batcher against run at once."""
    with tempfile.TemporaryDirectory() as folder:
        repository, model = pathlib.Path(folder, "models"), harness.model_path(DIGITS)
        add_model(repository, "direct", model)
        add_model(repository, "batched", model, "max_batch_size: 64\n" + THROUGH_BATCHER)
        with harness.Espalierd(repository) as server:
            endpoints = {name: Endpoint(server.url, name) for name in ("direct", "batched")}
            for endpoint in endpoints.values():
                verify(endpoint, model, harness.read_digits().images[:8])
            samples = alternate({name: lambda endpoint=endpoint: bench(endpoint, options, "--concurrency=1")
                                 for name, endpoint in endpoints.items()}, options.windows)
    p50 = {name: median(levels, "latency_us", "p50") for name, levels in samples.items()}
    added = p50["batched"] - p50["direct"]
    return [{
        "case": "added latency of the batcher", "concurrency": 1, "model": DIGITS, "windows": options.windows,
        "us": p50["batched"], "direct_us": p50["direct"],
        "queue_us": median(samples["batched"], "server", "queue_us"),
        "direct_queue_us": median(samples["direct"], "server", "queue_us"),
        "spread": spread(samples["batched"], "latency_us", "p50"),
        "added_us": added, "bar_us": 20, "ok": added <= 20,
    }]


QUEUE_CAP = 64
# 5 ms and 8 items: some 1,500 requests a second fit, few enough that the client and not the machine decides the load.
OVERLOADED = f"""
max_batch_size: 8
parameters {{ key: "execute_delay_ms" value {{ string_value: "5" }} }}
dynamic_batching {{
  default_queue_policy {{ max_queue_size: {QUEUE_CAP} default_timeout_microseconds: 30000 }}
}}
"""


class Watch:
    """Looks at a server's gauges ten times a second."""

    def __init__(self, server: harness.Espalierd) -> None:
        self._server, self._done = server, threading.Event()
        self.max_pending, self.resident = 0.0, []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._done.wait(0.1):
            self.max_pending = max(self.max_pending, metric(self._server, "espalier_queue_pending", model=DIGITS))
            self.resident.append(metric(self._server, "process_resident_memory_bytes"))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()


def single_request_us(endpoint: Endpoint, options: Options) -> float:
    """What one request costs with nothing else going on."""
    return median([bench(endpoint, options, "--concurrency=1") for _ in range(3)], "latency_us", "p50")


def overload(options: Options) -> list[dict]:
    """Twice the load that fits, from a client that keeps a ledger."""
    with tempfile.TemporaryDirectory() as folder:
        repository = pathlib.Path(folder, "models")
        add_model(repository, DIGITS, harness.model_path(DIGITS), OVERLOADED)
        add_model(repository, "undelayed", harness.model_path(DIGITS))
        with harness.Espalierd(repository) as server:
            endpoint, undelayed = Endpoint(server.url, DIGITS), Endpoint(server.url, "undelayed")
            verify(endpoint, harness.model_path(DIGITS), harness.read_digits().images[:8])
            fits = bench(endpoint, options, "--concurrency=48")["requests_per_second"]
            offer = [f"--rate={2 * fits}", "--max_outstanding=100000"]
            bench(endpoint, options, *offer)  # memory and latency before are those of a server that has seen load
            before = single_request_us(undelayed, options)
            with Watch(server) as watch:
                level = bench(endpoint, options, *offer, seconds=options.soak_seconds,
                              timeout=options.soak_seconds + 120)
            after = single_request_us(undelayed, options)
            answered = metric(server, "espalier_requests_total", model=DIGITS)
            failed = metric(server, "espalier_request_failures_total", model=DIGITS)
    # The first tenth of the soak still fills caches and pools.
    resident = watch.resident[len(watch.resident) // 10:]
    tail = max(1, len(resident) // 10)
    growth = statistics.median(resident[-tail:]) - statistics.median(resident[:tail])
    refused = sum(error["count"] for error in level["errors"].values())
    ok = (level["ledger"]["balances"] and level["withheld"] == 0 and watch.max_pending <= QUEUE_CAP
          and growth <= 20 * MIB and after <= 1.1 * before and refused > 0 and set(level["errors"]) == {"UNAVAILABLE"})
    return [{
        "case": "overload", "model": DIGITS, "seconds": options.soak_seconds, "fits_per_second": fits,
        "offered_per_second": 2 * fits, "answered_per_second": level["requests_per_second"],
        "sent": level["ledger"]["sent"], "answered": level["ledger"]["answered"],
        "unanswered": level["ledger"]["unanswered"], "unasked": level["ledger"]["unasked"],
        "withheld": level["withheld"], "refused": refused, "errors": sorted(level["errors"]),
        "server_requests": answered, "server_failures": failed,
        "p99_us": level["latency_us"]["p99"], "refused_p50_us": level["failure_us"]["p50"],
        "refused_p99_us": level["failure_us"]["p99"],
        "max_pending": watch.max_pending, "pending_cap": QUEUE_CAP,
        "resident_growth_bytes": growth, "growth_bar_bytes": 20 * MIB,
        "single_us_before": before, "single_us_after": after, "ok": ok,
    }]


# Some 64 MiB of weights in the file, a tenth of them kept.
LOADED_WIDTH, LOADED_LAYERS, LOADED_SPARSITY = 2048, 4, 0.9


class Loading:
    """Loads and unloads a model again and again."""

    def __init__(self, server: harness.Espalierd, model: str) -> None:
        self._server, self._model, self._done = server, model, threading.Event()
        self.loads, self._error = 0, None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with triton.InferenceServerClient(self._server.url) as client:
                while not self._done.is_set():
                    client.load_model(self._model)
                    self.loads += 1
                    client.unload_model(self._model)
        except Exception as error:  # noqa: BLE001: of another thread; raised where the window ends
            self._error = error

    def __enter__(self) -> Loading:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


def load(options: Options) -> list[dict]:
    """30 % of what fits: what the loads of another model cost the requests of this one.

    Linux shares processors between sessions first (autogroup), and server and client are two of them here: what the
    server's background threads leave to others, it takes for the server. So set kernel.sched_autogroup_enabled to 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        repository, wide = pathlib.Path(folder, "models"), pathlib.Path(folder, "wide.onnx")
        write_perceptron(wide, LOADED_WIDTH, LOADED_LAYERS, LOADED_SPARSITY)
        add_model(repository, "wide", wide)
        add_model(repository, DIGITS, harness.model_path(DIGITS))
        with harness.Espalierd(repository, "--model_control_mode=explicit", f"--load_model={DIGITS}") as server:
            endpoint = Endpoint(server.url, DIGITS)
            verify(endpoint, harness.model_path(DIGITS), harness.read_digits().images[:8])
            rate = 0.3 * bench(endpoint, options, "--concurrency=64")["requests_per_second"]
            loads: list[int] = []

            def steady() -> dict:
                return bench(endpoint, options, f"--rate={rate:.1f}")

            def loading() -> dict:
                with Loading(server, "wide") as other:
                    level = steady()
                loads.append(other.loads)
                return level

            samples = alternate({"steady": steady, "loading": loading}, options.windows)
    p99 = {name: median(levels, "latency_us", "p99") for name, levels in samples.items()}
    errors = sum(level["failure_us"]["count"] for levels in samples.values() for level in levels)
    return [{
        "case": "p99 while another model loads", "model": DIGITS, "rate": rate, "windows": options.windows,
        "loaded_file_bytes": LOADED_LAYERS * LOADED_WIDTH * LOADED_WIDTH * 4, "loads": loads,
        "p50_us": median(samples["loading"], "latency_us", "p50"),
        "steady_p50_us": median(samples["steady"], "latency_us", "p50"),
        "p99_us": p99["loading"], "steady_p99_us": p99["steady"],
        "spread": spread(samples["loading"], "latency_us", "p99"),
        "steady_spread": spread(samples["steady"], "latency_us", "p99"),
        "p99_ratio": p99["loading"] / p99["steady"], "p99_bar": 1.2, "errors": errors,
        "ok": p99["loading"] <= 1.2 * p99["steady"] and errors == 0 and min(loads) > 0,
    }]


@contextlib.contextmanager
def peer_server(name: str, options: Options) -> Iterator[Endpoint]:
    """Runs a peer until it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python = options.peer_envs / name / "bin/python"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [python, PEER_FOLDER / PEERS[name].script, PEER_MODEL, harness.model_path(PEER_MODEL), str(port)],
            stdout=log, stderr=log, start_new_session=True)
        endpoint = Endpoint(f"127.0.0.1:{port}", PEER_MODEL)
        try:
            await_answer(endpoint, process, log)
            yield endpoint
        finally:
            os.killpg(process.pid, signal.SIGTERM)  # it has workers
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def await_answer(endpoint: Endpoint, process: subprocess.Popen, log) -> None:
    deadline = time.monotonic() + 120
    probe = [str(harness.BIN / "espalier"), "bench", endpoint.model, f"--url={endpoint.url}", "--duration=0.1",
             "--warmup=0"]
    while process.poll() is None and time.monotonic() < deadline:
        if subprocess.run(probe, capture_output=True, check=False, timeout=60).returncode == 0:
            return
        time.sleep(0.5)
    log.seek(0)
    sys.exit(f"{endpoint} does not answer:\n{log.read().decode(errors='replace')}")


def compare(name: str, ours: Endpoint, theirs: Endpoint, options: Options) -> list[dict]:
    """Closed loop at 1, 8 and 64, then open loop at 30 % of what the slower one of both can."""
    peer, rows, most = PEERS[name], [], {}
    loads = [("concurrency", 1), ("concurrency", 8), ("concurrency", 64), ("rate", None)]
    for kind, load in loads:
        if load is None:
            load = round(0.3 * min(most.values()), 1)
        samples = alternate({who: lambda endpoint=endpoint: bench(endpoint, options, f"--{kind}={load}")
                             for who, endpoint in (("ours", ours), ("theirs", theirs))}, options.windows)
        rps = {who: median(levels, "requests_per_second") for who, levels in samples.items()}
        p99 = {who: median(levels, "latency_us", "p99") for who, levels in samples.items()}
        if (kind, load) == ("concurrency", 64):
            most = rps
        bar = peer.throughput_bar if (kind, load) == ("concurrency", 64) else 0
        rows.append({
            "case": "peer", "peer": name, "model": PEER_MODEL, kind: load, "windows": options.windows,
            "requests_per_second": rps["ours"], "peer_requests_per_second": rps["theirs"],
            "p50_us": median(samples["ours"], "latency_us", "p50"),
            "peer_p50_us": median(samples["theirs"], "latency_us", "p50"),
            "p99_us": p99["ours"], "peer_p99_us": p99["theirs"],
            "gain": rps["ours"] / rps["theirs"], "gain_bar": bar,
            "p99_ratio": p99["ours"] / p99["theirs"], "p99_bar": peer.p99_bar,
            "errors": sum(level["failure_us"]["count"] for levels in samples.values() for level in levels),
            "ok": rps["ours"] >= bar * rps["theirs"] and p99["ours"] <= peer.p99_bar * p99["theirs"],
        })
    return rows


def peers(options: Options) -> list[dict]:
    """Every peer that is installed."""
    rows = []
    model, images = harness.model_path(PEER_MODEL), harness.read_digits().images[:8]
    for name in options.peers or PEERS:
        if not (options.peer_envs / name / "bin/python").exists():
            print(f"{name} is left out: no {options.peer_envs / name}/bin/python", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            add_model(pathlib.Path(folder, "models"), PEER_MODEL, model)
            with harness.Espalierd(pathlib.Path(folder, "models")) as server, peer_server(name, options) as theirs:
                ours = Endpoint(server.url, PEER_MODEL)
                for endpoint in (ours, theirs):
                    verify(endpoint, model, images)
                rows += compare(name, ours, theirs, options)
    return rows


CASES = {"batching": batching, "latency": latency, "overload": overload, "load": load, "peers": peers}


# ---- results ---------------------------------------------------------------------------------------------------------


def require_release() -> None:
    """Numbers of a build without optimisation are none."""
    cache = harness.BIN.parent / "CMakeCache.txt"
    kind = re.search(r"^CMAKE_BUILD_TYPE:\w+=(.*)$", cache.read_text(), re.M).group(1) if cache.exists() else "Release"
    if kind not in ("Release", "RelWithDebInfo") or harness.SANITIZED:
        sys.exit(f"{harness.BIN} is a {kind or 'plain'} build; the bars are for a release build")


def device() -> str:
    model = re.search(r"^model name\s*: (.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    return f"{model.group(1) if model else 'unknown CPU'}, {len(os.sched_getaffinity(0))} CPUs"


def write(path: pathlib.Path, rows: list[dict]) -> None:
    """In the one shape of result files."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True,
                            check=False).stdout.strip()
    head = {"device": device(), "commit": commit or "unknown", "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(["tests/bench/serving_bench.py", *sys.argv[1:]])}
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(json.dumps(head)[:-1] + f', "rows": [\n{lines}\n]}}\n')


def parse(arguments: list[str]) -> tuple[list[str], pathlib.Path | None, Options]:
    defaults = Options()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="default: all")
    parser.add_argument("--windows", type=int, default=defaults.windows)
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="of a window")
    parser.add_argument("--warmup", type=float, default=defaults.warmup, help="before each window")
    parser.add_argument("--soak_seconds", type=float, default=defaults.soak_seconds, help="of the overload")
    parser.add_argument("--width", type=int, default=defaults.width)
    parser.add_argument("--layers", type=int, default=defaults.layers)
    parser.add_argument("--sparsity", type=float, nargs="*", default=defaults.sparsity, help="0: a dense model")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=(), help="default: those that are installed")
    parser.add_argument("--peer_envs", type=pathlib.Path, default=defaults.peer_envs,
                        help="folder with a Python environment for each peer, under its name")
    parser.add_argument("--out", type=pathlib.Path, help="result file; default: print only")
    values = vars(parser.parse_args(arguments))
    cases, out = values.pop("cases") or list(CASES), values.pop("out")
    return cases, out, Options(**values)


def main() -> int:
    cases, out, options = parse(sys.argv[1:])
    require_release()
    rows = []
    for case in cases:
        for row in CASES[case](options):
            print(json.dumps(row), flush=True)
            rows.append(row)
    if out:
        write(out, rows)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
