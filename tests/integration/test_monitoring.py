"""The shipped Prometheus configuration, alerts and dashboard, with Debian's real Prometheus, scraping a server whose GPU and
NVML are stand-ins (tests/testing/fake_cuda.h, tests/testing/fake_nvml.cc)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator

import espalier
import harness
import numpy as np
import onnx
import pytest
from espalier import updates
from onnx import numpy_helper

DEPLOY = harness.ROOT / "deploy"
ALERTS = DEPLOY / "prometheus/alerts.yml"
DASHBOARD = json.loads((DEPLOY / "grafana/espalier.json").read_text())
NAME = "mnist_block16"
LIBRARIES = harness.BIN.parent / "lib"
MODULE = LIBRARIES / "libespalier_fake_cuda_module.so"
SCRAPES_PER_SECOND = 2
CONFIG = """
    parameters { key: "execute_delay_ms" value { string_value: "20" } }
    max_batch_size: 4
    dynamic_batching {
        priority_levels: 2
        default_priority_level: 2
        default_queue_policy { max_queue_size: 2 }
    }
"""


@dataclasses.dataclass
class Prometheus:
    url: str

    def get(self, path: str, **parameters: str) -> dict:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=60) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[float]:
        return [float(row["value"][1]) for row in self.get("query", query=expression)["result"]]


def configure(folder: pathlib.Path, server: harness.Espalierd) -> pathlib.Path:
    """Writes the shipped configuration, scraping `server` and faster."""
    text = (DEPLOY / "prometheus/prometheus.yml").read_text()
    assert text.count("127.0.0.1:8002") == 2 and text.count("_interval: 15s") == 2
    text = text.replace("127.0.0.1:8002", server.metrics_url.removeprefix("http://"))
    text = text.replace("_interval: 15s", f"_interval: {1000 // SCRAPES_PER_SECOND}ms")
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(ALERTS, folder)
    return folder / "prometheus.yml"


def make_traffic(server: harness.Espalierd, digits: harness.Digits, done: threading.Event) -> None:
    """Answers, refusals of a full queue, mistakes of clients and a failed RPC, until `done`."""
    with espalier.Client(server.url) as client:

        def ask(images) -> None:
            while not done.is_set():
                try:
                    client.infer(NAME, images)
                except espalier.InferenceError:
                    time.sleep(0.005)

        threads = [
            threading.Thread(target=ask, args=[images])
            for images in [digits.images[:1]] * 6 + [digits.images[:2], digits.images[:1, :9]]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def make_updates(server: harness.Espalierd, folder: pathlib.Path, done: threading.Event) -> None:
    """Versions that are activated and given up, one after the other, and a delta that is refused."""
    old = harness.model_path(NAME)
    model = onnx.load(old)
    bias = next(t for t in model.graph.initializer if len(t.dims) == 1)
    array = numpy_helper.to_array(bias) + np.float32(0.5)
    bias.CopyFrom(numpy_helper.from_array(array, bias.name))
    onnx.save(model, folder / "next.onnx")

    def delta(name: str, *flags: str) -> pathlib.Path:
        path = folder / f"{name}.espd"
        harness.espalier(
            "delta",
            "create",
            str(old),
            str(folder / "next.onnx"),
            "-o",
            str(path),
            f"--model={NAME}",
            *flags,
        )
        return path

    bad = delta("bad", "--base_version=80", "--version=81")
    with updates.Client(server.update_url) as client:
        for version in itertools.count(2):
            good = delta(f"{version}", "--base_version=1", f"--version={version}")
            client.activate(NAME, client.push(good).version)
            with contextlib.suppress(espalier.InferenceError):
                client.push(bad)
            client.rollback(NAME)
            if done.wait(0.3):
                return


@pytest.fixture(scope="module")
def monitored(tmp_path_factory, digits) -> Iterator[Prometheus]:
    """Prometheus, scraping a server under load for a few seconds."""
    if not MODULE.exists():
        pytest.skip("built without tests")
    folder = tmp_path_factory.mktemp("monitoring")
    model = folder / "models" / NAME
    (model / "1").mkdir(parents=True)
    shutil.copy(harness.model_path(NAME), model / "1")
    (model / "config.pbtxt").write_text(CONFIG)
    (folder / "lib").mkdir()
    (folder / "lib/libnvidia-ml.so.1").symlink_to(LIBRARIES / "libespalier_fake_nvml.so")
    flags = (
        "--update_address=127.0.0.1:0",
        "--allow_unsigned_updates",
        "--device=cuda",
        f"--cuda_module={MODULE}",
    )
    with harness.Espalierd(
        folder / "models",
        *flags,
        state_dir=folder / "state",
        environment={"LD_LIBRARY_PATH": str(folder / "lib")},
    ) as server:
        (port,) = harness.free_ports(1)
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={configure(folder, server)}",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=(folder / "prometheus.log").open("wb"),
        )
        done = threading.Event()
        traffic = threading.Thread(target=make_traffic, args=[server, digits, done])
        updating = threading.Thread(target=make_updates, args=[server, folder, done])
        traffic.start()
        updating.start()
        try:
            await_scrapes(prometheus, process, folder / "prometheus.log")
            yield prometheus
        finally:
            done.set()
            traffic.join()
            updating.join()
            process.terminate()
            process.wait(60)


def await_scrapes(prometheus: Prometheus, process: subprocess.Popen, log: pathlib.Path) -> None:
    """Until every rate over 5 s has data: some 10 scrapes."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if all(
                prometheus.query(f'count_over_time(up{{job="{job}"}}[1m])') >= [10]
                for job in ("espalier", "espalier-triton-names")
            ):
                return
        except OSError:
            pass  # it starts
        time.sleep(0.2)
    raise AssertionError(log.read_text())


def panels() -> list[dict]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def resolved(expression: str) -> str:
    """The expression as Grafana sends it with every variable at All."""
    expression = expression.replace("$__rate_interval", "5s")
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            expression = expression.replace(f"${variable['name']}", variable["allValue"])
    assert "$" not in expression, expression
    return expression


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_every_query_of_every_panel_returns_data(monitored, panel):
    assert panel["targets"] and panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        values = monitored.query(resolved(target["expr"]))
        assert values, target["expr"]
        assert any(math.isfinite(value) for value in values), (target["expr"], values)


def test_the_panels_show_what_happened(monitored):
    """Not only data, but the right one: load, refusals and clients' mistakes are all in it."""

    def of(title: str) -> list[float]:
        panel = next(panel for panel in panels() if panel["title"] == title)
        return monitored.query(resolved(panel["targets"][0]["expr"]))

    assert of("Ready") == [1]
    assert 1 < sum(of("Requests by model")) < 100_000
    assert len(of("Requests by answer")) >= 3, "OK, UNAVAILABLE and INVALID_ARGUMENT"
    assert 0.01 < of("Failing")[0] < 1
    assert of("p99")[0] > 0.02, "each execution is delayed by 20 ms"
    assert 1 <= of("Mean batch")[0] <= 4
    assert of("Resident memory")[0] > 1e7
    assert of("Active version")[0] >= 1
    assert of("Bytes of deltas")[0] > 100
    assert of("GPU utilisation") == [0.37] and of("GPU memory") == [3 * 2**30]
    assert of("GPU power") == [250.5]
    assert of("Arithmetic on GPUs")[0] > 1e3
    assert 0 < of("Share of the peak")[0]


def test_the_variables_of_the_dashboard_list_servers_and_models(monitored):
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] != "query":
            continue
        metric, label = re.fullmatch(
            r"label_values\((.+), (\w+)\)", resolved(variable["query"]["query"])
        ).groups()
        values = monitored.get(f"label/{label}/values", **{"match[]": metric})
        assert len(values) == 1, (variable["name"], values)


def test_rules_evaluate_without_errors_and_a_served_model_is_no_emergency(monitored):
    groups = monitored.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(re.findall(r"^ +- (?:alert|record):", ALERTS.read_text(), re.M)) > 8
    for rule in rules:
        assert rule["health"] == "ok", rule
    firing = {rule["name"] for rule in rules if rule.get("state") == "firing"}
    assert firing == set(), "all that this load may set off waits for minutes first"
    assert monitored.query("espalier_memory:models_bytes") > [1e5]


def test_every_metric_that_alerts_name_exists(monitored):
    """A typo in a metric's name makes an alert that never fires."""
    names = set(re.findall(r"\b((?:espalier|process)_\w+)", ALERTS.read_text()))
    names -= {"espalier_memory"}  # the recording's prefix
    assert len(names) >= 10
    known = set(monitored.get("label/__name__/values"))
    assert names <= known, names - known


def test_triton_names_are_scraped(monitored):
    assert sum(monitored.query("rate(nv_inference_request_success[5s])")) > 1


def test_alerts_fire_when_they_should():
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yml"],
        cwd=DEPLOY / "prometheus",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested():
    alerts = set(re.findall(r"- alert: (\w+)", ALERTS.read_text()))
    tested = (DEPLOY / "prometheus/alerts_test.yml").read_text()
    fires = set(re.findall(r"alertname: (\w+)\n +exp_alerts:\n +- exp_labels", tested))
    assert alerts == fires
