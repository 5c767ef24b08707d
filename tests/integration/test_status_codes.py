"""Every refused request gets the agreed code and a message that says what was wrong."""

from __future__ import annotations

import threading
import time

import grpc
import harness
import numpy as np
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


def typed(count: int = 784) -> service_pb2.ModelInferRequest:
    """A request with its numbers in the message instead of raw."""
    made = request()
    del made.raw_input_contents[:]
    made.inputs[0].contents.fp32_contents.extend([0.5] * count)
    return made


def edited(edit, made=None) -> service_pb2.ModelInferRequest:
    made = made or request()
    edit(made)
    return made


def shaped(*shape: int, values: int | None = None) -> service_pb2.ModelInferRequest:
    """A request with this shape, and as many bytes as it says unless told otherwise."""

    def edit(made):
        made.inputs[0].shape[:] = shape
        made.raw_input_contents[0] = bytes(4 * (int(np.prod(shape)) if values is None else values))

    return edited(edit)


def shared(**parameters: str | int) -> service_pb2.ModelInferRequest:
    """A request whose input lies in shared memory."""

    def edit(made):
        del made.raw_input_contents[:]
        for key, value in parameters.items():
            field = "string_param" if isinstance(value, str) else "int64_param"
            setattr(made.inputs[0].parameters[f"shared_memory_{key}"], field, value)

    return edited(edit)


def with_output_parameter(key: str, value: int) -> service_pb2.ModelInferRequest:
    def edit(made):
        made.outputs.add(name="logits").parameters[key].int64_param = value

    return edited(edit)


def set_both(made):
    made.inputs[0].contents.fp32_contents.extend([0.5] * 784)


def add_typed_field(made):
    made.inputs[0].contents.int_contents.append(1)


REFUSED = {
    "unknown model": (
        edited(lambda r: setattr(r, "model_name", "nothing")),
        Code.NOT_FOUND,
        "unknown model.*nothing",
    ),
    "no model": (edited(lambda r: setattr(r, "model_name", "")), Code.NOT_FOUND, "unknown model"),
    "path as model": (
        edited(lambda r: setattr(r, "model_name", "../models")),
        Code.NOT_FOUND,
        "unknown model",
    ),
    "unknown version": (request(model_version="99"), Code.NOT_FOUND, "version 99 is not found"),
    "version that is no number": (
        request(model_version="latest"),
        Code.INVALID_ARGUMENT,
        "version.*latest",
    ),
    "negative version": (request(model_version="-1"), Code.INVALID_ARGUMENT, "version.*-1"),
    "version too large": (request(model_version="9" * 30), Code.INVALID_ARGUMENT, "version"),
    "wrong size": (shaped(1, 783), Code.INVALID_ARGUMENT, r"expected \[-1, 784\], got \[1, 783\]"),
    "wrong rank": (shaped(784), Code.INVALID_ARGUMENT, r"expected \[-1, 784\], got \[784\]"),
    "no shape": (shaped(values=784), Code.INVALID_ARGUMENT, r"expected \[-1, 784\]"),
    "empty batch": (shaped(0, 784), Code.INVALID_ARGUMENT, "batch-size must be >= 1"),
    "batch above the limit": (shaped(257, 784), Code.INVALID_ARGUMENT, "batch-size must be <= 256"),
    "negative dimension": (shaped(-1, 784, values=784), Code.INVALID_ARGUMENT, "input"),
    "huge shape": (shaped(2**62, 784, values=784), Code.INVALID_ARGUMENT, "input"),
    "33 dimensions": (shaped(*[1] * 33, values=784), Code.INVALID_ARGUMENT, "dimensions"),
    "wrong datatype": (
        edited(lambda r: setattr(r.inputs[0], "datatype", "FP64")),
        Code.INVALID_ARGUMENT,
        "data-type is 'FP64', but model 'mnist_dense' expects 'FP32'",
    ),
    "unknown datatype": (
        edited(lambda r: setattr(r.inputs[0], "datatype", "FP8")),
        Code.INVALID_ARGUMENT,
        "FP8",
    ),
    "no input": (
        service_pb2.ModelInferRequest(model_name=NAME),
        Code.INVALID_ARGUMENT,
        "expected 1 inputs but got 0",
    ),
    "unknown input": (
        edited(lambda r: setattr(r.inputs[0], "name", "image")),
        Code.INVALID_ARGUMENT,
        "unexpected inference input 'image'",
    ),
    "input twice": (edited(lambda r: r.MergeFrom(request())), Code.INVALID_ARGUMENT, "given twice"),
    "unknown output": (
        edited(lambda r: r.outputs.add(name="x")),
        Code.INVALID_ARGUMENT,
        "unexpected inference output 'x'",
    ),
    "output twice": (
        edited(lambda r: (r.outputs.add(name="logits"), r.outputs.add(name="logits"))),
        Code.INVALID_ARGUMENT,
        "requested twice",
    ),
    "too few bytes": (
        shaped(1, 784, values=783),
        Code.INVALID_ARGUMENT,
        "takes 3136 bytes, got 3132",
    ),
    "too many bytes": (
        shaped(1, 784, values=785),
        Code.INVALID_ARGUMENT,
        "takes 3136 bytes, got 3140",
    ),
    "raw content missing": (
        edited(lambda r: r.ClearField("raw_input_contents")),
        Code.INVALID_ARGUMENT,
        "unable to find data",
    ),
    "raw content too many": (
        edited(lambda r: r.raw_input_contents.append(b"")),
        Code.INVALID_ARGUMENT,
        "expected 1 raw_input_contents, one per input, got 2",
    ),
    "raw and typed": (
        edited(set_both),
        Code.INVALID_ARGUMENT,
        "must not be specified when using raw_input_contents",
    ),
    "typed too few": (typed(783), Code.INVALID_ARGUMENT, "input"),
    "typed too many": (typed(785), Code.INVALID_ARGUMENT, "input"),
    "two typed fields": (edited(add_typed_field, typed()), Code.INVALID_ARGUMENT, "input"),
    "reserved parameter": (
        edited(lambda r: setattr(r.parameters["triton_something"], "bool_param", True)),
        Code.INVALID_ARGUMENT,
        "triton_something",
    ),
    "shared memory that is not allowed": (
        shared(region="r", byte_size=3136),
        Code.UNIMPLEMENTED,
        "--allow_system_shared_memory",
    ),
    "shared memory without a size": (
        shared(region="r"),
        Code.INVALID_ARGUMENT,
        "needs 'shared_memory_byte_size'",
    ),
    "shared memory without a region": (
        with_output_parameter("shared_memory_byte_size", 40),
        Code.INVALID_ARGUMENT,
        "needs 'shared_memory_region'",
    ),
    "no classes": (
        with_output_parameter("classification", 0),
        Code.INVALID_ARGUMENT,
        "'classification': expected int64_param of at least 1, got int64_param 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_request_is_refused(stub, case):
    wrong, code, message = REFUSED[case]
    with pytest.raises(grpc.RpcError, match=f"(?is){message}") as error:
        stub.ModelInfer(wrong, timeout=30)
    assert error.value.code() == code
    assert error.value.details()


def test_the_request_that_the_others_vary_is_right(stub):
    assert stub.ModelInfer(request(), timeout=30).outputs[0].shape == [1, 10]


def test_typed_contents_equal_raw(stub):
    raw = request()
    raw.raw_input_contents[0] = np.full(784, 0.5, np.float32).tobytes()
    assert (
        stub.ModelInfer(typed(), timeout=30).raw_output_contents
        == stub.ModelInfer(raw, timeout=30).raw_output_contents
    )


def test_unknown_parameters_and_fields_are_accepted(stub):
    made = request(id="abc")
    made.parameters["triton_enable_empty_final_response"].bool_param = True
    made.parameters["anything"].double_param = 0.5
    made.parameters["headers"].string_param = "x"
    made.inputs[0].parameters["anything"].string_param = "y"
    answer = stub.ModelInfer(made, timeout=30)
    assert answer.id == "abc" and answer.model_name == NAME and answer.model_version == "1"
    assert len(answer.raw_output_contents) == len(answer.outputs) == 1


def test_garbage_instead_of_a_message_is_refused(server):
    with grpc.insecure_channel(server.url) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        rng = np.random.default_rng(5)
        good = request().SerializeToString()
        for _ in range(300):
            damaged = bytearray(good[: rng.integers(1, 200)] if rng.random() < 0.3 else good)
            for _ in range(rng.integers(1, 4)):
                damaged[rng.integers(min(len(damaged), 60))] = rng.integers(256)
            try:
                call(bytes(damaged), timeout=30)
            except grpc.RpcError as error:
                assert error.code() in (
                    Code.INVALID_ARGUMENT,
                    Code.NOT_FOUND,
                    Code.UNIMPLEMENTED,
                ), error
                assert error.details()


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


@pytest.mark.parametrize(
    "method",
    [
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
    ],
)
def test_an_rpc_that_is_not_offered_is_unimplemented_with_text(stub, method):
    with pytest.raises(grpc.RpcError) as error:
        getattr(stub, method)(getattr(service_pb2, f"{method}Request")(), timeout=30)
    assert error.value.code() == Code.UNIMPLEMENTED
    assert method in error.value.details()


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
    ahead = [slow_server.ModelInfer.future(slow_request(), timeout=60) for _ in range(2)]
    time.sleep(0.05)
    with pytest.raises(grpc.RpcError) as error:
        slow_server.ModelInfer(slow_request(timeout=1000), timeout=60)
    assert error.value.code() == Code.UNAVAILABLE
    assert "timeout expired" in error.value.details()
    assert all(call.result().outputs for call in ahead)
    assert executions(slow_server) - before == 2


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
    assert done.wait(10)
    assert stub.ModelInfer(request(), timeout=30).outputs
