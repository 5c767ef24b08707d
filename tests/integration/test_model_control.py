"""Models under the control of clients: --model_control_mode=explicit, through tritonclient."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import espalier
import grpc
import harness
import numpy as np
import pytest
import serving
import tritonclient.grpc as triton
from onnx import TensorProto
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

EXPLICIT = "--model_control_mode=explicit"
# How often each of how many threads loads and unloads; the full number takes minutes.
FULL = os.environ.get("ESPALIER_SLOW_TESTS") == "1"
CHURN_THREADS, CHURN_ROUNDS = (32, 200) if FULL else (8, 12)
LOAD_SECONDS = 120  # loads work in the background, and tests share the machine


@pytest.fixture
def start(repository):
    """Starts a server over models, with clients of both kinds."""
    running = []

    def make(*flags: str, **models: dict):
        server = harness.Espalierd(repository(**models), EXPLICIT, *flags).__enter__()
        clients = triton.InferenceServerClient(server.url), espalier.Client(server.url, timeout=60)
        running.extend([*reversed(clients), server])
        return server, *clients

    yield make
    for thing in running:
        thing.__exit__(None, None, None)


def load(client: triton.InferenceServerClient, name: str, **kwargs: object) -> None:
    client.load_model(name, client_timeout=LOAD_SECONDS, **kwargs)


def index_of(client: triton.InferenceServerClient) -> dict[tuple[str, str], tuple[str, str]]:
    models = client.get_model_repository_index().models
    return {(model.name, model.version): (model.state, model.reason) for model in models}


def refused(call, *args: object, **kwargs: object) -> tuple[str, str]:
    """Returns code and message of the error."""
    with pytest.raises(InferenceServerException) as error:
        call(*args, **kwargs)
    return error.value.status(), error.value.message()


def test_starts_empty_loads_serves_and_unloads(start):
    _, client, ours = start(m={"1": serving.scaling_model(2)}, other={"1": b"not a model"})
    assert client.is_server_ready()
    assert not client.is_model_ready("m")
    assert index_of(client)["m", "1"][0] == "UNKNOWN"
    load(client, "m")
    assert client.is_model_ready("m") and client.is_model_ready("m", "1")
    assert serving.factor_of(ours, "m") == 2
    assert index_of(client)["m", "1"] == ("READY", "")
    client.unload_model("m")
    assert not client.is_model_ready("m")
    with pytest.raises(espalier.InferenceError) as error:
        serving.factor_of(ours, "m")
    assert "'m'" in error.value.message
    serving.eventually(lambda: index_of(client)["m", "1"] == ("UNAVAILABLE", "unloaded"))
    load(client, "m")
    assert serving.factor_of(ours, "m") == 2


def test_models_to_load_at_start(start):
    models = {name: {"1": serving.scaling_model(1)} for name in ("a", "b", "c")}
    _, client, _ = start("--load_model=a,c", **models)
    assert [client.is_model_ready(name) for name in models] == [True, False, True]


def test_a_star_loads_all_at_start(start):
    models = {name: {"1": serving.scaling_model(1)} for name in ("a", "b")}
    _, client, _ = start("--load_model=*", **models)
    assert [client.is_model_ready(name) for name in models] == [True, True]


def test_a_model_to_load_at_start_that_is_not_there_stops_the_server(repository):
    server = harness.Espalierd(repository(a={"1": b""}), EXPLICIT, "--load_model=nowhere")
    assert server.spawn().wait(60) == 1
    assert "'nowhere'" in server.log()


@pytest.mark.parametrize(
    "flags",
    [
        ("--model_control_mode=sometimes",),
        ("--load_model=a",),
        ("--repository_poll_interval=5", "--model_control_mode=poll"),
        ("--repository_poll_interval=1ms", "--model_control_mode=poll"),
    ],
)
def test_flags_that_cannot_be_meant_exit_with_two(flags):
    server = harness.Espalierd(harness.MODELS, *flags)
    assert server.spawn().wait(60) == 2
    assert flags[0].split("=")[0].strip("-") in server.log()


def test_without_explicit_mode_loads_are_refused_as_triton_does(server):
    with triton.InferenceServerClient(server.url) as client:
        for call in (client.load_model, client.unload_model):
            code, message = refused(call, "mnist_dense")
            assert code == "StatusCode.UNAVAILABLE"
            assert "explicit model load / unload is not allowed if polling is enabled" in message
        assert client.is_model_ready("mnist_dense")


def test_versions_with_other_names_are_ignored(start):
    model = serving.scaling_model(1)
    files = {version: model for version in ("1", "02", "x", "-3", "1a")}
    _, client, _ = start(m={**files, "config.pbtxt": "version_policy { all {} }"})
    load(client, "m")
    assert [key for key in index_of(client) if key[0] == "m"] == [("m", "1")]


def test_version_policies(start):
    models = {str(number): serving.scaling_model(number) for number in (1, 2, 3)}
    _, client, ours = start(m=models)
    load(client, "m")
    assert serving.factor_of(ours, "m") == 3
    assert "version_policy" in index_of(client)["m", "1"][1]
    for policy, ready in (
        ({"all": {}}, {"1", "2", "3"}),
        ({"specific": {"versions": [1, 2]}}, {"1", "2"}),
        ({"latest": {"num_versions": 2}}, {"2", "3"}),
    ):
        load(client, "m", config=json.dumps({"version_policy": policy}))
        assert {v for (_, v), (state, _) in index_of(client).items() if state == "READY"} == ready
        assert serving.factor_of(ours, "m") == int(max(ready))


def test_a_new_version_takes_over_without_a_failed_request(start, tmp_path):
    server, client, _ = start(m={"1": serving.scaling_model(1)})
    load(client, "m")
    with serving.Traffic(server.url, "m") as traffic:
        for number in range(2, 6):
            serving.write(
                tmp_path / f"models/m/{number}/model.onnx", serving.scaling_model(number)
            )
            load(client, "m")
            before = [len(own) for own in traffic.answers]
            serving.eventually(
                lambda: all(len(own) > n + 1 for own, n in zip(traffic.answers, before))
            )
            assert all(own[-1] == (number, number) for own in traffic.answers)
    assert traffic.errors == []
    for own in traffic.answers:
        assert own == sorted(own), "versions only ever go up"
        assert all(version == factor for version, factor in own)


def test_new_content_of_a_version_takes_over_without_a_failed_request(start, tmp_path):
    server, client, ours = start(m={"1": serving.scaling_model(1)})
    load(client, "m")
    with serving.Traffic(server.url, "m") as traffic:
        for factor in (2, 3, 4):
            serving.write(tmp_path / "models/m/1/model.onnx", serving.scaling_model(factor))
            load(client, "m")
            assert serving.factor_of(ours, "m") == factor
    assert traffic.errors == []
    for own in traffic.answers:
        assert own == sorted(own) and {version for version, _ in own} == {1}


def test_a_failed_load_keeps_what_serves_and_says_why(start, tmp_path):
    server, client, ours = start(m={"1": serving.scaling_model(1)})
    load(client, "m")
    with serving.Traffic(server.url, "m", threads=2) as traffic:
        serving.write(tmp_path / "models/m/2/model.onnx", serving.scaling_model(2)[:60])
        code, message = refused(load, client, "m")
        assert code == "StatusCode.INVALID_ARGUMENT"
        assert message.startswith("failed to load 'm': version 2: ") and "model.onnx" in message
        state, reason = index_of(client)["m", "2"]
        assert state == "UNAVAILABLE" and "model.onnx" in reason
        serving.write(tmp_path / "models/m/1/model.onnx", b"broken")
        (tmp_path / "models/m/2/model.onnx").unlink()
        (tmp_path / "models/m/2").rmdir()
        refused(load, client, "m")
        state, reason = index_of(client)["m", "1"]
        assert state == "READY" and reason.startswith("still served")
        assert serving.factor_of(ours, "m") == 1
        serving.write(tmp_path / "models/m/2/model.onnx", serving.scaling_model(2))
        load(client, "m")
        assert serving.factor_of(ours, "m") == 2
    assert traffic.errors == []


def test_loading_what_did_not_change_does_nothing(start, tmp_path):
    server, client, _ = start(m={"1": serving.scaling_model(1)})
    load(client, "m")
    load(client, "m")
    os.utime(tmp_path / "models/m/1/model.onnx")
    load(client, "m")
    assert server.log().count("model loading") == 1
    serving.write(tmp_path / "models/m/1/model.onnx", serving.scaling_model(2))
    load(client, "m")
    assert server.log().count("model loading") == 2


def test_a_config_comes_with_the_load(start):
    _, client, _ = start(m={"1": serving.scaling_model(1)})
    load(client, "m", config=json.dumps({"max_batch_size": 3, "backend": "onnxruntime"}))
    assert client.get_model_config("m").config.max_batch_size == 3
    code, message = refused(load, client, "m", config='{"max_batch_size": "many"}')
    assert code == "StatusCode.INVALID_ARGUMENT" and "config" in message
    assert client.get_model_config("m").config.max_batch_size == 3
    load(client, "m")
    assert client.get_model_config("m").config.max_batch_size == 256


def external(model) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights/w.bin")


def test_files_come_with_the_load(start, tmp_path):
    _, client, ours = start(m={"1": serving.scaling_model(1)})
    load(client, "m")
    code, message = refused(load, client, "m", files={"file:1/model.onnx": b"x"})
    assert code == "StatusCode.INVALID_ARGUMENT" and "'config'" in message
    _, message = refused(load, client, "m", config="{}", files={"file:1/other.onnx": b"x"})
    assert "no 'model.onnx' in the files given for 'm'/1" in message
    _, message = refused(load, client, "m", config='{"max_batch_size": oops}')
    assert "Near '{\"max_batch_size\": oops}'" in message and "\\n" not in message
    load(client, "m", config="{}", files={"file:5/model.onnx": serving.scaling_model(7)})
    assert (ours.infer("m", np.ones((1, 4), np.float32)).version, serving.factor_of(ours, "m")) == (
        "5",
        7,
    )
    files = {
        "file:1/model.onnx": harness.perceptron([4, 4], edit=external),
        "file:1/weights/w.bin": (9 * np.eye(4, dtype=np.float32)).tobytes(),
    }
    load(client, "guest", config="{}", files=files)
    assert serving.factor_of(ours, "guest") == 9
    client.unload_model("guest")
    serving.eventually(lambda: ("guest", "1") not in index_of(client))
    load(client, "m")
    assert serving.factor_of(ours, "m") == 1
    assert sorted(path.name for path in (tmp_path / "models").rglob("*")) == ["1", "m", "model.onnx"]


@pytest.mark.parametrize(
    "file",
    [
        "file:1/../../../etc/passwd",
        "file:1//etc/passwd",
        "file:1/./x",
        "file:../m/1/model.onnx",
        "file:0/model.onnx",
        "file:01/model.onnx",
        "file:model.onnx",
        "file:1/",
        "file:1/.hidden",
        "file:1/" + "x" * 2000,
        "another_parameter",
    ],
)
def test_files_with_path_tricks_are_refused(start, file):
    _, client, _ = start(m={"1": serving.scaling_model(1)})
    code, message = refused(load, client, "m", config="{}", files={file: b"x"})
    assert code == "StatusCode.INVALID_ARGUMENT" and file[:20] in message
    assert not client.is_model_ready("m")


@pytest.mark.parametrize(
    "name", ["../m", "..", ".", "a/../m", "/etc", "m/1", "m\\1", "m\0", "", "x" * 300]
)
def test_names_with_path_tricks_are_refused(start, name):
    _, client, _ = start(m={"1": serving.scaling_model(1)})
    code, message = refused(load, client, name)
    assert code == "StatusCode.INVALID_ARGUMENT" and "failed to load" in message
    assert refused(client.unload_model, name)[0] == "StatusCode.INVALID_ARGUMENT"


def test_unknown_models(start):
    _, client, _ = start(m={"1": serving.scaling_model(1)})
    code, message = refused(load, client, "nothing")
    assert code == "StatusCode.NOT_FOUND" and "'nothing'" in message
    assert refused(client.unload_model, "nothing")[0] == "StatusCode.INVALID_ARGUMENT"
    assert {name for name, _ in index_of(client)} == {"m"}


def test_a_model_that_was_added_after_the_start_can_be_loaded(start, tmp_path):
    _, client, ours = start(m={"1": serving.scaling_model(1)})
    serving.write(tmp_path / "models/late/1/model.onnx", serving.scaling_model(3))
    load(client, "late")
    assert serving.factor_of(ours, "late") == 3


def stub_of(server: harness.Espalierd):
    return service_pb2, service_pb2_grpc.GRPCInferenceServiceStub(
        grpc.insecure_channel(server.url)
    )


def test_single_versions_are_loaded_and_unloaded(start):
    server, client, ours = start(m={str(v): serving.scaling_model(v) for v in (1, 2)})
    load(client, "m")
    pb2, stub = stub_of(server)
    parameter = {"version": pb2.ModelRepositoryParameter(string_param="1")}
    stub.RepositoryModelLoad(
        pb2.RepositoryModelLoadRequest(model_name="m", parameters=parameter), timeout=LOAD_SECONDS
    )
    assert (serving.factor_of(ours, "m"), serving.factor_of(ours, "m", version="1")) == (2, 1)
    parameter = {
        "version": pb2.ModelRepositoryParameter(int64_param=2),
        "unload_dependents": pb2.ModelRepositoryParameter(bool_param=True),
    }
    stub.RepositoryModelUnload(
        pb2.RepositoryModelUnloadRequest(model_name="m", parameters=parameter), timeout=60
    )
    assert serving.factor_of(ours, "m") == 1
    for value in ("0", "x", "-1", ""):
        with pytest.raises(grpc.RpcError) as error:
            wrong = {"version": pb2.ModelRepositoryParameter(string_param=value)}
            stub.RepositoryModelLoad(
                pb2.RepositoryModelLoadRequest(model_name="m", parameters=wrong), timeout=60
            )
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "version" in error.value.details()


KSERVE = """
import sys
import grpc
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb2, grpc_predict_v2_pb2_grpc as rpc

stub = rpc.GRPCInferenceServiceStub(grpc.insecure_channel(sys.argv[1]))
answer = stub.RepositoryModelLoad(pb2.RepositoryModelLoadRequest(model_name="m"), timeout=120)
assert (answer.model_name, answer.isLoaded) == ("m", True), answer
assert stub.ModelReady(pb2.ModelReadyRequest(name="m"), timeout=60).ready
answer = stub.RepositoryModelUnload(pb2.RepositoryModelUnloadRequest(model_name="m"), timeout=60)
assert (answer.model_name, answer.isUnloaded) == ("m", True), answer
assert not stub.ModelReady(pb2.ModelReadyRequest(name="m"), timeout=60).ready
print("fine")
"""


def test_the_form_of_kserves_sdk(start):
    server, _, _ = start(m={"1": serving.scaling_model(1)})
    done = subprocess.run(
        [sys.executable, "-c", KSERVE, server.url], capture_output=True, text=True, timeout=200
    )
    assert done.stdout == "fine\n", done.stderr[-3000:]


def test_a_repository_name_beside_a_model_name_is_unimplemented(start):
    server, _, _ = start(m={"1": serving.scaling_model(1)})
    pb2, stub = stub_of(server)
    with pytest.raises(grpc.RpcError) as error:
        stub.RepositoryModelLoad(
            pb2.RepositoryModelLoadRequest(model_name="m", repository_name="r"), timeout=60
        )
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def large_model(factor: float) -> bytes:
    """64 MiB of weights, none of them zero, that scale by `factor`."""
    weights = 1e-30 * (1 + np.random.default_rng(3).random((4096, 4096), np.float32))
    np.fill_diagonal(weights, factor)
    return harness.perceptron([4096, 4096], lambda out, size: weights)


def test_memory_returns_to_where_it_was(start):
    server, client, ours = start(m={"1": large_model(2)}, small={"1": serving.scaling_model(1)})
    load(client, "small")

    def cycle() -> tuple[int, int]:
        load(client, "m")
        assert serving.factor_of(ours, "m", size=4096) == 2
        loaded = serving.resident_bytes(server)
        client.unload_model("m")
        serving.eventually(lambda: index_of(client)["m", "1"][1] == "unloaded")
        time.sleep(0.2)
        return loaded, serving.resident_bytes(server)

    cycle()  # code and tables that are touched once
    _, baseline = cycle()
    for _ in range(5):
        loaded, after = cycle()
    print(f"unloaded {baseline >> 20} MiB, five cycles on {loaded >> 20}, then {after >> 20}")
    if not harness.SANITIZED:  # the allocator of those keeps what is freed
        assert loaded - after > 32 << 20, "half of what the weights took"
        assert after - baseline < 32 << 20


def test_loads_work_in_the_background_and_what_serves_does_not(start):
    """A thread's niceness is inherited by the threads that it makes."""
    server, client, ours = start("--threads=4", m={"1": large_model(2)})
    load(client, "m")
    assert serving.factor_of(ours, "m", size=4096) == 2
    load(client, "m", config='{"max_batch_size": 8, "instance_group": [{"count": 2}]}')
    for _ in range(20):
        ours.infer("m", np.ones((8, 4096), np.float32))
    niceness: dict[str, set[int]] = {}
    for task in pathlib.Path(f"/proc/{server.process.pid}/task").iterdir():
        name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(") ")
        niceness.setdefault(name, set()).add(int(fields.split()[16]))
    behind = {name for name, found in niceness.items() if found != {os.getpriority(os.PRIO_PROCESS, 0)}}
    assert behind == {"loader"}, niceness
    assert {"run m", "control"} <= niceness.keys()


def test_loads_and_unloads_from_many_threads_under_traffic(start):
    models = {name: {"1": serving.scaling_model(n + 1)} for n, name in enumerate("abcd")}
    server, client, ours = start("--load_model=stays", stays={"1": serving.scaling_model(9)}, **models)
    unexpected: list[str] = []

    def churn(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with triton.InferenceServerClient(server.url) as own:
            for _ in range(CHURN_ROUNDS):
                name = "abcd"[rng.integers(4)]
                try:
                    if rng.random() < 0.5:
                        load(own, name)
                    else:
                        own.unload_model(name)
                except InferenceServerException as error:
                    if error.status() != "StatusCode.ABORTED":  # an unload overtook the load
                        unexpected.append(str(error))

    with serving.Traffic(server.url, "stays", threads=2) as traffic:
        threads = [threading.Thread(target=churn, args=(n,)) for n in range(CHURN_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240 if FULL else 200)
            assert not thread.is_alive(), "a load or unload is stuck"
    assert unexpected == [] and traffic.errors == []
    assert {answer for own in traffic.answers for answer in own} == {(1, 9)}
    for name, factor in zip("abcd", (1, 2, 3, 4)):
        load(client, name)
        assert serving.factor_of(ours, name) == factor
        client.unload_model(name)
    serving.eventually(
        lambda: {index_of(client)[name, "1"][1] for name in "abcd"} == {"unloaded"}
    )
    assert "model loaded" in server.log()


def delayed(factor: float, millis: int) -> dict[str, bytes | str]:
    """A scaling model whose executions take their time."""
    setting = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{millis}" }} }}'
    return {"1": serving.scaling_model(factor), "config.pbtxt": setting}


def test_neither_slow_inference_nor_slow_loads_hold_up_the_other(start, tmp_path):
    server, client, ours = start(m=delayed(1, 6000), small={"1": serving.scaling_model(3)})
    load(client, "m")
    load(client, "small")
    slow: list[float] = []
    asking = threading.Thread(target=lambda: slow.append(serving.factor_of(ours, "m")))
    asking.start()
    time.sleep(1)
    (tmp_path / "models/m/config.pbtxt").unlink()
    serving.write(tmp_path / "models/m/1/model.onnx", serving.scaling_model(2))
    load(client, "m")
    assert slow == [], "the load did not wait for the request"
    assert serving.factor_of(ours, "m") == 2
    serving.write(tmp_path / "models/large/1/model.onnx", harness.slow_model())
    loading = threading.Thread(target=load, args=(client, "large"))
    loading.start()
    answered = 0
    while loading.is_alive():
        began = time.monotonic()
        assert serving.factor_of(ours, "small") == 3
        assert time.monotonic() - began < 10 or harness.SANITIZED
        answered += 1
    assert answered > 2, "more than one that waited for the load and one after it"
    asking.join(60)
    assert slow == [1], "the request was answered from where it began"


WARM_UP = """
model_warmup {
  name: "zeros" batch_size: 4 count: 2
  inputs { key: "x" value { data_type: TYPE_FP32 dims: 4 zero_data: true } }
}
model_warmup {
  name: "file" batch_size: 2
  inputs { key: "x" value { data_type: TYPE_FP32 dims: 4 input_data_file: "item.bin" } }
}
"""


def test_a_warm_up_runs_before_the_version_serves(start, tmp_path):
    delay = delayed(1, 300)
    delay["config.pbtxt"] += WARM_UP
    server, client, ours = start(m=delay)
    code, message = refused(load, client, "m")
    assert code == "StatusCode.NOT_FOUND" and "model_warmup 'file'" in message
    assert "item.bin" in message
    serving.write(tmp_path / "models/m/warmup/item.bin", np.ones(4, np.float32).tobytes())
    began = time.monotonic()
    load(client, "m")
    assert time.monotonic() - began > 0.9, "three runs of 300 ms"
    (stats,) = client.get_inference_statistics("m").model_stats
    assert (stats.inference_count, stats.execution_count) == (0, 0)
    assert serving.factor_of(ours, "m") == 1


def test_sigterm_while_loading_exits_in_time(start, tmp_path):
    endless = delayed(1, 300)
    serving.write(tmp_path / "models/m/warmup/item.bin", np.ones(4, np.float32).tobytes())
    endless["config.pbtxt"] += WARM_UP.replace("count: 2", "count: 1000")
    server, client, _ = start("--drain_timeout=2s", m=endless)
    outcome: list[str] = []

    def ask() -> None:
        outcome.append(refused(load, client, "m")[0])

    asking = threading.Thread(target=ask)
    asking.start()
    serving.eventually(lambda: "model loading" in server.log())
    started = time.monotonic()
    server.process.terminate()
    code = server.process.wait(60)
    assert time.monotonic() - started < 20 or harness.SANITIZED
    assert code == 0, server.log()
    asking.join(60)
    assert outcome in (["StatusCode.CANCELLED"], ["StatusCode.UNAVAILABLE"])
