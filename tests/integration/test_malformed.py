"""Every malformed variant of every RPC gets the agreed code and a message with expected and got.

The codes are those of CONTRIBUTING.md. Inference requests are sent both ways: alone, and on a
stream, where the same text comes in the message and the stream goes on.
"""

from __future__ import annotations

import grpc
import harness
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

NAME = "mnist_dense"
Code = grpc.StatusCode
SERVICE = "/inference.GRPCInferenceService/"


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(server.url, [("grpc.max_send_message_length", -1)]) as connected:
        yield connected


@pytest.fixture(scope="module")
def stub(channel):
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


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


def with_parameter(key: str, field: str, value) -> service_pb2.ModelInferRequest:
    return edited(lambda made: setattr(made.parameters[key], field, value))


def in_field(field: str, values: list, datatype: str) -> service_pb2.ModelInferRequest:
    """A request with 784 typed elements in the field."""

    def edit(made):
        del made.raw_input_contents[:]
        made.inputs[0].datatype = datatype
        getattr(made.inputs[0].contents, field).extend(values * 784)

    return edited(edit)


def with_output_parameter(key: str, value: int) -> service_pb2.ModelInferRequest:
    def edit(made):
        made.outputs.add(name="logits").parameters[key].int64_param = value

    return edited(edit)


def set_both(made):
    made.inputs[0].contents.fp32_contents.extend([0.5] * 784)


def add_typed_field(made):
    made.inputs[0].contents.int_contents.append(1)


INFERENCE = {
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
    "dimensions whose product overflows": (
        shaped(2**33, 2**33, values=784),
        Code.INVALID_ARGUMENT,
        r"expected \[-1, 784\], got \[8589934592, 8589934592\]",
    ),
    "typed dimensions whose product overflows": (
        edited(lambda r: r.inputs[0].shape.__setitem__(slice(None), [2**40, 2**40]), typed()),
        Code.INVALID_ARGUMENT,
        "input 'input'",
    ),
    "negative typed dimension": (
        edited(lambda r: r.inputs[0].shape.__setitem__(slice(None), [-1, 784]), typed()),
        Code.INVALID_ARGUMENT,
        "input 'input'",
    ),
    "the most negative dimension": (
        shaped(1, -(2**63), values=784),
        Code.INVALID_ARGUMENT,
        r"got \[1, -9223372036854775808\]",
    ),
    "no datatype": (
        edited(lambda r: r.inputs[0].ClearField("datatype")),
        Code.INVALID_ARGUMENT,
        "data-type is ''",
    ),
    "no input name": (
        edited(lambda r: r.inputs[0].ClearField("name")),
        Code.INVALID_ARGUMENT,
        "unexpected inference input ''",
    ),
    "an input name of 100 KB": (
        edited(lambda r: setattr(r.inputs[0], "name", "n" * 100_000)),
        Code.INVALID_ARGUMENT,
        r"unexpected inference input 'n+\.\.\.'",
    ),
    "a name with control characters": (
        edited(lambda r: setattr(r, "model_name", "m\n\x1b[31m\0")),
        Code.NOT_FOUND,
        r"'m\\n\\x1b\[31m\\x00'",
    ),
    "1025 inputs": (
        edited(lambda r: [r.inputs.add(name=str(i)) for i in range(1024)]),
        Code.INVALID_ARGUMENT,
        "more than 1024",
    ),
    "1025 outputs": (
        edited(lambda r: [r.outputs.add(name=str(i)) for i in range(1025)]),
        Code.INVALID_ARGUMENT,
        "more than 1024",
    ),
    "1025 raw contents": (
        edited(lambda r: r.raw_input_contents.extend([b""] * 1024)),
        Code.INVALID_ARGUMENT,
        "more than 1024",
    ),
    "raw content empty": (
        edited(lambda r: r.raw_input_contents.__setitem__(0, b"")),
        Code.INVALID_ARGUMENT,
        "takes 3136 bytes, got 0",
    ),
    "integers for floats": (
        in_field("int_contents", [1], "FP32"),
        Code.INVALID_ARGUMENT,
        "'FP32' travels in fp32_contents, got int_contents",
    ),
    "floats for integers": (
        in_field("fp32_contents", [1.0], "INT8"),
        Code.INVALID_ARGUMENT,
        "'INT8' travels in int_contents, got fp32_contents",
    ),
    "half precision typed": (
        in_field("fp32_contents", [1.0], "FP16"),
        Code.INVALID_ARGUMENT,
        "'FP16' has no typed form",
    ),
    "strings for numbers": (
        in_field("bytes_contents", [b"1"], "BYTES"),
        Code.INVALID_ARGUMENT,
        "data-type is 'BYTES', but model 'mnist_dense' expects 'FP32'",
    ),
    "negative timeout": (
        with_parameter("timeout", "int64_param", -5),
        Code.INVALID_ARGUMENT,
        "'timeout': expected .* at least 0, got int64_param -5",
    ),
    "a timeout of text": (
        with_parameter("timeout", "string_param", "soon"),
        Code.INVALID_ARGUMENT,
        "'timeout': expected .*, got string_param 'soon'",
    ),
    "a timeout that overflows": (
        with_parameter("timeout", "uint64_param", 2**64 - 1),
        Code.INVALID_ARGUMENT,
        "'timeout': expected .* at least 0",
    ),
    "a priority of true": (
        with_parameter("priority", "bool_param", True),
        Code.INVALID_ARGUMENT,
        "'priority': expected .*, got bool_param",
    ),
    "a sequence id of half": (
        with_parameter("sequence_id", "double_param", 0.5),
        Code.INVALID_ARGUMENT,
        "'sequence_id': expected .*, got double_param",
    ),
    "a sequence that starts with one": (
        with_parameter("sequence_start", "int64_param", 1),
        Code.INVALID_ARGUMENT,
        "'sequence_start': expected bool_param, got int64_param 1",
    ),
    "negative classes": (
        with_output_parameter("classification", -1),
        Code.INVALID_ARGUMENT,
        "at least 1, got int64_param -1",
    ),
    "negative size in shared memory": (
        shared(region="r", byte_size=-1),
        Code.INVALID_ARGUMENT,
        "'shared_memory_byte_size': expected int64_param of at least 0, got int64_param -1",
    ),
    "shared memory without a name": (
        shared(region="", byte_size=1),
        Code.INVALID_ARGUMENT,
        "'shared_memory_region': expected string_param with the name of a region",
    ),
}


@pytest.mark.parametrize("case", INFERENCE)
def test_a_wrong_request_is_refused(stub, case):
    wrong, code, message = INFERENCE[case]
    with pytest.raises(grpc.RpcError, match=f"(?is){message}") as error:
        stub.ModelInfer(wrong, timeout=30)
    assert error.value.code() == code
    assert error.value.details()


def test_on_a_stream_every_wrong_request_is_refused_in_its_message(stub):
    requests = []
    for i, (wrong, _, _) in enumerate(INFERENCE.values()):
        copy = service_pb2.ModelInferRequest.FromString(wrong.SerializeToString())
        copy.id = str(i)
        requests += [copy, request(id="right")]
    alone = {}
    for i, (wrong, _, _) in enumerate(INFERENCE.values()):
        with pytest.raises(grpc.RpcError) as error:
            stub.ModelInfer(wrong, timeout=30)
        alone[i] = error.value.details()
    right, malformed, refused = 0, [], {}
    for answer in stub.ModelStreamInfer(iter(requests), timeout=60):
        if answer.infer_response.id == "right":
            assert not answer.error_message and answer.infer_response.outputs
            right += 1
        elif answer.infer_response.id:
            refused[int(answer.infer_response.id)] = answer.error_message
        else:  # a message that could not be read, its id included
            malformed.append(answer.error_message)
    assert right == len(INFERENCE) == len(refused) + len(malformed)
    for i, text in refused.items():
        assert text == alone[i]
    for text in malformed:
        assert text.startswith("malformed ModelInferRequest: ")


def test_the_request_that_the_others_vary_is_right(stub):
    assert stub.ModelInfer(request(), timeout=30).outputs[0].shape == [1, 10]
    raw = request()
    raw.raw_input_contents[0] = np.full(784, 0.5, np.float32).tobytes()
    answers = [stub.ModelInfer(made, timeout=30).raw_output_contents for made in (typed(), raw)]
    assert answers[0] == answers[1], "typed contents equal raw ones"


# Names that lead elsewhere if they become a path, or break a log, a label or a header.
NAMES = [
    "..",
    ".",
    "../models",
    "../../etc/passwd",
    "/etc/passwd",
    f"../models/{NAME}",
    f"{NAME}/",
    f"{NAME}/../{NAME}",
    f"./{NAME}",
    f"{NAME}/1",
    f"{NAME}\0",
    f"{NAME}\n",
    f" {NAME}",
    NAME.upper(),
    "%2e%2e%2f",
    "\\..\\..",
    "\x1b[31mred\r\n",
    "ж" * 3000,
    "x" * 100_000,
]
# RPC: its field for a name, and the code for one that is unknown.
NAMED = {
    "ModelMetadata": ("name", Code.NOT_FOUND),
    "ModelConfig": ("name", Code.NOT_FOUND),
    "ModelStatistics": ("name", Code.INVALID_ARGUMENT),
    "TraceSetting": ("model_name", Code.NOT_FOUND),
    "ModelInfer": ("model_name", Code.NOT_FOUND),
}


@pytest.mark.parametrize("method", NAMED)
def test_a_name_is_never_a_path(stub, method):
    field, code = NAMED[method]
    for name in NAMES:
        made = getattr(service_pb2, f"{method}Request")(**{field: name})
        with pytest.raises(grpc.RpcError) as error:
            getattr(stub, method)(made, timeout=30)
        assert error.value.code() == code, name
        text = error.value.details()
        assert "is not found" in text and len(text) < 2100, name
        assert text.isprintable(), name


@pytest.mark.parametrize("name", ["", *NAMES])
def test_a_model_of_an_odd_name_is_not_ready(stub, name):
    assert not stub.ModelReady(service_pb2.ModelReadyRequest(name=name), timeout=30).ready


VERSIONS = {
    "x": Code.INVALID_ARGUMENT,
    "-1": Code.INVALID_ARGUMENT,
    "1.0": Code.INVALID_ARGUMENT,
    "0x1": Code.INVALID_ARGUMENT,
    " 1": Code.INVALID_ARGUMENT,
    "1\0": Code.INVALID_ARGUMENT,
    "9" * 30: Code.INVALID_ARGUMENT,
    "../1": Code.INVALID_ARGUMENT,
    "9223372036854775807": Code.NOT_FOUND,
}


@pytest.mark.parametrize(
    "method", ["ModelMetadata", "ModelConfig", "ModelStatistics", "ModelInfer"]
)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_is_the_number_of_one_that_exists(stub, method, version):
    code = VERSIONS[version]
    if method == "ModelInfer":
        made = request(model_version=version)
    else:
        made = getattr(service_pb2, f"{method}Request")(name=NAME, version=version)
    with pytest.raises(grpc.RpcError, match="version") as error:
        getattr(stub, method)(made, timeout=30)
    assert error.value.code() == (Code.INVALID_ARGUMENT if method == "ModelStatistics" else code)


def test_ready_of_a_version_that_is_no_number_is_refused(stub):
    with pytest.raises(grpc.RpcError, match="version string 'x'") as error:
        stub.ModelReady(service_pb2.ModelReadyRequest(name=NAME, version="x"), timeout=30)
    assert error.value.code() == Code.INVALID_ARGUMENT


UNARY = [
    method.name
    for method in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    if not method.client_streaming
]
# No message of any RPC: a cut field, a length behind the end, a number of eleven bytes, a field 0,
# a group that does not end, a wire type that does not exist.
GARBAGE = [
    b"\x0a",
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\x0a" + b"\xff" * 11,
    b"\0\0",
    b"\x0b",
    b"\x3f",
]


@pytest.fixture(scope="module")
def explicit_channel():
    """To a server that also loads and unloads on request."""
    with harness.Espalierd(harness.MODELS, "--model_control_mode=explicit") as server:
        with grpc.insecure_channel(server.url) as connected:
            yield connected


@pytest.mark.parametrize("method", UNARY)
def test_bytes_that_are_no_message_are_refused_by_name(explicit_channel, method):
    call = explicit_channel.unary_unary(SERVICE + method)
    for garbage in GARBAGE:
        with pytest.raises(grpc.RpcError) as error:
            call(garbage, timeout=30)
        assert error.value.code() in (Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED), garbage
        assert method in error.value.details(), garbage


def test_garbage_on_a_stream_is_refused_in_its_message(channel):
    call = channel.stream_stream(
        SERVICE + "ModelStreamInfer",
        response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
    )
    answers = list(call(iter([*GARBAGE, request().SerializeToString()]), timeout=30))
    texts = [answer.error_message for answer in answers]
    assert len(texts) == len(GARBAGE) + 1
    assert texts.count("") == 1, "the right one"
    assert sum(text.startswith("malformed ModelInferRequest: ") for text in texts) == len(GARBAGE)


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
