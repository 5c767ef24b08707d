"""What the metrics say, and that Triton's names are as its dashboards expect them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import socket
import threading
import time
import urllib.request

import espalier
import harness
import numpy as np
import pytest
import serving

NAME = "mnist_block16"
BY_VERSION = frozenset({"model", "version"})

# Every family of Triton that has a meaning here, with its type and labels. Not here: caches, the
# device gauges and energy (no GPU serves), pinned memory, and what is off by default there.
TRITON = {
    "nv_inference_request_success": ("counter", BY_VERSION),
    "nv_inference_request_failure": ("counter", BY_VERSION | {"reason"}),
    "nv_inference_count": ("counter", BY_VERSION),
    "nv_inference_exec_count": ("counter", BY_VERSION),
    "nv_inference_request_duration_us": ("counter", BY_VERSION),
    "nv_inference_queue_duration_us": ("counter", BY_VERSION),
    "nv_inference_compute_input_duration_us": ("counter", BY_VERSION),
    "nv_inference_compute_infer_duration_us": ("counter", BY_VERSION),
    "nv_inference_compute_output_duration_us": ("counter", BY_VERSION),
    "nv_inference_pending_request_count": ("gauge", BY_VERSION),
    "nv_model_load_duration_secs": ("gauge", BY_VERSION),
    "nv_cpu_utilization": ("gauge", frozenset()),
    "nv_cpu_memory_total_bytes": ("gauge", frozenset()),
    "nv_cpu_memory_used_bytes": ("gauge", frozenset()),
}
TRITON_REASONS = {"REJECTED", "CANCELED", "BACKEND", "OTHER"}

SLOW = """
    parameters {{ key: "execute_delay_ms" value {{ string_value: "{delay}" }} }}
    max_batch_size: 1
    dynamic_batching {{ default_queue_policy {{ max_queue_size: {queue} }} {more} }}
"""


def text_of(server: harness.Espalierd, path: str) -> str:
    with urllib.request.urlopen(f"{server.metrics_url}{path}", timeout=60) as response:
        return response.read().decode()


def scrape(server: harness.Espalierd, path: str = "/metrics") -> dict[tuple, float]:
    """Returns every sample by (name, labels), the names as they are in the text.

    (prometheus_client's parser appends _total to the name of every counter.)
    """
    samples = {}
    for name, labels, number in re.findall(
        r"^([a-z_]\w*)(?:\{(.*)\})? (\S+)$", text_of(server, path), re.M
    ):
        samples[name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels))] = float(number)
    return samples


def value(samples: dict[tuple, float], name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def slow_models(repository, delay: int, queue: int = 0, more: str = "") -> pathlib.Path:
    config = SLOW.format(delay=delay, queue=queue, more=more)
    model = harness.model_path(NAME).read_bytes()
    return repository(**{NAME: {"1": model, "config.pbtxt": config}})


def ask_at_once(server: harness.Espalierd, images: np.ndarray, count: int) -> list:
    """Sends `count` requests at the same time; returns the error of each, or None."""
    outcomes = [None] * count

    def ask(nth: int) -> None:
        try:
            client.infer(NAME, images)
        except espalier.InferenceError as error:
            outcomes[nth] = error

    with espalier.Client(server.url) as client:
        threads = [threading.Thread(target=ask, args=[nth]) for nth in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return outcomes


def test_triton_names_types_and_labels_are_tritons(server):
    families = {}
    for line in text_of(server, "/metrics/triton").splitlines():
        if line.startswith("# TYPE nv_"):
            _, _, name, kind = line.split()
            families[name] = kind
    assert families == {name: kind for name, (kind, _) in TRITON.items()}
    samples = scrape(server, "/metrics/triton")
    for name, (_, labels) in TRITON.items():
        found = [dict(pairs) for sample, pairs in samples if sample == name]
        assert found, name
        assert all(frozenset(pairs) == labels for pairs in found), (name, found)
    reasons = {
        dict(pairs)["reason"] for name, pairs in samples if name == "nv_inference_request_failure"
    }
    assert reasons == TRITON_REASONS
    assert value(samples, "nv_cpu_memory_used_bytes") < value(samples, "nv_cpu_memory_total_bytes")


def test_triton_counters_count_what_happens(server, digits):
    before = scrape(server, "/metrics/triton")
    with espalier.Client(server.url) as client:
        for _ in range(4):
            client.infer(NAME, digits.images[:3])
        with pytest.raises(espalier.InferenceError):
            client.infer(NAME, digits.images[:1, :9])
    after = scrape(server, "/metrics/triton")

    def gained(name: str, **labels: str) -> float:
        labels = {"model": NAME, "version": "1", **labels}
        return value(after, name, **labels) - value(before, name, **labels)

    assert gained("nv_inference_request_success") == 4
    assert gained("nv_inference_count") == 12
    assert 1 <= gained("nv_inference_exec_count") <= 4
    assert gained("nv_inference_request_failure", reason="OTHER") == 1
    assert gained("nv_inference_request_failure", reason="REJECTED") == 0
    parts = sum(
        gained(f"nv_inference_{phase}_duration_us")
        for phase in ("queue", "compute_input", "compute_infer", "compute_output")
    )
    assert 0 < parts <= gained("nv_inference_request_duration_us") < 60e6
    assert 0 <= value(after, "nv_cpu_utilization") <= 1


def test_refusals_are_counted_by_reason_and_pending_stays_below_its_cap(repository, digits):
    with harness.Espalierd(slow_models(repository, delay=1000, queue=2)) as server:
        seen = []
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                seen.append(
                    value(scrape(server), "espalier_queue_pending", model=NAME, version="1")
                )
                time.sleep(0.01)

        watcher = threading.Thread(target=watch)
        watcher.start()
        outcomes = ask_at_once(server, digits.images[:1], 9)
        done.set()
        watcher.join()
        refused = sum(outcome is not None for outcome in outcomes)
        assert refused in (6, 7), "two wait, and one runs or has yet to be taken"
        samples, triton = scrape(server), scrape(server, "/metrics/triton")
        labels = {"model": NAME, "version": "1"}
        assert value(samples, "espalier_request_failures_total", **labels, reason="queue_full") == refused
        assert value(samples, "espalier_request_failures_total", **labels, reason="timeout") == 0
        assert value(triton, "nv_inference_request_failure", **labels, reason="REJECTED") == refused
        # With seven refused one of the two was taken a moment later, perhaps between two looks.
        assert 8 - refused <= max(seen) <= 2 and value(samples, "espalier_queue_pending", **labels) == 0


def test_pending_is_told_by_priority_where_a_model_has_levels(repository, digits):
    models = slow_models(repository, delay=1500, more="priority_levels: 3 default_priority_level: 2")
    by_level = {"model": NAME, "version": "1"}
    with harness.Espalierd(models) as server, espalier.Client(server.url) as client:
        threads = [
            threading.Thread(
                target=client.infer,
                args=[NAME, digits.images[:1]],
                kwargs={"parameters": {"priority": level} if level else {}},
            )
            for level in (1, 1, 3, 0, 0)
        ]
        samples = {}

        def pending() -> list[float]:
            samples.update(scrape(server))
            of_level = "espalier_queue_priority_pending"
            return [value(samples, of_level, **by_level, priority=str(n)) for n in (1, 2, 3)]

        threads[0].start()
        serving.eventually(lambda: serving.in_flight(server) == 1 and sum(pending()) == 0)  # it runs
        for thread in threads[1:]:
            thread.start()
        serving.eventually(lambda: pending() == [1, 2, 1])
        assert value(samples, "espalier_queue_pending", **by_level) == 4
        for thread in threads:
            thread.join()
        after = scrape(server)
    assert value(after, "espalier_queue_pending", **by_level) == 0


@pytest.mark.parametrize(
    ("requests", "size", "let_in", "reason"),
    [(3, 1_000_000, 3, "requests_in_flight"), (100, 8_000, 2, "bytes_in_flight")],
    ids=["requests", "bytes"],
)
def test_limits_on_what_is_in_flight_are_shown_with_what_they_refuse(
    repository, digits, requests, size, let_in, reason
):
    """An image is 3,136 bytes, so two of them fit into 8,000."""
    limits = (f"--max_requests_in_flight={requests}", f"--max_request_bytes_in_flight={size}")
    with harness.Espalierd(slow_models(repository, delay=1000), *limits) as server:
        outcomes = ask_at_once(server, digits.images[:1], 5)
        samples = scrape(server)
    assert value(samples, "espalier_requests_in_flight_limit") == requests
    assert value(samples, "espalier_request_bytes_in_flight_limit") == size
    assert sum(outcome is None for outcome in outcomes) == let_in
    refused = {
        dict(labels)["reason"]: count
        for (name, labels), count in samples.items()
        if name == "espalier_requests_refused_total"
    }
    assert refused.pop(reason) == 5 - let_in
    assert set(refused.values()) == {0}


def test_idle_connections_do_not_keep_prometheus_out(server):
    host, port = server.metrics_url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as idle:
        for _ in range(30):
            idle.enter_context(socket.create_connection((host, int(port))))
        # With a thread too few for all of them, the scrape waits until the first are timed out, a second.
        with urllib.request.urlopen(f"{server.metrics_url}/metrics", timeout=20) as response:
            assert b"espalier_build_info" in response.read()


def test_batch_sizes_are_a_histogram_of_executions(repository, digits):
    model = harness.model_path(NAME).read_bytes()
    with harness.Espalierd(repository(**{NAME: {"1": model}})) as server:
        with espalier.Client(server.url) as client:
            for size in (1, 2, 3, 5):
                client.infer(NAME, digits.images[:size])
        samples = scrape(server)
    labels = {"model": NAME, "version": "1"}
    assert value(samples, "espalier_batch_size_count", **labels) == 4
    assert value(samples, "espalier_batch_size_sum", **labels) == 11
    at_most = {
        bound: value(samples, "espalier_batch_size_bucket", **labels, le=bound)
        for bound in ("1", "2", "4", "8", "1024", "+Inf")
    }
    assert list(at_most.values()) == [1, 2, 3, 4, 4, 4]


def test_process_and_build_are_described(server):
    def difference() -> float:
        files = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        return abs(value(scrape(server), "process_open_fds") - files)

    serving.eventually(lambda: difference() <= 3)  # connections of other tests may be ending
    samples = scrape(server)
    resident = serving.resident_bytes(server)
    assert value(samples, "process_resident_memory_bytes") == pytest.approx(resident, rel=0.2)
    assert value(samples, "process_threads") > 1
    assert value(samples, "process_cpu_seconds_total") > 0
    started = pathlib.Path(f"/proc/{server.process.pid}").stat().st_mtime
    assert value(samples, "process_start_time_seconds") == pytest.approx(started, abs=60)
    build = [dict(labels) for name, labels in samples if name == "espalier_build_info"]
    assert len(build) == 1 and set(build[0]) == {"version", "commit"} and all(build[0].values())
