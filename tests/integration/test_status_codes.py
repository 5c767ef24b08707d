"""Refusals that depend on what the server is doing, and what is accepted although it is odd."""

from __future__ import annotations

import threading
import time

import grpc
import harness
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

NAME = "mnist_dense"
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def stub(server):
    with grpc.insecure_channel(server.url, [("grpc.max_send_message_length", -1)]) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def request(batch: int = 1, **fields) -> service_pb2.ModelInferRequest:
    """A request that is right, unless `fields` say otherwise."""
    made = service_pb2.ModelInferRequest(model_name=NAME, **fields)
    made.inputs.add(name="input", datatype="FP32", shape=[batch, 784])
    made.raw_input_contents.append(bytes(batch * 784 * 4))
    return made


def test_unknown_parameters_and_fields_are_accepted(stub):
    made = request(id="abc")
    made.parameters["triton_enable_empty_final_response"].bool_param = True
    made.parameters["anything"].double_param = 0.5
    made.parameters["headers"].string_param = "x"
    made.inputs[0].parameters["anything"].string_param = "y"
    answer = stub.ModelInfer(made, timeout=30)
    assert answer.id == "abc" and answer.model_name == NAME and answer.model_version == "1"
    assert len(answer.raw_output_contents) == len(answer.outputs) == 1


QUERIES = {
    "ModelMetadata": (service_pb2.ModelMetadataRequest, Code.NOT_FOUND),
    "ModelConfig": (service_pb2.ModelConfigRequest, Code.NOT_FOUND),
    "ModelStatistics": (service_pb2.ModelStatisticsRequest, Code.INVALID_ARGUMENT),
}


@pytest.mark.parametrize("method", QUERIES)
def test_queries_for_unknown_models_and_versions_are_refused(stub, method):
    message, code = QUERIES[method]
    for name, version in (("nothing", ""), (NAME, "99")):
        with pytest.raises(grpc.RpcError) as error:
            getattr(stub, method)(message(name=name, version=version), timeout=30)
        assert error.value.code() == code and error.value.details()
    with pytest.raises(grpc.RpcError) as error:
        getattr(stub, method)(message(name=NAME, version="x"), timeout=30)
    assert error.value.code() == Code.INVALID_ARGUMENT and error.value.details()


def test_repository_name_is_unimplemented(stub):
    with pytest.raises(grpc.RpcError) as error:
        stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(repository_name="x"), timeout=30)
    assert error.value.code() == Code.UNIMPLEMENTED and error.value.details()


@pytest.mark.parametrize("kind", ["System", "Cuda"])
@pytest.mark.parametrize("what", ["Status", "Register", "Unregister"])
def test_shared_memory_that_is_not_allowed_is_unimplemented_with_text(stub, kind, what):
    method = f"{kind}SharedMemory{what}"
    with pytest.raises(grpc.RpcError) as error:
        getattr(stub, method)(getattr(service_pb2, f"{method}Request")(), timeout=30)
    assert error.value.code() == Code.UNIMPLEMENTED
    assert f"--allow_{kind.lower()}_shared_memory" in error.value.details()


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory):
    """A server with a model that takes its time and refuses to let many requests wait."""
    folder = tmp_path_factory.mktemp("slow") / "slow"
    (folder / "1").mkdir(parents=True)
    (folder / "1/model.onnx").write_bytes(harness.slow_model())
    (folder / "config.pbtxt").write_text(
        "dynamic_batching { default_queue_policy {"
        " max_queue_size: 3 allow_timeout_override: true } }"
    )
    with harness.Espalierd(folder.parent) as server, grpc.insecure_channel(server.url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def slow_request(**parameters: int) -> service_pb2.ModelInferRequest:
    made = service_pb2.ModelInferRequest(model_name="slow")
    made.inputs.add(name="x", datatype="FP32", shape=harness.SLOW_INPUT.shape)
    made.raw_input_contents.append(harness.SLOW_INPUT.tobytes())
    for key, value in parameters.items():
        made.parameters[key].int64_param = value
    return made


def executions(stub) -> int:
    statistics = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name="slow"), timeout=30)
    return statistics.model_stats[0].execution_count


def test_a_queue_timeout_is_unavailable_and_not_executed(slow_server):
    before = executions(slow_server)
    ahead = [slow_server.ModelInfer.future(slow_request(), timeout=60) for _ in range(3)]
    time.sleep(0.2)  # until the server has them
    with pytest.raises(grpc.RpcError) as error:
        slow_server.ModelInfer(slow_request(timeout=1000), timeout=60)
    assert error.value.code() == Code.UNAVAILABLE
    assert "timeout expired" in error.value.details()
    assert all(call.result().outputs for call in ahead)
    assert executions(slow_server) - before == 3


def test_a_deadline_that_passes_is_answered_and_the_server_goes_on(slow_server):
    with pytest.raises(grpc.RpcError) as error:
        slow_server.ModelInfer(slow_request(), timeout=0.02)
    assert error.value.code() == Code.DEADLINE_EXCEEDED and error.value.details()
    assert slow_server.ModelInfer(slow_request(), timeout=60).outputs


def test_a_full_queue_is_unavailable(slow_server):
    calls = [slow_server.ModelInfer.future(slow_request(), timeout=60) for _ in range(20)]
    codes = [call.code() for call in calls]
    assert set(codes) == {Code.OK, Code.UNAVAILABLE}
    assert codes.count(Code.OK) >= 4, "one that ran and three that waited"
    for call in calls:
        assert call.code() == Code.OK or "Exceeds maximum queue size" in call.details()


def test_a_message_above_the_limit_is_resource_exhausted():
    with harness.Espalierd(harness.MODELS, "--max_message_bytes=100000") as server:
        with grpc.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert stub.ModelInfer(request(16), timeout=30).outputs
            with pytest.raises(grpc.RpcError) as error:
                stub.ModelInfer(request(64), timeout=30)
            assert error.value.code() == Code.RESOURCE_EXHAUSTED
            assert error.value.details()
            assert stub.ModelInfer(request(16), timeout=30).outputs, "the server still serves"


def test_a_cancelled_request_does_not_disturb_others(stub):
    done = threading.Event()
    call = stub.ModelInfer.future(request(256), timeout=30)
    call.add_done_callback(lambda _: done.set())
    call.cancel()
    assert done.wait(60)
    assert stub.ModelInfer(request(), timeout=30).outputs
