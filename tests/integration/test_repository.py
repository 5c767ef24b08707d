"""Bad models are refused with a reason, and the good ones beside them keep serving."""

from __future__ import annotations

import concurrent.futures
import os

import espalier
import grpc
import harness
import numpy as np
import pytest
from onnx import TensorProto, helper

GOOD = harness.model_path("mnist_diagonal16").read_bytes()


def perceptron(edit=None) -> bytes:
    """A small model [N, 4] -> [N, 3] of one layer, gemm_1, with weight "w4x3"; `edit` spoils it."""
    return harness.perceptron([4, 3], edit=edit)


def cycle(model):
    model.graph.node[0].input[0] = "y2"
    model.graph.node.append(helper.make_node("Relu", ["y"], ["y2"], "relu_1"))


def external(path: str):
    def edit(model):
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=path)

    return edit


def dims(*sizes: int):
    def edit(model):
        model.graph.initializer[0].dims[:] = sizes

    return edit


# What is wrong with it: (the file, what the reason must name).
BAD = {
    "empty": (b"", "model.onnx"),
    "text": (b"not a model at all", "model.onnx"),
    "truncated": (GOOD[: len(GOOD) // 2], "model.onnx"),
    "unknown_op": (
        perceptron(lambda m: setattr(m.graph.node[0], "op_type", "Foo")),
        "Foo.*gemm_1|gemm_1.*Foo",
    ),
    "negative_dims": (perceptron(dims(-3, 4)), "w4x3"),
    "huge_dims": (perceptron(dims(2**40, 2**40)), "w4x3"),
    "wrong_raw_size": (perceptron(dims(3, 5)), "w4x3"),
    "duplicate_names": (
        perceptron(lambda m: m.graph.initializer.append(m.graph.initializer[0])),
        "w4x3",
    ),
    "cycle": (perceptron(cycle), "gemm_1|relu_1"),
    "missing_input": (
        perceptron(lambda m: m.graph.node[0].input.__setitem__(1, "nowhere")),
        "nowhere",
    ),
    "shapes_that_do_not_fit": (perceptron(dims(4, 3)), "gemm_1"),
    "external_data_outside": (perceptron(external("../../../../../../etc/passwd")), "etc/passwd"),
    "external_data_absolute": (perceptron(external("/etc/passwd")), "/etc/passwd"),
    "external_data_missing": (perceptron(external("nowhere.bin")), "nowhere.bin"),
}
BAD_CONFIGS = {
    "bad_syntax": ("max_batch_size: {", "config.pbtxt"),
    "unknown_field": ("no_such_field: 1", "no_such_field"),
    "other_input": ('input { name: "picture" data_type: TYPE_FP32 dims: 784 }', "picture"),
    "other_dims": ('input { name: "input" data_type: TYPE_FP32 dims: 783 }', "783"),
    "other_type": ('input { name: "input" data_type: TYPE_FP64 dims: 784 }', "FP64"),
    "negative_batch": ("max_batch_size: -1", "max_batch_size"),
    "other_name": ('name: "another"', "another"),
    "path_in_filename": ('default_model_filename: "../../secret.onnx"', "default_model_filename"),
    "bad_setting": (
        'parameters { key: "weight_memory" value { string_value: "tiny" } }',
        "smallest, balanced, fastest",
    ),
    "no_threads": (
        'parameters { key: "threads" value { string_value: "0" } }',
        "parameter 'threads' is '0', expected 1 to ",
    ),
    "precision_that_is_not_there": (
        'parameters { key: "precision" value { string_value: "bf16" } }',
        "precision 'bf16' is not available on the CPU: expected fp32 (or leave it out)",
    ),
    "huge": ("#" + "x" * (2 << 20), "config.pbtxt"),
}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A server over all of them and a good model: its client and its index."""
    root = tmp_path_factory.mktemp("repository")

    def put(path: str, content: bytes) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)

    put("good/1/model.onnx", GOOD)
    for name, (content, _) in BAD.items():
        put(f"{name}/1/model.onnx", content)
    for name, (config, _) in BAD_CONFIGS.items():
        put(f"config_{name}/1/model.onnx", GOOD)
        put(f"config_{name}/config.pbtxt", config.encode())
    put("readme.txt", b"files beside the models are not models")
    with harness.Espalierd(root) as server, espalier.Client(server.url) as client:
        yield client, {model.name: model for model in client.models()}


def test_the_good_model_serves(index):
    client, models = index
    assert models["good"].ready
    assert client.is_ready()
    assert client.infer("good", np.zeros((2, 784), np.float32)).output.shape == (2, 10)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_model_is_refused_with_a_reason(index, name):
    client, models = index
    assert models[name].state == "UNAVAILABLE"
    pytest.importorskip("re")
    import re

    assert re.search(BAD[name][1], models[name].reason), models[name].reason
    assert not client.is_model_ready(name)
    with pytest.raises(espalier.InferenceError) as error:
        client.infer(name, {"x": np.zeros((1, 4), np.float32)})
    assert error.value.code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)
    assert error.value.message


def test_instances_with_threads_of_their_own_answer_like_those_that_share(repository):
    """One thread each on a server of one, and as many as there are: both planned for just that."""
    images = np.random.default_rng(1).random((64, 784), np.float32)
    cpus = len(os.sched_getaffinity(0))
    models = {"shared": {"1": GOOD}}
    for threads in {1, cpus}:
        config = (
            "max_batch_size: 4 instance_group { count: 2 kind: KIND_CPU }"
            f' parameters {{ key: "threads" value {{ string_value: "{threads}" }} }}'
        )
        models[f"own{threads}"] = {"1": GOOD, "config.pbtxt": config}
    with (
        harness.Espalierd(repository(**models), "--threads=1", "--device=cpu") as server,
        espalier.Client(server.url) as client,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        expected = client.infer("shared", images).output
        for threads in {1, cpus}:
            name = f"own{threads}"
            device = client.model_config(name).parameters["device"].string_value
            assert device.endswith(f", {threads} threads")
            futures = [pool.submit(client.infer, name, images[i : i + 1]) for i in range(64)]
            answers = np.concatenate([future.result().output for future in futures])
            np.testing.assert_allclose(answers, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_bad_config_is_refused_with_a_reason(index, name):
    _, models = index
    assert models[f"config_{name}"].state == "UNAVAILABLE"
    assert BAD_CONFIGS[name][1] in models[f"config_{name}"].reason
    assert f"config_{name}/config.pbtxt" in models[f"config_{name}"].reason


def test_the_spoiled_models_come_from_a_good_one(repository):
    with (
        harness.Espalierd(repository(small={"1": perceptron()})) as server,
        espalier.Client(server.url) as client,
    ):
        np.testing.assert_array_equal(
            client.infer("small", np.ones((2, 4), np.float32)).output,
            np.full((2, 3), 4, np.float32),
        )


def test_external_data_inside_the_folder_is_read(repository):
    models = repository(split={"1": perceptron(external("weights.bin"))})
    (models / "split/1/weights.bin").write_bytes(np.full((3, 4), 2, np.float32).tobytes())
    with harness.Espalierd(models) as server, espalier.Client(server.url) as client:
        np.testing.assert_array_equal(
            client.infer("split", np.ones((1, 4), np.float32)).output,
            np.full((1, 3), 8, np.float32),
        )


def test_a_link_out_of_the_repository_is_not_followed_as_external_data(repository, tmp_path):
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(48))
    models = repository(linked={"1": perceptron(external("weights.bin"))}, good={"1": GOOD})
    (models / "linked/1/weights.bin").symlink_to(secret)
    with harness.Espalierd(models) as server, espalier.Client(server.url) as client:
        state = {model.name: model for model in client.models()}
        assert state["good"].ready
        assert not state["linked"].ready and "weights.bin" in state["linked"].reason


def test_versions_follow_the_policy(repository):
    files = {"1": perceptron(), "3": perceptron(), "10": perceptron(), "notes.txt": ""}
    every = {**files, "config.pbtxt": "version_policy { all {} }"}
    some = {**files, "config.pbtxt": "version_policy { specific { versions: [1, 3] } }"}
    with harness.Espalierd(repository(latest=files, every=every, some=some)) as server:
        with espalier.Client(server.url) as client:
            ready = {(model.name, model.version) for model in client.models(ready_only=True)}
            assert ready == {
                ("latest", "10"),
                ("every", "1"),
                ("every", "3"),
                ("every", "10"),
                ("some", "1"),
                ("some", "3"),
            }
            x = np.zeros((1, 4), np.float32)
            assert client.infer("every", x).version == "10"
            assert client.infer("every", x, version="3").version == "3"
            assert client.infer("some", x).version == "3"


def test_the_repository_is_never_written(repository):
    models = repository(good={"1": GOOD}, bad={"1": b"x"})
    before = sorted((path, path.stat().st_mtime_ns) for path in models.rglob("*"))
    with harness.Espalierd(models) as server, espalier.Client(server.url) as client:
        client.infer("good", np.zeros((1, 784), np.float32))
    assert sorted((path, path.stat().st_mtime_ns) for path in models.rglob("*")) == before
