"""Metrics, health, reflection and logs, read with the tools that others read them with."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import espalier
import grpc
import harness
import pytest
import serving
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from prometheus_client.parser import text_string_to_metric_families

NAME = "mnist_block16"
SERVICE = "inference.GRPCInferenceService"
# Of every shipped model: 784-512-512-10 in float32.
WEIGHT_BYTES = 4 * (784 * 512 + 512 * 512 + 512 * 10)
BIAS_BYTES = 4 * (512 + 512 + 10)


def scrape(server: harness.Espalierd) -> dict[tuple, float]:
    """Returns every sample by (name, labels), as Prometheus' parser reads them."""
    with urllib.request.urlopen(f"{server.metrics_url}/metrics", timeout=60) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        text = response.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def sample(samples: dict[tuple, float], name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0.0)


@pytest.fixture(scope="module")
def client(server):
    with espalier.Client(server.url) as connected:
        yield connected


def test_requests_are_counted_by_model_version_and_code(server, client, digits):
    before = scrape(server)
    for _ in range(3):
        client.infer(NAME, digits.images[:5])
    with pytest.raises(espalier.InferenceError):
        client.infer(NAME, digits.images[:1, :9])
    after = scrape(server)

    def gained(name: str, **labels: str) -> float:
        return sample(after, name, **labels) - sample(before, name, **labels)

    assert gained("espalier_requests_total", model=NAME, version="1", code="OK") == 3
    assert gained("espalier_requests_total", model=NAME, version="1", code="INVALID_ARGUMENT") == 1
    assert gained("espalier_inferences_total", model=NAME, version="1") == 15
    assert 1 <= gained("espalier_executions_total", model=NAME, version="1") <= 3
    # Latency is of requests that were answered with a result.
    assert gained("espalier_request_duration_seconds_count", model=NAME) >= 3
    assert gained("espalier_request_duration_seconds_sum", model=NAME) > 0
    phases = {
        dict(labels).get("phase")
        for name, labels in after
        if name == "espalier_phase_duration_seconds_count"
    }
    assert {"queue", "compute_input", "compute_infer", "compute_output"} <= phases
    for phase in phases:
        assert gained("espalier_phase_duration_seconds_count", model=NAME, phase=phase) >= 3


def test_histograms_are_cumulative(server, client, digits):
    client.infer(NAME, digits.images[:1])
    samples = scrape(server)
    buckets = sorted(
        (float(dict(labels)["le"]), value)
        for (name, labels), value in samples.items()
        if name == "espalier_request_duration_seconds_bucket" and dict(labels)["model"] == NAME
    )
    counts = [value for _, value in buckets]
    assert buckets[-1][0] == float("inf") and counts == sorted(counts)
    assert counts[-1] == sample(samples, "espalier_request_duration_seconds_count", model=NAME)


def test_gauges_describe_the_server_and_its_models(server):
    serving.eventually(lambda: serving.in_flight(server) == 0)  # a request leaves after its answer
    samples = scrape(server)
    assert sample(samples, "espalier_ready") == 1
    for name in harness.SHIPPED:
        resident = sample(samples, "espalier_model_resident_weight_bytes", model=name, version="1")
        dense = sample(samples, "espalier_model_dense_weight_bytes", model=name, version="1")
        assert resident > 0 and dense == pytest.approx(WEIGHT_BYTES + BIAS_BYTES, rel=0.001), name


def test_weights_shrink_with_their_zeros(repository):
    """In the mode that asks for the least memory, whatever dense would gain in speed."""
    config = 'parameters { key: "weight_memory" value { string_value: "smallest" } }'
    models = {
        name: {"1": harness.model_path(name).read_bytes(), "config.pbtxt": config}
        for name in harness.SHIPPED
    }
    with harness.Espalierd(repository(**models)) as server, espalier.Client(server.url) as client:
        samples = scrape(server)
        for name in harness.SHIPPED:
            density = 1 - float(client.model_config(name).parameters["sparsity"].string_value)
            resident = sample(
                samples, "espalier_model_resident_weight_bytes", model=name, version="1"
            )
            # A scattered value brings its column along, a structured one hardly any index.
            share = 2.1 if name == "mnist_unstructured" else 1.05
            assert resident - BIAS_BYTES <= share * density * WEIGHT_BYTES, name


def test_names_from_requests_never_become_labels(server, client, digits):
    for name in ("made_up", 'quote"brace}', "new\nline"):
        with pytest.raises(espalier.InferenceError):
            client.infer(name, {"input": digits.images[:1]})
    assert not any(
        "made_up" in str(labels) or "quote" in str(labels) for _, labels in scrape(server)
    )


def test_other_paths_are_not_found(server):
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"{server.metrics_url}/nothing", timeout=60)
    assert error.value.code == 404


def test_health_check_by_service(server):
    with grpc.insecure_channel(server.url) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as error:
            stub.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=60)
        assert error.value.code() == grpc.StatusCode.NOT_FOUND


def test_health_watch_sees_the_drain():
    with harness.Espalierd(harness.MODELS) as server, grpc.insecure_channel(server.url) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=60
        )
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        server.process.terminate()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert server.process.wait(60) == 0, "a watcher does not hold up the drain"


def test_reflection_describes_the_services(server):
    with grpc.insecure_channel(server.url) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        service = descriptor_pool.DescriptorPool(database).FindServiceByName(SERVICE)
        assert len(service.methods) == 20
        fields = service.methods_by_name["ModelInfer"].input_type.fields_by_name
        assert fields["raw_input_contents"].number == 7


def test_json_logs_parse_line_by_line(repository):
    models = repository(good={"1": harness.model_path(NAME).read_bytes()}, bad={"1": b"x"})
    with harness.Espalierd(models, "--log_format=json", "--log_level=debug") as server:
        with espalier.Client(server.url) as client:
            with pytest.raises(espalier.InferenceError):
                client.infer('quote"\n', {"x": [1.0]})
        server.process.terminate()
        server.process.wait(60)
        events = [json.loads(line) for line in server.log().splitlines()]
    assert all({"time", "level", "event"} <= set(event) for event in events)
    by_event = {event["event"]: event for event in events}
    assert any(event.get("model") == "good" for event in events), by_event
    failed = [
        event
        for event in events
        if event.get("model") == "bad" and event["level"] in ("warning", "warn", "error")
    ]
    assert failed, by_event
