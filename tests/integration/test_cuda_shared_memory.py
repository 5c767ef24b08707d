"""CUDA shared memory, through tritonclient, where the GPU is host memory (tests/testing/fake_ipc.h): a handle names a region
of POSIX shared memory."""

from __future__ import annotations

import base64
import os
import shutil
import struct
import subprocess
import uuid

import harness
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

MODULE = harness.BIN.parent / "lib/libespalier_fake_cuda_module.so"
CHECK = harness.BIN / "cuda_shared_memory_gpu_check"
NAME = "mnist_block16"
FLAGS = ("--device=cuda", f"--cuda_module={MODULE}", "--allow_cuda_shared_memory")

pytestmark = pytest.mark.skipif(not MODULE.exists(), reason="built without tests")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """One model with small batches, for the fake GPU computes slowly."""
    folder = tmp_path_factory.mktemp("models")
    (folder / NAME / "1").mkdir(parents=True)
    shutil.copy(harness.model_path(NAME), folder / NAME / "1")
    (folder / NAME / "config.pbtxt").write_text("max_batch_size: 8\n")
    return folder


@pytest.fixture(scope="module")
def server(repository):
    with harness.Espalierd(repository, *FLAGS, "--allow_system_shared_memory") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(server.url) as connected:
        yield connected


class Memory:
    """A client's memory on the fake GPU."""

    def __init__(self, byte_size: int) -> None:
        self.byte_size = byte_size
        self.name = f"region {uuid.uuid4()}"
        self.key = f"/espalier_{uuid.uuid4().hex}"

    def __enter__(self) -> Memory:
        self.handle = shm.create_shared_memory_region(self.name, self.key, self.byte_size)
        return self

    def __exit__(self, *exc_info: object) -> None:
        shm.destroy_shared_memory_region(self.handle)

    def raw_handle(self, device: int = 0, owner: int = 0) -> bytes:
        """As tritonclient.utils.cuda_shared_memory.get_raw_handle: base64 of the 64 bytes."""
        raw = struct.pack("8sii48s", b"fakeipc", owner or os.getpid(), device, self.key.encode())
        return base64.b64encode(raw)


@pytest.fixture
def memory(client):
    """Eight images, and 4096 bytes for what comes of them."""
    with Memory(8 * 784 * 4 + 4096) as made:
        client.register_cuda_shared_memory(made.name, made.raw_handle(), 0, made.byte_size)
        yield made
        client.unregister_cuda_shared_memory()


def shared_input(memory: Memory, batch: int, offset: int = 0) -> triton.InferInput:
    tensor = triton.InferInput("input", [batch, 784], "FP32")
    tensor.set_shared_memory(memory.name, batch * 784 * 4, offset)
    return tensor


def plain_input(images: np.ndarray) -> triton.InferInput:
    tensor = triton.InferInput("input", list(images.shape), "FP32")
    tensor.set_data_from_numpy(images)
    return tensor


def shared_output(memory: Memory, byte_size: int, offset: int) -> triton.InferRequestedOutput:
    output = triton.InferRequestedOutput("logits")
    output.set_shared_memory(memory.name, byte_size, offset)
    return output


def test_inputs_and_outputs_in_memory_of_the_client_on_the_gpu(client, memory, digits):
    x, end = digits.images[:8], 8 * 784 * 4
    shm.set_shared_memory_region(memory.handle, [x])
    expected = client.infer(NAME, [plain_input(x)]).as_numpy("logits")
    result = client.infer(NAME, [shared_input(memory, 8)], outputs=[shared_output(memory, 320, end)])
    output = result.get_output("logits")
    assert list(output.shape) == [8, 10] and output.datatype == "FP32"
    assert output.parameters["shared_memory_region"].string_param == memory.name
    got = shm.get_contents_as_numpy(memory.handle, np.float32, [8, 10], offset=end)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    # One side in the region, at an offset, and the other in the message.
    second = client.infer(NAME, [shared_input(memory, 2, 3 * 784 * 4)])
    np.testing.assert_allclose(second.as_numpy("logits"), expected[3:5], rtol=1e-4, atol=1e-4)
    client.infer(NAME, [plain_input(x[5:6])], outputs=[shared_output(memory, 40, end + 1024)])
    got = shm.get_contents_as_numpy(memory.handle, np.float32, [1, 10], offset=end + 1024)
    np.testing.assert_allclose(got, expected[5:6], rtol=1e-4, atol=1e-4)


def test_system_memory_is_copied_by_the_gpu_and_a_file_cut_short_fails_its_own_request(client, digits):
    x, end = digits.images[:8], 8 * 784 * 4
    expected = client.infer(NAME, [plain_input(x)]).as_numpy("logits")
    with Memory(end + 4096) as memory:
        client.register_system_shared_memory(memory.name, memory.key, memory.byte_size)
        shm.set_shared_memory_region(memory.handle, [x])
        client.infer(NAME, [shared_input(memory, 8)], outputs=[shared_output(memory, 320, end)])
        got = shm.get_contents_as_numpy(memory.handle, np.float32, [8, 10], offset=end)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
        os.truncate(f"/dev/shm{memory.key}", 1000)
        for arguments in (
            {"inputs": [shared_input(memory, 1)]},
            {"inputs": [plain_input(x[:1])], "outputs": [shared_output(memory, 40, 0)]},
        ):
            with pytest.raises(InferenceServerException, match="which has only 1000 bytes") as error:
                client.infer(NAME, **arguments)
            assert error.value.status() == "StatusCode.INVALID_ARGUMENT"
        client.unregister_system_shared_memory(memory.name)
    np.testing.assert_allclose(client.infer(NAME, [plain_input(x)]).as_numpy("logits"), expected, rtol=1e-4, atol=1e-4)


def test_status_lists_what_is_registered_and_names_are_of_both_kinds_together(client, memory):
    assert "cuda_shared_memory" in client.get_server_metadata().extensions
    regions = client.get_cuda_shared_memory_status(memory.name).regions
    assert regions[memory.name].device_id == 0
    assert regions[memory.name].byte_size == memory.byte_size
    with pytest.raises(InferenceServerException, match="is registered already") as error:
        client.register_system_shared_memory(memory.name, memory.key, 16)
    assert error.value.status() == "StatusCode.ALREADY_EXISTS"
    for call in (client.get_system_shared_memory_status, client.unregister_system_shared_memory):
        with pytest.raises(InferenceServerException) as error:
            call(memory.name)
        assert error.value.status() == "StatusCode.NOT_FOUND"
        assert "is registered as CUDA shared memory, not system" in error.value.message()
    client.unregister_system_shared_memory()
    assert client.get_cuda_shared_memory_status().regions
    client.unregister_cuda_shared_memory()
    assert not client.get_cuda_shared_memory_status().regions
    with pytest.raises(InferenceServerException, match="unable to find") as error:
        client.infer(NAME, [shared_input(memory, 1)])
    assert error.value.status() == "StatusCode.NOT_FOUND"


REGISTRATIONS = {
    "more than is mapped": ({"byte_size": 10**6}, "byte_size is 1000000, but its handle maps only 29184"),
    "nothing": ({"byte_size": 0}, "byte_size 0, expected at least 1"),
    "no name": ({"name": ""}, "has 0 bytes, expected 1 to 255"),
    "no handle": ({"raw_handle": b""}, "a handle of 0 bytes, expected the 64"),
    "garbage": ({"raw_handle": base64.b64encode(bytes(64))}, "GPU 0 .*invalid argument"),
    "another GPU": ({"device_id": 1}, "device_id is 1, expected a GPU of this server: 0"),
    "no GPU": ({"device_id": -1}, "device_id is -1"),
}


@pytest.mark.parametrize("case", REGISTRATIONS)
def test_a_wrong_registration_is_refused(client, memory, case):
    changed, message = REGISTRATIONS[case]
    right = {
        "name": "r",
        "raw_handle": memory.raw_handle(),
        "device_id": 0,
        "byte_size": memory.byte_size,
    }
    with pytest.raises(InferenceServerException, match=message) as error:
        client.register_cuda_shared_memory(**{**right, **changed})
    assert error.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_a_handle_of_the_server_itself_is_refused(server, client, memory):
    handle = memory.raw_handle(owner=server.process.pid)
    with pytest.raises(InferenceServerException, match="invalid device context"):
        client.register_cuda_shared_memory("own", handle, 0, memory.byte_size)


RANGES = {
    "input behind the end": ("input", 3136, 8 * 784 * 4 + 4096 - 3135, "too few for 3136 bytes"),
    "input offset overflows": ("input", 3136, 2**63 - 1, "too few for 3136 bytes"),
    "input too small": ("input", 3135, 0, "takes 3136 bytes, got 3135"),
    "output behind the end": ("output", 40, 8 * 784 * 4 + 4096 - 39, "too few for 40 bytes"),
    "output too small": ("output", 39, 0, "takes 40 bytes, but shared_memory_byte_size is 39"),
}


@pytest.mark.parametrize("case", RANGES)
def test_a_wrong_range_is_refused(client, memory, digits, case):
    side, byte_size, offset, message = RANGES[case]
    tensor, output = plain_input(digits.images[:1]), triton.InferRequestedOutput("logits")
    if side == "input":
        tensor = triton.InferInput("input", [1, 784], "FP32")
    (tensor if side == "input" else output).set_shared_memory(memory.name, byte_size, offset)
    with pytest.raises(InferenceServerException, match=message) as error:
        client.infer(NAME, [tensor], outputs=[output])
    assert error.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_a_client_in_another_process_passes_its_checks(server):
    """The program that is run beside a server on a machine with a GPU."""
    command = [CHECK, f"--url={server.url}", f"--model={NAME}", f"--module={MODULE}", "--requests=50"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "PASS: 0 failed" and len(lines) > 30, done.stdout


def test_without_a_gpu_it_is_refused_with_the_reason(repository):
    handle = base64.b64encode(bytes(64))
    with harness.Espalierd(repository, "--allow_cuda_shared_memory", "--device=cpu") as server:
        with triton.InferenceServerClient(server.url) as client:
            assert "cuda_shared_memory" not in client.get_server_metadata().extensions
            for call in (
                lambda: client.register_cuda_shared_memory("r", handle, 0, 16),
                client.unregister_cuda_shared_memory,
                client.get_cuda_shared_memory_status,
            ):
                with pytest.raises(InferenceServerException, match="it has no GPU") as error:
                    call()
                assert error.value.status() == "StatusCode.UNIMPLEMENTED"


def test_it_is_off_unless_it_is_allowed(repository):
    handle = base64.b64encode(bytes(64))
    with harness.Espalierd(repository, *FLAGS[:2]) as server:
        with triton.InferenceServerClient(server.url) as client:
            assert "cuda_shared_memory" not in client.get_server_metadata().extensions
            with pytest.raises(InferenceServerException) as error:
                client.register_cuda_shared_memory("r", handle, 0, 16)
            assert error.value.status() == "StatusCode.UNIMPLEMENTED"
            assert "--allow_cuda_shared_memory" in error.value.message()
