"""Every datatype that the protocol has, raw and typed, in and out."""

from __future__ import annotations

import grpc
import harness
import ml_dtypes
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc

T = onnx.TensorProto
# Datatype: type of ONNX, dtype of numpy, field of typed contents, values [2, 3].
TYPES = {
    "BOOL": (T.BOOL, bool, "bool_contents", [[True, False, True], [False, False, True]]),
    "UINT8": (T.UINT8, np.uint8, "uint_contents", [[0, 1, 255], [7, 128, 2]]),
    "UINT16": (T.UINT16, np.uint16, "uint_contents", [[0, 1, 65535], [7, 32768, 2]]),
    "UINT32": (T.UINT32, np.uint32, "uint_contents", [[0, 1, 2**32 - 1], [7, 2**31, 2]]),
    "UINT64": (T.UINT64, np.uint64, "uint64_contents", [[0, 1, 2**64 - 1], [7, 2**63, 2]]),
    "INT8": (T.INT8, np.int8, "int_contents", [[-128, 127, 0], [-1, 1, 2]]),
    "INT16": (T.INT16, np.int16, "int_contents", [[-(2**15), 2**15 - 1, 0], [-1, 1, 2]]),
    "INT32": (T.INT32, np.int32, "int_contents", [[-(2**31), 2**31 - 1, 0], [-1, 1, 2]]),
    "INT64": (T.INT64, np.int64, "int64_contents", [[-(2**63), 2**63 - 1, 0], [-1, 1, 2]]),
    "FP16": (T.FLOAT16, np.float16, None, [[0.5, -65504, 2**-24], [np.inf, -0.0, 1]]),
    "BF16": (T.BFLOAT16, ml_dtypes.bfloat16, None, [[0.5, -3e38, 1e-38], [np.inf, -0.0, 1]]),
    "FP32": (T.FLOAT, np.float32, "fp32_contents", [[0.1, -3e38, 1e-45], [np.inf, -0.0, np.nan]]),
    "FP64": (T.DOUBLE, np.float64, "fp64_contents", [[0.1, -1e308, 5e-324], [np.inf, -0.0, 1]]),
}


def model(onnx_type: int) -> bytes:
    """y = x and z = x as FP32, for x [N, 3] of the type."""
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Identity", ["x"], ["y"]),
            onnx.helper.make_node("Cast", ["x"], ["z"], to=T.FLOAT),
        ],
        "types",
        [info("x", onnx_type, ["N", 3])],
        [info("y", onnx_type, ["N", 3]), info("z", T.FLOAT, ["N", 3])],
    )
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()


def strings() -> bytes:
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "strings",
        [info("x", T.STRING, ["N", 3])],
        [info("y", T.STRING, ["N", 3])],
    )
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    root = tmp_path_factory.mktemp("types")
    for name, content in {"BYTES": strings(), **{n: model(t[0]) for n, t in TYPES.items()}}.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "1/model.onnx").write_bytes(content)
    with harness.Espalierd(root) as server:
        yield server.url


@pytest.fixture(scope="module")
def stub(url):
    with grpc.insecure_channel(url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def array(name: str) -> np.ndarray:
    _, dtype, _, values = TYPES[name]
    return np.array(values, dtype)


def request(name: str) -> service_pb2.ModelInferRequest:
    made = service_pb2.ModelInferRequest(model_name=name)
    made.inputs.add(name="x", datatype=name, shape=[2, 3])
    return made


def check(name: str, response: service_pb2.ModelInferResponse) -> None:
    """The answer is what went in, bit by bit, and its values as FP32."""
    expected = array(name)
    assert [output.datatype for output in response.outputs] == [name, "FP32"]
    assert response.raw_output_contents[0] == expected.tobytes()
    as_float = np.frombuffer(response.raw_output_contents[1], np.float32).reshape(2, 3)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(as_float, expected.astype(np.float32))


@pytest.mark.parametrize("name", TYPES)
def test_raw(stub, name):
    made = request(name)
    made.raw_input_contents.append(array(name).tobytes())
    check(name, stub.ModelInfer(made, timeout=30))


@pytest.mark.parametrize("name", [name for name, entry in TYPES.items() if entry[2]])
def test_typed(stub, name):
    made = request(name)
    getattr(made.inputs[0].contents, TYPES[name][2]).extend(array(name).ravel().tolist())
    check(name, stub.ModelInfer(made, timeout=30))


@pytest.mark.parametrize("name", TYPES)
def test_through_tritonclient(url, name):
    expected = array(name)
    with triton.InferenceServerClient(url) as client:
        tensor = triton.InferInput("x", [2, 3], name)
        tensor.set_data_from_numpy(expected)
        result = client.infer(name, [tensor])
        np.testing.assert_array_equal(
            result.as_numpy("y").astype(np.float64), expected.astype(np.float64)
        )


@pytest.mark.parametrize("name", ["FP16", "BF16"])
def test_half_precision_has_no_typed_form(stub, name):
    made = request(name)
    made.inputs[0].contents.fp32_contents.extend([1.0] * 6)
    with pytest.raises(grpc.RpcError, match=f"{name}.*has no typed form") as error:
        stub.ModelInfer(made, timeout=30)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_model_of_strings_is_refused_at_load_with_a_reason(stub):
    index = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=30)
    entry = next(model for model in index.models if model.name == "BYTES")
    assert entry.state == "UNAVAILABLE"
    assert "BYTES" in entry.reason or "string" in entry.reason, entry.reason


@pytest.mark.parametrize("typed", [True, False])
def test_bytes_are_read_and_refused_by_a_model_of_numbers(stub, typed):
    made = request("FP32")
    made.inputs[0].datatype = "BYTES"
    if typed:
        made.inputs[0].contents.bytes_contents.extend([b"", b"a", b"bc", b"\0", b"e", b"f"])
    else:
        made.raw_input_contents.append(b"\1\0\0\0a" * 6)
    with pytest.raises(grpc.RpcError, match="'BYTES', but model 'FP32' expects 'FP32'") as error:
        stub.ModelInfer(made, timeout=30)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
