"""The command line tool: against the running server, and offline on the shipped models."""

from __future__ import annotations

import json

import espalier
import harness
import numpy as np
import pytest

IMAGES = "tests/data/mnist/t10k-images-idx3-ubyte.gz"
LABELS = "tests/data/mnist/t10k-labels-idx1-ubyte.gz"


def url(server) -> str:
    return f"--url={server.url}"


def test_models(server):
    table = harness.espalier("models", url(server)).stdout
    for name in harness.SHIPPED:
        assert name in table
    models = {
        model["model"]: model
        for model in json.loads(harness.espalier("models", url(server), "--json").stdout)
    }
    assert models["mnist_dense"]["layouts"].startswith("dense")
    assert models["mnist_diagonal"]["sparsity"] == pytest.approx(0.9, abs=0.02)
    assert models["mnist_unstructured"]["sparsity"] == pytest.approx(0.95, abs=0.02)
    for model in models.values():
        assert model["state"] == "READY" and model["dense_weight_bytes"] > 2_500_000


def test_models_gives_reasons(repository):
    with harness.Espalierd(repository(bad={"1": b"x"})) as server:
        assert "bad version 1: " in harness.espalier("models", url(server)).stdout


def test_infer_reads_npy_and_writes_npy(server, digits, tmp_path):
    np.save(tmp_path / "in.npy", digits.images[:5])
    harness.espalier(
        "infer",
        "mnist_dense",
        url(server),
        f"--input=input={tmp_path}/in.npy",
        f"--output={tmp_path}/out.npy",
    )
    with espalier.Client(server.url) as client:
        expected = client.infer("mnist_dense", digits.images[:5]).output
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)


def test_infer_prints_json_that_holds_every_value(server, digits, tmp_path):
    np.save(tmp_path / "in.npy", digits.images[:2])
    done = harness.espalier(
        "infer", "mnist_dense", url(server), "--input", f"{tmp_path}/in.npy", "--json"
    )
    output = json.loads(done.stdout)["outputs"][0]
    assert output["shape"] == [2, 10] and len(output["data"]) == 20
    with espalier.Client(server.url) as client:
        expected = client.infer("mnist_dense", digits.images[:2]).output
    np.testing.assert_array_equal(np.float32(output["data"]).reshape(2, 10), expected)


def test_infer_classifies_images(server, digits):
    done = harness.espalier(
        "infer", "mnist_diagonal16", url(server), "--input", IMAGES, "--limit=20", "--top=1"
    )
    answers = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("  ")]
    assert np.sum(answers == digits.labels[:20]) >= 18


def test_evaluate_agrees_with_the_python_client(server, digits):
    done = harness.espalier(
        "evaluate",
        "mnist_dense",
        "mnist_block16",
        url(server),
        "--images",
        IMAGES,
        "--labels",
        LABELS,
        "--limit=500",
        "--json",
    )
    evaluations = {row["model"]: row for row in json.loads(done.stdout)}
    with espalier.Client(server.url) as client:
        for name, row in evaluations.items():
            right = client.infer(name, digits.images[:250]).output.argmax(1) == digits.labels[:250]
            more = (
                client.infer(name, digits.images[250:500]).output.argmax(1)
                == digits.labels[250:500]
            )
            assert row["correct"] == right.sum() + more.sum()
            assert 0 < row["p50_us"] <= row["p99_us"]
            assert row["dense_weight_bytes"] > 0


def test_evaluate_prints_a_table(server):
    done = harness.espalier(
        "evaluate",
        *harness.SHIPPED,
        url(server),
        "--images",
        IMAGES,
        "--labels",
        LABELS,
        "--batch=100",
    )
    assert all(name in done.stdout for name in harness.SHIPPED)
    assert done.stdout.count(" of 2.6 MiB") == len(harness.SHIPPED)


def test_failures_exit_with_one_and_wrong_usage_with_two(server):
    unknown = harness.espalier("infer", "nothing", url(server), "--input=x", check=False)
    assert unknown.returncode == 1 and "NOT_FOUND" in unknown.stderr and unknown.stdout == ""
    nobody = harness.espalier("models", "--url=127.0.0.1:1", check=False)
    assert nobody.returncode == 1 and "no server at 127.0.0.1:1" in nobody.stderr
    for wrong in (["models", "--bogus"], ["infer"], ["nonsense"], []):
        assert harness.espalier(*wrong, check=False).returncode == 2


def test_inspect_finds_the_structures_that_were_trained():
    found = {}
    for name in harness.SHIPPED:
        report = json.loads(
            harness.espalier("inspect", f"tests/data/models/{name}", "--json").stdout
        )
        found[name] = {tensor["name"]: tensor["found"] for tensor in report["tensors"]}
        assert len(found[name]) == 3
    assert set(found["mnist_dense"].values()) == {"dense"}
    assert "diagonal(1)" in found["mnist_diagonal"].values()
    assert "diagonal(16)" in found["mnist_diagonal16"].values()
    assert "block_csr(16)" in found["mnist_block16"].values()
    assert "scattered" in found["mnist_unstructured"].values()
    assert "512" in harness.espalier("inspect", "tests/data/models/mnist_dense/1/model.onnx").stdout


def test_plan_shows_every_layer_and_only_the_batches_asked_for():
    done = harness.espalier(
        "plan", "tests/data/models/mnist_diagonal16", "--batch=1,8,64", "--json"
    )
    plan = json.loads(done.stdout)
    assert len(plan["layers"]) == 3
    for layer in plan["layers"]:
        assert [bucket["batch"] for bucket in layer["buckets"]] == [1, 8, 64]
    table = harness.espalier(
        "plan",
        "tests/data/models/mnist_diagonal16",
        "--deterministic",
        "--weight_memory=smallest",
        "--threads=1",
    ).stdout
    assert "diagonal(16)" in table
    wrong = harness.espalier(
        "plan", "tests/data/models/mnist_dense", "--weight_memory=tiny", check=False
    )
    assert wrong.returncode != 0 and "smallest, balanced, fastest" in wrong.stderr


def test_offline_commands_refuse_bad_files(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"nonsense")
    for command in ("inspect", "plan"):
        done = harness.espalier(command, str(tmp_path / "model.onnx"), check=False)
        assert done.returncode == 1 and "model.onnx" in done.stderr
        assert (
            "does not exist"
            in harness.espalier(command, str(tmp_path / "nowhere"), check=False).stderr
        )
        assert (
            "directory without versions"
            in harness.espalier(command, str(tmp_path), check=False).stderr
        )
