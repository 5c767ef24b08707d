"""tritonclient, unmodified, uses the server as it uses Triton's."""

from __future__ import annotations

import asyncio
import queue

import harness
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

NAME = "mnist_diagonal16"


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(server.url) as connected:
        yield connected


def digit_input(images: np.ndarray) -> list[triton.InferInput]:
    tensor = triton.InferInput("input", list(images.shape), "FP32")
    tensor.set_data_from_numpy(images)
    return [tensor]


def test_health(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(NAME)
    assert client.is_model_ready(NAME, "1")
    assert not client.is_model_ready("no_such_model")
    assert not client.is_model_ready(NAME, "99")


def test_server_metadata(client):
    metadata = client.get_server_metadata()
    assert metadata.name == "espalier"
    assert metadata.version
    assert "statistics" in metadata.extensions


def test_model_metadata_agrees_with_the_config(client):
    metadata = client.get_model_metadata(NAME)
    assert list(metadata.versions) == ["1"]
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
        ("input", "FP32", [-1, 784])
    ]
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.outputs] == [
        ("logits", "FP32", [-1, 10])
    ]
    config = client.get_model_config(NAME).config
    assert config.name == NAME
    assert config.max_batch_size > 0
    assert [(t.name, list(t.dims)) for t in config.input] == [("input", [784])]
    assert [(t.name, list(t.dims)) for t in config.output] == [("logits", [10])]
    assert config.parameters["plan"].string_value


def test_repository_index(client):
    index = client.get_model_repository_index()
    states = {(model.name, model.version): model.state for model in index.models}
    assert states[NAME, "1"] == "READY"


def test_infer(client, digits):
    result = client.infer(NAME, digit_input(digits.images[:3]), request_id="42")
    assert result.get_response().id == "42"
    assert result.get_response().model_version == "1"
    logits = result.as_numpy("logits")
    assert logits.shape == (3, 10) and logits.dtype == np.float32


def test_infer_with_requested_output_and_parameters(client, digits):
    result = client.infer(
        NAME,
        digit_input(digits.images[:1]),
        outputs=[triton.InferRequestedOutput("logits")],
        model_version="1",
        priority=1,
        timeout=10_000_000,
        parameters={"trace": "abc", "share": 0.5, "flag": True},
    )
    assert result.as_numpy("logits").shape == (1, 10)


def test_async_infer(client, digits):
    answers: queue.Queue = queue.Queue()
    for i in range(20):
        client.async_infer(
            NAME,
            digit_input(digits.images[i : i + 1]),
            callback=lambda result, error, i=i: answers.put((i, result, error)),
        )
    together = client.infer(NAME, digit_input(digits.images[:20])).as_numpy("logits")
    for _ in range(20):
        i, result, error = answers.get(timeout=30)
        assert error is None
        np.testing.assert_allclose(result.as_numpy("logits")[0], together[i], rtol=1e-4, atol=1e-4)


def test_aio_infer(server, digits):
    async def ask() -> np.ndarray:
        async with triton_aio.InferenceServerClient(server.url) as client:
            assert await client.is_server_ready()
            results = await asyncio.gather(
                *(client.infer(NAME, digit_input(digits.images[i : i + 4])) for i in range(8))
            )
            return np.stack([result.as_numpy("logits") for result in results])

    assert asyncio.run(ask()).shape == (8, 4, 10)


def test_statistics_count_every_request(client, digits):
    def statistics():
        return client.get_inference_statistics(NAME, "1").model_stats[0]

    before = statistics()
    for _ in range(5):
        client.infer(NAME, digit_input(digits.images[:2]))
    with pytest.raises(InferenceServerException):
        client.infer(NAME, digit_input(digits.images[:2, :10]))
    after = statistics()
    assert (after.name, after.version) == (NAME, "1")
    assert after.inference_count - before.inference_count == 10
    assert 1 <= after.execution_count - before.execution_count <= 5
    assert after.inference_stats.success.count - before.inference_stats.success.count == 5
    assert after.inference_stats.success.ns > before.inference_stats.success.ns
    assert after.inference_stats.fail.count - before.inference_stats.fail.count == 1
    assert after.inference_stats.queue.count - before.inference_stats.queue.count == 5
    assert after.inference_stats.compute_infer.ns > before.inference_stats.compute_infer.ns
    assert after.last_inference > 0


def test_statistics_of_all_models(client):
    names = {model.name for model in client.get_inference_statistics().model_stats}
    assert NAME in names and len(names) >= 5


def test_a_request_compressed_by_the_client_is_read_where_that_is_allowed(client, digits):
    plain = client.infer(NAME, digit_input(digits.images[:8])).as_numpy("logits")
    with harness.Espalierd(harness.MODELS, "--accept_compressed") as trusting:
        with triton.InferenceServerClient(trusting.url) as packing:
            for algorithm in ("gzip", "deflate"):
                packed = packing.infer(
                    NAME, digit_input(digits.images[:8]), compression_algorithm=algorithm
                )
                np.testing.assert_allclose(packed.as_numpy("logits"), plain, rtol=1e-5)
    with pytest.raises(InferenceServerException, match="gzip"):
        client.infer(NAME, digit_input(digits.images[:8]), compression_algorithm="gzip")


def test_an_error_reaches_the_exception(client, digits):
    with pytest.raises(InferenceServerException) as error:
        client.infer("no_such_model", digit_input(digits.images[:1]))
    assert error.value.status() == "StatusCode.NOT_FOUND"
    assert "no_such_model" in error.value.message()


def test_shared_memory_is_refused_with_the_flag_that_allows_it(client):
    for flag, call in (
        ("--allow_system_shared_memory", client.get_system_shared_memory_status),
        ("--allow_cuda_shared_memory", client.get_cuda_shared_memory_status),
    ):
        with pytest.raises(InferenceServerException) as error:
            call()
        assert error.value.status() == "StatusCode.UNIMPLEMENTED"
        assert flag in error.value.message()
