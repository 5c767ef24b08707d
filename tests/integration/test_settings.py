"""TraceSetting and LogSettings, through tritonclient."""

from __future__ import annotations

import json
import pathlib
import queue
import time
from typing import Callable

import harness
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

NAME, OTHER = "mnist_dense", "mnist_diagonal16"


@pytest.fixture
def traced(tmp_path):
    """A server that may trace, a client, and the file."""
    file = tmp_path / "trace.json"
    with harness.Espalierd(harness.MODELS, f"--trace_file={file}") as server:
        with triton.InferenceServerClient(server.url) as client:
            yield server, client, file


def infer(client, model: str = NAME, count: int = 1, width: int = 784, **options) -> None:
    tensor = triton.InferInput("input", [1, width], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, width), np.float32))
    for i in range(count):
        client.infer(model, [tensor], request_id=f"request {i}", **options)


def settings_of(client, model: str | None = None) -> dict[str, list[str]]:
    answer = client.get_trace_settings(model_name=model)
    return {name: list(setting.value) for name, setting in answer.settings.items()}


def eventually(holds: Callable[[], bool]) -> bool:
    for _ in range(1200):
        if holds():
            return True
        time.sleep(0.05)
    return False


def read(file: pathlib.Path) -> list[dict]:
    """The array in a trace file; it is whole whenever it is read between two writes."""
    for _ in range(6000):
        try:
            return json.loads(file.read_text()) if file.read_text() else []
        except json.JSONDecodeError:
            time.sleep(0.01)
    raise AssertionError(file.read_text())


def test_traces_hold_the_phases_of_requests_in_their_order(traced):
    server, client, file = traced
    assert "trace" in client.get_server_metadata().extensions
    answer = client.update_trace_settings(
        settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
    )
    assert list(answer.settings["trace_level"].value) == ["TIMESTAMPS"]
    infer(client, count=3)
    with pytest.raises(InferenceServerException):
        infer(client, width=10)
    assert eventually(lambda: len(read(file)) == 8)
    traces = read(file)
    for about, stamps in zip(traces[::2], traces[1::2]):
        assert about["id"] == stamps["id"]
        assert about["model_name"] == NAME and about["model_version"] == 1
        names = [stamp["name"] for stamp in stamps["timestamps"]]
        nanos = [stamp["ns"] for stamp in stamps["timestamps"]]
        assert nanos == sorted(nanos), "each moment is after the one before"
        if about["status"] == "OK":
            assert names == [
                "REQUEST_START",
                "QUEUE_START",
                "COMPUTE_START",
                "COMPUTE_INPUT_END",
                "COMPUTE_OUTPUT_START",
                "COMPUTE_END",
                "REQUEST_END",
            ]
        else:
            assert about["status"] == "INVALID_ARGUMENT"
            assert names == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert [about["request_id"] for about in traces[::2]] == [
        "request 0",
        "request 1",
        "request 2",
        "request 0",
    ]


def test_requests_of_streams_are_traced_too(traced):
    _, client, file = traced
    client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error))
    tensor = triton.InferInput("input", [1, 784], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 784), np.float32))
    client.async_stream_infer(NAME, [tensor], request_id="on a stream")
    assert answers.get(timeout=30) is None
    client.stop_stream()
    assert eventually(lambda: len(read(file)) == 2)
    assert read(file)[0]["request_id"] == "on a stream"


def test_a_model_has_settings_of_its_own_and_loses_them(traced):
    _, client, file = traced
    client.update_trace_settings(
        model_name=OTHER, settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "2"}
    )
    assert settings_of(client)["trace_level"] == ["OFF"]
    assert settings_of(client, NAME)["trace_level"] == ["OFF"]
    assert settings_of(client, OTHER)["trace_rate"] == ["2"]
    infer(client, NAME, 5)
    infer(client, OTHER, 6)
    assert eventually(lambda: len(read(file)) == 6)
    client.update_trace_settings(
        model_name=OTHER, settings={"trace_level": None, "trace_rate": None}
    )
    assert settings_of(client, OTHER)["trace_level"] == ["OFF"]
    assert settings_of(client, OTHER)["trace_rate"] == ["1000"]


def test_the_count_ends_tracing_and_files_are_numbered(traced):
    server, client, file = traced
    client.update_trace_settings(
        settings={
            "trace_level": ["TIMESTAMPS"],
            "trace_rate": "1",
            "trace_count": "5",
            "log_frequency": "2",
        }
    )
    infer(client, count=20)
    server.process.terminate()
    assert server.process.wait(60) == 0
    lengths = [len(read(file.with_name(f"{file.name}.{i}"))) for i in range(3)]
    assert lengths == [4, 4, 2]
    assert not file.with_name(f"{file.name}.3").exists()


@pytest.mark.parametrize(
    "settings, code, message",
    [
        ({"trace_file": "/tmp/elsewhere"}, "UNIMPLEMENTED", "--trace_file"),
        ({"trace_level": ["TENSORS"]}, "INVALID_ARGUMENT", "expected OFF or TIMESTAMPS"),
        ({"trace_rate": "0"}, "INVALID_ARGUMENT", "'0', expected one number from 1"),
        ({"trace_rate": "x"}, "INVALID_ARGUMENT", "'x'"),
        ({"trace_count": "-2"}, "INVALID_ARGUMENT", "'-2', expected one number from -1"),
        ({"log_frequency": "9" * 30}, "INVALID_ARGUMENT", "expected one number from 0"),
        ({"colour": "red"}, "INVALID_ARGUMENT", "unknown trace setting 'colour'"),
    ],
)
def test_a_wrong_trace_setting_is_refused(traced, settings, code, message):
    _, client, _ = traced
    with pytest.raises(InferenceServerException, match=message) as error:
        client.update_trace_settings(settings=settings)
    assert error.value.status() == f"StatusCode.{code}"
    with pytest.raises(InferenceServerException, match="no_such_model") as error:
        client.update_trace_settings(model_name="no_such_model", settings={"trace_rate": "1"})
    assert error.value.status() == "StatusCode.NOT_FOUND"


def test_without_a_file_nothing_can_be_traced(server):
    with triton.InferenceServerClient(server.url) as client:
        assert settings_of(client)["trace_level"] == ["OFF"]
        assert "trace" not in client.get_server_metadata().extensions
        with pytest.raises(InferenceServerException, match="--trace_file") as error:
            client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
        assert error.value.status() == "StatusCode.UNIMPLEMENTED"


def test_a_trace_file_that_cannot_be_written_is_found_out_at_the_start(tmp_path):
    server = harness.Espalierd(harness.MODELS, f"--trace_file={tmp_path}/none/trace.json")
    assert server.spawn().wait(60) == 1
    assert "--trace_file" in server.log() and "No such file" in server.log()


def test_log_settings_change_what_is_logged(tmp_path):
    with harness.Espalierd(harness.MODELS) as server:
        with triton.InferenceServerClient(server.url) as client:
            before = client.get_log_settings().settings
            assert before["log_info"].bool_param and before["log_error"].bool_param
            assert before["log_verbose_level"].uint32_param == 0
            assert before["log_file"].string_param == ""
            with pytest.raises(InferenceServerException):
                infer(client, "no_such_model")
            assert "rpc failed" not in server.log()
            after = client.update_log_settings({"log_verbose_level": 1, "log_info": False})
            assert after.settings["log_verbose_level"].uint32_param == 1
            with pytest.raises(InferenceServerException):
                infer(client, "no_such_model")
            assert eventually(lambda: "rpc failed" in server.log())
            client.update_log_settings({"log_format": "json", "log_verbose_level": 2})
            infer(client)
            assert eventually(lambda: '"event":"rpc answered"' in server.log())
            client.update_log_settings({"log_verbose_level": 0})
            time.sleep(0.2)
            length = len(server.log())
            infer(client, count=5)
            time.sleep(0.2)
            assert len(server.log()) == length


@pytest.mark.parametrize(
    "settings, code, message",
    [
        ({"log_file": "/tmp/elsewhere"}, "UNIMPLEMENTED", "stderr"),
        ({"log_format": "xml"}, "INVALID_ARGUMENT", "got string_param 'xml'"),
        ({"log_colour": True}, "INVALID_ARGUMENT", "unknown log setting 'log_colour'"),
        ({"log_info": None}, "INVALID_ARGUMENT", "'log_info': expected bool_param, got nothing"),
    ],
)
def test_a_wrong_log_setting_is_refused(server, settings, code, message):
    with triton.InferenceServerClient(server.url) as client:
        with pytest.raises(InferenceServerException, match=message) as error:
            client.update_log_settings(settings)
        assert error.value.status() == f"StatusCode.{code}"
        assert client.get_log_settings().settings["log_info"].bool_param
