"""How connections end and begin anew, large messages, and what an overload answers."""

from __future__ import annotations

import threading
import time

import grpc
import harness
import numpy as np
import onnx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

Code = grpc.StatusCode
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def identity(width: int) -> bytes:
    """x [N, width] -> y, the same."""
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "identity",
        [info("x", onnx.TensorProto.FLOAT, ["N", width])],
        [info("y", onnx.TensorProto.FLOAT, ["N", width])],
    )
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()


def request(batch: int, width: int, raw: bytes | None = None) -> service_pb2.ModelInferRequest:
    made = service_pb2.ModelInferRequest(model_name="identity")
    made.inputs.add(name="x", datatype="FP32", shape=[batch, width])
    made.raw_input_contents.append(bytes(batch * width * 4) if raw is None else raw)
    return made


def serve(repository, width: int, max_batch_size: int, *flags: str) -> harness.Espalierd:
    config = f"max_batch_size: {max_batch_size}"
    root = repository(identity={"1": identity(width), "config.pbtxt": config})
    return harness.Espalierd(root, *flags)


def test_a_connection_above_its_age_is_renewed_and_no_request_fails(repository):
    flags = ("--max_connection_age=1s", "--max_connection_age_grace=5s")
    with serve(repository, 4, 1, *flags) as server:
        with grpc.insecure_channel(server.url) as channel:
            states: list[grpc.ChannelConnectivity] = []
            channel.subscribe(states.append, try_to_connect=True)
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            began = time.monotonic()
            while time.monotonic() < began + 4 or states.count(grpc.ChannelConnectivity.READY) < 3:
                assert stub.ModelInfer(request(1, 4), timeout=60).outputs
                assert time.monotonic() < began + 60, states
                time.sleep(0.002)


def test_a_stream_is_ended_after_the_grace_of_its_connection(repository):
    flags = ("--max_connection_age=1s", "--max_connection_age_grace=1s")
    with serve(repository, 4, 1, *flags) as server:
        with grpc.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            done = threading.Event()

            def requests():
                yield request(1, 4)
                done.wait(20)

            call = stub.ModelStreamInfer(requests())
            assert next(call).infer_response.outputs
            with pytest.raises(grpc.RpcError) as error:
                next(call)
            done.set()
            assert error.value.code() == Code.UNAVAILABLE
            assert stub.ModelInfer(request(1, 4), timeout=60).outputs


@pytest.mark.parametrize("on_stream", [False, True])
def test_a_message_of_64_mib_is_served(repository, on_stream):
    width = 1 << 20
    values = np.random.default_rng(1).integers(0, 255, (16, width * 4), np.uint8).tobytes()
    with serve(repository, width, 16) as server:
        with grpc.insecure_channel(server.url, UNLIMITED) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            large = request(16, width, values)
            if on_stream:
                answer = next(stub.ModelStreamInfer(iter([large]), timeout=60)).infer_response
            else:
                answer = stub.ModelInfer(large, timeout=60)
            assert answer.raw_output_contents[0] == values


@pytest.mark.slow
def test_a_message_of_1_gib_is_served(repository):
    width = 1 << 22
    with serve(repository, width, 64) as server:
        with grpc.insecure_channel(server.url, UNLIMITED) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            batch = 63  # with 64 the rest of the message is above 1 GiB
            values = np.arange(batch * width, dtype=np.uint32).tobytes()
            answer = stub.ModelInfer(request(batch, width, values), timeout=280)
            assert answer.raw_output_contents[0] == values
            assert stub.ModelInfer(request(1, width), timeout=60).outputs


def test_an_oversize_message_is_refused_and_the_channel_stays_usable(repository):
    width = 1 << 18
    with serve(repository, width, 64, "--max_message_bytes=4194304") as server:
        with grpc.insecure_channel(server.url, UNLIMITED) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for _ in range(3):
                with pytest.raises(grpc.RpcError, match=r"larger than max \(\d+ vs. 4194304") as e:
                    stub.ModelInfer(request(16, width), timeout=30)
                assert e.value.code() == Code.RESOURCE_EXHAUSTED
                assert stub.ModelInfer(request(2, width), timeout=30).outputs
                with pytest.raises(grpc.RpcError, match="larger than max") as e:
                    list(stub.ModelStreamInfer(iter([request(16, width)]), timeout=30))
                assert e.value.code() == Code.RESOURCE_EXHAUSTED
                assert next(stub.ModelStreamInfer(iter([request(2, width)]), timeout=30))


@pytest.mark.parametrize(
    "flag, code",
    [("unavailable", Code.UNAVAILABLE), ("resource_exhausted", Code.RESOURCE_EXHAUSTED)],
)
def test_a_full_queue_says_when_to_come_back(repository, flag, code):
    config = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    root = repository(slow={"1": harness.slow_model(), "config.pbtxt": config})
    with harness.Espalierd(root, f"--queue_full_status={flag}") as server:
        with grpc.insecure_channel(server.url, UNLIMITED) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            made = service_pb2.ModelInferRequest(model_name="slow")
            made.inputs.add(name="x", datatype="FP32", shape=harness.SLOW_INPUT.shape)
            made.raw_input_contents.append(harness.SLOW_INPUT.tobytes())
            calls = [stub.ModelInfer.future(made, timeout=60) for _ in range(12)]
            refused = [call for call in calls if call.code() != Code.OK]
            assert refused
            for call in refused:
                assert call.code() == code
                assert "Exceeds maximum queue size" in call.details()
                trailers = dict(call.trailing_metadata())
                millis = trailers["retry-after-ms"]
                assert 10 <= int(millis) <= 60000
                assert trailers["grpc-retry-pushback-ms"] == millis
                assert (f"retry after {millis} ms" in call.details()) == (
                    code == Code.RESOURCE_EXHAUSTED
                )


@pytest.mark.parametrize(
    "flag",
    ["--queue_full_status=later", "--max_connection_age=5", "--max_connection_age_grace=-1s"],
)
def test_a_flag_that_cannot_be_meant_is_refused(repository, flag):
    server = serve(repository, 4, 1, flag)
    assert server.spawn().wait(60) == 2
    assert flag.split("=")[0] in server.log() and "expected" in server.log()
