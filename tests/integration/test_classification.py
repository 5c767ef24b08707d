"""The classification extension, through tritonclient."""

from __future__ import annotations

import harness
import numpy as np
import pytest
import tritonclient.grpc as triton

NAME = "mnist_dense"
LABELS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight"]  # none for nine
CONFIG = """
max_batch_size: 64
output { name: "logits" data_type: TYPE_FP32 dims: 10 label_filename: "labels/digits.txt" }
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    content = harness.model_path(NAME).read_bytes()
    for name in ("labelled", "plain", "lost"):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1/model.onnx").write_bytes(content)
    (root / "labelled/config.pbtxt").write_text(CONFIG)
    (root / "labelled/labels").mkdir()
    (root / "labelled/labels/digits.txt").write_text("\n".join(LABELS) + "\n")
    (root / "lost/config.pbtxt").write_text(CONFIG)
    with harness.Espalierd(root) as server:
        with triton.InferenceServerClient(server.url) as connected:
            yield connected


def classes(client, model: str, images: np.ndarray, count: int) -> np.ndarray:
    tensor = triton.InferInput("input", list(images.shape), "FP32")
    tensor.set_data_from_numpy(images)
    output = triton.InferRequestedOutput("logits", class_count=count)
    result = client.infer(model, [tensor], outputs=[output])
    assert result.get_output("logits").datatype == "BYTES"
    return result.as_numpy("logits")


def expected(client, model: str, images: np.ndarray, count: int) -> list[list[tuple]]:
    tensor = triton.InferInput("input", list(images.shape), "FP32")
    tensor.set_data_from_numpy(images)
    logits = client.infer(model, [tensor]).as_numpy("logits")
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    return [[(i, row[i]) for i in best] for best, row in zip(order, logits)]


@pytest.mark.parametrize("count", [1, 3, 10, 1000])
@pytest.mark.parametrize("model", ["labelled", "plain"])
def test_the_best_classes_of_every_item(client, digits, model, count):
    images = digits.images[:20]
    got = classes(client, model, images, count)
    assert got.shape == (20, min(count, 10))
    for row, best in zip(got, expected(client, model, images, count)):
        for element, (index, value) in zip(row, best):
            parts = element.decode().split(":")
            assert parts[1] == str(index)
            assert abs(float(parts[0]) - value) < 1e-4 and len(parts[0].split(".")[1]) == 6
            label = LABELS[index : index + 1] if model == "labelled" else []
            assert parts[2:] == label


def test_the_config_shows_where_the_labels_are(client):
    config = client.get_model_config("labelled").config
    assert config.output[0].label_filename == "labels/digits.txt"


def test_a_model_whose_labels_are_missing_is_not_loaded(client):
    index = client.get_model_repository_index()
    entry = next(model for model in index.models if model.name == "lost")
    assert entry.state == "UNAVAILABLE" and "labels/digits.txt" in entry.reason
