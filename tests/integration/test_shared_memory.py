"""System shared memory, through tritonclient and its own shared memory module."""

from __future__ import annotations

import json
import os
import pathlib
import queue
import threading
import uuid

import grpc
import harness
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

NAME = "mnist_dense"


@pytest.fixture(scope="module")
def server():
    with harness.Espalierd(harness.MODELS, "--allow_system_shared_memory") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(server.url) as connected:
        yield connected


class Region:
    """A client's region, registered."""

    def __init__(self, client, byte_size: int) -> None:
        self.client, self.byte_size = client, byte_size
        self.name = f"region {uuid.uuid4()}"
        self.key = f"/espalier_{uuid.uuid4().hex}"

    def __enter__(self) -> Region:
        self.handle = shm.create_shared_memory_region(self.name, self.key, self.byte_size)
        self.client.register_system_shared_memory(self.name, self.key, self.byte_size)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.client.unregister_system_shared_memory(self.name)
        shm.destroy_shared_memory_region(self.handle)

    def truncate(self, size: int) -> None:
        os.truncate(f"/dev/shm{self.key}", size)


@pytest.fixture
def regions(client):
    with Region(client, 8 * 784 * 4) as images, Region(client, 4096) as logits:
        yield images, logits


def shared_input(region: Region, batch: int, offset: int = 0) -> triton.InferInput:
    tensor = triton.InferInput("input", [batch, 784], "FP32")
    tensor.set_shared_memory(region.name, batch * 784 * 4, offset)
    return tensor


def shared_output(region: Region, byte_size: int, offset: int = 0) -> triton.InferRequestedOutput:
    output = triton.InferRequestedOutput("logits")
    output.set_shared_memory(region.name, byte_size, offset)
    return output


def plain_input(images: np.ndarray) -> triton.InferInput:
    tensor = triton.InferInput("input", list(images.shape), "FP32")
    tensor.set_data_from_numpy(images)
    return tensor


def logits_of(client, images: np.ndarray) -> np.ndarray:
    return client.infer(NAME, [plain_input(images)]).as_numpy("logits")


def test_inputs_and_outputs_in_shared_memory(client, regions, digits):
    images, logits = regions
    x = digits.images[:8]
    shm.set_shared_memory_region(images.handle, [x])
    result = client.infer(NAME, [shared_input(images, 8)], outputs=[shared_output(logits, 320)])
    output = result.get_output("logits")
    assert list(output.shape) == [8, 10] and output.datatype == "FP32"
    assert output.parameters["shared_memory_region"].string_param == logits.name
    got = shm.get_contents_as_numpy(logits.handle, np.float32, [8, 10])
    np.testing.assert_allclose(got, logits_of(client, x), rtol=1e-4, atol=1e-4)


def test_offsets_and_only_one_side_in_shared_memory(client, regions, digits):
    images, logits = regions
    x = digits.images[:8]
    shm.set_shared_memory_region(images.handle, [x])
    expected = logits_of(client, x)
    second = client.infer(NAME, [shared_input(images, 2, 3 * 784 * 4)])
    np.testing.assert_allclose(second.as_numpy("logits"), expected[3:5], rtol=1e-4, atol=1e-4)
    client.infer(NAME, [plain_input(x[:2])], outputs=[shared_output(logits, 80, 1024)])
    got = shm.get_contents_as_numpy(logits.handle, np.float32, [2, 10], offset=1024)
    np.testing.assert_allclose(got, expected[:2], rtol=1e-4, atol=1e-4)


def test_on_a_stream(client, regions, digits):
    images, logits = regions
    x = digits.images[:8]
    shm.set_shared_memory_region(images.handle, [x])
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for i in range(8):
        client.async_stream_infer(
            NAME,
            [shared_input(images, 1, i * 784 * 4)],
            outputs=[shared_output(logits, 40, i * 40)],
        )
    for _ in range(8):
        _, error = answers.get(timeout=30)
        assert error is None
    client.stop_stream()
    got = shm.get_contents_as_numpy(logits.handle, np.float32, [8, 10])
    np.testing.assert_allclose(got, logits_of(client, x), rtol=1e-4, atol=1e-4)


def test_status_lists_what_is_registered(client, regions):
    images, _ = regions
    status = client.get_system_shared_memory_status(images.name)
    region = status.regions[images.name]
    assert (region.key, region.offset, region.byte_size) == (images.key, 0, 8 * 784 * 4)
    assert len(client.get_system_shared_memory_status().regions) == 2
    with pytest.raises(InferenceServerException) as error:
        client.register_system_shared_memory(images.name, images.key, 16)
    assert error.value.status() == "StatusCode.ALREADY_EXISTS"
    client.unregister_system_shared_memory()
    assert not client.get_system_shared_memory_status().regions
    with pytest.raises(InferenceServerException) as error:
        client.infer(NAME, [shared_input(images, 1)])
    assert error.value.status() == "StatusCode.NOT_FOUND"
    assert f"unable to find shared memory region '{images.name}'" in error.value.message()


@pytest.mark.parametrize("size", [0, 100])
def test_a_client_that_truncates_its_region_gets_an_error_and_the_server_lives(
    client, regions, digits, size
):
    images, logits = regions
    images.truncate(size)
    with pytest.raises(InferenceServerException, match=f"has only {size} bytes") as error:
        client.infer(NAME, [shared_input(images, 8)])
    assert error.value.status() == "StatusCode.INVALID_ARGUMENT"
    logits.truncate(size)
    with pytest.raises(InferenceServerException, match=f"has only {size} bytes"):
        client.infer(NAME, [plain_input(digits.images[:8])], outputs=[shared_output(logits, 320)])
    assert len(logits_of(client, digits.images[:1])) == 1


def test_a_region_that_is_truncated_again_and_again_under_traffic(client, regions, digits):
    images, logits = regions
    shm.set_shared_memory_region(images.handle, [digits.images[:8]])
    done = threading.Event()

    def shake() -> None:
        while not done.is_set():
            for region in regions:
                region.truncate(0)
                region.truncate(region.byte_size)

    thread = threading.Thread(target=shake)
    thread.start()
    outcomes = {"ok": 0, "refused": 0}
    for _ in range(300):
        try:
            client.infer(NAME, [shared_input(images, 8)], outputs=[shared_output(logits, 320)])
            outcomes["ok"] += 1
        except InferenceServerException as error:
            assert error.status() == "StatusCode.INVALID_ARGUMENT", error
            outcomes["refused"] += 1
    done.set()
    thread.join()
    assert sum(outcomes.values()) == 300
    assert client.is_server_live()


def outside(tmp_path: pathlib.Path) -> str:
    path = f"/dev/shm/espalier_link_{uuid.uuid4().hex}"
    (tmp_path / "secret").write_bytes(bytes(4096))
    os.symlink(tmp_path / "secret", path)
    return path.removeprefix("/dev/shm")


REGISTRATIONS = {
    "missing": ({"key": "/espalier_no_such_key"}, "NOT_FOUND", "No such file"),
    "no key": ({"key": ""}, "INVALID_ARGUMENT", "key .* is ''"),
    "path": ({"key": "/../etc/passwd"}, "INVALID_ARGUMENT", "without '/'"),
    "folder": ({"key": "/a/b"}, "INVALID_ARGUMENT", "without '/'"),
    "parent": ({"key": "/.."}, "INVALID_ARGUMENT", "key"),
    "no name": ({"name": ""}, "INVALID_ARGUMENT", "has 0 bytes, expected 1 to 255"),
    "long name": ({"name": "n" * 300}, "INVALID_ARGUMENT", "has 300 bytes"),
    "empty": ({"byte_size": 0}, "INVALID_ARGUMENT", "byte_size 0, expected at least 1"),
    "too large": ({"byte_size": 10**6}, "INVALID_ARGUMENT", "1000000 bytes.*has only 4096 bytes"),
    "offset": ({"offset": 4096, "byte_size": 1}, "INVALID_ARGUMENT", "only 4096"),
    "overflow": ({"offset": 2**64 - 1, "byte_size": 2}, "INVALID_ARGUMENT", "only 4096"),
    "huge": ({"byte_size": 2**64 - 1}, "INVALID_ARGUMENT", "only 4096"),
    "link": ({"key": outside}, "INVALID_ARGUMENT", "symbolic link"),
}


@pytest.mark.parametrize("case", REGISTRATIONS)
def test_a_wrong_registration_is_refused(server, regions, tmp_path, case):
    changed, code, message = REGISTRATIONS[case]
    right = {"name": "r", "key": regions[1].key, "offset": 0, "byte_size": 4096}
    fields = {k: v(tmp_path) if callable(v) else v for k, v in {**right, **changed}.items()}
    try:
        with grpc.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            request = service_pb2.SystemSharedMemoryRegisterRequest(**fields)
            with pytest.raises(grpc.RpcError, match=f"(?s){message}") as error:
                stub.SystemSharedMemoryRegister(request, timeout=30)
            assert error.value.code() == grpc.StatusCode[code]
    finally:
        if case == "link":
            os.unlink(f"/dev/shm{fields['key']}")


RANGES = {
    "input behind the end": ("input", 3136, 8 * 784 * 4 - 3135, "too few for 3136 bytes"),
    "input offset overflows": ("input", 3136, 2**63 - 1, "too few for 3136 bytes"),
    "input too small": ("input", 3135, 0, "takes 3136 bytes, got 3135"),
    "input negative": ("input", -1, 0, "of at least 0, got int64_param -1"),
    "input offset negative": ("input", 3136, -4, "of at least 0, got int64_param -4"),
    "output behind the end": ("output", 4096, 1, "too few for 4096 bytes"),
    "output too small": ("output", 39, 0, "takes 40 bytes, but shared_memory_byte_size is 39"),
    "output huge": ("output", 2**62, 0, "too few"),
}


@pytest.mark.parametrize("case", RANGES)
def test_a_wrong_range_is_refused(server, regions, case):
    side, byte_size, offset, message = RANGES[case]
    made = service_pb2.ModelInferRequest(model_name=NAME)
    tensor = made.inputs.add(name="input", datatype="FP32", shape=[1, 784])
    if side == "output":
        made.raw_input_contents.append(bytes(3136))
        tensor = made.outputs.add(name="logits")
    tensor.parameters["shared_memory_region"].string_param = regions[side == "output"].name
    tensor.parameters["shared_memory_byte_size"].int64_param = byte_size
    tensor.parameters["shared_memory_offset"].int64_param = offset
    with grpc.insecure_channel(server.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        asked = service_pb2.ModelStatisticsRequest(name=NAME)
        runs = stub.ModelStatistics(asked).model_stats[0].execution_count
        with pytest.raises(grpc.RpcError, match=message) as error:
            stub.ModelInfer(made, timeout=30)
        assert stub.ModelStatistics(asked).model_stats[0].execution_count == runs
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_it_is_offered_only_where_it_is_allowed(server, client, digits):
    assert "system_shared_memory" in client.get_server_metadata().extensions
    with harness.Espalierd(harness.MODELS) as plain:
        with triton.InferenceServerClient(plain.url) as other:
            assert "system_shared_memory" not in other.get_server_metadata().extensions
            for call in (
                lambda: other.register_system_shared_memory("r", "/r", 16),
                other.unregister_system_shared_memory,
                other.get_system_shared_memory_status,
            ):
                with pytest.raises(InferenceServerException) as error:
                    call()
                assert error.value.status() == "StatusCode.UNIMPLEMENTED"
                assert "--allow_system_shared_memory" in error.value.message()


def test_a_load_whose_tensors_lie_in_shared_memory(server, client, tmp_path):
    before = set(os.listdir("/dev/shm"))
    path = tmp_path / "bench.json"
    flags = ("--shared_memory", "system", "--batch=8", "--concurrency=4", "--duration=0.5", "--warmup=0.1", f"--json={path}")
    harness.espalier("bench", NAME, f"--url={server.url}", *flags)
    level = json.loads(path.read_text())["levels"][0]
    assert level["errors"] == {} and level["ledger"]["balances"]
    assert level["server"]["inferences"] == 8 * level["server"]["requests"] > 0
    assert not client.get_system_shared_memory_status().regions
    assert set(os.listdir("/dev/shm")) <= before
