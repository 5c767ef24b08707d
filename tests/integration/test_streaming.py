"""ModelStreamInfer through tritonclient, synchronous and asyncio, and through a bare stub."""

from __future__ import annotations

import asyncio
import queue

import grpc
import harness
import numpy as np
import pytest
import serving
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

MODELS = ("mnist_dense", "mnist_diagonal16")


def digit_input(images: np.ndarray) -> list[triton.InferInput]:
    tensor = triton.InferInput("input", list(images.shape), "FP32")
    tensor.set_data_from_numpy(images)
    return [tensor]


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(server.url) as connected:
        yield connected


def test_many_requests_for_several_models_on_one_stream(client, digits):
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for i in range(200):
        client.async_stream_infer(
            MODELS[i % 2],
            digit_input(digits.images[i : i + 1]),
            request_id=str(i),
            enable_empty_final_response=i % 3 == 0,
        )
    together = {name: client.infer(name, digit_input(digits.images[:200])) for name in MODELS}
    seen = set()
    for _ in range(200):
        result, error = answers.get(timeout=60)
        assert error is None
        response = result.get_response()
        i = int(response.id)
        seen.add(i)
        assert response.model_name == MODELS[i % 2]
        assert response.parameters["triton_final_response"].bool_param
        np.testing.assert_allclose(
            result.as_numpy("logits")[0],
            together[MODELS[i % 2]].as_numpy("logits")[i],
            rtol=1e-4,
            atol=1e-4,
        )
    client.stop_stream()
    assert seen == set(range(200)) and answers.empty()


def test_an_error_is_answered_in_its_message_and_the_stream_goes_on(client, digits):
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("no_such_model", digit_input(digits.images[:1]), request_id="1")
    _, error = answers.get(timeout=60)
    assert isinstance(error, InferenceServerException) and "no_such_model" in error.message()
    client.async_stream_infer(MODELS[0], digit_input(digits.images[:1, :100]), request_id="2")
    _, error = answers.get(timeout=60)
    assert "expected [-1, 784], got [1, 100]" in error.message()
    client.async_stream_infer(MODELS[0], digit_input(digits.images[:1]), request_id="3")
    result, error = answers.get(timeout=60)
    assert error is None and result.get_response().id == "3"
    client.stop_stream()


def test_the_client_may_ask_for_errors_to_end_the_stream(client, digits):
    answers: queue.Queue = queue.Queue()
    client.start_stream(
        lambda result, error: answers.put((result, error)), headers={"triton_grpc_error": "true"}
    )
    client.async_stream_infer("no_such_model", digit_input(digits.images[:1]))
    _, error = answers.get(timeout=60)
    assert error.status() == "StatusCode.NOT_FOUND"
    client.stop_stream()


def test_asyncio(server, digits):
    async def ask() -> list[tuple[str, int]]:
        async def requests():
            for i in range(60):
                yield {
                    "model_name": MODELS[i % 2] if i % 10 else "no_such_model",
                    "inputs": digit_input(digits.images[i : i + 2]),
                    "request_id": str(i),
                }

        got = []
        async with triton_aio.InferenceServerClient(server.url) as client:
            async for result, error in client.stream_infer(requests()):
                got.append(("error", 0) if error else ("ok", len(result.as_numpy("logits"))))
        return got

    got = asyncio.run(ask())
    assert got.count(("ok", 2)) == 54 and got.count(("error", 0)) == 6


@pytest.fixture
def slow(tmp_path):
    """A server with a slow model and a quick one."""
    for name, content in (("slow", harness.slow_model()), ("quick", harness.perceptron([4, 4]))):
        folder = tmp_path / "models" / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(content)
    with harness.Espalierd(tmp_path / "models") as server:
        with grpc.insecure_channel(server.url) as channel:
            yield server, service_pb2_grpc.GRPCInferenceServiceStub(channel)


def slow_request(request_id: str) -> service_pb2.ModelInferRequest:
    made = service_pb2.ModelInferRequest(model_name="slow", id=request_id)
    made.inputs.add(name="x", datatype="FP32", shape=harness.SLOW_INPUT.shape)
    made.raw_input_contents.append(harness.SLOW_INPUT.tobytes())
    return made


def quick_request(request_id: str) -> service_pb2.ModelInferRequest:
    made = service_pb2.ModelInferRequest(model_name="quick", id=request_id)
    made.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    made.raw_input_contents.append(bytes(16))
    return made


def statistics(stub) -> tuple[int, int]:
    """Executions and failures of the slow model."""
    answer = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name="slow"), timeout=60)
    model = answer.model_stats[0]
    return model.execution_count, model.inference_stats.fail.count


class Requests:
    """An iterator of requests that a test feeds."""

    def __init__(self, *first: service_pb2.ModelInferRequest) -> None:
        self._queue: queue.Queue = queue.Queue()
        for request in first:
            self.send(request)

    def send(self, request: service_pb2.ModelInferRequest | None) -> None:
        self._queue.put(request)

    def __iter__(self):
        return iter(self._queue.get, None)


def test_a_slow_request_does_not_hold_up_a_quick_one_for_another_model(slow):
    _, stub = slow
    requests = Requests(slow_request("slow"), quick_request("quick"), None)
    answers = [answer.infer_response.id for answer in stub.ModelStreamInfer(iter(requests))]
    assert answers == ["quick", "slow"]


def test_a_cancelled_streams_waiting_requests_are_not_executed(slow):
    server, stub = slow
    stub.ModelInfer(slow_request("warm"), timeout=60)
    executed, failed = statistics(stub)
    requests = Requests(*(slow_request(str(i)) for i in range(12)))
    call = stub.ModelStreamInfer(iter(requests))
    assert next(call).infer_response.id == "0"
    call.cancel()
    requests.send(None)
    serving.eventually(lambda: serving.in_flight(server) == 0)
    executed_now, failed_now = statistics(stub)
    assert failed_now - failed >= 3, "those that waited"
    assert executed_now - executed <= 12 - 3
    assert stub.ModelInfer(slow_request("after"), timeout=60).outputs


def test_sigterm_answers_what_was_read_and_ends_the_stream(slow):
    server, stub = slow
    requests = Requests(*(slow_request(str(i)) for i in range(3)))
    call = stub.ModelStreamInfer(iter(requests))
    assert next(call).infer_response.id == "0"
    server.process.terminate()
    assert next(call).infer_response.id == "1"
    assert next(call).infer_response.id == "2"
    with pytest.raises(grpc.RpcError) as error:
        next(call)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in error.value.details()
    requests.send(None)
    assert server.process.wait(60) == 0
