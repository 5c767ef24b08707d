"""grpc.aio with nothing above it: concurrency, cancellation and deadlines, unary and on streams."""

from __future__ import annotations

import asyncio

import grpc
import harness
import numpy as np
import pytest
import serving
from tritonclient.grpc import service_pb2, service_pb2_grpc

NAME = "mnist_dense"


def request(images: np.ndarray, request_id: str = "") -> service_pb2.ModelInferRequest:
    made = service_pb2.ModelInferRequest(model_name=NAME, id=request_id)
    made.inputs.add(name="input", datatype="FP32", shape=images.shape)
    made.raw_input_contents.append(images.tobytes())
    return made


def logits_of(response: service_pb2.ModelInferResponse) -> np.ndarray:
    return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(-1, 10)


def slow_request(request_id: str = "") -> service_pb2.ModelInferRequest:
    made = service_pb2.ModelInferRequest(model_name="slow", id=request_id)
    made.inputs.add(name="x", datatype="FP32", shape=harness.SLOW_INPUT.shape)
    made.raw_input_contents.append(harness.SLOW_INPUT.tobytes())
    return made


async def with_stub(url: str, ask):
    async with grpc.aio.insecure_channel(url) as channel:
        return await ask(service_pb2_grpc.GRPCInferenceServiceStub(channel))


def test_unary_and_stream_answer_the_same(server, digits):
    async def ask(stub):
        alone = await asyncio.gather(
            *(stub.ModelInfer(request(digits.images[i : i + 1])) for i in range(64))
        )
        call = stub.ModelStreamInfer()
        streamed = {}
        for begin in range(0, 64, 8):  # eight at a time
            for i in range(begin, begin + 8):
                await call.write(request(digits.images[i : i + 1], str(i)))
            for _ in range(8):
                answer = (await call.read()).infer_response
                streamed[int(answer.id)] = logits_of(answer)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK
        return np.concatenate([logits_of(a) for a in alone]), streamed

    alone, streamed = asyncio.run(with_stub(server.url, ask))
    assert sorted(streamed) == list(range(64))
    for i, logits in streamed.items():
        np.testing.assert_allclose(logits[0], alone[i], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    (root / "slow/1").mkdir(parents=True)
    (root / "slow/1/model.onnx").write_bytes(harness.slow_model())
    with harness.Espalierd(root) as server:
        yield server


async def counts(stub) -> tuple[int, int]:
    """Executions and failures."""
    answer = await stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name="slow"))
    return answer.model_stats[0].execution_count, answer.model_stats[0].inference_stats.fail.count


async def eventually(holds) -> None:
    for _ in range(1200):
        if await holds():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come true in time")


async def settled(server: harness.Espalierd, stub) -> tuple[int, int]:
    """The counts, once nothing is in flight."""

    async def idle() -> bool:
        return await asyncio.to_thread(serving.in_flight, server) == 0

    await eventually(idle)
    return await counts(stub)


def test_cancelled_requests_that_wait_are_not_executed(slow_server):
    async def ask(stub):
        before = sum(await counts(stub))
        first = stub.ModelInfer(slow_request())
        calls = [stub.ModelInfer(slow_request()) for _ in range(11)]

        async def come() -> bool:
            answered = sum(await counts(stub)) - before  # first: none is counted twice
            return answered + await asyncio.to_thread(serving.in_flight, slow_server) == 12

        await eventually(come)
        for call in calls:
            call.cancel()
        codes = [await call.code() for call in calls]
        return await first.code(), codes, await settled(slow_server, stub), before

    first, codes, (executed, failed), before = asyncio.run(with_stub(slow_server.url, ask))
    assert first == grpc.StatusCode.OK
    assert set(codes) <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.OK}
    assert codes.count(grpc.StatusCode.CANCELLED) >= 3
    assert executed + failed == before + 12 and failed >= 3, (executed, failed)


def test_the_deadline_of_a_stream_ends_it_and_what_waits_is_not_executed(slow_server):
    async def ask(stub):
        before = await counts(stub)
        requests = [slow_request(str(i)) for i in range(16)]
        # The server has them by then, and has not run them all.
        call = stub.ModelStreamInfer(iter(requests), timeout=1)
        code = await call.code()
        after = await settled(slow_server, stub)
        return code, after[1] - before[1], (await stub.ModelInfer(slow_request())).outputs

    code, failed, outputs = asyncio.run(with_stub(slow_server.url, ask))
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert failed >= 3 and outputs
