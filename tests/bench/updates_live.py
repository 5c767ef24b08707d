#!/usr/bin/env python3
"""Weight updates of a server that is busy: what requests notice of them, what they cost, and the way back.

    .venv/bin/python tests/bench/updates_live.py --bars                    all of it, with the bars' own lengths
    .venv/bin/python tests/bench/updates_live.py requests --updates 50 --requests 20000
    .venv/bin/python tests/bench/updates_live.py commit --mebibytes 64

Cases
  requests   signed updates, one after another, while `updates_load` asks: nothing failed or dropped, and every distinct
             answer is, bit for bit, that of the version it names, applied offline with `espalier delta apply`
  commit     a sparse model with 1 % of its file's elements changed (a tenth of its non-zeros): from the first byte sent
             until it serves, what a commit can block, memory meanwhile, and rolling back and forth
  latency    p99 at 30 % load in windows with updates over windows without, in turn

Models. requests, latency: mnist_unstructured, trained on with Adam, a step for each update. commit: four layers of scattered
weights, 90 % zeros, in a file of --mebibytes. All serve with deterministic: true.
What a commit can block is the flip: from the durable decision until every new request gets the new version
(espalier_update_flip_seconds_total, read around each).
--out tests/bench/results/updates/live.json records, each case for itself.
Needs the Python of tests/integration/requirements.txt (./tests/run makes .venv) and a release build with updates_load
(ESPALIER_BIN).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import itertools
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/integration"))

import espalier  # noqa: E402
import harness  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import serving_bench  # noqa: E402
import training  # noqa: E402
import updating  # noqa: E402
from espalier import updates  # noqa: E402
from onnx import numpy_helper  # noqa: E402

MODEL, WIDE = "mnist_unstructured", "wide"
DETERMINISTIC = 'parameters { key: "deterministic" value { string_value: "true" } }\n'
FLIP = "espalier_update_flip_seconds_total"
QUESTIONS = 16  # of 1 to 4 images, see updates_load.cc
MIB = 1 << 20


@dataclasses.dataclass
class Options:
    """How long and how often to look; by default the bars' own lengths."""

    updates: int = 1000
    requests: int = 1_000_000
    threads: int = 8
    mebibytes: int = 1024
    cycles: int = 100
    windows: int = 10
    seconds: float = 2
    updates_per_second: float = 5


@dataclasses.dataclass
class Steps:
    """A model in many versions: files by version, and the signed delta that leads to each."""

    key: pathlib.Path
    files: dict[int, pathlib.Path]
    deltas: dict[int, pathlib.Path]


# ---- models ----------------------------------------------------------------------------------------------------------


def create_deltas(folder: pathlib.Path, model: str, key: pathlib.Path, files: dict[int, pathlib.Path]) -> Steps:
    """Makes the delta from each version to the next."""
    def create(version: int) -> pathlib.Path:
        return updates.create(files[version - 1], files[version], folder / f"{version}.espd", key=key, model=model,
                              base_version=version - 1, version=version)

    later = sorted(files)[1:]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return Steps(key, files, dict(zip(later, pool.map(create, later))))


def trained_steps(folder: pathlib.Path, count: int) -> Steps:
    """Makes `count` versions after the shipped one, a step of training each."""
    mlp = training.Mlp(MODEL, rate=1e-4)
    files = {1: harness.model_path(MODEL)}
    for version in range(2, 2 + count):
        mlp.train(1)
        files[version] = mlp.save_onnx(folder / f"{version}.onnx")
    return create_deltas(folder, MODEL, updating.keygen(folder / "trainer"), files)


def wide_steps(folder: pathlib.Path, mebibytes: int, count: int) -> Steps:
    """Makes a sparse model of so many MiB, and `count` versions with a tenth of its non-zeros changed each."""
    layers = 4
    width = int((mebibytes * MIB / 4 / layers) ** 0.5) // 16 * 16
    rng = np.random.default_rng(5)
    weights = []
    for _ in range(layers):
        weight = rng.standard_normal((width, width), np.float32) * np.float32((0.1 * width) ** -0.5)
        weights.append(weight * (rng.random((width, width), np.float32) < 0.1))
    files = {}
    for version in range(1, 2 + count):
        if version > 1:
            for weight in weights:
                at = np.flatnonzero(weight)
                at = at[rng.random(len(at), np.float32) < 0.1]
                weight.reshape(-1)[at] += np.float32(1e-4) * rng.standard_normal(len(at), np.float32)
        names = [f"w{layer}" for layer in range(layers)]
        nodes = [onnx.helper.make_node("Gemm", ["x" if i == 0 else f"h{i}", name], ["y" if i == layers - 1 else f"h{i + 1}"],
                                       transB=1) for i, name in enumerate(names)]
        tensor = lambda name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", width])  # noqa: E731
        graph = onnx.helper.make_graph(nodes, WIDE, [tensor("x")], [tensor("y")],
                                       [numpy_helper.from_array(w, n) for w, n in zip(weights, names)])
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
        files[version] = folder / f"wide-{version}.onnx"
        files[version].write_bytes(model.SerializeToString())
    return create_deltas(folder, WIDE, updating.keygen(folder / "trainer"), files)


def serve(folder: pathlib.Path, model: str, files: dict[int, pathlib.Path], *flags: str) -> harness.Espalierd:
    """A server of these versions in a new repository."""
    for version, path in files.items():
        (folder / model / str(version)).mkdir(parents=True)
        os.link(path, folder / model / str(version) / "model.onnx")
    policy = "version_policy { all {} }\n" if len(files) > 1 else ""
    (folder / model / "config.pbtxt").write_text(DETERMINISTIC + policy)
    return harness.Espalierd(folder, *flags, state_dir=folder.with_name(folder.name + "-state"))


def serve_updatable(folder: pathlib.Path, model: str, steps: Steps) -> harness.Espalierd:
    """A server of version 1 that takes the trainer's updates."""
    return serve(folder, model, {1: steps.files[1]}, "--update_address=127.0.0.1:0",
                 f"--update_keys={steps.key.with_suffix('.pub')}")


def linkable(folder: pathlib.Path, steps: Steps) -> Steps:
    """Puts a copy of the first version beside the others, so that a link to it needs no second file system."""
    copy = folder / "1.onnx"
    copy.write_bytes(steps.files[1].read_bytes())
    return dataclasses.replace(steps, files={**steps.files, 1: copy})


# ---- requests --------------------------------------------------------------------------------------------------------


def requests(options: Options, folder: pathlib.Path) -> dict:
    """Updates under load; returns the ledger."""
    steps = linkable(folder, trained_steps(folder, options.updates))
    images = harness.read_digits().images[:4 * QUESTIONS]
    (folder / "questions.f32").write_bytes(images.tobytes())
    with serve_updatable(folder / "live", MODEL, steps) as server:
        load = subprocess.Popen([harness.BIN / "updates_load", f"--url={server.url}", f"--model={MODEL}",
                                 f"--inputs={folder / 'questions.f32'}", f"--width={images.shape[1]}",
                                 f"--threads={options.threads}", f"--requests={options.requests}"],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        begin = time.perf_counter()
        with updates.Client(server.update_url) as client:
            for delta in steps.deltas.values():
                client.activate(MODEL, client.push(delta).version)
        seconds = time.perf_counter() - begin
        seen = json.loads(load.communicate()[0])
    failed = sum(seen["failed"].values())
    mixed = count_mixed(folder, steps, seen["answers"], images)
    versions = {version for version, *_ in seen["answers"]}
    return {"updates": len(steps.deltas), "update_seconds": round(seconds, 2), "sent": seen["sent"], "failed": failed,
            "failures": seen["failed"], "dropped": seen["sent"] - seen["answered"], "mixed": mixed,
            "versions_that_answered": len(versions), "p50_us": seen["p50_us"], "p99_us": seen["p99_us"],
            "met": failed == mixed == seen["sent"] - seen["answered"] == 0 and len(steps.deltas) == options.updates}


def applied(folder: pathlib.Path, steps: Steps) -> dict[int, pathlib.Path]:
    """Applies all deltas offline, one to the result of the other; each is the trainer's file."""
    files = {1: steps.files[1]}
    for version, delta in steps.deltas.items():
        files[version] = folder / f"applied-{version}.onnx"
        harness.espalier("delta", "apply", str(files[version - 1]), str(delta), "-o", str(files[version]),
                         f"--trust={steps.key.with_suffix('.pub')}")
        if files[version].read_bytes() != steps.files[version].read_bytes():
            sys.exit(f"version {version} applied offline is not the file that it was made from")
    return files


def count_mixed(folder: pathlib.Path, steps: Steps, answers: list, images: np.ndarray, chunk: int = 100) -> int:
    """Returns how many answers are not those of the version that they name."""
    files = applied(folder, steps)
    mixed = sum(count for version, _, _, count in answers if version not in files)
    for first in range(1, len(files) + 1, chunk):
        some = {version: files[version] for version in range(first, min(first + chunk, len(files) + 1))}
        own = {}
        with serve(folder / f"offline-{first}", MODEL, some) as server, espalier.Client(server.url) as client:
            for version, question, output, count in answers:
                if version not in some:
                    continue
                if (version, question) not in own:
                    rows = images[4 * question:4 * question + 1 + question % 4]
                    own[version, question] = client.infer(MODEL, rows, version=str(version)).output.tobytes().hex()
                mixed += count if output != own[version, question] else 0
    return mixed


# ---- commit and rollback ---------------------------------------------------------------------------------------------


class Memory:
    """Resident memory of a process."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._folder = pathlib.Path(f"/proc/{process.pid}")

    def now(self) -> int:
        return self._read("VmRSS")

    def forget_peak(self) -> None:
        (self._folder / "clear_refs").write_text("5")

    def peak(self) -> int:
        return self._read("VmHWM")

    def _read(self, name: str) -> int:
        lines = (self._folder / "status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def timed(action) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def commit(options: Options, folder: pathlib.Path) -> dict:
    """Updates of a large sparse model; returns times and memory."""
    steps = wide_steps(folder, options.mebibytes, 3)
    width = onnx.load(steps.files[1], load_external_data=False).graph.input[0].type.tensor_type.shape.dim[1].dim_value
    x = np.random.default_rng(2).random((1, width), np.float32)
    with serve_updatable(folder / "live", WIDE, steps) as server, updates.Client(server.update_url, timeout=300) as client:
        memory = Memory(server.process)
        weights = serving_bench.metric(server, "espalier_model_resident_weight_bytes", model=WIDE)
        settled = memory.now()
        memory.forget_peak()
        served = []
        for delta in steps.deltas.values():
            served.append(timed(lambda d=delta: client.activate(WIDE, client.push(d).version)))
        peak = memory.peak()
        last, before = max(steps.files), max(steps.files) - 1
        facts = {go(client, v): serving_facts(server, client, x) for go, v in ((back_to, before), (forth_to, last))}
        back, forth, flips, same = [], [], [], True
        flipped = serving_bench.metric(server, FLIP, model=WIDE)
        for _ in range(options.cycles):
            for times, version, go in ((back, before, back_to), (forth, last, forth_to)):
                times.append(timed(lambda v=version, g=go: g(client, v)))
                flips.append(serving_bench.metric(server, FLIP, model=WIDE) - flipped)
                flipped += flips[-1]
                same = same and serving_facts(server, client, x) == facts[version]
    allowed = 2.1 * weights
    result = {
        "file_bytes": steps.files[1].stat().st_size, "delta_bytes": [d.stat().st_size for d in steps.deltas.values()],
        "received_to_served_s": [round(s, 3) for s in served],
        "weight_bytes": int(weights), "settled_rss": settled, "peak_rss": peak, "allowed_weight_bytes": int(allowed),
        "flip_p50_us": round(1e6 * percentile(flips, 50), 1), "flip_p99_us": round(1e6 * percentile(flips, 99), 1),
        "cycles": options.cycles, "same_digest_and_answers": same,
        "activate_p50_ms": round(1e3 * percentile(forth, 50), 3), "rollback_p50_ms": round(1e3 * percentile(back, 50), 3),
    }
    result["met"] = {"received_to_served": max(served) <= 2, "memory": peak - empty_rss(folder) <= allowed,
                     "flip": 0 < percentile(flips, 99) <= 1e-3,
                     "rollback": percentile(back, 50) <= 2 * percentile(forth, 50) and same}
    return result


def empty_rss(folder: pathlib.Path) -> int:
    """Resident memory of a server without models."""
    (folder / "empty").mkdir()
    with harness.Espalierd(folder / "empty") as server:
        return Memory(server.process).now()


def back_to(client: updates.Client, version: int) -> int:
    return client.rollback(WIDE, to=version)


def forth_to(client: updates.Client, version: int) -> int:
    client.activate(WIDE, version)
    return version


def serving_facts(server: harness.Espalierd, client: updates.Client, x: np.ndarray) -> tuple[int, bytes, bytes]:
    """Version, digest of its weights, and an answer."""
    (model,) = client.versions(WIDE)
    digest = next(v.weights for v in model.versions if v.version == model.serving)
    with espalier.Client(server.url) as asking:
        return model.serving, digest, asking.infer(WIDE, x).output.tobytes()


# ---- latency ---------------------------------------------------------------------------------------------------------


def give_way() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def push_all(url: str, deltas: list[pathlib.Path], seconds_each: float, after: float) -> None:
    time.sleep(after)
    with updates.Client(url) as client:
        for delta in deltas:
            begin = time.perf_counter()
            client.activate(MODEL, client.push(delta).version)
            time.sleep(max(0.0, seconds_each - (time.perf_counter() - begin)))


def latency(options: Options, folder: pathlib.Path) -> dict:
    """Windows with updates and without, at 30 % of the load that fits. Who pushes takes no processor from the server: a
    trainer has a machine of its own."""
    windows = serving_bench.Options(windows=options.windows, seconds=options.seconds, warmup=0.2)
    each = round(options.seconds * options.updates_per_second)
    steps = linkable(folder, trained_steps(folder, options.windows * each))
    trainer = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), give_way)
    with serve_updatable(folder / "live", MODEL, steps) as server, trainer:
        endpoint = serving_bench.Endpoint(server.url, MODEL)
        fits = serving_bench.bench(endpoint, windows, "--concurrency=16")["requests_per_second"]
        rate = f"--rate={0.3 * fits}"
        left: Iterator[pathlib.Path] = iter(steps.deltas.values())

        def updating_window() -> dict:
            deltas = list(itertools.islice(left, each))
            pushed = trainer.submit(push_all, server.update_url, deltas, 1 / options.updates_per_second, windows.warmup)
            level = serving_bench.bench(endpoint, windows, rate)
            pushed.result()
            return level

        samples = serving_bench.alternate({"steady": lambda: serving_bench.bench(endpoint, windows, rate),
                                           "updating": updating_window}, options.windows)
    p99 = {name: serving_bench.median(levels, "latency_us", "p99") for name, levels in samples.items()}
    errors = sum(error["count"] for levels in samples.values() for level in levels for error in level["errors"].values())
    ratio = p99["updating"] / p99["steady"]
    return {"windows": options.windows, "seconds": options.seconds, "updates": options.windows * each,
            "rate": round(0.3 * fits), "steady_p99_us": p99["steady"], "updating_p99_us": p99["updating"],
            "spread": {name: serving_bench.spread(levels, "latency_us", "p99") for name, levels in samples.items()},
            "ratio": round(ratio, 3), "errors": errors, "met": ratio <= 1.1 and errors == 0}


CASES = {"requests": requests, "commit": commit, "latency": latency}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=" ".join(CASES))
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--bars", action="store_true", help="all cases with the bars' own lengths, recorded in results/")
    for field in dataclasses.fields(Options):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(unknown)}")
    options = Options() if args.bars else Options(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Options)})
    out = args.out or (ROOT / "tests/bench/results/updates/live.json" if args.bars else None)
    os.environ["ESPALIER_BIN"] = str(harness.BIN)  # for updates.create
    results = json.loads(out.read_text()) if out and out.exists() else {}
    commit_id = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    for name in args.cases or CASES:
        with tempfile.TemporaryDirectory(prefix="updates-live-") as folder:
            begin = time.perf_counter()
            result = CASES[name](options, pathlib.Path(folder))
        result.update(seconds_in_all=round(time.perf_counter() - begin, 1), commit=commit_id.stdout.strip(),
                      date=datetime.date.today().isoformat(), device=serving_bench.device(),
                      command="tests/bench/updates_live.py " + " ".join(sys.argv[1:]))
        print(name, json.dumps(result, indent=1), flush=True)
        results[name] = result
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
