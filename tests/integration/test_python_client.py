"""The package `espalier`, sync and asyncio, against the running server."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys

import espalier
import grpc
import harness
import ml_dtypes
import numpy as np
import pytest
from espalier import _tensors

NAME = "mnist_diagonal16"


@pytest.fixture(scope="module")
def client(server):
    with espalier.Client(server.url) as connected:
        yield connected


def test_infer_with_a_bare_array(client, digits):
    result = client.infer(NAME, digits.images[:3])
    assert (result.model, result.version) == (NAME, "1")
    assert list(result.outputs) == ["logits"]
    assert result.output.shape == (3, 10) and result.output.dtype == np.float32
    assert result["logits"] is result.output
    result.output[0, 0] = 1  # writable


def test_infer_with_everything_named(client, digits):
    result = client.infer(
        NAME,
        {"input": digits.images[:1]},
        version="1",
        outputs=["logits"],
        request_id="r7",
        parameters={"timeout": 5_000_000, "note": "x", "share": 0.5, "flag": True},
        timeout=30,
    )
    assert result.id == "r7"


def test_an_array_that_is_not_contiguous_is_sent_as_it_looks(client, digits):
    wide = np.ascontiguousarray(np.repeat(digits.images[:4], 2, axis=1))
    np.testing.assert_array_equal(
        client.infer(NAME, wide[:, ::2]).output, client.infer(NAME, digits.images[:4]).output
    )
    np.testing.assert_array_equal(
        client.infer(NAME, np.asfortranarray(digits.images[:4])).output,
        client.infer(NAME, digits.images[:4]).output,
    )


def test_metadata_config_statistics_and_index(client):
    assert client.is_live() and client.is_ready()
    assert client.is_model_ready(NAME) and not client.is_model_ready("nothing")
    assert client.server_metadata().name == "espalier"
    metadata = client.model_metadata(NAME)
    assert metadata.inputs == (espalier.TensorMetadata("input", "FP32", (-1, 784)),)
    assert metadata.outputs == (espalier.TensorMetadata("logits", "FP32", (-1, 10)),)
    assert client.model_config(NAME).max_batch_size > 0
    assert client.statistics(NAME)[0].name == NAME
    models = {model.name: model for model in client.models()}
    assert models[NAME].ready and models[NAME].version == "1" and models[NAME].reason == ""
    assert client.models(ready_only=True)


def test_errors_have_code_and_message(client, digits):
    with pytest.raises(espalier.InferenceError) as error:
        client.infer("nothing", {"input": digits.images[:1]})
    assert error.value.code == grpc.StatusCode.NOT_FOUND
    assert "nothing" in error.value.message
    assert str(error.value).startswith("NOT_FOUND: ")
    copy = pickle.loads(pickle.dumps(error.value))
    assert (copy.code, copy.message) == (error.value.code, error.value.message)
    with pytest.raises(espalier.InferenceError, match="INVALID_ARGUMENT.*FP64.*FP32"):
        client.infer(NAME, digits.images[:1].astype(np.float64))


def test_timeouts_are_kept_per_call_and_per_client(repository):
    x = {"x": harness.SLOW_INPUT}
    with harness.Espalierd(repository(slow={"1": harness.slow_model()})) as server:
        with (
            espalier.Client(server.url) as client,
            pytest.raises(espalier.InferenceError, match="DEADLINE_EXCEEDED"),
        ):
            client.infer("slow", x, timeout=0.02)
        with espalier.Client(server.url, timeout=0.02) as client:
            with pytest.raises(espalier.InferenceError, match="DEADLINE_EXCEEDED"):
                client.infer("slow", x)
            assert client.infer("slow", x, timeout=60).output.shape == (256, 1024)

        async def ask() -> None:
            async with espalier.aio.Client(server.url) as client:
                with pytest.raises(espalier.InferenceError, match="DEADLINE_EXCEEDED"):
                    await client.infer("slow", x, timeout=0.02)
                task = asyncio.create_task(client.infer("slow", x))
                await asyncio.sleep(0.02)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert (await client.infer("slow", x)).output.shape == (256, 1024)

        asyncio.run(ask())


def test_a_server_that_is_not_there_is_unavailable():
    with espalier.Client("127.0.0.1:1", timeout=5) as client:
        with pytest.raises(espalier.InferenceError) as error:
            client.is_live()
    assert error.value.code == grpc.StatusCode.UNAVAILABLE


def test_wrong_arguments_are_refused_before_anything_is_sent():
    for url in ("", "http://localhost:8000"):
        with pytest.raises(ValueError, match="host:port"):
            espalier.Client(url)
    client = espalier.Client("127.0.0.1:1")
    with pytest.raises(TypeError, match="complex"):
        client.infer("m", {"x": np.zeros(1, complex)})
    with pytest.raises(TypeError, match="a parameter is"):
        client.infer("m", {"x": np.zeros(1)}, parameters={"p": []})
    with pytest.raises(ValueError, match="FP8"):
        client.infer("m", {"x": espalier.Typed(np.zeros(1), "FP8")})


def test_metadata_is_sent_with_every_call():
    seen = []

    class Recorder(grpc.GenericRpcHandler):
        def service(self, call):
            seen.append(dict(call.invocation_metadata)["authorization"])
            return None

    from concurrent import futures

    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Recorder()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with espalier.Client(f"127.0.0.1:{port}", metadata=[("authorization", "Bearer t")]) as client:
        with pytest.raises(espalier.InferenceError, match="UNIMPLEMENTED"):
            client.is_live()
    server.stop(None)
    assert seen == ["Bearer t"]


def test_threads_share_a_client(client, digits):
    from concurrent import futures

    together = client.infer(NAME, digits.images[:64]).output
    with futures.ThreadPoolExecutor(8) as pool:
        apart = list(
            pool.map(lambda i: client.infer(NAME, digits.images[i : i + 1]).output[0], range(64))
        )
    np.testing.assert_allclose(np.stack(apart), together, rtol=1e-4, atol=1e-4)


def test_asyncio_client(server, digits):
    async def use() -> None:
        async with espalier.aio.Client(server.url) as client:
            assert (
                await client.is_live()
                and await client.is_ready()
                and await client.is_model_ready(NAME)
            )
            assert (await client.server_metadata()).name == "espalier"
            assert (await client.model_metadata(NAME)).inputs[0].name == "input"
            assert (await client.model_config(NAME)).name == NAME
            assert (await client.statistics(NAME))[0].version == "1"
            assert NAME in [model.name for model in await client.models()]
            results = await asyncio.gather(
                *(client.infer(NAME, digits.images[i : i + 2]) for i in range(10))
            )
            assert all(result.output.shape == (2, 10) for result in results)
            with pytest.raises(espalier.InferenceError, match="NOT_FOUND"):
                await client.infer("nothing", {"x": digits.images[:1]})

    asyncio.run(use())


@pytest.mark.parametrize("other", ["tritonclient.grpc", "kserve"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_it_shares_a_process_with_other_clients(server, other, ours_first):
    """Both are imported and used, in either order (tritonclient and kserve exclude each other)."""
    order = ["espalier", other] if ours_first else [other, "espalier"]
    theirs = {
        "tritonclient.grpc": "tritonclient.grpc.InferenceServerClient(url).is_server_ready()",
        "kserve": "asyncio.run(ask(url))",
    }[other]
    script = f"""
import asyncio, sys
import {order[0]}
import {order[1]}
import numpy as np
url = sys.argv[1]
async def ask(url):
    return await kserve.InferenceGRPCClient(url=url).is_server_ready()
with espalier.Client(url) as client:
    assert client.infer({NAME!r}, np.zeros((1, 784), np.float32)).output.shape == (1, 10)
assert {theirs}
print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, server.url], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "fine\n", done.stderr[-2000:]


ARRAYS = {
    **{
        dtype: np.array([[1, 0], [1, 1]]).astype(dtype)
        for dtype in (
            "?",
            "u1",
            "u2",
            "u4",
            "u8",
            "i1",
            "i2",
            "i4",
            "i8",
            "f2",
            "f4",
            "f8",
            ml_dtypes.bfloat16,
        )
    },
    "big-endian": np.array([1.5, -2.0], ">f4"),
    "scalar": np.float32(3),
    "empty": np.zeros((0, 4), np.float32),
    "bytes": np.array([b"", b"ab\0", b"\xff"], object),
    "str": np.array(["ä", "b"], object),
    "S": np.array([b"a", b"bc"]),
    "U": np.array(["a", "bc"]),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_survive_encoding_and_decoding(kind):
    array = ARRAYS[kind]
    datatype, shape, raw = _tensors.encode(array)
    decoded = _tensors.decode(datatype, shape, raw)
    assert decoded.shape == np.shape(array)
    expected = [
        x.encode() if isinstance(x, str) else x for x in np.asarray(array).reshape(-1).tolist()
    ]
    assert decoded.reshape(-1).tolist() == expected
    if datatype == "BYTES":
        assert all(isinstance(element, bytes) for element in decoded)


def test_bfloat16_travels_as_bits_too():
    bits = np.array([0x3F80, 0xC000], np.uint16)
    assert _tensors.encode(espalier.Typed(bits, "BF16")) == ("BF16", [2], b"\x80\x3f\x00\xc0")
    assert _tensors.decode("BF16", [2], b"\x80\x3f\x00\xc0").tolist() == [1.0, -2.0]
    with pytest.raises(TypeError, match="2 bytes"):
        _tensors.encode(espalier.Typed(bits.astype(np.uint32), "BF16"))


@pytest.mark.parametrize(
    ("datatype", "shape", "raw"),
    [
        ("FP32", [2], b"1234567"),
        ("FP32", [3], b"12345678"),
        ("FP8", [1], b"1"),
        ("BYTES", [1], b"\1\0\0"),
        ("BYTES", [1], b"\5\0\0\0abc"),
        ("BYTES", [2], b"\1\0\0\0a"),
    ],
)
def test_answers_that_contradict_themselves_are_refused(datatype, shape, raw):
    with pytest.raises(ValueError):
        _tensors.decode(datatype, shape, raw)
